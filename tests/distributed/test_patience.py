"""Between steps ranks wait for one that is busy much longer than for a message, and name one that never comes."""

import os
import re
import threading
import time

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_diffpipe.callbacks import PipelineMonitor
from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.errors import PipelineTimeoutError
from lightning_diffpipe.planning.schedule import Placement
from tests.distributed.scenarios import fit_module, make
from tests.distributed.tiny import Data, Samples, Stream, TinyDiffusion
from tests.ranks import RankError, run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed
TIMEOUT_S, BUSY_S = 6.0, 8.0  # a busy machine may take seconds for a message
LIMIT_S = 13.0  # a wait is long after ten seconds
SIDE_BY_SIDE = {"num_stages": 1, "data_parallel": 2}


class Busy(L.Callback):
    """Rank 0 is busy once, where it first comes to a hook."""

    def __init__(self, hook):
        self.was_busy = False
        setattr(self, hook, self.work)

    def work(self, trainer, *arguments):
        if trainer.is_global_zero and not self.was_busy:
            time.sleep(BUSY_S)
        self.was_busy = True


def fit(module=TinyDiffusion, num_ranks=2, data=Data, strategy=(), **options):
    strategy = {"num_replicas": 1, "timeout_s": TIMEOUT_S, **dict(strategy)}
    return fit_module(module, num_ranks, data, strategy, **options)


def fit_while_rank_0_is_busy(rank, hook):
    callbacks = [Busy(hook), PipelineMonitor(every_n_steps=1, progress_bar=False)]
    loaders = {"data": DataLoader(Stream(Samples(12)), 6), "val_dataloaders": Data().loader(12)}
    trainer = fit(callbacks=callbacks, max_epochs=2, **loaders)
    return callbacks[0].was_busy, trainer.global_step


@pytest.mark.slow
@pytest.mark.parametrize(
    "hook",
    [
        row("on_validation_start"),
        row("on_validation_batch_end"),
        row("on_train_epoch_end"),
        "on_train_batch_end",
    ],
)
def test_a_rank_that_is_busy_between_steps_is_waited_for(hook):
    """History: validation, the first batches of an epoch and the monitor waited for `timeout_s`, as in a step."""
    assert run_ranks(fit_while_rank_0_is_busy, 2, hook) == [(True, 4)] * 2


def slow_compiler(graph, inputs):
    time.sleep(4.0)
    return graph.forward


def fit_compiled_blocks(rank):
    module = make(num_blocks=6)
    for block in module.blocks:
        block.compile(backend=slow_compiler)
    return fit(module, 3, Data().loader(12)).global_step


@pytest.mark.slow
@pytest.mark.table
def test_stages_that_compile_one_after_the_other_are_waited_for():
    """History: the last stage missed the first one in the first step, when the second had compiled as well."""
    assert min(run_ranks(fit_compiled_blocks, 3)) > 0


class SlowAtTheEnd(Samples):
    """One rank waits for its last samples."""

    def __getitem__(self, index):
        if index >= len(self) - 2 and torch.distributed.get_rank() == 1:
            time.sleep(BUSY_S)
        return super().__getitem__(index)


def fit_while_a_pipeline_loads(rank):
    loader = DataLoader(SlowAtTheEnd(24), 6, shuffle=False)
    fit(data=loader, strategy=SIDE_BY_SIDE, use_distributed_sampler=True)


@pytest.mark.slow
def test_a_pipeline_that_loads_for_too_long_is_named():
    """History: where it was waited for first, before a step, the others ended in gloo's own error."""
    with pytest.raises(RankError, match="ranks failed") as caught:
        run_ranks(fit_while_a_pipeline_loads, 2)
    message = (
        "rank 0 waited for rank 1: it has not come so far for 6 s (timeout_s), and is stuck in"
    )
    assert f"PipelineTimeoutError: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("num_ranks", "message"),
    [
        (2, "rank 1 waited for rank 0 between two steps: lost rank 0, which stopped"),
        (3, "rank 1 waited for ranks 0, 2 between two steps: lost one of them, which"),
        (12, "rank 1 waited for ranks 0, 2, 3, 4, 5, 6, 7, 8, ... between two steps"),
    ],
)
def test_ranks_that_are_waited_for_together_are_named(num_ranks, message):
    layout = RankLayout(num_ranks, Placement.of_replicas([1] * num_ranks))
    mesh = Mesh(layout, 1, torch.device("cpu"), "gloo", 2.0)
    with pytest.raises(PipelineTimeoutError, match=message), mesh.naming(mesh.pipeline_ranks):
        raise RuntimeError("Connection closed by peer")


class OnOneRank(L.Callback):
    """Does something collective on rank 0 only, where a hook of a kind comes first."""

    def __init__(self, hook, act):
        self.act = act
        setattr(self, hook, self.work)

    def work(self, trainer, *arguments):
        if trainer.is_global_zero:
            {
                "torch": torch.distributed.barrier,
                "Lightning": trainer.strategy.barrier,
                "ours": trainer.strategy.pipeline.mesh.barrier,
            }[self.act]()


def fit_with_a_collective_of_one_rank(rank, hook, act, folder):
    os.dup2(os.open(f"{folder}/screen", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    fit(callbacks=[OnOneRank(hook, act)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "act"),
    [
        ("on_train_batch_end", "Lightning"),
        row("on_train_epoch_start", "ours"),
        row("on_validation_end", "torch"),
        row("on_validation_batch_start", "Lightning"),
    ],
)
def test_ranks_that_all_wait_for_each_other_end(hook, act, tmp_path):
    """History: they waited for half an hour, as one that is busy between steps is waited for."""
    with pytest.raises(RankError, match="ranks failed"):
        run_ranks(
            fit_with_a_collective_of_one_rank, 2, hook, act, str(tmp_path), timeout_s=90.0, group_timeout_s=1800.0
        )  # fmt: skip
    said = (tmp_path / "screen").read_text()
    assert "has waited for 10 s (timeout_s) in one collective, as all others have (rank" in said


def stand_still(how):
    if how == "loops":
        while True:
            pass
    threading.Lock().acquire() and threading.Event().wait()


class StuckSamples(Samples):
    """Rank 0, which loads, gets no more of them."""

    def __getitem__(self, index):
        if index == 8:
            stand_still("waits")
        return super().__getitem__(index)


class Stuck(L.Callback):
    """A hook of one rank never ends."""

    def __init__(self, hook, rank, how):
        self.rank, self.how = rank, how
        setattr(self, hook, self.work)

    def work(self, trainer, *arguments):
        if trainer.global_rank == self.rank:
            stand_still(self.how)


def fit_with_a_stuck_rank(rank, where, stuck_rank, how, folder):
    os.dup2(os.open(f"{folder}/screen", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    data, callbacks = Data, []
    if where == "the data":
        data = DataLoader(StuckSamples(24), 6, shuffle=False)
    else:
        callbacks = [Stuck(where, stuck_rank, how)]
    fit(data=data, strategy={"busy_timeout_s": LIMIT_S}, callbacks=callbacks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "rank", "how"),
    [
        ("the data", 0, "waits"),
        row("on_validation_batch_end", 1, "waits"),
        row("on_train_batch_end", 0, "loops"),
        row("on_train_epoch_end", 0, "waits"),
    ],
)
def test_a_rank_that_is_stuck_between_steps_is_named_with_the_place(where, rank, how, tmp_path):
    """History: it was waited for, half an hour, and nobody said for what."""
    with pytest.raises(RankError, match="ranks failed") as caught:
        run_ranks(
            fit_with_a_stuck_rank, 2, where, rank, how, str(tmp_path), timeout_s=90.0, group_timeout_s=1800.0
        )  # fmt: skip
    said = (tmp_path / "screen").read_text()
    assert "(busy_timeout_s=13). It stands at\n" in said
    why = rf"rank {rank} \(\w+.*\): it gave no sign of progress for 1\d s while rank {1 - rank} waited for it"
    place = r"\(busy_timeout_s=13\), at .*test_patience.py:\d+ in stand_still"
    assert re.search(f"{why} {place}", said)
    assert re.search(rf"rank {1 - rank} \(\w+.*\) lost {why}", str(caught.value))


class SlowlyValidated(TinyDiffusion):
    """Rank 1 takes longer for all its batches than a rank may be busy, and not for any of them."""

    def validation_step(self, *batch):
        if torch.distributed.get_rank() == 1:
            time.sleep(4.0)
        return super().validation_step(*batch)


def fit_while_a_pipeline_validates_slowly(rank):
    loaders = {"data": Data().loader(12), "val_dataloaders": Data().loader(48)}
    strategy = {**SIDE_BY_SIDE, "busy_timeout_s": LIMIT_S}
    return fit(
        SlowlyValidated, 2, strategy=strategy, use_distributed_sampler=True, **loaders
    ).global_step


@pytest.mark.slow
@pytest.mark.table
def test_a_rank_that_goes_on_is_waited_for_for_as_long_as_it_does():
    assert min(run_ranks(fit_while_a_pipeline_validates_slowly, 2)) > 0
