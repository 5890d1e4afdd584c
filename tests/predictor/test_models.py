"""The table of denoisers in `docs/sampling_models.md` says what happens: some rows of it, sampled again."""

import pytest

from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.errors import LayoutError
from lightning_diffpipe.sampling.pipefusion import SequenceParallel
from tests.predictor.write_models import PATH, request_of, row
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


def test_text_that_does_not_attend_itself_is_refused_by_ulysses_and_the_ring_is_named():
    """History: heads were sent as if text had queries, and ended in an error of torch."""
    requests = [request_of(CASES["PRXTransformer2DModel"]) for _ in range(2)]

    def rank(links):
        return SequenceParallel(requests[links.rank].model, links, mode="ulysses").sample(
            requests[links.rank]
        )

    with pytest.raises(
        LayoutError, match=r"attends from .* which Ulysses does not divide; use ring"
    ):
        LoopbackNetwork(2).run(rank)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_the_table(name):
    assert row(CASES[name]) in PATH.read_text().splitlines()
