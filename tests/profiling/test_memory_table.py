"""The table of docs/memory.md is what is planned today."""

from pathlib import Path

import pytest

from benchmarks.memory.plans import CARDS, MODELS, TRAINED, cell
from lightning_diffpipe.modules.on_paper import ModelOnPaper

TABLE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()


@pytest.mark.table
@pytest.mark.parametrize(
    ("name", "trained"),
    [("sdxl", "adapters"), ("flux", "adapters"), ("flux", "adapters, 4 bits"), ("sd35", "all weights")],
)  # fmt: skip
def test_rows_are_planned_again(name, trained):
    start, (rank, quantization) = f"| {MODELS[name]} | {trained} | ", TRAINED[trained]
    (line,) = [line for line in TABLE.splitlines() if line.startswith(start)]
    written = line.removeprefix(start).removesuffix(" |").split(" | ")
    profile = ModelOnPaper(
        name, CARDS[0].device, lora_rank=rank, quantization=quantization
    ).profile()
    planned = [cell(profile, cards) for cards in CARDS if cards.device == CARDS[0].device]
    assert planned == written[: len(planned)]
