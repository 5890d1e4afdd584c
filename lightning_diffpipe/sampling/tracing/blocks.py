"""Axes of a block's arguments and results that count tokens or samples.

Every axis of every argument is marked with code words (`marks.py`). Indices that reach the keys of an attention
call one-to-one are tokens: of the image, of the text, of rope tables, of per-token modulation. Those that reach
the key axis of its mask one-to-one are a key mask. Those that reach neither, but a token of a result, are
per-token residuals. Indices that reach the samples of keys, masks or results one-to-one count samples.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

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


class Target(NamedTuple):
    """A place that marks can reach: an axis of the key or mask of an attention call, or of a result.

    Attributes:
        index: Number of the call of attention in the block, or of the result among the leaves.
    """

    kind: Literal["key", "mask", "result"]
    index: int
    axis: int


class Route(NamedTuple):
    """An axis of an argument whose indices reach a target one-to-one.

    Attributes:
        leaf: Index of the argument, among the leaves of `(args, kwargs)`.
        axis: Its axis, of `size` indices.
        source: For each index of the target the index of the argument that reaches it, or `NOBODY`.
    """

    leaf: int
    axis: int
    size: int
    target: Target
    source: Tensor

    @property
    def keeps_order(self) -> bool:
        """Index i reaches index i, as samples do."""
        return torch.equal(self.source, torch.arange(len(self.source)))

    def tokens(self, target: TokenAxis) -> TokenAxis:
        """Returns the tokens of the argument, which are those that they reach."""
        is_reached = self.source != NOBODY
        owner = torch.full((self.size,), NOBODY)
        owner[self.source[is_reached]] = target.owner[is_reached]
        return TokenAxis(self.axis, owner)


class BlockTracer:
    """Traces one block, whose attention is known, on the arguments that it was called with."""

    def __init__(self, block: Block, forward: Forward, flat: list[Any], spec: Any) -> None:
        self._block, self._forward, self._flat, self._spec = block, forward, flat, spec
        self._base = self._targets(flat)
        self._without_products = WithoutProducts()
        with self._without_products:
            self._base_without_products = self._targets(flat)

    def trace(self) -> None:
        """Fills in the block's axes, and whether it runs on parts of its text and of its samples.

        Raises:
            LayoutError: The block adds or drops tokens, or mixes them.
        """
        routes = list(self._routes())
        to_results = [route for route in routes if route.target.kind == "result"]
        for route in routes:
            if route.target.kind != "result":
                self._note_input(route)
        for route in to_results:
            self._note_output(route)
        for route in to_results:
            self._note_residual(route)
        self._check()
        units = max((t.num_units for t in self._block.attention if t is not None), default=1)
        of_image = cut_arguments(self._block, self._flat, Part(range(0, max(units // 2, 1))))
        self._block.needs_text = bool(self._block.num_text) and self._runs(of_image) is None
        self._block.cuts_samples = self._runs_on_half() or self._runs_on_half_with_numbers()

    def _runs_on_half_with_numbers(self) -> bool:
        """Returns whether the block runs on half of the samples if whole numbers, such as classes, are cut as well.

        These cannot be marked: an axis of theirs counts samples if it is as long as that of samples elsewhere.
        """
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
        """Returns whether the block makes of half of the samples half of its results."""
        block = self._block
        half = Part(samples=(0, 2))
        out = self._runs(cut_arguments(block, self._flat, half))
        if out is None or set(block.outputs) - set(block.output_samples):
            return False
        leaves = pytree.tree_leaves(out)
        return block.shapes(half) == [TensorShape.of(leaves[i]) for i in sorted(block.outputs)]

    def _runs(self, flat: list[Any]) -> Any:
        """Returns what the block makes of other arguments, of which only shapes count; None if it fails."""
        try:
            with self._without_products:
                return self._run(flat, [])
        except (RuntimeError, IndexError, ValueError):
            return None

    def _run(self, flat: list[Any], log: list[tuple[Tensor, Tensor | None]]) -> Any:
        args, kwargs = pytree.tree_unflatten(flat, self._spec)
        with AttentionIntercepted(token_local(log)):
            return self._forward(*args, **kwargs)

    def _targets(self, flat: list[Any]) -> dict[Target, Tensor]:
        """Runs the block; returns the tensors that marks in its arguments can reach."""
        log: list[tuple[Tensor, Tensor | None]] = []
        out = self._run(flat, log)
        targets: dict[Target, Tensor] = {}
        for call, (key, mask) in enumerate(log):
            targets |= {Target("key", call, -2): key, Target("key", call, 0): key}
            if mask is not None:
                targets |= {Target("mask", call, -1): mask, Target("mask", call, 0): mask}
        for leaf, x in enumerate(pytree.tree_leaves(out)):
            if can_be_marked(x):
                targets |= {Target("result", leaf, axis): x for axis in range(x.ndim)}
        return targets

    def _routes(self) -> Iterator[Route]:
        """Yields all axes of arguments whose indices reach a place one-to-one, found by code words."""
        for leaf, x in enumerate(self._flat):
            for axis, size in enumerate(x.shape if can_be_marked(x) else ()):
                if size == 1:
                    continue
                # One run with the first index marked leaves few places that can be reached one-to-one.
                first = self._mark(leaf, axis, torch.arange(size) == 0, self._base)
                live = [target for target, reached in first.items() if reached.sum() == 1]
                if not live:
                    continue
                words = CodeWords(size)
                runs = [self._mark(leaf, axis, marks, live) for marks in words.marks]
                for target in live:
                    source = words.decode([run[target] for run in runs])
                    is_onto = torch.equal(source[source >= 0].sort().values, torch.arange(size))
                    if is_onto and (source >= NOBODY).all():
                        yield Route(leaf, axis, size, target, source)

    def _mark(
        self, leaf: int, axis: int, mask: Tensor, targets: Collection[Target]
    ) -> dict[Target, Tensor]:
        """Runs the block with some indices of an argument marked; returns the indices of each target they reach."""
        flat = list(self._flat)
        boolean = flat[leaf].dtype == torch.bool
        flat[leaf] = marked(flat[leaf], axis, mask)
        # A flipped boolean changes numbers, which must be real ones then.
        base = self._base if boolean else self._base_without_products
        with contextlib.nullcontext() if boolean else self._without_products:
            now = self._targets(flat)
        reached = {}
        for target in targets:
            x = now.get(target)
            if not can_be_marked(x):
                continue
            if boolean and x.dtype != torch.bool:  # a flipped mask changes numbers, not into NaN
                differs = (x != base[target]).movedim(target.axis, 0)
                reached[target] = differs.flatten(1).any(1).cpu()
            else:
                before = base[target] if x.dtype == torch.bool else None
                reached[target] = lines(x, target.axis, before)
        return reached

    def _note_input(self, route: Route) -> None:
        """Notes an axis that reaches the tokens, or the samples, of keys or a mask."""
        block = self._block
        if route.target.axis == 0:
            if route.keeps_order:
                block.input_samples.setdefault(route.leaf, route.axis)
            return
        tokens = block.attention[route.target.index]
        if tokens is not None and tokens.size == len(route.source):
            block.inputs[route.leaf] = route.tokens(tokens)

    def _note_output(self, route: Route) -> None:
        """Notes an axis of a result that tokens, or samples, of an argument reach."""
        block, result, axis = self._block, route.target.index, route.target.axis
        given = block.inputs.get(route.leaf)
        if given is not None and given.axis == route.axis:
            nobody = TokenAxis(axis, torch.full_like(route.source, NOBODY))
            returned = block.outputs.setdefault(result, nobody)
            if returned.axis == axis:
                is_reached = route.source != NOBODY
                returned.owner[is_reached] = given.owner[route.source[is_reached]]
        elif block.input_samples.get(route.leaf) == route.axis and route.keeps_order:
            block.output_samples.setdefault(result, axis)

    def _note_residual(self, route: Route) -> None:
        """Notes an argument that reaches tokens, or samples, of a result and no key, such as a residual."""
        block, result, axis = self._block, route.target.index, route.target.axis
        returned = block.outputs.get(result)
        if route.leaf not in block.inputs and returned is not None and returned.axis == axis:
            block.inputs[route.leaf] = route.tokens(returned)
        if route.leaf not in block.input_samples and block.output_samples.get(result) == axis:
            block.input_samples[route.leaf] = route.axis

    def _check(self) -> None:
        block = self._block
        if not block.outputs or any((tokens.owner == NOBODY).any() for tokens in block.axes):
            raise LayoutError(
                f"{block.name}: some tokens belong to no row of the latents and to no text token; "
                "the block mixes tokens outside attention, or adds tokens of its own"
            )
        given = {int(owner) for tokens in block.inputs.values() for owner in tokens.owner.unique()}
        for tokens in filter(None, block.attention):
            if not set(tokens.owner.unique().tolist()) <= given:
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
        flat[leaf] = tokens.input_of(part).take(flat[leaf], tokens.axis)
    if part.samples is not None:
        for leaf, axis in block.input_samples.items():
            samples = part.samples_of(flat[leaf].shape[axis])
            piece = flat[leaf].narrow(axis, samples.start, samples.stop - samples.start)
            flat[leaf] = piece.clone(memory_format=torch.contiguous_format)
    return flat
