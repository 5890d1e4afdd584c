"""Attention to a part of the keys never holds all scores, whatever computes it.

Sequence parallelism computes what one process computes, and sends what the formulas say.
"""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers import DDPMScheduler
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.errors import ConfigurationError, LayoutError
from lightning_diffpipe.sampling.pipefusion import PipeFusion, SequenceParallel, sequence_attention
from lightning_diffpipe.sampling.pipefusion.sequence_attention import (
    SEQUENCE_MODES,
    attention_part,
    merged,
    refuse_without_normaliser,
)
from lightning_diffpipe.sampling.request import OneProcess
from lightning_diffpipe.sampling.tracing.attention import Kernel
from tests.sampling.models import MODELS, build, normal, pixart, request_for, sample_plainly
from tests.sampling.ranks_in_threads import sample_together
from tests.sampling.traffic import sequence_bytes

QUERIES, KEYS = 96, 160


class Seen(TorchDispatchMode):
    """Notes which operators ran, and the elements of the largest tensor that one of them returned."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return out


def masks(kind):
    if kind == "none":
        return None
    hidden = torch.rand(2, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(0)) < 0.3
    hidden[:, :, :7, :80] = True  # these queries see nothing of the first part
    if kind == "one row":
        return ~hidden[:, :, 50:51]
    return (
        ~hidden if kind == "boolean" else torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
    )


@pytest.mark.parametrize("kind", ["none", "boolean", "one row", "added"])
def test_scores_exist_for_a_few_queries_at_a_time(kind, monkeypatch):
    """History: scores of all queries and keys of a part existed three times, 39 GB in a call of a video model."""
    monkeypatch.setattr(sequence_attention, "MOST_SCORE_BYTES", 40_000)
    q, k, v = normal(2, 4, QUERIES, 8), normal(2, 2, KEYS, 8, seed=1), normal(2, 2, KEYS, 6, seed=2)
    mask, total = masks(kind), None
    with Seen() as seen:
        for rows in (slice(0, 80), slice(80, KEYS)):
            part = None if mask is None else mask[..., rows]
            total = merged(total, attention_part(q, k[:, :, rows], v[:, :, rows], part, 0.5))
    expected = scaled_dot_product_attention(q, k, v, mask, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(total[0], expected, rtol=1e-12, atol=1e-12)
    of_a_mask = 2 * QUERIES * KEYS  # given, for all heads together
    assert seen.largest <= of_a_mask < 2 * 4 * QUERIES * 80


def test_a_part_that_nobody_sees_weighs_nothing():
    q, k, v = (normal(1, 1, 16, 8, seed=seed) for seed in (1, 2, 3))
    nothing = attention_part(q, k, v, torch.zeros(1, 16, dtype=torch.bool), 0.5)
    assert not nothing[0].any()
    part = attention_part(q, k, v, None, 0.5)
    for total in (merged(nothing, part), merged(part, nothing)):
        torch.testing.assert_close(total, part)


@pytest.mark.parametrize(
    ("dtype", "width", "takes", "kernel"),
    [
        (torch.bfloat16, 128, ("flash", "efficient"), "_scaled_dot_product_flash_attention"),
        (torch.float16, 20, ("flash", "efficient"), "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, 64, ("efficient",), "_scaled_dot_product_efficient_attention"),
        (torch.float32, 20, ("efficient",), "_scaled_dot_product_efficient_attention"),
    ],
)
def test_gpus_compute_a_part_with_a_kernel(dtype, width, takes, kernel, monkeypatch):
    """With fake tensors, which check what is given to the kernels and say what they return."""
    for name in ("flash", "efficient"):
        monkeypatch.setattr(
            sequence_attention, f"can_use_{name}_attention", lambda asked, name=name: name in takes
        )
    with FakeTensorMode():
        q = torch.empty(2, QUERIES - 1, 4, width, dtype=dtype, device="cuda").transpose(1, 2)
        k, v = (torch.empty(2, 2, 4 * KEYS, width, dtype=dtype, device="cuda") for _ in range(2))
        with Seen() as seen:
            out, norm = attention_part(q, k, v, None, 0.5)
    assert out.shape == q.shape
    assert norm.shape == (*q.shape[:-1], 1)
    assert norm.dtype == torch.float32
    assert kernel in seen.names


def test_kernels_are_asked_and_blocks_take_what_they_refuse(monkeypatch):
    """Without a GPU every kernel refuses, by torch's own switches."""
    monkeypatch.setattr(sequence_attention, "_in_blocks", lambda q, k, v, mask, scale: v.shape)
    with FakeTensorMode():
        q = torch.empty(1, 2, 16, 20, dtype=torch.float16, device="cuda")
        assert attention_part(q, q, q, None, 0.5) == q.shape


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_normalisers_are_read_in_the_order_of_their_kernel(dtype, tokens_first, monkeypatch):
    """History: flash attention 3, with tokens first, was refused; weights in 8 bits ended in an error of torch."""

    def compute(query, key, value, scale, return_lse):
        out, norm = attention_part(*(x.transpose(1, 2) for x in (query, key, value)), None, scale)
        return out.transpose(1, 2), norm[..., 0].mT if tokens_first else norm[..., 0]

    def wrong(query, key, value, scale, return_lse):
        out, norm = compute(query, key, value, scale, return_lse)
        return out, norm / math.log(2)

    model, (q, k, v) = torch.nn.Linear(2, 2).to(dtype), normal(3, 2, 4, 4, 8)
    for kernel in (Kernel("flash", compute), Kernel("flash", wrong)):
        monkeypatch.setattr(sequence_attention, "kernels_of", lambda model, own=kernel: [own])
        if kernel._compute is wrong:
            with pytest.raises(ConfigurationError, match="other numbers than the logarithms"):
                refuse_without_normaliser(model, torch.device("cpu"))
            continue
        refuse_without_normaliser(model, torch.device("cpu"))
        expected = attention_part(q, k, v, None, 0.3)
        torch.testing.assert_close(attention_part(q, k, v, None, 0.3, kernel), expected)


FAST = ("lumina2",)
CASES = [
    pytest.param(name, mode, marks=() if name in FAST else pytest.mark.slow)
    for name in (*FAST, "pixart", "sd3", "flux", "qwen", "wan, frames", "hunyuandit")
    for mode in ("ulysses", "ring")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_it_is_exact(name, mode):
    tiny = build(name)
    expected = sample_plainly(request_for(name, tiny=tiny))
    # Two heads are too few for three ranks of Ulysses; a ring does not care.
    for num_ranks in (2, 3) if mode == "ring" else (2,):
        results, samplers = sample_together(
            name, tiny, num_ranks,
            lambda m, links: SequenceParallel(m, links, mode=mode, axis=tiny.axis, verify=True),
        )  # fmt: skip
        for result in results:
            torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
            assert result.is_inference()
        request = request_for(name, tiny=tiny)
        layout = samplers[0].layouts.layout_for(request)
        sent = sum((s.statistics.traffic.bytes_sent for s in samplers), Counter())
        if name != "qwen":  # makes a mask from its tokens, which is collected besides
            assert dict(sent) == sequence_bytes(samplers[0], layout, request)


@pytest.mark.slow
@pytest.mark.parametrize("infers", [True, False])
def test_a_request_decides_about_inference_mode(infers):
    tiny = build("pixart")
    request = replace(request_for("pixart", tiny=tiny), infers=infers)
    for sampler in (OneProcess(), SequenceParallel(tiny.model), PipeFusion(tiny.model)):
        found = sampler.sample(request)
        assert found.is_inference() == infers
        assert not found.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_ulysses_on_more_than_two_ranks(num_ranks, monkeypatch):
    """Four heads over three ranks, 2 + 1 + 1, and 16 rows of tokens, 6 + 5 + 5."""
    monkeypatch.setitem(
        MODELS, "four heads", lambda: pixart(num_attention_heads=4, attention_head_dim=4)
    )
    tiny = build("four heads")
    request = request_for("four heads", tiny=tiny)
    results, samplers = sample_together(
        "four heads", tiny, num_ranks, lambda m, links: SequenceParallel(m, links, verify=True)
    )
    expected = sample_plainly(request)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    sent = sum((s.statistics.traffic.bytes_sent for s in samplers), Counter())
    assert dict(sent) == sequence_bytes(
        samplers[0], samplers[0].layouts.layout_for(request), request
    )


def test_any_scheduler_will_do():
    """Every rank steps all rows, so noise may be drawn and thresholds taken."""
    tiny, scheduler = build("pixart"), DDPMScheduler(thresholding=True)
    scheduler.set_timesteps(3)

    def generator():
        return torch.Generator().manual_seed(7)

    expected = sample_plainly(request_for("pixart", scheduler, tiny=tiny, generator=generator()))
    # Each rank has a generator of its own, seeded alike; threads must not share one.
    results, _ = sample_together(
        "pixart", tiny, 2, SequenceParallel, scheduler=scheduler, make_generator=generator
    )
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


def test_shares_of_keys_in_half_precision_are_merged_to_its_rounding():
    """History: normalisers were rounded, too, on CPUs, which moved results by percents in every layer."""
    q, k, v = (normal(2, 2, 64, 32, seed=seed).bfloat16() for seed in (1, 2, 3))
    v = v + 4  # so that a wrong weight of a share shows
    total = None
    for share in range(4):
        rows = slice(16 * share, 16 * share + 16)
        total = merged(total, attention_part(q, k[:, :, rows], v[:, :, rows], None, 0.5))
    exact = scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=0.5)
    # Each share and the result are rounded once.
    torch.testing.assert_close(total[0].bfloat16().float(), exact, rtol=2**-7, atol=0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["query", "key"])
def test_overflow_before_ring_attention_is_not_hidden(where, poison, masked):
    """History: such weights became zero, and a wrong image came out. Keys that are hidden weigh zero."""
    q, k, v = (normal(1, 1, 64, 4, seed=seed) for seed in (1, 2, 3))
    mask = torch.ones(64, 64, dtype=torch.bool)
    if masked:
        mask[:32, 32:] = False  # of one share these queries see nothing
    (q if where == "query" else k)[0, 0, 40, 1] = poison
    total = None
    for rows in (slice(0, 32), slice(32, 64)):
        part = mask[:, rows] if masked else None
        total = merged(total, attention_part(q, k[:, :, rows], v[:, :, rows], part, 0.5))
    expected = (0.5 * q @ k.mT).masked_fill(~mask, -math.inf).softmax(-1) @ v
    assert expected.isnan().any()
    torch.testing.assert_close(total[0], expected, equal_nan=True)


def test_more_ranks_than_heads():
    with pytest.raises(
        ConfigurationError, match=r"at most 2 ranks, or ring attention .mode='ring'"
    ):
        sample_together("pixart", build("pixart"), 3, SequenceParallel)


def test_more_ranks_than_rows():
    tiny = build("pixart")
    small = tiny._replace(latents=tiny.latents[:, :, :2])
    with pytest.raises(ConfigurationError, match="between 1 and 1"):
        sample_together("pixart", small, 2, SequenceParallel)


class Registers(nn.Module):
    """Attention to tokens of its own, too, of which there are as many as its input has times a share."""

    def __init__(self, inner, share):
        super().__init__()
        self.inner, self.share = inner, share

    def forward(self, x, **kwargs):
        size = x.shape[1]
        registers = x.new_full((1, 1, 1), 0.5).expand(x.shape[0], size // self.share, x.shape[2])
        return self.inner(torch.cat([x, registers], 1), **kwargs)[:, :size]


@pytest.mark.parametrize("mode", SEQUENCE_MODES)
def test_a_block_that_makes_tokens_since_it_was_looked_at_is_refused_on_its_rank(mode):
    """Before anything is sent, whose size the others would not expect."""
    tiny = build("pixart")
    block = tiny.model.transformer_blocks[1]
    block.attn1 = Registers(block.attn1, share=4)
    with pytest.raises(LayoutError, match=r"attends to 60 tokens of rank ., and .* expect 48"):
        sample_together("pixart", tiny, 2, lambda m, links: SequenceParallel(m, links, mode=mode))


@pytest.mark.parametrize("mode", SEQUENCE_MODES)
def test_blocks_whose_text_would_be_divided_differently_are_refused(mode):
    """Z-Image pads the image with 8 tokens of text, and adds the prompt later: halves of 8 are not those of 40."""

    def layout(*num_text):
        blocks = [SimpleNamespace(num_text=n, attention=(), sizes=()) for n in num_text]
        return SimpleNamespace(blocks=blocks)

    SEQUENCE_MODES[mode].refuse(layout(0, 40, 40), 2)
    SEQUENCE_MODES[mode].refuse(layout(8, 40), 1)
    with pytest.raises(LayoutError, match="have 0, 8, 40 text tokens, of which a rank would own"):
        SEQUENCE_MODES[mode].refuse(layout(0, 8, 40), 2)
