"""Attention to a part of the keys never holds all scores, whatever computes it."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.sampling.pipefusion import sequence_attention
from lightning_diffpipe.sampling.pipefusion.sequence_attention import (
    attention_part,
    merged,
    refuse_without_normaliser,
)
from lightning_diffpipe.sampling.tracing.attention import Kernel
from tests.sampling.models import normal

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
