"""What Lightning decides on each rank by itself between steps happens on all ranks after the same batch."""

import os
import re
import signal
import time
from datetime import timedelta

import lightning as L
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.distributed.scenarios import fit_module
from tests.distributed.tiny import Data, TinyDiffusion
from tests.ranks import RankError, run_in_turn, run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed


def fit(world_size, *callbacks, **options):
    data, strategy = Data(size=48), {"num_stages": 2, "num_replicas": 1}
    options = {"max_epochs": 2, **options}
    return fit_module(TinyDiffusion, world_size, data, strategy, callbacks=[*callbacks], **options)


COLLECTIVES = (
    *("broadcast", "all_reduce", "barrier", "all_gather", "send", "recv"),
    *("broadcast_object_list", "all_gather_object"),
)


class CountsDefaultGroup(L.Callback):
    """Notes which collectives of the default group are called between the first step and the last."""

    def __init__(self):
        self.calls = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.total_batch_idx == 0:
            for name in COLLECTIVES:
                setattr(dist, name, self._noting(name, getattr(dist, name)))

    def _noting(self, name, call):
        def noting(*args, group=None, **options):
            if group in (None, dist.group.WORLD):
                self.calls.append(name)
            return call(*args, group=group, **options)

        return noting

    def on_train_end(self, trainer, module):
        self.after_training = len(self.calls)


def count_calls_of_default_group(rank, folder):
    by_time = ModelCheckpoint(folder, train_time_interval=timedelta(hours=1))
    callback, options = CountsDefaultGroup(), {"max_time": {"hours": 1}}
    fit(2, callback, by_time, max_epochs=1, enable_checkpointing=True, **options)
    return callback.calls[: callback.after_training]


def test_nothing_goes_over_the_default_group_between_steps(tmp_path):
    """History: a rank that had failed between steps was waited for there, half an hour, without a word."""
    assert run_ranks(count_calls_of_default_group, 2, str(tmp_path)) == [[], []]


class Fails(L.Callback):
    """A rank fails after its third batch."""

    def __init__(self, rank):
        self.rank = rank

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 2 and trainer.global_rank == self.rank:
            raise ValueError("the disk is full")


def fit_until_one_fails(rank, failing):
    fit(2, Fails(failing))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_between_steps_is_missed_at_once(failing):
    """Rank 1 waits for rank 0 there; rank 0, which waits for nobody, misses it in the next step."""
    with pytest.raises(RankError, match="ranks failed") as caught:
        run_ranks(fit_until_one_fails, 2, failing, timeout_s=60.0, grace_s=30.0)
    text = str(caught.value)
    assert "ValueError: the disk is full" in text
    lost = rf"rank {1 - failing} \([\w ,]+\) lost rank {failing} \([\w ,]+\): it failed with ValueError"
    assert re.search(lost, text)


class Signalled(L.Callback):
    """One rank gets SIGTERM while it trains."""

    def __init__(self, rank, batch=2):
        self.rank, self.batch, self.num_batches = rank, batch, 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.num_batches += 1
        if batch_idx == self.batch and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer, module, exception):
        # Collective: all ranks have to come here.
        trainer.save_checkpoint(trainer.default_root_dir + "/stopped.ckpt")


def fit_until_signalled(rank, world_size, signalled, batch, folder, max_epochs=2):
    before = signal.getsignal(signal.SIGTERM)
    callback, ended_by = Signalled(signalled, batch), None
    try:
        fit(world_size, callback, default_root_dir=folder, max_epochs=max_epochs)
    except SIGTERMException as error:
        ended_by = type(error).__name__
    assert signal.getsignal(signal.SIGTERM) == before
    return ended_by, callback.num_batches


@pytest.mark.parametrize(("world_size", "signalled"), [row(2, 0), (2, 1), (4, 3)])
def test_a_signal_to_one_rank_ends_all_behind_the_same_batch(tmp_path, world_size, signalled):
    """History: a rank that was not rank 0 stopped by itself, and the others missed its messages."""
    results = run_ranks(fit_until_signalled, world_size, world_size, signalled, 2, str(tmp_path))
    assert len(set(results)) == 1
    ended_by, num_batches = results[0]
    assert ended_by == "SIGTERMException"
    assert 3 <= num_batches <= 5  # a rank's word takes up to two batches to rank 0
    assert (tmp_path / "stopped.ckpt").exists()


@pytest.mark.parametrize(("world_size", "last"), [row(2, 7), (4, 3)])
def test_a_signal_in_the_last_step_is_not_lost(tmp_path, world_size, last):
    """It reaches rank 0 at once, also by way of the first rank of another pipeline."""
    results = run_ranks(
        fit_until_signalled, world_size, world_size, world_size - 1, last, str(tmp_path), 1
    )
    assert results == [("SIGTERMException", last + 1)] * world_size


class Drifts(L.Callback):
    """The clock of rank 1 is late, so that it would validate batches after rank 0."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 0:
            trainer._last_val_time = time.monotonic() + 0.25 * trainer.global_rank
        time.sleep(0.1)

    def on_validation_start(self, trainer, module):
        self.batches.append(trainer.fit_loop.epoch_loop.total_batch_idx)


def validate_by_time(rank):
    callback = Drifts()
    trainer = fit(2, callback, max_epochs=1, val_check_interval={"milliseconds": 350})
    assert "_should_check_val_fx" not in vars(trainer.fit_loop.epoch_loop)
    return callback.batches


def test_validation_by_time_begins_behind_the_same_batch_on_all_ranks():
    """History: each rank looked at its own clock; one validated while the other trained, until `timeout_s`."""
    first, second = run_ranks(validate_by_time, 2)
    assert first == second
    assert first


class Stops(L.Callback):
    """Stops in the third batch, on one rank."""

    def __init__(self, rank):
        self.rank, self.seen = rank, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append(batch_idx)
        if batch_idx == 2 and trainer.global_rank == self.rank:
            trainer.should_stop = True

    def on_validation_start(self, trainer, module):
        self.seen.append("validates")


def stop_alone(rank, stopping):
    callback = Stops(stopping)
    trainer = fit(2, callback, max_epochs=1, limit_train_batches=5)
    return callback.seen, trainer.global_step


def test_a_callback_of_rank_0_stops_all_ranks_behind_the_same_batch():
    """History: rank 0 validated, and waited half an hour for the other, which waited for it in the next batch."""
    stopped, went_on = [0, 1, 2, "validates"], [0, 1, 2, 3, 4, "validates"]
    (first, second), (alone, _) = run_in_turn(stop_alone, 2, (0,), (1,))
    assert first == second == (stopped, 3)
    assert alone == (went_on, 5)  # rank 1 alone is not heard
