"""What `run_ranks` says of ranks that fail, or do not end."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.distributed


def dies(rank, others_sleep_s):
    connected = torch.zeros(1)
    if rank == 1:
        dist.recv(connected, 0)  # else rank 0 may still be looking for this one
        os._exit(3)
    dist.send(connected, 1)
    time.sleep(others_sleep_s)
    raise ValueError("has something to say")


def test_ranks_that_end_after_a_failure_failed():
    with pytest.raises(RankError, match=r"ranks failed\n(?s:.*)something to say") as caught:
        run_ranks(dies, 2, 0.2)
    assert "rank 1 (exit code 3)" in str(caught.value)


def test_a_rank_that_hangs_after_another_failed_is_named():
    """History: who was killed while it waited for a dead rank counted as ended in time."""
    with pytest.raises(RankError, match=r"ranks \[0\] did not end in time"):
        run_ranks(dies, 2, 60.0, grace_s=0.5)


def order(rank):
    return list({f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")})


def test_ranks_order_their_sets_differently():
    """History: all ranks were forked from one process, so nothing that followed the order of a set ever failed."""
    first, second, third = run_ranks(order, 3)
    assert first == third != second
    assert sorted(first) == sorted(second)


def threads_of_server(rank):
    return len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))


def test_servers_have_one_thread():
    """Forks have none of the others; a lock that one of those holds would stay locked."""
    assert run_ranks(threads_of_server, 2) == [1, 1]
