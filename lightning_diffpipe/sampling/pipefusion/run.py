"""One request of PipeFusion on one rank: the loop over turns, and what it sends and waits for.

With an automatic warm-up, what comes after a synchronous step is not known before its prediction is. The last
rank compares what the model will be given next with what it was given, and sends the others the outcome; before
they have it, they post no receive for what may be of another shape.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_diffpipe.comm.links import Incoming, Links, MessageKind, start_all_gather
from lightning_diffpipe.comm.packing import TensorShape, pack, packed_shape, unpack
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.planning.schedules.pipefusion import PipeFusionPlan, Turn
from lightning_diffpipe.sampling.pipefusion.kv_cache import KvCache, PartAttention
from lightning_diffpipe.sampling.pipefusion.patch import PartRun, PartRunner, Slices, Stages
from lightning_diffpipe.sampling.pipefusion.sequence_attention import SEQUENCE_MODES
from lightning_diffpipe.sampling.report import Stopwatch
from lightning_diffpipe.sampling.request import Complete, Loop, Request
from lightning_diffpipe.sampling.schedulers import PatchSchedulers
from lightning_diffpipe.sampling.step_caches import DECISION, StepCache
from lightning_diffpipe.sampling.tracing.layout import Layout, Part


@dataclass(frozen=True)
class PipeFusionSetting:
    """All decisions about a request before it runs; the same on all ranks.

    Attributes:
        stages: Blocks of each rank.
        patches: Part of the tokens that each patch computes.
        shares: For each patch, what each rank of a stage computes of it.
        plan: Its turns; of synchronous steps only while W is to be found.
    """

    layout: Layout
    stages: Stages
    patches: tuple[Part, ...]
    shares: tuple[tuple[Part, ...], ...]
    plan: PipeFusionPlan


class PipeFusionRun:
    """State of one request on this rank, caches included; its plan gets W as soon as that is known."""

    def __init__(
        self, sampler: Any, request: Request, setting: PipeFusionSetting, watch: Stopwatch
    ) -> None:
        self._links, self._request, self._setting = sampler.links, request, setting
        self._watch, self.plan = watch, setting.plan
        self._warmup_threshold = sampler.warmup_threshold
        layout, links = setting.layout, sampler.links
        self._is_first, self._is_last = links.rank == 0, links.rank == links.num_ranks - 1
        self._sequence = sampler.sequence_links
        shared = self._sequence.num_ranks > 1
        self._cache = KvCache(setting.patches, hide_unseen=sampler.hide_unseen)
        self._fill = math.nan if sampler.verify else 0.0
        self._interception = Interception(sampler.model)
        attend: PartAttention = self._cache.attend
        self._shared: dict[Part, tuple[Part, Sequence[Part]]] = {}  # by the part of this rank
        if shared:
            mode = SEQUENCE_MODES[sampler.sequence_mode]
            attend = mode(self._sequence, self._shared.__getitem__, self._cache).attend
        stage, device = setting.stages.stages[links.rank], request.latents.device
        self._step_cache = StepCache(request, [self._sequence])
        # Calls of the last block in a step, whose results the first rank stores.
        self._stored_calls: list[int] = []
        self._runner = PartRunner(
            layout, stage, self._interception, attend, device, self._fill, self._step_cache
        )
        self._loops = [request.loop() for _ in setting.patches]
        for loop in self._loops:
            loop.steps_no_rows, loop.is_shared = not self._is_last, True
        self._loops[0].on_change = self._runner.of_request.clear
        # Of this rank, in steps that compute all tokens.
        self._own_units = self._shares(None, (0, 1))[1][self._sequence.rank].units
        self._schedulers: PatchSchedulers | None = None  # the loop itself steps all rows
        if not sampler.steps_all_rows:
            units = [shares[self._sequence.rank].units for shares in setting.shares]
            rows = [(u.start * layout.rows_per_unit, len(u) * layout.rows_per_unit) for u in units]
            schedulers = PatchSchedulers(request.scheduler, request.step_kwargs, rows, layout.axis)
            self._schedulers = schedulers.going_on(request.patch_schedulers)
        # Latents that the model got in the synchronous step before.
        self._given_before: Tensor | None = None
        # The newest rows, by call of the denoiser in a step.
        self._predictions: dict[int, Tensor] = {}
        self._hidden = _Inbox(links, links.rank - 1, "hidden")
        self._returned = _Inbox(links, links.num_ranks - 1, "latents")

    def run(self, on_step: Callable[[int], None] | None) -> Tensor:
        """Runs all turns; returns the final latents."""
        cache, layout = self._step_cache, self._setting.layout
        with cache.installed():
            self._interception.watch(cache.hooked)
            if self._links.num_ranks > 1:
                last_block = cache.divide(layout.block_names, self._is_last)
                named = [c for c, block in enumerate(layout.blocks) if block.name == last_block]
                self._stored_calls = named
            with self._interception.installed():
                latents = self._run_turns(on_step)
        links, sequence = self._links, self._sequence
        last = links.num_ranks - 1
        if not self._is_last:
            latents = links.receive(TensorShape.of(latents), last, "result").wait()
        else:
            if self._schedulers is not None:
                self._collect_rows(latents, None, "result")
            for rank in range(last):
                links.send(latents, rank, "result")
        links.finish()
        sequence.finish()
        return latents

    def _turns(self) -> Iterator[Turn]:
        """Yields all turns in order. Their messages are expected as soon as the plan says what they are."""
        start = 0
        while start < len(turns := self.plan.turns):  # another plan, perhaps, once W is known
            ends = (turn.index + 1 for turn in turns[start:] if self.plan.decides_after(turn))
            stop = next(ends, len(turns))
            if not self._is_first:
                self._hidden.expect(self._hidden_of(turns[start:stop]))
            elif not self._is_last:
                self._returned.expect(self._returned_after(turns[start:stop]))
            yield from turns[start:stop]
            start = stop

    def _hidden_of(self, turns: Sequence[Turn]) -> Iterator[_Announced]:
        """Yields the messages of hidden states that the rank before this one sends in some turns."""
        layout, stage = self._setting.layout, self._setting.stages.stages[self._links.rank]
        decision = [DECISION] * bool(self._stored_calls)
        for turn in turns:
            part = self._part(turn)
            for calls in filter(None, stage.incoming):
                shapes = [shape for call in calls for shape in layout.blocks[call].shapes(part)]
                yield _Announced(turn.index, shapes + decision)

    def _returned_after(self, turns: Sequence[Turn]) -> Iterator[_Announced]:
        """Yields the messages of latents that the last rank sends after some turns."""
        layout, latents = self._setting.layout, self._request.latents
        for turn in turns:
            if turn.step < self.plan.num_steps - 1 and (turn.patch is not None or turn.is_last):
                part = self._part(turn)
                rows = TensorShape.of(layout.take_rows(latents, part.units))
                stored = [
                    s for call in self._stored_calls for s in layout.blocks[call].shapes(part)
                ]
                yield _Announced(turn.index, [rows, *stored])

    def _run_turns(self, on_step: Callable[[int], None] | None) -> Tensor:
        """Runs all turns; returns the latents, of which this rank knows the rows of its own steps."""
        request = self._request
        latents = request.latents.clone()
        microbatches: list[PartRun] = []  # of a synchronous step, but for the last one
        # A step that a step cache skips leaves no keys.
        always_keeps = request.cache is not None
        for turn in self._turns():
            if turn.is_first:
                patches_follow = self.plan.num_synchronous < self.plan.num_steps
                keeps = self.plan.may_be_last_synchronous(turn.step)
                self._cache.keeps = keeps or (always_keeps and patches_follow)
                self._runner.start_step()
            self._receive_latents(turn, latents)
            self._step_cache.begin(turn.step, turn.patch)
            loop, predict = self._loop_at(turn, latents)
            is_partial = turn.patch is None and not turn.is_last
            run = self._runner.run(
                predict,
                self._part(turn),
                self._receive,
                self._send,
                microbatches if self._is_last else (),
                stop=is_partial,
            )
            microbatches = [*microbatches, run] if is_partial else []
            if run.prediction is not None:
                latents = self._step(turn, loop, run, latents)
            if turn.is_last:
                if self.plan.decides_after(turn):
                    self._end_warmup_if_below(turn, latents)
                self._watch.step_done()
                if on_step is not None:
                    on_step(turn.step)
        return latents

    def _step(self, turn: Turn, loop: Loop, run: PartRun, latents: Tensor) -> Tensor:
        """Steps the scheduler on the last rank, and sends the rows to the first; returns the latents after it."""
        layout, units, prediction = self._setting.layout, run.part.units, run.prediction
        if loop.is_divided:
            # Halves of the ranks send each other these rows only, if the loop allows it.
            rows = None if loop.mixes else units
            prediction = loop.guided(
                prediction,
                lambda x: layout.take_rows(x, rows),
                lambda x, values: layout.put_rows(x, rows, values),
            )
        if self._schedulers is None:
            if not loop.mixes:  # or else they were collected before
                self._collect_rows(prediction, None, "prediction")
            latents = loop.step(prediction)
        else:
            # Pipelines may have changed latents after the step before.
            layout.put_rows(latents, units, layout.take_rows(loop.sample, units))
            if self.plan.decides_after(turn):
                self._given_before = self._given(latents, turn.step)
            t, kwargs = loop.given
            self._schedulers.step(latents, prediction, t, turn.patch, kwargs)
        if not self._is_first and turn.step < self.plan.num_steps - 1:
            stored = [x for c in self._stored_calls for x in run.slices[c]]
            self._links.send(pack([layout.take_rows(latents, units), *stored]), 0, "latents")
        return latents

    def _loop_at(self, turn: Turn, latents: Tensor) -> tuple[Loop, Callable[[], Tensor]]:
        """Returns the loop of a turn's patch, and a function that runs it up to its prediction.

        In synchronous steps the first loop predicts, and all others skip the step. The first rank reads the latents
        that a loop is given, and the last one steps its rows of them; all else is not read.
        """
        given: Tensor | None = None  # the loop goes on from latents of its own
        if turn.step > 0 and self._schedulers is not None:
            given = latents if self._is_first else torch.full_like(latents, self._fill)
            if self._is_last and not self._is_first:
                layout, units = self._setting.layout, self._part(turn).units
                layout.put_rows(given, units, layout.take_rows(latents, units))
        loop = self._loops[turn.patch or 0]
        complete: Complete | None = None
        if loop.mixes and self._is_last:
            complete = functools.partial(self._completed, turn)
        if turn.patch is None and not turn.is_first:  # another microbatch
            return loop, functools.partial(loop.predict, again=True, complete=complete)
        if turn.patch is None:
            for other in self._loops[1:]:
                other.skip(given)
        return loop, functools.partial(loop.predict, given, complete=complete)

    def _completed(self, turn: Turn, number: int, prediction: Tensor) -> Tensor:
        """Fills in the rows of other patches, of later ones those of the step before, as with keys and values."""
        self._collect_rows(prediction, turn.patch, "prediction")
        if turn.patch is None:
            self._predictions[number] = prediction.clone()
            return prediction
        layout, newest = self._setting.layout, self._predictions[number]
        units = self._setting.patches[turn.patch].units
        layout.put_rows(newest, units, layout.take_rows(prediction, units))
        return newest.clone()

    def _collect_rows(self, x: Tensor, patch: int | None, kind: MessageKind) -> None:
        """Fills in the rows of a patch, or of all, that other ranks of the stage have."""
        parts, layout = self._shares(patch, (0, 1))[1], self._setting.layout
        if len(parts) == 1:
            return
        rows = [layout.take_rows(x, part.units) for part in parts]
        shapes = [TensorShape.of(each) for each in rows]
        gathered = start_all_gather(self._sequence, rows[self._sequence.rank], shapes, kind)()
        for part, values in zip(parts, gathered, strict=True):
            layout.put_rows(x, part.units, values)

    def _part(self, turn: Turn) -> Part:
        """Returns the tokens and samples that this rank computes in a turn."""
        shared = self._shares(turn.patch, turn.microbatch)
        part = shared[1][self._sequence.rank]
        self._shared[part] = shared
        return part

    def _shares(
        self, patch: int | None, microbatch: tuple[int, int]
    ) -> tuple[Part, Sequence[Part]]:
        """Returns the part that all ranks of the stage compute together, and that of each."""
        setting, n = self._setting, self._sequence.num_ranks
        if patch is not None:
            return setting.patches[patch], setting.shares[patch]
        together = Part(samples=microbatch if microbatch[1] > 1 else None)
        if n == 1:
            return together, (together,)
        # The rows that are a rank's own in patches are its own in synchronous steps.
        units = [tuple(shares[k].units for shares in setting.shares) for k in range(n)]
        return together, [replace(together, units=units[k], text=(k, n)) for k in range(n)]

    # --- automatic warm-up ----------------------------------------------------------------------------

    def _end_warmup_if_below(self, turn: Turn, latents: Tensor) -> None:
        """Lets patches flow from the next step on, on all ranks, if the model is given nearly the same there."""
        links = self._links
        last = links.num_ranks - 1
        if self._is_last:
            now = self._given(latents, turn.step + 1)
            # Squared norms of the change and of the input.
            squares = torch.stack(
                [x.double().square().sum() for x in (now - self._given_before, now)]
            )
            if self._sequence.num_ranks > 1:  # every rank of the stage has rows of its own
                shapes = [TensorShape.of(squares)] * self._sequence.num_ranks
                gathered = start_all_gather(self._sequence, squares, shapes, "statistics")()
                squares = torch.stack(gathered).sum(0)
            changed, size = squares.tolist()
            is_below = (math.sqrt(changed / size) if size else math.inf) < self._warmup_threshold
            for rank in range(last):
                decision = torch.tensor([is_below], dtype=torch.uint8, device=links.device)
                links.send(decision, rank, "control")
        else:
            decision = links.receive(TensorShape((1,), torch.uint8), last, "control").wait()
            is_below = bool(decision.item())
        if is_below:
            self.plan = replace(self.plan, warmup_steps=turn.step + 1)

    def _given(self, latents: Tensor, step: int) -> Tensor:
        """Returns the model's input for this rank's rows in a step."""
        rows = self._setting.layout.take_rows(latents, self._own_units)
        return self._request.scaler.scale(rows, step)

    # --- hidden states, from rank to rank -------------------------------------------------------------

    def _receive(self) -> Slices:
        shapes, message = self._hidden.take()
        slices = unpack(message, shapes)
        if self._stored_calls:
            self._step_cache.decide(slices.pop())
        return slices

    def _send(self, slices: Slices) -> None:
        if self._stored_calls:
            slices = [*slices, self._step_cache.decision(self._links.device)]
        self._links.send(pack(slices), self._links.rank + 1, "hidden")

    # --- latents, from the last rank back to the first --------------------------------------------------

    def _receive_latents(self, turn: Turn, latents: Tensor) -> None:
        """Waits, on the first rank, for the rows that a turn starts from, from the step of the last rank."""
        if not self._is_first or self._is_last:
            return
        if self._links.occupies_device:
            # When ranks are equally fast, the last rank now sends them. At the wait would be too late: it could not
            # compute on if it had to wait for its device, nor could then the ranks before it.
            self._returned.begin_upto(turn.index - (self._links.num_ranks - 1))
        # After a synchronous step all rows come at once, on the first turn of the next.
        after_synchronous = turn.step <= self.plan.num_synchronous
        if turn.step == 0 or (after_synchronous and not turn.is_first):
            return
        layout, (shapes, message) = self._setting.layout, self._returned.take()
        rows, *stored = unpack(message, shapes)
        units = self._own_units if after_synchronous else self._part(turn).units
        layout.put_rows(latents, units, rows)
        for number, call in enumerate(self._stored_calls):
            block = layout.blocks[call]
            leaves = block.dummy(self._fill, rows.device)
            for leaf in sorted(block.outputs):
                leaves[leaf] = stored.pop(0)
            patch = None if after_synchronous else turn.patch
            self._step_cache.store(number, patch, block.nested(leaves))


class _Announced(NamedTuple):
    """A message to come: the turn in which it is made, and the shapes of its tensors."""

    turn: int
    shapes: list[TensorShape]


@dataclass
class _Inbox:
    """Messages of one kind from one rank, in order; a receive is posted one message early."""

    links: Links
    source: int
    kind: MessageKind

    def __post_init__(self) -> None:
        self._to_come: Iterator[_Announced] = iter(())
        self._posted: deque[tuple[_Announced, Incoming]] = deque()

    def expect(self, messages: Iterable[_Announced]) -> None:
        """Announces messages that come after those announced before."""
        self._to_come = itertools.chain(self._to_come, messages)
        if not self._posted:
            self._post()

    def take(self) -> tuple[list[TensorShape], Tensor]:
        """Waits for the next message, having posted the receive of the one after it."""
        message, incoming = self._posted.popleft()
        if not self._posted:
            self._post()
        return message.shapes, incoming.wait()

    def begin_upto(self, turn: int) -> None:
        """Begins the receives of all messages that are made up to a turn."""
        while self._posted and self._posted[-1][0].turn < turn and self._post():
            pass
        for message, incoming in self._posted:
            if message.turn <= turn:
                incoming.begin()

    def _post(self) -> bool:
        message = next(self._to_come, None)
        if message is None:
            return False
        incoming = self.links.receive(packed_shape(message.shapes), self.source, self.kind)
        self._posted.append((message, incoming))
        return True
