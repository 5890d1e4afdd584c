"""A GPU's memory between measurements: what there is, and how it is given back.

torch keeps what it has freed for its next tensors. The driver counts that as used, and so do other processes and
libraries (NCCL). So it is counted as free here, and handed back once everything has been timed.
"""

from __future__ import annotations

import gc
import traceback

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that tensors of this process may still take."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def give_back(device: torch.device) -> None:
    """Frees what nobody holds any more, and lets the driver have it."""
    if device.type == "cuda":
        gc.collect()  # activations may hang in cycles
        torch.cuda.empty_cache()


def without_variables(error: Exception) -> Exception:
    """Clears the variables of an error's frames: all activations of the step that failed are among them.

    Where it was raised can still be told.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    return error
