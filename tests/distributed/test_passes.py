"""Steps that call their denoiser twice: stages of both passes share their layers, which lie on one rank once.

History: such a step trained correctly as one chain of twice as many layers: two ranks held 100 and 75 % of the
weights, and the pass without gradients was charged a backward.
"""

import pytest
import torch
from torch import nn

from lightning_diffpipe.planning.instruction import Backward, ForwardNoGrad
from tests.distributed.scenarios import (
    Settings,
    assert_equal_runs,
    build,
    fit,
    quick_strategy,
    quiet_trainer,
    reference,
    weights_of,
)
from tests.distributed.tiny import WIDTH, Data, TinyDiffusion
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


class Twice(TinyDiffusion):
    """Estimates first, and trains on the estimate (self-conditioning); or one of its relatives.

    Args:
        form: `estimate`; `detached`, made with gradients that nobody wants; `both`, which get gradients;
            `embedded`, with a trained layer in front of both; `teacher`, whose target the same network gives,
            without gradients, behind the pass that is trained.
    """

    def __init__(self, form="estimate", **options):
        super().__init__(**options)
        self.form, self.join = form, nn.Linear(2 * WIDTH, WIDTH)
        self.embed = nn.Linear(WIDTH, WIDTH) if form == "embedded" else nn.Identity()

    def denoise(self, noisy, t, text):
        noisy = self.embed(noisy)

        def once(estimate):
            joined = self.join(torch.cat([noisy, estimate], -1))
            return super(Twice, self).denoise(joined, t, text)

        if self.form == "teacher":
            student = once(torch.ones_like(noisy))
            with torch.no_grad():
                target = once(torch.zeros_like(noisy))
            return student + 0.5 * target
        with torch.set_grad_enabled(self.form in ("detached", "both")):
            estimate = once(torch.zeros_like(noisy))
        return once(estimate if self.form == "both" else estimate.detach())


def check(num_ranks, num_microbatches=3, form="estimate", num_pipelines=1, **settings):
    settings = Settings(module_class=Twice, **settings)
    settings.module = {"form": form, **settings.module}
    settings.trainer = {"max_steps": 3, "max_epochs": -1, **settings.trainer}
    expected = reference(settings, num_microbatches, num_pipelines)
    strategy = {"num_microbatches": num_microbatches, "data_parallel": num_pipelines}
    settings.strategy = {**strategy, **settings.strategy}
    outcomes = run_ranks(fit, num_ranks, settings, num_ranks)
    assert_equal_runs(outcomes, expected, 1e-9)
    plan, ranks = outcomes[0].plan, num_ranks // num_pipelines
    assert plan.num_passes == 2
    size = len(plan.stages) // 2
    for first, second in zip(plan.stages[:size], plan.stages[size:], strict=True):
        assert first.ranks == second.ranks
    held = [set(outcome.gradients[0]) for outcome in outcomes[:ranks]]
    twice = {name for a in range(ranks) for b in range(a) for name in held[a] & held[b]}
    # A pass itself calls `merge` several times, on several stages.
    assert {name.partition(".")[0] for name in twice} <= {"merge", "merge_weight"}
    return plan


def kinds(plan, stage):
    return {
        type(i) for program in plan.programs for i in program if getattr(i, "stage", None) == stage
    }


@pytest.mark.parametrize(("num_ranks", "filling"), [(2, "auto"), (3, "none"), (4, "auto")])
def test_self_conditioning(num_ranks, filling):
    plan = check(num_ranks, strategy={"filling": filling})
    assert [stage.gradient for stage in plan.stages] == [False] * num_ranks + [True] * num_ranks
    for stage in range(num_ranks):
        assert kinds(plan, stage) == {ForwardNoGrad}


@pytest.mark.parametrize(
    ("num_ranks", "strategy"),
    [
        (2, {"schedule": "zero_bubble"}),
        (2, {"schedule": "interleaved", "num_stages": 4, "num_microbatches": 2}),
        (2, {"schedule": "v"}),
        (3, {"schedule": "zero_bubble", "filling": "none"}),
    ],
)
def test_self_conditioning_with_other_schedules(num_ranks, strategy):
    check(num_ranks, strategy.get("num_microbatches", 3), strategy=strategy)


@pytest.mark.parametrize(
    ("num_ranks", "form"),
    [(2, "both"), (3, "both"), (2, "detached"), (3, "teacher"), (3, "embedded")],
)
def test_other_steps_of_two_passes(num_ranks, form):
    plan = check(num_ranks, form=form)
    gradients = {
        "both": [True] * num_ranks + [True] * num_ranks,
        "detached": [False] * num_ranks + [True] * num_ranks,
        "teacher": [True] * num_ranks + [False] * (num_ranks - 1) + [True],
        "embedded": [True] + [False] * (num_ranks - 1) + [True] * num_ranks,
    }[form]
    assert [stage.gradient for stage in plan.stages] == gradients
    if form == "embedded":
        assert Backward in kinds(plan, 0)


def test_self_conditioning_with_tied_weights_accumulation_and_clipping_in_two_pipelines():
    check(
        4,
        2,
        num_pipelines=2,
        module={"tied": True},
        data={"batch_size": 4},
        strategy={"num_stages": 2},
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    )


def train(rank, world_size, epochs, save=None, load=None):
    settings = Settings(module_class=Twice)
    strategy = quick_strategy(num_stages=world_size, num_microbatches=2)
    trainer = quiet_trainer(devices=world_size, strategy=strategy, max_epochs=epochs)
    module = build(settings)
    trainer.fit(module, datamodule=Data(size=12), ckpt_path=load)
    if save:
        trainer.save_checkpoint(save)
    return weights_of(module)


def test_self_conditioning_goes_on_from_a_checkpoint(tmp_path):
    path = tmp_path / "half.ckpt"
    straight = run_ranks(train, 1, 1, 2)[0]
    run_ranks(train, 2, 2, 1, path)
    for weights in run_ranks(train, 2, 2, 2, None, path):
        for name, value in straight.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-9)
