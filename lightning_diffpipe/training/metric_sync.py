"""The ranks that a torchmetrics metric is synchronized over while a module is cut into stages.

Metrics gather their states over the world, as if each rank had seen other data, and all of them came by:

    inside training_step    the last stage only gets so far, and timing runs it more often here than there: nobody
    in evaluation           ranks of a pipeline have seen the same batches: the pipelines, through one rank of each
    in hooks of training    a step has updated them where its loss is: all ranks that have something
    in checkpoints          those that `self.log` was given are saved as in one process; rank 0 goes on from that
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_diffpipe.comm.mesh import Mesh, gathered_objects
from lightning_diffpipe.training.patching import patched


class MetricSync:
    """Chooses the ranks for every metric, wherever it is kept.

    Args:
        trainer: Tells whether it evaluates.
        mesh: This rank's groups, once there are some.
        until: Gives torchmetrics its own choice back when it is closed.

    Attributes:
        trained: Metrics that steps of training log, by name.
    """

    def __init__(
        self, trainer: Any, mesh: Callable[[], Mesh | None], until: contextlib.ExitStack
    ) -> None:
        # Frozen runs wait in threads of their own, in the middle of a step.
        self._inside = threading.local()
        self.trained: dict[str, Metric] = {}
        self._mesh = mesh
        original = Metric.sync

        @functools.wraps(original)
        def sync(
            metric: Metric,
            dist_sync_fn: Any = None,
            process_group: Any = None,
            should_sync: bool = True,
            distributed_available: Any = None,
        ) -> None:
            current = mesh()
            if (postponed := getattr(self._inside, "asked", None)) is not None:
                postponed.append(metric)
                should_sync = False
            elif current and not trainer.training and not (process_group or metric.process_group):
                should_sync = should_sync and current.layout.num_pipelines > 1
                process_group = current.evaluation
            elif current and current.layout.world_size > 1 and not (process_group or dist_sync_fn):
                metric.__dict__["_sync_dist"] = lambda *args, **kwargs: _merge(metric, current)
            try:
                original(metric, dist_sync_fn, process_group, should_sync, distributed_available)
            finally:
                metric.__dict__.pop("_sync_dist", None)

        until.enter_context(patched(Metric, sync=sync))

    @contextlib.contextmanager
    def inside_step(self) -> Iterator[None]:
        """Gathers nothing inside."""
        postponed: list[Metric] = []
        self._inside.asked = postponed
        try:
            yield
        finally:
            self._inside.asked = None
            # With this rank's value kept, a metric would not join the others at the end of the epoch.
            for metric in postponed:
                metric._computed = None

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Gives metrics that steps of training log the state they would have in one process; collective."""
        mesh = self._mesh()
        several = mesh is not None and mesh.layout.world_size > 1
        with contextlib.ExitStack() as stack:
            for _, metric in sorted(self.trained.items()) if several else ():
                if any(metric._persistent.values()):
                    cache = metric._copy_state_dict()
                    _merge(metric, mesh)
                    stack.callback(vars(metric).update, cache)
            yield


def forget_elsewhere(module: nn.Module, rank: int) -> None:
    """Resets saved metrics that were read from a checkpoint but on rank 0, or they would count again."""
    for metric in module.modules():
        if rank and isinstance(metric, Metric) and any(metric._persistent.values()):
            metric.reset()


def _merge(metric: Metric, mesh: Mesh) -> None:
    """Gives a metric the state of all ranks that have updated theirs; others have lists and sums of nothing."""
    rank_state = {name: getattr(metric, name) for name in metric._defaults}
    changed = any(
        not torch.equal(value.cpu(), metric._defaults[name].cpu())
        if isinstance(value, Tensor)
        else bool(value)
        for name, value in rank_state.items()
    )
    on_host = pytree.tree_map_only(Tensor, Tensor.cpu, rank_state) if changed else None
    states = [s for s in gathered_objects(on_host, mesh.world) if s is not None]
    for name, reduce in metric._reductions.items() if states else ():
        values = [state[name] for state in states]
        if isinstance(values[0], list):
            merged: Any = [part for value in values for part in value]
            merged = reduce(merged) if merged and reduce is not None else merged
        else:
            merged = torch.stack(values)
            merged = reduce(merged) if reduce is not None else merged
        setattr(metric, name, pytree.tree_map_only(Tensor, lambda t: t.to(metric.device), merged))
