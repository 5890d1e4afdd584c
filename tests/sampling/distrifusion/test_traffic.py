"""Bytes and messages counted on the wire equal the formulas, as integers, kind by kind, rank by rank."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from lightning_diffpipe.planning.sampling.distrifusion import BandOperator, DistriFusionPlan
from lightning_diffpipe.sampling.distrifusion import emulate
from tests.sampling.distrifusion.models import build, request_for

STEPS, ROWS, E = 4, 32, 8  # float64


def operators_of(model: nn.Module, run) -> tuple[BandOperator, ...]:
    """What sees beyond a band, read off the modules of a plain forward: nothing of the sampler is used."""
    found: list[BandOperator] = []

    def convolution(module, args, out):
        b, c, h, w = args[0].shape
        k, s, p = module.kernel_size[0], module.stride[0], module.padding[0]
        if (h == ROWS and c == model.config.in_channels) or k == s:
            return  # the first one reads the whole latents; patches read no neighbour
        if p == 0:  # one row and one column of padding below and to the right came before it
            found.append(BandOperator.convolution(b, c, w - 1, 0, 1, E))
        else:
            found.append(BandOperator.convolution(b, c, w, p, k - 1 - p - s + 1, E))

    def norm(module, args, out):
        found.append(BandOperator.norm(len(args[0]), module.num_groups, E))

    def attention(module, args, kwargs, out):
        x = args[0] if args else kwargs["hidden_states"]
        text = kwargs.get("encoder_hidden_states")
        if text is None or getattr(module, "add_k_proj", None) is not None:
            tokens = x.shape[1] if x.ndim == 3 else x.shape[-2:].numel()
            found.append(BandOperator.attention(len(x), tokens, module.inner_dim, E))

    hooks = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            hooks.append(module.register_forward_hook(convolution))
        elif isinstance(module, nn.GroupNorm):
            hooks.append(module.register_forward_hook(norm))
        elif hasattr(module, "set_processor"):
            hooks.append(module.register_forward_hook(attention, with_kwargs=True))
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return tuple(found)


MODES = [
    {"mode": "synchronous"},
    {"warmup_steps": 1},
    {"warmup_steps": 0},
    {"warmup_steps": 3, "calls_per_message": 2},
    {"warmup_steps": 1, "group_norm": "separate"},
    {"warmup_steps": 2, "group_norm": "synchronous", "calls_per_message": 1},
    {"mode": "naive", "warmup_steps": 2},
]


@pytest.mark.parametrize(
    ("name", "rows", "modes"),
    [
        ("sd", (12, 12, 8), [MODES[3]]),
        ("pixart", (12, 10, 10), MODES[:3]),
        pytest.param("sd", (12, 12, 8), MODES[:3] + MODES[4:], marks=pytest.mark.slow),
        pytest.param("pixart", (12, 10, 10), MODES[3:], marks=pytest.mark.slow),
        pytest.param("unet2d, padding 0", (12, 12, 8), MODES, marks=pytest.mark.slow),
        pytest.param("sdxl", (12, 12, 8), MODES, marks=pytest.mark.slow),
        pytest.param("sd3", (12, 10, 10), MODES, marks=pytest.mark.slow),
    ],
)
def test_counted_bytes_and_messages_equal_the_formulas(name, rows, modes):
    tiny = build(name)
    request = request_for(name, tiny, num_steps=STEPS)
    outputs = []
    hook = tiny.model.register_forward_hook(lambda m, args, out: outputs.append(out[0]))
    calls = operators_of(tiny.model, lambda: request.denoise(tiny.latents, request.timesteps[0]))
    hook.remove()
    assert calls
    for options in modes:
        _, samplers = emulate(request, 3, verify=options is MODES[1], **options)
        plan = DistriFusionPlan(
            calls, outputs[0].numel() * E, rows, STEPS,
            **{"warmup_steps": 0, **options},
        )  # fmt: skip
        for rank, sampler in enumerate(samplers):
            traffic = sampler.statistics.traffic
            assert dict(traffic.bytes_sent) == dict(plan.bytes_sent(rank)), (options, rank)
            assert dict(traffic.messages_sent) == dict(plan.messages_sent(rank)), (options, rank)
        received = sum((s.statistics.traffic.bytes_received for s in samplers), start=Counter())
        sent = sum((s.statistics.traffic.bytes_sent for s in samplers), start=Counter())
        assert received == sent, "something was sent that nobody read"


def test_messages_shrink_with_the_range():
    """895 messages per step of SDXL on eight ranks, one for each operator and peer, were grouped."""
    norms = tuple(BandOperator.norm(2, 32) for _ in range(52))
    attentions = tuple(BandOperator.attention(2, 1024, 1280, 2) for _ in range(70))
    halos = tuple(BandOperator.convolution(2, 320, 128, 1, 1, 2) for _ in range(50))

    def per_step(calls_per_message):
        plan = [
            DistriFusionPlan(
                norms + attentions + halos, 0, (16,) * 8, steps, 1,
                calls_per_message=calls_per_message,
            ).messages_sent(3)
            for steps in (11, 10)
        ]  # fmt: skip
        return sum((plan[0] - plan[1]).values()) - 7  # the prediction

    assert per_step(1) == 7 * 122 + 2 * 50
    assert per_step(16) == 7 * (4 + 5) + 2 * 4


def test_published_volume_of_sdxl():
    """Elements received by one of 8 ranks per step at 1024 px and batch 2 (DistriFusion, table 4: 0.42 G)."""
    calls = [BandOperator.attention(2, 4096, 640, 1)] * 10
    calls += [BandOperator.attention(2, 1024, 1280, 1)] * 60
    plan = DistriFusionPlan(tuple(calls), 2 * 4 * 128 * 128, (16,) * 8, 2, 1)
    sent = plan.bytes_sent(3)
    assert sent["key_value"] == 367_001_600
    assert sent["prediction"] == 2 * 114_688
