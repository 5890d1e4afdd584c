"""What all benchmarks share: several processes, interleaved runs, medians, a report.

Times are compared as ratios within one run of one process group: candidates take turns, so that a
machine that slows down slows all of them, and each is represented by its median. Two ranks on two cores keep
to a core each, and the allocator keeps what it has got, as that of a GPU does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def interleaved(
    candidates: Mapping[str, Callable[[], Any]], rounds: int, warmup_rounds: int = 2
) -> dict[str, list[float]]:
    """Runs candidates in turns, all ranks together.

    Returns:
        Seconds of every counted run, by candidate; of the slowest rank.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for index in range(warmup_rounds + rounds):
        names = list(candidates) if index % 2 else list(candidates)[::-1]
        for name in names:
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            candidates[name]()
            if dist.is_initialized():
                dist.barrier()
            if index >= warmup_rounds:
                times[name].append(time.perf_counter() - start)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each candidate, in seconds."""
    return {name: statistics.median(values) for name, values in times.items()}


_KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",  # threads share one heap
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # ask for pages of 2 MiB, as a GPU has
}
"""For glibc, read when a process starts: without it large tensors are given back to the kernel again and again,
and every page is cleared on its next use. With pages of 4 KiB whoever keeps more tensors at once computes some
per cent slower."""


def on_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, keeps_memory: bool = True
) -> Any:
    """Runs `function(rank, *arguments)` on gloo ranks with one thread each; returns rank 0's result.

    Without `keeps_memory` the allocator is as users have it.
    """
    os.environ.update(_KEEP_MEMORY if keeps_memory else {}, OMP_NUM_THREADS="1")
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    ranks = multiprocessing.spawn(
        _main, args=(world_size, function, arguments, queue), nprocs=world_size, join=False
    )
    results: list[Any] = []
    while not ranks.join(timeout=0.5):
        if not queue.empty():  # rank 0 cannot end before a large result is taken
            results.append(queue.get())
    return results[0] if results else queue.get()


def _main(
    rank: int, world_size: int, function: Callable[..., Any], arguments: Any, queue: Any
) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if world_size <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    result = function(rank, *arguments)
    if rank == 0:
        queue.put(result)
    dist.barrier()
    dist.destroy_process_group()


def environment() -> dict[str, Any]:
    """What the numbers depend on."""
    import diffusers
    import lightning

    return {
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "diffusers": diffusers.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def main(
    run: Callable[[argparse.Namespace], list[dict[str, Any]]],
    description: str,
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """The command line of a benchmark, with options of its own: runs it, prints a table, writes JSON when asked."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--rounds", type=int, default=15, help="counted runs of each candidate")
    options(parser)
    arguments = parser.parse_args()
    where = environment()
    rows = run(arguments)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
