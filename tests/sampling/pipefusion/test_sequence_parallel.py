"""Sequence parallelism computes what one process computes, and sends what the formulas say."""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers import DDPMScheduler
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from lightning_diffpipe.errors import ConfigurationError, LayoutError
from lightning_diffpipe.sampling.pipefusion import PipeFusion, SequenceParallel
from lightning_diffpipe.sampling.pipefusion.sequence_attention import (
    SEQUENCE_MODES,
    attention_part,
    merged,
)
from lightning_diffpipe.sampling.request import OneProcess
from tests.sampling.models import MODELS, build, normal, pixart, request_for, sample_plainly
from tests.sampling.ranks_in_threads import sample_together
from tests.sampling.traffic import sequence_bytes

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
