"""Every file of `conf/` composes, and every part of it can be built."""

import inspect
import logging
import os
import re
import shlex
from dataclasses import fields
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import hydra
import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from lightning.pytorch.callbacks import LearningRateMonitor
from omegaconf import OmegaConf

from lightning_diffpipe import cli  # noqa: F401  registers the resolvers conf/ uses
from lightning_diffpipe.cli import launch
from lightning_diffpipe.cli.training import _build_trainer, _speed_up
from lightning_diffpipe.modules.on_paper import ModelOnPaper
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.methods import MethodOptions
from lightning_diffpipe.sampling.pipefusion import PipeFusion, SequenceParallel
from tests.zoo.pipelines import build

CONF = Path(__file__).parent.parent / "conf"
VERBS = sorted(path.stem for path in CONF.glob("*.yaml"))
WRITES = ("bench", "train", "sample", "profile")  # into a folder of their own
OPTIONS = sorted(
    (path.parent.name, path.stem)
    for path in CONF.glob("*/*.yaml")
    if path.parent.name not in ("adapter", "experiment", "cluster", "optimizer", "sampler")
)
SAMPLERS = sorted(path.stem for path in CONF.glob("sampler/*.yaml"))
EXPERIMENTS = sorted(path.stem for path in CONF.glob("experiment/*.yaml"))
# What a user has to say, or hardware that not every machine has.
NEEDED = {
    ("data", "image_folder"): ["data.folder=images"],
    ("data", "webdataset"): ["data.train_shards=x.tar", "data.samples_per_epoch=8"],
    ("callbacks", "fid"): [
        "callbacks.fid.feature={_target_: tests.callbacks.test_sample_metrics.Features}"
    ],
    ("callbacks", "clip_score"): [
        "callbacks.clip_score.model={_target_: tests.callbacks.test_sample_metrics.any_clip, _partial_: true}"
    ],
    ("trainer", "gpu"): ["trainer.accelerator=cpu", "trainer.devices=1"],
}


def first_of_each_group_fast():
    """The others are left to the whole suite."""
    first = dict(reversed(OPTIONS))
    return [
        pytest.param(group, option, marks=() if first[group] == option else pytest.mark.slow)
        for group, option in OPTIONS
    ]


def composed(verb="train", *overrides):
    with initialize_config_module("lightning_diffpipe.conf", version_base="1.3"):
        config = compose(verb, overrides=list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(config)
    return config


@pytest.fixture
def output_dir(tmp_path):
    return f"output_dir={tmp_path}"


def test_runs_and_ranks_share_a_folder_of_encodings():
    """History: each run had a folder of its own, and so had ranks of torchrun that started a second apart."""
    configs = [composed("train", "callbacks=cached", f"output_dir={name}") for name in "ab"]
    assert len({config.callbacks.encoding_cache.folder for config in configs}) == 1


@pytest.mark.parametrize(("trainer", "device"), [("gpu", "cuda"), ("cpu", "cpu")])
def test_one_device_is_of_the_kind_that_was_asked_for(trainer, device, output_dir):
    """History: it was the CPU always, which Lightning refuses beside accelerator=gpu."""
    config = composed("train", "strategy=single_device", f"trainer={trainer}", output_dir)
    assert hydra.utils.instantiate(config.strategy).root_device.type == device


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_composes_and_explains_itself(verb):
    config = composed(verb)
    assert config.hydra.help.template.startswith(f"diffpipe {verb}: ")
    assert config.hydra.run.dir.startswith(f"outputs/{verb}" if verb in WRITES else ".")


@pytest.mark.slow
@pytest.mark.parametrize(("group", "option"), first_of_each_group_fast())
def test_every_option_can_be_built(group, option, output_dir):
    one_process = ["strategy=single_device", "trainer.devices=1"]
    overrides = one_process * (group not in ("strategy",)) + NEEDED.get((group, option), [])
    config = composed("train", f"{group}={option}", *overrides, output_dir)
    node = config[group]
    if group == "model" and "_target_" not in node:  # only to plan with
        ModelOnPaper(**OmegaConf.to_container(node, resolve=True) | {"path": "flux"})
        return
    no_logger = {"logger": False} if group == "trainer" else {}
    for each in [node] if "_target_" in node else node.values():
        hydra.utils.instantiate(each, **no_logger)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_opens_with_its_command_and_result(name, output_dir):
    config = composed("train", f"experiment={name}", output_dir)
    OmegaConf.to_container(config.trainer, resolve=True)
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    header = text.split("defaults:")[0]
    measured = ("duration:", "result:") if name.startswith("glyphs") else ("step:", "predicted")
    for word in ("command:", f"experiment={name}", "hardware:", *measured):
        assert word in header, f"{name}.yaml does not say its {word}"


STRATEGIES = sorted(path.stem for path in CONF.glob("strategy/*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_strategy_trains_what_has_two_stages_otherwise(strategy, output_dir):
    """History: experiments set `num_stages`, which `strategy=ddp`, there for comparison, was then called with."""
    verb = ("train", "experiment=glyphs")
    built = hydra.utils.instantiate(composed(*verb, f"strategy={strategy}", output_dir).strategy)
    assert getattr(built, "_ddp_kwargs", {}) == {}
    assert composed(*verb, output_dir).strategy.num_stages == 2


@pytest.mark.slow
def test_large_models_are_tuned_gently_and_shown_with_their_own_captions(output_dir):
    """History: `model=pretrained` trained Stable Diffusion at 5e-4, and drew glyphs with it."""
    config = composed("train", "model=pretrained", "model.path=mine", output_dir)
    assert config.model.optimization.lr == 1e-5
    assert config.callbacks.samples.prompts is None
    glyphs = composed("train", "experiment=glyphs", output_dir)
    assert (glyphs.model.optimization.lr, glyphs.model.optimization.warmup_steps) == (5e-4, 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(path.stem for path in CONF.glob("optimizer/*.yaml") if path.stem != "custom")
)
def test_an_optimizer_is_built_or_its_package_is_named(name, output_dir):
    config = composed(
        "train", "experiment=flux_lora", f"optimizer={name}", "data.folder=x", output_dir
    )
    node = config.model.optimization.get("optimizer")
    if node is not None and find_spec(node._target_.partition(".")[0]) is None:
        with pytest.raises(
            InstantiationException, match=f"Error locating target '{node._target_}'"
        ):
            hydra.utils.instantiate(config.model.optimization, _convert_="all")
        return
    optimization = hydra.utils.instantiate(config.model.optimization, _convert_="all")
    assert optimization.lr == (1 if name in ("prodigy", "dadapt_adam") else 1e-4)


@pytest.mark.parametrize("name", ["FluxPipeline", "StableDiffusion3Pipeline"])
def test_blocks_are_compiled_and_kernels_of_attention_chosen(name, output_dir, tmp_path):
    """Of SD3 diffusers does not say which blocks repeat."""
    build(name, tmp_path / "parts").save_pretrained(tmp_path / "model")
    kernels = ["attention=_native_math"] * (name == "FluxPipeline")
    chosen = ("model=pretrained", f"model.path={tmp_path / 'model'}", *kernels)
    config = composed("train", *chosen, "compile=blocks", output_dir)
    module = launch.module_of(config)
    _speed_up(config, module)
    compiled = [name for name, part in module.named_modules() if part._compiled_call_impl]
    assert compiled
    assert all(re.fullmatch(r"transformer\.(single_)?transformer_blocks\.\d+", n) for n in compiled)
    if kernels:
        processors = module.transformer.attn_processors.values()
        assert {x._attention_backend.value for x in processors} == {"_native_math"}


def test_several_machines_reach_the_trainer_and_its_strategy(output_dir):
    """History: `trainer.num_nodes=2` was answered with "there is no setting"."""
    config = composed("train", "trainer.num_nodes=2", output_dir)
    trainer = hydra.utils.instantiate(config.trainer, logger=False)
    assert trainer.num_nodes == trainer.strategy.num_nodes == 2


@pytest.mark.parametrize("setting", ["logger=none", "logger.wandb=null"])
def test_without_a_logger_no_learning_rate_is_monitored(output_dir, setting):
    """History: `logger.wandb=null` left the monitor, which Lightning refuses after everything is planned."""
    one_process = ("strategy=single_device", "trainer.devices=1")
    config = composed("train", setting, *one_process, "callbacks.samples=null", output_dir)
    trainer = _build_trainer(config)
    assert not trainer.loggers
    assert not [c for c in trainer.callbacks if isinstance(c, LearningRateMonitor)]


@pytest.mark.slow
@pytest.mark.parametrize("hubs", [[], ["offline=false"], ["experiment=sdxl_lora"]])
def test_downloads_and_uploads_have_a_switch_each(hubs, output_dir, monkeypatch):
    """History: recipes, which let hubs download, also uploaded what they log to W&B."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(launch, "_be_quiet", lambda: None)
    log = logging.getLogger("lightning_diffpipe")
    monkeypatch.setattr(log, "handlers", [logging.NullHandler()])  # else it takes one, for good
    for uploads in ([], ["logger.wandb.offline=false"]):
        config = composed("train", "logger=wandb", *hubs, *uploads, output_dir)
        assert config.offline == (not hubs)
        launch.prepare(config)
        assert "WANDB_MODE" not in os.environ
        logger = hydra.utils.instantiate(config.logger.wandb)
        assert logger._offline == (not uploads)


def documented_commands():
    """Verb and overrides of every command that README, docs and configs show."""
    root = CONF.parent
    commands = set()
    for path in (root / "README.md", *root.glob("docs/*.md"), *CONF.rglob("*.yaml")):
        text = re.sub(r"\\\n\s*", "", path.read_text())
        for verb, rest in re.findall(rf"diffpipe ({'|'.join(VERBS)}) ([^`\n]*)", text):
            words = re.findall(r"(?:[^\s']|'[^']*')+", rest)
            given = takewhile(lambda word: "=" in word or word == "...", words)
            settings = shlex.split(" ".join(word.rstrip("),.;:") for word in given))
            commands.add((verb, *(setting for setting in settings if "=" in setting)))
    return sorted(commands)


@pytest.mark.slow
def test_every_command_of_the_docs_composes():
    """History: a recipe told to run `diffpipe profile experiment=...`, which has no experiments."""
    commands = documented_commands()
    assert len(commands) > 60
    for verb, *settings in commands:
        composed(verb, *settings)


@pytest.mark.slow
def test_adapters_are_an_option_of_models_that_are_trained_further(output_dir):
    config = composed("train", "model=pretrained", "adapter=lora", "model.lora.rank=3", output_dir)
    module = hydra.utils.instantiate(config.model)
    assert {p.shape[0] for n, p in module.named_parameters() if ".lora_A" in n} == {3}
    assert config.model.optimization.lr == 1e-4


def test_every_option_says_what_it_is_in_a_package():
    for path in CONF.rglob("*.yaml"):
        assert (path.parent / "__init__.py").exists(), path.parent
        assert path.read_text().startswith("#"), f"{path.relative_to(CONF)} has no first comment"


WITH_OPTIONS = {"pipefusion": PipeFusion, "sequence": SequenceParallel}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_has_only_options_the_predictor_takes(sampler):
    known = set(inspect.signature(Predictor.from_pretrained).parameters)
    known |= {field.name for field in fields(MethodOptions)}
    if sampler in WITH_OPTIONS:
        known |= set(inspect.signature(WITH_OPTIONS[sampler]).parameters)
    config = composed("sample", f"sampler={sampler}").sampler
    assert config.method == sampler
    assert set(config) <= known
