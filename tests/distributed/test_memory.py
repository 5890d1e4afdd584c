"""Anonymous memory of ranks stays within what their plan says, from opening a pipeline to sampling it."""

import json
import os
import subprocess
import sys

import pytest

from tests.command import ROOT, meeting_place
from tests.distributed.stored import LINUX

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.table,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    LINUX,
]
LIBRARIES_GIB = 0.6
"""Of the interpreter and all libraries."""


def measured(folder, *arguments):
    """Returns the rows of the benchmark, whose processes start as those of users do."""
    script, rows = ROOT / "benchmarks/memory/main.py", folder / "rows.json"
    command = [sys.executable, script, "--folder", folder, "--json", rows, *arguments]
    users = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        list(map(str, command)), env=users | meeting_place(), timeout=600, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(rows.read_text())["rows"]


def test_no_phase_takes_more_than_the_plan_says_and_the_libraries(tmp_path):
    """Adapters of 3e8 parameters in bfloat16, two stages, and PipeFusion."""
    by_rank = {0: {}, 1: {}}
    for row in measured(tmp_path, "--size", "3e8"):
        by_rank[row["rank"]][row["phase"]] = row["GiB"]
    for peaks in by_rank.values():
        limit = 1.15 * peaks.pop("planned") + LIBRARIES_GIB
        phases = "opening", "probing the step", "profiling layers", "training", "saving", "sampling"
        assert peaks.keys() >= set(phases)
        assert max(peaks.values()) <= limit, (limit, by_rank)
