"""A rank that is killed, frozen or stopped by SIGTERM, in any phase: the others say which, how and where, and end.

`benchmarks/reliability` tries all phases, on both ranks, by both launchers; here are some of them.
"""

import os
import pathlib
import signal
import time

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmarks.reliability.main import run_one
from lightning_diffpipe.comm import watcher as module
from lightning_diffpipe.comm.rendezvous import rendezvous
from lightning_diffpipe.comm.watcher import watcher
from tests.distributed.scenarios import fit_module
from tests.ranks import RankError, run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed


class DrawsWithTheWholeModel(L.Callback):
    """Stands for sampling after a step."""

    def on_train_batch_end(self, trainer, module, *arguments):
        with trainer.strategy.whole_model():
            module.head(torch.zeros(1, 12, dtype=torch.float64))


def fit_until_harmed(rank, phase, victim, harm, folder):
    """Trains, validates, saves and draws; one rank does itself harm at the beginning of a phase.

    Not before the other one has heard of the phase: a process that is killed may take along what it has just sent.
    """
    os.dup2(os.open(f"{folder}/screen", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    publish, note = watcher.publish, watcher._note
    heard = pathlib.Path(folder) / "heard"

    def note_that_it_is_heard(status):
        note(status)
        if status.rank == victim and status.phase == phase:
            heard.touch()

    def publish_and_do_harm(**changes):
        publish(**changes)
        if rank == victim and changes.get("phase") == phase and not changes.get("failure"):
            until_s = time.monotonic() + 20.0
            while not heard.exists():
                assert time.monotonic() < until_s, "the other rank has not heard of the phase"
                time.sleep(0.01)
            harm()

    watcher._note, watcher.publish = note_that_it_is_heard, publish_and_do_harm
    callbacks = [ModelCheckpoint(folder, every_n_train_steps=2), DrawsWithTheWholeModel()]
    fit_module(
        world_size=2, strategy={"timeout_s": 60}, enable_checkpointing=True, callbacks=callbacks
    )


def die():
    os.kill(os.getpid(), signal.SIGKILL)


PHASES = (
    "aligning weights", "probing the step", "placing stages", "training with the whole model",
    "saving a checkpoint", "validating", "ending",
)  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        *((phase, number % 2) for number, phase in enumerate(PHASES)),
        *(row(phase, 1 - number % 2) for number, phase in enumerate(PHASES)),
    ],
)
def test_whoever_loses_a_rank_names_it_and_its_phase(tmp_path, phase, victim):
    """Where torch's groups meet, nothing breaks, and the process is ended with a line."""
    with pytest.raises(RankError, match="ranks failed") as caught:
        run_ranks(fit_until_harmed, 2, phase, victim, die, str(tmp_path))
    text = str(caught.value)
    assert f"rank {victim} (exit code -9)" in text
    raised = text.split(f"--- rank {1 - victim} ")[1].split("--- rank")[0].strip()
    message = (
        raised if "Error" in raised else (tmp_path / "screen").read_text().strip()
    ).splitlines()[-1]
    assert f"lost rank {victim} ({phase}): its process has ended without a word" in message


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("victim", "phase"), [(0, "probing the step"), (1, "validating")])
def test_sigterm_ends_all_ranks_in_any_phase(tmp_path, victim, phase):
    """History: before the first step it ended one process, and the others reported a lost connection."""
    with pytest.raises(RankError, match="ranks failed") as caught:
        run_ranks(fit_until_harmed, 2, phase, victim, stop, str(tmp_path))
    assert str(caught.value).count("lightning.pytorch.utilities.exceptions.SIGTERMException") == 2
    assert (tmp_path / "screen").read_text().count(f"SIGTERM to rank {victim} ({phase})") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "harm", "rank", "phase"),
    [
        ("torchrun", "KILL", 1, "training"),
        *(
            row(*case)
            for case in [
                ("Lightning", "STOP", 0, "saving a checkpoint"),
                ("Lightning", "KILL", 1, "starting processes"),
                ("torchrun", "KILL", 0, "starting processes"),
                ("torchrun", "STOP", 1, "starting processes"),
                ("Lightning", "STOP", 0, "starting processes"),
                ("Lightning", "KILL", 0, "training"),
                ("torchrun", "STOP", 1, "validating"),
                ("torchrun", "TERM", 0, "training"),
            ]
        ),
    ],
)
def test_nothing_is_left_of_a_run_that_came_to_harm(launcher, harm, rank, phase):
    """Within a minute; `benchmarks/reliability` measures how soon."""
    outcome = run_one(launcher, harm, rank, phase)
    assert outcome.seconds is not None, outcome.output
    assert outcome.code or harm == "TERM", outcome.output
    assert outcome.names(rank, phase), outcome.output


# ------------------------------------------------------------------------------- the mechanism itself


def lose_while_busy(rank):
    """Rank 1 is gone while rank 0 computes, and asks nobody for anything."""
    with watcher.run(rank):
        rendezvous(rank, 2, 60.0, 60.0)
        if rank == 1:
            time.sleep(0.5)
            die()
        time.sleep(600.0)


def test_a_rank_that_is_busy_with_itself_is_ended_when_the_others_are_gone():
    with pytest.raises(RankError, match=r"ranks failed\n(?s:.*)rank 0 \(exit code 1\)"):
        run_ranks(lose_while_busy, 2)


def be_busy(rank):
    """Longer than the others wait for a sign of life."""
    with watcher.run(rank):
        module._LEAST_SILENCE_S = silence_s = 3.0  # a busy machine may keep a thread for a second
        rendezvous(rank, 2, silence_s, 60.0)
        if rank == 0:
            time.sleep(1.5 * silence_s)
        torch.distributed.barrier()
        return watcher.loss()


def test_a_rank_that_is_busy_lives():
    """It signs from a thread of its own."""
    assert run_ranks(be_busy, 2) == [None, None]
