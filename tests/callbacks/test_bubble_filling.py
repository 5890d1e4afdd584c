"""Options of BubbleFilling; what it does is in tests/distributed/test_filling.py."""

import pytest

from lightning_diffpipe.callbacks.bubble_filling import BubbleFilling
from lightning_diffpipe.errors import ConfigurationError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "both"}, "mode='both' is unknown; use 'opportunistic', 'planned' or None"),
        (
            {"lookahead_batches": 0},
            "from 1 to 2, for which plans count memory; got 0.*filling=none",
        ),
        ({"lookahead_batches": 3}, "from 1 to 2.*got 3"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        BubbleFilling(**options)
