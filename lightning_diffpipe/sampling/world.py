"""All ranks of a predictor, and the mesh in which they share requests.

What travels between any of them, and how they agree that something worked (`World`):

rank 0 | make ... worked                      | waits ......... | raises LayoutError, too
rank 1 | make ... LayoutError: sent to all    | waits ......... | raises LayoutError
rank 2 | make ... waits for rank 1, which breaks its links      | raises LayoutError, too

The mesh (`SamplingMesh`) has four axes, the outermost first:

    data      prompts are divided; no messages but the final latents
    guidance  two halves compute one branch of classifier-free guidance each; a prediction per step and pair
    parallel  stages of a pipeline (PipeFusion), or bands of rows (DistriFusion)
    sequence  tokens divided inside every attention call; with stages, among the ranks of one stage

Neighbours along an inner axis have neighbouring numbers, since inner axes send more.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_diffpipe.comm.bandwidth import measure_cluster
from lightning_diffpipe.comm.links import Alone, Links, ProcessLinks, start_all_gather
from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.comm.rendezvous import gloo_of_all_hosts, rendezvous
from lightning_diffpipe.comm.watcher import watcher
from lightning_diffpipe.errors import (
    ConfigurationError,
    DiffPipeError,
    PipelineTimeoutError,
    raised_by_all,
)
from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.sampling.rehearsal import forget_variables

_log = logging.getLogger(__name__)
Axis = Literal["data", "guidance", "parallel", "sequence"]


@dataclass(frozen=True)
class World:
    """All ranks.

    Attributes:
        links: Links between all of them, over gloo: rare messages go through the host.
        backend: Backend of messages between denoisers, `"gloo"` or `"nccl"`.
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

    def agree(
        self, phase: str, make: Callable[[], Any], give_up: Callable[[], None] = lambda: None
    ) -> Any:
        """Returns what `make` returns on this rank, if it works on all; else the same error on all ranks.

        Args:
            phase: Name of the phase, for messages.
            make: May count its steps (`watcher.step`); after the first one, a hang is noticed sooner.
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
                watcher.fail(raised)  # so that others do not count it as lost first
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

    def _errors(self, error: Exception | None, give_up: Callable[[], None]) -> list[Any]:
        """Waits for all ranks; returns their errors, none if all have succeeded.

        First each rank says whether it has an error, and only if any has, what.
        """
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
            outcomes = self.links.gather_object((error, has_given_up))
        except PipelineTimeoutError:
            if error is None:
                raise
            raise error from None
        if any(gave_up for _, gave_up in outcomes):
            give_up()
        return [each for each, _ in outcomes]

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
    devices = links.gather_object((socket.gethostname(), gpu, dist.is_nccl_available()))
    reason = _why_not_nccl(devices)
    backend = "gloo" if reason else "nccl"
    if rank == 0 and reason and any(of_rank for _, of_rank, _ in devices):
        _log.warning(
            "messages between GPUs travel over gloo, through host memory, which is slow: NCCL wants a GPU of its "
            "own for each rank, but %s; set LOCAL_RANK, or give each rank its device, such as device='cuda:1'",
            reason,
        )
    elif rank == 0:
        _log.info("messages between %d ranks travel over %s", num_ranks, backend)
    return World(links, backend)


def _why_not_nccl(devices: Sequence[tuple[str, str | None, bool]]) -> str:
    """Returns the reason not to send over NCCL, which needs one GPU for each rank; empty if there is none.

    Ranks have a host, the unique id of a GPU, as processes may number GPUs differently, and NCCL or not.
    """
    seen: dict[tuple[str, str], int] = {}
    for rank, (host, gpu, has_nccl) in enumerate(devices):
        if gpu is None:
            return f"rank {rank} computes on a CPU"
        if not has_nccl:
            return f"torch has no NCCL on rank {rank}"
        first = seen.setdefault((host, gpu), rank)
        if first != rank:
            return f"ranks {first} and {rank} share one of {host}"
    return ""


@dataclass(frozen=True)
class SamplingMesh:
    """Sizes of the axes.

    Example:
        >>> mesh = SamplingMesh(data=2, guidance=2, parallel=2)
        >>> mesh.coordinates(5)
        {'data': 1, 'guidance': 0, 'parallel': 1, 'sequence': 0}
        >>> mesh.groups("guidance")
        [[0, 2], [1, 3], [4, 6], [5, 7]]
        >>> print(mesh)
        data=2 x guidance=2 x parallel=2
    """

    data: int = 1
    guidance: int = 1
    parallel: int = 1
    sequence: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return math.prod(asdict(self).values())

    def __str__(self) -> str:
        shown = (f"{name}={size}" for name, size in asdict(self).items() if size > 1)
        return " x ".join(shown) or "one rank"

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the position of a rank on each axis."""
        coordinates = {}
        for name, size in reversed(asdict(self).items()):
            rank, coordinates[name] = divmod(rank, size)
        return dict(reversed(coordinates.items()))

    def groups(self, *axes: Axis) -> list[list[int]]:
        """Returns the ranks that differ along these axes only, one list per group, each in order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.num_ranks):
            at = self.coordinates(rank)
            groups.setdefault(tuple(at[n] for n in at if n not in axes), []).append(rank)
        return list(groups.values())


def fitting_meshes(num_ranks: int, methods_axes: Sequence[Axis]) -> Iterator[SamplingMesh]:
    """Returns all meshes over these axes that have exactly `num_ranks` ranks."""
    sizes = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    choices = {axis: sizes if axis in methods_axes else [1] for axis in get_args(Axis)}
    if "guidance" in methods_axes:
        choices["guidance"] = [1, 2]
    meshes = itertools.starmap(SamplingMesh, itertools.product(*choices.values()))
    return (mesh for mesh in meshes if mesh.num_ranks == num_ranks)


AXES: dict[str, tuple[Axis, ...]] = {
    "pipefusion": get_args(Axis),
    "distrifusion": ("data", "guidance", "parallel"),
    "sequence": ("data", "guidance", "sequence"),
    "single": ("data", "guidance"),
    "naive": ("data", "guidance", "parallel"),
    "synchronous": ("data", "guidance", "parallel"),
}
"""Axes along which each method can use ranks."""

_LEFT_OVER: dict[str, Axis] = {"single": "data", "sequence": "sequence"}


def fit_mesh(num_ranks: int, method: str, **given: int | None) -> SamplingMesh:
    """Completes given sizes to a mesh of all ranks; another axis has size 1, or takes the remaining ranks.

    Raises:
        ConfigurationError: No mesh of all ranks is like that; the message lists those that are.

    Example:
        >>> print(fit_mesh(8, "pipefusion", guidance=2))
        guidance=2 x parallel=4
    """
    given = {name: size for name, size in given.items() if size is not None}
    meshes, sizes = list(fitting_meshes(num_ranks, AXES[method])), dict.fromkeys(get_args(Axis), 1)
    del sizes[_LEFT_OVER.get(method, "parallel")]
    sizes |= given
    mesh = next((each for each in meshes if sizes.items() <= asdict(each).items()), None)
    if mesh is None:
        named = ", ".join(f"{name}={size}" for name, size in given.items())
        raise ConfigurationError(
            f"method={method} cannot use {num_ranks} ranks as {named or 'asked'}; these fit: "
            + "; ".join(map(str, meshes))
        )
    return mesh


class MeshLinks:
    """This rank's place in a mesh, with its links along the axes.

    Collective: all ranks make it at the same time.

    Attributes:
        links: Along the parallel axis: to the same share of other stages, or to other bands.
        sequence_links: Along the sequence axis: to the ranks that share this one's tokens.
        branches: Along the guidance axis.
    """

    def __init__(
        self,
        mesh: SamplingMesh,
        rank: int,
        device: torch.device,
        backend: str,
        timeout_s: float,
        chained: bool,
    ) -> None:
        self.mesh = mesh
        at = mesh.coordinates(rank)
        self.data, self.guidance = at["data"], at["guidance"]
        self.parallel, self.sequence = at["parallel"], at["sequence"]

        def links(axis: Axis) -> Links:
            groups = mesh.groups(axis)
            if len(groups[0]) == 1:
                return Alone(device)
            # All but PipeFusion's stages send each other everything at the same points.
            chain = chained and axis == "parallel"
            return ProcessLinks.connect(groups, device, backend, timeout_s, chained=chain)

        self.links = links("parallel")
        self.sequence_links = links("sequence")
        self.branches = links("guidance")
        self._all = self.links, self.sequence_links, self.branches

    def exchange(self, prediction: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the predictions of both branches of guidance, in order; this rank brings its own."""
        shapes = [TensorShape.of(prediction)] * 2
        first, second = start_all_gather(self.branches, prediction, shapes, "prediction")()
        return first, second

    def shares_of(self, num_samples: int) -> list[tuple[int, int]]:
        """Returns the samples (start, stop) of each position on the data axis, as equal as can be."""
        edges = [-(-num_samples * i // self.mesh.data) for i in range(self.mesh.data + 1)]
        return list(itertools.pairwise(edges))

    def leaves_messages(self) -> bool:
        """Returns whether this rank is in the middle of messages that cannot be taken back."""
        return any(links.occupies_device and links.is_under_way for links in self._all)

    def disconnect(self) -> None:
        """Destroys the groups made for this rank; collective."""
        for links in self._all:
            links.disconnect()

    def abandon(self) -> None:
        """Destroys the groups at once, with messages under way, so that no rank waits for this one."""
        for links in self._all:
            links.abandon()
