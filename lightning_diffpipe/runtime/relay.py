"""How a rank's result reaches the other ranks when they walk through the module in lock step.

Used outside training (validation, sampling): the graph of such code is not known beforehand, so the
form of each result travels with it: first what it is made of, then its tensors.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

from lightning_diffpipe.graph.layer import TensorSpec
from lightning_diffpipe.runtime.mesh import Mesh
from lightning_diffpipe.runtime.message import MessageLayout


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
        """
        mesh = self._mesh
        source = mesh.world_rank(owner)
        runs = mesh.local_rank == owner
        leaves, spec = pytree.tree_flatten(output if runs else None)
        outline = [TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        box: list[Any] = [(outline, spec) if runs else None]
        dist.broadcast_object_list(box, src=source, group=mesh.control)
        outline, spec = box[0]
        layout = MessageLayout.of([entry for entry in outline if isinstance(entry, TensorSpec)])
        if not layout.num_bytes:
            return pytree.tree_unflatten(outline, spec)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        buffer = layout.pack(tensors, mesh.device) if runs else layout.empty(mesh.device)
        dist.broadcast(buffer, src=source, group=mesh.pipeline_group)
        if runs:
            return output
        received = iter(layout.unpack(buffer))
        values = [next(received) if isinstance(entry, TensorSpec) else entry for entry in outline]
        return pytree.tree_unflatten(values, spec)
