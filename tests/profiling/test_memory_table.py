"""The table of docs/memory.md is what is planned today."""

from pathlib import Path

import pytest

from benchmarks.memory.plans import CARDS, MODELS, TRAINED, cell
from lightning_diffpipe.errors import PlanError
from lightning_diffpipe.modules.on_paper import ModelOnPaper
from lightning_diffpipe.planning import search

TABLE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TABLE.splitlines()
    if line.startswith(tuple(f"| {title} |" for title in MODELS.values()))
]
NAMES = {title: name for name, title in MODELS.items()}
CELLS = [
    pytest.param(title, trained, device, cells, id=f"{NAMES[title]}, {trained}, {device}")
    for title, trained, *written in ROWS
    for device in dict.fromkeys(cards.device for cards in CARDS)
    if (
        cells := {
            x: each
            for x, each in zip(CARDS, written, strict=True)
            if x.device == device and each != "-"
        }
    )
]


def test_every_model_is_in_the_table():
    assert {title for title, *_ in ROWS} == NAMES.keys()


@pytest.mark.table
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("title", "trained", "device", "cells"), CELLS)
def test_cells_are_planned_again(title, trained, device, cells, monkeypatch):
    rank, quantization = TRAINED[trained]
    model = ModelOnPaper(NAMES[title], device, lora_rank=rank, quantization=quantization)
    profile = model.profile()
    weights = sum(layer.parameter_bytes for layer in (*profile.layers, *profile.frozen_layers))
    if "frames" in title or weights > 50e9:  # what would fit is searched for minutes
        monkeypatch.setattr(search, "nothing_fits", lambda *_: PlanError("too many; "))
        cells = {
            cards: "no: " if each.startswith("no: ") else each for cards, each in cells.items()
        }
    assert {cards: cell(profile, cards) for cards in cells} == cells
