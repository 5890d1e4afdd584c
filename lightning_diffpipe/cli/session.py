"""What holds for a whole process of the command line."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from lightning_diffpipe.errors import ConfigurationError, raised_by_all


def _stay_offline() -> None:
    # Hubs and loggers read these when they are imported; the constant, when they were already.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("WANDB_MODE", "offline")
    import huggingface_hub

    huggingface_hub.constants.HF_HUB_OFFLINE = True


def _be_quiet() -> None:
    """Silences what every run would print and no user can act on."""
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
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    """Leaves out what Lightning tells of other products, devices and defaults."""
    starts = ("💡 Tip", "TPU available", "`Trainer(limit_", "`weights_only` was not set")
    each_rank = "Initializing distributed: GLOBAL_RANK"  # of whose start we tell once
    return not record.getMessage().startswith((*starts, each_rank))


def _show_log() -> None:
    """Lets the first process say what this package logs, such as the plan."""
    logger = logging.getLogger("lightning_diffpipe")
    logger.setLevel(logging.WARNING if own_rank() else logging.INFO)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.propagate = False


@functools.cache
def tell_loading() -> None:
    """Says once that imports will take seconds, unless they are done."""
    if "torch" not in sys.modules and own_rank() == 0:
        print("loading torch, Lightning and diffusers", file=sys.stderr, flush=True)


def _built_in(name: str) -> str:
    tell_loading()
    from lightning_diffpipe.modules.built_in import built_in

    return str(built_in(name))


def _device_of(accelerator: str) -> str:
    """The first device of a kind, as Lightning's strategy for a single one wants it."""
    import torch

    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    return {"gpu": "cuda:0", "cuda": "cuda:0", "mps": "mps:0"}.get(accelerator, "cpu")


def _in_terminal(shown: Any, else_: Any) -> Any:
    """One value where somebody looks at a terminal, another one in a log."""
    return shown if sys.stdout.isatty() else else_


OmegaConf.register_new_resolver("in_terminal", _in_terminal, replace=True)
OmegaConf.register_new_resolver("built_in", _built_in, replace=True)
OmegaConf.register_new_resolver("device_of", _device_of, replace=True)


def module_of(config: DictConfig) -> Any:
    """Makes the module of the group `model`.

    Raises:
        ConfigurationError: It is one that can only be planned with.
    """
    if config.model._target_.endswith("ModelOnPaper"):
        raise ConfigurationError(
            f"model={config.model.name} is known on paper only, without weights: plan with it (diffpipe "
            f"plan model={config.model.name} cluster=8x_h100 global_batch_size=256), or take "
            "model=pretrained model.path=FOLDER for one you have"
        )
    return hydra.utils.instantiate(config.model)


@raised_by_all()
def prepare(config: DictConfig) -> None:
    """Sets what holds for a whole process: offline, threads, seed."""
    import lightning as L
    import torch

    if config.offline:
        _stay_offline()
    _be_quiet()
    _show_log()
    if config.num_threads is not None:
        if not isinstance(config.num_threads, int) or config.num_threads < 1:
            raise ConfigurationError(
                f"num_threads must be a number of threads, or null; got {config.num_threads!r}"
            )
        torch.set_num_threads(config.num_threads)
    if not isinstance(config.seed, int | None):
        raise ConfigurationError(f"seed must be a whole number; got {config.seed!r}")
    L.seed_everything(config.seed, workers=True, verbose=False)


def own_rank() -> int:
    """This process among those of a launcher: torchrun and diffpipe set `RANK`, Lightning `LOCAL_RANK` only."""
    in_slurm = int(os.environ.get("SLURM_NTASKS", "1")) > 1
    names = ("RANK", *(["SLURM_PROCID"] if in_slurm else []), "LOCAL_RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), "0"))


@contextmanager
def telling(verb: str, path: str) -> Iterator[None]:
    """Tells in a line why a file that the user named cannot be read or written."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"cannot {verb} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"cannot {verb} {path}: it is not text; plans, profiles and clusters are JSON"
        ) from error


def require_writable(path: str) -> None:
    """Finds out before long work whether its result can be written.

    Raises:
        ConfigurationError: It cannot.
    """
    from lightning_diffpipe.files import check_writable

    with telling("write", path):
        check_writable(Path(path))


def require_writable_folder(setting: str, path: str | None) -> None:
    """The same for a folder, which need not be there; rank 0 is who writes.

    Args:
        setting: What it was given as.
        path: None if nothing shall be written.

    Raises:
        ConfigurationError: It cannot be written.
    """
    from lightning_diffpipe.files import check_writable

    if path is not None and own_rank() == 0:
        with telling("write", f"{setting}={path}"):
            check_writable(Path(path) / "any")


def plain(config: DictConfig) -> dict[str, Any]:
    """Resolves a config to plain values.

    Raises:
        MissingMandatoryValue: The user has to say something more.
    """
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
