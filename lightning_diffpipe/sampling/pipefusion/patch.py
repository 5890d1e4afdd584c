"""Running the user's closure on a part of the tokens, on one rank.

All code between blocks sees full shapes, so that patchify, rope tables, `int(tokens ** 0.5)` and unpatchify
work unchanged; only the tokens of the part mean anything in them. Before a block, its arguments are cut to
the part; after it, the result is put back into a full-size tensor. A block of another rank is not run: its
result is what was received, if something here reads it, else a dummy. The run stops after the last own block,
except on the last rank, which makes the prediction.

    closure    patchify ── block 0 ── block 1 ── block 2 ── block 3 ── unpatchify ── guidance
    rank 0     all rows    patch      patch, send, stop
    rank 1     all rows    dummy      received   patch      patch      all rows      prediction

Full size is for code that looks into it. A result that is only passed on to other blocks is a dummy, too: shape
without memory, and whoever gets this object takes the tokens instead. Modules that make the same for every patch
are run once (`tracing/glue.py`).

**Stages.** Blocks are split into contiguous ranges, one for each rank. A call of the model visits the ranks in
order; with guidance by two calls per step, every step visits them twice:

    calls        0  1  2  3 | 4  5  6  7       two calls of a model of four blocks
    rank 0       x  x       | x  x
    rank 1             x  x |       x  x
    messages         1           5             rank 0 to rank 1, one in each visit

A message holds the results of all calls on earlier ranks which a later rank reads, long skips included: they
travel from rank to rank along the chain.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.clock import clock_for
from lightning_diffpipe.comm.packing import TensorShape, as_received
from lightning_diffpipe.errors import LayoutError, PartitionError
from lightning_diffpipe.graph.calltree import Forward
from lightning_diffpipe.graph.interception import Interception, Run, Site
from lightning_diffpipe.sampling.pipefusion.kv_cache import AttentionCall, PartAttention
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.step_caches import StepCache
from lightning_diffpipe.sampling.tracing.attention import (
    Attend,
    AttentionByName,
    AttentionIntercepted,
    compiled_modules,
)
from lightning_diffpipe.sampling.tracing.blocks import cut_arguments
from lightning_diffpipe.sampling.tracing.layout import (
    BETWEEN,
    WHOLE,
    Block,
    CallPlace,
    Layout,
    Part,
    TokenAxis,
    shapes_of_call,
)
from lightning_diffpipe.sampling.tracing.marks import calls_answered


@dataclass(frozen=True)
class DenoiserStage:
    """One rank's part in one call of `denoise`.

    Attributes:
        own: Calls it runs.
        incoming: For each visit, the calls whose results it receives.
        outgoing: For each visit, the calls whose results it sends on.
        ends: The last own call of each visit.
        visit_of: For each call of any rank, the visit it belongs to.
        is_last: Whether this rank computes the prediction.
    """

    own: frozenset[int]
    incoming: tuple[tuple[int, ...], ...]
    outgoing: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]
    visit_of: tuple[int, ...]
    is_last: bool


@dataclass(frozen=True)
class Stages:
    """All ranks' stages.

    Attributes:
        blocks: Names of the blocks of each rank.
    """

    blocks: tuple[tuple[str, ...], ...]
    stages: tuple[DenoiserStage, ...]

    @classmethod
    def split(cls, layout: Layout, positions: Sequence[int]) -> Stages:
        """Cuts the blocks before increasing positions: rank r starts at block `positions[r - 1]`.

        Raises:
            PartitionError: A rank would have no block.
            LayoutError: A result would have to travel backwards.
        """
        names = layout.block_names
        bounds = [0, *positions, len(names)]
        if any(a >= b for a, b in itertools.pairwise(bounds)):
            raise PartitionError(
                f"cannot cut {len(names)} blocks at {list(positions)}: every rank needs at least one; "
                f"choose increasing positions between 1 and {len(names) - 1}, or fewer ranks"
            )
        owners = tuple(tuple(names[a:b]) for a, b in itertools.pairwise(bounds))
        rank_of_name = {name: rank for rank, names in enumerate(owners) for name in names}
        rank_of = [rank_of_name[block.name] for block in layout.blocks]
        # A call of an earlier rank after one of a later rank begins another visit.
        begins = (after < before for before, after in itertools.pairwise(rank_of))
        visit_of = tuple(itertools.accumulate(begins, initial=0))
        for visit in range(visit_of[-1] + 1):
            ranks = {rank for rank, at in zip(rank_of, visit_of, strict=True) if at == visit}
            if len(ranks) < len(owners):
                raise PartitionError(
                    f"one call of the model uses blocks of ranks {sorted(ranks)} only, of {len(owners)}; its "
                    f"blocks are called as {[block.name for block in layout.blocks]}. Choose a split in which "
                    "every call of the model passes through all ranks"
                )
        # From each rank to the next one; nothing comes before rank 0 or goes beyond the last.
        crossing = [_crossing(layout, rank_of, visit_of, rank) for rank in range(-1, len(owners))]
        stages = []
        for rank in range(len(owners)):
            calls = [call for call, owner in enumerate(rank_of) if owner == rank]
            last_of = {visit_of[call]: call for call in calls}
            ends = tuple(last_of[visit] for visit in range(max(visit_of) + 1))
            flow, is_last = crossing[rank : rank + 2], rank == len(owners) - 1
            stages.append(DenoiserStage(frozenset(calls), *flow, ends, visit_of, is_last))
        return cls(owners, tuple(stages))


def resident_parameters(model: nn.Module, layout: Layout, stages: Stages, rank: int) -> set[str]:
    """Returns the names of parameters a rank reads: of its blocks, and of everything that is no block.

    All others may be placeholders.
    """
    foreign = tuple(
        f"{name}." for owner, names in enumerate(stages.blocks) for name in names if owner != rank
    )
    return {
        name
        for name, _ in model.named_parameters()
        if not name.startswith(foreign) or name in layout.glue_parameters
    }


def measured_costs(layout: Layout, request: Request, repeats: int = 2) -> list[float]:
    """Measures the seconds of each block in one call of `denoise`, in the order of `layout.block_names`.

    Of calls of one kind the first few run, and all get the median of these but for the first. The last block's cost
    includes the code after it, up to the prediction.
    """
    times: dict[int, list[float]] = {}
    results: dict[int, Any] = {}
    kinds = [block.kind for block in layout.blocks]
    tail_s, clock = list[float](), clock_for(request.latents.device)

    def now_s() -> float:
        clock.settle()
        return time.perf_counter()

    for _ in range(repeats + 1):
        position, end_s = iter(kinds), 0.0

        def timed(
            name: str, forward: Forward, args: Any, kwargs: Any, position: Any = position
        ) -> Any:
            nonlocal end_s
            kind = next(position)
            if len(seconds := times.setdefault(kind, [])) <= repeats:
                start_s = now_s()
                results[kind] = forward(*args, **kwargs)
                seconds.append(now_s() - start_s)
            out = pytree.tree_map_only(Tensor, torch.clone, results[kind])
            end_s = now_s()
            return out

        with request.inferring(), calls_answered(request.model, layout.block_names, timed):
            request.denoise(request.latents, request.timesteps[0])
        tail_s.append(now_s() - end_s)
    total = dict.fromkeys(layout.block_names, 0.0)
    for block in layout.blocks:
        total[block.name] += statistics.median(times[block.kind][1:] or times[block.kind])
    costs = list(total.values())
    costs[-1] += statistics.median(tail_s[1:])
    return costs


def _crossing(
    layout: Layout, rank_of: Sequence[int], visit_of: Sequence[int], rank: int
) -> tuple[tuple[int, ...], ...]:
    """Returns the calls whose results cross from `rank` to the rank after it, in each visit."""
    end = len(layout.blocks)
    visits: list[list[int]] = [[] for _ in range(max(visit_of) + 1)]
    for call, readers in enumerate(layout.readers):
        ranks = [max(rank_of) if reader == end else rank_of[reader] for reader in readers]
        if any(reader < rank_of[call] for reader in ranks):
            raise LayoutError(
                f"the result of {layout.blocks[call].name} is read by a block of an earlier rank; "
                "choose another split, or one rank"
            )
        if rank_of[call] <= rank < max(ranks, default=-1):
            visits[visit_of[call]].append(call)
    return tuple(map(tuple, visits))


Slices = list[Tensor]
"""The tokens of a part, for each result of a block that has tokens."""


class _Stop(BaseException):
    """Leaves the closure after the last own block."""


@dataclass
class PartRunner:
    """State that all runs of one request on one rank share.

    Attributes:
        stage: Blocks of this rank.
        interception: Sites of the model's blocks, and of modules whose results are stored.
        attend: Function that computes attention.
        fill: Value of everything that must not be read.
        step_cache: Step cache, of which modules that are `hooked` may be skipped.
    """

    layout: Layout
    stage: DenoiserStage
    interception: Interception
    attend: PartAttention
    device: torch.device
    fill: float = 0.0
    step_cache: StepCache | None = None

    def __post_init__(self) -> None:
        layout = self.layout
        self.block_names = frozenset(layout.block_names)
        # Results that are the same in all of a request, or of a step.
        self.of_request: dict[Any, Any] = {}
        self.of_step: dict[Any, Any] = {}
        # How often a module that may be skipped calls attention.
        self.attended: dict[CallPlace, int] = {}
        # Results of each call without memory; nothing can be written into them, so that all runs share them.
        self.dummies = [block.dummy(self.fill, self.device) for block in layout.blocks]
        places = layout.constants.keys() | layout.step_constants.keys()
        self.interception.watch(self.block_names | {name for _, name, _ in places})
        compiled = compiled_modules(self.interception.root)
        if any(compiled.values()) and not layout.attention_by_name:
            raise LayoutError(
                "compile=blocks hides attention that is not called by its name; leave it out"
            )
        # Compilers of others have looked names up for good; their blocks run as if they were not compiled.
        others = {name for name, is_ours in compiled.items() if not is_ours}
        self.run_plainly = others & self.block_names
        by_name = layout.attention_by_name and others <= self.block_names
        self.attention_answered_by = AttentionByName if by_name else AttentionIntercepted

    def start_step(self) -> None:
        """Forgets what is the same in one step only."""
        self.of_step.clear()

    def run(
        self,
        call: Callable[[], Tensor],
        part: Part,
        receive: Callable[[], Slices],
        send: Callable[[Slices], None],
        earlier: Sequence[PartRun] = (),
        stop: bool = False,
    ) -> PartRun:
        """Runs the closure once.

        Args:
            call: The closure, with its latents and timestep.
            part: Tokens and samples to compute.
            receive: Gives what comes next from the rank before this one, one tensor after the other.
            send: Takes what goes to the rank after it.
            earlier: Runs on other samples of the same step, whose results are to be put together.
            stop: Stop after the last own block also on the last rank.

        Returns:
            The run, with its prediction on the last rank.

        Raises:
            LayoutError: The closure calls blocks otherwise than its probe saw.
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
class PartRun(Run):
    """One run of the closure on one part; answers the calls of blocks while it lasts."""

    runner: PartRunner
    part: Part
    receive: Callable[[], Slices]
    send: Callable[[Slices], None]
    earlier: tuple[PartRun, ...]
    stops: bool
    prediction: Tensor | None = None
    position: int = 0

    def __post_init__(self) -> None:
        self.slices: dict[int, Slices] = {}  # by call of a block
        self._received: set[int] = set()  # visits whose message was received
        self._inside: int | None = None  # the call of a block that runs
        self._num_attended = 0  # calls of attention in it so far
        self._turns: Counter[tuple[int, str]] = Counter()
        self._storing = False
        self._stand_ins: dict[int, _StandIn] = {}  # by identity
        self._pieces: dict[Any, Tensor] = {}  # tokens cut out of arguments
        self._held: list[Tensor] = []  # so that identities stay what they are
        # Objects of full size stand for tokens only where a block is given just these.
        of_all_samples = self.part.units is not None and self.part.samples is None
        self._uses_stand_ins = of_all_samples and not self.runner.layout.dummy_text

    # --- what an interception asks ------------------------------------------------------------------

    def call(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers the call of a block, or of a module whose result may be stored."""
        if self._storing:  # inside a module whose result will be stored
            return site.diffpipe_original(*args, **kwargs)
        if self._inside is None and site.name in self.runner.block_names:
            return self._block(site, args, kwargs)
        return self._module(site, args, kwargs)

    # --- blocks ---------------------------------------------------------------------------------------

    def _block(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers the next call of a block: runs it if it is of this rank, and sends what later ranks read."""
        layout, stage = self.runner.layout, self.runner.stage
        if self.position >= len(layout.blocks) or layout.blocks[self.position].name != site.name:
            raise LayoutError(
                f"block call {self.position} is {site.name}, the probe saw another sequence of calls"
            )
        here, self.position = self.position, self.position + 1
        visit = stage.visit_of[here]
        if here not in stage.own:
            if here in stage.incoming[visit]:
                return self._whole(here)
            return layout.blocks[here].nested(self.runner.dummies[here])
        self.slices[here] = self._execute(here, site, args, kwargs)
        if here == stage.ends[visit]:
            if stage.outgoing[visit]:
                self._send_results(stage.outgoing[visit])
            if self.stops and visit == len(stage.ends) - 1:
                raise _Stop
        return self._whole(here)

    def _send_results(self, calls: Sequence[int]) -> None:
        """Sends results of calls to the next rank, which knows their shapes from the layout."""
        for call in calls:
            block = self.runner.layout.blocks[call]
            shapes = [TensorShape.of(x) for x in self._slices(call)]
            if shapes != (expected := block.shapes(self.part)):
                raise LayoutError(
                    f"{block.name} returned {shapes}, and the next rank expects {expected}; take method=single"
                )
        self.send([x for call in calls for x in self._slices(call)])

    def _execute(
        self, here: int, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Slices:
        """Runs a block on the tokens of the part; returns these tokens of its results."""
        block = self.runner.layout.blocks[here]
        flat, spec = pytree.tree_flatten((args, kwargs))
        for leaf, tokens in block.inputs.items():
            if flat[leaf].shape[tokens.axis] != tokens.size:
                raise LayoutError(
                    f"{site.name} was called with {flat[leaf].shape[tokens.axis]} tokens, its probe saw "
                    f"{tokens.size}; requests of other shapes need a layout of their own"
                )
        args, kwargs = pytree.tree_unflatten(self._cut_arguments(block, flat), spec)
        is_plain = site.name in self.runner.run_plainly
        run = site.module._call_impl if is_plain else site.diffpipe_original
        self._inside, self._num_attended = here, 0
        try:
            with self.runner.attention_answered_by(partial(self._attend, block)):
                out = run(*args, **kwargs)
        finally:
            self._inside = None
        leaves, slices = pytree.tree_leaves(out), []
        for leaf, tokens in sorted(block.outputs.items()):
            own = tokens.own_in_input(self.part)
            slices.append(as_received(own.take(leaves[leaf], tokens.axis)))
        return slices

    def _cut_arguments(self, block: Block, flat: list[Any]) -> list[Any]:
        """Cuts the arguments of a block to the part; what stands for its tokens is replaced by these."""
        if not self._uses_stand_ins:
            return cut_arguments(block, flat, self.part)
        flat = list(flat)
        for leaf, tokens in block.inputs.items():
            x, stand_in = flat[leaf], self._stand_ins.get(id(flat[leaf]))
            if stand_in is not None and stand_in.tokens is tokens:
                # A block may write into its arguments; other readers must not see that.
                slices = stand_in.slices
                flat[leaf] = slices if stand_in.is_read_once else slices.clone()
                continue
            # Tables of rope are the same object for many blocks, and often for all steps: they are cut once.
            selection = tokens.owned(self.part)
            key = (id(x), tokens.axis, id(selection))
            pieces = self.runner.of_request if id(x) in self.runner.of_request else self._pieces
            if key not in pieces:
                pieces[key] = selection.take(x, tokens.axis)
                self._held.append(x)
            flat[leaf] = pieces[key]
        return flat

    def _attend(
        self,
        block: Block,
        attend: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Any = None,
        **options: Any,
    ) -> Tensor:
        """Answers a call of attention inside a block."""
        number, self._num_attended = self._num_attended, self._num_attended + 1
        if number >= len(block.attention):
            raise LayoutError(
                f"{block.name} calls attention more often than the {len(block.attention)} times that a probe "
                "has found, as with attention processors that a pipeline sets in its call; sample it with "
                "method=single"
            )
        tokens = block.attention[number]
        if tokens is None:  # cross-attention, whose keys all ranks have
            return attend(q, k, v, attn_mask=attn_mask, **options)
        if options.get("is_causal"):
            raise LayoutError(f"{block.name} attends causally; patches would see the future")
        place = (self._inside, number)
        call = AttentionCall(place, block, tokens, self.part, attend, options, q, k, v, attn_mask)
        return self.runner.attend(call)

    def _slices(self, call: int) -> Slices:
        """Returns the part's tokens in the results of a call, own or received."""
        stage = self.runner.stage
        visit = stage.visit_of[call]
        if call not in self.slices and visit not in self._received:
            self._received.add(visit)
            message = iter(self.receive())
            for c in stage.incoming[visit]:
                self.slices[c] = [next(message) for _ in self.runner.layout.blocks[c].outputs]
        return self.slices[call]

    def _whole(self, call: int) -> Any:
        """Returns the results of a call at full size; results that are unknown, or not read, are dummies."""
        layout = self.runner.layout
        block = layout.blocks[call]
        pieces = [(run.part, run.slices[call]) for run in self.earlier]
        pieces.append((self.part, self._slices(call)))
        leaves = [*self.runner.dummies[call]]
        for i, (leaf, tokens) in enumerate(sorted(block.outputs.items())):
            if len(pieces) == 1 and self.part == WHOLE:
                leaves[leaf] = pieces[0][1][i]
                continue
            if not self._uses_stand_ins or (call, leaf) not in layout.passed:
                owned = [(part, slices[i]) for part, slices in pieces]
                samples = block.output_samples.get(leaf)
                leaves[leaf] = self._full(block.results[leaf], tokens, owned, samples)
            if self._uses_stand_ins:
                full, is_read_once = leaves[leaf], len(layout.readers[call]) == 1
                stand_in = _StandIn(full, pieces[-1][1][i], tokens, is_read_once)
                self._stand_ins[id(full)] = stand_in
        return block.nested(leaves)

    def _full(
        self,
        shape: TensorShape,
        tokens: TokenAxis,
        pieces: Sequence[tuple[Part, Tensor]],
        sample_axis: int | None = None,
    ) -> Tensor:
        """Puts tokens of parts into a tensor of full size."""
        runner = self.runner
        full = torch.full(shape.shape, runner.fill, dtype=shape.dtype, device=runner.device)
        for part, values in pieces:
            view = full
            if part.samples is not None and sample_axis is not None:
                samples = part.samples_of(full.shape[sample_axis])
                view = full.narrow(sample_axis, samples.start, samples.stop - samples.start)
            tokens.owned(part).put(view, tokens.axis, values)
        return full

    # --- modules whose result is stored ---------------------------------------------------------------

    def _module(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers the call of a module that is no block."""
        where = BETWEEN if self._inside is None else self._inside
        place = (where, site.name, self._turns[where, site.name])
        self._turns[where, site.name] += 1
        runner, run = self.runner, partial(site.diffpipe_original, *args, **kwargs)
        for results, constants in (
            (runner.of_request, runner.layout.constants),
            (runner.of_step, runner.layout.step_constants),
        ):
            if place in constants:
                # What was cut is of this part only, and must not be taken for another's.
                is_whole = where == BETWEEN or constants[place] == shapes_of_call(args, kwargs)
                return self._stored(results, (place, None if is_whole else self.part), run)
        if where != BETWEEN and runner.step_cache and site.name in runner.step_cache.hooked:
            before, out = self._num_attended, run()
            # One that is skipped leaves the numbers of calls after it as they are.
            attended = runner.attended.setdefault(place, self._num_attended - before)
            self._num_attended = before + attended
            return out
        return run()

    def _stored(self, results: dict[Any, Any], key: Any, run: Callable[[], Any]) -> Any:
        """Returns a stored result, which the first call makes."""
        if key not in results:
            self._storing = True
            try:
                results[key] = run()
            finally:
                self._storing = False
            if results is self.runner.of_request:  # held, so that identities stay what they are
                leaves = pytree.tree_leaves(results[key])
                results.update({id(x): x for x in leaves if isinstance(x, Tensor)})
        return results[key]


class _StandIn(NamedTuple):
    """An object of full size, perhaps without memory, and the tokens of the part that it stands for."""

    full: Tensor
    slices: Tensor
    tokens: TokenAxis
    is_read_once: bool
