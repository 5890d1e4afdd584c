"""Optimizer states in host memory: numbers, files and bits of training with states on the device."""

import itertools
from functools import partial

import lightning as L
import pytest
import torch

from lightning_diffpipe.modules import Optimization, Prodigy
from tests.distributed.scenarios import (
    Settings,
    assert_equal_runs,
    fit,
    fit_module,
    make,
    reference,
    weights_of,
)
from tests.distributed.tiny import TinyDiffusion
from tests.ranks import RankError, run_in_turn, run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed


class Watch(L.Callback):
    """Notes bytes of states that were copied until the end of each step, and where states are between steps."""

    def __init__(self):
        self.copied, self.places, self.plan = [], [], None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        offload, self.plan = trainer.strategy.pipeline.optimizer_offload, trainer.strategy.plan
        if offload:
            self.copied.append(offload.num_bytes_copied)
        states = [v for o in trainer.optimizers for s in o.state.values() for v in s.values()]
        self.places.append([v.data_ptr() for v in states if v.dim()])


def fit_watched(rank, settings, world_size, folder=None, load=None):
    watch = Watch()
    return fit(rank, settings, world_size, folder, load, [watch]), watch


def settings_of(where, module=None, **strategy):
    return Settings(
        module=module or {},
        data={"size": 24, "batch_size": 6},
        trainer={"max_epochs": 2, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
        strategy={"num_microbatches": 2, "optimizer_offload": where, **strategy},
    )


STAGES = {"num_stages": 2}
UNEVEN = {"num_stages": 2, "num_replicas": (2, 1), "shard_optimizer": True}
PIPELINES = {"num_stages": 2, "num_replicas": 1, "data_parallel": 2, "shard_optimizer": True}


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "module", "pipelines"),
    [
        (2, STAGES | {"schedule": "zero_bubble"}, {}, 1),
        (3, UNEVEN, {"tied": True}, 1),
        row(1, {}, {}, 1),
        row(2, STAGES, {"tied": True}, 1),
        row(4, PIPELINES, {"tied": True}, 2),
    ],
)
def test_states_in_host_memory_train_as_one_process_and_to_the_last_bit(
    num_ranks, strategy, module, pipelines
):
    """With clipping by the norm and accumulation; copies are those of the plan."""
    away, here = (settings_of(where, module, **strategy) for where in ("all", "none"))
    expected = reference(away, 2, pipelines)
    runs, without = run_in_turn(fit_watched, num_ranks, (away, num_ranks), (here, num_ranks))
    assert_equal_runs([outcome for outcome, _ in runs], expected)
    for rank, ((outcome, watch), (plain, _)) in enumerate(zip(runs, without, strict=True)):
        torch.testing.assert_close(outcome.weights, plain.weights, rtol=0, atol=0)
        for ours, theirs in zip(outcome.gradients, plain.gradients, strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert watch.plan.options.optimizer_offload == "all"
        assert watch.places[1] == watch.places[-1] != []
        if not (module or "shard_optimizer" in strategy):  # else parameters are held several times
            held = watch.plan.planned.offloaded_bytes[rank % watch.plan.ranks_per_pipeline]
            steps = watch.copied[1::2]
            assert watch.copied[0] == 0, "the optimizer steps after two batches"
            assert steps[0] == held, "states that are made in a step come from nowhere"
            assert {b - a for a, b in itertools.pairwise(steps)} == {2 * held}


@pytest.mark.parametrize("strategy", [{}, row(UNEVEN)])
def test_files_are_the_same_and_go_on_with_states_on_either_side(strategy, tmp_path):
    strategy = strategy or STAGES
    num_ranks = sum(strategy.get("num_replicas", (1, 1)))
    away, here = (settings_of(where, **strategy) for where in ("all", "none"))
    folders = tmp_path / "away", tmp_path / "here"
    paths = [folder / "epoch=0.ckpt" for folder in folders]
    runs, _, *resumed = run_in_turn(
        fit_watched, num_ranks, (away, num_ranks, folders[0]), (here, num_ranks, folders[1]),
        (away, num_ranks, None, paths[1]), (here, num_ranks, None, paths[0]),
    )  # fmt: skip
    ours, theirs = (torch.load(path, weights_only=True)["optimizer_states"][0] for path in paths)
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys() != set()
    for number, state in theirs["state"].items():
        assert all(torch.equal(ours["state"][number][name], state[name]) for name in state)
    for later in resumed:
        for (outcome, _), (first, _) in zip(later, runs, strict=True):
            torch.testing.assert_close(outcome.weights, first.weights, rtol=0, atol=0)


def fit_freely(rank, where):
    """PipeDream, whose ranks step by themselves while other batches are under way."""
    module, watch = make(), Watch()
    strategy = {"num_microbatches": "auto", "schedule": "pipedream", "optimizer_offload": where}
    fit_module(module, 2, strategy=strategy, callbacks=[watch], max_epochs=2)
    return weights_of(module), watch


@pytest.mark.table
def test_without_a_flush_nothing_changes():
    away, here = run_in_turn(fit_freely, 2, ("all",), ("none",))
    for (weights, watch), (expected, _) in zip(away, here, strict=True):
        assert watch.copied[-1] > watch.copied[0]
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)


class ReadyMade(TinyDiffusion):
    """Says before it is cut which optimizer it will have."""

    def __init__(self, make=None):
        super().__init__()
        self.optimization = Optimization(warmup_steps=0, decay="constant", optimizer=make)

    def configure_optimizers(self):
        return self.optimization.configure(self)


def planned(rank, module_class, memory_bytes, **options):
    """The plan, after two steps."""
    cluster = {"memory_bytes": memory_bytes, "host_bytes_per_s": 1e9} if memory_bytes else "measure"
    strategy, watch = {"num_microbatches": 6, "cluster": cluster, **options}, Watch()
    fit_module(module_class, 2, strategy=strategy, callbacks=[watch], max_steps=2)
    return watch.plan, watch.copied


def test_states_leave_by_themselves_where_memory_is_short_and_the_optimizer_is_known():
    options = {"checkpointing": "none", "filling": "none", "optimizer_bytes_factor": 6.0}
    ((here, _), _), ((away, _), _) = (
        run_ranks(partial(planned, optimizer_offload=where, **options), 2, ReadyMade, None)
        for where in ("none", "all")
    )
    needs = [max(plan.planned.peak_memory_bytes) for plan in (here, away)]
    limit = sum(needs) // 2
    for plan, copied in run_ranks(partial(planned, **options), 2, ReadyMade, limit):
        assert plan.options.optimizer_offload == "all"
        assert copied[-1] > 0
        assert max(plan.planned.peak_memory_bytes) <= limit
    with pytest.raises(RankError, match=r"optimizer_offload=all.* would fit"):
        run_ranks(partial(planned, **options), 2, TinyDiffusion, limit)


def refused(rank):
    module = make(ReadyMade, make=partial(Prodigy, lr=1.0))
    fit_module(module, 2, strategy={"optimizer_offload": "all"})


def test_optimizers_that_sum_over_parameters_are_refused_by_name():
    with pytest.raises(RankError, match="ConfigurationError: Prodigy computes steps"):
        run_ranks(refused, 2)
