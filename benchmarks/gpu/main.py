"""One GPU, ten minutes: everything that no CPU can tell, each part in a process of its own.

A part that crashes or hangs costs itself and its time, no other. What it has found by then is kept: results are
written after each part. Without a GPU, `--device cpu` runs the same code on tiny sizes.

    python benchmarks/gpu/main.py --json gpu.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PARTS = {
    "environment": 60,
    "tests": 150,
    "gloo": 90,
    "nccl": 150,
    "parity": 90,
    "frozen_share": 100,
    "overhead": 60,
    "sdxl": 60,
    "sd3": 60,
    "attention": 40,
    "compiled": 60,
    "streaming": 40,
    "patches": 75,
    "quantized": 40,
    "graphs": 30,
    "caches": 40,
    "flux": 100,
}
"""Seconds that each may take at most; the first ones tell most."""

_LEAST_S = 10.0  # in less no part gets anywhere
_SAID = 3000  # characters of the end of what a part wrote that are kept if it fails


def run_part(name: str, device: str, limit_s: float) -> dict[str, Any]:
    """Runs a part until it ends or its time is up; nothing it has started is left.

    Args:
        name: Of the part.
        device: Where it computes.
        limit_s: Seconds it has.

    Returns:
        How it ended, after how many seconds, the rows it wrote, and what it said if it failed.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4" if device == "cuda" else "1"),
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder, "rows.jsonl"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.gpu.one_part", name, device, str(rows)]
        started_s = time.monotonic()
        with log.open("wb") as said:
            part = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=said, stderr=said, start_new_session=True
            )
        try:
            code = part.wait(limit_s)
            status = "ok" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            status = f"not done in {limit_s:.0f} s"
        finally:
            _end(part)
        found: dict[str, Any] = {"status": status, "wall_s": round(time.monotonic() - started_s, 1)}
        lines = rows.read_text().splitlines() if rows.exists() else []
        found["rows"] = [json.loads(line) for line in lines]
        if status != "ok":
            found["said"] = log.read_text(errors="replace")[-_SAID:]
    return found


def _end(part: subprocess.Popen[bytes]) -> None:
    """Kills a part with all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(part.pid, signal.SIGKILL)
    part.wait()


def main() -> None:
    """Runs the parts in turn."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("outputs/gpu.json"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--budget-s", type=float, default=600.0, help="for all parts together")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"device": arguments.device, "parts": {}}
    started_s = time.monotonic()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    for name in arguments.parts:
        left_s = arguments.budget_s - (time.monotonic() - started_s)
        if left_s < _LEAST_S:
            found: dict[str, Any] = {"status": "not begun: no time left", "rows": []}
        else:
            found = run_part(name, arguments.device, min(PARTS[name], left_s))
        results["parts"][name] = found
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {found['status']}, {found.get('wall_s', 0.0)} s", flush=True)
        for row in found["rows"]:
            print("   ", json.dumps(row)[:300], flush=True)
        if name == "environment" and arguments.device == "cuda" and "no GPU" in str(found):
            print(
                "torch finds no GPU: nothing to measure. --device cpu tries the code on tiny sizes"
            )
            return
    print(f"{arguments.json}: {time.monotonic() - started_s:.0f} s in all")


if __name__ == "__main__":
    main()
