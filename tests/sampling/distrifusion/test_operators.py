"""Each rule against a reference written by hand: the own band is new, every other is one step old."""

import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch import nn

from lightning_diffpipe.sampling.distrifusion import emulate
from lightning_diffpipe.sampling.request import Request
from tests.sampling.distrifusion.models import Inside, Script, last_prediction, normal

FIRST, CHANGE = normal(2, 8, 16, 6, seed=1), normal(2, 8, 16, 6, seed=2)
LATENTS = [FIRST, FIRST + 0.1 * CHANGE, FIRST + 0.3 * CHANGE]
NUM_BANDS = 3


def bands(stride=1, num_rows=16):
    """Rows of three bands in units of the stride: 6, 5, 5 or 6, 6, 4."""
    units = num_rows // stride
    sizes = [stride * (units // 3 + (band < units % 3)) for band in range(3)]
    return [(sum(sizes[:band]), size) for band, size in enumerate(sizes)]


class SpatialAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(8, heads=2, dim_head=4)

    def forward(self, x):
        return self.attention(x)


OPERATORS = {
    "3 x 3": (lambda: nn.Conv2d(8, 8, 3, padding=1), 1),
    "dilated": (lambda: nn.Conv2d(8, 8, 3, padding=2, dilation=2), 1),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), 1),
    "stride 2": (lambda: nn.Conv2d(8, 8, 3, 2, 1), 2),
    "4 x 4, stride 2": (lambda: nn.Conv2d(8, 8, 4, 2, 1), 2),
    "same": (lambda: nn.Conv2d(8, 8, 3, padding="same"), 1),
    "asymmetric padding": (
        lambda: nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(8, 8, 3, 2)),
        2,
    ),
    "patches": (lambda: nn.Conv2d(8, 8, 2, 2), 2),
    "attention": (SpatialAttention, 1),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_other_bands_are_one_step_old(name):
    torch.manual_seed(0)
    make, stride = OPERATORS[name]
    operator = make().double().requires_grad_(False)
    found = last_prediction(Inside(operator), LATENTS, NUM_BANDS, warmup_steps=1, verify=False)
    parts = []
    for start, size in bands(stride):
        x = LATENTS[1].clone()
        x[..., start : start + size, :] = LATENTS[2][..., start : start + size, :]
        parts.append(operator(x)[..., start // stride : (start + size) // stride, :])
    assert (found - torch.cat(parts, -2)).abs().max() < 1e-12
    if name != "patches":
        assert (found - operator(LATENTS[2])).abs().max() > 1e-3, "staleness does not show"


def moments(x):
    flat = x.reshape(2, 2, -1)
    return torch.stack([flat.mean(-1), flat.square().mean(-1)])


@pytest.mark.parametrize("rule", ["stale", "corrected", "separate", "synchronous"])
def test_group_norm_rules_of_the_original(rule):
    """As the paper writes them: with E[x] and E[x^2]."""
    norm = nn.GroupNorm(2, 8).double().requires_grad_(False)
    norm.weight.copy_(normal(8, seed=5))
    norm.bias.copy_(normal(8, seed=6))
    found = last_prediction(
        Inside(norm), LATENTS, NUM_BANDS, warmup_steps=1, group_norm=rule, verify=False
    )
    parts, old = [], moments(LATENTS[1])
    for start, size in bands():
        before, now = (x[..., start : start + size, :] for x in LATENTS[1:])
        change = moments(now) - moments(before)
        mean, square = {
            "corrected": old + change,
            "stale": old + change * size / 16,
            "separate": moments(now),
            "synchronous": moments(LATENTS[2]),
        }[rule]
        scale = (square - mean**2 + norm.eps).rsqrt()
        normed = (now.reshape(2, 2, -1) - mean[..., None]) * scale[..., None]
        parts.append(
            normed.reshape(now.shape) * norm.weight[:, None, None] + norm.bias[:, None, None]
        )
    assert (found - torch.cat(parts, -2)).abs().max() < 1e-10


def test_predicted_norm_is_exact_for_bands_that_move_steadily_together():
    """Means that all bands move by the same amount in every step are predicted without an error."""
    latents = [FIRST + step for step in range(4)]
    norm = nn.GroupNorm(2, 8).double()
    options = {"warmup_steps": 2, "verify": False}
    found = last_prediction(Inside(norm), latents, NUM_BANDS, group_norm="predicted", **options)
    stale = last_prediction(Inside(norm), latents, NUM_BANDS, group_norm="stale", **options)
    assert (found - norm(latents[-1])).abs().max() < 1e-10
    assert (stale - norm(latents[-1])).abs().max() > 0.1


def test_negative_variances_fall_back_to_the_own_one_and_are_counted():
    """A band that grows quiet subtracts more than the image has; the original, too, takes its own variance."""
    x = normal(2, 8, 12, 6)
    loud = x.clone()
    loud[..., :4, :] *= 5
    latents = [loud, 0.01 * x]
    model = Inside(nn.GroupNorm(2, 8).double())
    found = last_prediction(model, latents, 3, warmup_steps=1, group_norm="corrected", verify=False)
    before, now = (x[..., :4, :].reshape(2, 2, -1) for x in latents)
    mean = loud.reshape(2, 2, -1).mean(-1) + now.mean(-1) - before.mean(-1)
    own = (now - mean[..., None]) * (now.var(-1, correction=0) + 1e-5).rsqrt()[..., None]
    assert (found[..., :4, :].reshape(2, 2, -1) - own).abs().max() < 1e-10
    request = Request(
        model, lambda x, t: model(x), Script(latents), torch.full((2,), 500), latents[0],
        scale_input=False,
    )  # fmt: skip
    _, samplers = emulate(request, 3, warmup_steps=1, group_norm="corrected", verify=False)
    assert samplers[0].num_fallbacks == 4, "two samples, two groups"


def test_without_warmup_the_first_step_sees_nothing_and_the_second_everything():
    operator = nn.Conv2d(8, 8, 3, padding=1).double().requires_grad_(False)
    alone = last_prediction(Inside(operator), LATENTS[:1], 2, warmup_steps=0, verify=False)
    parts = [operator(part) for part in LATENTS[0].split(8, -2)]
    assert torch.equal(alone, torch.cat(parts, -2))
    still = last_prediction(Inside(operator), [FIRST, FIRST], 2, warmup_steps=0, verify=False)
    assert (still - operator(FIRST)).abs().max() < 1e-12


def test_what_the_model_overwrites_has_been_copied():
    """Halos are sent at the end of a range; a model may have written into its activations by then."""

    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 3, padding=1)

        def forward(self, x):
            x = x * 1.0
            out = self.conv(x)
            x.zero_()
            return out

    model = Overwrites().double().requires_grad_(False)
    latents = [normal(1, 1, 8, 6)] * 3
    found = last_prediction(model, latents, 2, warmup_steps=1, verify=False)
    assert (found - model(latents[0])).abs().max() < 1e-12


def test_a_model_may_flatten_what_has_no_rows():
    """History: the rule for grids took the -1 of `reshape(-1)` for a list of sizes."""

    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(normal(1, 8, 1, 1, seed=3), requires_grad=False)

        def forward(self, x):
            return x * self.scale.reshape(-1)[:, None, None]

    operator = Scaling()
    found = last_prediction(Inside(operator), LATENTS, NUM_BANDS, warmup_steps=1, verify=False)
    torch.testing.assert_close(found, Inside(operator)(LATENTS[2]), rtol=1e-12, atol=1e-12)
