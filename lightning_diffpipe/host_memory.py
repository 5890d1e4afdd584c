"""Freed memory stays with the process on hosts, as it does on GPUs.

A step frees all its activations. glibc gives large freed blocks back to the kernel, and the next step gets
them again page by page, each one cleared: some ten thousand page faults in a step. A GPU's allocator keeps
what it has got, and so does glibc when it is asked to:

* blocks at the top of a heap are given back only when they are very large (`M_TRIM_THRESHOLD`);
* large blocks come from heaps, not each from the kernel (`M_MMAP_THRESHOLD`);
* threads that are started from now on share heaps (`M_ARENA_MAX`): frozen layers run in a thread of their own.

Source:
    mallopt(3)
"""

import contextlib
import ctypes
import math
import os
import sys
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_MOST_KEPT_BYTES = (1 << 31) - 1
_CGROUP = Path("/sys/fs/cgroup")
_LARGEST_IN_HEAP_BYTES = 1 << 25  # glibc takes no more


def peak_resident_bytes() -> float | None:
    """Returns the most memory that this process has had, torch itself included; None where no system call tells."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(used if sys.platform == "darwin" else 1024 * used)


def available_bytes() -> float:
    """Returns the available memory of the host, in bytes; infinity where the system does not tell."""
    free = math.inf
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024.0 * next(int(line.split()[1]) for line in lines if "MemAvailable" in line)
    with contextlib.suppress(OSError, ValueError):  # of a container; "max" is no limit
        limit, used = (
            float((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current")
        )
        free = min(free, limit - used)
    return free


def trim() -> None:
    """Returns memory that glibc has kept to the kernel, before less is needed; does nothing without glibc."""
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(0)


def keep_freed_memory() -> bool:
    """Asks glibc, if it is there, to keep freed memory unless the user has set it; returns whether it was asked."""
    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    if is_set or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_TRIM_THRESHOLD: _MOST_KEPT_BYTES, _MMAP_THRESHOLD: _LARGEST_IN_HEAP_BYTES}
    return all(mallopt(*each) for each in (settings | {_ARENA_MAX: 1}).items())
