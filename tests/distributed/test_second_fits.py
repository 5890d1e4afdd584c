"""A process that trains again: what is known is not measured again, and what has changed is seen."""

import contextlib
from collections import Counter
from contextvars import ContextVar
from unittest import mock

import lightning as L
import pytest
import torch

from lightning_diffpipe.profiling.step_run import StepRun
from lightning_diffpipe.training import plan_source
from tests.distributed.scenarios import (
    Recorder,
    Settings,
    assert_equal_runs,
    fit_module,
    make,
    outcome,
    reference,
    weights_of,
)
from tests.distributed.tiny import Block, Data, TinyDiffusion
from tests.ranks import run_ranks


class Begun(TinyDiffusion):
    """Goes on from weights that training has made, with some parameters frozen."""

    def __init__(self, weights=None, frozen=()):
        super().__init__()
        self.weights, self.frozen = weights, frozen

    def setup(self, stage):
        self.load_state_dict(self.weights)
        for name in self.frozen:
            self.get_submodule(name).requires_grad_(False)


class Runs(L.Callback):
    """Notes how often the step, blocks and measurements have run when training begins."""

    def __init__(self):
        self.counts, self.before_training = Counter(), Counter()

    def on_train_start(self, trainer, module):
        self.before_training = self.counts.copy()

    def of(self, owner, name):
        """Counts calls of a function inside."""
        original, runs = getattr(owner, name), ContextVar("runs", default=self)

        def counted(*args, **kwargs):
            runs.get().counts[name if owner is not Block else "block"] += 1
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, counted)


def fit_in_turns(rank, world_size):
    """Fits with nothing changed, with a plan, and with one thing changed after the other."""
    module, plan, results = make(), None, []
    fits = [
        {}, {}, {"plan": True}, {"batch_size": 4}, {"frozen": ("blocks.1",)}, {"switch": True}, {"other": True}
    ]  # fmt: skip
    for change in fits:
        if "other" in change:
            torch.manual_seed(5)
            module = TinyDiffusion().double()
        for name in change.get("frozen", ()):
            module.get_submodule(name).requires_grad_(False)
        if "switch" in change:
            module.blocks[0].gradient_checkpointing = True
        runs, recorder, initial = Runs(), Recorder(), weights_of(module)
        counted = [
            (StepRun, "measure"), (plan_source, "measure_links"),
            (TinyDiffusion, "training_step"), (Block, "forward"),
        ]  # fmt: skip
        with contextlib.ExitStack() as stack:
            for each in counted:
                stack.enter_context(runs.of(*each))
            trainer = fit_module(
                module, world_size, Data(batch_size=change.get("batch_size", 6)),
                {"plan": plan} if "plan" in change else {"profile": "measure"},
                callbacks=[recorder, runs], max_steps=3, max_epochs=-1,
            )  # fmt: skip
        plan = plan or recorder.plan
        results.append((change, outcome(trainer, module, recorder, initial), runs.before_training))
    return results


@pytest.mark.slow
@pytest.mark.distributed
def test_fits_one_after_the_other_measure_what_has_changed_and_are_exact():
    """History: a fit after `enable_gradient_checkpointing` took times and bytes of layers from before."""
    ranks = run_ranks(fit_in_turns, 2, 2)
    frozen, measured = (), []
    for of_ranks in zip(*ranks, strict=True):
        change, first, runs = of_ranks[0]
        frozen = () if "other" in change else change.get("frozen", frozen)
        wanted = Settings(
            module={"weights": first.initial, "frozen": frozen},
            data={"batch_size": change.get("batch_size", 6)},
            trainer={"max_steps": 3, "max_epochs": -1},
            module_class=Begun,
        )
        assert_equal_runs([each for _, each, _ in of_ranks], reference(wanted, num_microbatches=2))
        measured.append((runs["measure"] > 0, runs["measure_links"]))
        if not runs["measure"]:  # of either rank: the first one compares losses
            assert [n["training_step"] for *_, n in of_ranks] == [22, 16]
            # How many of the four a fold runs depends on where the plan cuts; in all other runs a block is a
            # container of stubs, and each run of the step calls all four.
            assert max(n["block"] for *_, n in of_ranks) <= 70
    assert measured == [(True, 1), (False, 0), (False, 0), *[(True, 0)] * 4]
