"""Steps that call their denoiser twice: stages of both passes share their layers, which lie on one rank once.

History: such a step trained correctly as one chain of twice as many layers: two ranks held 100 and 75 % of the
weights, and the pass without gradients was charged a backward.
"""

import math
import random

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torchmetrics import SumMetric

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.planning.instruction import Backward, ForwardNoGrad
from tests.distributed.scenarios import (
    Recorder,
    Settings,
    assert_equal_runs,
    assert_weights_are_shared_out,
    check_parity,
    fit_module,
    make,
    on_ranks,
    reference,
)
from tests.distributed.tiny import WIDTH, Coin, Data, TinyDiffusion, Twice
from tests.ranks import RankError
from tests.rows import row

pytestmark = pytest.mark.distributed


def check(
    num_ranks, num_microbatches=3, form="estimate", num_pipelines=1, module_class=Twice, module=(), **settings
):  # fmt: skip
    strategy = {"data_parallel": num_pipelines, **settings.pop("strategy", {})}
    outcomes, _ = check_parity(
        num_ranks, num_microbatches, num_pipelines, 1e-9, module_class=module_class,
        module={"form": form, **dict(module)}, strategy=strategy, **settings,
    )  # fmt: skip
    plan, ranks = outcomes[0].plan, num_ranks // num_pipelines
    assert plan.num_passes == 2
    size = len(plan.stages) // 2
    for first, second in zip(plan.stages[:size], plan.stages[size:], strict=True):
        assert first.ranks == second.ranks
    assert_weights_are_shared_out(outcomes[:ranks])
    held = [set(outcome.gradients[0]) for outcome in outcomes[:ranks]]
    twice = {name for a in range(ranks) for b in range(a) for name in held[a] & held[b]}
    # A pass itself calls `merge` several times, on several stages.
    assert {name.partition(".")[0] for name in twice} <= {"merge", "merge_weight"}
    return plan


def kinds(plan, stage):
    return {
        type(i) for program in plan.programs for i in program if getattr(i, "stage", None) == stage
    }


@pytest.mark.parametrize(("num_ranks", "filling"), [(2, "auto"), (3, "shares"), row(4, "auto")])
def test_self_conditioning(num_ranks, filling):
    plan = check(num_ranks, strategy={"filling": filling})
    assert plan.options.filling == ("shares" if filling == "auto" else filling)
    assert plan.pieces
    assert [stage.gradient for stage in plan.stages] == [False] * num_ranks + [True] * num_ranks
    for stage in range(num_ranks):
        assert kinds(plan, stage) == {ForwardNoGrad}


@pytest.mark.parametrize(
    ("num_ranks", "strategy"),
    [
        (2, {"schedule": "zero_bubble"}),
        (2, {"schedule": "interleaved", "num_stages": 4, "num_microbatches": 2}),
        (2, {"schedule": "v"}),
        row(3, {"schedule": "zero_bubble", "filling": "none"}),
    ],
)
def test_self_conditioning_with_other_schedules(num_ranks, strategy):
    check(num_ranks, strategy.get("num_microbatches", 3), strategy=strategy)


@pytest.mark.parametrize(
    ("num_ranks", "form"),
    [row(2, "both"), (3, "both"), (2, "detached"), (3, "teacher"), (3, "embedded")],
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


@pytest.mark.parametrize(
    ("module_class", "module", "max_steps"), [(Twice, {"tied": True}, 3), (Coin, {}, 2)]
)
def test_accumulation_and_clipping_in_two_pipelines(module_class, module, max_steps):
    trainer = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_steps": max_steps}
    check(
        4, 2, num_pipelines=2, module_class=module_class, module=module, data={"batch_size": 4},
        strategy={"num_stages": 2}, trainer=trainer,
    )  # fmt: skip


class Replaces(TinyDiffusion):
    """Its own layers with other weights give an estimate: of buffers or of a frozen module, or `computed`.

    With `gains` other buffers take part, too.
    """

    def __init__(self, weights):
        super().__init__()
        self.weights = weights
        self.names = [name for name, p in self.named_parameters() if p.requires_grad]
        others = [torch.randn_like(self.get_parameter(name)) / 4 for name in self.names]
        self.others = nn.ParameterList(others if weights == "module" else ()).requires_grad_(False)
        for index, other in enumerate(others if weights in ("buffers", "gains") else ()):
            self.register_buffer(f"other_{index}", other)
        self.gains = {}
        for index, block in enumerate(self.blocks if weights == "gains" else ()):
            block.register_buffer("gain", torch.tensor(1.5))
            block.register_forward_hook(lambda block, given, out: block.gain * out)
            self.gains[f"blocks.{index}.gain"] = 0.5 + index

    def other(self, index, name):
        if self.weights == "computed":
            return 0.9 * self.get_parameter(name)
        return self.others[index] if self.weights == "module" else getattr(self, f"other_{index}")

    def forward(self, *inputs):
        return super().denoise(*inputs)

    def denoise(self, *inputs):
        others = {name: self.other(index, name) for index, name in enumerate(self.names)}
        others |= {name: torch.tensor(gain).to(inputs[0]) for name, gain in self.gains.items()}
        with torch.set_grad_enabled(self.weights == "computed"):
            estimate = torch.func.functional_call(self, others, inputs)
        return super().denoise(*inputs) + 0.5 * estimate


@pytest.mark.parametrize(
    ("num_ranks", "weights", "filling"),
    [
        (2, "buffers", "auto"),
        (2, "module", "auto"),
        row(2, "computed", "auto"),
        row(3, "buffers", "shares"),
        row(3, "module", "none"),
        (2, "gains", "auto"),
        row(3, "gains", "auto"),
    ],
)
def test_layers_that_are_called_with_other_weights(num_ranks, weights, filling):
    """History: a run that paused in such a call left others its weights, and they took its gradients."""
    strategy = {"num_stages": num_ranks, "filling": filling}
    check_parity(
        num_ranks, tolerance=1e-9, module_class=Replaces, module={"weights": weights}, strategy=strategy
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_ranks", "coin", "strategy"),
    [
        row(2, "random", {"filling": "none"}),
        (2, "random", {}),
        row(2, "torch", {}),
        row(2, "bernoulli", {}),
        (2, "first", {"filling": "none"}),
        (3, "batch_idx", {}),
        row(4, "random", {"num_stages": 4}),
        row(3, "random", {"schedule": "zero_bubble", "filling": "none"}),
        row(2, "global_step", {}),
    ],
)
def test_steps_that_throw_a_coin_for_their_estimate(num_ranks, coin, strategy):
    """History: such a step was refused, as it calls other layers every time."""
    check(
        num_ranks, module_class=Coin, module={"coin": coin}, strategy=strategy, trainer={"max_steps": 4},
    )  # fmt: skip


COINS = random.Random(4)


class OwnCoin(Coin):
    """Throws its coin with a generator of its own, at the level of this file."""

    def training_step(self, batch, batch_idx):
        self.p = COINS.randrange(2)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_coin_of_a_generator_at_module_level_is_refused_by_its_name(num_ranks):
    """History: every run of the step's code moved it on, on each rank by itself."""
    with pytest.raises(RankError, match=r"draws random numbers from .*test_passes\.COINS, which"):
        on_ranks(num_ranks, module_class=OwnCoin)


@pytest.mark.parametrize("coin", ["calls", "calls_later"])
def test_a_counter_counts_batches(coin):
    """History: it was run on by every microbatch, on every stage, and not at all before training."""
    options = {"module_class": Coin, "trainer": {"max_steps": 4}}
    expected = reference(Settings(module={"coin": "batch_idx"}, **options), 3)
    outcomes = on_ranks(2, module={"coin": coin}, strategy={"num_microbatches": 3}, **options)
    assert_equal_runs(outcomes, expected, 1e-9)
    assert outcomes[0].plan.num_passes == 2


class SometimesMore(TinyDiffusion):
    """Calls a trained layer in every other batch only, by their number or by counting them itself."""

    def __init__(self, counts=False, **options):
        super().__init__(**options)
        self.more, self.counts, self.calls = nn.Linear(WIDTH, WIDTH), counts, 1

    def training_step(self, batch, batch_idx):
        self.calls_more = (self.calls if self.counts else batch_idx) % 2 == 0
        self.calls += 1
        return super().training_step(batch, batch_idx)

    def denoise(self, noisy, t, text):
        return super().denoise(noisy + self.more(noisy) if self.calls_more else noisy, t, text)


@pytest.mark.parametrize(
    ("num_pipelines", "counts", "strategy"),
    [
        # History: it got gradients of zero in batches that left it out, by which weight decay moved it.
        (2, False, {"num_stages": 1, "data_parallel": 2}),
        # History: it was not called in the first batch, so that no rank was planned to run it.
        (1, True, {"num_stages": 2, "filling": "none"}),
    ],
)
def test_a_layer_that_is_called_in_some_batches_only(num_pipelines, counts, strategy):
    _, expected = check_parity(
        2, 1, num_pipelines, 1e-9, module_class=SometimesMore, module={"counts": counts}, strategy=strategy,
        data={"batch_size": 4}, trainer={"max_steps": 4},
    )  # fmt: skip
    assert {"more.weight" in gradients for gradients in expected.gradients} == {True, False}


class Listing(Coin):
    """Keeps its losses in a list."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen.append(loss.item() if not isinstance(loss, FakeTensor) else 0.0)
        return loss


@pytest.mark.parametrize("coin", ["random", "global_step"])
def test_what_a_step_keeps_knows_nothing_of_trials(coin):
    """History: a call sequence that was met for the first time put a loss of NaN into such lists."""
    module = Listing(coin).double()
    module.seen = []
    fit_module(module, strategy={"num_microbatches": 3}, max_steps=4, max_epochs=-1)
    assert len(module.seen) == 4 * 3
    assert all(map(math.isfinite, module.seen))


class Reading(TinyDiffusion):
    """Reads a number that a layer gives, before others, and calls one of them if it is not zero."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(WIDTH, WIDTH)

    def denoise(self, noisy, t, text):
        size = int(100 * self.time(t[:, None]).abs().max())
        noisy = self.more(noisy) if size > 0 else noisy
        return super().denoise(noisy, t, text) * (1 + size / 100)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_that_reads_values_between_layers_has_one_call_sequence(num_ranks):
    """History: its calls were looked for with NaN in place of layers, of which it could make no whole number."""
    check_parity(num_ranks, module_class=Reading, strategy={"num_stages": num_ranks})


class Counting(TinyDiffusion):
    """Counts its microbatches, in a buffer and a list before all layers, in a metric and a list after them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_seen", torch.zeros(()))
        self.seen, self.seen_later, self.score = [], [], SumMetric(nan_strategy="disable")

    def training_step(self, batch, batch_idx):
        self.num_seen += 1
        self.seen.append(len(batch["image"]))
        loss = super().training_step(batch, batch_idx)
        self.score.update(loss.detach())
        self.seen_later.append(len(batch["image"]))
        return loss


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_what_a_step_counts_is_not_counted_where_its_calls_are_recognised(num_microbatches):
    """History: with one stage the first microbatch of every batch was counted twice."""
    module, recorder = make(Counting), Recorder()
    strategy = {"num_microbatches": num_microbatches}
    fit_module(module, 1, Data(batch_size=4), strategy, callbacks=[recorder])
    assert module.seen == module.seen_later == [4 // num_microbatches] * 6 * num_microbatches
    assert module.num_seen == len(module.seen)
    total = num_microbatches * sum(recorder.losses)
    assert float(module.score.compute()) == pytest.approx(total)


class Unforeseen(TinyDiffusion):
    """A hook lets it change at the third step, which nothing tells before training."""

    is_late = False

    def on_train_batch_start(self, batch, batch_idx):
        self.is_late = self.trainer.global_step >= 2


class Later(Unforeseen, Coin):
    """Estimates from the third step on, if a coin says so: more than was planned."""

    def __init__(self, later_p=0.5, **options):
        super().__init__(p=0.0, **options)
        self.later_p = later_p

    def training_step(self, batch, batch_idx):
        self.p = self.later_p if self.is_late else 0.0
        return super().training_step(batch, batch_idx)


def trains_a_late_sequence(num_ranks, max_steps, strategy, **module):
    """Planned with the call sequence of the first batches, and equal to one process."""
    outcomes, _ = check_parity(
        num_ranks, 4, tolerance=1e-9, strategy={"num_stages": num_ranks, **strategy},
        trainer={"max_steps": max_steps}, data={"batch_size": 4, "size": 56}, **module,
    )  # fmt: skip
    assert outcomes[0].plan.num_passes == 1


@pytest.mark.parametrize(
    ("num_ranks", "module", "strategy"),
    [
        row(2, {}, {"filling": "shares"}),
        row(2, {"later_p": 1.0}, {"schedule": "interleaved", "num_stages": 4}),
        (3, {"tied": True}, {"schedule": "zero_bubble"}),
    ],
)
def test_a_sequence_with_more_calls_than_were_planned(num_ranks, module, strategy):
    """History: where frozen layers had run for such a batch, the batches after it got the numbers of others."""
    trains_a_late_sequence(num_ranks, 7, strategy, module_class=Later, module=module)


class SecondLoss(Unforeseen):
    """Adds a second term from the third step on, of another call of all layers; may keep values of the first."""

    def __init__(self, reads=False):
        super().__init__()
        self.reads, self.terms = reads, []

    def loss(self, batch):
        loss = super().loss(batch)
        self.terms.append(loss.item() if self.reads else 1)
        if self.is_late:
            loss = loss + 0.5 * super().loss(batch)
        return loss


@pytest.mark.parametrize(
    ("num_ranks", "module_class", "module", "strategy"),
    [
        row(2, Later, {"form": "both"}, {"filling": "shares"}),
        (3, Later, {"form": "both", "later_p": 1.0, "tied": True}, {"schedule": "zero_bubble"}),
        (2, SecondLoss, {}, {}),
        (1, SecondLoss, {"reads": True}, {}),  # nothing is looked for before it runs
    ],
)
def test_a_late_sequence_that_begins_with_all_calls_of_a_known_one(
    num_ranks, module_class, module, strategy
):
    """History: it ended the run, as the code after the last layer, which alone tells, was not run before."""
    trains_a_late_sequence(num_ranks, 5, strategy, module_class=module_class, module=module)


def test_a_late_sequence_of_a_step_that_reads_values_ends_the_run():
    """Its code after the last layer, which alone tells, cannot be run without values."""
    with pytest.raises(
        RankError, match=r"(?s)its sequence has \d+ layer calls.*module, so that all"
    ):
        on_ranks(2, module_class=SecondLoss, module={"reads": True}, trainer={"max_steps": 5})


class ManySequences(TinyDiffusion):
    """Refines its prediction so many times as a die says."""

    def __init__(self, sides=3, **options):
        super().__init__(**options)
        self.sides = sides

    def denoise(self, noisy, t, text):
        for _ in range(random.randrange(self.sides)):
            with torch.no_grad():
                noisy = super().denoise(noisy, t, text)
        return super().denoise(noisy, t, text)


@pytest.mark.parametrize(
    ("module_class", "module", "num_passes"),
    [
        (Coin, {"p": 0.0}, 1),  # a coin that always falls alike is none
        (Coin, {"p": 1.0}, 2),
        (ManySequences, {}, 3),
    ],
)
def test_as_many_passes_are_planned_as_there_are(module_class, module, num_passes):
    outcomes, _ = check_parity(2, 4, tolerance=1e-9, module_class=module_class, module=module)
    assert outcomes[0].plan.num_passes == num_passes


def test_more_sequences_than_can_be_planned_are_refused():
    with pytest.raises(
        GraphError, match=r"has 1[0-2] call sequences.* 8 can be planned.*fewer coins"
    ):
        fit_module(make(ManySequences, sides=12), strategy={"num_microbatches": 1}, max_steps=1)
