"""Frozen weights stay in the type they are stored in, mapped from their files; the numbers are one process's."""

import pytest
import torch

from lightning_diffpipe.graph.placement import is_placeholder, stored_value
from tests.distributed.scenarios import Settings, build, check_parity, fit
from tests.distributed.stored import LINUX, Opened
from tests.distributed.tiny import Images
from tests.predictor import tiny_pipelines as tiny
from tests.rows import row

pytestmark = pytest.mark.distributed


def fit_and_look(rank, settings, world_size):
    """Notes types by component, and which frozen weights are mapped from their files after the run."""
    module = None

    class Kept(settings.module_class):
        def teardown(self, stage):
            nonlocal module
            module = self

    settings.module_class = Kept
    outcome = fit(rank, settings, world_size)
    named = dict(module.named_parameters())
    outcome.types = {(n.partition(".")[0], p.requires_grad): p.dtype for n, p in named.items()}
    frozen = {n: p for n, p in named.items() if not p.requires_grad}
    outcome.mapped = {n: stored_value(p) is not None for n, p in frozen.items()}
    return outcome


@LINUX
@pytest.mark.parametrize(
    ("name", "precision", "lora", "replicas"),
    [
        ("flux", "bf16-mixed", True, 1),
        row("flux", "bf16-mixed", True, (1, 2)),
        row("sdxl", "32-true", False, 1),
        row("flux", "32-true", True, 1),
        row("flux", "bf16-true", True, 1),
        row("flux", "bf16-mixed", False, 1),
        row("flux", "32-true", False, 1),
        row("sdxl", "bf16-mixed", True, 1),
        row("sdxl", "32-true", True, 1),
        row("sdxl", "bf16-true", False, 1),
    ],
)
def test_frozen_weights_keep_their_type(name, precision, lora, replicas, tmp_path):
    """History: each rank read every component in float32, and at the end of training got copies of all others."""
    folder = str(tmp_path / name)
    tiny.build(name, tmp_path / "parts").to(torch.bfloat16).save_pretrained(folder)
    settings = {"module": {"folder": folder, "lora": lora}, "module_class": Opened}
    # AdamW makes a whole step of a gradient that rounding has given the other sign.
    outcomes, _ = check_parity(
        2 if replicas == 1 else 3, tolerance=0.1 if precision == "bf16-true" else 1e-3, run=fit_and_look,
        data_class=Images, trainer={"precision": precision},
        strategy={"num_stages": 2, "num_replicas": replicas}, **settings,
    )  # fmt: skip
    half = torch.bfloat16
    denoiser = "transformer" if name == "flux" else "unet"
    frozen = dict(build(Settings(**settings)).named_parameters())
    for outcome in outcomes:
        trained = half if precision == "bf16-true" else torch.float32
        assert outcome.types[denoiser, True] == outcome.types["vae", False] == trained
        assert outcome.types["text_encoder", False] == half
        elsewhere = {n for n, is_mapped in outcome.mapped.items() if not is_mapped}
        assert {n.partition(".")[0] for n in elsewhere} <= {"vae"}
        for n in outcomes[0].mapped:
            assert torch.equal(outcome.weights[n], frozen[n].to(outcome.weights[n].dtype)), n


class Rewritten(Opened):
    """Writes frozen weights at the end of training, past all counts, as users may."""

    def on_train_end(self):
        for parameter in self.transformer.parameters():
            if not parameter.requires_grad and not is_placeholder(parameter):
                parameter.data.mul_(0.5)


def test_weights_that_are_written_are_not_taken_from_their_file(tmp_path):
    folder = str(tmp_path / "flux")
    tiny.build("flux", tmp_path / "parts").save_pretrained(folder)
    check_parity(
        2, tolerance=1e-4, module={"folder": folder, "lora": True}, module_class=Rewritten, data_class=Images,
        strategy={"num_stages": 2}, trainer={"max_steps": 2},
    )  # fmt: skip
