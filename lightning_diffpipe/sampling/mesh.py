"""How the ranks share a request: along four axes, the outermost first.

    data      prompts are divided; no messages but the final latents
    guidance  two halves compute one branch of classifier-free guidance each; a prediction per step and pair
    parallel  stages of a pipeline (PipeFusion), or bands of rows (DistriFusion)
    sequence  tokens divided inside every attention call; with stages, among the ranks of one stage

    8 ranks as data=2 x guidance=2 x parallel=2:

        rank       0  1   2  3   4  5   6  7
        data       0  0   0  0   1  1   1  1      prompts 0, 1 | prompts 2, 3
        guidance   0  0   1  1   0  0   1  1      without | with prompt
        parallel   0  1   0  1   0  1   0  1      stages or bands

Neighbours along an inner axis are near each other, since inner axes send more.
"""

from __future__ import annotations

import datetime
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from lightning_diffpipe.errors import ConfigurationError, DiffPipeError, PipelineTimeoutError
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.runtime.links import measure_cluster
from lightning_diffpipe.sampling.links import (
    Alone,
    Links,
    ProcessLinks,
    TensorShape,
    start_all_gather,
)

Axis = Literal["data", "guidance", "parallel", "sequence"]


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
        """Ranks it needs."""
        return math.prod(self._sizes().values())

    def _sizes(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __str__(self) -> str:
        used = [f"{name}={size}" for name, size in self._sizes().items() if size > 1]
        return " x ".join(used) or "one rank"

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is on each axis."""
        found = {}
        for name, size in reversed(self._sizes().items()):
            rank, found[name] = divmod(rank, size)
        return dict(reversed(found.items()))

    def groups(self, *axes: Axis) -> list[list[int]]:
        """Ranks that differ along these axes only, one list per group, each in order."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.num_ranks):
            place = self.coordinates(rank)
            key = tuple(place[name] for name in place if name not in axes)
            found.setdefault(key, []).append(rank)
        return list(found.values())


def fitting_meshes(num_ranks: int, methods_axes: Sequence[Axis]) -> Iterator[SamplingMesh]:
    """All meshes over these axes that have exactly `num_ranks` ranks."""
    sizes = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    for data in sizes if "data" in methods_axes else [1]:
        for guidance in (1, 2) if "guidance" in methods_axes else [1]:
            for parallel in sizes if "parallel" in methods_axes else [1]:
                for sequence in sizes if "sequence" in methods_axes else [1]:
                    mesh = SamplingMesh(data, guidance, parallel, sequence)
                    if mesh.num_ranks == num_ranks:
                        yield mesh


AXES: dict[str, tuple[Axis, ...]] = {
    "single": ("data", "guidance"),
    "pipefusion": ("data", "guidance", "parallel", "sequence"),
    "distrifusion": ("data", "guidance", "parallel"),
    "naive": ("data", "guidance", "parallel"),
    "synchronous": ("data", "guidance", "parallel"),
    "sequence": ("data", "guidance", "sequence"),
}
"""Axes along which each method can use ranks."""

_LEFT_OVER: dict[str, Axis] = {"single": "data", "sequence": "sequence"}


def fit_mesh(
    num_ranks: int,
    method: str,
    data: int | None = None,
    guidance: int | None = None,
    parallel: int | None = None,
    sequence: int | None = None,
) -> SamplingMesh:
    """Completes a wish to a mesh of all ranks; an axis that is not given is 1, or takes what is left.

    Args:
        num_ranks: Ranks there are.
        method: Says which axes exist, and which one takes what is left.
        data: Ranks among which the prompts are divided.
        guidance: 2 to compute the branches of guidance on two halves.
        parallel: Stages, or bands.
        sequence: Ranks among which tokens are divided.

    Raises:
        ConfigurationError: No mesh of all ranks is like that; the message lists those that are.

    Example:
        >>> print(fit_mesh(8, "pipefusion", guidance=2))
        guidance=2 x parallel=4
    """
    wish = {"data": data, "guidance": guidance, "parallel": parallel, "sequence": sequence}
    given = {name: size for name, size in wish.items() if size is not None}
    rest: Axis = _LEFT_OVER.get(method, "parallel")
    used = math.prod(given.values())
    if rest not in given and used > 0 and num_ranks % used == 0:
        given[rest] = num_ranks // used
    meshes = list(fitting_meshes(num_ranks, AXES[method]))
    mesh = SamplingMesh(**given)
    if mesh not in meshes:
        asked = ", ".join(f"{name}={size}" for name, size in wish.items() if size is not None)
        raise ConfigurationError(
            f"method={method} cannot use {num_ranks} ranks as {asked or 'asked'}; these fit: "
            + "; ".join(map(str, meshes))
        )
    return mesh


@dataclass(frozen=True)
class World:
    """All ranks.

    Attributes:
        links: Between all of them, over gloo: what is rare travels on the host.
        requests: The same for what may take long on one rank: loading, encoding prompts, choosing a
            method, drawing more prompts than another, and whatever the caller does between two requests.
        backend: Of messages between denoisers, `"gloo"` or `"nccl"`.
    """

    links: Links
    requests: Links
    backend: str

    @classmethod
    def alone(cls, device: torch.device) -> World:
        """A world of this process only."""
        return cls(Alone(device), Alone(device), "gloo")

    @property
    def rank(self) -> int:
        """This rank."""
        return self.links.rank

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.links.num_ranks

    def gather(self, value: Any) -> list[Any]:
        """Plain data of all ranks, on all ranks."""
        return _gathered(self.requests, value)

    def agree(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on this rank, if it works on all; else the first error, on all ranks."""
        value, error = None, None
        try:
            value = make()
        except PipelineTimeoutError:
            raise  # a rank is missing
        except DiffPipeError as raised:
            error = raised
        try:
            errors = _gathered(self.requests, error)
        except PipelineTimeoutError:
            if error is None:
                raise
            raise error from None
        for raised_there in errors:
            if raised_there is not None:
                raise error or raised_there
        return value

    def measured_link(self) -> Link:
        """How fast messages of denoisers travel between ranks, measured; collective, the same on all ranks.

        Between hosts if there are several, since every mesh of all ranks has messages that go there.
        """
        if not isinstance(self.links, ProcessLinks):
            return Link()
        if self.backend == "nccl":
            group = dist.new_group(backend="nccl")
            with torch.cuda.device(self.links.device):  # where NCCL sends plain data from
                cluster = measure_cluster(group, self.links.device, budget_s=0.5)
            dist.destroy_process_group(group)
        else:
            cluster = measure_cluster(self.links.control, torch.device("cpu"), budget_s=0.5)
        return cluster.p2p_between_hosts or cluster.p2p

    def disconnect(self) -> None:
        """Destroys the groups made for these links; the default group stays."""
        for links in (self.links, self.requests):
            if isinstance(links, ProcessLinks):
                links.disconnect()


def _gathered(links: Links, value: Any) -> list[Any]:
    if not isinstance(links, ProcessLinks):
        return [value]
    values = [None] * links.num_ranks
    try:
        dist.all_gather_object(values, value, group=links.control)
    except RuntimeError as error:
        raise PipelineTimeoutError(
            f"rank {links.rank} lost a peer, which stopped; its own error says why"
        ) from error
    return values


def join_world(device: torch.device, timeout_s: float = 120.0) -> World:
    """Joins the default process group, making it from the environment if a launcher has set that.

    Collective.
    """
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=max(timeout_s, 60.0)))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return World.alone(device)
    ranks = list(range(dist.get_world_size()))
    patience_s = max(timeout_s, default_pg_timeout.total_seconds())
    links, requests = (
        ProcessLinks.connect([ranks], device, "gloo", seconds)
        for seconds in (timeout_s, patience_s)
    )
    backend = "nccl" if device.type == "cuda" and _one_gpu_each() else "gloo"
    return World(links, requests, backend)


def _one_gpu_each() -> bool:
    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return dist.is_nccl_available() and torch.cuda.device_count() >= on_this_host


class Place:
    """This rank's place in a mesh, with its links along the axes.

    Collective: all ranks make it at the same time.

    Attributes:
        links: Along the parallel axis: to the same share of other stages, or to other bands.
        sequence_links: Along the sequence axis: to the ranks that share this one's tokens.
        branches: Along the guidance axis.

    Args:
        mesh: The same on all ranks.
        rank: World rank.
        device: Where this rank computes.
        backend: Of the messages between denoisers, `"gloo"` or `"nccl"`.
        timeout_s: Longest wait for a message.
    """

    def __init__(
        self,
        mesh: SamplingMesh,
        rank: int,
        device: torch.device,
        backend: str = "gloo",
        timeout_s: float = 120.0,
    ) -> None:
        self.mesh, self.rank = mesh, rank
        at = mesh.coordinates(rank)
        self.data, self.guidance = at["data"], at["guidance"]
        self.parallel, self.sequence = at["parallel"], at["sequence"]

        def links(axis: Axis) -> Links:
            groups = mesh.groups(axis)
            if len(groups[0]) == 1:
                return Alone(device)
            return ProcessLinks.connect(groups, device, backend, timeout_s)

        self.links = links("parallel")
        self.sequence_links = links("sequence")
        self.branches = links("guidance")

    def exchange(self, prediction: Tensor) -> tuple[Tensor, Tensor]:
        """The predictions of both branches of guidance, in order; this rank brings its own."""
        shapes = [TensorShape.of(prediction)] * 2
        first, second = start_all_gather(self.branches, prediction, shapes, "prediction")()
        return first, second

    def share_of(self, num_samples: int) -> list[tuple[int, int]]:
        """Which samples each position of the data axis draws, as (start, stop); even, in order; the first some."""
        edges = [-(-num_samples * i // self.mesh.data) for i in range(self.mesh.data + 1)]
        return list(itertools.pairwise(edges))

    def disconnect(self) -> None:
        """Destroys the groups made for this place."""
        for links in (self.links, self.sequence_links, self.branches):
            if isinstance(links, ProcessLinks):
                links.disconnect()
