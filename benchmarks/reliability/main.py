"""One of two ranks is killed, frozen or sent SIGTERM in each phase of a run: what the others do, and say.

    python benchmarks/reliability/main.py --json out.json

Each run is a session of its own; the time to its end is from the harm until none of its processes is left. With
`--harms LINK CABLE`, as root, each rank is on a host of its own, and the link between them dies.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.harness import main
from benchmarks.reliability.hosts import ADDRESSES, Link, linked_hosts, why_not

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
HARMS = {"STOP": "SIGSTOP", "KILL": "SIGKILL", "TERM": "SIGTERM"}
HARMS |= {"LINK": "dead link", "CABLE": "interface down"}
OF_LINKS = "LINK", "CABLE"
HOSTS = "two hosts", "torchrun on two hosts"
PHASES = (
    *("starting processes", "setting up", "aligning weights", "probing the step"),
    *("measuring links", "profiling layers", "planning", "placing stages", "training"),
    *("training with the whole model", "saving a checkpoint", "validating", "ending"),
)
SAMPLING = tuple(
    f"{phase} ({method})"
    for method in ("PipeFusion", "DistriFusion")
    for phase in ("opening the model", "encoding prompts", "sampling", "decoding latents")
)
LINKED = ("connecting", *PHASES[1:], *SAMPLING)
"""Where a dead link is another thing than a host that starts slowly."""
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

    def names_both(self, rank: int, phase: str) -> bool:
        """Whether one line says that the rank was lost in the phase, and another what the rank itself lost then."""
        name = phase.partition(" (")[0]
        own, other = rf"rank {rank} \({re.escape(name)}", rf"rank {1 - rank} \(\w"
        sides = [rf"{other}.*lost {own}", rf"{own}.*lost {other}"]
        return all(re.search(side, self.output) is not None for side in sides)


def run_one(
    launcher: str, harm: str, rank: int, phase: str, timeout_s: float = TIMEOUT_S
) -> Outcome:
    """Runs the script until nothing of it is left."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, output = Path(name), Path(name) / "output"
        file = stack.enter_context(output.open("w"))
        arguments = [str(VICTIM), name, harm, str(rank), phase, str(timeout_s)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: name}
        if launcher in LAUNCHERS:
            link, commands = None, [[*LAUNCHERS[launcher], *arguments]]
        else:
            link = stack.enter_context(linked_hosts())
            commands = [_on_host(link, launcher, rank, arguments) for rank in (0, 1)]
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
                if link is not None and not link.is_dead:
                    link.is_dead = harm == "LINK"
                    harmed.with_name("cut").touch()
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


def _on_host(link: Link, launcher: str, rank: int, arguments: list[str]) -> list[str]:
    """Returns a command that starts one rank on a host of its own."""
    meeting = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511", "VICTIM_NODES": "2"}
    meeting |= {"NODE_RANK": str(rank)}
    starts = [sys.executable]
    if launcher == "torchrun on two hosts":
        names = {"nnodes": 2, "node-rank": rank, "nproc-per-node": 1, "master-addr": ADDRESSES[0]}
        options = [f"--{name}={value}" for name, value in (names | {"master-port": 29511}).items()]
        starts = [*LAUNCHERS["torchrun"][:3], *options]
    else:
        meeting |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    variables = [f"{name}={value}" for name, value in meeting.items()]
    return [*link.commands[rank], *variables, *starts, *arguments]


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
    harms = [harm for harm in arguments.harms if harm not in OF_LINKS or not why_not()]
    if len(harms) < len(arguments.harms):
        print(f"dead links are left out: {why_not()}", flush=True)
    cases = [
        (phase, harm)
        for phase, harm in itertools.product(arguments.phases, harms)
        if phase in (LINKED if harm in OF_LINKS else PHASES)
    ]
    if not cases:
        raise SystemExit("nothing is left to try")
    rows = []
    with ThreadPoolExecutor(arguments.parallel) as pool:
        runs = {
            (phase, harm): [
                (launcher, rank, pool.submit(run_one, launcher, harm, rank, phase))
                for launcher, rank in itertools.product(
                    HOSTS if harm in OF_LINKS else LAUNCHERS, _ranks(phase)
                )
                for _ in range(arguments.rounds)
            ]
            for phase, harm in cases
        }
        for (phase, harm), futures in runs.items():
            outcomes = [(launcher, rank, future.result()) for launcher, rank, future in futures]
            times = [each.seconds for _, _, each in outcomes if each.seconds is not None]
            names = Outcome.names_both if harm in OF_LINKS else Outcome.names
            named = sum(names(each, rank, phase) for _, rank, each in outcomes)
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
                if each.seconds is None or not names(each, rank, phase):
                    print(
                        f"--- {launcher}, rank {rank}, {each.seconds}, {each.code}:\n{each.output[-4000:]}",
                        flush=True,
                    )
            rows.append(row)
    return rows


def _ranks(phase: str) -> tuple[int, ...]:
    return (0,) if phase == "planning" or phase.startswith("encoding prompts") else (0, 1)


def options(parser: argparse.ArgumentParser) -> None:
    """What is tried."""
    phases = tuple(dict.fromkeys((*PHASES, *LINKED)))
    parser.add_argument("--phases", nargs="+", default=phases, choices=phases)
    parser.add_argument("--harms", nargs="+", default=tuple(HARMS), choices=tuple(HARMS))
    parser.add_argument("--parallel", type=int, default=2)
    parser.set_defaults(rounds=1)


if __name__ == "__main__":
    main(run, __doc__, options)
