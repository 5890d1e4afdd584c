"""What a step may do besides computing a loss, and what is refused, on all ranks and before training."""

import pytest
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

from lightning_diffpipe.errors import ConfigurationError
from tests.distributed.scenarios import Settings, fit
from tests.distributed.tiny import TinyDiffusion
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed


class Talks(TinyDiffusion):
    """Asks the other ranks for something in its step."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        return getattr(self, self.how)(super().training_step(batch, batch_idx))

    def all_gather_of_lightning(self, loss):
        return self.all_gather(loss).mean() + loss

    def all_reduce(self, loss):
        total = loss.detach().clone()
        dist.all_reduce(total)
        return loss + total

    def differentiable_all_reduce(self, loss):
        return differentiable.all_reduce(loss)

    def all_gather_object(self, loss):
        box = [None] * dist.get_world_size()
        dist.all_gather_object(box, float(loss))
        return loss

    def barrier(self, loss):
        self.trainer.strategy.barrier()
        return loss


CALLS = {
    "all_gather_of_lightning": "all_gather",
    "all_reduce": "all_reduce",
    "differentiable_all_reduce": "all_reduce",
    "all_gather_object": "all_gather_object",
    "barrier": "barrier",
}


def refusal(rank, how):
    try:
        fit(rank, Settings(module_class=Talks, module={"how": how}), 2)
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize("how", CALLS)
def test_a_collective_in_a_step_is_refused_by_name_on_all_ranks(how):
    """History: ranks waited for each other until a timeout that named something else."""
    for said in run_ranks(refusal, 2, how, timeout_s=40):
        assert f"training_step calls {CALLS[how]}, which waits for all ranks" in said
        assert "tests/distributed/test_steps.py:" in said
        assert "self.log" in said


class LogsOverRanks(TinyDiffusion):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/synced", loss, sync_dist=True)
        return loss


def test_logging_over_ranks_is_the_cure():
    strategy = {"num_stages": 2, "num_replicas": 1, "num_microbatches": 2}
    settings = Settings(
        module_class=LogsOverRanks,
        strategy=strategy,
        data={"batch_size": 3},
        trainer={"max_steps": 2},
    )
    outcomes = run_ranks(fit, 4, settings, 4)
    last = [outcome.losses[-1] for outcome in outcomes]
    assert last[0] == last[1] != last[2]
    for outcome in outcomes:
        assert outcome.metrics["train/synced"] == pytest.approx((last[0] + last[2]) / 2)
