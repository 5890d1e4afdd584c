"""Combining moments of bands: pure arithmetic."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.sampling.distrifusion.moments import (
    Moments,
    corrected,
    normalised,
    predicted,
    stale,
)

ROWS = (2, 5, 1)
SHARES = [rows / 8 for rows in ROWS]


def image(seed: int, offset: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return offset + torch.randn(2, 6, 8, 3, generator=generator, dtype=torch.float64)


def of_bands(x: torch.Tensor) -> Moments:
    each = [Moments.of(part, 3) for part in x.split(ROWS, -2)]
    return Moments(torch.stack([m.variance for m in each]), torch.stack([m.mean for m in each]))


@given(st.integers(0, 1000), st.floats(-1e6, 1e6))
def test_moments_of_bands_combine_to_those_of_the_image(seed, offset):
    """Even where E[x^2] - E[x]^2 would have lost every digit."""
    x = image(seed, offset)
    whole, combined = Moments.of(x, 3), of_bands(x).combined(SHARES)
    assert torch.allclose(combined.variance, whole.variance, rtol=1e-8)
    assert torch.allclose(combined.mean, whole.mean, rtol=1e-12)


def test_normalised_is_group_norm():
    x = image(0)
    weight, bias = torch.randn(6).double(), torch.randn(6).double()
    found = normalised(x, 3, Moments.of(x, 3), weight, bias, 1e-5)
    assert torch.allclose(found, F.group_norm(x, 3, weight, bias, 1e-5), atol=1e-12)


def test_half_precision_is_computed_in_float32():
    x = image(0, offset=100.0).half()
    assert torch.allclose(
        Moments.of(x, 3).variance.double(), Moments.of(x.double(), 3).variance, rtol=1e-4
    )


@pytest.mark.parametrize("band", [0, 1, 2])
def test_rules_agree_when_nothing_moves(band):
    x = of_bands(image(0))
    whole = x.combined(SHARES)
    for found in (
        stale(x, x.band(band), band, SHARES),
        corrected(x, x.band(band), band, SHARES)[0],
        predicted(x, x, x.band(band), band, SHARES),
    ):
        assert torch.allclose(found.variance, whole.variance)
        assert torch.allclose(found.mean, whole.mean)


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=3), st.floats(0.001, 1000))
def test_predicted_variances_are_positive_and_finite(seeds, scale):
    earlier, before, now = (of_bands(image(seed)) for seed in seeds)
    now = Moments(now.variance * scale, now.mean * scale)
    found = predicted(before, earlier, now.band(0), 0, SHARES)
    assert bool((found.variance > 0).all())
    assert bool(found.mean.isfinite().all())


def test_predicted_follows_a_change_that_all_bands_share():
    """Where "corrected" is right, "predicted" is right as well: one shift of all bands, then a larger one."""
    earlier = of_bands(image(0))
    before = Moments(earlier.variance, earlier.mean + 0.5)
    now = Moments(earlier.variance, earlier.mean + 3.0)
    found = predicted(before, earlier, now.band(1), 1, SHARES)
    assert torch.allclose(found.mean, now.combined(SHARES).mean)


def test_predicted_follows_bands_that_move_apart_steadily():
    """Where "corrected" is wrong, because bands have changes of their own."""
    earlier = of_bands(image(0))
    change = torch.tensor([1.0, -2.0, 0.5]).double()[:, None, None]
    before = Moments(earlier.variance, earlier.mean + change)
    now = Moments(earlier.variance, earlier.mean + 2 * change)
    wanted = now.combined(SHARES).mean
    assert torch.allclose(predicted(before, earlier, now.band(1), 1, SHARES).mean, wanted)
    assert (corrected(before, now.band(1), 1, SHARES)[0].mean - wanted).abs().min() > 1


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
    bands = [Moments.of(part, 3).packed(torch.float32) for part in image(0).float().split(ROWS, -2)]
    earlier, mine = Moments.unpacked(bands), image(1).float().split(ROWS, -2)[0].contiguous()
    last = Moments.unpacked(bands)
    predicted(last, earlier, last.band(0), 0, SHARES)  # as in the step before
    with Operators() as operators:
        now = Moments.of(mine, 3)
        now.packed(torch.float32)
        before = Moments.unpacked(bands)
        if rule == "predicted":
            whole = predicted(before, last, now, 0, SHARES)
        else:
            whole, _ = corrected(before, now, 0, SHARES)
        normalised(mine, 3, whole, weight, bias, 1e-5)
    return operators.counted


@pytest.mark.parametrize(("rule", "most"), [("predicted", 41), ("corrected", 30)])
def test_a_displaced_group_norm_issues_few_operators(rule, most):
    """History: 82 and 47, each of them a launch on a GPU."""
    assert operators_of(rule).total() <= most


def test_predicted_without_history_takes_changes_to_be_shared():
    before = of_bands(image(0))
    now = Moments(before.variance * 1.1, before.mean + 0.3)
    found, wanted = predicted(before, None, now.band(1), 1, SHARES), now.combined(SHARES)
    assert torch.allclose(found.mean, wanted.mean)
    assert torch.allclose(found.variance, wanted.variance)
