"""Frozen weights stay in the type they are stored in, mapped from their files; the numbers are one process's."""

import pytest
import torch

from lightning_diffpipe.graph.placement import is_placeholder, stored_value
from tests.distributed.scenarios import Settings, assert_equal_runs, build, fit, reference
from tests.distributed.stored import LINUX, Opened
from tests.distributed.tiny import Images
from tests.predictor import tiny_pipelines as tiny
from tests.ranks import run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed


def fit_and_look(rank, settings, world_size):
    """What a run leaves, types by component, and which frozen weights are mapped from their files after it."""
    own = []

    class Kept(settings.module_class):
        def teardown(self, stage):
            own[:] = [self]

    settings.module_class = Kept
    outcome = fit(rank, settings, world_size)
    named = dict(own[0].named_parameters())
    types = {(n.partition(".")[0], p.requires_grad): p.dtype for n, p in named.items()}
    mapped = {n: stored_value(p) is not None for n, p in named.items() if not p.requires_grad}
    return outcome, types, mapped


@LINUX
@pytest.mark.parametrize(
    ("name", "precision", "lora"),
    [
        ("flux", "bf16-mixed", True),
        row("sdxl", "32-true", False),
        row("flux", "32-true", True),
        row("flux", "bf16-true", True),
        row("flux", "bf16-mixed", False),
        row("flux", "32-true", False),
        row("sdxl", "bf16-mixed", True),
        row("sdxl", "32-true", True),
        row("sdxl", "bf16-true", False),
    ],
)
def test_frozen_weights_keep_their_type(name, precision, lora, tmp_path):
    """History: each rank read every component in float32, and at the end of training got copies of all others."""
    folder = str(tmp_path / name)
    tiny.build(name, tmp_path / "parts").to(torch.bfloat16).save_pretrained(folder)
    settings = Settings(
        module={"folder": folder, "lora": lora},
        module_class=Opened,
        data_class=Images,
        trainer={"max_steps": 3, "max_epochs": -1, "precision": precision},
    )
    expected = reference(settings, 2)
    settings.strategy = {"num_stages": 2, "num_microbatches": 2}
    outcomes, types, mapped = zip(*run_ranks(fit_and_look, 2, settings, 2), strict=True)
    # AdamW makes a whole step of a gradient that rounding has given the other sign.
    assert_equal_runs(outcomes, expected, 0.1 if precision == "bf16-true" else 1e-3)
    half = torch.bfloat16
    denoiser = "transformer" if name == "flux" else "unet"
    for rank in range(2):
        assert types[rank][denoiser, True] == (half if precision == "bf16-true" else torch.float32)
        assert types[rank]["text_encoder", False] == half
        assert types[rank]["vae", False] == (half if precision == "bf16-true" else torch.float32)
        elsewhere = {n for n, is_mapped in mapped[rank].items() if not is_mapped}
        assert {n.partition(".")[0] for n in elsewhere} <= {"vae"}
    frozen = dict(build(settings).named_parameters())
    for outcome in outcomes:
        for n in mapped[0]:
            assert torch.equal(outcome.weights[n], frozen[n].to(outcome.weights[n].dtype)), n


class ThroughData(torch.optim.Optimizer):
    """Writes weights so that no version counts it, as many published optimizers do."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-0.1)
        return loss


class Unseen(Opened):
    def configure_optimizers(self):
        return ThroughData([p for p in self.parameters() if p.requires_grad])


class Replaced(Opened):
    """Replaces frozen weights before training, past all counts."""

    def __init__(self, folder, lora):
        super().__init__(folder, lora)
        for block in self.transformer.single_transformer_blocks:
            block.proj_mlp.weight.data = block.proj_mlp.weight.data * 2


class Rewritten(Opened):
    """Writes frozen weights at the end of training, past all counts."""

    def on_train_end(self):
        for parameter in self.transformer.parameters():
            if not parameter.requires_grad and not is_placeholder(parameter):
                parameter.data.mul_(0.5)


@pytest.mark.parametrize("module_class", [row(Unseen), row(Replaced), Rewritten])
def test_weights_that_are_written_are_not_taken_from_their_file(module_class, tmp_path):
    """Trained ones stored in float32 are mapped as well, and written in place; users may write frozen ones."""
    folder = str(tmp_path / "flux")
    tiny.build("flux", tmp_path / "parts").save_pretrained(folder)
    settings = Settings(
        module={"folder": folder, "lora": module_class is not Unseen},
        module_class=module_class,
        data_class=Images,
        trainer={"max_steps": 2, "max_epochs": -1},
    )
    expected = reference(settings, 2)
    settings.strategy = {"num_stages": 2, "num_microbatches": 2}
    assert_equal_runs(run_ranks(fit, 2, settings, 2), expected, 1e-4)
