"""One of two ranks is killed, frozen or sent SIGTERM in each phase of a run: what the others do, and say.

    python benchmarks/reliability/main.py --json out.json

Each run is a session of its own; the time to its end is from the harm until none of its processes is left. With
`--harms CABLE`, as root, each rank is in a network namespace of its own, and the link between them is cut.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import main

ROOT = Path(__file__).parents[2]
VICTIM = Path(__file__).with_name("victim.py")
LAUNCHERS = {
    "Lightning": [sys.executable],
    "torchrun": [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
    ],
}
HARMS = {"STOP": "SIGSTOP", "KILL": "SIGKILL", "TERM": "SIGTERM", "CABLE": "dead link"}
PHASES = (
    *(
        "starting processes",
        "setting up",
        "aligning weights",
        "probing the step",
        "measuring links",
    ),
    *(
        "profiling layers",
        "planning",
        "placing stages",
        "training",
        "training with the whole model",
    ),
    *("saving a checkpoint", "validating", "ending"),
)
TIMEOUT_S, START_S, LIMIT_S = 12.0, 240.0, 60.0
MARK = "DIFFPIPE_VICTIM"


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        seconds: From the harm to the end of the last process; None if it had to be ended.
        code: Exit code of the launcher.
        output: All that was on the screen.
    """

    seconds: float | None
    code: int | None
    output: str

    def names(self, rank: int, phase: str) -> bool:
        """Whether a line of ours names the rank and the phase."""
        named = rf"(lost rank|SIGTERM to rank|lost rank \d.* lost rank) {rank} \({re.escape(phase)}"
        return re.search(named, self.output) is not None


def run_one(
    launcher: str, harm: str, rank: int, phase: str, timeout_s: float = TIMEOUT_S
) -> Outcome:
    """Runs the script until nothing of it is left."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, output = Path(name), Path(name) / "output"
        file = stack.enter_context(output.open("w"))
        arguments = [str(VICTIM), name, harm, str(rank), phase, str(timeout_s)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: name}
        commands = [[*LAUNCHERS[launcher], *arguments]] if launcher in LAUNCHERS else []
        if not commands:
            commands = [
                [*stack.enter_context(_host(r)), sys.executable, *arguments] for r in (0, 1)
            ]
        processes = [
            subprocess.Popen(
                command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment
            )
            for command in commands
        ]  # fmt: skip
        harmed, ended_s = folder / "harmed", None
        deadline_s = time.time() + START_S
        while time.time() < deadline_s:
            if harmed.exists():
                deadline_s = harmed.stat().st_mtime + LIMIT_S
            ended = [process.poll() is not None for process in processes]
            # A process that is just being started has no environment to read yet.
            if all(ended) and not _left(name):
                ended_s = time.time()
                break
            time.sleep(0.1)
        for pid in _left(name):
            os.kill(pid, signal.SIGKILL)
        codes = [process.wait() for process in processes]
        if not harmed.exists():
            raise RuntimeError(f"rank {rank} never came to {phase!r}:\n{output.read_text()}")
        seconds = None if ended_s is None else max(ended_s - harmed.stat().st_mtime, 0.0)
        return Outcome(seconds, max(codes), output.read_text())


@contextlib.contextmanager
def _host(rank: int) -> Iterator[list[str]]:
    """A command that runs another one on a host of its own, which is linked with the other one's."""

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    space, link = f"diffpipe{os.getpid()}r{rank}", f"dp{rank}"
    ip("netns", "add", space)
    try:
        if rank:
            first = space.replace("r1", "r0")
            ip(
                "link",
                "add",
                "dp0",
                "netns",
                first,
                "type",
                "veth",
                "peer",
                "name",
                "dp1",
                "netns",
                space,
            )
            for here, name, number in ((first, "dp0", 1), (space, link, 2)):
                ip("-n", here, "addr", "add", f"10.77.0.{number}/24", "dev", name)
                ip("-n", here, "link", "set", name, "up")
        ip("-n", space, "link", "set", "lo", "up")
        places = {
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": "29511",
            "NODE_RANK": str(rank),
            "LOCAL_RANK": "0",
        }
        variables = places | {"GLOO_SOCKET_IFNAME": link, "VICTIM_NODES": "2"}
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', f"host{rank}"]
        yield [
            "ip",
            "netns",
            "exec",
            space,
            *named,
            "env",
            *(f"{k}={v}" for k, v in variables.items()),
        ]
    finally:
        ip("netns", "del", space)


def _left(mark: str) -> list[int]:
    """Processes of a run that live, found by their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it has ended, or is not ours
                continue
    return found


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each phase and harm: ranks and launchers together."""
    cases = [
        (phase, harm)
        for phase, harm in itertools.product(arguments.phases, arguments.harms)
        # A dead link looks like a host that starts slowly.
        if phase != "starting processes" or harm != "CABLE"
    ]
    rows = []
    with ThreadPoolExecutor(arguments.parallel) as pool:
        runs = {
            (phase, harm): [
                (launcher, rank, pool.submit(run_one, launcher, harm, rank, phase))
                for launcher, rank in itertools.product(
                    ["two hosts"] if harm == "CABLE" else LAUNCHERS, _ranks(phase)
                )
                for _ in range(arguments.rounds)
            ]
            for phase, harm in cases
        }
        for (phase, harm), futures in runs.items():
            outcomes = [(launcher, rank, future.result()) for launcher, rank, future in futures]
            times = [each.seconds for _, _, each in outcomes if each.seconds is not None]
            named = sum(each.names(rank, phase) for _, rank, each in outcomes)
            row = {
                "phase": phase,
                "signal": HARMS[harm],
                "runs": len(outcomes),
                "ended": len(times),
                "rank and phase named": named,
                "median, s": statistics.median(times) if times else None,
                "longest, s": max(times, default=None),
                "exit codes": " ".join(sorted({str(each.code) for _, _, each in outcomes})),
            }
            print(row, flush=True)
            for launcher, rank, each in outcomes:
                if each.seconds is None or not each.names(rank, phase):
                    print(
                        f"--- {launcher}, rank {rank}, {each.seconds}, {each.code}:\n{each.output[-4000:]}",
                        flush=True,
                    )
            rows.append(row)
    return rows


def _ranks(phase: str) -> tuple[int, ...]:
    return (0,) if phase == "planning" else (0, 1)


def options(parser: argparse.ArgumentParser) -> None:
    """What is tried."""
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument(
        "--harms", nargs="+", default=("STOP", "KILL", "TERM"), choices=tuple(HARMS)
    )
    parser.add_argument("--parallel", type=int, default=2)
    parser.set_defaults(rounds=1)


if __name__ == "__main__":
    main(run, __doc__, options)
