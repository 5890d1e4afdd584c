"""Running out of memory, told apart from faults of a model."""

from __future__ import annotations

import contextlib
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
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise ConfigurationError(
            f"this model needs more memory {where} than there is: {reason}; {remedy}"
        ) from error
    finally:
        release_memory()


def release_memory() -> None:
    """Gives back what torch keeps of a call that is over; what follows needs less, in other sizes."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
