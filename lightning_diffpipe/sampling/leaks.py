"""Naming the operator that mixes tokens, when a model cannot be run in parts.

NaN is put into some rows. As long as operators are local to a token, the share of NaN in what they return is no
larger than in what they are given. The first one that returns a larger share has mixed tokens. Linear layers mix
features, so of what they are given a token counts as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.modules.module as hooks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.graph.calltree import tensors_in
from lightning_diffpipe.sampling.tracing import AttentionIntercepted, marked, token_local

_GROWTH = 1.001
# They pick what they return, so that its share of NaN says nothing.
_PICKING = ("index", "gather", "select", "slice", "embedding", "split", "where", "masked_fill")
_LINEAR = {"linear": 0, "mm": 0, "addmm": 1}  # position of the tokens among their arguments


class _Watch(TorchDispatchMode):
    """Finds the first operator that spreads NaN."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.found: tuple[str, nn.Module | None] | None = None
        self._modules = modules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_")
        if self.found is None and not func.is_view and not name.startswith(_PICKING):
            given = max(map(_share, tensors_in((args, kwargs))), default=0.0)
            if name in _LINEAR:
                given = max(given, _share(args[_LINEAR[name]].sum(-1)))
            returned = max(map(_share, tensors_in(out)), default=0.0)
            if given > 0 and returned > _GROWTH * given:
                self.found = (name, self._modules[-1] if self._modules else None)
        return out


def _share(x: Tensor) -> float:
    floating = x.is_floating_point() or x.is_complex()
    return float(x.isnan().float().mean()) if floating and x.numel() else 0.0


def mixing_operator(
    model: nn.Module,
    denoise: Callable[[Tensor, Tensor], Tensor],
    latents: Tensor,
    axis: int,
    t: Tensor,
) -> str | None:
    """Says which operator mixes tokens outside attention.

    Args:
        model: Whose modules are named; no weight may be NaN.
        denoise: Runs it.
        latents: Of any values.
        axis: Of their rows.
        t: A timestep.

    Returns:
        Such as "convolution in blocks.0.ff.depthwise (Conv2d)"; None if no values go from token to token.
    """
    num_rows = latents.shape[axis]
    # A power of two, so that no token is cut.
    rows = torch.arange(num_rows) < 1 << (max(num_rows // 2, 1).bit_length() - 1)
    stack: list[nn.Module] = []
    watch = _Watch(stack)
    push = hooks.register_module_forward_pre_hook(lambda module, args: stack.append(module))
    pop = hooks.register_module_forward_hook(lambda module, args, out: (stack.pop(), None)[1])
    try:
        with torch.no_grad(), AttentionIntercepted(token_local([], strict=True)), watch:
            denoise(marked(latents, axis, rows), t)
    finally:
        push.remove()
        pop.remove()
    if watch.found is None:
        return None
    operator, module = watch.found
    names = {id(m): name for name, m in model.named_modules()}
    if module is None or not names.get(id(module)):
        return f"{operator} outside all submodules"
    return f"{operator} in {names[id(module)]} ({type(module).__name__})"
