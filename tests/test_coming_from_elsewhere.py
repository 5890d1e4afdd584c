"""Every setting that `docs/coming_from_elsewhere.md` names is one, and of what has none it says why."""

import itertools
import re
import shlex
from pathlib import Path

import hydra
import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lightning_diffpipe import cli  # noqa: F401  registers the resolvers conf/ uses
from lightning_diffpipe.cli.training import _build_trainer
from tests.command import call

PAGE = Path(__file__).parents[1] / "docs" / "coming_from_elsewhere.md"
CHOSEN = ("model=pretrained", "adapter=lora", "data=image_folder", "data.folder=x", "logger=csv")
ONE = ("strategy=single_device", "trainer.devices=1", "callbacks.samples=null")
ROWS = [
    [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:3]]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| `")
]


def settings_of(cell):
    """The settings of a cell, as a shell would read them; those that stand together in a tuple each."""
    spans = re.findall(r"`([^`]+)`", cell)
    return [tuple(shlex.split(span)) for span in spans if re.match(r"['\"]?\+?[a-z_.]+=", span)]


def composed(*overrides):
    with initialize_config_module("lightning_diffpipe.conf", version_base="1.3"):
        config = compose("train", [*CHOSEN, *overrides], return_hydra_config=True)
        HydraConfig.instance().set_config(config)
    return config


def key_of(override):
    """Its key, or that of what it excludes."""
    key = override.partition("=")[0].lstrip("+")
    other = {"debiased": "min_snr_gamma", "mode_scale": "uniform"}
    return re.sub("|".join(other), lambda found: other[found[0]], key)


def excludes(one, other):
    """Whether they are one key, or one is above the other, such as a group or what may be null."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def runs():
    """All settings of the page, in as few runs as they can be in that set nothing twice."""
    found = []
    for settings in dict.fromkeys(s for _, here in ROWS for s in settings_of(here)):
        keys = {key_of(override) for override in settings}
        apart = (
            run
            for run in found
            if not any(excludes(a, key_of(b)) for a, b in itertools.product(keys, run))
        )
        run = next(apart, None)
        if run is None:
            found.append(run := [])
        run += settings
    return [
        [o.replace("FILE", str(PAGE)) for o in run if not o.startswith("hydra.")] for run in found
    ]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", runs())
def test_every_setting_is_one_and_takes_the_value(overrides, tmp_path):
    config = composed(*overrides, f"output_dir={tmp_path}")
    for part in ("noise", "lora"):
        hydra.utils.instantiate(config.model[part], _convert_="all")
    if "optimizer" not in config.model.optimization:  # of packages: `test_conf.py`
        hydra.utils.instantiate(config.model.optimization, _convert_="all")


def test_what_has_no_setting_says_why():
    why = r"none: .{20}|none$|none as a setting; .{20}|the default; |the scheduler's config in the folder"
    assert not [keys for keys, here in ROWS if not settings_of(here) and not re.search(why, here)]


@pytest.mark.parametrize(
    "kinds", [("monitor", "mode", "save_top_k"), ("steps=null", "train_time_interval")]
)
def test_lightnings_callback_takes_what_the_page_names(kinds, tmp_path):
    named = [o for _, here in ROWS for settings in settings_of(here) for o in settings]
    chosen = [
        o
        for o in dict.fromkeys(named)
        if "callbacks.checkpoint" in o and any(k in o for k in kinds)
    ]
    assert len(chosen) == 3
    assert _build_trainer(composed(*chosen, *ONE, f"output_dir={tmp_path}")).checkpoint_callbacks


def test_the_file_on_the_page_is_a_run(tmp_path, capsys, monkeypatch):
    text = re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    (tmp_path / "mine.yaml").write_text(text)
    chosen = ("--config-dir", str(tmp_path), "--config-name", "mine", "--cfg", "job")
    code, out, err = call(capsys, monkeypatch, "train", *chosen, "trainer.devices=4")
    assert code == 0, err
    config = OmegaConf.create(out)
    assert (config.trainer.max_steps, config.trainer.devices) == (2000, 4)
    assert config.model.optimization.optimizer._target_ == "bitsandbytes.optim.AdamW8bit"
    assert config.model.call.guidance_scale == 1.0
    assert config.model.lora.rank == 16
