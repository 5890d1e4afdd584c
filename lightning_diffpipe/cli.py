"""`diffpipe`: every verb of this package on the command line, configured with Hydra.

A verb is a function of one composed config, `conf/<verb>.yaml`, found as a package from any directory.
Hydra reads the arguments behind the verb; the verb itself is hidden from Hydra while it parses, and
put back before the function runs, because Lightning starts further processes with `sys.argv`.

This is the only file that imports Hydra. The library sees plain values.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_diffpipe.errors import ConfigurationError, DiffPipeError

_CONF = "pkg://lightning_diffpipe.conf"
# Settings that may be given by position: `diffpipe show plan.json`.
_POSITIONS = {"show": ("plan",), "diff": ("before", "after")}
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


def _be_quiet() -> None:
    """Silences what every run would print and no user can act on."""
    import warnings

    import diffusers
    import transformers

    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
    warnings.filterwarnings("ignore", message=".*module.s. in eval mode at the start of training")


def _show_log() -> None:
    """Lets the first process say what this package logs, such as the plan."""
    logger = logging.getLogger("lightning_diffpipe")
    logger.setLevel(logging.INFO if os.environ.get("LOCAL_RANK", "0") == "0" else logging.WARNING)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.propagate = False


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
    _be_quiet()
    _show_log()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    L.seed_everything(config.seed, workers=True, verbose=False)


def _nodes(config: DictConfig) -> Iterator[DictConfig]:
    """Yields the `_target_` nodes of a dictionary group, such as `callbacks`."""
    for node in config.values():
        if node is not None and "_target_" in node:
            yield node


def _build_trainer(config: DictConfig, *further: Any) -> Any:
    """Builds the Trainer with the callbacks and loggers of their groups, and further callbacks."""
    callbacks = list(further) + [
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
    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@verb("train a module: diffpipe train experiment=glyphs strategy.num_stages=2")
def train(config: DictConfig) -> Any:
    """Trains `model` on `data` with `trainer`, and writes the parts where `save_to` says."""
    if config.save_to is not None and "final_checkpoint" not in config.callbacks:
        raise ConfigurationError(
            "save_to is written from the final checkpoint; take callbacks=training or "
            "callbacks=default, which write one"
        )
    _prepare(config)
    module = hydra.utils.instantiate(config.model)
    data = hydra.utils.instantiate(config.data)
    trainer = _build_trainer(config)
    for logger in trainer.loggers:
        logger.log_hyperparams(_plain(config))
    trainer.fit(module, datamodule=data, ckpt_path=config.ckpt_path)
    if config.save_to is not None and trainer.is_global_zero:
        _export(config, type(module))
    return trainer.callback_metrics


def _export(config: DictConfig, module_class: type) -> None:
    """Writes the trained parts as a diffusers folder, from the final checkpoint.

    The checkpoint is whole under every strategy, and has the averaged weights.
    """
    import torch

    module = module_class.from_checkpoint(config.callbacks.final_checkpoint.path)
    module.save_pretrained(config.save_to, dtype=getattr(torch, config.save_dtype))
    print(f"wrote {config.save_to}")


@verb("draw prompts with a trained model: diffpipe sample 'prompts=[\"digit four, serif\"]'")
def sample(config: DictConfig) -> Any:
    """Draws `prompts` with the model at `path`, in one process, into `output_dir`."""
    _prepare(config)
    import torch

    from lightning_diffpipe.callbacks.samples import picture_grid
    from lightning_diffpipe.modules import LatentDiffusion

    is_checkpoint = str(config.path).endswith(".ckpt")
    load = LatentDiffusion.from_checkpoint if is_checkpoint else LatentDiffusion.from_pretrained
    model = load(config.path).to(config.device).eval()
    images = model.sample(
        list(config.prompts),
        num_inference_steps=config.num_inference_steps,
        guidance_scale=config.guidance_scale,
        generator=torch.Generator().manual_seed(config.seed),
    )
    folder = Path(config.output_dir)
    for number, (prompt, image) in enumerate(zip(config.prompts, images, strict=True)):
        picture_grid(image[None], columns=1).save(folder / f"{number:03d}.png")
        print(f"{folder / f'{number:03d}.png'}  {prompt}")
    picture_grid(images, columns=min(8, len(images))).save(folder / "grid.png")
    print(f"{folder / 'grid.png'}  all of them")
    return images


@verb("train the built-in model as a pipeline for a few minutes, and show what it draws")
def demo(config: DictConfig) -> Any:
    """Trains on two processes, and tells what happens."""
    _prepare(config)
    from lightning_diffpipe.demo import DemoStory

    module = hydra.utils.instantiate(config.model)
    data = hydra.utils.instantiate(config.data)
    story = DemoStory(
        config.output_dir, config.prompts, config.num_inference_steps, config.guidance_scale
    )
    trainer = _build_trainer(config, story)
    if trainer.is_global_zero:
        story.begin(module)
    trainer.fit(module, datamodule=data)
    if trainer.is_global_zero:
        story.end(Path(config.callbacks.final_checkpoint.path))
    return trainer.callback_metrics


@verb("time every layer of a model: diffpipe profile model=glyph_unet output=profile.json")
def profile(config: DictConfig) -> Any:
    """Times the layers of `model` on batches of `data`, and writes a profile to `output`."""
    _prepare(config)
    from lightning_diffpipe.profiling import profile as measure
    from lightning_diffpipe.profiling.cache import write_atomically
    from lightning_diffpipe.profiling.profiler import default_step, in_precision

    module = hydra.utils.instantiate(config.model)
    data = hydra.utils.instantiate(config.data)
    data.prepare_data()
    data.setup("fit")
    result = measure(
        module,
        next(iter(data.train_dataloader())),
        step=in_precision(default_step(module), config.precision, config.device),
        device=config.device,
        sample_counts=config.sample_counts,
        repeats=config.repeats,
        budget_s=config.budget_s,
        name=config.name,
        max_share=config.max_share,
        cache=config.cache,
        progress=config.progress,
    )
    write_atomically(Path(config.output), result.to_json())
    layers, encoders = result.backbones[0].layers, result.encoders
    frozen = sum(len(encoder.layers) for encoder in encoders)
    for samples, _ in layers[0].forward_s.points:
        path_s = sum(x.forward_s.at(samples) + x.backward_s.at(samples) for x in layers)
        frozen_s = sum(x.forward_s.at(samples) for encoder in encoders for x in encoder.layers)
        print(f"{samples:5d} samples: path {1e3 * path_s:.1f} ms, frozen {1e3 * frozen_s:.1f} ms")
    print(f"{config.output}  {len(layers)} layers of the path, {frozen} frozen layers")
    return result


@verb("find the fastest pipeline: diffpipe plan profile=profile.json global_batch_size=64")
def plan(config: DictConfig) -> Any:
    """Plans for a profile on a cluster, prints the plan, and writes it to `output`."""
    from lightning_diffpipe.planning.cluster import Cluster
    from lightning_diffpipe.planning.options import PlanOptions
    from lightning_diffpipe.planning.search import find_plan
    from lightning_diffpipe.viewing.report import report

    values = _plain(config)
    profile = _profile_to_plan(config)
    wishes = {key: values[key] for key in ("global_batch_size", "filling")} | values["strategy"]
    found = find_plan(
        profile, Cluster.from_dict(_without_none(values["cluster"])), PlanOptions.from_dict(wishes)
    )
    print(report(found))
    if values["output"] is not None:
        Path(values["output"]).write_text(found.to_json())
        print(f"wrote {values['output']}")
    return found


def _profile_to_plan(config: DictConfig) -> Any:
    """Reads the profile at `profile`, or models that of a well-known `model`."""
    model = config.get("model")  # absent where the group was not chosen
    if (config.profile is None) == (model is None):
        raise ConfigurationError(
            "give profile=FILE, written by diffpipe profile, or model=NAME for one that is not at hand, "
            f"such as model=flux; {'neither' if config.profile is None else 'both'} was given"
        )
    if config.profile is not None:
        from lightning_diffpipe.planning.profile import ModelProfile

        return ModelProfile.from_json(_read(config.profile), config.profile)
    if not model._target_.endswith("ModelOnPaper"):
        raise ConfigurationError(
            "this model can be measured: write a profile with diffpipe profile model=..., "
            "then plan with profile=FILE"
        )
    profile = hydra.utils.instantiate(model).profile()
    print(f"{profile.name}; sizes are exact, times are not measured\n")
    return profile


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    nested = {k: _without_none(v) if isinstance(v, dict) else v for k, v in values.items()}
    return {key: value for key, value in nested.items() if value is not None}


def _read_plan(path: str) -> Any:
    from lightning_diffpipe.planning.plan import PipelinePlan

    return PipelinePlan.from_json(_read(path), path)


@verb("print a plan, or draw it: diffpipe show plan.json as=picture output=plan.svg")
def show(config: DictConfig) -> None:
    """Shows `plan` as a report, a timeline, a trace or a picture."""
    from lightning_diffpipe.viewing.ascii import render
    from lightning_diffpipe.viewing.chrome_trace import chrome_trace
    from lightning_diffpipe.viewing.plot import plot
    from lightning_diffpipe.viewing.report import report

    values = _plain(config)
    form, output = values["as"], values["output"]
    if form not in ("report", "timeline", "trace", "picture"):
        raise ConfigurationError(f"as={form!r}; choose report, timeline, trace or picture")
    if (output is None) == (form in ("trace", "picture")):
        hint = "is a file: add output=FILE" if output is None else "is printed: leave out output"
        raise ConfigurationError(f"as={form} {hint}")
    found = _read_plan(values["plan"])
    match form:
        case "report":
            print(report(found, values["max_columns"]))
        case "timeline":
            print(render(found.timeline, max_columns=values["max_columns"]))
        case "trace":
            Path(output).write_text(chrome_trace({"planned": found.timeline}))
        case "picture":
            plot({"planned": found.timeline}, output, f"plan {found.digest}")


@verb("say how two plans differ: diffpipe diff before.json after.json")
def diff(config: DictConfig) -> None:
    """Compares `before` with `after`."""
    from lightning_diffpipe.viewing.plan_diff import diff as difference

    values = _plain(config)
    print(difference(_read_plan(values["before"]), _read_plan(values["after"])))


# ---------------------------------------------------------------------- dispatch and messages


def _named(name: str, arguments: Sequence[str]) -> list[str]:
    """Gives arguments by position their names: `plan.json` becomes `plan=plan.json`."""
    names = list(_POSITIONS.get(name, ()))
    named = []
    for argument in arguments:
        by_position = names and "=" not in argument and not argument.startswith("-")
        named.append(f"{names.pop(0)}={argument}" if by_position else argument)
    return named


def _run(name: str, arguments: Sequence[str]) -> None:
    """Lets Hydra compose the config of one verb from its arguments, and runs the verb."""
    _, function = _VERBS[name]
    whole = list(sys.argv)

    @functools.wraps(function)
    def task(config: DictConfig) -> Any:
        sys.argv = whole
        return function(config)

    sys.argv = [whole[0], *_named(name, arguments)]
    try:
        hydra.main(version_base="1.3", config_path=_CONF, config_name=name)(task)()
    finally:
        sys.argv = whole


def _flatten(config: Any, prefix: str = "") -> Iterator[str]:
    if not OmegaConf.is_dict(config):
        return
    for key in config:
        yield f"{prefix}{key}"
        if not OmegaConf.is_missing(config, key) and not OmegaConf.is_interpolation(config, key):
            yield from _flatten(config[key], f"{prefix}{key}.")


def _suggestion(name: str, wrong: str, arguments: Sequence[str]) -> str:
    """Looks for a setting that is spelled like a wrong one."""
    choices = [a for a in arguments if a.partition("=")[0] in ("experiment", "model", "data")]
    with hydra.initialize_config_module("lightning_diffpipe.conf", version_base="1.3"):
        known = list(_flatten(hydra.compose(name, overrides=choices)))
    known += [
        folder.name for folder in files("lightning_diffpipe.conf").iterdir() if folder.is_dir()
    ]
    near = difflib.get_close_matches(wrong, known, n=1)
    near = near or [key for key in known if key.rpartition(".")[2] == wrong.rpartition(".")[2]][:1]
    return f"; did you mean {near[0]!r}?" if near else ""


def _explain(error: Exception, name: str, arguments: Sequence[str]) -> str:
    """Says in one or a few lines what is wrong and what to do."""
    if isinstance(error, InstantiationException):
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if isinstance(error, DiffPipeError):
        return str(error)
    unknown = re.match(r"Could not override '(.*?)'", str(error))
    if unknown is None:
        # What follows is about Hydra's inside.
        return re.split(r"\n(?=Config search path|    full_key)", str(error).strip())[0]
    suggestion = ""
    with contextlib.suppress(HydraException, OmegaConfBaseException):
        suggestion = _suggestion(name, unknown[1], arguments)
    return f"there is no setting or group {unknown[1]!r}{suggestion}"


def _usage() -> str:
    width = max(map(len, _VERBS))
    lines = [f"  {name:{width}}  {summary}" for name, (summary, _) in _VERBS.items()]
    return "\n".join(
        [
            "diffpipe VERB [group=option] [key=value] ...",
            "",
            *lines,
            "",
            "diffpipe VERB --help lists the groups and settings of a verb;",
            "diffpipe VERB --cfg job prints the composed config without running it.",
        ]
    )


def main() -> None:
    """Entry point of the `diffpipe` command; exits with 2 if it was called wrongly."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_usage())
        return
    if name not in _VERBS:
        near = difflib.get_close_matches(name, _VERBS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"verbs: {', '.join(_VERBS)}"
        sys.exit(f"diffpipe: there is no verb {name!r}; {hint}")
    # Exceptions come to us whole, so that expected ones can be told in a line.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        _run(name, arguments)
    except (DiffPipeError, HydraException, OmegaConfBaseException) as error:
        print(f"diffpipe {name}: {_explain(error, name, arguments)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
