"""A rank's loop without flushes: PipeDream's, with weights in several versions.

    batch k -> forward of k, backward of one that went out before -> a step of this rank's own optimizer
                    '- with the weights that it went forward with -'      '- older weights are stored -'

Messages skew the ranks; nothing else ties them: rank 0 is ahead of the last rank by as many batches as
are under way. So the loss of a batch is known some batches later, on all ranks after the same one. Draining takes
back what is under way; afterwards weights have one version, and all ranks have trained on the same batches.

Of gradients a parameter has only those of the batch that comes back: another may have started, if several
microbatches make a batch, and then its sum stays in `.grad` until the next batch.

Sources: see `planning/schedules/pipedream.py`.
"""

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_diffpipe.comm.transport import PendingWork, Transport, message_key
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.trial import HooksOf, hooks_off
from lightning_diffpipe.planning.instruction import Program
from lightning_diffpipe.planning.lowering import delivered, lower, lower_loop
from lightning_diffpipe.planning.schedules.one_f_one_b import warmup_forwards
from lightning_diffpipe.planning.schedules.pipedream import frozen_front, loop_program, unrolled
from lightning_diffpipe.runtime.batch_layout import BatchLayout, StepWork
from lightning_diffpipe.runtime.bubbles import FrozenWork
from lightning_diffpipe.runtime.engine import Engine, StepResult
from lightning_diffpipe.runtime.executor import run_alone
from lightning_diffpipe.runtime.reduction import GradientReducer, call_hooks
from lightning_diffpipe.runtime.results import Returned, returned_of
from lightning_diffpipe.runtime.stage import MicrobatchWork

_SCHEDULED = ("lr", "momentum", "betas", "weight_decay")
"""What schedulers change in a parameter group."""


class WeightVersions:
    """Weights of a rank as they are, and as they were when batches under way began.

    Version v is there after v steps of the optimizer since the pipeline was empty. A parameter stays the same
    object and gets other memory, so that whoever holds it holds the right version.

    Args:
        parameters: Trained parameters of this rank.
        delay: Number of steps by which the weights of a batch are older than its number.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], delay: int) -> None:
        self._parameters, self._delay = tuple(parameters), delay
        self._stored: dict[int, list[torch.Tensor]] = {}
        self._latest = 0

    @contextlib.contextmanager
    def of(self, batch: int) -> Iterator[None]:
        """Restores inside the parameters that this batch is trained on."""
        version = self._version_of(batch)
        if version == self._latest:
            yield
            return
        latest = [parameter.data for parameter in self._parameters]
        self._put(self._stored[version])
        try:
            yield
        finally:
            self._put(latest)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Lets the optimizer step inside, in batches' order; what a batch under way has read stays as it was."""
        if self._delay == 0:
            yield
            self._latest += 1
            return
        self._stored[self._latest] = [parameter.data for parameter in self._parameters]
        self._put([parameter.data.clone() for parameter in self._parameters])
        # Autograd has recorded which version of a tensor it will need: that is stored, not written to.
        with torch.autograd._unsafe_preserve_version_counter(self._parameters):
            yield
        self._latest += 1
        for version in [v for v in self._stored if v < self._version_of(self._latest)]:
            del self._stored[version]

    def forget(self) -> None:
        """Counts versions from 0 again, when nothing is under way any more."""
        self._stored.clear()
        self._latest = 0

    def _version_of(self, batch: int) -> int:
        return max(batch - self._delay, 0)

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.data = tensor


@dataclass
class _UnderWay:
    """A batch whose results are still to come."""

    batch_index: int
    num_samples: int
    sharing: PendingWork
    returned: Returned


class FreeRunningEngine(Engine):
    """One rank's side of a pipeline that is not flushed between batches.

    Args:
        layout: Lays batches out; one stage on each rank.
        reducer: Sums gradients over pipelines side by side.
        parameters: Trained parameters of this rank.
        staleness: Number of batches by which weights are older than a batch that this rank runs with them.
        check_finite: Look for NaN and infinity at stage boundaries.
        transport: Carries messages; made from the mesh if not given.

    Attributes:
        optimizers: Step after every batch that has come back.
        clip_value: Bound of every single gradient.
        versions: The weights.
    """

    def __init__(
        self,
        layout: BatchLayout,
        reducer: GradientReducer,
        parameters: Sequence[nn.Parameter],
        staleness: int,
        check_finite: bool = False,
        transport: Transport | None = None,
    ) -> None:
        self._per_batch = layout.schedule.num_microbatches
        # More than can be under way anywhere, and twice that, until the last message has confirmed another.
        self._ring = self._per_batch * (2 * layout.schedule.num_ranks + 2)
        super().__init__(layout, reducer, check_finite, transport)
        self._follow_loop()
        self.optimizers: Sequence[Optimizer] = ()
        self.clip_value: float | None = None
        self.versions = WeightVersions(parameters, staleness)
        self._parameters = tuple(parameters)
        self._runner.weights_of = lambda work: self.versions.of(work.batch)
        self.executor.update = self._update
        self._num_batches = 0
        self._recording = self.executor.recording
        self._hooks: HooksOf = {}
        self._works: dict[int, MicrobatchWork] = {}
        self._settings: dict[int, list[dict[str, Any]]] = {}
        self._under_way: deque[_UnderWay] = deque()
        # After so many batches the first rank has what the last one sent, without waiting for it.
        self._results_after = -(-warmup_forwards(layout.schedule.placement, 0) // self._per_batch)

    @property
    def is_empty(self) -> bool:
        """Whether no batch is under way."""
        return not self._num_batches

    def advance(
        self, batch: Any, batch_index: int, arguments: tuple[Any, ...] = (), alarm: bool = False
    ) -> list[StepResult]:
        """Forwards a batch, returns the results that have arrived, and steps the optimizers after it.

        Args:
            batch: This pipeline's batch, on this rank's device.
            batch_index: Number of the batch since training began; seeds its random numbers.
            arguments: Further arguments of the step.
            alarm: Whether this rank raises one, which all ranks of the pipeline learn with this batch's results.

        Returns:
            Results of batches before, or of this one, that all ranks know by now; none while the pipeline fills.
            Their recording is that of this step.

        Raises:
            As `run_step`.
        """
        works, program, frozen = self.begin(batch, batch_index, arguments)
        self._run(program, frozen, flushes=False)
        self.layout.steps.count()
        under_way = [*(batch.returned for batch in self._under_way), returned_of(works)]
        # The latest whose backwards have run on all ranks.
        returned = under_way[0] if len(under_way) > self._results_after else ()
        started = self._results.start(works, alarm, returned)
        sharing = self._transport.awaited(started, "loss and metrics")
        num_samples = sum(work.num_samples for work in works)
        self._recording = self.executor.recording
        self._under_way.append(_UnderWay(batch_index, num_samples, sharing, under_way[-1]))
        return self._finished(self._results_after)

    def drain(self) -> list[StepResult]:
        """Runs the batches in flight to their end and steps the optimizers; returns results as `advance` does."""
        if self.is_empty:
            return []
        self._run(self.begin_drain(), None, flushes=True)
        gradients_returned = [batch.returned for batch in self._under_way]
        results = self._finished(0)
        # No later batch is started, with which ranks compare them.
        for of_batch in gradients_returned:
            self._results.require_returned(of_batch, self._transport.awaited)
        return results

    def begin(
        self, batch: Any, batch_index: int, arguments: tuple[Any, ...] = ()
    ) -> tuple[list[MicrobatchWork], Program, FrozenWork | None]:
        """Lays the next batch out: its microbatches, what this rank runs now, and the frozen parts."""
        step = self.layout.lay_out(batch, batch_index, arguments)
        if step.base is not self.layout.schedule:
            raise ConfigurationError(
                f"batch {batch_index} has a call sequence with layers that are called several times, and without a "
                "flush their gradients would be of different batches; choose a schedule that flushes, such as 1f1b"
            )
        if len(step.works) != self._per_batch:
            raise ConfigurationError(
                f"a batch of {sum(w.num_samples for w in step.works)} samples cannot be cut into "
                f"{self._per_batch} microbatches, and without a flush every batch has as many; give the data "
                "loader drop_last=True, or plan fewer microbatches"
            )
        number, self._num_batches = self._num_batches, self._num_batches + 1
        for work in step.works:
            work.batch = number
            work.index = (number * self._per_batch + work.index) % self._ring
            self._works[work.index] = work
        self.layout.weigh(step.works)
        self._settings[number] = _settings(self.optimizers)
        program = self._loop(range(number, number + 1), front=frozen_front(step.program))
        return step.works, program, step.frozen

    def begin_drain(self) -> Program:
        """Returns what this rank runs to take back all that is under way."""
        return self._loop(range(self._num_batches, self._num_batches), drains=True)

    def end_drain(self) -> None:
        """Notes that nothing is under way any more."""
        self._num_batches = 0
        self._works.clear()
        self._settings.clear()
        self.versions.forget()

    def close(self) -> None:
        """Frees tensors that outlive a step."""
        self.end_drain()
        self._under_way.clear()
        self._results.clear()
        super().close()

    def _follow(self, step: StepWork) -> None:
        """Leaves it at what is said of the loop."""

    def _follow_loop(self) -> None:
        """Returns which of the messages that this rank sent another one confirms, wherever in the loop."""
        schedule, ring, rank = self.layout.schedule, self._ring, self.layout.mesh.local_rank
        looped = lower(unrolled(schedule, 3 * ring // self._per_batch))
        confirmed = {
            message_key(wait, ring): [message_key(send, ring) for send in sends]
            for wait, sends in delivered(looped)[rank].items()
            if ring <= wait.microbatch < 2 * ring
        }
        self._transport.follow(schedule.num_stages, confirmed)

    def _loop(self, batches: range, **options: Any) -> Program:
        schedule, rank = self.layout.schedule, self.layout.mesh.local_rank
        program = loop_program(schedule.placement, rank, self._per_batch, batches, **options)
        return lower_loop(schedule, program, self._ring)

    def _run(self, program: Program, frozen: FrozenWork | None, *, flushes: bool) -> None:
        self.executor.flushes = flushes
        try:
            with hooks_off(self._parameters) as self._hooks:
                run_alone(self.executor, program, self._works, frozen)
        except BaseException:
            self._under_way.clear()
            self.end_drain()
            raise
        finally:
            self.executor.flushes = True
        if flushes:
            self.end_drain()

    def _finished(self, left: int) -> list[StepResult]:
        """Returns results of all batches under way but the latest ones."""
        results = []
        while len(self._under_way) > left:
            done = self._under_way.popleft()
            done.sharing.wait()
            loss, _, logged = self._results.finish()
            results.append(
                StepResult(
                    loss,
                    logged,
                    done.num_samples,
                    self._recording,
                    self._results.alarm,
                    done.batch_index,
                )
            )
        return results

    def _update(self, work: MicrobatchWork) -> None:
        """Steps the optimizers with the gradients of the batch whose last microbatch has come back."""
        summing = self.reducer.start(self._transport.awaited)
        if summing is not None:
            summing.wait()
        for parameter in self._parameters:
            if parameter.grad is not None:
                call_hooks(parameter, self._hooks)
        if self.clip_value:
            nn.utils.clip_grad_value_(self._parameters, self.clip_value)
        # Parameter groups have what they had when the batch went out, the same on all ranks.
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        restored = list(zip(groups, self._settings.pop(work.batch), strict=True))
        now = [{name: group[name] for name in then} for group, then in restored]
        for group, then in restored:
            group.update(then)
        try:
            with self.versions.updating():
                for optimizer in self.optimizers:
                    optimizer.step()
        finally:
            for group, latest in zip(groups, now, strict=True):
                group.update(latest)
        for parameter in self._parameters:
            parameter.grad = None
        for index in [index for index, w in self._works.items() if w.batch == work.batch]:
            del self._works[index]


def _settings(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """Returns what schedulers have set by now, by parameter group."""
    return [
        {name: copy.deepcopy(group[name]) for name in _SCHEDULED if name in group}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
