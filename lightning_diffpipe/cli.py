"""`diffpipe`: every verb of this package on the command line, configured with Hydra.

A verb is a function of one composed config, `conf/<verb>.yaml`, found as a package from any directory.
Hydra reads the arguments behind the verb; the verb itself is hidden from Hydra while it parses, and
put back before the function runs, because Lightning starts further processes with `sys.argv`.

This is the only file that imports Hydra. The library sees plain values.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_diffpipe.errors import ConfigurationError, DiffPipeError

_CONF = "pkg://lightning_diffpipe.conf"
_VERBS: dict[str, tuple[str, Callable[[DictConfig], Any]]] = {}


def verb(summary: str) -> Callable[[Callable[[DictConfig], Any]], Callable[[DictConfig], Any]]:
    """Registers a function as a verb of the command line.

    Args:
        summary: One line for `diffpipe --help`.
    """

    def register(function: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
        _VERBS[function.__name__] = (summary, function)
        return function

    return register


def _stay_offline() -> None:
    # Hubs and loggers read these when they are imported; the constant, when they were already.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("WANDB_MODE", "offline")
    import huggingface_hub

    huggingface_hub.constants.HF_HUB_OFFLINE = True


def _built_in(name: str) -> str:
    from lightning_diffpipe.modules.built_in import built_in

    return str(built_in(name))


OmegaConf.register_new_resolver("built_in", _built_in, replace=True)


def _prepare(config: DictConfig) -> None:
    """Sets what holds for a whole process: offline, threads, seed."""
    import lightning as L
    import torch

    if config.offline:
        _stay_offline()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    L.seed_everything(config.seed, workers=True, verbose=False)


def _nodes(config: DictConfig) -> Iterator[DictConfig]:
    """Yields the `_target_` nodes of a dictionary group, such as `callbacks`."""
    for node in config.values():
        if node is not None and "_target_" in node:
            yield node


def _build_trainer(config: DictConfig) -> Any:
    """Builds the Trainer with the callbacks and loggers of their groups."""
    callbacks = [
        hydra.utils.instantiate(node)
        for node in _nodes(config.callbacks)
        if (config.trainer.enable_checkpointing or not node._target_.endswith("Checkpoint"))
        and (config.trainer.enable_progress_bar or not node._target_.endswith("ProgressBar"))
        # Lightning refuses this one without a logger.
        and (config.logger or not node._target_.endswith("LearningRateMonitor"))
    ]
    loggers = [hydra.utils.instantiate(node) for node in _nodes(config.logger)]
    return hydra.utils.instantiate(config.trainer, callbacks=callbacks, logger=loggers or False)


def _plain(config: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@verb("train a module: diffpipe train experiment=glyphs strategy.num_stages=2")
def train(config: DictConfig) -> Any:
    """Trains `model` on `data` with `trainer`, and writes the parts where `save_to` says."""
    _prepare(config)
    module = hydra.utils.instantiate(config.model)
    data = hydra.utils.instantiate(config.data)
    trainer = _build_trainer(config)
    for logger in trainer.loggers:
        logger.log_hyperparams(_plain(config))
    trainer.fit(module, datamodule=data, ckpt_path=config.ckpt_path)
    if config.validate_after:
        trainer.validate(module, datamodule=data, verbose=trainer.is_global_zero)
    if config.save_to is not None:
        _export(config, trainer, type(module))
    return trainer.callback_metrics


def _export(config: DictConfig, trainer: Any, module_class: type) -> None:
    """Writes the trained parts as a diffusers folder, by way of a checkpoint.

    A checkpoint is whole under every strategy, while a rank of a pipeline holds one part only.
    """
    import torch

    path = Path(config.output_dir) / "checkpoints" / "final.ckpt"
    trainer.save_checkpoint(path)
    if trainer.is_global_zero:
        whole = module_class.from_checkpoint(path)
        whole.save_pretrained(config.save_to, dtype=getattr(torch, config.save_dtype))
        print(f"wrote {config.save_to}")
    trainer.strategy.barrier()


def _run(name: str, arguments: list[str]) -> None:
    """Lets Hydra compose the config of one verb from its arguments, and runs it."""
    _, function = _VERBS[name]
    whole = sys.argv

    def task(config: DictConfig) -> Any:
        sys.argv = whole
        return function(config)

    task.__module__ = __name__
    sys.argv = [whole[0], *arguments]
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # exceptions come to us, to be told shortly
    try:
        hydra.main(version_base="1.3", config_path=_CONF, config_name=name)(task)()
    finally:
        sys.argv = whole


def main() -> None:
    """Entry point of the `diffpipe` command."""
    arguments = sys.argv[1:]
    _run(arguments[0], arguments[1:])


if __name__ == "__main__":
    main()
