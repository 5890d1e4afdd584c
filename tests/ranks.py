"""Runs a function on several gloo processes, and leaves none of them running.

    results = run_ranks(function, 4, argument)      # function(rank, *arguments) -> anything picklable

Processes are forked from a server that has imported torch, Lightning and this project once and used them
(`tests/warm.py`), so that a test pays milliseconds, not seconds, for each. Ranks with an odd number have another
server, whose sets of strings have another order: a fork hashes as its server does, where processes that users start
each have a seed of their own. Where pytest hands out such tests to workers, these share the two servers of the
process that hands out. Every wait has a deadline: a hanging test prints the stack of every rank and fails
in minutes, never in an hour.
"""

import contextlib
import datetime
import faulthandler
import functools
import itertools
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests import gpu_like

# Where GPUs are hidden (`conftest.py`); a process that has looked for them cannot be forked.
_FORKS = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
_CONTEXT: Any = multiprocessing.get_context("forkserver" if _FORKS else "spawn")
_SERVERS = {"1": forkserver.ForkServer(), "2": forkserver.ForkServer()}
"""By the hash seed of their forks. They start with the first test that needs them."""
for _server in _SERVERS.values():
    _server.set_forkserver_preload(["tests.warm"])


def start_servers() -> dict[str, Any]:
    """Starts the servers, which live as long as this process; returns their addresses by hash seed."""
    for hash_seed, server in _SERVERS.items():
        with mock.patch.dict(os.environ, PYTHONHASHSEED=hash_seed):
            server.ensure_running()
    return {hash_seed: server._forkserver_address for hash_seed, server in _SERVERS.items()}


def use_servers(addresses: dict[str, Any]) -> None:
    """Forks from servers that another process has started (`start_servers`)."""
    _SERVERS.update({seed: _ServerOfAnother(address) for seed, address in addresses.items()})


class _ServerOfAnother(forkserver.ForkServer):
    def __init__(self, address: Any) -> None:
        super().__init__()
        self._forkserver_address = address
        # Forks close what they get of the pipe by which a server sees its starter end.
        self._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()


class RankError(AssertionError):
    """A rank raised or did not end in time; the message holds what every rank had to say."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout_s: float = 180.0,
    group_timeout_s: float | None = 60.0,
    grace_s: float = 30.0,
) -> list[Any]:
    """Calls `function(rank, *arguments)` on every rank of a gloo world.

    Args:
        function: A function of a module, so that it can be pickled by name.
        world_size: Number of processes.
        arguments: Passed on.
        timeout_s: After this long all processes are killed and the test fails.
        group_timeout_s: Timeout of the default process group; None for ranks that meet by themselves.
        grace_s: When a rank has failed, the others have so long to end by themselves, too.

    Returns:
        What each rank returned.

    Raises:
        RankError: A rank raised, died or did not end in time. The message begins with "ranks failed" only if
            all ended by themselves; it names those that had to be killed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            _CONTEXT.Process(
                target=_main,
                args=(function, rank, world_size, folder, arguments, group_timeout_s, timeout_s),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        _await_servers(min(world_size, len(_SERVERS)))
        for rank, process in enumerate(processes):
            _start(process, list(_SERVERS)[rank % len(_SERVERS)])
        try:
            _join(processes, time.monotonic() + timeout_s, grace_s)
        finally:
            late = [rank for rank, process in enumerate(processes) if process.is_alive()]
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return _results(processes, folder, late)


def run_in_turn(
    function: Callable[..., Any], world_size: int, *several: tuple[Any, ...]
) -> list[tuple[Any, ...]]:
    """Returns what `run_ranks` would of a function with each of several arguments, called by the same processes.

    They need not start and meet again, and torch knows the shapes of a model by then. Together they have as long as
    pytest gives a test.
    """
    return list(
        zip(*run_ranks(_in_turn, world_size, function, several, timeout_s=290), strict=True)
    )


def _in_turn(rank: int, function: Callable[..., Any], several: tuple[tuple[Any, ...], ...]) -> Any:
    return [function(rank, *arguments) for arguments in several]


@functools.cache
def _await_servers(count: int) -> None:
    """Waits until servers have imported all: one may take longer than ranks wait for each other."""
    first = [_CONTEXT.Process(target=int) for _ in range(count)]
    for process, hash_seed in zip(first, _SERVERS, strict=False):
        _start(process, hash_seed)
    for process in first:
        process.join()


@contextlib.contextmanager
def _forking_from(hash_seed: str) -> Iterator[None]:
    """Inside, processes are forked from one of the servers, which `multiprocessing` has only one of."""
    with (
        mock.patch.dict(os.environ, PYTHONHASHSEED=hash_seed),
        mock.patch.object(
            forkserver, "connect_to_new_process", _SERVERS[hash_seed].connect_to_new_process
        ),
    ):
        yield


def _start(process: Any, hash_seed: str) -> None:
    with _forking_from(hash_seed):
        process.start()


_TURNS = itertools.cycle(_SERVERS)


class _Fork(_CONTEXT.Process):
    def start(self) -> None:
        _await_servers(len(_SERVERS))
        with _forking_from(next(_TURNS)):
            super().start()


forks_for_spawned = SimpleNamespace(Process=_Fork, Queue=_CONTEXT.Queue)
"""In place of `multiprocessing.get_context("spawn")`: forks of a server, which have the server's environment."""


def _join(processes: list[Any], deadline: float, grace_s: float) -> None:
    """Waits for all; when one has failed, gives the others a few seconds to say why."""
    while alive := [process for process in processes if process.is_alive()]:
        if any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + grace_s)
        if not connection.wait(
            [process.sentinel for process in alive], deadline - time.monotonic()
        ):
            return


def _results(processes: list[Any], folder: Path, late: list[int]) -> list[Any]:
    """What ranks returned.

    Args:
        processes: All, ended.
        folder: Where they wrote.
        late: Ranks that had to be killed; one that has written its result waited for the others only.
    """
    errors, hung = [], [rank for rank in late if not (folder / f"{rank}.result").exists()]
    for rank, process in enumerate(processes):
        if not (folder / f"{rank}.result").exists():
            said = "".join(
                file.read_text(errors="replace")
                for file in (folder / f"{rank}.error", folder / f"{rank}.stderr")
                if file.exists()
            )
            errors.append(
                f"--- rank {rank} (exit code {process.exitcode}): {said or 'said nothing'}"
            )
    if errors:
        head = f"ranks {hung} did not end in time" if hung else "ranks failed"
        raise RankError("\n".join([head, *errors]))
    return [
        pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(len(processes))
    ]


def _main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: Path,
    arguments: tuple[Any, ...],
    group_timeout_s: float | None,
    timeout_s: float,
) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # or loaders could have no workers
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    import torch
    import torch.distributed as dist

    gpu_like.install()
    torch.set_num_threads(1)
    with (folder / f"{rank}.stderr").open("wb") as stderr:  # what ends a process says it only there
        os.dup2(stderr.fileno(), 2)
    with (folder / f"{rank}.error").open("w") as report:
        faulthandler.enable(file=report)
        faulthandler.dump_traceback_later(max(timeout_s - 3, 1), file=report)
        try:
            if group_timeout_s is not None:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{folder}/store",
                    rank=rank,
                    world_size=world_size,
                    timeout=datetime.timedelta(seconds=group_timeout_s),
                )
                dist.barrier()  # nobody fails, and leaves, while another still connects
            result = function(rank, *arguments)
            (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
            if dist.is_initialized():
                dist.barrier()  # nobody leaves while another still reads what was sent
        except BaseException:
            report.write(traceback.format_exc())
            report.flush()
            os._exit(1)
        finally:
            faulthandler.cancel_dump_traceback_later()
    os._exit(0)
