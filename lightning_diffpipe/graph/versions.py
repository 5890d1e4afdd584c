"""Noticing that parameters or buffers are not what they were.

Writes in place count up a tensor's version, and a replaced tensor is another object. Writes through `.data`, as
in many averages of weights, do neither: so some elements of each tensor are compared too.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import Tensor, nn

_NUM_ELEMENTS = 16  # of each tensor that are compared
_NUM_UPDATES = 3  # of the optimizer, after which no GPU is waited for any more

_State = tuple[list[Tensor | None], list[int], list[int]]
"""Tensors, how often each was written, and where it lies."""


class Versions:
    """Tells whether tensors of a module were written in place, or replaced, since they were noted.

    A write through `.data` is seen by 16 elements, spread over the tensor. On GPUs they count until
    the optimizer has made three steps, as comparing waits for the device: averages of trained weights change with
    the first.

    Args:
        root: The module.
        parameters: Names of the parameters to watch.
        buffers: Names of the buffers to watch.
    """

    def __init__(
        self, root: nn.Module, parameters: Collection[str], buffers: Collection[str]
    ) -> None:
        self._places = [
            (name, module._parameters if name in parameters else module._buffers, key)
            for name, module, key in _places(root)
            if name in parameters or name in buffers
        ]
        self._num_updates = 0
        self._pieces: list[list[Tensor]] = []
        self._noted: _State = [], [], []
        self.note()

    def note(self, before_update: bool = False) -> None:
        """Notes the present versions: changes count from now on.

        Args:
            before_update: The optimizer's step comes next, and with it whatever follows trained weights.
        """
        before, self._noted = self._noted, self._now()
        if not _same(before, self._noted):  # pieces lie where the tensors lay
            self._pieces = _pieces([tensor for tensor in self._noted[0] if tensor is not None])
        self._num_updates += before_update
        if self._num_updates >= _NUM_UPDATES:
            self._pieces = [pieces for pieces in self._pieces if not _waits_for(pieces[0])]
        self._elements = self._compared()

    def changed(self) -> bool:
        """Returns whether anything was written or replaced since; takes 1 ms for a thousand tensors, about."""
        if not _same(self._noted, self._now()):
            return True
        return not all(map(torch.equal, self._compared(), self._elements))

    def not_a_number(self) -> list[str]:
        """Returns names of the tensors that hold NaN; looks at every element."""
        tensors = ((name, tensors.get(key)) for name, tensors, key in self._places)
        return [
            name
            for name, tensor in tensors
            if tensor is not None and tensor.is_floating_point() and tensor.isnan().any()
        ]

    def _now(self) -> _State:
        # The tensors themselves, as the identity of one that is gone may be given to another.
        tensors = [tensors.get(key) for _, tensors, key in self._places]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        return tensors, list(map(version_of, tensors)), addresses

    def _compared(self) -> list[Tensor]:
        # As bytes, as NaN equals nothing.
        return [torch.cat(pieces).view(torch.uint8) for pieces in self._pieces]


def _same(before: _State, now: _State) -> bool:
    return before[1:] == now[1:] and all(map(operator.is_, before[0], now[0]))


def _waits_for(tensor: Tensor) -> bool:
    """Returns whether the host waits for the device if it compares this version."""
    return tensor.device.type != "cpu"


def _pieces(tensors: Collection[Tensor]) -> list[list[Tensor]]:
    """Returns some elements of each tensor, as views, by dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        layout = torch.channels_last if tensor.dim() == 4 else torch.contiguous_format
        is_dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=layout)
        if tensor.numel() and not tensor.is_meta and is_dense:
            step = max(1, tensor.numel() // _NUM_ELEMENTS)
            count = min(tensor.numel(), _NUM_ELEMENTS)
            piece = tensor.detach().as_strided((count,), (step,))
            groups.setdefault((tensor.dtype, tensor.device), []).append(piece)
    return list(groups.values())


def _places(root: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Returns all parameters and buffers: full name, owner, name there."""
    return [
        (f"{name}.{key}" if name else key, module, key)
        for name, module in root.named_modules()
        for key in (*module._parameters, *module._buffers)
    ]


def version_of(tensor: Tensor | None) -> int:
    """Returns how often a tensor was written; 0 for inference tensors, which do not count it."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version
