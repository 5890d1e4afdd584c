"""Optimizers of `conf/optimizer` on two stages: the numbers of one process, and going on from a checkpoint.

Those of packages that only some users have are tried by `make test-tables`, which installs them in a folder.
"""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import hydra
import pytest
import torch
from omegaconf import OmegaConf

from lightning_diffpipe.modules import Optimization
from lightning_diffpipe.modules.parts import PartsModule
from tests.distributed.scenarios import (
    Settings,
    assert_close,
    assert_equal_runs,
    fit,
    fit_module,
    reference,
)
from tests.distributed.tiny import TinyDiffusion
from tests.ranks import RankError, run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed

CONF = Path(__file__).parents[2] / "conf" / "optimizer"


class Optimized(TinyDiffusion):
    """Trained as `optimization` says, in a type of its own."""

    on_train_batch_start = PartsModule.on_train_batch_start

    def __init__(self, optimization, dtype=torch.float64, **options):
        super().__init__(**options)
        self.optimization, self.own_dtype = optimization, dtype

    def double(self):
        return self.to(self.own_dtype)

    def configure_optimizers(self):
        return self.optimization.configure(self)


def settings_of(name, dtype, epochs=2, groups=(), **own):
    """A run with the optimizer of a file of `conf/optimizer`."""
    config = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    further = {"decay": "cosine", "weight_decay": 0.05} | config
    made = further.pop("optimizer", None)
    optimizer = made and hydra.utils.instantiate(made | own, _convert_="all")
    if name in ("prodigy", "dadapt_adam"):  # finds its step size within the ten steps of a test
        further["optimizer"] = partial(optimizer, d0=1e-4)
    optimization = Optimization(
        **{"lr": 1e-2, "warmup_steps": 2, "optimizer": optimizer} | further, groups=dict(groups)
    )
    return Settings(
        module={"optimization": optimization, "dtype": dtype, "tied": True},
        module_class=Optimized,
        data={"size": 30, "batch_size": 6, "dtype": dtype},
        trainer={"max_epochs": epochs, "gradient_clip_val": 0.5},
    )


def of_package(name, *rest):
    """A row that needs a package."""
    missing = not find_spec(name)
    return pytest.param(*rest, marks=pytest.mark.skipif(missing, reason=f"needs {name}"))


EXACT, OWN = (torch.float64, 1e-10), (torch.float32, 1e-4)


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance", "own"),
    [
        ("prodigy", *EXACT, {"use_bias_correction": False, "safeguard_warmup": False}),
        row("prodigy", *EXACT, {"safeguard_warmup": False, "growth_rate": 2.0}),
        row("dadapt_adam", *EXACT, {}),
        row("adamw", *EXACT, {}),
        row("adafactor", *EXACT, {"scale_parameter": True}),
        row("sgd", *EXACT, {}),
        ("muon", torch.float64, 1e-3, {}),  # orthogonal to bfloat16
        of_package("lion_pytorch", "lion", *EXACT, {}),
        of_package("schedulefree", "schedule_free", *EXACT, {}),
        of_package("bitsandbytes", "adamw_8bit", *OWN, {"min_8bit_size": 64}),
        of_package(
            "bitsandbytes",
            "adamw_8bit",
            *OWN,
            {"_target_": "bitsandbytes.optim.Lion8bit", "min_8bit_size": 64},
        ),
        of_package("torchao", "adamw_8bit", *OWN, {"_target_": "torchao.optim.AdamW8bit"}),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_stages_train_as_one_process_and_go_on_as_if_never_stopped(
    name, dtype, tolerance, own, tmp_path
):
    make = partial(settings_of, name, dtype, groups={"norm|bias": {"weight_decay": 0.0}}, **own)
    expected = reference(make(), 2)
    pipelined = make()
    pipelined.strategy = {"num_stages": 2, "num_microbatches": 2}
    outcomes = run_ranks(fit, 2, pipelined, 2, tmp_path)
    assert_equal_runs(outcomes, expected, tolerance)
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=False)
    state = saved["optimizer_states"][0]
    assert len(state["state"]) == sum(len(group["params"]) for group in state["param_groups"])
    if name in ("prodigy", "dadapt_adam"):
        last = torch.load(tmp_path / "epoch=1.ckpt", weights_only=False)["optimizer_states"][0]
        assert last["param_groups"][0]["d"] > 1.1e-4, "no step size was found"
    if name == "schedule_free":
        assert not state["param_groups"][0]["train_mode"], "the weights are not the averages"
    later = run_ranks(fit, 2, pipelined, 2, None, tmp_path / "epoch=0.ckpt")
    for outcome in later:
        for parameter, value in expected.weights.items():
            assert_close(outcome.weights[parameter], value, tolerance, parameter)


def fit_without_flush(rank, optimization):
    strategy = {"num_microbatches": 1, "schedule": "pipedream"}
    fit_module(Optimized(optimization).double(), 2, strategy=strategy)


@pytest.mark.parametrize("name", ["prodigy", of_package("schedulefree", "schedule_free")])
def test_what_needs_all_stages_at_once_is_refused_where_they_step_apart(name):
    optimization = settings_of(name, torch.float64).module["optimization"]
    with pytest.raises(RankError, match=r"schedule=pipedream each stage steps when .* flushes"):
        run_ranks(fit_without_flush, 2, optimization)
