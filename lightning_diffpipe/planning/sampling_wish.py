"""What is asked of a choice, beside that it be fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_AXES = ("data", "guidance", "parallel", "sequence")


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
    """

    num_patches: int | None = None
    warmup_steps: int | None = None
    data: int | None = None
    guidance: int | None = None
    parallel: int | None = None
    sequence: int | None = None
    sequence_mode: str | None = None
    methods: tuple[str, ...] | None = None

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
        """
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
