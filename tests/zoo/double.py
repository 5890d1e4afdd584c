"""Runs a model wholly in double precision, islands of float32 included.

Denoisers compute norms, time embeddings and rotary tables in float32 on purpose (`x.float()`,
`dtype=torch.float32`). Rounding there would be the largest difference between a split and an
unsplit run, a thousand times above the bound that the equivalence test holds. Under `in_double()`
every mention of float32 reads float64, and every mention of complex64 complex128.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class _Widen(TorchFunctionMode):
    """Replaces narrow dtypes among the arguments of every torch function."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if any(type(a) is torch.dtype for a in args):
            args = tuple(map(_widened, args))
        if kwargs:
            kwargs = {k: _widened(a) for k, a in kwargs.items()}
        return func(*args, **(kwargs or {}))


def _widened(value: Any) -> Any:
    return WIDER.get(value, value) if type(value) is torch.dtype else value


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Default dtype float64 and no float32 islands inside the `with` block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widen():
            yield
    finally:
        torch.set_default_dtype(before)
