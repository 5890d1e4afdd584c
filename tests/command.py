"""`diffpipe` as a user calls it, in this process or as one of its own."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

from hydra._internal.hydra import Hydra

from lightning_diffpipe import cli

ROOT = Path(__file__).parent.parent


def call(capsys, monkeypatch, *arguments):
    """Calls the command in this process; returns its exit code, output and errors."""
    monkeypatch.setattr(sys, "argv", ["diffpipe", *arguments])
    # Hydra composes each config twice: first to look for `hydra.mode`, which none of ours sets.
    sets_mode = any("hydra" in each or each.startswith("-") for each in arguments)
    look = nullcontext() if sets_mode else mock.patch.object(Hydra, "get_mode", return_value=None)
    try:
        with look:
            cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run(*arguments, cwd, timeout_s=240):
    """Runs the command as a user does, as a process."""
    command = [sys.executable, "-m", "lightning_diffpipe.cli", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=cwd, env=environment, timeout=timeout_s, capture_output=True, text=True
    )
