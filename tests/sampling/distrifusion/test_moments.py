"""Combining moments of bands: pure arithmetic."""

import contextlib
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.sampling.distrifusion.band_call import (
    combined,
    corrected,
    moments_of,
    normalised,
    predicted,
    stale,
)

ROWS = (2, 5, 1)
SHARES = [rows / 8 for rows in ROWS]


def image(seed: int, offset: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return offset + torch.randn(2, 6, 8, 3, generator=generator, dtype=torch.float64)


def of_bands(x: torch.Tensor) -> list[torch.Tensor]:
    return [moments_of(part, 3) for part in x.split(ROWS, -2)]


def moved(bands, means=0.0, scale=1.0):
    """Moments with other means, of one number or one for each band, and variances times a number."""
    means = torch.as_tensor(means, dtype=torch.float64).expand(len(bands))
    return [torch.stack([b[0] * scale, b[1] + m]) for b, m in zip(bands, means, strict=True)]


@given(st.integers(0, 1000), st.floats(-1e6, 1e6))
def test_moments_of_bands_combine_to_those_of_the_image(seed, offset):
    """Even where E[x^2] - E[x]^2 would have lost every digit."""
    x = image(seed, offset)
    whole, found = moments_of(x, 3), combined(of_bands(x), SHARES)
    assert torch.allclose(found[0], whole[0], rtol=1e-8)
    assert torch.allclose(found[1], whole[1], rtol=1e-12)


def test_half_precision_is_computed_in_float32():
    x = image(0, offset=100.0).half()
    found, wanted = moments_of(x, 3), moments_of(x.double(), 3)
    assert torch.allclose(found[0].double(), wanted[0], rtol=1e-4)


@pytest.mark.parametrize("band", [0, 1, 2])
def test_rules_agree_when_nothing_moves(band):
    x = of_bands(image(0))
    whole = combined(x, SHARES)
    for found in (
        stale(x, x[band], band, SHARES),
        corrected(x, x[band], band, SHARES)[0],
        predicted(x, x, x[band], band, SHARES),
    ):
        assert torch.allclose(found, whole)


@pytest.mark.parametrize("has_history", [True, False])
@given(st.lists(st.integers(0, 1000), min_size=3, max_size=3, unique=True), st.integers(0, 2))
def test_predicted_is_what_its_formula_says(has_history, seeds, band):
    """That of the table in `band_call.py`, number by number."""
    earlier, before, now = ([*map(logarithmic, of_bands(image(seed)))] for seed in seeds)
    d = now[band] - before[band]
    guessed = []
    for j in range(3):
        g, share, last, own_last = 0.0, 1.0, torch.zeros(()), torch.zeros(())
        if has_history:
            last, own_last = before[j] - earlier[j], before[band] - earlier[band]
            size = own_last.square().sum(-1, keepdim=True)
            g = ((d * own_last).sum(-1, keepdim=True) / size).clamp(0, 1.5)
            share = ((last * own_last).sum(-1, keepdim=True) / size).clamp(0, 1)
        change = g * last + share * (d - g * own_last)
        change = torch.stack([change[0].clamp(-0.7, 0.7), change[1]])
        log, mean = now[band] if j == band else before[j] + change
        guessed.append(torch.stack([log.exp(), mean]))
    raw = [of_bands(image(seed)) for seed in seeds]
    found = predicted(raw[1], raw[0] if has_history else None, raw[2][band], band, SHARES)
    assert torch.allclose(found, combined(guessed, SHARES), rtol=1e-9)


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=2), st.integers(0, 2))
def test_corrected_is_what_its_formula_says(seeds, band):
    before, now = (of_bands(image(seed, offset=1.0)) for seed in seeds)
    whole, here, mine = combined(before, SHARES), before[band], now[band]
    squares = [m[0] + m[1] ** 2 for m in (whole, mine, here)]
    mean = whole[1] + mine[1] - here[1]
    variance = squares[0] + squares[1] - squares[2] - mean**2
    found, num_negative = corrected(before, mine, band, SHARES)
    assert torch.allclose(found[1], mean)
    assert torch.allclose(found[0], torch.where(variance < 0, mine[0], variance))
    assert num_negative == (variance < 0).sum()


def logarithmic(moments):
    return torch.stack([moments[0].log(), moments[1]])


def test_predicted_of_flat_bands_is_finite():
    """Where nothing has moved, and groups have no variance."""
    flat = of_bands(torch.zeros_like(image(0)))
    assert torch.allclose(predicted(flat, flat, flat[1], 1, SHARES), combined(flat, SHARES))


def test_predicted_follows_bands_that_move_apart_steadily():
    """Where "corrected" is wrong, because bands have changes of their own."""
    earlier = of_bands(image(0))
    change = torch.tensor([1.0, -2.0, 0.5])
    before, now = moved(earlier, change), moved(earlier, 2 * change)
    wanted = combined(now, SHARES)[1]
    assert torch.allclose(predicted(before, earlier, now[1], 1, SHARES)[1], wanted)
    assert (corrected(before, now[1], 1, SHARES)[0][1] - wanted).abs().min() > 1


class Operators(TorchDispatchMode):
    """Counts operators that are no views."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counted[func.__name__] += not (func.is_view or func._schema.name.endswith("_types"))
        return func(*args, **(kwargs or {}))


def operators_of(rule):
    """Counts those of a displaced group norm, of a model in float32."""
    weight, bias = torch.randn(6), torch.randn(6)
    earlier, before = (of_bands(image(seed).float()) for seed in (0, 1))
    mine = image(2).float().split(ROWS, -2)[0].contiguous()
    for operators in (
        contextlib.nullcontext(),
        counting := Operators(),
    ):  # the first copies constants
        with operators:
            now = moments_of(mine, 3)
            if rule == "predicted":
                whole = predicted(before, earlier, now, 0, SHARES)
            else:
                whole, _ = corrected(before, now, 0, SHARES)
            normalised(mine, 3, whole, weight, bias, 1e-5)
    return counting.counted


@pytest.mark.parametrize(("rule", "most"), [("predicted", 21), ("corrected", 12)])
def test_a_displaced_group_norm_issues_few_operators(rule, most):
    """History: 82 and 47, then 41 and 30, each of them a launch on a GPU."""
    assert operators_of(rule).total() <= most
