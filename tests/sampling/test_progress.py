"""Whom a rank that waits misses, and whom it does not."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from lightning_diffpipe.errors import PipelineTimeoutError
from lightning_diffpipe.sampling.progress import Progress

TIMEOUT_S = 0.4


@pytest.fixture
def ranks():
    store = dist.HashStore()
    boards = [Progress(store, "board", rank, 3, TIMEOUT_S) for rank in range(3)]
    for board in boards:
        board.start_turn()
    return boards


def wait(board, seconds, meanwhile=lambda: None):
    """Waits so long; returns how often it gave up."""
    deadline, given_up = time.monotonic() + seconds, []

    def arrived():
        meanwhile()
        return time.monotonic() > deadline

    board.watch(arrived, lambda: given_up.append(True))
    return len(given_up)


@pytest.mark.slow
def test_a_rank_that_goes_on_no_more_is_missed(ranks):
    ranks[1].step()
    ranks[2].note("done")
    started_s = time.monotonic()
    with pytest.raises(PipelineTimeoutError, match=r"rank 0 waited for rank 1: no denoising step"):
        wait(ranks[0], 60.0)
    assert time.monotonic() - started_s < 30.0


@pytest.mark.slow
def test_a_rank_that_goes_on_slowly_or_has_not_begun_is_not_missed(ranks):
    assert wait(ranks[0], 3 * TIMEOUT_S, ranks[1].step) == 1


@pytest.mark.slow
def test_notes_of_an_earlier_turn_tell_nothing(ranks):
    ranks[1].step()
    ranks[2].note("refused")
    assert ranks[0].has_refusal()
    ranks[0].start_turn()
    assert not ranks[0].has_refusal()
    wait(ranks[0], 3 * TIMEOUT_S)


def test_a_rank_that_is_gone_is_missed_with_its_reason(ranks):
    ranks[2].note("gone", "out of memory")
    with pytest.raises(PipelineTimeoutError, match="rank 2, which stopped: out of memory"):
        wait(ranks[0], 10.0)
