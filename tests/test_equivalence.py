"""A pipeline computes what one process computes, for every denoiser of diffusers that can be built.

The step of each model runs plainly, and cut at random places into stages that are emulated one after
the other, all in double precision, with NaN in everything a stage should not read. Losses and all
gradients must agree. No parameter keeps its initial zero and every block must have a gradient, so that
a closed gate cannot hide a difference.

The same facts are printed in `docs/models.md`; after a change run `python -m tests.zoo.write_table`.
"""

import pytest
import torch

from tests.zoo import CASES, in_double
from tests.zoo.measure import idle_blocks, measure, plain_gradients
from tests.zoo.write_table import PATH, facts, row

FAST = ("UNet2DModel",)
COMMON = (
    "UNet2DConditionModel", "ControlNetModel with locked U-Net", "DiTTransformer2DModel",
    "PixArtTransformer2DModel", "SD3Transformer2DModel", "FluxTransformer2DModel", "HunyuanDiT2DModel",
    "WanTransformer3DModel", "CogVideoXTransformer3DModel",
)  # fmt: skip
BUILT = [
    pytest.param(
        name,
        marks=()
        if name in FAST
        else [pytest.mark.slow, *[pytest.mark.table] * (name not in COMMON)],
    )
    for name, case in CASES.items()
    if case.reason is None
]


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT)
def test_stages_add_up_to_the_plain_step(name):
    outcome = measure(CASES[name])
    assert outcome.loss_error <= 1e-12
    assert outcome.gradient_error <= 1e-9, f"{outcome.worst} differs"
    assert outcome.idle_blocks == (), "no gradient: nothing is proved about these blocks"
    written = {facts(line) for line in PATH.read_text().splitlines()}
    assert facts(row(CASES[name], outcome)) in written, "run python -m tests.zoo.write_table"


def test_models_that_cannot_be_run_are_listed_with_the_reason():
    written = PATH.read_text().splitlines()
    for case in CASES.values():
        if case.reason is not None:
            assert row(case, None) in written, "run python -m tests.zoo.write_table"


def test_a_block_behind_a_closed_gate_is_noticed():
    with in_double():
        root, batch = CASES["FluxTransformer2DModel"].build()
        block = root.model.transformer_blocks[1]
        for gate in (block.norm1.linear, block.norm1_context.linear):
            torch.nn.init.zeros_(gate.weight)
            torch.nn.init.zeros_(gate.bias)
        _, gradients = plain_gradients(root, batch)
    assert idle_blocks(root, gradients) == ("model.transformer_blocks.1",)
