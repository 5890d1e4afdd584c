"""All ranks of a predictor: what travels between any of them, and how they agree that something worked.

rank 0 | make ... worked                      | waits ......... | raises LayoutError, too
rank 1 | make ... LayoutError: sent to all    | waits ......... | raises LayoutError
rank 2 | make ... waits for rank 1, which breaks its links      | raises LayoutError, too
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_diffpipe.comm.bandwidth import measure_cluster
from lightning_diffpipe.comm.links import Alone, ProcessLinks
from lightning_diffpipe.comm.rendezvous import gloo_of_all_hosts, rendezvous
from lightning_diffpipe.comm.watcher import watcher
from lightning_diffpipe.errors import DiffPipeError, PipelineTimeoutError, raised_by_all
from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.sampling.rehearsal import forget_variables

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """All ranks.

    Attributes:
        links: Links between all of them, over gloo: rare messages go through the host.
        backend: Of messages between denoisers, `"gloo"` or `"nccl"`.
    """

    links: ProcessLinks | Alone
    backend: str

    @classmethod
    def alone(cls, device: torch.device) -> World:
        """Makes a world of this process only."""
        return cls(Alone(device), "gloo")

    @property
    def rank(self) -> int:
        """This rank."""
        return self.links.rank

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.links.num_ranks

    def gather(self, value: Any) -> list[Any]:
        """Gathers plain data of all ranks, on all ranks."""
        return self.links.gather_object(value)

    def enter(self, phase: str, works: bool = False) -> None:
        """Publishes the phase that this rank begins, and whether others may wait for it there."""
        watcher.publish(phase=phase, step=-1 if works else 0)

    def agree(
        self, phase: str, make: Callable[[], Any], give_up: Callable[[], None] = lambda: None
    ) -> Any:
        """Returns what `make` returns on this rank, if it works on all; else the same error on all ranks.

        Args:
            phase: Name of the phase, for messages.
            make: May note its steps (`watcher.step`); after the first one, a hang is noticed sooner.
            give_up: Breaks the links on which other ranks may wait for this one. Called where `make` failed, if the
                others do not come by themselves; then at last on all ranks.

        Raises:
            PipelineTimeoutError: A rank stopped, or makes no more steps.
        """
        if self.num_ranks == 1:
            return make()
        value, error = None, None
        watcher.begin_turn(phase)
        try:
            with watcher.explaining():
                value = make()
            watcher.publish(step=0)
        except BaseException as raised:
            refuses = isinstance(raised, DiffPipeError)
            if isinstance(raised, PipelineTimeoutError):
                # Who lost a rank may have lost one that refuses.
                refuses = watcher.has_refusal()
            if not refuses:
                self.leave(raised)
                raise
            watcher.publish(step=0, refuses=True)
            error = raised
        errors = self._errors(error, give_up)
        failed = [rank for rank, each in enumerate(errors) if each is not None]
        if failed:  # on all ranks the same, and what was lost because of another error only if there is none
            rank = min(failed, key=lambda rank: isinstance(errors[rank], PipelineTimeoutError))
            chosen = error if error is not None and rank == self.rank else errors[rank]
            chosen.leaves_messages = any(errors[rank].leaves_messages for rank in failed)
            with raised_by_all():
                raise chosen
        return value

    def leave(self, error: BaseException) -> None:
        """Publishes the error by which this rank ends, so that others do not count it as lost first."""
        if self.num_ranks > 1:
            watcher.fail(error)

    def _errors(self, error: Exception | None, give_up: Callable[[], None]) -> list[Any]:
        """Waits for all ranks; returns their errors, none if all have succeeded."""
        flags = [torch.zeros(1, dtype=torch.uint8) for _ in range(self.num_ranks)]
        has_given_up = False

        def give_up_here() -> None:
            nonlocal has_given_up
            if error is not None and not has_given_up:
                has_given_up = True
                forget_variables(error)
                give_up()

        try:
            if isinstance(error, PipelineTimeoutError):
                give_up_here()
            with watcher.explaining():
                flag = torch.tensor([error is not None], dtype=torch.uint8)
                assert isinstance(self.links, ProcessLinks)
                work = dist.all_gather(flags, flag, group=self.links.control, async_op=True)
                watcher.wait(work.is_completed, "the other ranks", give_up_here)
                work.wait()
            if not any(map(bool, flags)):
                return []
            outcomes = self.gather((error, has_given_up))
        except PipelineTimeoutError:
            if error is None:
                raise
            raise error from None
        if any(gave_up for _, gave_up in outcomes):
            give_up()
        return [error for error, _ in outcomes]

    def measured_link(self) -> Link:
        """Measures latency and bandwidth of messages of denoisers between ranks; collective, the same on all ranks.

        Between hosts if there are several, since every mesh of all ranks has messages that go there.
        """
        if not isinstance(self.links, ProcessLinks):
            return Link()
        device, control = self.links.device, self.links.control

        def measure() -> Cluster:
            if self.backend == "gloo":
                return measure_cluster(control, torch.device("cpu"), budget_s=0.5)
            group = dist.new_group(backend="nccl")
            with torch.cuda.device(device):  # where NCCL sends plain data from
                cluster = measure_cluster(group, device, budget_s=0.5)
            dist.destroy_process_group(group)
            return cluster

        cluster = watcher.call("the measurement of links", measure)
        return cluster.p2p_between_hosts or cluster.p2p


def join_world(device: torch.device, timeout_s: float = 120.0) -> World:
    """Joins the default process group, making it from the environment if a launcher has set that; collective.

    Raises PipelineTimeoutError if a rank was lost, or did not come.
    """
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if num_ranks == 1:
        return World.alone(device)
    watcher.begin_run("connecting", rank)
    patience_s = max(timeout_s, 60.0)
    store = rendezvous(rank, num_ranks, timeout_s, patience_s)
    if not dist.is_initialized():
        limit = timedelta(seconds=patience_s)

        def make_group() -> None:
            with gloo_of_all_hosts():
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit
                )

        watcher.call("the first connections", make_group)
    links = ProcessLinks.connect([range(num_ranks)], device, "gloo", timeout_s)
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    places = links.gather_object(_Place(socket.gethostname(), gpu, dist.is_nccl_available()))
    reason = _why_not_nccl(places)
    backend = "gloo" if reason else "nccl"
    if rank == 0 and reason and any(place.gpu for place in places):
        _log.warning(
            "messages between GPUs travel over gloo, through host memory, which is slow: NCCL wants a GPU of its "
            "own for each rank, but %s; set LOCAL_RANK, or give each rank its device, such as device='cuda:1'",
            reason,
        )
    elif rank == 0:
        _log.info("messages between %d ranks travel over %s", num_ranks, backend)
    return World(links, backend)


class _Place(NamedTuple):
    """Host and GPU of a rank."""

    host: str
    # Its unique id: processes may number the GPUs that they see differently.
    gpu: str | None
    has_nccl: bool


def _why_not_nccl(places: Sequence[_Place]) -> str:
    """Returns the reason not to send over NCCL, which needs one GPU for each rank; empty if there is none."""
    seen: dict[tuple[str, str], int] = {}
    for rank, (host, gpu, has_nccl) in enumerate(places):
        if gpu is None:
            return f"rank {rank} computes on a CPU"
        if not has_nccl:
            return f"torch has no NCCL on rank {rank}"
        first = seen.setdefault((host, gpu), rank)
        if first != rank:
            return f"ranks {first} and {rank} share one of {host}"
    return ""
