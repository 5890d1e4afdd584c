"""Gradient hooks that a step puts on tensors between layers: `h.register_hook(lambda g: 0.1 * g)`.

In one process a hook sees the whole gradient of its tensor, once. In a pipeline code between layers runs on every
stage, each with a part of that gradient: what its own layers add. So all that reads the tensor must lie within one
stage, which is checked. There the hook does what it does in one process; on all others no gradient comes
along, and tensors that stand for those of other stages need none, so that PyTorch would refuse a hook.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.cut import Cut
from lightning_diffpipe.graph.layer import LayerGraph

HOOKING = (Tensor.register_hook, Tensor.retain_grad)


class _NoHandle:
    """What `register_hook` returns, of a hook that was never put."""

    def remove(self) -> None:
        """Nothing to remove."""


class NoHooksWithoutGradients(TorchFunctionMode):
    """Inside, hooks are put on tensors that need gradients only; on others nothing happens."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOOKING and not args[0].requires_grad:
            return _NoHandle() if func is HOOKING[0] else None
        return func(*args, **(kwargs or {}))


def require_hooks_within_stages(graph: LayerGraph, pieces: Cut) -> None:
    """Refuses hooks on gradients that come from several stages.

    Raises:
        GraphError: There is one; names what reads its tensor.
    """
    tail = len(graph.layers)
    stage_of = {layer: stage.index for stage in pieces.stages for layer in stage.layers}
    stage_of[tail] = len(pieces.stages) - 1
    for readers in graph.hooks:
        stages = {stage_of[reader] for reader in readers if reader in stage_of}
        if len(stages) > 1:
            names = [graph.layers[i].name if i < tail else "the loss" for i in sorted(readers)]
            raise GraphError(
                f"training_step registers a gradient hook between layers, on a tensor that {len(stages)} stages "
                f"read (as {names[0]} and {names[-1]}). Each would run it on its own part of the gradient. "
                "Register the hook inside the forward of the layer that makes the tensor, which sees all of it; or "
                "to scale a gradient write h * s + (h * (1 - s)).detach()"
            )
