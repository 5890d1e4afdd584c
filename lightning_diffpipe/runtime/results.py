"""The loss and the logged metrics of a step, brought from the last stage to every rank.

Callbacks decide by metrics (checkpoints, early stopping, schedulers), and they decide on every rank by
itself, so every rank needs the same numbers. Only the last stage ever computes them. One small sum over
the pipeline carries all of them, in a table with a row for each microbatch: each replica of the last stage fills
in its own, and everybody else adds zeros. Then every rank combines the rows as `reduce_fx` says. It is started
where a rank has run its program, and no rank waits for it idly: frozen layers run until it is there.

Which numbers those are (names and options of `self.log`) is known on the last stage only, and a microbatch may
log what others do not. The table has columns for all names that were ever agreed on. Whether there are others, and
which of the known ones were logged, is summed with it, between hosts, so that no GPU is asked. Where
there are new ones, for most modules once, they are gathered and the table is summed again.

With these is summed how many ranks had a gradient for what a layer gave to several of them. Tensors without one get
zeros, which travel with the gradients of others; where nobody had one in any batch of an optimizer step, of any
pipeline, a parameter would have none in one process, and get zeros here, with which optimizers take another step.

Of a step that trains several chains, every chain ends with the code after the last layer, on its own rank, and
computes its gradients there; what other chains give is NaN to it, and so are the loss and most of what is logged.
So when all microbatches are through, what the loss reads travels to the rank on which the last chain ends, and that
code runs once more, without gradients, on real values: the loss and all metrics are those of one process, to the
last bit.

    rank 0 | ...  0B1  5B1  <- ends of chain A, then the loss of every microbatch     (chain B ends here)
    rank 2 | ...  3B1  2B1  -> ends of chain A                                        (chain A ends here)
"""

import numbers
import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lightning_diffpipe.comm.mesh import Mesh, Work, gathered_objects, start_sum
from lightning_diffpipe.comm.transport import MessageKey, Parcel, PendingWork, Transport
from lightning_diffpipe.errors import ConfigurationError, GraphError
from lightning_diffpipe.graph.step import LoggedMetric
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.runtime.stage import (
    MicrobatchWork,
    PartitionedStep,
    StageRunner,
    TensorMessage,
)

Entries = dict[str, dict[str, Any]]
"""Options of `self.log` calls by name."""

# Arguments of `LightningModule.log` that may follow name and value by position.
_OPTIONS = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size",
)  # fmt: skip


@dataclass(frozen=True)
class Logged:
    """One `self.log` call to be made again on every rank.

    Attributes:
        value: Value of the whole batch of the pipeline: the mean over its samples, or the sum or extreme
            over its microbatches if `reduce_fx` is one.
        options: Further arguments of `self.log`; no `batch_size`, which was that of a microbatch.
    """

    name: str
    value: Tensor
    options: dict[str, Any]


Awaited = Callable[[Sequence[Work], str], PendingWork]
_Call = tuple[str, int]
"""The name of a layer, and which of its calls: places in a graph are others in other call sequences."""
Returned = Sequence[tuple[PartitionedStep, set[int]]]
"""For each microbatch its step, and layers to whose outputs a gradient came from what reads them on this rank."""


@dataclass
class _Shared:
    """Results of one step that are being summed.

    Attributes:
        own: Metrics that this rank logged in it.
        agreed: Columns of the table.
        noticed: Whether there are other names, whether there was an alarm, which names were logged, and how many
            ranks had a gradient for each layer.
        table: Values and samples.
        layers: Those layers.
    """

    works: Sequence[MicrobatchWork]
    own: Entries
    agreed: Entries
    noticed: Tensor
    table: Tensor
    layers: Sequence[_Call]


class ResultSharing:
    """Brings loss and metrics from the last stage to all ranks of the pipeline.

    Several steps may be under way; they are finished in order.

    Args:
        reporter: Position of the rank that runs microbatch 0 of the last stage.

    Attributes:
        alarm: Whether any rank gave one in the latest step; known when that is finished.
    """

    def __init__(self, mesh: Mesh, reporter: int) -> None:
        self._mesh = mesh
        self._reporter = reporter
        self.alarm = False
        self._agreed: Entries = {}
        self._under_way: deque[_Shared] = deque()
        self._counts: Counter[_Call] = Counter()  # since the latest optimizer step

    def start(
        self,
        works: Sequence[MicrobatchWork],
        alarm: bool = False,
        returned: Returned | None = None,
    ) -> list[Work]:
        """Begins to sum what this rank's microbatches have computed.

        Args:
            works: The microbatches.
            alarm: Something that all ranks of the pipeline shall hear of, from any of them.
            returned: That of an earlier batch, where backwards of this one are still to come; nothing if empty.

        Returns:
            What to wait for before `finish`; nothing where a pipeline has one rank.

        Raises:
            ConfigurationError: A logged value is neither a number nor a tensor of one element, or an option of
                `self.log` cannot travel.
        """
        logged: Entries = {}
        for work in works:
            for name, _, options in metrics_in(work.logged):
                logged.setdefault(name, options)
        alone = self._mesh.layout.ranks_per_pipeline == 1
        if alone:
            self._agreed = logged
        packed: dict[str, bytes] = {}
        for name, settings in () if alone else logged.items():
            try:
                packed[name] = pickle.dumps(settings)
            except Exception as error:  # objects refuse it with errors of many types
                listed = ", ".join(f"{option}={value!r}" for option, value in settings.items())
                raise ConfigurationError(
                    f"self.log({name!r}, ..., {listed}): these options cannot be sent to the other ranks of the "
                    f"pipeline ({type(error).__name__}: {error}). Give reduce_fx as 'mean', 'sum', 'max' or 'min', "
                    "and leave out sync_dist_group: every rank of a pipeline gets the value"
                ) from error
        unknown = any(
            name not in self._agreed or pickle.dumps(self._agreed[name]) != settings
            for name, settings in packed.items()
        )
        reached = _reached(returned_of(works) if returned is None else returned)
        names = (name in logged for name in self._agreed)
        noticed = torch.tensor([int(unknown), int(alarm), *names, *reached.values()])
        table = self._filled_in(works, self._agreed)
        shared = _Shared(works, logged, self._agreed, noticed, table, [*reached])
        self._under_way.append(shared)
        if alone:
            return []
        return [
            start_sum(noticed, self._mesh.control),
            start_sum(shared.table, self._mesh.pipeline_group),
        ]

    def finish(self, ends_window: bool = True) -> tuple[Tensor, Tensor, list[Logged]]:
        """Returns the first batch's mean loss, weight and metrics, equal on all ranks of a pipeline; as `start`.

        Args:
            ends_window: An optimizer step follows; all pipelines meet where there are several.

        Raises:
            GraphError: Its batches leave out what is made of a layer, so that nobody has a gradient for it.
        """
        shared = self._under_way.popleft()
        unknown, alarms, *counts = shared.noticed.tolist()
        self.alarm = bool(alarms)
        agreed, table = shared.agreed, shared.table
        present = {name for name, count in zip(agreed, counts, strict=False) if count}
        self._counts.update(dict(zip(shared.layers, counts[len(agreed) :], strict=True)))
        if ends_window:
            self._require_reached()
        if unknown:
            gathered: Entries = {}
            box = gathered_objects(shared.own, self._mesh.control)
            for entries in (box[self._reporter], *box):
                gathered = {**entries, **gathered}
            present |= gathered.keys()
            self._agreed = agreed = {**self._agreed, **gathered}
            table = self._filled_in(shared.works, agreed)
            self._mesh.reduce(table)
        kinds = {"mean": _mean(*table)}
        logged = []
        for column, (name, options) in enumerate(agreed.items(), 1):
            if name in present:
                kind = kind_of(options)
                if kind not in kinds:
                    kinds[kind] = _REDUCTIONS[kind](*table)
                logged.append(Logged(name, kinds[kind][column], options))
        return kinds["mean"][0], table[1, :, 0].sum(), logged

    def require_returned(self, returned: Returned, awaited: Awaited) -> None:
        """Raises GraphError as `finish` does, for a batch after which none starts; collective."""
        if reached := _reached(returned):
            counts = torch.tensor([*reached.values()])
            awaited([start_sum(counts, self._mesh.control)], "whether gradients came back").wait()
            self._counts.update(dict(zip(reached, counts.tolist(), strict=True)))
        self._require_reached()

    def _require_reached(self) -> None:
        counts, self._counts = self._counts, Counter()
        mesh, missing = self._mesh, [*counts.values()].count(0)
        if mesh.layout.placement.num_stages == 1 or not mesh.summed_over_pipelines(missing):
            return
        total: Counter[_Call] = Counter()
        for of_pipeline in mesh.gathered_over_pipelines(counts):
            total.update(of_pipeline)  # `+` would leave out what is zero
        for (name, _), count in total.items():
            if not count:
                raise GraphError(
                    f"all batches of an optimizer step leave out what is made of {name}, so that no gradient comes "
                    "back to its outputs, as one did when the step was probed. Its layer would get zeros in place "
                    "of none, with which an optimizer takes another step. Multiply by 0 what shall not count, "
                    "instead of leaving it out"
                )

    def clear(self) -> None:
        """Forgets what is under way, after an error."""
        self._under_way.clear()
        self._counts.clear()

    def _filled_in(self, works: Sequence[MicrobatchWork], agreed: Entries) -> Tensor:
        """Returns values and samples, `(2, microbatches, 1 + names)`, loss first; zeros where there is nothing."""
        device, dtype = self._mesh.device, self._mesh.number_dtype
        names = ("loss", *agreed)
        columns = {name: column for column, name in enumerate(agreed, 1)}
        width = 1 + len(columns)
        zeros = torch.zeros(len(works) * width, dtype=dtype, device=device)
        # What there is, with zeros between: of names that are not logged here there may be thousands.
        values, samples, end = [], [], 0
        for row, work in enumerate(works):
            if work.loss is None:
                continue
            metrics = {columns[n]: value for n, value, _ in metrics_in(work.logged) if n in columns}
            size = _scalar("weight", work.weight, device, dtype)
            for column, value in sorted({0: work.loss, **metrics}.items(), key=itemgetter(0)):
                start = row * width + column
                values += [zeros[end:start], _scalar(names[column], value, device, dtype)[None]]
                samples += [zeros[end:start], size[None]]
                end = start + 1
        table = [torch.cat([*parts, zeros[end:]]) for parts in (values, samples)]
        return torch.stack(table).view(2, len(works), width)


def returned_of(works: Sequence[MicrobatchWork]) -> Returned:
    """Returns what some microbatches have of it."""
    return [(work.partitioned, work.reached) for work in works]


def _reached(returned: Returned) -> dict[_Call, int]:
    """Returns whether there was a gradient in some microbatch, for all layers that get some from other stages."""
    reached: dict[_Call, int] = {}
    for partitioned, here in returned:
        for index, call in partitioned.returned.items():
            reached[call] = int(reached.get(call, 0) or index in here)
    return reached


def _mean(values: Tensor, samples: Tensor) -> Tensor:
    # A mean over nothing is NaN, and counts nothing.
    return (values * samples).where(samples != 0, 0.0).sum(0) / samples.sum(0)


_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "sum": lambda values, samples: values.sum(0),
    "max": lambda values, samples: values.where(samples > 0, -torch.inf).amax(0),
    "min": lambda values, samples: values.where(samples > 0, torch.inf).amin(0),
}


def kind_of(options: dict[str, Any]) -> str:
    """Returns how microbatches are combined; what `self.log` does not know either is refused by it."""
    reduction = options.get("reduce_fx", "mean")
    name = str(getattr(reduction, "__name__", reduction)).lower()
    return name if name in _REDUCTIONS else "mean"


def metrics_in(logged: Iterable[tuple[str, Any, Any]]) -> list[tuple[str, Any, dict[str, Any]]]:
    """Returns calls of `self.log` and `self.log_dict` as (name, value, options) of each metric."""
    calls = []
    for method, args, kwargs in logged:
        first = ("name", "value") if method == "log" else ("dictionary",)
        options = {**dict(zip((*first, *_OPTIONS), args, strict=False)), **kwargs}
        options.pop("batch_size", None)
        metrics = (
            options.pop("dictionary")
            if method == "log_dict"
            else {options.pop("name"): options.pop("value")}
        )
        for name, value in metrics.items():
            if isinstance(value, LoggedMetric):
                has_value = value.value is not None
                of_metric = {"metric_attribute": value.attribute, "has_value": has_value}
                calls.append((str(name), value.value if has_value else 0.0, options | of_metric))
            else:
                calls.append((str(name), value, options))
    return calls


def _scalar(name: str, value: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns a number on the device; the host does not wait for the device, as `torch.tensor` would."""
    if isinstance(value, numbers.Real):  # numpy's, too
        return torch.full((), float(value), device=device, dtype=dtype)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().to(device, dtype, non_blocking=True).reshape(())
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    raise ConfigurationError(
        f"self.log({name!r}, ...) was given a {type(value).__name__}{shape}; a pipeline can carry numbers and "
        "tensors of one element, such as value.mean(), to all ranks"
    )


@dataclass(eq=False)
class ChainEnds:
    """Brings what the loss reads of all chains to one rank.

    Attributes:
        runner: Runs the code after the last layer.
    """

    placement: Placement
    local_rank: int
    runner: StageRunner

    def __post_init__(self) -> None:
        placement = self.placement
        firsts = placement.first_stages
        self._last_stages = tuple(placement.backbone_of(first)[-1] for first in firsts)
        self._reporter = placement.rank_of(self._last_stages[-1], 0)
        self._arriving: list[tuple[MicrobatchWork, int, TensorMessage, Tensor]] = []

    def gather(self, works: Sequence[MicrobatchWork], transport: Transport) -> PendingWork | None:
        """Begins to send this rank's ends, or to receive those of others; `None` if there is one chain."""
        sends, receives = [], []
        for stage in self._last_stages if len(self._last_stages) > 1 else ():
            rank = self.placement.rank_of(stage, 0)
            if rank == self._reporter or self.local_rank not in (rank, self._reporter):
                continue
            for work in works:
                key, cut_step = MessageKey("end", stage, work.index), work.partitioned
                message = TensorMessage.of(cut_step.graph, cut_step.cut.stages[stage].sent)
                if self.local_rank == rank:
                    # Nothing of a chain that this call sequence leaves out.
                    buffer = message.pack(work.ends.pop(stage, {}), self.runner.device)
                    sends.append(Parcel(key, buffer, self._reporter))
                else:
                    buffer = message.layout.empty(self.runner.device)
                    receives.append(Parcel(key, buffer, rank))
                    self._arriving.append((work, stage, message, buffer))
        return transport.exchange(sends, receives) if sends or receives else None

    def report(self, works: Sequence[MicrobatchWork]) -> None:
        """Computes loss and metrics of all microbatches where all ends are; called when they have arrived."""
        for work, stage, message, buffer in self._arriving:
            work.ends[stage] = message.unpack(buffer)
        self._arriving.clear()
        if len(self._last_stages) > 1 and self.local_rank == self._reporter:
            for work in works:
                self.runner.report(self._last_stages[-1], work)
