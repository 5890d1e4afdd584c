"""Compiled blocks, in which ranks still answer attention.

Problem: a compiler looks up attention once, so that it cannot be answered by its name any more; and what answers it
sends messages and writes caches, which no graph can hold. Idea: to the compiler attention is one operator of known
shapes. When a graph runs, that asks who answers attention in this thread; without anybody it is torch's own. The
operator stands under attention's name at every call of a block, so that no graph has another attention.

    block    norm ── q, k, v ── lightning_diffpipe::attend ── projection ── feed-forward     a graph for each shape
                                │
                                └── the sampler's handler (`attention.py`), or torch's attention

Source: regional compilation, `compile_repeated_blocks` of diffusers; custom operators of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, library, nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.calltree import is_compiled
from lightning_diffpipe.sampling.tracing.attention import AttentionByName, KernelsAnswered

_LIBRARY = library.Library("lightning_diffpipe", "DEF")
_LIBRARY.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, str? kernel=None) -> Tensor"
)


def _attend(*args: Any, kernel: str | None = None, **kwargs: Any) -> Tensor:
    """Answers attention with a result that lies in memory as most kernels order it, tokens outside of heads."""
    by = KernelsAnswered.by_name[kernel].answered if kernel else AttentionByName.answer
    return by(*args, **kwargs).transpose(-3, -2).contiguous().transpose(-3, -2)


def _outcome(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    *lead, heads, tokens, _ = query.shape
    return query.new_empty(*lead, tokens, heads, value.shape[-1]).transpose(-3, -2)


_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
library.register_fake("lightning_diffpipe::attend", _outcome)


class CompiledBlock:
    """What a compiled block calls: a graph of `torch.compile` for each shape."""

    def __init__(self, block: nn.Module, backend: str | Callable[..., Any]) -> None:
        self._compiled = torch.compile(block._call_impl, backend=backend, dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the graph, with attention by whoever answers it."""
        with AttentionByName(AttentionByName.here()):
            return self._compiled(*args, **kwargs)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks that a denoiser repeats: those that diffusers names, or else entries of lists.

    Lists count (`nn.ModuleList`) that have several modules of one class and no others, each with modules inside.

    Raises:
        ConfigurationError: There are none.
    """
    names = getattr(model, "_repeated_blocks", None) or ()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if blocks := blocks or list(_in_lists(model)):
        return blocks
    raise ConfigurationError(
        f"compile=blocks: a {type(model).__name__} has no list of blocks of one class, and diffusers names none "
        "(_repeated_blocks); leave it out"
    )


def _in_lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        entries = list(child) if isinstance(child, nn.ModuleList) else []
        is_repeated = len(entries) > 1 and len({*map(type, entries)}) == 1
        if is_repeated and all(any(entry.children()) for entry in entries):
            yield from entries
        else:
            yield from _in_lists(child)


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any]) -> None:
    """Compiles the blocks of `repeated_blocks` at their first calls; raises what that does."""
    for block in repeated_blocks(model):
        block._compiled_call_impl = CompiledBlock(block, backend)


def compiled_modules(model: nn.Module) -> dict[str, bool]:
    """Returns the compiled modules of a model, by name, with whether attention can be answered in them."""
    called = {n: m._compiled_call_impl for n, m in model.named_modules() if is_compiled(m)}
    return {
        n: isinstance(getattr(x, "diffpipe_original", x), CompiledBlock) for n, x in called.items()
    }
