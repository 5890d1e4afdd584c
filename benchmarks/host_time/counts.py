"""What sampling costs the host, in counts that no machine changes: numbers that tests hold, next to their goals.

Each is counted by the function of the test that holds it.

    python benchmarks/host_time/counts.py --json counts.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import main
from tests.ranks import run_ranks
from tests.sampling.distrifusion.test_moments import operators_of
from tests.sampling.pipefusion.test_operators import PATCHES, beside_the_model, num_launched
from tests.sampling.test_first_request import LOOKS, runs_before
from tests.sampling.test_nccl_like import communicators_made
from tests.sampling.test_waits import METHODS, waits_of


def rows() -> Iterator[tuple[str, float, float]]:
    """Gives each count with its goal."""
    with pytest.MonkeyPatch.context() as patch:
        for method in LOOKS:
            before, num_blocks = runs_before(method, patch)
            yield f"blocks run before the first step, in steps: {method}", before / num_blocks, 3
        before, num_blocks = runs_before("pipefusion", patch, num_layers=2, num_single_layers=3)
        yield "the same of five blocks of Flux: pipefusion", before / num_blocks, 3
    for name in ("pixart", "flux"):
        with pytest.MonkeyPatch.context() as patch:
            launched = num_launched(beside_the_model(name, patch)) / 2 / PATCHES
        yield f"operators for a block and patch beside the model's: {name}", launched, 3
    for method in METHODS:
        with pytest.MonkeyPatch.context() as patch:
            waits = max(each.total() for each in waits_of("flux", None, method, patch))
        yield f"waits for the device in the loop of Flux: {method}", waits, 0
    for rule in ("predicted", "corrected"):
        yield f"operators of a group norm on bands: {rule}", operators_of(rule).total(), 8
    chained, others = run_ranks(communicators_made, 3)[0]
    yield "communicators of three stages", chained, 4
    yield "communicators of three bands", others, 0


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each count."""
    return [
        {"count": what, "counted": count, "goal": goal, "met": "yes" if count <= goal else "**no**"}
        for what, count, goal in rows()
    ]


if __name__ == "__main__":
    main(run, __doc__)
