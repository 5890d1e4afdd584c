"""Whose code runs, and from which state generators go on."""

import random
import sys
from pathlib import Path

import lightning
import pytest
import torch

import lightning_diffpipe
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.graph.side_effects import caller, is_of, is_users
from tests.graph.steps import Tower, rows, step

PACKAGES = [
    str(Path(torch.__file__).parent / "nn" / "modules" / "module.py"),
    torch._functorch.eager_transforms.__file__,
    lightning.pytorch.trainer.trainer.__file__,
    sys.modules["lightning_utilities"].__file__,
    sys.modules["lightning_diffpipe.graph.probe"].__file__,
]
USERS = [
    "/home/me/lightning/train.py", "/home/me/torch/models/unet.py", "/home/me/lightning_diffpipe/graph/train.py",
    "/opt/conda/envs/lightning/lib/python3.11/site-packages/diffusers/models/attention.py",
    str(Path(torch.__file__).parent.parent / "torch_extras" / "unet.py"), "train.py", "<stdin>",
]  # fmt: skip


@pytest.mark.parametrize("path", PACKAGES)
def test_code_of_packages_is_not_the_users(path):
    assert not is_users(path)


@pytest.mark.parametrize("path", USERS)
def test_code_of_users_is_theirs_in_whatever_folder(path):
    """History: errors named no line of a project, or of an environment, that was called like a package."""
    assert is_users(path)
    assert not is_of(path, "lightning_diffpipe")


def test_errors_name_lines_of_a_project_called_like_a_package():
    names = {}
    code = compile("def call(caller):\n    return caller()\n", "/home/me/lightning/a.py", "exec")
    exec(code, names)
    assert names["call"](caller) == "/home/me/lightning/a.py:2"


def test_the_strategy_is_of_this_package():
    path = str(Path(lightning_diffpipe.__file__).parent / "training" / "strategy.py")
    assert is_of(path, "lightning_diffpipe")
    assert is_users(path)  # but no probe


class Draws(Tower):
    """Draws from a generator of a class that cannot be pickled."""

    def __init__(self):
        super().__init__()

        class Own(random.Random):
            pass

        self.own, self.idle = Own(1), Own(2)

    def training_step(self, batch, batch_idx):
        return self.run(batch + self.own.random()).pow(2).mean()


@pytest.mark.parametrize("mode", ["fake", "real"])
def test_generators_of_any_class_are_found(mode):
    """History: they were pickled to see whether they had moved; probes ended with "Can't pickle"."""
    assert probe(Draws(), step, rows(), max_share=1 / 4, mode=mode).generators == {"own"}
