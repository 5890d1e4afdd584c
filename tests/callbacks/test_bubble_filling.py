"""Options of BubbleFilling; what it does is in tests/distributed/test_filling.py."""

import pytest

from lightning_diffpipe.callbacks.bubble_filling import BubbleFilling
from lightning_diffpipe.errors import ConfigurationError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "both"}, "mode must be one of None, opportunistic, planned; got 'both'"),
        ({"lookahead_batches": 0}, "lookahead_batches must be a whole number >= 1 and <= 2; got 0"),
        ({"lookahead_batches": 3}, "lookahead_batches must be a whole number >= 1 and <= 2; got 3"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        BubbleFilling(**options)
