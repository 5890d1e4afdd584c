"""Two backbones of one step, in opposite directions: the numbers of one process."""

import random

import pytest
import torch

from lightning_diffpipe.callbacks.sample_images import SampleImages
from lightning_diffpipe.modules import CascadedDiffusion, Optimization
from tests.distributed.scenarios import assert_weights_are_shared_out, check_parity, on_ranks
from tests.distributed.tiny import Cascade, Images, TinyDiffusion
from tests.modules.tiny_parts import tiny_cascade
from tests.ranks import RankError
from tests.rows import row

pytestmark = pytest.mark.distributed


def check(num_ranks, num_microbatches=3, num_pipelines=1, strategy=(), **settings):
    settings = {"module_class": Cascade, **settings}
    options = {"data_parallel": num_pipelines, "schedule": "bidirectional", **dict(strategy)}
    outcomes, expected = check_parity(
        num_ranks, num_microbatches, num_pipelines, strategy=options, **settings
    )
    for outcome in outcomes:
        assert outcome.metrics.keys() == expected.metrics.keys()
        if num_pipelines == 1 and settings["module_class"] is Cascade and "module" not in settings:
            mean = (outcome.metrics["train/base"] + 0.5 * outcome.metrics["train/upscaler"]) / 1.5
            assert mean == pytest.approx(outcome.losses[-1], rel=1e-12), "logged with real values"
    return outcomes


@pytest.mark.parametrize(
    ("num_ranks", "filling"), [(2, "auto"), row(3, "none"), (3, "shares"), row(4, "auto")]
)
def test_two_backbones_in_opposite_directions(num_ranks, filling):
    outcomes = check(num_ranks, strategy={"filling": filling, "verify": True, "check_finite": True})
    plan = outcomes[0].plan
    down = [(rank,) for rank in range(num_ranks)]
    assert [stage.ranks for stage in plan.stages] == down + down[::-1]
    assert [stage.backbone for stage in plan.stages] == ["base"] * num_ranks + [
        "upscaler"
    ] * num_ranks
    for rank, outcome in enumerate(outcomes):
        held = {name.partition(".")[0] for name in outcome.gradients[0]}
        assert held == {"base", "upscaler"}, f"rank {rank} trains {held}"
    assert_weights_are_shared_out(outcomes)


def test_three_backbones_with_accumulation_and_clipping():
    """Every second one runs up; the last but one and the last are no pair."""
    plan = check(
        2,
        2,
        module={"form": "triple", "sizes": (2, 2)},
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    )[0].plan
    assert [stage.ranks for stage in plan.stages] == [(0,), (1,), (1,), (0,), (0,), (1,)]


class Seldom(Cascade):
    """Trains one of its backbones for some microbatches only, as a coin says."""

    def __init__(self, seldom):
        super().__init__()
        self.seldom = seldom

    def one(self, denoiser, latent, t, text):
        if denoiser is self.get_submodule(self.seldom) and random.random() < 0.5:
            return latent.new_zeros(()), latent
        return super().one(denoiser, latent, t, text)


@pytest.mark.parametrize("seldom", ["base", "upscaler"])
def test_a_coin_that_leaves_a_backbone_out(seldom):
    """History: its layers were given to a stage of the other one, and the program was out of order."""
    check(2, module_class=Seldom, module={"seldom": seldom}, strategy={"filling": "none"})


def test_two_pipelines_of_a_cascade_and_last_batches_that_are_smaller():
    check(4, 2, 2, data={"size": 20, "batch_size": 4}, module={"dropout": 0.1})


def test_auto_runs_backbones_apart_where_that_is_faster_and_as_a_chain_where_they_share_weights():
    strategy = {"schedule": "auto", "num_replicas": 1, "filling": "none"}
    plan = check(2, 2, strategy=strategy)[0].plan
    assert plan.options.schedule == "bidirectional"
    tied = check(2, 2, strategy=strategy, module={"form": "tied"})[0].plan
    assert tied.options.schedule != "bidirectional"


def test_a_base_that_is_frozen_is_frozen_work():
    plan = check(2, 2, module={"form": "frozen"}, strategy={"schedule": "auto"})[0].plan
    assert not any(name.startswith("base") for name in plan.layers)


def test_backbones_that_share_weights_are_refused_by_name_on_all_ranks():
    strategy = {"schedule": "bidirectional", "num_stages": "auto"}
    with pytest.raises(
        RankError, match=r"base\.entry\.weight is read by base\.entry and by upsc"
    ) as caught:
        on_ranks(2, module_class=Cascade, module={"form": "tied"}, strategy=strategy)
    assert str(caught.value).count("ConfigurationError: schedule=bidirectional runs backbones") == 2


class SideBySide(TinyDiffusion):
    """A user's module that trains two whole models of its own, with an optimizer group for each."""

    def __init__(self):
        super().__init__()
        self.second = TinyDiffusion(num_blocks=4)
        del self.second.encoder, self.second.text
        self.scheduler = False

    def training_step(self, batch, batch_idx):
        first = self.loss(batch)
        self.second.encoder, self.second.text = (
            (lambda image: self.encoder(image)),
            (lambda t: self.text(t)),
        )
        second = self.second.loss(batch)
        self.log("train/second", second)
        return first + 3 * second

    def configure_optimizers(self):
        of_second = [p for n, p in self.named_parameters() if n.startswith("second")]
        of_first = [
            p for n, p in self.named_parameters() if not n.startswith("second") and p.requires_grad
        ]
        return torch.optim.AdamW(
            [{"params": of_first, "lr": 1e-2}, {"params": of_second, "lr": 3e-3}]
        )


def test_two_models_side_by_side_in_a_module_of_a_users_own():
    plan = check(2, 3, module_class=SideBySide)[0].plan
    assert plan.stages[2].backbone == "second"


class Small(Images):
    """Made-up images of 8 x 8 pixels."""

    resolution = 8


class ReadyMade(CascadedDiffusion):
    """Tiny, and equal in every process."""

    def __init__(self):
        optimization = Optimization(lr=1e-2, warmup_steps=1)
        super().__init__(**tiny_cascade().parts, optimization=optimization)


def test_the_ready_made_cascade_learns_and_draws_what_it_does_in_one_process(tmp_path):
    """The module computes noise and losses in single precision, so that rounding may differ once in a while."""
    prompts = SampleImages(["digit four"], every_n_steps=3, num_inference_steps=2)
    [outcome, _], _ = check_parity(
        2, tolerance=1e-6, module_class=ReadyMade, data_class=Small, strategy={"schedule": "bidirectional"},
        trainer={"default_root_dir": tmp_path, "callbacks": [prompts]},
    )  # fmt: skip
    assert {stage.backbone for stage in outcome.plan.stages} == {"unet", "upscaler"}
    assert outcome.metrics["train/base_loss"] == pytest.approx(
        outcome.losses[-1] - outcome.metrics["train/upscaler_loss"]
    )
    assert (tmp_path / "samples" / "step_000003.png").is_file()
