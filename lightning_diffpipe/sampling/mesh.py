"""The mesh of ranks that share a request: four axes, the outermost first.

    data      prompts are divided; no messages but the final latents
    guidance  two halves compute one branch of classifier-free guidance each; a prediction per step and pair
    parallel  stages of a pipeline (PipeFusion), or bands of rows (DistriFusion)
    sequence  tokens divided inside every attention call; with stages, among the ranks of one stage

Neighbours along an inner axis have neighbouring numbers, since inner axes send more.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_diffpipe.comm.links import Alone, Links, ProcessLinks, start_all_gather
from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.errors import ConfigurationError

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
            place = self.coordinates(rank)
            key = tuple(place[name] for name in place if name not in axes)
            groups.setdefault(key, []).append(rank)
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
    "single": ("data", "guidance"),
    "pipefusion": ("data", "guidance", "parallel", "sequence"),
    **dict.fromkeys(("distrifusion", "naive", "synchronous"), ("data", "guidance", "parallel")),
    "sequence": ("data", "guidance", "sequence"),
}
"""Axes along which each method can use ranks."""

_LEFT_OVER: dict[str, Axis] = {"single": "data", "sequence": "sequence"}


def fit_mesh(num_ranks: int, method: str, **wish: int | None) -> SamplingMesh:
    """Completes wished sizes to a mesh of all ranks; another axis has size 1, or takes the remaining ranks.

    Raises:
        ConfigurationError: No mesh of all ranks is like that; the message lists those that are.

    Example:
        >>> print(fit_mesh(8, "pipefusion", guidance=2))
        guidance=2 x parallel=4
    """
    wish = {name: size for name, size in wish.items() if size is not None}
    meshes, sizes = list(fitting_meshes(num_ranks, AXES[method])), dict.fromkeys(get_args(Axis), 1)
    del sizes[_LEFT_OVER.get(method, "parallel")]
    sizes |= wish
    mesh = next((each for each in meshes if sizes.items() <= asdict(each).items()), None)
    if mesh is None:
        raise ConfigurationError(
            f"method={method} cannot use {num_ranks} ranks as {_text(wish) or 'asked'}; these fit: "
            + "; ".join(map(str, meshes))
        )
    return mesh


def _text(wish: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name}={size}" for name, size in wish.items())


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
        backend: str = "gloo",
        timeout_s: float = 120.0,
        chained: bool = True,
    ) -> None:
        self.mesh, self.rank = mesh, rank
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

    def share_of(self, num_samples: int) -> list[tuple[int, int]]:
        """Returns this rank's samples, (start, stop), divided as evenly as can be; the first rank has some."""
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
