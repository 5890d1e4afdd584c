"""Whole models in displaced steps against the definition, which uses nothing of the sampler.

For every band the whole model runs on the whole latents, and whatever sees beyond a row is given an image in which
the own band is of now and each other one is what its owner had there one step ago. Of the prediction, the band's
own rows count.
"""

import contextlib
import copy
import itertools

import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch import nn

from lightning_diffpipe.sampling.distrifusion import emulate
from lightning_diffpipe.sampling.request import OneProcess
from tests.sampling.distrifusion.models import build, request_for
from tests.sampling.models import STEPS


def sees_beyond_a_row(module) -> bool:
    if isinstance(module, Attention):
        is_joint = getattr(module, "add_k_proj", None) is not None
        return is_joint or not module.is_cross_attention
    if isinstance(module, nn.Conv2d):
        return module.kernel_size != (1, 1)
    return isinstance(module, nn.GroupNorm)


@contextlib.contextmanager
def inputs_mixed(model, own, before, now):
    """Swaps rows of inputs for those of one step ago.

    Args:
        model: The first layer of which, every rank having all latents, is left alone.
        own: First and last row of the own band but one, out of how many; None leaves everything as it is.
        before: Inputs of one step ago by call, each row as its owner had it.
        now: Gets the own rows of this step.
    """
    calls = itertools.count()

    def swap(module, args, kwargs):
        whole, call = args[0] if args else kwargs["hidden_states"], next(calls)
        now.setdefault(call, whole.clone())
        if own is None:
            return None
        start, stop, num_rows = own
        start, stop = (whole.shape[-2] * row // num_rows for row in (start, stop))
        mixed = before[call].clone()
        for target in (mixed, now[call]):
            target[..., start:stop, :] = whole[..., start:stop, :]
        return ((mixed, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": mixed})

    first = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
    chosen = [m for m in model.modules() if m is not first and sees_beyond_a_row(m)]
    hooks = [module.register_forward_pre_hook(swap, with_kwargs=True) for module in chosen]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    assert len(now) == next(calls) >= len(chosen)


@torch.inference_mode()
def by_definition(request, rows, warmup_steps):
    """Final latents of bands of so many rows."""
    scheduler, x, before = copy.deepcopy(request.scheduler), request.latents, {}
    ends = list(itertools.accumulate(rows))
    for i, t in enumerate(request.timesteps):
        given = scheduler.scale_model_input(x, t) if request.scale_input else x
        now, parts = {}, []
        for start, stop in zip([0, *ends], ends, strict=False):
            own = None if i < warmup_steps else (start, stop, ends[-1])
            with inputs_mixed(request.model, own, before, now):
                parts.append(request.denoise(given, t)[..., start:stop, :])
        before = now
        x = scheduler.step(torch.cat(parts, -2), t, x).prev_sample
    return x


@pytest.mark.parametrize(
    ("name", "rows", "options"),
    [
        ("pixart", (12, 10, 10), {}),
        ("sd3", (16, 16), {}),
        ("sd", (12, 12, 8), {"group_norm": "stale"}),
        pytest.param("sd3.5", (12, 10, 10), {}, marks=pytest.mark.slow),
        pytest.param("sdxl", (16, 16), {"group_norm": "stale"}, marks=pytest.mark.slow),
    ],
)
def test_displaced_steps_are_what_the_paper_says(name, rows, options):
    request = request_for(name, build(name), num_steps=STEPS)
    wanted = by_definition(request, rows, 1)
    found, _ = emulate(request, len(rows), warmup_steps=1, verify=False, **options)
    assert (found - wanted).norm() < 1e-12 * wanted.norm()
    exact = OneProcess().sample(request)
    assert (found - exact).norm() > 1e-5 * exact.norm(), "staleness does not show"
