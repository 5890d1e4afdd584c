"""Running out of memory, told apart from faults of a model."""

from __future__ import annotations

import contextlib
import gc
import re
import traceback
from collections.abc import Iterator

import torch

from lightning_diffpipe.errors import ConfigurationError


@contextlib.contextmanager
def needing_memory(where: str, remedy: str) -> Iterator[None]:
    """Turns running out of memory into an error that ranks tell each other; not a fault of the model.

    Args:
        where: What needed it.
        remedy: What to do about it.

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
