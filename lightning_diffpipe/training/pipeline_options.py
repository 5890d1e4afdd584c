"""What a user may decide about a pipeline, and what of it the planner is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.schedules import SCHEDULES

Auto = Literal["auto"]
_SOME_RANKS = 1024  # in place of the ranks there will be, which nobody knows yet
_ADAM_BYTES_FACTOR = 2.0  # the optimizer is made when the module has been cut


@dataclass(frozen=True)
class PipelineOptions:
    """What a user may decide; the strategy's arguments, documented there.

    Attributes:
        averages_bytes_factor: Bytes of averaged weights for each byte of gradient; the strategy knows of
            them.
    """

    num_stages: int | Auto = "auto"
    num_microbatches: int | Auto = "auto"
    schedule: str = "1f1b"
    num_replicas: int | Sequence[int] | Auto = "auto"
    data_parallel: int | Auto = "auto"
    filling: str = "auto"
    frozen_group_size: int | Auto = "auto"
    plan: PipelinePlan | str | Path | None = None
    profile: Any = "measure"
    cluster: Any = "measure"
    seed: int | None = None
    check_finite: bool = False
    verify: bool = False
    optimizer_bytes_factor: float | Auto = "auto"
    averages_bytes_factor: float = 0.0

    def __post_init__(self) -> None:
        # What cannot be is refused before anything is done.
        self.wishes(1, self.data_parallel)
        if isinstance(self.cluster, Mapping):
            Cluster.from_dict({"num_ranks": _SOME_RANKS, **self.cluster})
        elif not isinstance(self.cluster, Cluster) and self.cluster != "measure":
            raise ConfigurationError(
                f"cluster must be 'measure', a Cluster or a mapping; got {self.cluster!r}"
            )

    def wishes(self, global_batch_size: int, data_parallel: int | Auto) -> PlanOptions:
        """Returns what the planner is asked for.

        Raises:
            ConfigurationError: A value that cannot be.
        """
        factor = self.optimizer_bytes_factor
        options = PlanOptions(
            global_batch_size=global_batch_size,
            data_parallel=data_parallel,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            num_replicas=_as_tuple(self.num_replicas),
            schedule=self.schedule,
            filling=self.filling,
            frozen_group_size=self.frozen_group_size,
            optimizer_bytes_factor=_ADAM_BYTES_FACTOR if factor == "auto" else factor,
        )
        # Averages live as long as the optimizer's state, one for each trained weight.
        all_bytes = options.optimizer_bytes_factor + self.averages_bytes_factor
        return replace(options, optimizer_bytes_factor=all_bytes)

    def refuse_more_stages_than(self, num_ranks: int) -> None:
        """Refuses more stages than ranks before any process starts, where each needs ranks of its own.

        Raises:
            ConfigurationError: There are too few ranks.
        """
        spec = SCHEDULES.get(self.schedule)
        if spec is None or spec.place or self.num_stages == "auto" or self.plan is not None:
            return
        if self.num_stages > num_ranks:
            raise ConfigurationError(
                f"num_stages={self.num_stages} is more than the {num_ranks} ranks; choose between 1 and "
                f"{num_ranks}, more ranks, or schedule=interleaved, which gives each several stages"
            )

    def pipelines_beside(self, world_size: int) -> int:
        """Pipelines side by side: what is left over when a pipeline's size is given, else one.

        The batch of the data loader is one pipeline's, so this cannot be left to the search.
        """
        if self.data_parallel != "auto":
            return int(self.data_parallel)
        stages, replicas = self.num_stages, _as_tuple(self.num_replicas)
        if isinstance(replicas, tuple):
            return max(world_size // sum(replicas), 1)
        if stages == "auto" or replicas == "auto":
            return 1
        return max(world_size // (stages * replicas), 1)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
