"""What hooks of a user's own read, keep and decide on ranks of which each has a part of the model."""

from contextvars import ContextVar

import lightning as L
import pytest
import torch
from torch.nn.modules.module import register_module_full_backward_hook

from tests.distributed.scenarios import (
    Settings,
    assert_equal_runs,
    check_parity,
    fit,
    fit_module,
    on_ranks,
    reference,
)
from tests.distributed.tiny import Data, TinyDiffusion
from tests.ranks import RankError, run_in_turn

pytestmark = pytest.mark.distributed
NOTES = ContextVar("NOTES")


class BackwardHook(TinyDiffusion):
    """Halves the gradient that leaves modules of blocks that are on one stage, and so layers."""

    hooked = "norm"

    def __init__(self, **options):
        super().__init__(**options)
        for block in (self.blocks[0], self.blocks[-1]):
            block.get_submodule(self.hooked).register_full_backward_hook(self.halve)

    @staticmethod
    def halve(module, inputs, outputs):
        return tuple(None if gradient is None else 0.5 * gradient for gradient in inputs)


class HookOnBlocks(BackwardHook):
    hooked = ""


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_backward_hooks_inside_of_layers(schedule):
    check_parity(2, module_class=BackwardHook, strategy={"num_stages": 2, "schedule": schedule})


class HookOnAll(TinyDiffusion):
    """Puts a hook on all modules that there are, as tools that watch gradients do."""

    def setup(self, stage):
        self.handle = register_module_full_backward_hook(lambda *_: None)

    def teardown(self, stage):
        self.handle.remove()


class HookInHook(TinyDiffusion):
    """A hook puts another one at its first call, of which it keeps a note where no trial run restores it."""

    def __init__(self, **options):
        super().__init__(**options)
        NOTES.set(set())

        def first(module, inputs, output):
            if "done" not in NOTES.get():
                NOTES.get().add("done")
                module.register_forward_hook(lambda module, inputs, output: 1.1 * output)

        self.blocks[1].register_forward_hook(first)


class WritesToExpanded(TinyDiffusion):
    def on_train_batch_end(self, *args):
        rows = torch.zeros(1).expand(4)
        rows += 1


class WritesToForeign(TinyDiffusion):
    def on_train_batch_end(self, *args):
        with torch.no_grad():
            self.time.weight += 0
            self.head.weight += 0


@pytest.mark.parametrize(
    ("module_class", "message"),
    [
        # History: the hook of a block was not called for gradients of another stage, or got None for one.
        (HookOnBlocks, r"blocks.0 has a backward hook .* Put a hook on a tensor in"),
        (HookOnAll, r"all modules have a backward hook .* Remove it before"),
        # History: it was put on a copy that is looked at before training, and lost.
        (HookInHook, r"the step puts a hook on blocks.1, and leaves it"),
        # History: an expanded tensor of the user's own was called a weight of another rank.
        (WritesToExpanded, "RuntimeError: unsupported operation: more than one element"),
        (WritesToForeign, r"ForeignLayerError: .* lives on stage .*cannot read or write it"),
    ],
)
def test_hooks_that_cannot_work_end_the_run_with_the_reason(module_class, message):
    with pytest.raises(RankError, match=message) as raised:
        on_ranks(2, module_class=module_class)
    assert (module_class is WritesToForeign) == ("lives on stage" in str(raised.value))


class Scaled(TinyDiffusion):
    """Scales its loss by what a hook sets."""

    def training_step(self, batch, batch_idx):
        return self.scale * super().training_step(batch, batch_idx)


class ScaledFromTheStart(Scaled):
    def on_train_start(self):
        self.scale = 0.5


class ScaledInEpochs(ScaledFromTheStart):
    scale = None

    def on_train_start(self):
        pass

    def on_train_epoch_start(self):
        self.scale = 0.5 + self.current_epoch


class SetsScale(L.Callback):
    def on_fit_start(self, trainer, module):
        module.scale = 0.5


@pytest.mark.parametrize(
    ("module_class", "callbacks"),
    [(ScaledFromTheStart, []), (ScaledInEpochs, []), (Scaled, [SetsScale()])],
)
def test_a_step_that_lacks_what_a_hook_sets_hears_that_hooks_come_later(module_class, callbacks):
    """History: a module that trains in one process was said to have no such attribute, and no word why."""
    settings = Settings(
        module_class=module_class,
        trainer={"callbacks": callbacks},
        strategy={"num_microbatches": 1},
    )
    with pytest.raises((AttributeError, TypeError)) as raised:
        fit(0, settings, 1)
    assert any("hooks such as on_train_start come later" in note for note in raised.value.__notes__)


class AsTheGuideSays(TinyDiffusion):
    """Overrides a hook, holds its weights by name, and has a property that is not there before training."""

    def __init__(self, **options):
        super().__init__(**options)
        self.by_name = {**dict(self.named_parameters()), "encoder": torch.empty(0)}

    def on_before_optimizer_step(self, optimizer):
        self.norm = self.trainer.strategy.gradient_norm()


class Summary(L.Callback):
    num_batches = 0

    @property
    def share(self):
        return 1 / self.num_batches

    def on_train_batch_end(self, *args):
        self.num_batches += 1

    def on_train_epoch_end(self, *args):
        self.last = self.share


def test_what_hooks_may_read_is_trained_without_a_word():
    """History: properties were run, and weights by name were called copies."""
    steps = {"max_steps": 3}
    expected = reference(Settings(trainer=steps), 2)  # which has no norm of the strategy
    outcomes = on_ranks(2, module_class=AsTheGuideSays, trainer={**steps, "callbacks": [Summary()]})
    assert_equal_runs(outcomes, expected)


class Averages(L.Callback):
    """Averages weights in a hook, as scripts do by hand, for the end."""

    def __init__(self, hook):
        self.average = None
        setattr(self, hook, self.add)

    def add(self, trainer, module, *args):
        state = module.state_dict()
        self.average = {
            n: (v + (self.average or state)[n]) / 2 if v.is_floating_point() else v
            for n, v in state.items()
        }

    def on_fit_end(self, trainer, module):
        module.load_state_dict(self.average)


@pytest.mark.parametrize(
    ("hook", "max_epochs", "size"),
    [
        # For the end of these no test could wait.
        ("on_train_epoch_end", 10**6, 24),
        ("on_train_batch_end", 1, 10**5),
    ],
)
def test_averages_by_hand_are_refused(hook, max_epochs, size):
    """History: the module that came out of training had NaN for weights, without an error."""
    options = {"callbacks": [Averages(hook)], "max_epochs": max_epochs}
    with pytest.raises(
        RankError, match=r"ForeignLayerError: .* lives on stage .* lightning_diffpipe.EMA"
    ):
        on_ranks(2, data={"size": size}, trainer=options)


class StopsInHook(L.Callback):
    """Wants to stop in the second epoch, on one rank, in one of its hooks."""

    def __init__(self, hook, rank):
        self.rank, self.epochs = rank, []
        setattr(self, hook, self.stop)

    def stop(self, trainer, module):
        if trainer.current_epoch == 1 and trainer.global_rank == self.rank:
            trainer.should_stop = True

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.epochs.append(trainer.current_epoch)


def stop_in_hook(rank, hook, stopping):
    callback = StopsInHook(hook, stopping)
    fit_module(world_size=2, data=Data(size=12, batch_size=6), callbacks=[callback], max_epochs=3)
    return callback.epochs


HOOKS = ("on_validation_start", "on_validation_end", "on_train_epoch_start", "on_train_epoch_end")


def test_a_stop_on_rank_0_in_other_hooks_stops_all_ranks():
    """History: the other one waited for its messages until `timeout_s`."""
    runs = [(hook, rank) for hook in HOOKS for rank in (0, 1)]
    for (hook, rank), epochs in zip(runs, run_in_turn(stop_in_hook, 2, *runs), strict=True):
        assert epochs[0] == epochs[1], (hook, rank)
        last = 0 if hook == "on_train_epoch_start" else 1
        assert max(epochs[0]) == (last if rank == 0 else 2), (hook, rank)
