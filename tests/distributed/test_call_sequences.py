"""Steps that do not do the same for every batch: the product of what differs, how, and what decides it.

Each row trains like one process. Many rows run in the same processes.

History: a coin over the only frozen layer was an AssertionError, a parameter that stood in for a layer made all
weights NaN, and a term of the loss that came and went did so to the loss.
"""

import array
import contextlib
import ctypes
import itertools
import operator
import random
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_diffpipe import DiffPipeStrategy
from lightning_diffpipe.errors import ConfigurationError, GraphError, PlanError
from lightning_diffpipe.graph.call_sequences import survey
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.graph.probed_step import probe_step
from lightning_diffpipe.training.refusals import refuse_carried_state
from lightning_diffpipe.training.verification import MeanCheck
from tests.distributed.scenarios import (
    Settings,
    assert_equal_runs,
    check_parity,
    fit,
    fit_module,
    make,
    reference,
)
from tests.distributed.tiny import Stream, TinyDiffusion
from tests.nccl_like import pretend_nccl
from tests.ranks import RankError, run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed

WIDTH, BATCH = 4, 4
WHAT = ("frozen", "trained", "parameter", "term", "replaced")
HOW = ("left out", "added", "repeated")
BY = ("random", "torch", "batch_idx", "shape", "first")
LATE = ("step", "epoch", "last")


class Varying(L.LightningModule):
    """Does something so many times as its coin says.

    Args:
        what: What that is: a call of the only `frozen` layer, or of a `trained` one, a `parameter` that is read
            between layers, a `term` of the loss on a layer that nothing else reads, or a parameter in place of the
            frozen layer (`replaced`); or frozen layers get another `input`, or another plain `number`; or a
            `hidden` state is a term of the loss.
        how: Where the coin falls so that it is `left out`, `added` or `repeated`.
        by: What the coin is.
    """

    def __init__(self, what, how, by):
        super().__init__()
        self.what, self.how, self.by = what, how, by
        block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.text = (Scaled() if what == "number" else block()).requires_grad_(False).eval()
        self.blocks = nn.ModuleList(block() for _ in range(6))
        self.aux, self.null = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def times(self, x, batch_idx):
        coin = {
            "random": lambda: random.random() < 0.5,
            "torch": lambda: bool(torch.rand(()) < 0.5),
            "batch_idx": lambda: batch_idx % 2 == 1,
            "shape": lambda: x.shape[1] > 2,
            "first": lambda: batch_idx > 0,
            "step": lambda: self.trainer.global_step >= 2,
            "epoch": lambda: self.current_epoch >= 1,
            "last": lambda: batch_idx == 2,
            "hook": lambda: self.flag,
            "rate": lambda: 100 * self.optimizers().param_groups[0]["lr"],
        }[self.by]()
        return {"left out": 1 - coin, "added": coin, "repeated": 1 + coin}[self.how]

    def training_step(self, batch, batch_idx):
        x, c, loss = batch["x"], batch["c"], 0.0
        times = self.times(x, batch_idx)
        uses = lambda what: range(times if self.what == what else 1)
        s = c * (2 + times) if self.what == "input" else c
        if self.what == "replaced":
            s = self.null.expand_as(c) * times if times else self.text(c)
        else:
            for _ in uses("frozen"):
                s = self.text(s, 1 + times) if self.what == "number" else self.text(s)
            for _ in uses("parameter"):
                s = s + self.null
        for index, block in enumerate(self.blocks):
            if index == 1 and self.what == "hidden":
                inside = block[0](x)
                x = x + block[2](inside.tanh())
                loss = loss + 0.3 * inside.square().mean() if times else loss
            for _ in uses("trained") if index == 2 else range(1):
                x = x + block(x + s)
            if index == 1:
                early = self.aux(x)
        for _ in uses("term"):
            loss = loss + 0.3 * early.square().mean()
        return loss + F.mse_loss(x, c)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class Scaled(nn.Module):
    """A frozen module whose own code uses a number of Python's, after its layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale):
        return self.layer(x) * scale


class Batches(L.LightningDataModule):
    """Whole batches, of lengths that take turns."""

    def __init__(self, lengths, batch_size):
        super().__init__()
        one = lambda length: {
            key: torch.randn(batch_size, length, WIDTH, dtype=torch.float64) for key in "xc"
        }
        torch.manual_seed(5)
        self.batches = [one(lengths[i % len(lengths)]) for i in range(4)]

    def train_dataloader(self):
        return DataLoader(self.batches, batch_size=None)


def settings_of(what, how, by, num_microbatches, strategy):
    lengths = (2,)
    if by == "shape":  # the first batch calls all layers
        is_longer_first = how == ("left out" if what == "replaced" else "added")
        lengths = (3, 2) if is_longer_first else (2, 3)
    trainer = {"max_steps": 4, "max_epochs": -1}
    if by in LATE:
        trainer = {"max_epochs": 2, "limit_train_batches": 3}
    return Settings(
        {"what": what, "how": how, "by": by}, {"lengths": lengths, "batch_size": BATCH}, trainer,
        {"num_microbatches": num_microbatches, **strategy}, Flagged if by in ("hook", "rate") else Varying, Batches,
    )  # fmt: skip


def fit_all(rank, cases, world_size, nccl):
    """Returns what came out of each, or what ended it."""
    if nccl:
        pretend_nccl()
    outcomes = []
    for settings in cases:
        try:
            outcomes.append(fit(rank, settings, world_size))
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


def train_like_one_process(rows, num_ranks, nccl=False):
    """Trains with all rows; they are `what, how, by, num_microbatches, fills`."""
    cases = []
    for what, how, by, num_microbatches, fills in rows:
        strategy = {"num_stages": num_ranks, "filling": "auto" if fills else "none"}
        if nccl:
            strategy["process_group_backend"] = "nccl"
        cases.append(settings_of(what, how, by, num_microbatches, strategy))
    found = []
    for first in range(0, len(cases), 5):  # so that no process trains too often
        some = cases[first : first + 5]
        found += zip(
            *run_ranks(fit_all, num_ranks, some, num_ranks, nccl, timeout_s=200), strict=True
        )
    wrong = {}
    for values, settings, outcomes in zip(rows, cases, found, strict=True):
        try:
            assert not isinstance(outcomes[0], str), outcomes
            expected = reference(settings, settings.strategy["num_microbatches"])
            assert_equal_runs(outcomes, expected, 1e-9)
        except AssertionError as error:
            wrong[values] = str(error)
    assert not wrong, wrong


def rows_of(turn, shift=0):
    """Every pair of what and how, each with other coins in each of five turns.

    In each of six shifts these have other microbatches and filling.
    """
    return [
        (what, how, BY[(i + 2 * turn) % 5], (1, 2, 4)[j % 3], (i // 2 + turn + shift) % 2 == 0)
        for i, (what, how) in enumerate(itertools.product(WHAT, HOW))
        for j in (i + turn + shift,)
    ]


@pytest.mark.parametrize(
    ("num_ranks", "nccl", "rows"),
    [
        (2, False, rows_of(0)[::2]),
        *(
            row(num_ranks, nccl, rows_of(turn, shift))
            for shift, (num_ranks, nccl) in enumerate(
                [(2, False), (2, True), (3, True), (3, False), (1, False)]
            )
            for turn in range(5)
        ),
    ],
)
def test_steps_that_vary_train_like_one_process(num_ranks, nccl, rows):
    train_like_one_process(rows, num_ranks, nccl)


def late_rows(turn):
    """Every pair of what and how, each with another decision, microbatches and filling in each of three turns."""
    pairs = enumerate(itertools.product((*WHAT, "input"), HOW))
    return [(w, h, LATE[(i + turn) % 3], (1, 2)[i % 2], i % 3 == 0) for i, (w, h) in pairs]


@pytest.mark.parametrize(
    ("num_ranks", "rows"),
    [
        (2, [("trained", "added", "step", 2, True), ("term", "left out", "last", 2, False),
             ("input", "added", "step", 1, True), ("number", "added", "step", 1, True)]),
        *(row(num_ranks, late_rows(turn)) for num_ranks in (1, 2, 3) for turn in range(3)),
    ],
)  # fmt: skip
def test_what_begins_or_ends_late_trains_like_one_process(num_ranks, rows):
    """History: such layers ended the run when they came; a term that ended left zeros where no gradient was."""
    train_like_one_process(rows, num_ranks)


class Flagged(Varying):
    """A hook decides, or sets the learning rate, which nothing knows of before training."""

    flag = False

    def on_train_batch_start(self, batch, batch_idx):
        self.flag = batch_idx == 0
        self.optimizers().param_groups[0]["lr"] = 1e-2 / (1 + batch_idx)


@pytest.mark.parametrize(
    ("what", "by", "num_microbatches", "said"),
    [
        ("input", "hook", 1, "for frozen layers of batch 1 was .*filling=none"),
        ("input", "rate", 2, "for frozen layers of batch 1 was .*filling=none"),
        (
            "hidden",
            "hook",
            2,
            "the loss of batch 0 is not finite, as the loss, .* now reads output",
        ),
    ],
)
def test_what_hooks_set_unforeseen_ends_the_run(what, by, num_microbatches, said):
    """History: frozen layers that ran ahead got what was set before, so that losses were silently others."""
    settings = settings_of(what, "added", by, num_microbatches, {"num_stages": 2})
    outcomes = [each for (each,) in run_ranks(fit_all, 2, [settings], 2, False)]
    assert any(re.search(said, str(each)) for each in outcomes), outcomes


def test_frozen_layers_that_run_when_due_get_what_hooks_set():
    """The cure."""
    rows = [("input", "added", by, number, False) for by, number in (("hook", 1), ("rate", 2))]
    train_like_one_process(rows, 2)


class Scheduled(Flagged):
    """A hook sets a number in its frozen encoder, which the encoder's own code reads."""

    def __init__(self, what, how, by):
        super().__init__(what, how, by)
        self.text = Faded().requires_grad_(False).eval()

    def on_train_batch_start(self, batch, batch_idx):
        super().on_train_batch_start(batch, batch_idx)
        if self.how == "added":
            self.text.strength = 1.0 / (1 + batch_idx // 2)
            self.text.held["shift"] = batch_idx

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if pipeline := getattr(self.trainer.strategy, "pipeline", None):
            self.log("ahead", float(pipeline.runs_ahead))


class Faded(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.strength, self.calls = nn.Linear(WIDTH, WIDTH), 1.0, 0
        self.held = {"shift": 0}

    def forward(self, x):
        self.calls += 1  # which is no reason to run when a batch is due
        return self.layer(x) * self.strength + self.held["shift"]


@pytest.mark.parametrize(("how", "runs_ahead"), [("added", 0), ("left out", 1)])
def test_numbers_that_hooks_set_in_frozen_layers_count_from_their_batch_on(how, runs_ahead):
    """History: frozen layers that ran ahead read those of the batch before."""
    settings = settings_of("none", how, "hook", 2, {"num_stages": 2, "filling": "shares"})
    settings = replace(settings, module_class=Scheduled)
    outcomes = [each for (each,) in run_ranks(fit_all, 2, [settings], 2, False)]
    assert [outcome.metrics.pop("ahead") for outcome in outcomes] == [runs_ahead] * 2
    assert_equal_runs(outcomes, reference(settings, 2), 1e-9)


def test_a_term_that_is_left_out_unforeseen_ends_the_run():
    """History: its layer had a gradient of zeros, which made AdamW take another step without a word."""
    settings = settings_of("term", "left out", "hook", 2, {"num_stages": 2})
    settings.data["lengths"] = (2,)
    outcomes = [each for (each,) in run_ranks(fit_all, 2, [settings], 2, False)]
    assert any("Multiply by 0" in each for each in outcomes), outcomes


class Readers(Flagged):
    """Two outputs of a layer are read in several places, some of which its first batch leaves out.

    Args:
        left_out: Indices of the blocks, of which `LOSS` is one past the last.
    """

    def __init__(self, left_out):
        super().__init__("none", "added", "hook")
        self.left_out, self.aux = left_out, Pair()

    def training_step(self, batch, batch_idx):
        x, pair = batch["x"], self.aux(batch["x"])
        reads = lambda index: index in READERS and not (self.flag and index in self.left_out)
        for index, block in enumerate(self.blocks):
            x = x + block(x + pair[index % 2] if reads(index) else x)
        loss = F.mse_loss(x, batch["c"])
        return loss + 0.3 * pair[0].square().mean() if reads(LOSS) else loss


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        return self.layer(x).chunk(2, -1)


LOSS = 6
READERS = (1, 3, LOSS)  # one in each of three stages


@pytest.mark.parametrize(
    ("num_ranks", "schedule"),
    [
        (2, "1f1b"), row(2, "zero_bubble"), row(3, "1f1b"), row(3, "zero_bubble"), row(2, "interleaved"),
        row(2, "v"),
    ],
)  # fmt: skip
def test_only_what_all_stages_leave_out_ends_the_run(num_ranks, schedule):
    """History: where several stages, or one of its own, read a layer, it silently had a gradient of zeros."""
    strategy = {"num_stages": num_ranks * (1 + (schedule in ("interleaved", "v")))}
    strategy["schedule"] = schedule
    some = [left for n in range(3) for left in itertools.combinations(READERS, n)]
    cases = [
        replace(
            settings_of("none", "added", "hook", 2, strategy),
            module={"left_out": left}, module_class=Readers,
        )
        for left in (READERS, *some)
    ]  # fmt: skip
    ends, *trains = zip(
        *run_ranks(fit_all, num_ranks, cases, num_ranks, False, timeout_s=200), strict=True
    )
    assert all("leave out what is made of aux" in each for each in ends), ends
    for settings, outcomes in zip(cases[1:], trains, strict=True):
        assert_equal_runs(outcomes, reference(settings, 2), 1e-9)


class Uneven(Readers):
    """Some pipelines leave all that reads a layer out of some batches; each is a pair of their numbers."""

    def __init__(self, absent):
        super().__init__(READERS)
        self.absent, self.calls = absent, 0

    def on_train_batch_start(self, batch, batch_idx):
        self.calls = 0
        if isinstance(self.trainer.strategy, DiffPipeStrategy):
            self.flag = (self.trainer.strategy.pipeline.mesh.pipeline, batch_idx) in self.absent

    def training_step(self, batch, batch_idx):
        if not isinstance(self.trainer.strategy, DiffPipeStrategy):
            # One process runs the two microbatches of each pipeline in turn.
            self.flag = (self.calls // 2, batch_idx) in self.absent
            self.calls += 1
        return super().training_step(batch, batch_idx)


class Dealt(Batches):
    """Batches of several pipelines, dealt out row by row."""

    def __init__(self, num_pipelines, batch_size):
        super().__init__((2,), BATCH * num_pipelines)
        self.num_shares = num_pipelines * BATCH // batch_size

    def train_dataloader(self):
        rank = self.trainer.distributed_sampler_kwargs["rank"] if self.num_shares > 1 else 0
        rows = slice(rank % self.num_shares, None, self.num_shares)
        cut = [{key: value[rows] for key, value in batch.items()} for batch in self.batches]
        return DataLoader(cut, batch_size=None)


FIRST, SECOND = ((0, 0), (1, 0)), ((0, 1), (1, 1))  # batches of both pipelines


@pytest.mark.parametrize(
    ("num_pipelines", "accumulate", "trains", "ends"),
    [
        (1, 2, [FIRST, SECOND], [FIRST + SECOND]),
        row(2, 1, [FIRST[:1], FIRST[1:] + SECOND[:1]], [FIRST]),
        row(2, 2, [FIRST + SECOND[:1], FIRST[1:] + SECOND[:1]], [FIRST + SECOND]),
    ],
)
def test_what_some_batches_of_an_optimizer_step_read_trains(
    num_pipelines, accumulate, trains, ends
):
    """History: the first batch without it ended the run, though others gave its layer a gradient."""
    world_size, trainer = 2 * num_pipelines, {"max_steps": 2, "accumulate_grad_batches": accumulate}
    base = settings_of(
        "none", "added", "hook", 2, {"num_stages": 2, "data_parallel": num_pipelines}
    )
    cases = [
        replace(
            base, module={"absent": absent}, module_class=Uneven, data_class=Dealt,
            data={"num_pipelines": num_pipelines, "batch_size": BATCH}, trainer=trainer,
        )
        for absent in (*trains, *ends)
    ]  # fmt: skip
    found = zip(*run_ranks(fit_all, world_size, cases, world_size, False), strict=True)
    for settings, outcomes in zip(cases, found, strict=True):
        if settings.module["absent"] in trains:
            assert_equal_runs(outcomes, reference(settings, 2, num_pipelines), 1e-9)
        else:
            assert all("leave out what is made of aux" in each for each in outcomes), outcomes


class AtLast(Readers):
    def on_train_batch_start(self, batch, batch_idx):
        self.flag = batch_idx == 3


def fit_without_flush(rank, module_class, left_out, world_size):
    module, strategy = make(module_class, left_out=left_out), {"schedule": "pipedream_2bw"}
    fit_module(module, world_size, Batches((2,), BATCH), strategy, max_steps=4)


@pytest.mark.parametrize("module_class", [Readers, row(AtLast)])
@pytest.mark.parametrize("num_ranks", [2, row(3)])
def test_what_all_stages_leave_out_ends_a_run_without_flushes(num_ranks, module_class):
    run_ranks(fit_without_flush, num_ranks, module_class, READERS[1:], num_ranks)
    with pytest.raises(RankError, match="leave out what is made of aux"):
        run_ranks(fit_without_flush, num_ranks, module_class, READERS, num_ranks)


@pytest.mark.parametrize("what", ["frozen", "trained"])
@pytest.mark.parametrize("how", ["left out", "repeated"])
def test_one_rank_runs_what_no_trial_has_called(what, how):
    """It has all layers, so that it looks for call sequences only after one that was not probed."""
    settings = settings_of(what, how, "hook", 2, {"num_stages": 1})
    assert_equal_runs([fit(0, settings, 1)], reference(settings, 2), 1e-9)


def fit_by_a_plan_that_fills(rank, world_size):
    """Plans where frozen input follows the number of the batch, and trains where it follows the step."""
    strategy = {"num_stages": 2, "filling": "shares"}
    plan = fit(rank, settings_of("input", "added", "batch_idx", 2, strategy), world_size).plan
    with pytest.raises(
        PlanError, match=r"follows the step .*plan again with strategy\.filling=none"
    ):
        fit(rank, settings_of("input", "added", "step", 2, {"plan": plan}), world_size)
    return plan.options.filling


def test_a_plan_that_fills_is_refused_where_frozen_input_follows_the_step():
    """History: it was refused as if `filling=none` had been asked for, and the advice was to leave that out."""
    assert run_ranks(fit_by_a_plan_that_fills, 2, 2) == ["shares", "shares"]


class Unsized(Batches):
    """The same batches, from a loader that does not know how many there are."""

    def train_dataloader(self):
        return DataLoader(Stream(self.batches), batch_size=None)


def test_a_layer_of_a_later_epoch_is_foreseen_though_no_loader_knows_its_length():
    """History: moments were those of the first epoch, and the run ended in the second."""
    settings = settings_of("trained", "added", "epoch", 2, {"num_stages": 1})
    settings = replace(settings, data_class=Unsized)
    assert_equal_runs([fit(0, settings, 1)], reference(settings, 2), 1e-9)


class Clips(Varying):
    """Its frozen encoder, which is one layer for short clips, hands a cache from call to call for longer ones."""

    def __init__(self):
        super().__init__("none", "added", "first")
        self.text = Streaming().requires_grad_(False).eval()


class Streaming(nn.Module):
    """Encodes a clip step by step, and keeps what it has seen in a list, as autoencoders of videos do."""

    def __init__(self):
        super().__init__()
        self.encoder = StepEncoder()

    def forward(self, clip):
        seen = []
        return torch.cat([self.encoder(step, seen) for step in clip.split(1, 1)], 1)


class StepEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)

    def forward(self, step, seen):
        hidden = self.first(step).tanh()
        if seen:
            hidden = hidden + self.merge(seen.pop())
        seen.append(hidden)
        return self.second(hidden)


@pytest.mark.parametrize("lengths", [(1, 3), row((3, 1)), row((1, 2, 4))])
def test_clips_of_several_lengths_in_any_order(lengths):
    """History: a batch of longer clips than the first one's ended the run."""
    check_parity(
        2, tolerance=1e-9, module_class=Clips, data_class=Batches, strategy={"num_stages": 2},
        data={"lengths": lengths, "batch_size": BATCH}, trainer={"max_steps": 4},
    )  # fmt: skip


def test_a_layer_that_comes_first_with_a_later_shape_is_named():
    settings = settings_of("frozen", "added", "shape", 2, {"num_stages": 1})
    settings.data = {"lengths": (2, 3), "batch_size": BATCH}
    with pytest.raises(GraphError, match="the step calls text, which it did not call when"):
        fit(0, settings, 1)


SEARCHED = {
    "nothing": (3 + 2, lambda: 1),
    "a number that is not drawn": (3 + 2, lambda: float(torch.ones(3)[1])),
    "a counter": (3 + 32, None),
    "a number that is drawn": (5 + 4, lambda: float(torch.rand(()))),
    "Python's": (5 + 4, lambda: random.random()),
    "numpy's": (5 + 4, lambda: float(np.random.rand())),
    "draws until one is small": (5 + 4, lambda: draw_until_small()),
    "an order, of which no number is seen": (5 + 1 + 32, lambda: random.choice([0.5, 1.0])),
    "torch's coin": (5 + 4 + 32, lambda: 1 + bool(torch.rand(()) < 0.1)),
    "Python's coin": (5 + 4 + 32, lambda: 1 + (random.random() < 0.1)),
    "coins apart": (5 + 4 + 32, lambda: 1 + (random.random() < 0.1 and random.random() > 0.9)),
}
"""What a step reads: the most runs in search of coins, and what gives the factor, or so many calls of a layer."""


def draw_until_small():
    while torch.rand(()) > 0.1:
        pass
    return 1.0


@pytest.mark.parametrize("reads", SEARCHED)
def test_runs_in_search_of_coins(reads):
    """As few as tell whether what is drawn, counted or read decides what is called; 32 more if it does."""
    most, read = SEARCHED[reads]
    module, runs = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    module.count = 0

    def step(module, batch):
        runs.append(1)
        module.count += read is None
        factor = read() if read else 1
        for _ in range(factor if isinstance(factor, int) else 1):
            batch = module(batch * factor)
        return batch.square().mean()

    batch = torch.randn(2, 2)
    graph = probe(module, step, batch)
    runs.clear()
    _, sequences = survey(module, step, batch, graph, lambda *numbers: 100 + sum(numbers))
    assert most - 3 <= len(runs) <= most if most > 38 else len(runs) == most
    assert (sequences.widest is not None) == (reads in ("torch's coin", "Python's coin"))
    assert sequences.throws_coins == (most not in (5, 35))


class Slots:
    __slots__ = ("n",)


def counts():
    n = 0
    while True:
        n += 1
        yield n


def closure():
    numbers = counts()
    return lambda: next(numbers)


def counter():
    n = 0

    def count():
        nonlocal n
        n += 1
        return n

    return count


NUMBERS = itertools.cycle([1, 2, 3])


class Counting(nn.Sequential):
    """Counts its steps somewhere."""

    of_class = 0

    def __init__(self):
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))
        self.seen, self.share, self.numbers = {"steps": 0}, 0.0, itertools.count(1)
        self.place, self.array, self.slots = SimpleNamespace(steps=0), np.zeros(1), Slots()
        self.listed, self.closed, self.slots.n = iter([1, 2] * 99), closure(), 0
        self.cell, self.memory, self.of_c = counter(), array.array("d"), ctypes.c_int(0)
        self.pairs = zip(range(1, 99), itertools.cycle("ab"), strict=False)
        self.list = [torch.zeros(())]

    def count(self, where):
        def added(owner, name):
            setattr(owner, name, operator.iadd(getattr(owner, name, 0), 1))
            return getattr(owner, name)

        if where == "seen":
            self.seen["steps"] += 1
        elif where == "list":
            self.list[0] += 1
        elif where == "memory":
            self.memory.append(0)
        return {
            "seen": lambda: self.seen["steps"], "Counting.of_class": lambda: added(Counting, "of_class"),
            "share": lambda: int(added(self, "share")), "place": lambda: added(self.place, "steps"),
            "numbers": lambda: next(self.numbers), "steps": lambda: added(self, "steps"),
            "array": lambda: int(added(self, "array")[0]), "list": lambda: self.list[0].clone(),
            "slots": lambda: added(self.slots, "n"), "counts": lambda: next(self.counts),
            "listed": lambda: next(self.listed), "pairs": lambda: next(self.pairs)[0],
            f"{__name__}.NUMBERS": lambda: next(NUMBERS), "closed": lambda: self.closed(),
            "cell": lambda: self.cell(), "memory": lambda: len(self.memory),
            "number of C": lambda: added(self.of_c, "value"), "nothing": lambda: 1,
            "clock": lambda: 1 + 1e4 * time.perf_counter() % 1,  # in float32, too, another at once
        }[where]()  # fmt: skip


NAMED = (
    "seen",
    "Counting.of_class",
    "share",
    "place",
    "numbers",
    "counts",
    "listed",
    "pairs",
    f"{__name__}.NUMBERS",
    "array",
    "list",
)
PLACES = (*NAMED, "slots", "closed", "cell", "memory", "number of C", "clock")


def plan_of(num_ranks, num_microbatches):
    return SimpleNamespace(ranks_per_pipeline=num_ranks, num_microbatches=num_microbatches)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("where", [*PLACES, "steps", "nothing"])
def test_state_that_a_step_reads_again_is_named(where, early, monkeypatch):
    """History: runs before training silently counted on what was no number in a place that was looked at."""
    monkeypatch.setattr(Counting, "of_class", 0)
    monkeypatch.setattr(sys.modules[__name__], "NUMBERS", itertools.cycle([1, 2, 3]))

    def step(module, batch):
        count = module.count(where)
        return module(batch * count if early else batch).square().mean() * (1 if early else count)

    module = Counting()
    if where == "counts":
        module.counts = counts()  # with which it cannot be copied
    carried = probe_step(module, step, torch.randn(4, 2), 4, seed=1).sequences.carried
    assert (carried is not None) == (where in PLACES)
    if carried is not None:
        assert carried.names == ((where,) if where in NAMED else ())
        assert carried.is_restored == (where != "clock")
        with pytest.raises(ConfigurationError, match="reads what an earlier run"):
            refuse_carried_state(carried, plan_of(2, 1))
        warned = (
            pytest.warns(match="for each of 2")
            if carried.is_restored
            else pytest.warns(match="Runs before")
        )
        with warned:
            refuse_carried_state(carried, plan_of(1, 2))
    assert where in ("clock", "nothing", "steps") or module.count(where) == 1


@pytest.mark.parametrize("where", ["array", "list", "seen", "Counting.of_class", "cell", "nothing"])
@pytest.mark.parametrize("by", ["batch_idx", "steps"])
def test_state_that_a_step_reads_later_is_found(where, by, monkeypatch):
    """History: trials that ended before it was read found nothing, and each rank counted microbatches.

    Not found is what no attribute shows, such as a cell of a closure.
    """
    monkeypatch.setattr(Counting, "of_class", 0)

    def step(module, batch, batch_idx=0):
        module.steps += 1
        count, now = module.count(where), {"batch_idx": batch_idx, "steps": module.steps}[by]
        return module(batch).square().mean() * (count if now > 5 else 1)

    @contextlib.contextmanager
    def in_the_middle():
        yield 50

    module = Counting()
    module.steps = 0
    probed = probe_step(
        module, step, torch.randn(4, 2), 4, seed=1, arguments=(0,), moments=(in_the_middle,)
    )
    assert (probed.sequences.carried is not None) == (where not in ("cell", "nothing"))


def fit_with_a_float(rank, world_size):
    with pytest.raises(ConfigurationError, match=r"changed \(share\)"):
        fit_module(Sharing, world_size)
    return True


class Sharing(TinyDiffusion):
    share = 0.0

    def training_step(self, batch, batch_idx):
        self.share += 1.0
        return super().training_step(batch, batch_idx) * self.share


def test_state_that_a_step_reads_again_is_refused_on_several_ranks():
    """History: frozen layers that ran ahead counted, too, so that the first batch had counted up to eight."""
    assert run_ranks(fit_with_a_float, 2, 2) == [True, True]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_are_compared_where_fused_attention_runs_between_layers(reduction):
    """History: such kernels are marked as drawing, and their tuples of tensors ended the comparison."""

    def step(module, batch):
        x = module(batch)[:, None]
        return getattr(F.scaled_dot_product_attention(x, x, x).square(), reduction)()

    module = nn.Linear(8, 8)
    probed = probe_step(module, step, torch.randn(4, 16, 8), 4, seed=1)
    with Interception(module).installed() as interception:
        said = MeanCheck(probed, interception).difference(2)
    assert ("not a mean over samples" in said) == (reduction == "sum")


@pytest.mark.parametrize("where", PLACES[:2])
def test_counts_in_odd_places_that_decide_what_is_called_are_refused_with_a_cure(where):
    def step(module, batch):
        for _ in range(1 + module.count(where) % 2):
            batch = module(batch)
        return batch.square().mean()

    with pytest.raises(
        GraphError, match=r"something else decides, .* whole number in an attribute"
    ):
        probe_step(Counting(), step, torch.randn(4, 2), 4, seed=1)


def test_what_frozen_layers_get_is_looked_at_where_they_run_ahead():
    """One rank runs them as they are called, so that four runs of the step would tell it nothing."""
    runs, moves = {True: 0, False: 0}, {}

    @contextlib.contextmanager
    def later():
        module.seen = 5
        yield 1
        module.seen = 0

    for ahead in runs:
        module = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
        module.seen = 0

        def step(module, batch, *_, ahead=ahead):
            runs[ahead] += 1
            return module(batch + module.seen).square().mean()

        probed = probe_step(
            module, step, torch.randn(4, 2), 4, seed=1, moments=(later,), runs_ahead=ahead
        )
        moves[ahead] = probed.sequences.moves_frozen
    assert moves == {True: True, False: False}
    assert runs[True] - runs[False] == 4
