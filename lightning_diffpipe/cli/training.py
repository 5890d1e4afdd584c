"""`diffpipe train`, and `diffpipe bench`, which measures some steps of a training."""

import importlib.util
import inspect
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
    require_number,
)

_RUN_ID = "wandb_run_id"
_BENCH_STEPS = 30
_SAVE_DTYPES = ("float16", "bfloat16", "float32")


def _nodes(config: DictConfig, group: str) -> Iterator[DictConfig]:
    """Yields the `_target_` nodes of a group such as `callbacks`; raises ConfigurationError for other entries."""
    if config.get(group) is None:
        raise ConfigurationError(f"there is no {group}; take {group}=none for an empty one")
    for name, node in config[group].items():
        if node is None:
            continue
        if not OmegaConf.is_dict(node):
            raise ConfigurationError(
                f"{group}.{name}={node} is nothing to build; {group}.{name}=null leaves it out"
            )
        if "_target_" in node:
            yield node


@raised_by_all()
def _refuse_trainer_values(config: DictConfig) -> None:
    """Refuses numbers that Lightning takes, and divides by or takes no notice of; and GPUs where there are none."""
    import torch

    least = {"accumulate_grad_batches": 1, "gradient_clip_val": 0, "log_every_n_steps": 0}
    least |= {"max_epochs": -1, "num_sanity_val_steps": -1, "check_val_every_n_epoch": 1}
    for name, bound in {**least, "max_steps": -1, "limit_val_batches": 0}.items():
        if config.trainer.get(name) is not None or name == "max_steps":
            require_number(f"trainer.{name}", config.trainer[name], bound)
    for name in ("enable_checkpointing", "enable_model_summary", "enable_progress_bar"):
        if not isinstance(config.trainer[name], bool):
            raise ConfigurationError(
                f"trainer.{name} must be true or false; got {config.trainer[name]}"
            )
    if (interval := config.trainer.get("val_check_interval")) is not None and interval == 0:
        raise ConfigurationError(
            "trainer.val_check_interval=0 validates after every 0 batches; take more, or "
            "trainer.limit_val_batches=0 for none"
        )
    for name in ("callbacks", "logger"):
        if name in config.trainer:
            raise ConfigurationError(
                f"trainer.{name}={config.trainer[name]}: there is a group {name} for them; take {name}=none for "
                f"none, or add one with +{name}.mine._target_=CLASS"
            )
    for name, node in (config.get("callbacks") or {}).items():
        if OmegaConf.is_dict(node) and isinstance(rate := node.get("refresh_rate"), int):
            require_number(f"callbacks.{name}.refresh_rate", rate, 0, whole=True)
        prompts = node.get("prompts") if OmegaConf.is_dict(node) else None
        if prompts is not None and not all(isinstance(each, str) for each in prompts):
            raise ConfigurationError(f"callbacks.{name}.prompts must be texts; got {prompts}")
    accelerator, is_there = config.trainer.accelerator, torch.cuda.is_available
    if accelerator in ("gpu", "cuda") and not (is_there() or torch.backends.mps.is_available()):
        raise ConfigurationError(
            f"trainer.accelerator={accelerator!r}: torch {torch.__version__} sees no GPU here; install torch for "
            "this machine's CUDA, or take trainer=cpu"
        )


def _fit(config: DictConfig, trainer: Any, module: Any, data: Any, path: str | None = None) -> None:
    """Trains; what cannot be is refused before processes start, under the name of its setting."""
    count, size = config.strategy.get("num_microbatches"), config.data.get("batch_size")
    with raised_by_all():
        if isinstance(count, int) and isinstance(size, int) and count > size:
            raise ConfigurationError(
                f"strategy.num_microbatches={count} is more than the {size} samples of a batch "
                f"(data.batch_size={size}); take at most {size}, or larger batches"
            )
    with named(
        {name: f"strategy.{name}" for name in ("num_stages", "num_replicas", "data_parallel")}
    ):
        try:
            trainer.fit(module, datamodule=data, ckpt_path=path)
        except RuntimeError as error:
            if path is None or "in loading state_dict for" not in str(error):
                raise
            reason = textwrap.shorten(str(error), 300)
            raise CheckpointError(
                f"ckpt_path={path} does not fit the module; choose the model that was trained: {reason}"
            ) from error


@raised_by_all()
def _require_sizes(module: Any, data: Any, config: DictConfig) -> None:
    """Refuses images of a size that the module cannot learn from."""
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
    _refuse_trainer_values(config)
    _require_files(config)
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
    for logger in loggers:
        given = getattr(logger, "_wandb_init", {})
        # W&B warns of it, though nobody has asked for it.
        if given.get("anonymous", True) is None:
            del given["anonymous"]
    return hydra.utils.instantiate(config.trainer, callbacks=callbacks, logger=loggers or False)


def _run_to_go_on_with(config: DictConfig, node: DictConfig) -> dict[str, str]:
    """Returns the id of the run that W&B shall write: that of the run this one goes on from, or a new one."""
    if not node._target_.endswith("WandbLogger") or node.get("id") or own_rank():
        return {}
    path, folder = config.ckpt_path, Path(config.output_dir)
    by_name = path in (None, "last", "best", "hpc")
    before = [folder] if by_name else [folder, *Path(str(path)).absolute().parents[:2]]
    found = [each / _RUN_ID for each in before if path and (each / _RUN_ID).is_file()]
    name = found[-1].read_text().strip() if found else uuid.uuid4().hex[:8]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _RUN_ID).write_text(name + "\n")
    return {"id": name}


def _require_checkpoint(config: DictConfig) -> None:
    """Raises CheckpointError, before processes start, unless the run can begin or go on as asked."""
    from lightning_diffpipe.checkpoint_files import look_at, newest

    path = config.ckpt_path
    if path == "":
        raise ConfigurationError(
            "ckpt_path is empty; name a file, or last, or leave it out (null) to begin anew"
        )
    if path == "best":
        raise ConfigurationError(
            "ckpt_path=best is of a run that goes on in one process, and this one begins; name the file, or "
            "take last"
        )
    if path == "last":
        _require_last_checkpoints(config)
    elif path is None:
        try:
            found = newest(f for each in _checkpoint_folders(config) for f in each.glob("*.ckpt"))
        except CheckpointError:
            return  # nothing there that anybody could lose
        if found is not None and not config.trainer.get("fast_dev_run"):
            raise CheckpointError(
                f"{found[0]}, of step {found[1]}, is there from an earlier run, and this one would begin at "
                "step 0 next to it: take ckpt_path=last to go on, or another hydra.run.dir, or remove its folder"
            )
    elif path != "hpc" and not str(path).startswith("registry"):
        look_at(path)


def _checkpoint_folders(config: DictConfig) -> list[Path]:
    """Returns the folders into which callbacks of a config save."""
    if not config.trainer.enable_checkpointing:
        return []
    nodes = list(_nodes(config, "callbacks"))
    return [Path(node.dirpath).absolute() for node in nodes if node.get("dirpath")]


def _require_files(config: DictConfig) -> None:
    """Finds out before processes start whether files to plan with can be read, and others can be written."""
    from lightning_diffpipe.planning.plan import PipelinePlan
    from lightning_diffpipe.planning.profile import ModelProfile

    strategy = config.strategy if OmegaConf.is_dict(config.strategy) else {}
    readers = {"plan": PipelinePlan, "profile": ModelProfile}
    for name, choices in (("plan", (None,)), ("profile", (None, "measure", "flops"))):
        value = strategy.get(name)
        if value in choices or not isinstance(value, str | int | float) or own_rank() != 0:
            continue
        file, called = Path(str(value)), f"strategy.{name}={value}"
        if not file.is_file():
            known = "; choose measure, flops or a file" if name == "profile" else ""
            raise ConfigurationError(f"{called}: there is no such file{known}")
        with file_errors("read", called):
            readers[name].from_json(file.read_text(errors="replace"), called)
    require_writable_folder("output_dir", config.output_dir)
    for group in ("callbacks", "logger"):
        for name, node in (config.get(group) or {}).items():
            for key in ("folder", "dirpath", "save_dir"):
                if OmegaConf.is_dict(node) and isinstance(node.get(key), str):
                    require_writable_folder(f"{group}.{name}.{key}", node[key])
    final = (config.get("callbacks") or {}).get("final_checkpoint")
    if OmegaConf.is_dict(final) and final.get("path") is not None and own_rank() == 0:
        require_writable(str(final.path), f"callbacks.final_checkpoint.path={final.path}")


@raised_by_all()
def _require_last_checkpoints(config: DictConfig) -> None:
    """Raises ConfigurationError for `ckpt_path=last` where no run could find a last checkpoint."""
    nodes = [node for node in _nodes(config, "callbacks") if node.get("save_last")]
    if not nodes or not config.trainer.enable_checkpointing:
        raise ConfigurationError(
            "ckpt_path=last, but no callback writes last.ckpt; take callbacks=training or callbacks=default "
            "with callbacks.checkpoint.save_last=link and trainer.enable_checkpointing=true"
        )
    hydra_config = HydraConfig.get()
    named = [o.partition("=")[0] for o in hydra_config.overrides.hydra]
    own = Path(hydra_config.runtime.output_dir)
    folders = _checkpoint_folders(config)
    if "hydra.run.dir" not in named and all(own in folder.parents for folder in folders):
        raise ConfigurationError(
            f"ckpt_path=last looks into {folders[0] if folders else own}, which is new in each run; name a "
            "folder for all runs: hydra.run.dir=FOLDER"
        )


def _callbacks_that_save(config: DictConfig) -> list[Any]:
    """Returns callbacks for `save_to` and `save_lora` besides those of the group."""
    from lightning_diffpipe.callbacks import FinalCheckpoint, SaveLora

    found: list[Any] = []
    has_final = (config.get("callbacks") or {}).get("final_checkpoint")
    if (config.save_to or config.save_lora) is not None and not (
        has_final and config.trainer.enable_checkpointing
    ):
        found.append(FinalCheckpoint(Path(config.output_dir) / "final.ckpt"))
    if config.save_lora_every_n_steps is not None:
        names = config.save_lora_names and dict(config.save_lora_names)
        known = {"every_n_steps": "save_lora_every_n_steps", "keep_last": "save_lora_keep_last"}
        with named(known):
            numbers = config.save_lora_every_n_steps, names, config.save_lora_keep_last
            found.append(SaveLora(config.save_lora, *numbers))
    return found


def _require_lora(config: DictConfig) -> None:
    """Refuses adapters that the module does not take, and a file of them that nothing is trained for."""
    from lightning_diffpipe.modules.adapters import renamed

    if config.model.get("lora") is not None and "_target_" in config.model:
        target = hydra.utils.get_object(config.model._target_)
        # Of a class method such as from_pretrained.
        module_class = getattr(target, "__self__", target)
        known = inspect.signature(module_class).parameters.values()
        if not any(p.name == "lora" or p.kind is p.VAR_KEYWORD for p in known):
            raise ConfigurationError(
                f"{module_class.__name__} trains no adapters; leave out adapter=lora, or take another model"
            )
    else:
        for name, use in (("save_lora", "writes"), ("lora_from", "goes on from")):
            if config[name] is not None:
                raise ConfigurationError(
                    f"{name} {use} adapters, and none are trained: add adapter=lora"
                )
    if config.save_lora_every_n_steps is None and config.save_lora_keep_last is not None:
        raise ConfigurationError(
            f"save_lora_keep_last={config.save_lora_keep_last} removes what save_lora_every_n_steps has written; "
            "add save_lora_every_n_steps=500, for example"
        )
    if config.save_lora is None and config.save_lora_every_n_steps is not None:
        raise ConfigurationError(
            f"save_lora_every_n_steps={config.save_lora_every_n_steps} writes into save_lora; add save_lora=FOLDER"
        )
    renamed("", config.save_lora_names or {})


def _require_optimizer(config: DictConfig) -> None:
    """Raises ConfigurationError for an optimizer whose package is missing, or that nothing would take."""
    found = config.model.get("optimization")
    node = OmegaConf.is_dict(found) and found.get("optimizer")
    if not node:
        return
    if "_target_" not in found:
        raise ConfigurationError(
            f"model={config.model.get('_target_')} has no model.optimization and makes its optimizer itself; leave "
            "out the group optimizer"
        )
    package = node._target_.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        known = {"prodigyplus": "prodigy-plus-schedule-free"}.get(
            package, package.replace("_", "-")
        )
        raise ConfigurationError(
            f"model.optimization.optimizer={node._target_} needs the package {package}; run: pip install {known}"
        )


def _speed_up(config: DictConfig, module: Any) -> None:
    """Chooses kernels of attention, and compiles blocks, as `attention` and `compile` say."""
    from lightning_diffpipe.sampling.tracing.attention import set_attention
    from lightning_diffpipe.sampling.tracing.compiled import repeated_blocks

    if config.compile not in (None, "blocks"):
        raise ConfigurationError(
            f"compile={config.compile}: a network compiled as a whole cannot be cut; take compile=blocks"
        )
    for denoiser in getattr(module, "denoisers", (module,)):
        if config.attention is not None:  # first: compiling reads it
            set_attention(denoiser, config.attention)
        if config.compile is not None:
            for block in repeated_blocks(denoiser):
                block.compile()


@verb("train a module: diffpipe train experiment=glyphs strategy.num_stages=2")
def train(config: DictConfig) -> Any:
    """Trains `model` on `data` with `trainer`, and writes the parts where `save_to` says."""
    return run_training(config).callback_metrics


def run_training(config: DictConfig) -> Any:
    """Trains, and returns the Trainer."""
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.utilities.exceptions import SIGTERMException

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
    _require_optimizer(config)
    if config.save_to is not None and config.save_dtype not in _SAVE_DTYPES:
        raise ConfigurationError(
            f"save_dtype={config.save_dtype!r} is no type that weights are saved in; choose "
            f"{', '.join(_SAVE_DTYPES[:-1])} or {_SAVE_DTYPES[-1]}"
        )
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
    if hasattr(data, "read_files") and own_rank() == 0:  # looks at what is listed
        with named({"folder": "data.folder"}):
            data.read_files()
    module = module_of(config)
    _require_sizes(module, data, config)
    with raised_by_all():  # what cannot be written is refused now
        _speed_up(config, module)
        if config.save_lora is not None:
            module.lora_weights(config.save_lora_names)
        if config.save_to is not None and hasattr(module, "refuse_folder"):
            module.refuse_folder(config.save_to)
        if hasattr(module, "optimization"):
            with named({"groups": "model.optimization.groups"}):
                module.optimization.parameter_groups(module)
    path = config.ckpt_path
    if path == "last" and not isinstance(trainer.strategy, DiffPipeStrategy):
        path = chosen(trainer, path, fits=True)  # which ours does by itself
    try:
        _fit(config, trainer, module, data, path)
    except SIGTERMException as stopped:  # Lightning leaves the exit code at 0
        raise SystemExit(128 + signal.SIGTERM) from stopped
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

    module = module_class.from_checkpoint(checkpoint)
    if config.save_to is not None:
        module.save_pretrained(config.save_to, dtype=getattr(torch, config.save_dtype))
        print(f"wrote {config.save_to}")
    if config.save_lora is not None:
        module.save_lora(config.save_lora, config.save_lora_names)
        print(f"wrote the adapters to {config.save_lora}")


@verb("measure some steps of a training next to their plan: diffpipe bench experiment=glyphs")
def bench(config: DictConfig) -> Any:
    """Trains as `train` would, but saves and logs nothing, and prints measured numbers next to planned ones."""
    from lightning_diffpipe.callbacks import PipelineMonitor
    from lightning_diffpipe.viewing.measured import number_table

    given = {override.partition("=")[0] for override in HydraConfig.get().overrides.task}
    OmegaConf.set_struct(config, False)
    if "trainer.max_steps" not in given:
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
    (found,) = (each for each in trainer.callbacks if isinstance(each, PipelineMonitor))
    if trainer.is_global_zero:
        print(number_table(found.numbers))
        if Path(monitor["folder"]).exists():  # of a pipeline
            print(f"\n{monitor['folder']} has the plan, its timeline and a trace")
    return found.numbers
