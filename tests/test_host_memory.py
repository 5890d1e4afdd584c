"""Freed memory stays with the process.

History: encoders of the demo took half longer in groups of eight samples than in groups of two, as every
step cleared thousands of pages that the step before had given back.
"""

import math
import os
import subprocess
import sys
import types

import pytest

from lightning_diffpipe import host_memory

STEPS = """
import resource, runpy, sys, torch
print(runpy.run_path(sys.argv[1])["keep_freed_memory"]())  # alone: the whole package takes seconds to import
for step in range(20):
    tensors = [torch.zeros(5_000_000) for _ in range(6)]
    del tensors
    if step == 9:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**variables):
    """Whether glibc was set, and page faults of ten steps that allocate 120 MB each."""
    inherited = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    run = subprocess.run(
        [sys.executable, "-c", STEPS, host_memory.__file__],
        env={**inherited, **variables}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    is_set, count = run.stdout.split()
    return is_set, int(count)


@pytest.mark.slow
def test_nothing_asks_for_what_other_systems_lack():
    """History: the monitor imported `resource`, which Windows does not have, and with it the whole package."""
    code = "import sys; sys.modules['resource'] = None; import lightning_diffpipe.callbacks as c"
    subprocess.run([sys.executable, "-c", f"{code}; c.PipelineMonitor()"], timeout=120, check=True)


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_the_most_memory_is_counted_in_bytes(system, monkeypatch):
    """History: macOS counts bytes, which were taken for kibibytes."""
    resource = types.ModuleType("resource")
    resource.RUSAGE_SELF, resource.getrusage = 0, lambda _: types.SimpleNamespace(ru_maxrss=3)
    monkeypatch.setitem(sys.modules, "resource", resource)
    monkeypatch.setattr(sys, "platform", system)
    assert host_memory.peak_resident_bytes() == (3 if system == "darwin" else 3072)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert host_memory.peak_resident_bytes() is None


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_pages_are_not_given_back_after_every_step():
    is_set, kept = faults()
    if is_set == "False":
        pytest.skip("another C library")
    _, given_back = faults(MALLOC_TOP_PAD_="0")  # any such variable means: the user decides
    assert kept < 1000 < given_back


def test_what_is_free_is_what_the_host_and_the_container_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    free = host_memory.available_bytes()
    assert 0 < free < math.inf or sys.platform != "linux"
    (tmp_path / "memory.current").write_text("400\n")
    for limit, left in (("1000\n", 600), ("max\n", None)):
        (tmp_path / "memory.max").write_text(limit)
        assert (host_memory.available_bytes() == 600) == (left == 600)
