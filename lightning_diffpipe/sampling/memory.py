"""Running out of memory, and other failures of a model that runs in parts, kept apart."""

from __future__ import annotations

import contextlib
import gc
import re
import traceback
from collections.abc import Iterator

import torch

from lightning_diffpipe.errors import ConfigurationError, DiffPipeError, GraphError, LayoutError

REMEDY_OF_MEMORY = "take more stages or ranks, or draw fewer or smaller pictures at a time"
REMEDY_OF_PATCHES = "sample it in one process or with num_patches=1"


@contextlib.contextmanager
def needing_memory(where: str, remedy: str) -> Iterator[None]:
    """Turns running out of memory into an error that ranks share; it is no fault of the model.

    Raises:
        ConfigurationError: Memory did not suffice.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        forget_variables(error)
        reason = re.split(r"\. |\n", str(error), maxsplit=1)[0]
        raise ConfigurationError(
            f"this model needs more memory {where} than there is: {reason}; {remedy}"
        ) from error
    finally:
        release_memory()


@contextlib.contextmanager
def failing(
    where: str,
    remedy: str = REMEDY_OF_PATCHES,
    cause: str = "a block expects all tokens",
    kind: type[GraphError] = LayoutError,
    remedy_of_memory: str = REMEDY_OF_MEMORY,
) -> Iterator[None]:
    """Gives a reason for errors of a model that runs on the whole, but not in parts.

    Raises:
        GraphError: The model failed; of that kind.
        ConfigurationError: Memory did not suffice, which says nothing of the model.
    """
    try:
        with needing_memory(where, remedy_of_memory):
            yield
    except DiffPipeError:
        raise
    except Exception as error:
        raise kind(
            f"{where} this model fails, most likely because {cause}: "
            f"{type(error).__name__}: {error}; {remedy}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice; only torch's own allocator has a class for it."""
    signs = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    return isinstance(error, RuntimeError) and (
        isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)
    )


def forget_variables(error: BaseException | None) -> None:
    """Lets go of what functions after an error hold: activations, and receives, which keep connections open."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()


def release_memory() -> None:
    """Gives back what torch keeps of a call that is over; what follows needs less, in other sizes."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
