"""A module trained as a pipeline: everything between a batch and its gradients.

The engine holds one rank's side of a plan. It lays every batch out, runs this rank's program and shares the
results:

    batch -> BatchLayout: microbatches, program -> Executor -> gradients in .grad, loss on every rank
    coming batches -> PreparedBatches -'

With filling, the batches that come next are laid out too, and their frozen layers run while this one
waits. A step then begins with what is left of its own, and the exchange of the results.

It knows no Lightning: a step is a function of the module and a batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from lightning_diffpipe.clock import clock_for
from lightning_diffpipe.comm.transport import PendingWork, Transport
from lightning_diffpipe.graph.trial import hooks_off
from lightning_diffpipe.planning.schedule import Schedule, messages_of_edge
from lightning_diffpipe.runtime.batch_layout import BatchLayout, StepWork
from lightning_diffpipe.runtime.executor import Executor, run_alone
from lightning_diffpipe.runtime.recording import Recording
from lightning_diffpipe.runtime.reduction import GradientReducer
from lightning_diffpipe.runtime.results import ChainEnds, Logged, ResultSharing
from lightning_diffpipe.runtime.stage import MicrobatchWork, StageRunner, Stash
from lightning_diffpipe.runtime.upcoming import Filling, PreparedBatches, Upcoming


@dataclass(frozen=True)
class StepResult:
    """Results of a step besides gradients.

    Attributes:
        loss: Mean loss over the samples of the pipeline's batch; a scalar, equal on all its ranks.
        logged: Metrics that the user's step logged, combined over microbatches as `reduce_fx` says.
        recording: Start and stop of the instructions of this rank.
        alarm: A rank of the pipeline gave one.
        batch_index: Number of the batch, where it is not that of the step.
    """

    loss: Tensor
    logged: list[Logged]
    num_samples: int
    recording: Recording
    alarm: bool = False
    batch_index: int | None = None


class Engine:
    """One rank's side of a pipeline.

    Args:
        check_finite: Look for NaN and infinity at stage boundaries.
        transport: Carries messages; made from the mesh if not given.
        image: Callback that draws a schedule with a mark where a rank waits, for the error of a timeout.
    """

    def __init__(
        self,
        layout: BatchLayout,
        reducer: GradientReducer,
        check_finite: bool = False,
        transport: Transport | None = None,
        image: Callable[[Schedule, int, int], str] | None = None,
    ) -> None:
        self.layout = layout
        self.reducer = reducer
        self._reduces, self._alarm = True, False
        self._window_is_separate: bool | None = None  # of the accumulation window that has started
        self._image = image
        self._clock = clock_for(layout.mesh.device)
        self._prepared: PreparedBatches | None = None
        mesh, placement = layout.mesh, layout.schedule.placement
        self._transport = transport or Transport(mesh)
        self._connected = layout.schedule
        self._runner = StageRunner(Stash(), mesh.device, check_finite)
        self._ends = ChainEnds(placement, mesh.local_rank, self._runner)
        self.executor = Executor(
            mesh.local_rank,
            self._runner,
            self._transport,
            self._start_reduction,
            lambda works: self._ends.gather(works, self._transport),
            self._share_results,
            self._clock,
            stream=layout.steps.stream,
        )
        self._results = ResultSharing(mesh, placement.rank_of(placement.num_stages - 1, 0))

    @property
    def num_pipelines(self) -> int:
        """Pipelines side by side."""
        return self.layout.mesh.layout.num_pipelines

    @property
    def num_bytes_sent(self) -> int:
        """Bytes of all messages that this rank has sent so far; sums over ranks do not count."""
        return self._transport.num_bytes_sent

    def fill_bubbles(self, filling: Filling) -> None:
        """Runs frozen layers of coming batches in the waits of this one, from now on."""
        self.drop_prepared()
        self._prepared = PreparedBatches(filling, self.layout, self._clock)

    def num_prepared_after(self, batch_index: int) -> int:
        """Returns how many batches after this one `run_step` was given already as `upcoming`."""
        return self._prepared.num_after(batch_index) if self._prepared else 0

    def drop_prepared(self) -> None:
        """Forgets the batches that were to come: they will not, or others will."""
        if self._prepared:
            self._prepared.drop()

    def run_step(
        self,
        batch: Any,
        batch_index: int,
        accumulate: int = 1,
        reduce_gradients: bool = True,
        arguments: tuple[Any, ...] = (),
        upcoming: Upcoming = (),
        alarm: bool = False,
    ) -> StepResult:
        """Runs one batch forward and backward; gradients are added to `.grad`.

        Args:
            batch: This pipeline's batch, on this rank's device.
            batch_index: Number of the batch since training began; seeds its random numbers.
            accumulate: Batches whose gradients are averaged before an optimizer step.
            reduce_gradients: Sum gradients over ranks at the end; not before the last batch of an
                accumulation window.
            arguments: Further arguments of the step.
            upcoming: Batches, and their arguments, that come after this one and those that were given
                before; their frozen layers run in bubbles. Equally many on all ranks of the pipeline.
            alarm: Whether this rank raises one, which all ranks of the pipeline know after the step.

        Raises:
            ConfigurationError: The batch is another than was given as `upcoming` before.
            PipelineTimeoutError: A message did not come in time.
            GraphError: The step did not call the layers that were probed.
        """
        prepared = self._prepared
        step = prepared.take(batch, batch_index) if prepared else None
        if step is None:
            step = self.layout.lay_out(batch, batch_index, arguments)
        self.layout.weigh(step.works, accumulate)
        if prepared:
            prepared.prepare(upcoming, batch_index)
        if step.base is not self._connected:  # other messages than in the batch before
            self.layout.mesh.connect_edges(messages_of_edge(step.base))
            self._connected = step.base
        self._follow(step)
        weighted = step.works[0].partitioned.graph.weighted
        rank, filler = self.layout.mesh.local_rank, prepared.filler if prepared else None
        image = self._image and partial(self._image, step.schedule, rank=rank)
        with hooks_off(self.reducer.parameters) as hooks:
            is_separate = self._sums_separately(
                weighted or bool(hooks), accumulate, reduce_gradients
            )
            earlier = self.reducer.take() if is_separate else ()
            self._reduces, self._alarm = reduce_gradients or is_separate, alarm
            try:
                run_alone(self.executor, step.program, step.works, step.frozen, filler, image)
            except BaseException:
                self.drop_prepared()
                raise
        self.layout.steps.count()
        loss, weight, logged = self._results.finish(ends_window=reduce_gradients or accumulate == 1)
        if is_separate:  # a weight is a sum known only now
            self.reducer.add(earlier, hooks, weight if weighted else None)
        num_samples, recording = sum(w.num_samples for w in step.works), self.executor.recording
        if prepared:
            prepared.observe(step, recording)
        return StepResult(loss, logged, num_samples, recording, self._results.alarm)

    def _sums_separately(self, asks: bool, accumulate: int, ends_window: bool) -> bool:
        """Returns whether gradients of a batch are summed separately from those before it in its window.

        All ranks do it for all batches of a window, or sum after the last one.
        """
        if accumulate == 1:
            return asks
        if self._window_is_separate is None:
            self._window_is_separate = self.reducer.agreed(asks)
        is_separate = self._window_is_separate
        if ends_window:
            self._window_is_separate = None
        return is_separate

    def close(self) -> None:
        """Frees tensors that outlive a step."""
        self.drop_prepared()
        if self.layout.steps.stream is not None:
            self.layout.steps.stream.close()

    def _follow(self, step: StepWork) -> None:
        """Announces the messages to the transport, and what each of them confirms."""
        self._transport.follow(step.schedule.num_stages, *step.messages)

    def _share_results(self, works: Sequence[MicrobatchWork]) -> PendingWork | None:
        self._ends.report(works)
        under_way = self._results.start(works, self._alarm)
        if not under_way:
            return None
        return self._transport.awaited(under_way, "loss and metrics")

    def _start_reduction(self) -> PendingWork | None:
        if not self._reduces:
            return None
        return self.reducer.start(self._transport.awaited)
