"""Does a model compute on bands what it computes on the whole? One plain call against one synchronous call.

`facts.py` sees values that cross rows, but not numbers that come from shapes alone, such as coordinates made of
`x.shape[-2]`. So the first call of each kind is made both ways, the plain one by rank 0, if it has the memory
for all rows. If they differ, both are repeated and compared function by function: the mean magnitudes of each
result along each axis, the band's beside its part of the whole. The first function that differs is where the
band was told another story.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.errors import DiffPipeError, GraphError
from lightning_diffpipe.sampling.distrifusion.bands import Bands
from lightning_diffpipe.sampling.memory import is_out_of_memory, needing_memory, release_memory

_log = logging.getLogger(__name__)

Profile = tuple[str, list[Tensor]]
"""The name of a function, and the mean magnitudes of its result along each axis."""


def relative_error(bands: Any, plain: Any) -> float:
    """The largest relative difference among the results of two calls; one that overflows anyway tells nothing."""
    errors = [0.0]
    for a, b in zip(pytree.tree_leaves(bands), pytree.tree_leaves(plain), strict=True):
        if isinstance(a, Tensor) and a.is_floating_point():
            if a.shape != b.shape:
                return float("inf")
            if not b.isfinite().all():
                continue
            difference = (a - b).double().norm() / b.double().norm().clamp_min(1e-30)
            errors.append(float("inf") if bool(difference.isnan()) else float(difference))
    return max(errors)


def error_beside(plain: Callable[[], Any], bands: Any) -> float:
    """The relative error of results on bands beside a plain call; 0 where memory does not suffice for one."""
    try:
        return relative_error(bands, plain())
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        _log.warning(
            "all rows of the latents do not fit into memory at once; bands are not compared with them"
        )
        return 0.0
    finally:
        release_memory()


class Profiles(TorchFunctionMode):
    """Notes the profile of every function's result."""

    def __init__(self) -> None:
        super().__init__()
        self.profiles: list[Profile] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls, and looks at the result."""
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and out.ndim:
            size = out.detach().double().abs()
            axes = range(out.ndim)
            profile = [
                size.mean([a for a in axes if a != axis]) if out.ndim > 1 else size for axis in axes
            ]
            self.profiles.append((getattr(func, "__name__", str(func)), profile))
        return out


def first_difference(
    whole: list[Profile], band: list[Profile], bands: Bands, tolerance: float
) -> str | None:
    """The name of the first function whose result on the band is no part of that on the whole."""
    for (name, plain), (_, mine) in zip(whole, band, strict=False):
        if len(plain) != len(mine):
            return name
        if any(not _agrees(a, b, bands, tolerance) for a, b in zip(plain, mine, strict=True)):
            return name
    return None


def _agrees(plain: Tensor, mine: Tensor, bands: Bands, tolerance: float) -> bool:
    """Only an axis that grows with the rows can be compared: on others, means are of other rows."""
    start, size = bands.part_of(len(plain))
    if len(plain) == len(mine) or size != len(mine):
        return True
    part = plain.narrow(0, start, size)
    scale = float(plain.abs().mean()) + 1e-30
    return float((part - mine).abs().max()) <= tolerance * scale


def refusal(error: float, tolerance: float, bands: Bands, name: str | None) -> GraphError:
    """The error for a model that bands change."""
    where = f" (first seen after {name}())" if name else ""
    return GraphError(
        f"on bands of {', '.join(map(str, bands.rows))} rows this model computes something else than on the "
        f"whole: relative error {error:.1e}, allowed are {tolerance:.0e}{where}; sample it with PipeFusion, "
        "sequence parallelism or one process, or pass verify=False if you accept this"
    )


@contextlib.contextmanager
def failing_on(bands: Bands) -> Iterator[None]:
    """Gives a reason for errors of a model that runs on the whole, but not on a band.

    Raises:
        GraphError: The model failed.
        ConfigurationError: It ran out of memory.
    """
    try:
        with needing_memory(
            f"on a band of {bands.size} of {bands.num_rows} rows", "use more ranks"
        ):
            yield
    except DiffPipeError:
        raise
    except Exception as error:
        raise GraphError(
            f"on a band of {bands.size} of {bands.num_rows} rows this model fails, most likely because it makes "
            f"positions for all rows by itself: {type(error).__name__}: {error}; sample it with PipeFusion, "
            "sequence parallelism or one process"
        ) from error


def profiled(run: Callable[[], Any]) -> list[Profile]:
    """Runs something and returns its profiles."""
    notes = Profiles()
    with notes:
        run()
    return notes.profiles
