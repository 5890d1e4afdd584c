"""The loss and the logged metrics of a step, brought from the last stage to every rank.

Callbacks decide by metrics (checkpoints, early stopping, schedulers), and they decide on every rank by
itself, so every rank needs the same numbers. Only the last stage ever computes them. One small sum over
the pipeline carries all of them: each replica of the last stage adds its microbatches, weighted by
their samples, and everybody else adds zeros.

Which numbers those are (names and options of `self.log`) is known on the last stage only; it is sent
when it changes, which for most modules is once.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.runtime.mesh import Mesh
from lightning_diffpipe.runtime.stage import MicrobatchWork

# Arguments of `LightningModule.log` that may follow name and value by position.
_OPTIONS = ("prog_bar", "logger", "on_step", "on_epoch")


@dataclass(frozen=True)
class Logged:
    """One `self.log` call to be made again on every rank.

    Attributes:
        name: Name of the metric.
        value: Its mean over the samples of the pipeline's batch.
        options: Further arguments of `self.log`.
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
        self._reporter = reporter
        self._known: dict[int, list[tuple[str, dict[str, Any]]]] = {}

    def share(self, works: Sequence[MicrobatchWork]) -> tuple[Tensor, list[Logged]]:
        """Returns the batch's mean loss and metrics, equal on every rank of the pipeline.

        Raises:
            ConfigurationError: A logged value is neither a number nor a tensor of one element.
        """
        entries = self._agree([_entries(work) for work in works if work.loss is not None][:1])
        sums = self._weighted_sums(works, [name for name, _ in entries])
        if self._mesh.layout.ranks_per_pipeline > 1:
            dist.all_reduce(sums, group=self._mesh.pipeline_group)
        values = sums[0] / sums[1].clamp_min(torch.finfo(sums.dtype).tiny)
        logged = [
            Logged(name, value, options)
            for (name, options), value in zip(entries, values[1:], strict=True)
        ]
        return values[0], logged

    def _weighted_sums(self, works: Sequence[MicrobatchWork], names: list[str]) -> Tensor:
        """Two rows: sums of value x samples, and sums of samples; loss first, then `names`."""
        device = self._mesh.device
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        sums = torch.zeros(2, 1 + len(names), dtype=dtype, device=device)
        for work in works:
            if work.loss is None:
                continue
            values = {name: value for name, value, _ in _calls(work)}
            present = [0, *(1 + i for i, name in enumerate(names) if name in values)]
            column = [work.loss, *(values[names[i - 1]] for i in present[1:])]
            stacked = torch.stack([_scalar(value, device, dtype) for value in column])
            sums[0, present] += stacked * work.num_samples
            sums[1, present] += work.num_samples
        return sums

    def _agree(
        self, own: list[list[tuple[str, dict[str, Any]]]]
    ) -> list[tuple[str, dict[str, Any]]]:
        """Makes the reporter's list of metrics known to all ranks of the pipeline."""
        if self._mesh.layout.ranks_per_pipeline == 1:
            return own[0] if own else []
        reports = self._mesh.local_rank == self._reporter
        text = pickle.dumps(own[0]) if reports else b""
        header = torch.tensor([zlib.crc32(text)], dtype=torch.int64)
        source = self._mesh.world_rank(self._reporter)
        dist.broadcast(header, src=source, group=self._mesh.control)
        checksum = int(header)
        if checksum not in self._known:
            box = [own[0] if reports else None]
            dist.broadcast_object_list(box, src=source, group=self._mesh.control)
            assert box[0] is not None
            self._known[checksum] = box[0]
        return self._known[checksum]


def _entries(work: MicrobatchWork) -> list[tuple[str, dict[str, Any]]]:
    return [(name, options) for name, _, options in _calls(work)]


def _calls(work: MicrobatchWork) -> list[tuple[str, Any, dict[str, Any]]]:
    """The logging calls of a microbatch as (name, value, options); `log_dict` taken apart."""
    calls = []
    for method, args, kwargs in work.logged:
        first = ("name", "value") if method == "log" else ("dictionary",)
        options = {**dict(zip((*first, *_OPTIONS), args, strict=False)), **kwargs}
        if method == "log":
            calls.append((str(options.pop("name")), options.pop("value"), options))
        else:
            metrics = options.pop("dictionary")
            calls += [(str(name), value, options) for name, value in metrics.items()]
    return calls


def _scalar(value: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(value, (int, float)):
        return torch.tensor(float(value), device=device, dtype=dtype)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().to(device, dtype).reshape(())
    raise ConfigurationError(
        f"self.log was given a {type(value).__name__}; a pipeline can carry numbers and tensors of one "
        "element to all ranks. Log metric.compute() instead of a metric object"
    )
