"""What is asked of a choice, besides that it be fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_AXES = ("data", "guidance", "parallel", "sequence")


def mesh_of(axes: Mapping[str, int]) -> str:
    """The axes that have several ranks, as text.

    Example:
        >>> mesh_of({"data": 2, "guidance": 1, "parallel": 4, "sequence": 1})
        'data=2 x parallel=4'
    """
    return " x ".join(f"{name}={size}" for name, size in axes.items() if size > 1) or "one rank"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A choice that turned out not to work.

    Attributes:
        method: Its name.
        reason: Why, in a clause.
        axes: Sizes of the axes of the mesh that does not work; None if the method does not, on any mesh.
    """

    method: str
    reason: str
    axes: Mapping[str, int] | None = None

    def __str__(self) -> str:
        where = "" if self.axes is None else f" on {mesh_of(self.axes)}"
        return f"no {self.method}{where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class SamplingWish:
    """Values that are given and not chosen; None leaves one to the choice.

    Methods without patches or synchronous steps at the start fit whatever is asked of those.

    Attributes:
        num_patches: Of PipeFusion.
        warmup_steps: Of PipeFusion and DistriFusion.
        data: Size of the data axis of the mesh; so are the next three.
        guidance: Of the guidance axis.
        parallel: Of the axis of stages or bands.
        sequence: Of the sequence axis.
        sequence_mode: How ranks that share tokens attend, "ulysses" or "ring".
        methods: Those that may be taken.
        refused: What was chosen before, and did not work.
    """

    num_patches: int | None = None
    warmup_steps: int | None = None
    data: int | None = None
    guidance: int | None = None
    parallel: int | None = None
    sequence: int | None = None
    sequence_mode: str | None = None
    methods: tuple[str, ...] | None = None
    refused: tuple[Refusal, ...] = ()

    def admits(self, method: str, axes: Mapping[str, int]) -> bool:
        """Whether a method on a mesh is as asked.

        Args:
            method: Its name.
            axes: Sizes of all axes.

        Example:
            >>> mesh = {"data": 1, "guidance": 2, "parallel": 4, "sequence": 1}
            >>> SamplingWish(parallel=4).admits("pipefusion", mesh)
            True
            >>> SamplingWish(data=2, guidance=2).admits("pipefusion", mesh)
            False
            >>> mixes_tokens = Refusal("pipefusion", "tokens are mixed")
            >>> SamplingWish(refused=(mixes_tokens,)).admits("pipefusion", mesh)
            False
        """
        if any(r.method == method and r.axes in (None, axes) for r in self.refused):
            return False
        if self.methods is not None and method not in self.methods:
            return False
        return all(axes[name] == size for name, size in self._sizes().items())

    def _sizes(self) -> dict[str, int]:
        sizes = {name: getattr(self, name) for name in _AXES}
        return {name: size for name, size in sizes.items() if size is not None}

    def __str__(self) -> str:
        given = ", ".join(f"{name}={size}" for name, size in self._sizes().items())
        if self.methods is None:
            return given
        return ", ".join(filter(None, (given, f"a method among {', '.join(self.methods)}")))
