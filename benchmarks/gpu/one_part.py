"""Runs one part of `main.py`: `python -m benchmarks.gpu.one_part NAME DEVICE ROWS`.

A part writes rows, as JSON lines, as soon as it has them. Those that need no models are here, where nothing is
imported that takes seconds.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import statistics
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.main import PARTS
from lightning_diffpipe.clock import clock_for

Report = Callable[..., None]
"""`report(**row)` writes a row."""


class Place:
    """Where a part computes, and how large its models are.

    Args:
        device: "cuda" or "cpu".
    """

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.device = torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.clock = clock_for(self.device)

    def peak_bytes(self) -> int | None:
        """The most memory that tensors took since this was asked last; None on a CPU."""
        if not self.on_gpu:
            return None
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def seconds(self, run: Callable[[], Any], repeats: int = 5) -> float:
        """The median of some runs, by the clock of the device, after one that does not count."""
        times = []
        for _ in range(repeats + 1):
            start = self.clock.stamp()
            run()
            stop = self.clock.stamp()
            self.clock.settle()
            times.append(self.clock.seconds(start, stop))
        return statistics.median(times[1:])

    @property
    def modelled_as(self) -> str | None:
        """The name of this GPU among the devices on paper."""
        name = torch.cuda.get_device_name(0).lower() if self.on_gpu else ""
        known = ("h200", "h100", "a100", "a10g", "rtx 4090", "v100", "t4")
        return next((each.replace(" ", "") for each in known if each in name), None)


def environment(place: Place, report: Report) -> None:
    """What the numbers depend on."""
    names = ("lightning", "diffusers", "transformers", "lightning-diffpipe", "pytest")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    report(torch=torch.__version__, python=sys.version.split()[0], **versions)
    if not torch.cuda.is_available():
        report(gpu="no GPU")
        return
    properties = torch.cuda.get_device_properties(0)
    report(
        gpu=properties.name,
        memory_bytes=properties.total_memory,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        count=torch.cuda.device_count(),
    )


def tests(place: Place, report: Report) -> None:
    """The tests that need a GPU; without one they are skipped."""
    import pytest

    class Outcomes:
        """Writes a row for every test."""

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                said = str(report.longrepr)[-800:] if report.failed else ""
                write(test=report.nodeid, outcome=report.outcome, s=report.duration, said=said)

    write = report
    folders = ["tests"] if place.on_gpu else ["tests/test_gpu.py"]
    options = ["-m", "gpu", "-q", "--timeout", "60", "-p", "no:xdist", "--no-header"]
    code = pytest.main([*options, *folders], plugins=[Outcomes()])
    report(exit_code=int(code))
    assert code == 0, "not all tests pass"


ALONE: dict[str, Callable[[Place, Report], None]] = {"environment": environment, "tests": tests}
"""By name, without the others."""


def main(name: str, device: str, rows: str) -> None:
    """Runs one part."""
    assert name in PARTS, f"there is no part {name!r}"
    # Before what is said is silenced: imports set levels of their own.
    parts = ALONE if name in ALONE else import_module("benchmarks.gpu.parts").ALL
    warnings.filterwarnings("ignore")
    for logger in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    with Path(rows).open("a") as file:

        def report(**row: Any) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        parts[name](Place(device), report)


if __name__ == "__main__":
    main(*sys.argv[1:])
