"""Gradients and tangents that a step takes itself: noticed wherever they are, refused between layers.

A penalty on a gradient, a score that is the gradient of an energy, or MeanFlow's `torch.func.jvp` run layers and
differentiate what they give at once. Between layers that would have to cross stages. Inside the forward of a module
it need not, as long as nobody cuts the module: see `calltree.choose_layers`.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from lightning_diffpipe.errors import GraphError

_TRANSFORMS = {"Vmap": "torch.vmap", "Grad": "torch.func.grad or vjp", "Jvp": "torch.func.jvp"}
_INSIDE = "inside the forward of one small module, which then becomes one layer"


@contextlib.contextmanager
def gradients_noticed(taken: Callable[[str], None]) -> Iterator[None]:
    """Calls `taken` with the name of a function of `torch.autograd` that is about to take gradients.

    Both look up the engine when they are called, so that it does not matter by what name a model has imported them.
    """
    engine = torch.autograd._engine_run_backward

    def noticed(*args: Any, **kwargs: Any) -> Any:
        taken(f"torch.autograd.{inspect.currentframe().f_back.f_code.co_name}")  # type: ignore[union-attr]
        return engine(*args, **kwargs)

    torch.autograd._engine_run_backward = noticed
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = engine


@contextlib.contextmanager
def gradients_refused(allowed: Callable[[], bool]) -> Iterator[None]:
    """Refuses gradients that the step takes itself: between layers they would cross stages."""

    def refuse(name: str) -> None:
        if not allowed():
            raise GraphError(
                f"the step computes gradients itself ({_caller()} calls {name}), but in a pipeline they would have "
                "to cross stages. Return the loss and leave its gradient to the trainer (automatic optimization); "
                f"if the gradient is part of a model, compute it {_INSIDE}"
            )

    with gradients_noticed(refuse):
        yield


def refuse_transformed(layer_name: str) -> None:
    """Refuses to call a layer inside a function transform: tangents would cross stages.

    Raises:
        GraphError: There is one; says where.
    """
    transform = transform_around()
    if transform is not None:
        raise GraphError(
            f"the step calls {layer_name} inside {transform} ({_caller(into='/torch/_functorch/')}), but in a "
            "pipeline layers of other stages give and take plain tensors, without tangents. Do it "
            f"{_INSIDE}; what calls all of a model in this way, as MeanFlow does, cannot be cut into stages"
        )


def transform_around() -> str | None:
    """Returns the innermost function transform that the code runs in, by a name that users know."""
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None:
        kind = transform.key().name
        return _TRANSFORMS.get(kind, f"torch.func ({kind})")
    return "torch.autograd.forward_ad" if forward_ad._current_level >= 0 else None


def num_transforms_around() -> int:
    """Returns how many function transforms the code runs in."""
    transform = torch._C._functorch.peek_interpreter_stack()
    return (0 if transform is None else transform.level()) + forward_ad._current_level + 1


def stays_whole(name: str, function: str) -> str:
    """Says that a module is one layer, and why."""
    return (
        f"{name} uses {function} on layers that it calls, so that it is one layer, and no pipeline is cut "
        "through it. Do that in a smaller module, if more stages are wanted"
    )


def is_users(path: str) -> bool:
    """Returns whether code of a file is the user's, or of a model: neither torch's nor that of probing."""
    path = path.replace("\\", "/")
    return not any(own in path for own in _OWN)


def _caller(into: str = "") -> str:
    """Returns the user's line that runs; with `into`, the outermost one that calls a file with that in its path."""
    frames = [(f.filename.replace("\\", "/"), f.lineno) for f in traceback.extract_stack()]
    users = [i for i, (path, _) in enumerate(frames) if is_users(path)]
    calling = [i for i in users[:-1] if into and into in frames[i + 1][0]]
    if not users:
        return "it"
    path, line = frames[calling[0] if calling else users[-1]]
    return f"{path}:{line}"


_OWN = ("/torch/", "/lightning_diffpipe/graph/")
