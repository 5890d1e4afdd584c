"""Which ranks a torchmetrics metric is synchronized over while a module is cut into stages.

Metrics gather their states over the world, as if each rank had seen other data, and all of them came by:

    inside training_step    the last stage only gets so far, and timing runs it more often here than there: nobody
    in evaluation           ranks of a pipeline have seen the same batches: the pipelines, through one rank of each
    in hooks of training    a step has updated them where its loss is: all ranks, as ever
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torchmetrics import Metric

from lightning_diffpipe.runtime.mesh import Mesh


class MetricSync:
    """Chooses the ranks for every metric, wherever it is kept, until `uninstall`.

    Args:
        trainer: Tells whether it evaluates.
        mesh: This rank's groups, once there are some.
    """

    def __init__(self, trainer: Any, mesh: Callable[[], Mesh | None]) -> None:
        # Frozen runs wait in threads of their own, in the middle of a step.
        self._inside = threading.local()
        self._replaced = original = Metric.sync

        @functools.wraps(original)
        def sync(
            metric: Metric,
            dist_sync_fn: Any = None,
            process_group: Any = None,
            should_sync: bool = True,
            distributed_available: Any = None,
        ) -> None:
            known = mesh()
            if (asked := getattr(self._inside, "asked", None)) is not None:
                asked.append(metric)
                should_sync = False
            elif known and trainer.evaluating and not (process_group or metric.process_group):
                should_sync = should_sync and known.layout.num_pipelines > 1
                process_group = known.evaluation
            original(metric, dist_sync_fn, process_group, should_sync, distributed_available)

        Metric.sync = sync

    @contextlib.contextmanager
    def inside_step(self) -> Iterator[None]:
        """Inside, nothing is gathered."""
        asked: list[Metric] = []
        self._inside.asked = asked
        try:
            yield
        finally:
            self._inside.asked = None
            # With this rank's value kept, a metric would not join the others at the end of the epoch.
            for metric in asked:
                metric._computed = None

    def uninstall(self) -> None:
        """Gives torchmetrics its own choice back."""
        Metric.sync = self._replaced  # type: ignore[method-assign]
