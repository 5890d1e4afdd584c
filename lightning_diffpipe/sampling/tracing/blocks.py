"""Axes of a block's arguments and results that count tokens or samples.

Every axis of every argument is marked with code words (`marks.py`). Indices that reach the keys of an attention
call one-to-one are tokens: of the image, of the text, of rope tables, of per-token modulation. Those that reach
the key axis of its mask one-to-one are a key mask. Those that reach neither, but a token of a result, are
per-token residuals. Indices that reach the samples of keys, masks or results one-to-one count samples.
"""

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.errors import LayoutError
from lightning_diffpipe.graph.calltree import Forward
from lightning_diffpipe.sampling.tracing.attention import AttentionIntercepted
from lightning_diffpipe.sampling.tracing.layout import NOBODY, Block, Part, TokenAxis
from lightning_diffpipe.sampling.tracing.marks import (
    CodeWords,
    WithoutProducts,
    can_be_marked,
    lines,
    marked,
    token_local,
)

Target = tuple[str, int, int]
"""A place that marks can reach: ("key" | "mask", attention call, axis) or ("result", leaf, axis)."""


class BlockTracer:
    """Traces one block, whose attention is known, on the arguments that it was called with."""

    def __init__(self, block: Block, forward: Forward, flat: list[Any], spec: Any) -> None:
        self._block, self._forward, self._flat, self._spec = block, forward, flat, spec
        self._base = self._reached(flat)
        self._without_products = WithoutProducts()
        with self._without_products:
            self._base_without_products = self._reached(flat)

    def trace(self) -> None:
        """Fills in the block's axes, and whether it runs on parts of its text and of its samples.

        Raises:
            LayoutError: The block adds or drops tokens, or mixes them.
        """
        through: list[tuple[int, int, Tensor, int, int]] = []
        for leaf, x in enumerate(self._flat):
            if not can_be_marked(x):
                continue
            for axis in (a for a in range(x.ndim) if x.shape[a] > 1):
                for target, source in self._map(leaf, axis).items():
                    if target[0] == "result":
                        through.append((target[1], target[2], source, leaf, axis))
                    else:
                        self._note(target, source, leaf, axis)
        self._note_results(through)
        self._check()
        units = max((t.num_units for t in self._block.attention if t is not None), default=1)
        of_image = cut_arguments(self._block, self._flat, Part(range(0, max(units // 2, 1))))
        self._block.needs_text = bool(self._block.num_text) and self._runs(of_image) is None
        self._block.cuts_samples = self._cuts_samples()

    def _cuts_samples(self) -> bool:
        if self._runs_on_half():
            return True
        # Whole numbers, such as classes, cannot be marked. That an axis of theirs counts samples shows in that the
        # block runs on half of the samples with it cut, and only so.
        samples = self._block.input_samples
        sizes = {self._flat[leaf].shape[axis] for leaf, axis in samples.items()}
        samples |= {
            leaf: x.shape.index(min(sizes))
            for leaf, x in enumerate(self._flat)
            if isinstance(x, Tensor) and not can_be_marked(x) and len(sizes) == 1
            if sum(size in sizes for size in x.shape) == 1
        }
        return self._runs_on_half()

    def _runs_on_half(self) -> bool:
        block = self._block
        part = Part(samples=(0, 2))
        out = self._runs(cut_arguments(block, self._flat, part))
        if out is None or set(block.outputs) - set(block.output_samples):
            return False
        leaves = pytree.tree_leaves(out)
        shapes = [TensorShape.of(leaves[i]) for i in sorted(block.outputs)]
        return shapes == block.shapes(part)

    def _runs(self, flat: list[Any]) -> Any:
        try:
            with self._without_products:  # only shapes are asked for
                return self._run(flat, [])
        except (RuntimeError, IndexError, ValueError):
            return None

    def _run(self, flat: list[Any], log: list[tuple[Tensor, Tensor | None]]) -> Any:
        args, kwargs = pytree.tree_unflatten(flat, self._spec)
        with AttentionIntercepted(token_local(log)):
            return self._forward(*args, **kwargs)

    def _reached(self, flat: list[Any]) -> dict[Target, Tensor]:
        log: list[tuple[Tensor, Tensor | None]] = []
        out = self._run(flat, log)
        reached: dict[Target, Tensor] = {}
        for i, (key, mask) in enumerate(log):
            reached |= {("key", i, -2): key, ("key", i, 0): key}
            if mask is not None:
                reached |= {("mask", i, -1): mask, ("mask", i, 0): mask}
        for i, x in enumerate(pytree.tree_leaves(out)):
            if can_be_marked(x):
                reached |= {("result", i, a): x for a in range(x.ndim)}
        return reached

    def _map(self, leaf: int, axis: int) -> dict[Target, Tensor]:
        """Returns where the indices of an axis go, if one-to-one: the source of each place, or -1."""
        size = self._flat[leaf].shape[axis]
        words = CodeWords(size)
        first = torch.arange(size) == 0
        reached = self._mark(leaf, axis, first, self._base)
        live = [target for target, line in reached.items() if line.sum() == 1]
        if not live:
            return {}
        runs = [self._mark(leaf, axis, marks, live) for marks in words.marks]
        maps = {target: words.decode([run[target] for run in runs]) for target in live}
        return {
            target: source
            for target, source in maps.items()
            if torch.equal(source[source >= 0].sort().values, torch.arange(size))
            and (source >= NOBODY).all()
        }

    def _mark(
        self, leaf: int, axis: int, mask: Tensor, targets: Collection[Target]
    ) -> dict[Target, Tensor]:
        flat = list(self._flat)
        boolean = flat[leaf].dtype == torch.bool
        flat[leaf] = marked(flat[leaf], axis, mask)
        # A flipped boolean changes numbers, which must be real ones then.
        base = self._base if boolean else self._base_without_products
        with contextlib.nullcontext() if boolean else self._without_products:
            reached = self._reached(flat)
        changed = {}
        for target in targets:
            x = reached.get(target)
            if not can_be_marked(x):
                continue
            if boolean and x.dtype != torch.bool:  # a flipped mask changes numbers, not into NaN
                differs = (x != base[target]).movedim(target[2], 0)
                changed[target] = differs.flatten(1).any(1).cpu()
            else:
                before = base[target] if x.dtype == torch.bool else None
                changed[target] = lines(x, target[2], before)
        return changed

    def _note(self, target: Target, source: Tensor, leaf: int, axis: int) -> None:
        _, call, reached = target
        if reached == 0:
            if torch.equal(source, torch.arange(len(source))):
                self._block.input_samples.setdefault(leaf, axis)
            return
        tokens = self._block.attention[call]
        if tokens is not None and tokens.size == len(source):
            size = self._flat[leaf].shape[axis]
            self._block.inputs[leaf] = TokenAxis(axis, _place(size, source, tokens.owner))

    def _note_results(self, through: Sequence[tuple[int, int, Tensor, int, int]]) -> None:
        block = self._block
        for result, reached, source, leaf, axis in through:
            if leaf in block.inputs and block.inputs[leaf].axis == axis:
                result_tokens = block.outputs.setdefault(
                    result, TokenAxis(reached, torch.full_like(source, NOBODY))
                )
                if result_tokens.axis == reached:
                    is_reached = source >= 0
                    result_tokens.owner[is_reached] = block.inputs[leaf].owner[source[is_reached]]
            elif block.input_samples.get(leaf) == axis and torch.equal(
                source, torch.arange(len(source))
            ):
                block.output_samples.setdefault(result, reached)
        for result, reached, source, leaf, axis in through:  # what reaches no key: residuals
            tokens = block.outputs.get(result)
            if leaf not in block.inputs and tokens is not None and tokens.axis == reached:
                size = self._flat[leaf].shape[axis]
                block.inputs[leaf] = TokenAxis(axis, _place(size, source, tokens.owner))
            if leaf not in block.input_samples and block.output_samples.get(result) == reached:
                block.input_samples[leaf] = axis

    def _check(self) -> None:
        block = self._block
        if not block.outputs or any((tokens.owner == NOBODY).any() for tokens in block.axes):
            raise LayoutError(
                f"{block.name}: some tokens belong to no row of the latents and to no text token; "
                "the block mixes tokens outside attention, or adds tokens of its own"
            )
        fed = {int(owner) for tokens in block.inputs.values() for owner in tokens.owner.unique()}
        for tokens in filter(None, block.attention):
            if not set(tokens.owner.unique().tolist()) <= fed:
                raise LayoutError(
                    f"{block.name} attends to tokens that are none of its arguments, such as "
                    "learned registers added inside the block; it cannot run on a part of its tokens"
                )
        for leaf, result in enumerate(block.results):
            if isinstance(result, TensorShape) and leaf not in block.outputs and result.shape:
                raise LayoutError(
                    f"{block.name} returns a tensor of shape {result.shape} without tokens; "
                    "only tokens can travel between ranks"
                )


def cut_arguments(block: Block, flat: Sequence[Any], part: Part) -> list[Any]:
    """Cuts the arguments of a block to a part of its tokens and samples."""
    flat = list(flat)
    for leaf, tokens in block.inputs.items():
        flat[leaf] = tokens.fed(part).take(flat[leaf], tokens.axis)
    if part.samples is not None:
        for leaf, axis in block.input_samples.items():
            samples = part.samples_of(flat[leaf].shape[axis])
            piece = flat[leaf].narrow(axis, samples.start, samples.stop - samples.start)
            flat[leaf] = piece.clone(memory_format=torch.contiguous_format)
    return flat


def _place(size: int, source: Tensor, owner: Tensor) -> Tensor:
    """Returns the owners of an axis' indices, from the owners of the places they reach."""
    result = torch.full((size,), NOBODY)
    result[source[source >= 0]] = owner[source >= 0]
    return result
