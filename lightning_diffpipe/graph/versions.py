"""Noticing that parameters or buffers are not what they were."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn


class Versions:
    """Tells whether tensors of a module were written in place, or replaced, since they were noted.

    A write through `.data` leaves no trace.

    Args:
        root: The module.
        parameters: Names of the parameters to watch.
        buffers: Names of the buffers to watch.
    """

    def __init__(
        self, root: nn.Module, parameters: Collection[str], buffers: Collection[str]
    ) -> None:
        self._places = [
            (module._parameters if name in parameters else module._buffers, key)
            for name, module, key in _places(root)
            if name in parameters or name in buffers
        ]
        self._noted = self._now()

    def note(self) -> None:
        """From now on changes count."""
        self._noted = self._now()

    def changed(self) -> bool:
        """Whether anything was written or replaced since; takes microseconds."""
        return any(
            tensor is not before or version != version_before
            for (tensor, version), (before, version_before) in zip(
                self._now(), self._noted, strict=True
            )
        )

    def _now(self) -> list[tuple[Tensor | None, int]]:
        # The tensors themselves, as the identity of one that is gone may be given to another.
        return [
            (tensor, version_of(tensor))
            for tensor in (tensors.get(key) for tensors, key in self._places)
        ]


def _places(root: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """All parameters and buffers: full name, owner, name there."""
    return [
        (f"{name}.{key}" if name else key, module, key)
        for name, module in root.named_modules()
        for key in (*module._parameters, *module._buffers)
    ]


def version_of(tensor: Tensor | None) -> int:
    """How often a tensor was written; 0 for inference tensors, which do not count it."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version
