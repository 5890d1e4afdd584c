"""Processes: what holds for one, and several for one verb, started by the first.

The first process starts the others with its own command line, and waits for them at the end. If any ends with an
error, or is killed, the others find out by a broken connection or a timeout and end, too; what is left is
killed. Under `torchrun` and `srun` the processes are there already.
"""

import contextlib
import functools
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_diffpipe.errors import (
    ConfigurationError,
    DiffPipeError,
    raised_by_all,
    require_number,
)

_GRACE_S = 15.0


def own_rank() -> int:
    """Returns this process's rank: torchrun and diffpipe set `RANK`, Lightning `LOCAL_RANK` only."""
    in_slurm = int(os.environ.get("SLURM_NTASKS", "1")) > 1
    names = ("RANK", *(["SLURM_PROCID"] if in_slurm else []), "LOCAL_RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), "0"))


@functools.cache
def announce_loading() -> None:
    """Prints once that imports take seconds, unless they are done; silences advice to install torchvision."""
    logging.getLogger("transformers.utils.import_utils").addFilter(
        lambda record: "requires torchvision" not in record.getMessage()
    )
    if "torch" not in sys.modules and own_rank() == 0:
        print("loading torch, Lightning and diffusers", file=sys.stderr, flush=True)


def _built_in(name: str) -> str:
    """Returns the folder of the weights of a model that ships with this package."""
    announce_loading()
    from lightning_diffpipe.modules.parts import built_in

    return str(built_in(name))


def _device_of(accelerator: str) -> str:
    """Returns the first device of a kind, as Lightning's strategy for a single one wants it."""
    import torch

    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    return {"gpu": "cuda:0", "cuda": "cuda:0", "mps": "mps:0"}.get(accelerator, "cpu")


for _name, _resolver in (
    # One value where somebody looks at a terminal, another one in a log.
    ("in_terminal", lambda shown, else_: shown if sys.stdout.isatty() else else_),
    ("built_in", _built_in),
    ("device_of", _device_of),
):
    OmegaConf.register_new_resolver(_name, _resolver, replace=True)


def _be_quiet() -> None:
    """Silences messages of every run on which no user can act."""
    import warnings

    import diffusers
    import transformers

    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    for message in (
        ".*LeafSpec.*is deprecated",
        ".*module.s. in eval mode at the start of training",
        ".*local_dir_use_symlinks.* argument is deprecated",
        ".*Sparse CSR tensor support is in beta",
    ):
        warnings.filterwarnings("ignore", message=message)
    # Of other products, devices and defaults; and of each rank's start, of which one line is enough.
    of_no_use = (
        *("💡 Tip", "TPU available", "`Trainer(limit_", "`weights_only` was not set"),
        "Initializing distributed: GLOBAL_RANK",
    )
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(lambda record: not record.getMessage().startswith(of_no_use))


@raised_by_all()
def prepare(config: DictConfig) -> None:
    """Sets up a process: offline, log, threads, seed."""
    import lightning as L
    import torch

    if config.offline:
        # Hubs read this when they are imported; the constant, when they were already.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import huggingface_hub

        huggingface_hub.constants.HF_HUB_OFFLINE = True
    _be_quiet()
    logger = logging.getLogger("lightning_diffpipe")
    logger.setLevel(logging.WARNING if own_rank() else logging.INFO)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.propagate = False
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    L.seed_everything(config.seed, workers=True, verbose=False)


def module_of(config: DictConfig) -> Any:
    """Makes the module of the group `model`, or raises ConfigurationError if it can only be planned with."""
    if "_target_" not in config.model:
        raise ConfigurationError(
            f"model={config.model.path} is known on paper only, without weights: plan with it (diffpipe "
            f"plan model={config.model.path} cluster=8x_h100 global_batch_size=256), or take "
            "model=pretrained model.path=FOLDER for one you have"
        )
    return hydra.utils.instantiate(config.model)


def say(text: str) -> None:
    """Prints a text; if whoever reads has gone, such as `head`, to nobody: there may be files left to write."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        print_to_nobody()


def print_to_nobody() -> None:
    """Redirects standard output to nowhere, with the rest of its buffer, which would fail when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _ended_with(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Passes a SIGTERM on to child processes, and exits with the code of a process that it ended."""

    def end(*_: Any) -> None:
        for child in children:
            child.terminate()
        sys.exit(128 + signal.SIGTERM)

    may_handle_signals = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, end) if may_handle_signals else None
    try:
        yield
    finally:
        if may_handle_signals:
            signal.signal(signal.SIGTERM, previous)


def num_ranks_of(values: dict[str, Any]) -> int:
    """Returns the number of processes in `trainer.devices`, or raises ConfigurationError if it is none."""
    num_ranks = values["trainer"]["devices"]
    require_number("trainer.devices", num_ranks, 1, 1024, whole=True)
    return num_ranks


def share_cores(values: dict[str, Any], num_ranks: int) -> None:
    """Divides the cores of a machine among its processes."""
    if values["num_threads"] is None and num_ranks > 1:
        import torch

        cores = _num_cores(0)
        # A container has some of the machine's cores for all processes; a launcher may give each its own.
        is_bound = is_launched() and cores < _num_cores(os.getppid())
        here = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
        torch.set_num_threads(cores if is_bound else max(1, cores // here))


def _num_cores(process: int) -> int:
    """Returns the number of cores that a process may run on; 0 stands for this process."""
    try:
        return len(os.sched_getaffinity(process))
    except (AttributeError, OSError):  # not on this system; not for another user's process
        return os.cpu_count() or 1


def is_launched() -> bool:
    """Returns whether all processes were started: by a launcher, or this one by the first of this command."""
    return "WORLD_SIZE" in os.environ


def refuse_missing_gpus(values: dict[str, Any], num_ranks: int) -> None:
    """Refuses more processes than this machine has GPUs, before they wait for each other."""
    if values["trainer"]["accelerator"] == "cpu":
        return
    import torch

    # A launcher may not say how many processes there are on this machine; then as many as are known of.
    num_known = int(os.environ.get("LOCAL_RANK", "0")) + 1 if is_launched() else num_ranks
    present, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", num_known))
    # Such as `srun --gpus-per-task=1` shows each process its own.
    sees_own = present == 1 and is_launched() and "CUDA_VISIBLE_DEVICES" in os.environ
    if here > present and not sees_own:
        raise ConfigurationError(
            f"trainer.devices={values['trainer']['devices']} GPUs, but this machine has {present}; "
            "take fewer, or trainer.accelerator=cpu"
        )


def on_ranks(num_ranks: int, function: Callable[[], Any]) -> Any:
    """Calls a function on `num_ranks` processes of this machine.

    Args:
        num_ranks: Processes, this one included.
        function: Runs in each of them; finds its place in the environment, as under `torchrun`.

    Returns:
        What it returned here.

    Raises:
        ConfigurationError: A launcher made another number of processes.
        DiffPipeError: Another process failed, and this one did not.
    """
    from lightning_diffpipe.comm.rendezvous import open_store
    from lightning_diffpipe.comm.watcher import watcher
    from lightning_diffpipe.training.processes import take_place_in_slurm

    take_place_in_slurm()
    world_size = os.environ.get("WORLD_SIZE")
    if world_size is not None:
        if int(world_size) != num_ranks:
            raise ConfigurationError(
                f"trainer.devices={num_ranks}, but the launcher started {world_size} processes"
            )
        return function()
    if num_ranks == 1:
        return function()
    print(f"starting {num_ranks} processes", file=sys.stderr, flush=True)
    store = open_store()  # until the default process group takes it over
    children = _start_others(num_ranks, store.port)
    watcher.children = dict(enumerate(children, 1))
    with _ended_with(children):
        try:
            result = function()
            _wait_for(children, _GRACE_S)
        finally:
            killed = _end(children)
    for rank, child in enumerate(children, 1):
        if child in killed:  # its part is done, or there would be no result
            print(
                f"rank {rank} had not ended {_GRACE_S:g} s after rank 0, and was killed",
                file=sys.stderr,
            )
        elif child.returncode:
            raise DiffPipeError(f"rank {rank} ended with exit code {child.returncode}")
    return result


def _start_others(num_ranks: int, port: int) -> list[subprocess.Popen[bytes]]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
    folder = HydraConfig.get().runtime.output_dir
    arguments = [*sys.argv[1:], f"hydra.run.dir={quoted(folder)}"]
    command = [sys.executable, "-m", "lightning_diffpipe.cli", *arguments]
    return [
        subprocess.Popen(command, env=os.environ | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(1, num_ranks)
    ]


def quoted(text: str) -> str:
    r"""Returns a text as Hydra reads it back, whatever is in it; backslashes count before a quote only.

    Example:
        >>> quoted("it's")
        "'it\\'s'"
    """
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + m[2].replace("'", r"\'"), text) + "'"


def _wait_for(children: Sequence[subprocess.Popen[bytes]], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    with contextlib.suppress(subprocess.TimeoutExpired):
        for child in children:
            child.wait(max(deadline - time.monotonic(), 0.0))


def _end(children: Sequence[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    """Kills processes that do not end by themselves in a second, in which they may print errors; returns them."""
    _wait_for(children, 1.0)
    killed = [child for child in children if child.poll() is None]
    for child in killed:
        child.kill()
    for child in children:
        child.wait()
    return killed
