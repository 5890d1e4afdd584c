"""`diffpipe` as a user calls it, in this process or as others; scripts (`*.py`), too."""

import contextlib
import logging
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

from hydra._internal.hydra import Hydra

from lightning_diffpipe import cli
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def call(capsys, monkeypatch, *arguments):
    """Calls the command in this process; returns its exit code, output and errors."""
    monkeypatch.setattr(sys, "argv", ["diffpipe", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the folder it is called in
    # Hydra composes each config twice: first to look for `hydra.mode`, which none of ours sets.
    sets_mode = any("hydra" in each or each.startswith("-") for each in arguments)
    look = (
        contextlib.nullcontext()
        if sets_mode
        else mock.patch.object(Hydra, "get_mode", return_value=None)
    )
    handlers = [*logging.root.handlers]
    try:
        with look:
            cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code
    finally:  # a handler writes to what this test has captured, and later tests log, too
        logging.root.handlers[:] = handlers
        logger = logging.getLogger("lightning_diffpipe")
        logger.handlers.clear()
        logger.propagate = True
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run(*arguments, cwd, launcher=(), timeout_s=240):
    """Runs the command, or a script, as a user does, as a process."""
    program = () if _is_script(arguments) else ("-m", "lightning_diffpipe.cli")
    command = [sys.executable, *launcher, *program, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=cwd, env=environment, timeout=timeout_s, capture_output=True, text=True
    )


def run_under_torchrun(*arguments, cwd):
    """Runs the command, or a script, as two processes of torchrun."""
    return run(*arguments, cwd=cwd, launcher=TORCHRUN)


def run_on_forks(*arguments, cwd):
    """Runs the command, or a script, as two processes that a launcher has started, but for their imports.

    Those take a processor seven seconds in each process that is none of the test's forks.
    """
    place = meeting_place()
    texts = [str(argument) for argument in arguments]
    ranks = run_ranks(_run_here, 2, texts, cwd, place, group_timeout_s=None, timeout_s=240)
    codes, outputs, errors = zip(*ranks, strict=True)
    code = next(filter(None, codes), 0)
    return subprocess.CompletedProcess(arguments, code, "".join(outputs), "".join(errors))


def meeting_place():
    """Returns the environment by which processes find each other.

    History: a free port that the system chose went to a connection of another test before it was used.
    """
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            break
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _run_here(rank, arguments, cwd, place):
    """Exit code, output and errors of one of two processes."""
    os.environ |= {**place, "LOCAL_WORLD_SIZE": "2"}
    os.chdir(cwd)
    sys.argv = arguments if _is_script(arguments) else ["diffpipe", *arguments]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        code = None
        try:
            if _is_script(arguments):
                runpy.run_path(arguments[0], run_name="__main__")
            else:
                cli.main()
        except SystemExit as stop:
            code = stop.code
        for stream in (sys.stdout, sys.stderr, output, errors):
            stream.flush()
        output.seek(0)
        errors.seek(0)
        return code, output.read(), errors.read()


def _is_script(arguments):
    return str(arguments[0]).endswith(".py")
