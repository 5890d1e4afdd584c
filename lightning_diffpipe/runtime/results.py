"""The loss and the logged metrics of a step, brought from the last stage to every rank.

Callbacks decide by metrics (checkpoints, early stopping, schedulers), and they decide on every rank by
itself, so every rank needs the same numbers. Only the last stage ever computes them. One small sum over
the pipeline carries all of them: each replica of the last stage adds its microbatches, weighted by
their samples, and everybody else adds zeros. It is started where a rank has run its program, and
nobody waits for it idly: frozen layers run until it is there.

Which numbers those are (names and options of `self.log`) is known on the last stage only. Every rank adds
numbers for the names that were agreed on last. Whether they have changed is summed beside them, between
hosts, so that nobody has to ask a GPU; for most modules it happens once. Then the new names are sent, and
the numbers are summed again.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.runtime.mesh import Mesh
from lightning_diffpipe.runtime.stage import MicrobatchWork

Entry = tuple[str, dict[str, Any]]
"""Name and options of a `self.log` call."""

# Arguments of `LightningModule.log` that may follow name and value by position.
_OPTIONS = ("prog_bar", "logger", "on_step", "on_epoch")


@dataclass(frozen=True)
class Logged:
    """One `self.log` call to be made again on every rank.

    Attributes:
        name: Name of the metric.
        value: Its mean over the samples of the pipeline's batch.
        options: Further arguments of `self.log`; no `batch_size`, which was that of a microbatch.
    """

    name: str
    value: Tensor
    options: dict[str, Any]


class ResultSharing:
    """Brings loss and metrics from the last stage to all ranks of the pipeline.

    Args:
        mesh: This rank's groups.
        reporter: Position of the rank that runs microbatch 0 of the last stage.
    """

    def __init__(self, mesh: Mesh, reporter: int) -> None:
        self._mesh = mesh
        self._reports = mesh.local_rank == reporter
        self._source = mesh.world_rank(reporter)
        self._agreed: list[Entry] = []
        self._own: list[Entry] = []
        self._agreed_text = pickle.dumps(self._agreed)
        self._works: Sequence[MicrobatchWork] = ()
        self._sums = self._changed = torch.zeros(1)

    def start(self, works: Sequence[MicrobatchWork]) -> list[dist.Work]:
        """Begins to sum what this rank's microbatches have to tell.

        Returns:
            What to wait for before `finish`; nothing where a pipeline has one rank.

        Raises:
            ConfigurationError: A logged value is neither a number nor a tensor of one element.
        """
        self._works = works
        if self._reports:
            self._own = next((_entries(work) for work in works if work.loss is not None), [])
        if self._mesh.layout.ranks_per_pipeline == 1:
            self._agreed, self._sums = self._own, self._weighted_sums(self._own)
            return []
        changed = self._reports and pickle.dumps(self._own) != self._agreed_text
        self._changed, self._sums = torch.tensor([int(changed)]), self._weighted_sums(self._agreed)
        under_way = [
            dist.all_reduce(self._changed, group=self._mesh.control, async_op=True),
            dist.all_reduce(self._sums, group=self._mesh.pipeline_group, async_op=True),
        ]
        return [work for work in under_way if work is not None]

    def finish(self) -> tuple[Tensor, list[Logged]]:
        """The batch's mean loss and metrics, equal on every rank of the pipeline.

        Raises:
            ConfigurationError: As `start`.
        """
        if self._changed:
            box = [self._own if self._reports else None]
            dist.broadcast_object_list(box, src=self._source, group=self._mesh.control)
            assert box[0] is not None
            self._agreed, self._agreed_text = box[0], pickle.dumps(self._own)
            self._sums = self._weighted_sums(self._agreed)
            dist.all_reduce(self._sums, group=self._mesh.pipeline_group)
        self._works = ()
        values = self._sums[0] / self._sums[1].clamp_min(torch.finfo(self._sums.dtype).tiny)
        logged = [
            Logged(name, value, options)
            for (name, options), value in zip(self._agreed, values[1:], strict=True)
        ]
        return values[0], logged

    def _weighted_sums(self, entries: Sequence[Entry]) -> Tensor:
        """Two rows: sums of value x samples, and sums of samples; loss first, then the entries."""
        device = self._mesh.device
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        names = [name for name, _ in entries]
        sums = torch.zeros(2, 1 + len(names), dtype=dtype, device=device)
        counts = [0] * (1 + len(names))
        for work in self._works:
            if work.loss is None:
                continue
            values = {name: value for name, value, _ in _calls(work)}
            column = [work.loss, *(values.get(name, 0.0) for name in names)]
            stacked = torch.stack([_scalar(value, device, dtype) for value in column])
            sums[0].add_(stacked, alpha=work.num_samples)
            present = [True, *(name in values for name in names)]
            counts = [n + work.num_samples * p for n, p in zip(counts, present, strict=True)]
        for index, count in enumerate(counts):
            sums[1, index].fill_(count)
        return sums


def _entries(work: MicrobatchWork) -> list[Entry]:
    return [(name, options) for name, _, options in _calls(work)]


def _calls(work: MicrobatchWork) -> list[tuple[str, Any, dict[str, Any]]]:
    """The logging calls of a microbatch as (name, value, options); `log_dict` taken apart."""
    calls = []
    for method, args, kwargs in work.logged:
        first = ("name", "value") if method == "log" else ("dictionary",)
        options = {**dict(zip((*first, *_OPTIONS), args, strict=False)), **kwargs}
        options.pop("batch_size", None)
        if method == "log":
            calls.append((str(options.pop("name")), options.pop("value"), options))
        else:
            metrics = options.pop("dictionary")
            calls += [(str(name), value, options) for name, value in metrics.items()]
    return calls


def _scalar(value: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A number on the device; nobody waits for what the device does, as `torch.tensor` would."""
    if isinstance(value, (int, float)):
        return torch.full((), float(value), device=device, dtype=dtype)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().to(device, dtype, non_blocking=True).reshape(())
    raise ConfigurationError(
        f"self.log was given a {type(value).__name__}; a pipeline can carry numbers and tensors of one "
        "element to all ranks. Log metric.compute() instead of a metric object"
    )
