"""The table of docs/memory.md is what is planned today."""

from pathlib import Path

import pytest

from benchmarks.memory.plans import CARDS, MODELS, TRAINED, cell
from lightning_diffpipe.modules.on_paper import ModelOnPaper

TABLE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()


def test_every_model_is_in_the_table():
    assert all(f"\n| {title} |" in TABLE for title in MODELS.values())


@pytest.mark.table
@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("sdxl", "adapters"), ("flux", "adapters"), ("flux", "adapters, 4 bits"), ("sd35", "adapters"),
        ("sd35", "all weights"), ("flux2_klein", "adapters"),
    ],
)  # fmt: skip
def test_rows_are_planned_again(name, trained):
    start, (rank, quantization) = f"| {MODELS[name]} | {trained} | ", TRAINED[trained]
    (line,) = [line for line in TABLE.splitlines() if line.startswith(start)]
    written = line.removeprefix(start).removesuffix(" |").split(" | ")
    cards = [each for each in CARDS if each.device == CARDS[0].device]
    model = ModelOnPaper(name, CARDS[0].device, lora_rank=rank, quantization=quantization)
    profile = model.profile()
    assert [cell(profile, each) for each in cards] == written[: len(cards)]
