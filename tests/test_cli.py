import functools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import hydra
import pytest
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from hydra.types import RunMode
from omegaconf import OmegaConf
from PIL import Image

from lightning_diffpipe import ModelProfile, PipelinePlan, cli
from lightning_diffpipe.callbacks import FinalCheckpoint
from lightning_diffpipe.cli import launch, training
from lightning_diffpipe.cli.launch import quoted
from lightning_diffpipe.cli.main import _named
from lightning_diffpipe.cli.training import _run_to_go_on_with
from lightning_diffpipe.errors import CheckpointError, ConfigurationError, PlanError
from lightning_diffpipe.modules.parts import BUILT_IN
from lightning_diffpipe.planning.cluster import Cluster, Link
from tests.command import ROOT, call, run, run_on_forks
from tests.rows import row

# A whole training in seconds; the U-Net is shrunk, the rest is the built-in.
TINY = [
    "data.batch_size=4", "data.alphabets=[digits]", "data.faces=[sans]", "callbacks.samples.every_n_steps=2",
    "callbacks.samples.num_inference_steps=2", "callbacks.samples.prompts=[a]", "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false",
]  # fmt: skip


def test_without_a_verb_all_verbs_are_listed(capsys, monkeypatch):
    code, out, _ = call(capsys, monkeypatch)
    assert code == 0
    assert out.startswith("diffpipe VERB [group=option] [key=value] ...")
    for verb in cli.VERBS:
        assert f"\n  {verb}" in out


@pytest.mark.parametrize("arguments", [("plan", "--help"), ("train", "--help"), ("show", "none")])
def test_what_only_prints_composes_its_config_without_hydra_main(arguments, capsys, monkeypatch):
    """History: `hydra.main` does so twice, and for `--help` a hundred times, three times as long as its import."""
    composed, begin = [], ConfigLoaderImpl._parse_overrides_and_create_caching_repo

    def begun(*given):
        composed.append(given)
        return begin(*given)

    monkeypatch.setattr(ConfigLoaderImpl, "_parse_overrides_and_create_caching_repo", begun)
    monkeypatch.setattr(hydra, "main", lambda **_: pytest.fail("the config is composed twice"))
    call(capsys, monkeypatch, *arguments)
    # A verb that runs looks at its own config, too, for settings that it does not have.
    assert len(composed) == (1 if "--help" in arguments else 2)


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["train", "--cfg", "job"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_is_no_error(arguments, unbuffered):
    """History: `diffpipe plan --help | head` ended with a traceback."""
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-m", "lightning_diffpipe.cli", *arguments],
        stdout=write,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize(("rank", "folders"), [(0, 1), (1, 0)])
def test_ranks_but_the_first_leave_no_folder(rank, folders, tmp_path, capsys, monkeypatch):
    """History: one that composed its config a second later than rank 0 left a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", str(rank))
    code, _, _ = call(capsys, monkeypatch, "train", "seed=-1")
    assert code == 2
    assert len(list(tmp_path.glob("outputs/train/*"))) == folders


@pytest.mark.slow
@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_help_says_what_a_verb_does(verb, capsys, monkeypatch):
    _, out, _ = call(capsys, monkeypatch, verb, "--help")
    assert f"diffpipe {verb}: " in out
    assert "Settings (override with key=value" in out
    # History: `diffpipe show` has clusters, but did not say so; then every verb listed the groups of all.
    assert ("cluster: 2x8_a100" in out) == (verb in ("plan", "show"))
    assert ("experiment: " in out) == (verb in ("train", "bench"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "diffpipe: there is no verb 'trian'; verbs: train, bench, export, "),
        (["train", "trainer.max_stepz=3"],
         "diffpipe train: Could not override 'trainer.max_stepz'. To append to your config use +tr"),
        (["train", "model=flux", "trainer.devices=1"],
         "diffpipe train: model=flux is known on paper only, without weights: plan with it"),
        # History: Hydra showed tracebacks.
        (["train", "--resolve"], "train: The --resolve flag can only be used in conjunction with --cfg or --help"),
        (["train", "experiment=broken", "trainer.devices=1", "-cd", "conf"],
         "diffpipe train: cannot read a config: while parsing a flow sequence in "),
        # History: OmegaConf's further lines came along.
        (["plan", "global_batch_size=8", "hydra.run.dir=${nope}"],
         "diffpipe plan: Interpolation key 'nope' not found"),
        # History: Hydra's lexer said that it had found no viable alternative.
        (["train", "a=["], "diffpipe train: cannot read a=[: put texts in quotes, and all in those of"),
        (["sample", "prompts=[it's a cat]"], """of the shell: 'prompts=["...", "..."]'"""),
        (["train", "ckpt_path=runs/epoch=0-step=10.ckpt"],
         """of the shell: 'ckpt_path="runs/epoch=0-step=10.ckpt"'"""),
        (["show", "plan (1).json"], "diffpipe show: cannot read plan (1).json: No such file or directory"),
        (["export", ".", "whole.ckpt"], "diffpipe export: checkpoint=. is no folder of a checkpoint in shards"),
        (["export", "none", "whole.ckpt"], "=none is not there, but must be the folder of a checkpoint in"),
        (["show", "x", "as=trace"], "diffpipe show: as=trace is a file: add output=FILE"),
        # History: argparse printed its usage.
        (["train", "--trainer.max_steps=3"],
         "train: unrecognized arguments: --trainer.max_steps=3; settings have no dashes: trainer.max_steps=9\n"),
        # History: Hydra advised a + before it, with which it was refused as well.
        (["bench", "data.folder=x"],
         "bench: Could not override 'data.folder': it is a setting of data=image_folder, which is not chosen\n"),
        (["train", "--config-name", "mine"], "config search path. --config-dir . searches this folder, too\n"),
        (["plan"], "diffpipe plan: Missing mandatory value: global_batch_size\n"),
        (["train", "+trainer.fast_dev_run=true", "save_to=x"],
         "from the final checkpoint, and trainer.fast_dev_run=True writes none; leave fast_dev_run out"),
        (["train", "save_dtype=fp16", "save_to=x"],
         "save_dtype='fp16'; choose float16, bfloat16 or float32"),
        (["train", "strategy.num_microbatches=0", "trainer.devices=1"],
         "diffpipe train: strategy.num_microbatches must be a whole number >= 1 or 'auto'; got 0"),
        (["train", "cluster=x"], "Could not override 'cluster'. No match in the defaults list."),
        (["train", "optimizer=custom", "model.optimization.optimizer._target_=not_there.Lion"],
         "model.optimization.optimizer: ImportError: Error loading 'not_there.Lion'"),
        (["train", "optimizer=sgd", "+model.optimization.optimizer.nesterov=1",
          "model.optimization.optimizer.momentum=0"],
         "model.optimization.optimizer: Nesterov momentum requires a momentum and zero dampening"),
        (["train", "optimizer=prodigy", "model.optimization.lr=1e-4"],
         "Prodigy finds one learning rate for all parameters, of which lr is a factor; got lr=0.0001: take lr=1"),
        (["train", "+model.optimization.groups={encoder: {lr: 1e-6}}"],
         "model.optimization.groups: 'encoder' is in the name of no parameter that is trained"),
        (["train", "compile=all"], "compile='all'; choose None or blocks"),
        (["train", "attention=fast"],
         "attention=fast: UNet2DConditionModel cannot: `backend='fast'` must be one of the following:"),
        (["train", "attention=_native_math"],
         "attention=_native_math: UNet2DConditionModel cannot: its attention has one kind of kernel"),
        # History: both were said not to be there.
        (["train", "save_lora_names={to_q: to}", "save_lora=x"],
         "save_lora writes adapters, and none are trained: add adapter=lora"),
        # History: these ended in a TypeError, and in "Key 'logger' is not in struct".
        (["train", "callbacks.samples=false", "trainer.devices=1"],
         "callbacks.samples=False is nothing to build; callbacks.samples=null leaves it out"),
        (["train", "logger=null"],
         "diffpipe train: Config group override must be a string or a list. Got NoneType (logger=null)"),
        (["train", "~logger", "trainer.devices=1"], "the setting logger has been deleted; leave ~ out"),
        (["train", "lora_from=x"], "lora_from goes on from adapters, and none are trained: add adapter=lora"),
        (["train", "model=pretrained_unet", "adapter=lora", "lora_from=not/there"],
         "diffpipe train: model.lora.lora_from=not/there: there is no such file or folder"),
        (["train", "model=pretrained_unet", "adapter=lora", "save_lora_every_n_steps=3"],
         "save_lora_every_n_steps=3 writes into save_lora; add save_lora=FOLDER"),
        (["train", "+experiment=glyphs"], "diffpipe train: Multiple values for experiment."),
        # History: a type of error stood before the reason.
        (["sample", "path=${built_in:nope}"], "diffpipe sample: no built-in weights 'nope'; there are: "),
        # History: these drew or trained to the end, and had nowhere to write.
        (["sample", "output=/dev/null"], "diffpipe sample: cannot write output=/dev/null: Not a directory"),
        (["train", "save_to=/dev/null/model"],
         "diffpipe train: cannot write save_to=/dev/null/model: Not a directory"),
        # History: Hydra showed a traceback.
        (["sample", "hydra.run.dir=/dev/null/run"],
         "diffpipe sample: cannot begin a run: Not a directory: /dev/null/run; its folder must be"),
        # History: every rank showed a traceback.
        (["train", "ckpt_path=none.ckpt"], "diffpipe train: there is no checkpoint none.ckpt"),
        # History: the checkpoint was said not to exist.
        (["train", "ckpt_path=https://a.b/c.ckpt"],
         "diffpipe train: https://a.b/c.ckpt is an address, and checkpoints are read from files"),
        (["sample", "path=https://a.b/c.ckpt"],
         "diffpipe sample: https://a.b/c.ckpt is an address, and checkpoints are read from files"),
        # History: no reason was given.
        (["train", "ckpt_path=empty.ckpt"], "cannot read the checkpoint empty.ckpt: it is no whole archive"),
        (["sample", "path=empty.ckpt"], "cannot read the checkpoint empty.ckpt: it is no whole archive"),
        # History: training began at step 0 beside the checkpoints of another run.
        (["train", "output_dir=earlier", "hydra.run.dir=earlier"],
         "checkpoints/000005.ckpt, of step 5, is there from an earlier run"),
        # History: StopIteration, from inside.
        (["profile", "data.batch_size=99999", "progress=false"], "training samples make no batch of 99999"),
        (["train", "strategy=single_device", "trainer.devices=1", "logger=csv", "data.batch_size=99999"],
         "training samples make no batch of 99999"),
        (["train", "ckpt_path=last"], "which is new in each run; name a folder for all runs: hydra.run.dir=FOLDER"),
        # History: RuntimeError, and AssertionError, from inside of torch.
        (["profile", "device=gpu"], "diffpipe profile: device='gpu' cannot be used here; take cpu, "),
        (["profile", "output=/dev/null/p.json"], "cannot write /dev/null/p.json: Not a directory"),
        (["train", "data=image_folder", "strategy=single_device", "model=glyph_unet"],
         "diffpipe train: Missing mandatory value: data.folder; it holds images"),
    ],
)  # fmt: skip
def test_wrong_calls_are_refused_in_a_line(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.ckpt").touch()
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "broken.yaml").write_text("trainer: [1")
    earlier = tmp_path / "earlier" / "checkpoints"
    earlier.mkdir(parents=True)
    states = {"optimizer_states": [], "lr_schedulers": [], "loops": {}}
    torch.save({"state_dict": {}, "global_step": 5, **states}, earlier / "000005.ckpt")
    code, _, err = call(capsys, monkeypatch, *arguments)
    assert code == 2
    assert message in err
    assert not re.search("Traceback|HYDRA_FULL_ERROR|full_key", err)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.max_steps=abc", "trainer: TypeError: '<' not supported between instances of 'str' and 'int'"),
        ("trainer.accelerator=tpuu", "trainer: ValueError: You selected an invalid accel"),
        ("trainer.limit_val_batches=all", "trainer: TypeError: "),
        ("strategy.timeout_s=forever", "strategy.timeout_s must be a number > 0 and <= 100000000; got 'forever'"),
        ("strategy.busy_timeout_s=0", "strategy.busy_timeout_s must be a number > 0 and <= 100000000; got 0"),
        ("strategy.num_microbatches=1e12", "num_microbatches must be a whole number >= 1 or 'auto'; got 10000"),
        ("strategy.num_replicas=[1,x]", "strategy.num_replicas must be a whole number >= 1; got 'x'"),
        ("strategy.schedule=1f1bb", "strategy.schedule='1f1bb'; choose auto, "),
        ("strategy.plan=nowhere.json", "cannot read strategy.plan=nowhere.json: No such file or directory"),
        # History: two processes started first, and probed the model.
        ("strategy.plan=no.json", "strategy.plan=no.json is not JSON: Expecting value at line 1"),
        ("strategy.profile=no.json", "strategy.profile=no.json is not JSON: Expecting value at line"),
        ("strategy.profile=fast", "cannot read strategy.profile=fast (choose measure, flops or a file): No such"),
        ("strategy.cluster=fast", "strategy.cluster must be 'measure', a Cluster or a mapping"),
        ("strategy.check_finite=maybe", "strategy.check_finite must be true or false; got 'maybe'"),
        ("+strategy.process_group_backend=mpi", "strategy.process_group_backend='mpi' is none that"),
        ("model.optimization.lr=fast", "model.optimization.lr must be a number >= 0; got 'fast'"),
        ("model.optimization.decay=off",
         "model.optimization.decay='off'; choose constant, linear, cosine, cosine_with_restarts or polynomial"),
        ("data.batch_size=-3", "data.batch_size must be a whole number >= 1; got -3"),
        ("data.alphabets=digits", "unknown alphabet 'd'; known: digits"),
        ("callbacks.ema.decay=2", "callbacks.ema.decay must be in [0, 1), but is 2"),
        ("callbacks.samples.every_n_steps=often", "every_n_steps must be a whole number >= 1; got 'often'"),
        ("trainer.accelerator=gpu", "trainer.accelerator=gpu: torch 2"),
        ("model.caption_dropout=lots", "model.caption_dropout must be a number >= 0 and <= 1; got 'lots'"),
        ("model.unet.block_out_channels=[47,96]", "model.unet: ValueError: num_channels (47) must be"),
        ("model.unet._target_=diffusers.UNet3000", "model.unet: ImportError: Error loading 'diffusers.UNet3000'"),
        ("data.shifts_per_axis=2", "data.shifts_per_axis must be odd, but is 2"),
        ("seed=-1", "seed must be a whole number >= 0 and <= 4294967295; got -1"),
        ("trainer=3", "Config group override must be a string or a list. Got int (logger=none trainer=3)"),
        ("trainer", "Error parsing override 'trainer' missing EQUAL"),
        ("trainer.max_steps=1,2", "Ambiguous value for argument 'trainer.max_steps=1,2' 1. To use"),
        ("output_dir=/dev/null/x", "cannot write output_dir=/dev/null/x: Not a directory"),
        ("callbacks.pipeline_monitor.folder=/dev/null/x", "cannot write callbacks.pipeline_monitor"),
        ("strategy.num_stages=3",
         "strategy.num_stages=3 is more than the 2 ranks; choose between 1 and 2, more ranks, or"),
        ("strategy.cluster={rank_speeds: [1, 1, 0.5]}",
         "strategy.cluster has 3 ranks (num_ranks, rank_memory_bytes or rank_speeds), but there are 2"),
        ("data.condition=edgez", "data.condition='edgez'; choose None or edges"),
        ("data.validation_share=1",
         "no glyph is left to train on with data.resolution=64, alphabets=['digits', 'latin', "),
        ("ckpt_path=best", "there is no checkpoint best"),
        # History: black images.
        ("callbacks.samples.guidance_scale=nan", "callbacks.samples.guidance_scale must be a number; got nan"),
        ("offline=maybe", "Error merging override offline=maybe: Value 'maybe' is not a valid"),
        ("model=glyph_unett",
         "Could not find 'model/glyph_unett' Available options in 'model': controlnet flux flux2 "),
    ],
)  # fmt: skip
def test_wrong_values_are_named_by_their_setting(setting, message, capsys, monkeypatch, tmp_path):
    """History: these ended in TypeErrors from inside of Lightning and torch, some after processes had started."""
    monkeypatch.chdir(tmp_path)
    Path("no.json").touch()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    code, _, err = call(capsys, monkeypatch, "train", "logger=none", setting)
    printed = [line for line in err.splitlines() if line.startswith("diffpipe train: ")]
    assert code == 2
    assert message in printed[0]
    assert printed == err.splitlines()[-1:], "one line, and nothing after it"


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_a_config_that_empties_a_group_is_refused(verb, tmp_path, capsys, monkeypatch):
    """History: `trainer: null`, `sampler: null`, `data: null` and others ended in tracebacks."""
    monkeypatch.chdir(tmp_path)
    with hydra.initialize_config_module("lightning_diffpipe.conf", version_base="1.3"):
        config = hydra.compose(verb)
        groups = [name for name in config if OmegaConf.is_dict(config._get_node(name))]
    Path("own.yaml").write_text("seed: 1\n")
    code, _, err = call(capsys, monkeypatch, verb, "-cd", ".", "-cn", "own")
    assert (code, f"defaults: [{verb}, _self_]" in err) == (2, True)
    for name in groups:
        Path("own.yaml").write_text(f"defaults: [{verb}, _self_]\n{name}: null\n")
        code, _, err = call(capsys, monkeypatch, verb, "-cd", ".", "-cn", "own")
        assert (code, f"{name}=None is no group of settings" in err) == (2, True), err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # History: these ended in tracebacks, in the first step of training or at once.
        (["train", "logger=none", "trainer.accumulate_grad_batches=0"],
         "trainer.accumulate_grad_batches must be a whole number >= 1; got 0"),
        (["train", "logger=none", "trainer.val_check_interval=0"],
         "trainer.val_check_interval must be above 0, or null; got 0"),
        # History: these were taken and read by nothing; the second one trained with another learning rate.
        (["train", "+foo=1"], "foo changes nothing, as no setting has this name or refers to it"),
        (["train", "+optimizer.lr=1", "+rate=1"], "optimizer changes nothing"),
        (["plan", "+foo.name=1"], "foo changes nothing"),
        # History: it stands in the names of others (trainer.accelerator), which was taken for being read.
        (["profile", "+accelerator=gpu"], "accelerator changes nothing"),
        (["train", "+rate=1", "model.optimization.lr=${rate}", "seed=-1"], "seed must be a whole number >= 0"),
        (["sample", "~prompts"], "the setting prompts has been deleted; leave ~ out"),
        (["sample", "images=a.png"], "images='a.png' is no mapping of arguments, such as {image: photo.png}"),
        (["sample", "options=[a]"], "options=['a'] is no mapping of arguments"),
        (["data", "data.folder=x", "data.mask=3"], "data.mask=3 must be one key, or a folder"),
        (["data", "data.folder=x", "data.references=[a,b]"], "data.references=['a', 'b'] must be one key, or"),
        (["data", "data.folder={repeats: 2}"], "data.folder=None does not exist; name one with images"),
        (["data", "data.folder=x", "data.background=3"], "data: ValueError: unknown color specifier: '3'"),
        # History: nothing was read, and nothing said.
        (["data", "data.folder=[]"], "data.folder=[] names no folder; name one with images"),
        # History: no cache was taken; two processes started first; as many as were asked for were started.
        (["sample", "cache={_target_: builtins.dict}"], "cache={'_target_': 'builtins.dict'}; choose first_block"),
        (["train", "logger=none", "data=webdataset", "data.train_shards=no.tar", "data.samples_per_epoch=8"],
         "the shard no.tar (no.tar) does not exist"),
        (["train", "logger=none", "data=webdataset", "data.train_shards=3", "data.samples_per_epoch=8"],
         "data.train_shards=3 and validation_shards=None must be brace patterns of tar files"),
        (["sample", "trainer.devices=10000"], "trainer.devices must be a whole number >= 1 and <= 1024; got 10000"),
        # History: images of 0 pixels were said to need a profile that is measured.
        (["plan", "model=flux", "global_batch_size=8", "model.resolution=0"],
         "model.resolution must be a whole number >= 1; got 0"),
        (["profile", "output=null"], "output=null names no file; leave it out for profile.json"),
        (["profile", "sample_counts=[]"], "such as [1,4,16]; got []"),
        (["plan", "cluster=measured", "model=flux", "global_batch_size=64"], "value: path (cluster.path)"),
        (["train", "logger=none", "data=image_folder", "data.folder=nowhere"],
         "data.folder=nowhere does not exist; name one with images"),
        (["sample", "sampler.num_patches=abc"], "sampler.num_patches must be a whole number >= 1; got"),
        (["sample", "sampler.warmup_steps=abc"], "sampler.warmup_steps='abc'; choose a number, 0"),
        (["sample", "sampler.method=nope"], "sampler.method='nope'; choose pipefusion, distrifus"),
        (["sample", "guidance_scale=nan"], "guidance_scale must be a number; got nan"),
        (["sample", "height=1000000"], "height must be a whole number >= 1 and <= 65535; got 1000000"),
        (["sample", "num_inference_steps=0"], "num_inference_steps must be a number > 0; got 0"),
        (["sample", "prompts=[]"], "prompts must be a list with at least one prompt; got []"),
        (["sample", "path=nowhere"], "'nowhere' is neither a folder with a model_index.json nor"),
        (["sample", "height=7"], "height=7 is no multiple of 8, by which the autoencoder shrinks images; take 8"),
        (["sample", "path=${built_in:glyphs_transformer}", "sampler.num_patches=99"],
         "sampler.num_patches=99 is more than the 8 rows of tokens of these images; choose between 1 and 8"),
        (["train", "data.resolution=63", "trainer.devices=2"],
         "data.resolution=63 is no multiple of 8, by which the autoencoder shrinks images; take 56 or 64"),
        (["train", "experiment=glyphs_cascade", "data.resolution=63"],
         "the upscaler samples 128 pixels, but images have 63; set data.resolution"),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_are_refused_before_processes_start(
    arguments, message, capsys, monkeypatch, tmp_path
):
    """History: two processes started first, or the demo ended with a traceback; `[]` timed the default counts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    verb, *settings = arguments
    if verb == "sample":
        settings = ["sampler=pipefusion", "trainer.devices=2", *settings]
    code, _, err = call(capsys, monkeypatch, verb, *settings)
    assert code == 2
    assert message in err.splitlines()[-1]
    assert err.count("diffpipe " + verb + ": ") == 1


class Own:
    """Somebody's own module, which cannot be made."""

    def __init__(self, wrong):
        if wrong == "assertion":
            raise AssertionError
        if wrong == "key":
            {}["foo"]
        if wrong == "library":
            json.loads("{")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "message", "code"),
    [
        ("assertion", "model: AssertionError (", "raise AssertionError"),
        ("key", "model: KeyError: 'foo' (", '{}["foo"]'),
        ("library", "model: JSONDecodeError: Expecting property name", 'json.loads("{")'),
    ],
)
def test_what_goes_wrong_in_a_constructor_is_printed_with_its_place(
    wrong, message, code, capsys, monkeypatch, tmp_path
):
    """History: `assert False` was printed as nothing at all, and a missing key as its name."""
    monkeypatch.chdir(tmp_path)
    own = ["~model", "+model._target_=tests.test_cli.Own", f"+model.wrong={wrong}"]
    _, _, err = call(capsys, monkeypatch, "train", *own, "trainer.devices=1")
    assert err.startswith(f"diffpipe train: {message}")
    line = int(re.search(r"test_cli\.py:(\d+)\)", err)[1])
    assert Path(__file__).read_text().splitlines()[line - 1].strip() == code


main_module = sys.modules[_named.__module__]


class Verb:
    """A verb that does nothing but fail, in each of some processes of a launcher."""

    def __init__(self, capsys, monkeypatch, error):
        def fail(config):
            raise error

        summary, _ = cli.VERBS["show"]
        monkeypatch.setitem(
            cli.VERBS, "show", (summary, functools.wraps(cli.VERBS["show"][1])(fail))
        )
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def printed(self, exit_code=2, **environment):
        with self.monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            code, _, err = call(self.capsys, self.monkeypatch, "show", "plan.json")
        assert code == exit_code
        return err


# What torchrun, srun and Lightning tell the processes that they start.
RANKS = [
    [{"RANK": str(rank), "LOCAL_RANK": str(rank % 2)} for rank in range(3)],
    [{"SLURM_NTASKS": "3", "SLURM_PROCID": str(r), "LOCAL_RANK": "0"} for r in range(3)],
    # in a batch job without srun
    [{}, {"LOCAL_RANK": "1"}, {"LOCAL_RANK": "2", "SLURM_PROCID": "0"}],
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_a_mistake_of_all_ranks_is_printed_once(ranks, capsys, monkeypatch):
    """History: under srun, and where Lightning starts the processes, each took itself for the first."""
    error = PlanError("cannot cut 2 layers into 3 stages")
    error.is_of_all_ranks = True
    verb = Verb(capsys, monkeypatch, error)
    printed = [verb.printed(**rank) for rank in ranks]
    assert printed == ["diffpipe show: cannot cut 2 layers into 3 stages\n", "", ""]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("built", [False, True])
def test_an_error_of_one_rank_is_printed_by_that_rank(built, ranks, capsys, monkeypatch):
    """History: a host without the data or the checkpoint ended without a word, as rank 0 tells mistakes of all."""
    error = CheckpointError("there is no checkpoint last.ckpt")
    if built:  # by Hydra
        cause, error = error, InstantiationException("Error in call to target 'Data'")
        error.__cause__ = cause
    verb = Verb(capsys, monkeypatch, error)
    printed = [verb.printed(**rank) for rank in ranks[1:]]
    assert printed == [
        f"diffpipe show: rank {r}: there is no checkpoint last.ckpt\n" for r in (1, 2)
    ]


@pytest.mark.slow
def test_a_module_of_ones_own_is_found_where_the_command_is_called(capsys, monkeypatch, tmp_path):
    """History: "Are you sure that module 'own_module' is installed?"; a console script looks beside itself only."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    (tmp_path / "own_module.py").write_text("def mine(): raise ValueError('here it is')\n")
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("_target_: own_module.mine\n")
    arguments = ("-cd", "conf", "model=mine", "logger=none", "trainer.devices=1", "callbacks=none")
    _, _, err = call(capsys, monkeypatch, "train", *arguments)
    assert "ValueError: here it is" in err


def test_a_misspelled_setting_is_printed_once(capsys, monkeypatch):
    printed = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        printed.append(call(capsys, monkeypatch, "train", "trainer.max_stepz=3")[2])
    assert "trainer.max_stepz" in printed[0]
    assert printed[1] == ""


def test_weights_are_written_from_the_checkpoint_that_a_run_ended_with(capsys):
    """History: one that had nothing left to train read an older run's final checkpoint, or none."""
    final = FinalCheckpoint("out/final.ckpt")
    trainer = SimpleNamespace(callbacks=[final], max_steps=5, max_epochs=-1, ckpt_path="given.ckpt")
    assert training._last_checkpoint(trainer) == Path("given.ckpt")
    assert "nothing was left to train (trainer.max_steps=5" in capsys.readouterr().out
    final.on_train_end(SimpleNamespace(fast_dev_run=False, save_checkpoint=lambda path: None), None)
    assert training._last_checkpoint(trainer) == final.path
    final.is_written, trainer.ckpt_path = False, None
    with pytest.raises(ConfigurationError, match="nothing for save_to; raise them"):
        training._last_checkpoint(trainer)


@pytest.mark.parametrize("by", ["last", "path"])
def test_a_run_of_wandb_goes_on_with_the_training(tmp_path, monkeypatch, by):
    """History: each start was another run of W&B, whose curves nobody put together."""
    node = OmegaConf.create({"_target_": "lightning.pytorch.loggers.WandbLogger", "id": None})

    def started(folder, ckpt_path=None):
        config = OmegaConf.create({"output_dir": str(folder), "ckpt_path": ckpt_path})
        return _run_to_go_on_with(config, node)["id"]

    first = started(tmp_path / "a")
    if by == "last":
        assert started(tmp_path / "a", "last") == first
    else:
        assert started(tmp_path / "b", str(tmp_path / "a" / "checkpoints" / "x.ckpt")) == first
        assert started(tmp_path / "b", "last") == first, "stored next to its own checkpoints, too"
    assert started(tmp_path / "a") != first, "started again"
    config = OmegaConf.create({"output_dir": str(tmp_path), "ckpt_path": None})
    assert _run_to_go_on_with(config, OmegaConf.merge(node, {"id": "mine"})) == {}
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert _run_to_go_on_with(config, node) == {}, "the first rank logs"


def test_hydra_does_not_see_the_verb_and_children_do(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["diffpipe", "train", "--cfg", "job"])
    cli.main()
    assert sys.argv == ["diffpipe", "train", "--cfg", "job"]


def layer(name, forward_s):
    return {
        "name": name, "forward_s": {"1": forward_s}, "backward_s": {"1": 2 * forward_s}, "parameter_bytes": 1,
        "gradient_bytes": 1, "boundary_bytes_per_sample": 1, "activation_bytes_per_sample": 1,
    }  # fmt: skip


@pytest.fixture
def profile_path(tmp_path):
    layers = [layer(f"block.{i}", 0.001) for i in range(6)]
    profile = {
        "format": "diffpipe-profile/1",
        "name": "six equal layers",
        "backbones": [{"name": "unet", "layers": layers}],
        "encoders": [],
    }
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile))
    return path


def plan_for(num_stages, profile_path, capsys, monkeypatch, *more):
    path = profile_path.with_name(f"plan_{num_stages}.json")
    _, out, err = call(
        *(capsys, monkeypatch, "plan", f"profile={profile_path}", "global_batch_size=4"),
        *("cluster.num_ranks=3", f"strategy.num_stages={num_stages}", "filling=none"),
        *("strategy.num_microbatches=4", f"output={path}", *more),
    )
    assert path.exists(), err
    return path, out


def test_a_plan_is_for_cards_that_a_folder_of_ones_own_describes(
    profile_path, tmp_path, capsys, monkeypatch
):
    """As docs/planning.md has it: `conf/cluster/my_cards.yaml`."""
    cards = tmp_path / "conf" / "cluster" / "my_cards.yaml"
    cards.parent.mkdir(parents=True)
    cards.write_text(
        "num_ranks: 2\nmemory_bytes: 11e9\np2p: {bandwidth_bytes_per_s: 1e9, latency_s: 1e-5}\n"
    )
    chosen = "--config-dir", str(tmp_path / "conf"), "cluster=my_cards", "filling=none"
    costs, output = (f"profile={profile_path}", "global_batch_size=4"), tmp_path / "plan.json"
    code, out, err = call(capsys, monkeypatch, "plan", *chosen, *costs, f"output={output}")
    assert code == 0, out + err
    assert PipelinePlan.from_json(output.read_text()).num_ranks == 2
    code, out, _ = call(capsys, monkeypatch, "plan", *chosen, "--help")
    assert "my_cards" in out


def test_a_rank_that_is_slow_to_end_does_not_make_a_failure_of_a_result(capsys, monkeypatch):
    """History: it was killed after the images had been written, and then named by its exit code, -9."""
    others = [subprocess.Popen(["sleep", "60"]), subprocess.Popen(["true"])]
    monkeypatch.setattr(launch, "_start_others", lambda *_: others)
    monkeypatch.setattr(launch, "_GRACE_S", 0.1)
    monkeypatch.setattr(launch.HydraConfig, "get", lambda: SimpleNamespace(mode=RunMode.RUN))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launch.on_ranks(3, lambda: "images") == "images"
    assert "rank 1 had not ended 0.1 s after rank 0, and was killed" in capsys.readouterr().err


def test_other_ranks_end_with_the_first(monkeypatch):
    """History: of `sample`, they drew on until they missed it, and said so in thirty lines."""
    others = [subprocess.Popen(["sleep", "60"])]
    monkeypatch.setattr(launch, "_start_others", lambda *_: others)
    monkeypatch.setattr(launch.HydraConfig, "get", lambda: SimpleNamespace(mode=RunMode.RUN))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as end:
        launch.on_ranks(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert (end.value.code, others[0].returncode) == (143, -signal.SIGTERM)


@pytest.mark.parametrize(("rank", "printed"), [("0", "\ndiffpipe show: interrupted\n"), ("1", "")])
def test_what_is_interrupted_ends_in_a_line(rank, printed, capsys, monkeypatch):
    """History: on two ranks Ctrl-C was answered with 340 lines."""
    verb = Verb(capsys, monkeypatch, KeyboardInterrupt())
    assert verb.printed(130, RANK=rank) == printed


def test_nobody_is_sent_to_torchvision():
    """History: every process began with two lines of transformers about image processors that nothing uses."""
    launch.announce_loading()
    logger = logging.getLogger("transformers.utils.import_utils")
    passes = lambda text: logger.filter(logging.makeLogRecord({"msg": text}))
    assert not passes(
        "`CLIPImageProcessor` requires torchvision (not installed); falling back to ..."
    )
    assert passes("a file is missing")


def test_wrong_options_of_a_plan_are_refused_before_a_model_is_modelled(capsys, monkeypatch):
    """History: the model came first, which takes seconds."""
    command = ("plan", "model=flux", "cluster=8x_h100", "global_batch_size=8")
    code, out, err = call(capsys, monkeypatch, *command, "strategy.schedule=1f1bb")
    assert (code, out) == (2, "")
    assert "strategy.schedule='1f1bb'; choose auto, 1f1b, " in err


@pytest.mark.slow
def test_a_plan_is_found_printed_written_and_shown(profile_path, capsys, monkeypatch):
    path, printed = plan_for(3, profile_path, capsys, monkeypatch)
    assert json.loads(path.read_text())["planned"]["bubble_ratio"] == pytest.approx(2 / 6)
    _, shown, _ = call(capsys, monkeypatch, "show", str(path))
    assert shown in printed
    _, timeline, _ = call(capsys, monkeypatch, "show", str(path), "as=timeline")
    assert timeline in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # History: each of these ended in a traceback, the last two after the whole search.
        (["show", "plan.png"], "cannot read plan.png: it is not text; plans, profiles and"),
        (["plan", "profile=plan.png", "global_batch_size=4"], "cannot read plan.png: it is not text"),
        (["show", "plan.json", "as=image", "output=plan.doc"], "is no name for an image; choose an ending of "),
        (["show", "plan.json", "as=trace", "output=profile.json/t"], "cannot write profile.json/t: Not"),
        (["plan", "profile=nowhere", "global_batch_size=4", "output=."], "cannot write .: Is a directory"),
        (["plan", "profile=nowhere", "global_batch_size=4", "disk_bytes_per_s=fast"],
         "disk_bytes_per_s must be a number > 0; got 'fast'"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used_are_refused_in_a_line(
    arguments, message, profile_path, capsys, monkeypatch
):
    path, _ = plan_for(3, profile_path, capsys, monkeypatch)
    path.rename(path.with_name("plan.json"))
    path.with_name("plan.png").write_bytes(b"\x89PNG\r\n")
    monkeypatch.chdir(path.parent)
    code, _, err = call(capsys, monkeypatch, *arguments)
    assert code == 2
    assert message in err
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "plan.json",
        "plan.png",
        "profile.json",
    ]


@pytest.mark.slow
def test_a_plan_is_drawn_into_folders_that_are_made(profile_path, capsys, monkeypatch):
    """History: after the whole search the plan was lost where its folder did not exist."""
    plan = profile_path.parent / "plans" / "plan.json"
    costs = [f"profile={profile_path}", "global_batch_size=4", "explain=false"]
    call(capsys, monkeypatch, "plan", *costs, f"output={plan}")
    trace, image = plan.parent / "traces" / "t.json", plan.parent / "images" / "p.svg"
    call(capsys, monkeypatch, "show", str(plan), "as=trace", f"output={trace}")
    call(capsys, monkeypatch, "show", str(plan), "as=image", f"output={image}")
    assert trace.read_bytes().startswith(b"{")
    assert b"<svg" in image.read_bytes()


@pytest.mark.slow
def test_a_plan_by_hand_need_not_know_its_memory(profile_path, capsys, monkeypatch):
    """History: `[]` was read and then broke the report."""
    path, _ = plan_for(3, profile_path, capsys, monkeypatch)
    document = json.loads(path.read_text())
    del document["digest"], document["costs"]
    document["planned"]["peak_memory_bytes"] = []
    path.write_text(json.dumps(document))
    code, shown, _ = call(capsys, monkeypatch, "show", str(path))
    assert code == 0
    assert [line.split()[-1] for line in shown.splitlines()[3:6]] == ["?"] * 3
    document["planned"]["peak_memory_bytes"] = [0]
    path.write_text(json.dumps(document))
    _, _, err = call(capsys, monkeypatch, "show", str(path))
    assert (
        "peak_memory_bytes: 1 numbers, but the stages have 3 ranks; give one for each, or n" in err
    )


@pytest.mark.slow
def test_a_plan_of_several_pipelines_says_what_to_load(profile_path, capsys, monkeypatch):
    """History: a plan for 64 samples in 4 pipelines was trained with batches of 64, and refused."""
    two = ("cluster.num_ranks=2", "strategy.data_parallel=2", "strategy.num_microbatches=1")
    path, printed = plan_for(1, profile_path, capsys, monkeypatch, *two)
    assert PipelinePlan.from_json(path.read_text()).num_pipelines == 2
    assert f"wrote {path}; train with data.batch_size=2, the samples of one of its 2 pip" in printed
    path, printed = plan_for(3, profile_path, capsys, monkeypatch)
    assert printed.endswith(f"wrote {path}\n")


@pytest.mark.slow
def test_a_profile_is_shown(profile_path, capsys, monkeypatch):
    _, one, _ = call(capsys, monkeypatch, "show", str(profile_path))
    assert one.startswith("six equal layers: times of 1 sample;")
    _, four, _ = call(capsys, monkeypatch, "show", str(profile_path), "samples=4")
    assert one.splitlines()[-1].split()[:2] == ["all", "6.00"]
    assert four.splitlines()[-1].split()[:2] == ["all", "24.0"]


@pytest.mark.slow
def test_a_plan_says_what_would_help_and_so_does_showing_it(profile_path, capsys, monkeypatch):
    path, printed = plan_for(3, profile_path, capsys, monkeypatch)
    helps = "\n  backwards in two parts (schedule=zero_bubble): "
    assert "Bottleneck: pipeline warm-up and cooldown." in printed
    assert helps in printed
    _, shown, _ = call(capsys, monkeypatch, "show", str(path))
    assert helps in shown
    document = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in document.items() if k != "changes"}))
    _, shown, _ = call(capsys, monkeypatch, "show", str(path))
    assert "What would help" not in shown
    _, shown, _ = call(capsys, monkeypatch, "show", str(path), f"profile={profile_path}")
    assert helps in shown


@pytest.mark.slow
def test_advice_for_a_run_is_found_again_with_its_links(profile_path, capsys, monkeypatch):
    """History: a run's links were forgotten, and `show profile=` looked for advice as if they were free."""
    measured, output = profile_path.with_name("cluster.json"), profile_path.with_name("plan.json")
    measured.write_text(Cluster(3, p2p=Link(latency_s=1.0)).to_json())
    costs = [f"profile={profile_path}", "cluster=measured", f"cluster.path={measured}"]
    settings = ["global_batch_size=12", "strategy.num_stages=3", f"output={output}"]
    _, printed, err = call(capsys, monkeypatch, "plan", *settings, *costs)
    document = json.loads(output.read_text())
    assert document["planned"]["iteration_s"] > 2.0, err
    output.write_text(json.dumps({k: v for k, v in document.items() if k != "changes"}))
    _, shown, _ = call(capsys, monkeypatch, "show", str(output), *costs)
    assert "What would help" in shown
    searched, _, rest = shown.partition("\n\n")
    assert searched.startswith("What could be changed was searched for ")
    assert rest in printed
    _, free, _ = call(capsys, monkeypatch, "show", str(output), costs[0])
    assert free not in printed
    call(capsys, monkeypatch, "plan", *settings, *costs, "cluster.num_ranks=6", "explain=false")
    assert PipelinePlan.from_json(output.read_text()).num_ranks == 6
    rate = "+cluster.p2p.bandwidth_bytes_per_s=1e15"
    call(capsys, monkeypatch, "plan", *settings, *costs, rate, "explain=false")
    planned = json.loads(output.read_text())["planned"]
    assert planned["iteration_s"] > 2.0  # the second that a message takes stays


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lr=0.1/plan.json", "a,b.json", "it's.json", "日本.json"])
def test_a_plan_is_shown_whatever_it_is_called(name, profile_path, capsys, monkeypatch):
    """History: Hydra read the names of files, and took `lr=0.1/plan.json` for a setting."""
    monkeypatch.chdir(profile_path.parent)
    path, _ = plan_for(2, profile_path, capsys, monkeypatch)
    Path(name).parent.mkdir(exist_ok=True)
    shutil.copy(path, name)
    shown = [call(capsys, monkeypatch, "show", path) for path in (str(path), name)]
    assert shown[0][:2] == (0, shown[1][1])


@pytest.mark.parametrize(
    "text", ["it's", "a=b", "日本", "a\\", "a\\'", "'", "\\", '"', "a,b", " a "]
)
def test_a_text_in_quotes_is_read_back(text):
    [override] = OverridesParser.create().parse_overrides([f"path={quoted(text)}"])
    assert override.value() == text


@pytest.mark.slow
def test_two_plans_are_compared(profile_path, capsys, monkeypatch):
    three, _ = plan_for(3, profile_path, capsys, monkeypatch)
    one, _ = plan_for(1, profile_path, capsys, monkeypatch)
    _, out, _ = call(capsys, monkeypatch, "diff", str(three), str(one))
    assert "num_stages: 1 instead of 3" in out


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("run", [run_on_forks, row(run)])
def test_two_processes_profile_the_links_between_them(run, tmp_path):
    settings = ["data.alphabets=[digits]", "data.faces=[sans]", "data.batch_size=4", "budget_s=0.1"]
    done = run("profile", *settings, "trainer.devices=2", "progress=false", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("layers of the path") == 1, "the second process only answers"
    # Under a launcher each process composes a config, and names its folder by the second in which it began.
    alone = run is not run_on_forks
    assert len(list(tmp_path.rglob(".hydra"))) == 1 or not alone, "the second process writes none"
    cluster = Cluster.from_json((tmp_path / "cluster.json").read_text())
    assert cluster.num_ranks == 2
    for link in (cluster.p2p, cluster.all_reduce):
        assert link.bandwidth_bytes_per_s > 1e6  # infinite where a larger message took no longer
        assert 0 <= link.latency_s < 1
    profile = ModelProfile.from_json((tmp_path / "profile.json").read_text())
    assert len(profile.backbones[0].layers) > 2


@pytest.mark.slow
def test_train_on_one_device_writes_a_folder_that_sample_reads(
    tmp_path, capsys, caplog, monkeypatch
):
    settings = ["experiment=glyphs_from_scratch", *TINY, "trainer.max_steps=2"]
    settings += ["trainer.val_check_interval=2", "trainer.limit_val_batches=1"]
    settings += ["callbacks.checkpoint.every_n_train_steps=1"]
    monkeypatch.chdir(tmp_path)
    first = (*settings, f"save_to={tmp_path}/model", "output_dir=out")
    code, _, err = call(capsys, monkeypatch, "train", *first)
    assert code == 0, err[-3000:]
    assert (tmp_path / "out" / "csv" / "metrics.csv").exists()
    assert (tmp_path / "out" / "csv" / "samples" / "step_000002.png").exists()

    sample = ["sample", 'prompts=["digit four, sans", "digit one, sans"]', "num_inference_steps=2"]
    checkpoint = tmp_path / "out" / "checkpoints" / "final.ckpt"
    for path, folder in ((tmp_path / "model", "from_folder"), (checkpoint, "from_checkpoint")):
        code, _, err = call(capsys, monkeypatch, *sample, f"path={path}", f"hydra.run.dir={folder}")
        assert code == 0, err[-3000:]
    # History: with a finished checkpoint, the final one of the new run was looked for, which was never written.
    further = [f"ckpt_path={checkpoint}", f"save_to={tmp_path}/again", "output_dir=further"]
    code, out, err = call(capsys, monkeypatch, "train", *settings, *further)
    assert code == 0, err[-3000:]
    assert f"nothing was left to train (trainer.max_steps=2, max_epochs=-1) in {checkpoint}" in out
    weights = [
        tmp_path / name / "unet" / "diffusion_pytorch_model.safetensors"
        for name in ("model", "again")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    # History: a traceback with the names of all weights.
    other = [f"ckpt_path={checkpoint}", "model.unet.block_out_channels=[32,64]", "output_dir=other"]
    code, _, err = call(capsys, monkeypatch, "train", *settings, *other)
    assert code == 2
    assert (
        f"ckpt_path={checkpoint} does not fit the module; choose the model" in err.splitlines()[-1]
    )
    # History: no checkpoint was called so, and training started again.
    further = ["trainer.max_steps=3", "ckpt_path=last", "output_dir=out"]
    code, _, err = call(capsys, monkeypatch, "train", *settings, *further)
    assert code == 0, err[-3000:]
    assert (
        f"Restored all states from the checkpoint at {tmp_path}/out/checkpoints/000002.ckpt"
        in caplog.text
    )
    for folder in ("from_folder", "from_checkpoint"):
        assert Image.open(tmp_path / folder / "grid.png").size == (128, 64)


@pytest.mark.parametrize(("terminal", "rate"), [(True, 1), (False, 20)])
def test_the_bar_of_training_moves_with_each_step_where_somebody_looks(terminal, rate, monkeypatch):
    """History: it was refreshed every 20 steps, which were 12 seconds of the demo."""
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: terminal))
    with hydra.initialize_config_module("lightning_diffpipe.conf", version_base="1.3"):
        config = hydra.compose("train")
    assert config.callbacks.progress_bar.refresh_rate == rate


@pytest.mark.slow
@pytest.mark.distributed
def test_train_as_a_pipeline_of_two_processes(tmp_path):
    settings = ["experiment=glyphs", "strategy.num_stages=2", "strategy.profile=flops", *TINY]
    trained = run(
        *("train", *settings, "trainer.max_steps=2", "logger=csv", f"save_to={tmp_path}/model"),
        "callbacks.ema.decay=0.0",  # so that averages are the weights, on whichever rank they live
        *("hydra.run.dir=out",),
        cwd=tmp_path,
    )
    assert trained.returncode == 0, trained.stderr[-3000:]
    printed = trained.stdout + trained.stderr
    assert "1 pipeline of 2 stages" in printed
    (told,) = re.findall(r"^ready in [\d.]+ s: (.*)$", printed, re.MULTILINE)
    assert {"probing the step", "placing stages"} <= {
        phase.rsplit(maxsplit=2)[0] for phase in told.split(", ")
    }
    for noise in ("Tip:", "is deprecated", "Sparse CSR", "weights_only", "GLOBAL_RANK"):
        assert noise not in printed
    assert printed.count("starting 2 processes") == 1
    assert (tmp_path / "model" / "unet" / "config.json").exists()
    assert list((tmp_path / "out").rglob("step_000002.png"))
    checkpoint = torch.load(tmp_path / "out" / "checkpoints" / "final.ckpt", weights_only=True)
    averages = checkpoint["callbacks"]["EMA"]["averages"]
    assert len(averages) == sum(name.startswith("unet.") for name in checkpoint["state_dict"])
    for name, average in averages.items():
        assert average.equal(checkpoint["state_dict"][name]), name
    assert len(list(tmp_path.rglob(".hydra"))) == 1  # the second process writes none


@pytest.mark.slow
@pytest.mark.distributed
def test_some_steps_are_measured_beside_their_plan(tmp_path):
    settings = ["experiment=glyphs", "trainer.max_steps=5", "data.batch_size=4"]
    settings += [f"hydra.run.dir={tmp_path / 'out'}", "save_to=trained"]
    printed = run_on_forks("bench", *settings, cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr[-3000:]
    told = printed.stdout[printed.stdout.index("planned   measured") :]
    for line in (
        r"^step +\S+ \S+ +\S+ \S+$",
        r"^samples/s +[\d.]+ +[\d.]+$",
        r"^bubble ratio .*%$",
    ):
        assert re.search(line, told, re.MULTILINE), line
    for rank in (0, 1):
        assert re.search(
            rf"^memory of the process, at most, rank {rank} +\S+ .iB$", told, re.MULTILINE
        )
    written = {path.name for path in (tmp_path / "out" / "pipeline").iterdir()}
    assert {"plan.json", "profile.json", "timeline.png", "trace.json", "report.txt"} <= written
    # What callbacks need is planned as in training.
    plan = json.loads((tmp_path / "out" / "pipeline" / "plan.json").read_text())
    assert plan["options"]["averages_bytes_factor"] > 0
    assert not list(tmp_path.rglob("*.ckpt"))
    assert not (tmp_path / "trained").exists()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("run", [run_on_forks, row(run)])
def test_the_demo_tells_its_story(run, tmp_path):
    settings = ["trainer.max_steps=2", "data.batch_size=4"]
    settings += ["callbacks.story.num_inference_steps=2"]
    demo = ("train", "-cd", ROOT / "examples" / "conf", "experiment=demo")
    printed = run(*demo, *settings, "strategy.profile=flops", cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr[-3000:]
    (folder,) = (tmp_path / "outputs" / "demo").iterdir()
    assert Image.open(folder / "before_after.png").size == (110 + 10 * 128, 3 * 128)
    for name in ("samples.png", "loss.png", "plan.json"):
        assert (folder / name).exists()
        assert name in printed.stdout
    assert "pipefusion, num_patches=2, warmup_steps=1, on parallel=2" in printed.stdout
    assert "4. Sampling the same prompts on all processes together." in printed.stdout
    assert "To try next:" in printed.stdout
    assert "rank 1 |" in printed.stdout + printed.stderr
    assert "Filling the bubbles" in printed.stdout + printed.stderr, (
        "the closing report says what it gained"
    )


@pytest.mark.parametrize(
    "refused",
    [
        ["strategy.num_microbatches=9"],
        [
            "+callbacks.average._target_=lightning.pytorch.callbacks.StochasticWeightAveraging",
            "+callbacks.average.swa_lrs=0.1",
            "+callbacks.average.swa_epoch_start=1",
        ],
    ],
)
def test_what_is_refused_begins_no_run_of_wandb(tmp_path, capfd, monkeypatch, refused):
    """History: each attempt left an empty run, whether the command refused it or the strategy did."""
    monkeypatch.chdir(tmp_path)
    settings = ["experiment=glyphs_from_scratch", *TINY, "trainer.max_steps=2", "save_to=null"]
    settings += ["strategy=diffpipe", "strategy.profile=flops", "logger=wandb", *refused]
    code, _, err = call(capfd, monkeypatch, "train", *settings)
    assert code == 2, err[-3000:]
    assert not list(tmp_path.rglob("*.wandb"))


def test_a_home_that_the_shell_has_left_is_that_of_the_user(monkeypatch):
    """History: bash keeps the `~` after a name with a dot, zsh any; a folder of that name was written into."""
    monkeypatch.setenv("HOME", "/home/me")
    given = ["hydra.run.dir=~/runs", "output=~/a=b", "output=~", "name=~/x", "~data"]
    expected = [
        "hydra.run.dir=/home/me/runs", "output=/home/me/a=b", "output=/home/me", "name=/home/me/x", "~data",
    ]  # fmt: skip
    assert _named("train", given) == expected


def test_settings_may_stand_on_both_sides_of_flags():
    """History: argparse printed its usage, and `show` took a folder for the plan."""
    flags = ["-cd", "mine/lr=1", "--info", "defaults"]
    assert _named("train", ["a=1", *flags, "b=2"]) == ["a=1", "b=2", *flags]
    assert _named("show", [*flags, "p.json"]) == ["plan='p.json'", *flags]


STEP = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
JOB = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NAME": "draw", "SLURM_NODELIST": "node[07-08]"}


def test_tasks_of_srun_are_the_processes(monkeypatch):
    """History: each of them started all processes again, or took itself for the only one."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that they are put back
        monkeypatch.delenv(name)
    for name, value in (STEP | JOB).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "_start_others", lambda *_: pytest.fail("the others are there"))
    found = launch.on_ranks(
        8, lambda: [os.environ[n] for n in ("WORLD_SIZE", "RANK", "LOCAL_RANK")]
    )
    assert found == ["8", "5", "1"]
    assert os.environ["MASTER_ADDR"] == "node07"
    assert int(os.environ["MASTER_PORT"]) > 1024
    with pytest.raises(ConfigurationError, match=r"trainer.devices=4, but .* started 8"):
        launch.on_ranks(4, list)


def test_a_batch_script_without_srun_is_one_process(monkeypatch):
    """It was granted several tasks, and started none."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in (STEP | JOB | {"SLURM_PROCID": "0"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    launch.on_ranks(1, lambda: None)
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.slow
def test_a_wheel_holds_all_code_every_config_and_the_built_in_weights(tmp_path):
    """Of a copy: setuptools would pack what once was in `build`, and write into the tree that other tests read."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "tree" / name)
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", ".", "tree"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "lightning_diffpipe").rglob("*.py")}
    assert code <= set(names), "runtime/ had no __init__.py once, and no wheel had runtime/"
    prefix = "lightning_diffpipe/conf/"
    packed = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    there = {str(path.relative_to(ROOT / "conf")) for path in (ROOT / "conf").rglob("*.yaml")}
    assert {name for name in packed if name.endswith(".yaml")} == there
    weights = {n for n in names if n.startswith("lightning_diffpipe/weights/")}
    folders = [ROOT / "examples" / name for name in BUILT_IN]
    files = [p for folder in folders for p in folder.rglob("*") if p.is_file()]
    examples = ROOT / "examples"
    assert weights >= {f"lightning_diffpipe/weights/{p.relative_to(examples)}" for p in files}


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_that_sigterm_ends_says_so_and_exits_with_its_code(tmp_path):
    """History: all ranks stopped silently, with exit code 0, so that job scripts took the run for finished."""
    settings = ["experiment=glyphs", "strategy.num_stages=2", "strategy.profile=flops", *TINY]
    command = [sys.executable, "-m", "lightning_diffpipe.cli", "train", *settings, "logger=none"]
    with (tmp_path / "screen").open("w") as screen:
        process = subprocess.Popen(
            [*command, "hydra.run.dir=run"], cwd=tmp_path, stdout=screen, stderr=screen,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    deadline_s = time.monotonic() + 180.0
    while not list(tmp_path.rglob("samples/*")) and time.monotonic() < deadline_s:
        assert process.poll() is None, (tmp_path / "screen").read_text()
        time.sleep(0.2)
    process.terminate()
    assert process.wait(60.0) == 143
    printed = (tmp_path / "screen").read_text()
    assert re.search(
        r"SIGTERM to rank 0 \(training.*training ended after step \d+; nothing was saved", printed
    )


def test_what_cannot_be_written_after_training_is_in_a_checkpoint():
    """History: a traceback, on a disk that had become full, of adapters that were in final.ckpt."""

    class Full:
        from_checkpoint = classmethod(lambda cls, path: cls())

        def save_lora(self, folder, names):
            raise OSError(28, "No space left on device", f"{folder}/x")

    config = OmegaConf.create({"save_to": None, "save_lora": "trained", "save_lora_names": None})
    with pytest.raises(CheckpointError, match=r"No space left .*: with ckpt_path=final.ckpt and"):
        training._export(config, Full, Path("final.ckpt"))
