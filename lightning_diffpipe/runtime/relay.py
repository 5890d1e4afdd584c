"""How a rank's result reaches the other ranks when they walk through the module in lock step.

Used outside training (validation, sampling): the graph of such code is not known beforehand, so the
form of each result travels with it: first what it is made of, then its tensors.

A result is any object that can be pickled. Its tensors are taken out wherever they are, in containers or deep
inside an object such as a distribution: pickled along, they would come back on the device that their owner has.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_diffpipe.comm.mesh import Mesh, broadcast_object
from lightning_diffpipe.comm.packing import MessageLayout
from lightning_diffpipe.errors import ForeignLayerError
from lightning_diffpipe.graph.layer import TensorSpec

_DEVICE = "device"  # stands for the device of a rank


class RelayChannel:
    """Broadcasts the output of a layer from the rank that ran it.

    Args:
        mesh: This rank's groups.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def __call__(self, owner: int, output: Any) -> Any:
        """Hands the owner's output to every rank of the pipeline; a collective call.

        Args:
            owner: Position of the rank that ran the layer.
            output: Its output there; ignored elsewhere.

        Returns:
            The output, tensors on this rank's device.

        Raises:
            ForeignLayerError: It is of a type that cannot travel; on all ranks.
            PipelineTimeoutError: A rank is gone, or did not come in half an hour.
        """
        mesh = self._mesh
        runs = mesh.local_rank == owner
        form, tensors = _taken_apart(output, mesh.device) if runs else ("", [])
        specs = [TensorSpec.of(tensor) for tensor in tensors]
        with mesh.naming(mesh.pipeline_ranks):  # which may be busy between two steps
            form, specs = broadcast_object((form, specs), mesh.world_rank(owner), mesh.transfers)
        if isinstance(form, str):
            raise ForeignLayerError(form)
        layout = MessageLayout.of(specs)
        buffer = layout.pack(tensors, mesh.device) if runs else layout.empty(mesh.device)
        if layout.num_bytes:
            # In a broadcast the owner does not wait for all, and tensors are waited for no longer than `timeout_s`.
            with mesh.naming(mesh.pipeline_ranks):
                mesh.barrier()
            with mesh.naming(mesh.pipeline_ranks, patient=False):
                mesh.broadcast(buffer, owner, on_device=True)
        return output if runs else _put_together(form, layout.unpack(buffer), mesh.device)


def _taken_apart(output: Any, device: torch.device) -> tuple[bytes | str, list[Tensor]]:
    """An object without its tensors, and these; or why it cannot be sent."""
    file = io.BytesIO()
    pickler = _Pickler(file, device)
    try:
        pickler.dump(output)
    except Exception as error:  # of any kind, from code of the object's own
        return (
            f"a layer returns a {type(output).__name__}, which cannot be handed to the ranks that have not run it "
            f"({type(error).__name__}: {error}); return tensors, or an object that can be pickled"
        ), []
    return file.getvalue(), pickler.tensors


def _put_together(form: bytes, tensors: Sequence[Tensor], device: torch.device) -> Any:
    """The object again, made of a rank's own tensors."""
    return _Unpickler(io.BytesIO(form), tensors, device).load()


class _Pickler(pickle.Pickler):
    """Leaves out tensors, and the device of this rank.

    Attributes:
        tensors: Those left out, each once.
    """

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._device = device

    def persistent_id(self, value: Any) -> Any:
        """What stands for a value in the pickle; None for what is pickled as it is."""
        if isinstance(value, torch.device) and value.type == self._device.type:
            return _DEVICE
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._numbers[id(value)]


class _Unpickler(pickle.Unpickler):
    """Puts tensors, and the device of this rank, where others were left out."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor], device: torch.device) -> None:
        super().__init__(file)
        self._tensors, self._device = tensors, device

    def persistent_load(self, number: Any) -> Any:
        """The value that a number, or `_DEVICE`, stands for."""
        return self._device if number == _DEVICE else self._tensors[number]
