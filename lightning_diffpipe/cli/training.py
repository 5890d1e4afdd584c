"""`diffpipe train`, `bench`, which measures some steps of a training, and `export` of a checkpoint in shards."""

import signal
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_diffpipe.cli.launch import module_of, own_rank, prepare
from lightning_diffpipe.cli.values import (
    file_errors,
    named,
    plain,
    require_writable,
    require_writable_folder,
    verb,
)
from lightning_diffpipe.errors import (
    CheckpointError,
    ConfigurationError,
    raised_by_all,
    require_choice,
    require_number,
)

_RUN_ID = "wandb_run_id"
_BENCH_STEPS = 30


def _nodes(config: DictConfig, group: str) -> Iterator[DictConfig]:
    """Yields the `_target_` nodes of a group such as `callbacks`; raises ConfigurationError for other entries."""
    for name, node in config[group].items():
        if node is None:
            continue
        if not OmegaConf.is_dict(node):
            raise ConfigurationError(
                f"{group}.{name}={node} is nothing to build; {group}.{name}=null leaves it out"
            )
        if "_target_" in node:
            yield node


def _fit(trainer: Any, module: Any, data: Any, path: str | None = None) -> None:
    """Trains a module; errors have the names of settings."""
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    names = ("num_stages", "num_replicas", "data_parallel", "cluster")
    try:
        with named({name: f"strategy.{name}" for name in names}):
            trainer.fit(module, datamodule=data, ckpt_path=path)
    except SIGTERMException as stopped:  # Lightning leaves the exit code at 0
        raise SystemExit(128 + signal.SIGTERM) from stopped
    except RuntimeError as error:
        if path is None or "in loading state_dict for" not in str(error):
            raise
        reason = textwrap.shorten(str(error), 300)
        raise CheckpointError(
            f"ckpt_path={path} does not fit the module; choose the model that was trained: {reason}"
        ) from error


@raised_by_all()
def _require_sizes(module: Any, data: Any, config: DictConfig) -> None:
    """Raises ConfigurationError for a size of images on which the module cannot be trained."""
    resolution = config.data.get("resolution")
    if not hasattr(module, "require_size") or not isinstance(resolution, int):
        return
    with named({"height": "data.resolution"}):
        for height, width in getattr(data, "sizes", [(resolution, resolution)]):
            try:
                module.require_size(height, width)
            except ConfigurationError as error:
                if height != width:
                    step = f"data.bucket_step={config.data.bucket_step}"
                    error.args = (f"{step} makes images of {width}x{height} pixels: {error}",)
                raise


def _build_trainer(config: DictConfig, *further: Any) -> Any:
    """Builds the Trainer with the callbacks and loggers of their groups, and further callbacks."""
    _require_files(config)
    import torch

    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    if config.trainer.accelerator == "gpu" and not has_gpu:
        raise ConfigurationError(
            f"trainer.accelerator=gpu: torch {torch.__version__} sees no GPU here; install the torch of your "
            "CUDA (https://pytorch.org), or take trainer=cpu"
        )
    with raised_by_all():
        # Lightning divides by them in the first step, when processes have long started.
        accumulated = config.trainer.get("accumulate_grad_batches", 1)
        require_number("trainer.accumulate_grad_batches", accumulated, 1, whole=True)
        for name in ("val_check_interval", "check_val_every_n_epoch"):
            if config.trainer.get(name) == 0:  # a text or a mapping is a time
                raise ConfigurationError(f"trainer.{name} must be above 0, or null; got 0")
    logger_nodes = list(_nodes(config, "logger"))
    callbacks = list(further) + [
        hydra.utils.instantiate(node)
        for node in _nodes(config, "callbacks")
        if (config.trainer.enable_checkpointing or not node._target_.endswith("Checkpoint"))
        and (config.trainer.enable_progress_bar or not node._target_.endswith("ProgressBar"))
        # Lightning refuses this one without a logger.
        and (logger_nodes or not node._target_.endswith("LearningRateMonitor"))
    ]
    loggers = [
        hydra.utils.instantiate(node, **_run_to_go_on_with(config, node)) for node in logger_nodes
    ]
    return hydra.utils.instantiate(config.trainer, callbacks=callbacks, logger=loggers or False)


def _run_to_go_on_with(config: DictConfig, node: DictConfig) -> dict[str, str]:
    """Returns the id of the run that W&B shall write: that of the run this one goes on from, or a new one."""
    if not node._target_.endswith("WandbLogger") or node.get("id") or own_rank():
        return {}
    path, folder = config.ckpt_path, Path(config.output_dir)
    by_name = path in (None, "last", "best", "hpc")
    before = [folder] if by_name else [folder, *Path(str(path)).absolute().parents[:2]]
    id_files = [each / _RUN_ID for each in before if path and (each / _RUN_ID).is_file()]
    name = id_files[-1].read_text().strip() if id_files else uuid.uuid4().hex[:8]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _RUN_ID).write_text(name + "\n")
    return {"id": name}


def _require_checkpoint(config: DictConfig) -> None:
    """Raises CheckpointError, before processes start, unless the run can begin or go on as asked."""
    from lightning_diffpipe.checkpoint_files import checked, newest

    path = config.ckpt_path
    if path == "last":
        _require_folder_of_all_runs(config)
    elif path is None:
        try:
            latest = newest(f for each in _checkpoint_folders(config) for f in each.glob("*.ckpt"))
        except CheckpointError:
            return  # nothing there that anybody could lose
        if latest is not None and not config.trainer.get("fast_dev_run"):
            raise CheckpointError(
                f"{latest[0]}, of step {latest[1]}, is there from an earlier run, and this one would begin at "
                "step 0 next to it: take ckpt_path=last to go on, or another hydra.run.dir, or remove its folder"
            )
    elif path != "hpc" and not str(path).startswith("registry"):
        checked(path)


def _checkpoint_folders(config: DictConfig) -> list[Path]:
    if not config.trainer.enable_checkpointing:
        return []
    nodes = list(_nodes(config, "callbacks"))
    return [Path(node.dirpath).absolute() for node in nodes if node.get("dirpath")]


def _require_files(config: DictConfig) -> None:
    """Raises ConfigurationError for files of plans that cannot be read, and for others that cannot be written."""
    from lightning_diffpipe.planning.plan import PipelinePlan
    from lightning_diffpipe.planning.profile import ModelProfile

    readers = {"plan": PipelinePlan, "profile": ModelProfile}
    for name, reader in readers.items() if own_rank() == 0 else ():
        value = config.strategy.get(name)
        if isinstance(value, str) and value not in ("measure", "flops"):
            choices = " (choose measure, flops or a file)" if name == "profile" else ""
            with file_errors("read", f"strategy.{name}={value}{choices}"):
                reader.from_json(
                    Path(value).read_text(errors="replace"), f"strategy.{name}={value}"
                )
    require_writable_folder("output_dir", config.output_dir)
    for group in ("callbacks", "logger"):
        for name, node in (config.get(group) or {}).items():
            for key in ("folder", "dirpath", "save_dir"):
                if OmegaConf.is_dict(node) and isinstance(node.get(key), str):
                    require_writable_folder(f"{group}.{name}.{key}", node[key])


@raised_by_all()
def _require_folder_of_all_runs(config: DictConfig) -> None:
    """Raises ConfigurationError for `ckpt_path=last` where each run saves into a folder of its own."""
    hydra_config = HydraConfig.get()
    named = [o.partition("=")[0] for o in hydra_config.overrides.hydra]
    run_folder = Path(hydra_config.runtime.output_dir)
    folders = _checkpoint_folders(config)
    if "hydra.run.dir" not in named and all(run_folder in folder.parents for folder in folders):
        raise ConfigurationError(
            f"ckpt_path=last looks into {folders[0] if folders else run_folder}, which is new in each run; name a "
            "folder for all runs: hydra.run.dir=FOLDER"
        )


def _callbacks_that_save(config: DictConfig) -> list[Any]:
    """Returns callbacks for `save_to` and `save_lora`, in addition to those of the group."""
    from lightning_diffpipe.callbacks import FinalCheckpoint, SaveLora

    callbacks: list[Any] = []
    has_final = (config.get("callbacks") or {}).get("final_checkpoint")
    if (config.save_to or config.save_lora) is not None and not (
        has_final and config.trainer.enable_checkpointing
    ):
        callbacks.append(FinalCheckpoint(Path(config.output_dir) / "final.ckpt"))
    if config.save_lora_every_n_steps is not None:
        with named(
            {"every_n_steps": "save_lora_every_n_steps", "keep_last": "save_lora_keep_last"}
        ):
            save = SaveLora(
                config.save_lora,
                config.save_lora_every_n_steps,
                config.save_lora_names and dict(config.save_lora_names),
                config.save_lora_keep_last,
            )
        callbacks.append(save)
    return callbacks


def _require_lora(config: DictConfig) -> None:
    """Raises ConfigurationError for files of adapters where none are trained, or that have nowhere to go."""
    from lightning_diffpipe.modules.adapters import renamed

    for name, use in (("save_lora", "writes"), ("lora_from", "goes on from")):
        if config[name] is not None and config.model.get("lora") is None:
            raise ConfigurationError(
                f"{name} {use} adapters, and none are trained: add adapter=lora"
            )
    if config.save_lora is None and config.save_lora_every_n_steps is not None:
        raise ConfigurationError(
            f"save_lora_every_n_steps={config.save_lora_every_n_steps} writes into save_lora; add save_lora=FOLDER"
        )
    renamed("", config.save_lora_names or {})


def _speed_up(config: DictConfig, module: Any) -> None:
    """Chooses kernels of attention, and compiles blocks, as `attention` and `compile` say."""
    from lightning_diffpipe.sampling.tracing.attention import repeated_blocks, set_attention

    # What is compiled as a whole cannot be cut.
    require_choice("compile", config.compile, (None, "blocks"))
    for denoiser in getattr(module, "denoisers", (module,)):
        if config.attention is not None:  # first: compiling reads it
            set_attention(denoiser, config.attention)
        if config.compile is not None:
            for block in repeated_blocks(denoiser):
                block.compile()


def _require_exports(config: DictConfig, module: Any) -> None:
    """Raises ConfigurationError, before training, for files that could not be written after it, and for groups."""
    if config.save_lora is not None:
        module.lora_weights(config.save_lora_names)
    if config.save_to is not None and hasattr(module, "refuse_folder"):
        module.refuse_folder(config.save_to)
    if hasattr(module, "optimization"):
        with named({"groups": "model.optimization.groups"}):
            module.optimization.parameter_groups(module)


@verb("train a module: diffpipe train experiment=glyphs strategy.num_stages=2")
def train(config: DictConfig) -> Any:
    """Trains `model` on `data` with `trainer`, and writes the parts where `save_to` says."""
    return run_training(config).callback_metrics


def run_training(config: DictConfig) -> Any:
    """Trains, and returns the Trainer."""
    from lightning.pytorch.callbacks import LambdaCallback

    from lightning_diffpipe.checkpoint_files import chosen
    from lightning_diffpipe.training.before_training import why_empty
    from lightning_diffpipe.training.strategy import DiffPipeStrategy

    for name in ("save_to", "save_lora"):
        require_writable_folder(name, config[name])
        if config[name] is not None and config.trainer.get("fast_dev_run"):
            raise ConfigurationError(
                f"{name} is written from the final checkpoint, and trainer.fast_dev_run="
                f"{config.trainer.fast_dev_run} writes none; leave fast_dev_run out"
            )
    _require_lora(config)
    require_choice("save_dtype", config.save_dtype, ("float16", "bfloat16", "float32"))
    _require_checkpoint(config)
    prepare(config)
    # Once nothing is refused any more: the first that is logged begins a run.
    logs_config = LambdaCallback(
        on_fit_start=lambda trainer, module: [
            logger.log_hyperparams(plain(config)) for logger in trainer.loggers
        ]
    )
    trainer = _build_trainer(config, logs_config)  # before weights are read, which may take minutes
    with raised_by_all():
        trainer.callbacks += _callbacks_that_save(config)  # after that which averages weights
    data = hydra.utils.instantiate(config.data)
    if hasattr(data, "read_files") and own_rank() == 0:
        with named({"folder": "data.folder"}):
            data.read_files()
    module = module_of(config)
    _require_sizes(module, data, config)
    with raised_by_all():
        _speed_up(config, module)
        _require_exports(config, module)
    path = config.ckpt_path
    if path == "last" and not isinstance(trainer.strategy, DiffPipeStrategy):
        path = chosen(trainer, path, fits=True)  # which ours does by itself
    _fit(trainer, module, data, path)
    # Lightning passes over a loader without a batch; none was asked for where limit_train_batches=0.
    if trainer.num_training_batches == 0 and trainer.train_dataloader is not None:
        with raised_by_all():
            raise ConfigurationError(why_empty(trainer.train_dataloader))
    if (config.save_to or config.save_lora) is not None and trainer.is_global_zero:
        _export(config, type(module), _last_checkpoint(trainer))
    return trainer


def _last_checkpoint(trainer: Any) -> Path:
    """Returns the final checkpoint of a run, or the one it went on from if nothing was left to train."""
    from lightning_diffpipe.callbacks import FinalCheckpoint

    for callback in trainer.callbacks:
        if isinstance(callback, FinalCheckpoint) and callback.is_written:
            return callback.path
    reason = f"nothing was left to train (trainer.max_steps={trainer.max_steps}, max_epochs={trainer.max_epochs})"
    if trainer.ckpt_path is None:
        raise ConfigurationError(f"{reason}, so there is nothing for save_to; raise them")
    print(f"{reason} in {trainer.ckpt_path}")
    return Path(trainer.ckpt_path)


def _export(config: DictConfig, module_class: type, checkpoint: Path) -> None:
    """Writes the trained parts as a diffusers folder, and adapters as a file of their own, from a checkpoint.

    The checkpoint is whole under every strategy, and has the averaged weights.
    """
    import torch
    from safetensors import SafetensorError

    module = module_class.from_checkpoint(checkpoint)
    try:
        if config.save_to is not None:
            module.save_pretrained(config.save_to, dtype=getattr(torch, config.save_dtype))
            print(f"wrote {config.save_to}")
        if config.save_lora is not None:
            module.save_lora(config.save_lora, config.save_lora_names)
            print(f"wrote the adapters to {config.save_lora}")
    except (OSError, SafetensorError) as error:  # the latter has no path
        raise CheckpointError(
            f"cannot write what was trained: {error}. It is in {checkpoint}: with ckpt_path={checkpoint} and what "
            "it lacks (room, another folder) the same command writes it without training"
        ) from error


@verb("measure some steps of a training next to their plan: diffpipe bench experiment=glyphs")
def bench(config: DictConfig) -> Any:
    """Trains as `train` would, but saves and logs nothing, and prints measured numbers next to planned ones."""
    from lightning_diffpipe.callbacks import PipelineMonitor
    from lightning_diffpipe.viewing.measured import number_table

    overridden = {override.partition("=")[0] for override in HydraConfig.get().overrides.task}
    OmegaConf.set_struct(config, False)
    if "trainer.max_steps" not in overridden:
        config.trainer.max_steps = _BENCH_STEPS
    require_number("trainer.max_steps", config.trainer.max_steps, 5, whole=True)
    config.trainer.update(
        enable_checkpointing=False, enable_model_summary=False, limit_val_batches=0
    )
    config.update(logger={}, save_to=None, save_lora=None)
    config.update(save_lora_every_n_steps=None, save_lora_keep_last=None)
    monitor = {
        "_target_": "lightning_diffpipe.PipelineMonitor",
        "every_n_steps": config.trainer.max_steps,  # the first looks come by themselves
        "folder": str(Path(config.output_dir) / "pipeline"),
    }
    # Others count in the plan (averages, stored encodings).
    others = {
        name: node
        for name, node in (config.get("callbacks") or {}).items()
        if OmegaConf.is_dict(node) and not str(node.get("_target_")).endswith(".PipelineMonitor")
    }
    config.callbacks = {**others, "bench": monitor}
    trainer = run_training(config)
    (monitor_of_run,) = (each for each in trainer.callbacks if isinstance(each, PipelineMonitor))
    if trainer.is_global_zero:
        print(number_table(monitor_of_run.numbers))
        if Path(monitor["folder"]).exists():  # of a pipeline
            print(f"\n{monitor['folder']} has the plan, its timeline and a trace")
    return monitor_of_run.numbers


@verb(
    "make one file of a checkpoint in shards: diffpipe export RUN/checkpoints/last.ckpt whole.ckpt"
)
def export(config: DictConfig) -> None:
    """Writes `checkpoint`, a folder, to `output`, a file."""
    from lightning_diffpipe.checkpoint_files import WholeFiles
    from lightning_diffpipe.checkpoint_shards import is_sharded, read_shards

    values = plain(config)
    folder, output = values["checkpoint"], values["output"]
    if not is_sharded(folder):
        there = "is no folder" if Path(folder).exists() else "is not there, but must be the folder"
        raise ConfigurationError(
            f"checkpoint={folder} {there} of a checkpoint in shards; only strategy.state_dict_type=sharded "
            "writes such, others are files already"
        )
    require_writable(output)
    WholeFiles().save_checkpoint(read_shards(folder, weights_only=False), output)
    print(f"wrote {output}")
