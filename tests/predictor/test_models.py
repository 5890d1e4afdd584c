"""The table of denoisers in `docs/sampling_models.md` says what happens: some rows of it, sampled again."""

import pytest

from tests.predictor.write_models import PATH, row
from tests.zoo import CASES

NAMES = [
    "PixArtTransformer2DModel",  # yes to all
    "WanTransformer3DModel",  # a video
    "LuminaNextDiT2DModel",
    "ZImageTransformer2DModel",  # pads the image with text, once
    "HunyuanVideoTransformer3DModel token replace",  # not refused, and wrong
    "OmniGenTransformer2DModel",  # the probe admits it, attention does not
    "PRXTransformer2DModel",  # text does not attend itself, but is divided in a ring
    "UNet2DModel",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_the_table(name):
    assert row(CASES[name]) in PATH.read_text().splitlines()
