"""Running the user's closure on a part of the tokens, on one rank.

All code between blocks sees full shapes, so that patchify, rope tables, `int(tokens ** 0.5)` and unpatchify
work unchanged; only the tokens of the part mean anything in them. In front of a block, its arguments are cut to
the part; behind it, the result is put back into a full-size tensor. A block of another rank is not run: its
result is what was received, if something here reads it, else a dummy. The run stops behind the last own block,
except on the last rank, which makes the prediction.

    closure    patchify ── block 0 ── block 1 ── block 2 ── block 3 ── unpatchify ── guidance
    rank 0     all rows    patch      patch, send, stop
    rank 1     all rows    dummy      received   patch      patch      all rows      prediction
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from lightning_diffpipe.errors import LayoutError
from lightning_diffpipe.graph.interception import Interception, Site
from lightning_diffpipe.sampling.blocks import cut_arguments
from lightning_diffpipe.sampling.kv_cache import AttentionCall, PartAttention
from lightning_diffpipe.sampling.layout import Block, Layout, Part, Selection, TokenAxis
from lightning_diffpipe.sampling.stages import Stage
from lightning_diffpipe.sampling.tracing import Attend, AttentionIntercepted

Slices = list[Tensor]
"""The tokens of a part, for each result of a block that has tokens."""


class _Stop(BaseException):
    """Leaves the closure behind the last own block."""


@dataclass
class PartRunner:
    """What all runs of one request on one rank share.

    Attributes:
        layout: Of the model.
        stage: What this rank runs.
        interception: Of the model's blocks and constant linear layers.
        attention: How tokens attend.
        device: Where it runs.
        fill: Value of everything that must not be read.
        constants: Results of linear layers that do not change, as they were first computed.
    """

    layout: Layout
    stage: Stage
    interception: Interception
    attention: PartAttention
    device: torch.device
    fill: float = 0.0
    constants: dict[Any, tuple[torch.Size, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.block_names = frozenset(self.layout.block_names)
        self.constant_places = self.layout.constants
        self.interception.watch(self.block_names | {name for _, name, _ in self.constant_places})

    def run(
        self,
        call: Callable[[], Tensor],
        part: Part,
        receive: Callable[[int], Slices],
        send: Callable[[int, Slices], None],
        earlier: Sequence[PartRun] = (),
        stop: bool = False,
    ) -> PartRun:
        """Runs the closure once.

        Args:
            call: The closure, with its latents and timestep.
            part: What is computed.
            receive: What comes from the rank before this one in a visit, one tensor after the other.
            send: Takes what goes to the rank after it.
            earlier: Runs on other samples of the same step, whose results are to be put together.
            stop: Stop behind the last own block also on the last rank.

        Returns:
            The run, with its prediction on the last rank.
        """
        run = PartRun(self, part, receive, send, tuple(earlier), stop or not self.stage.is_last)
        with self.interception.running(run):
            try:
                run.prediction = call()
            except _Stop:
                return run
        if run.position != len(self.layout.blocks):
            raise LayoutError(
                f"denoise called {run.position} blocks, its probe saw {len(self.layout.blocks)}"
            )
        return run


@dataclass
class PartRun:
    """One run of the closure on one part; answers the calls of blocks while it lasts."""

    runner: PartRunner
    part: Part
    receive: Callable[[int], Slices]
    send: Callable[[int, Slices], None]
    earlier: tuple[PartRun, ...]
    stops: bool
    prediction: Tensor | None = None
    position: int = 0
    checkpointing: bool = False
    checkpointed: bool = False

    def __post_init__(self) -> None:
        self.slices: dict[int, Slices] = {}
        self._received: set[int] = set()
        self._inside: int | None = None
        self._turns: Counter[tuple[int, str]] = Counter()

    # --- what an interception asks ------------------------------------------------------------------

    def call(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers the call of a block or of a linear layer that may be constant."""
        if self._inside is None and site.name in self.runner.block_names:
            return self._block(site, args, kwargs)
        return self._linear(site, args, kwargs)

    def log(self, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Sampling does not log."""
        return original(*args, **kwargs)

    def checkpoints_layers(self) -> bool:
        """Without gradients nothing is checkpointed."""
        return False

    # --- blocks ---------------------------------------------------------------------------------------

    def _block(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layout, stage = self.runner.layout, self.runner.stage
        if self.position >= len(layout.blocks) or layout.blocks[self.position].name != site.name:
            raise LayoutError(
                f"block call {self.position} is {site.name}, the probe saw another sequence of calls"
            )
        here, self.position = self.position, self.position + 1
        block = layout.blocks[here]
        if here not in stage.own:
            wanted = here in stage.incoming[stage.visit_of[here]]
            return self._whole(here) if wanted else block.nested(self._dummy(block))
        self.slices[here] = self._execute(here, site, args, kwargs)
        visit = stage.visit_of[here]
        if here == stage.ends[visit]:
            if stage.outgoing[visit]:
                self.send(visit, [x for c in stage.outgoing[visit] for x in self._slices(c)])
            if self.stops and visit == len(stage.ends) - 1:
                raise _Stop
        return self._whole(here)

    def _execute(
        self, here: int, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Slices:
        layout, block = self.runner.layout, self.runner.layout.blocks[here]
        flat, spec = pytree.tree_flatten((args, kwargs))
        for leaf, tokens in block.inputs.items():
            if flat[leaf].shape[tokens.axis] != tokens.size:
                raise LayoutError(
                    f"{site.name} was called with {flat[leaf].shape[tokens.axis]} tokens, its probe saw "
                    f"{tokens.size}; requests of other shapes need a layout of their own"
                )
        args, kwargs = pytree.tree_unflatten(
            cut_arguments(block, flat, self.part, layout.ghost), spec
        )
        self._inside = here
        try:
            with AttentionIntercepted(self._attention(here, block)):
                out = site.diffpipe_original(*args, **kwargs)
        finally:
            self._inside = None
        leaves = pytree.tree_leaves(out)
        return [
            self._without_ghost(leaves[leaf], tokens, block)
            for leaf, tokens in sorted(block.outputs.items())
        ]

    def _attention(self, here: int, block: Block) -> Callable[..., Tensor]:
        numbers = iter(range(len(block.attention)))

        def handler(attend: Attend, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            number = next(numbers)
            tokens = block.attention[number]
            if tokens is None:
                return attend(q, k, v, **options)
            where = AttentionCall(here, number, block, tokens, self.part)
            return self.runner.attention.attend(where, attend, q, k, v, **options)

        return handler

    def _without_ghost(self, x: Tensor, tokens: TokenAxis, block: Block) -> Tensor:
        own = tokens.owned(self.part, block.num_text)
        fed = tokens.fed(self.part, block.num_text, self.runner.layout.ghost)
        if len(own) < len(fed):
            mine = torch.isin(fed.index, own.index).nonzero().squeeze(1)
            x = Selection(len(fed), mine).take(x, tokens.axis)
        return x.contiguous()  # as it would be received: strides decide about the last bit

    def _slices(self, call: int) -> Slices:
        """Tokens of the part in the results of a call, own or received."""
        stage = self.runner.stage
        visit = stage.visit_of[call]
        if call not in self.slices and visit not in self._received:
            self._received.add(visit)
            stream = iter(self.receive(visit))
            for c in stage.incoming[visit]:
                self.slices[c] = [next(stream) for _ in self.runner.layout.blocks[c].outputs]
        return self.slices[call]

    def _whole(self, call: int) -> Any:
        """Results of a call at full size; what is not known is a dummy."""
        block = self.runner.layout.blocks[call]
        pieces = [(run.part, run.slices[call]) for run in self.earlier]
        pieces.append((self.part, self._slices(call)))
        leaves, fill = self._dummy(block), self.runner.fill
        for i, (leaf, tokens) in enumerate(sorted(block.outputs.items())):
            if len(pieces) == 1 and self.part == Part():
                leaves[leaf] = pieces[0][1][i]
                continue
            result = block.results[leaf]
            full = torch.full(result.shape, fill, dtype=result.dtype, device=self.runner.device)
            for part, slices in pieces:
                view = full
                if part.samples is not None and leaf in block.output_samples:
                    axis = block.output_samples[leaf]
                    samples = part.samples_of(full.shape[axis])
                    view = full.narrow(axis, samples.start, samples.stop - samples.start)
                tokens.owned(part, block.num_text).put(view, tokens.axis, slices[i])
            leaves[leaf] = full
        return block.nested(leaves)

    def _dummy(self, block: Block) -> list[Any]:
        return block.dummy(self.runner.fill, self.runner.device)

    # --- linear layers that do not change -------------------------------------------------------------

    def _linear(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where = -1 if self._inside is None else self._inside
        turn = self._turns[where, site.name]
        self._turns[where, site.name] += 1
        runner = self.runner
        if (where, site.name, turn) not in runner.constant_places or not args:
            return site.diffpipe_original(*args, **kwargs)
        samples = None if self._inside is None else self.part.samples
        key, shape = (where, site.name, turn, samples), args[0].shape
        if key not in runner.constants or runner.constants[key][0] != shape:
            runner.constants[key] = (shape, site.diffpipe_original(*args, **kwargs))
        return runner.constants[key][1]
