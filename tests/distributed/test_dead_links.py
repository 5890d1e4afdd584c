"""The link between two hosts dies for ever, dies for some seconds, or is slow.

The hosts are network namespaces, which only root can make; `benchmarks/reliability` tries all phases.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.reliability.hosts import ADDRESSES, linked_hosts, why_not
from benchmarks.reliability.main import run_one
from tests.distributed.scenarios import Settings, assert_equal_runs, reference
from tests.rows import row

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
ROOT = Path(__file__).parents[2]
LIMIT_S = 200.0


@pytest.mark.parametrize(
    ("rank", "phase"),
    [
        row(1, "connecting"),
        row(0, "encoding prompts (PipeFusion)"),
        row(0, "sampling (PipeFusion)"),
        row(0, "connecting"),
        row(1, "saving a checkpoint"),
        row(1, "sampling (DistriFusion)"),
    ],
)
def test_both_sides_of_a_dead_link_end_and_name_each_other(rank, phase):
    """History: before the first connections of all ranks a dead link was waited for half an hour."""
    outcome = run_one("two hosts", "LINK", rank, phase)
    assert outcome.seconds is not None, outcome.output
    assert outcome.names_both(rank, phase), outcome.output


def fit_on_two_hosts(settings, folder, link, outage_s):
    """Trains two ranks on two hosts; nothing passes for a while after the second batch."""
    (folder / "settings").write_bytes(pickle.dumps(settings))
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in (0, 1):
            place = {"RANK": rank, "LOCAL_RANK": 0, "NODE_RANK": rank, "WORLD_SIZE": 2}
            place |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": 29511}
            variables = [f"{name}={value}" for name, value in place.items()]
            command = [sys.executable, "-m", "tests.distributed.on_host", str(folder)]
            process = subprocess.Popen(
                [*link.commands[rank], *variables, *command],
                cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            stack.callback(process.communicate)
            stack.callback(process.kill)
            processes.append(process)
        deadline_s = time.monotonic() + LIMIT_S
        while not (folder / "ready").exists():
            assert time.monotonic() < deadline_s
            if any(process.poll() is not None for process in processes):
                break
            time.sleep(0.05)
        link.is_dead = outage_s > 0
        (folder / "cut").touch()
        time.sleep(outage_s)
        link.is_dead = False
        said = [p.communicate(timeout=deadline_s - time.monotonic())[0] for p in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    return [pickle.loads((folder / f"outcome{rank}").read_bytes()) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("outage_s", "delay_s", "bits_per_s"),
    [row(4.0, 0.0, float("inf")), row(0.0, 0.05, 1e7)],
    ids=["dead for seconds", "slow"],
)
def test_training_over_a_bad_link_has_the_numbers_of_one_process(
    outage_s, delay_s, bits_per_s, tmp_path
):
    settings = Settings(trainer={"max_steps": 4, "max_epochs": -1})
    expected = reference(settings, 2)
    settings.strategy = {"num_stages": 2, "num_microbatches": 2, "profile": None}
    with linked_hosts(delay_s, bits_per_s) as link:
        outcomes = fit_on_two_hosts(settings, tmp_path, link, outage_s)
    assert_equal_runs(outcomes, expected)
    if delay_s:
        measured = outcomes[0].basis.cluster.p2p
        assert delay_s < measured.latency_s < 1.5 * delay_s
        assert 0.7 * bits_per_s < 8 * measured.bandwidth_bytes_per_s < 1.1 * bits_per_s
