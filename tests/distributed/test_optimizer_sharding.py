"""Optimizer states shared by the ranks that hold the same parameters: numbers of one process, ordinary files."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn

from lightning_diffpipe.modules import Muon, Optimization, Prodigy
from lightning_diffpipe.runtime.optimizer_states import (
    OptimizerSharding,
    stepping_ranks,
    updates_independently,
)
from tests.distributed.scenarios import (
    Recorder,
    Settings,
    assert_equal_runs,
    fit,
    fit_module,
    make,
    reference,
    weights_of,
)
from tests.distributed.tiny import Inheriting, Switching, TinyDiffusion
from tests.ranks import RankError, run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed


class Optimized(TinyDiffusion):
    """With an optimizer of two groups, and rates that fall."""

    def __init__(self, make, **options):
        super().__init__(**options)
        self.make = make

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if (p.dim() > 1) == is_matrix]}
            for is_matrix in (True, False)
        ]
        optimizer = self.make(groups)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Lookahead(torch.optim.Optimizer):
    """Holds another optimizer, and slow copies of the weights, as many packages do."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.count = inner, inner.param_groups, 0

    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.count % 2 == 0:
                    p.data.copy_(slow.lerp_(p.detach(), 0.5))
        return loss


class CoupledSGD(torch.optim.SGD):
    """Bounds the norm over all its gradients, whatever it is called."""

    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        super().step()
        return loss


ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
PRODIGY = partial(Prodigy, d0=1e-4, safeguard_warmup=False)


def settings_of(make, strategy, **trainer):
    return Settings(
        module={"make": make, "tied": True},
        module_class=Optimized,
        data={"size": 30, "batch_size": 6},
        trainer={"max_epochs": 2, "gradient_clip_val": 0.5, **trainer},
        strategy={"num_microbatches": 2, "shard_optimizer": True, **strategy},
    )


class States(L.Callback):
    """Notes which parameters an optimizer has states of."""

    def on_train_end(self, trainer, module):
        names = {id(p): name for name, p in module.named_parameters()}
        (optimizer,) = trainer.optimizers
        self.names = {names[id(p)] for p in optimizer.state}


def fit_and_note(rank, settings, world_size, folder=None, load=None):
    states = States()
    return fit(rank, settings, world_size, folder, load, [states]), states.names


def adamw_ahead(groups):
    return Lookahead(ADAMW(groups))


REPLICAS = (2, {"num_stages": 1, "num_replicas": 2}, 1)
UNEVEN = (3, {"num_stages": 2, "num_replicas": (2, 1)}, 1)
PIPELINES = (4, {"num_stages": 2, "num_replicas": 1, "data_parallel": 2}, 2)


@pytest.mark.parametrize(
    ("make", "world_size", "strategy", "pipelines", "trainer"),
    [
        (ADAMW, *UNEVEN, {}),
        (PRODIGY, *PIPELINES, {"accumulate_grad_batches": 2}),
        (adamw_ahead, *REPLICAS, {"gradient_clip_algorithm": "value", "gradient_clip_val": 1e-3}),
        row(ADAMW, *PIPELINES, {}),
        row(partial(torch.optim.Adagrad, lr=1e-2), *UNEVEN, {}),
        row(partial(torch.optim.Adafactor, lr=1e-2), *REPLICAS, {}),
        row(partial(torch.optim.SGD, lr=1e-2, momentum=0.9), *UNEVEN, {}),
        row(PRODIGY, *REPLICAS, {}),
        row(PRODIGY, *UNEVEN, {}),
    ],
)  # fmt: skip
def test_ranks_that_share_states_train_as_one_process(
    make, world_size, strategy, pipelines, trainer
):
    settings = settings_of(make, strategy, **trainer)
    expected = reference(settings, 2, pipelines)
    outcomes, states = zip(*run_ranks(fit_and_note, world_size, settings, world_size), strict=True)
    assert_equal_runs(list(outcomes), expected)
    holders = Counter(name for each in outcomes for name in each.gradients[0])
    owners = Counter(name for each in states for name in each)
    assert owners == dict.fromkeys(holders, 1), "states are there once"
    assert max(holders.values()) > 1
    sizes = {name: outcomes[0].initial[name].nbytes for name in holders}
    for outcome, own in zip(outcomes, states, strict=True):  # even, but for the largest parameter
        share = sum(sizes[name] / holders[name] for name in outcome.gradients[0])
        assert sum(sizes[name] for name in own) <= share + max(sizes.values())


@pytest.mark.parametrize(
    ("writer", "reader"), [(UNEVEN, REPLICAS), row(REPLICAS, UNEVEN), row(PIPELINES, PIPELINES)]
)
def test_checkpoints_are_whole_and_go_on_with_other_ranks_and_unshared(writer, reader, tmp_path):
    world_size, strategy, pipelines = writer
    settings = settings_of(ADAMW, strategy)
    expected = reference(settings, 2, pipelines)
    run_ranks(fit_and_note, world_size, settings, world_size, tmp_path)
    path = tmp_path / "epoch=0.ckpt"
    state = torch.load(path, weights_only=True)["optimizer_states"][0]
    assert sorted(state["state"]) == list(
        range(sum(len(g["params"]) for g in state["param_groups"]))
    )
    world_size, strategy, _ = reader
    for shares in (True, False):
        later = settings_of(ADAMW, strategy | {"shard_optimizer": shares})
        for outcome, states in run_ranks(fit_and_note, world_size, later, world_size, None, path):
            if reader is REPLICAS:
                assert shares == (len(states) < len(state["state"]))
            torch.testing.assert_close(outcome.weights, expected.weights, rtol=0, atol=1e-11)


def fit_without_flush(rank, shards):
    options = {"num_stages": 2, "num_microbatches": 1, "data_parallel": 2, "schedule": "pipedream"}
    states, module = States(), make(Optimized, make=ADAMW)
    fit_module(module, 4, strategy={"shard_optimizer": shards, **options}, callbacks=[states])
    return weights_of(module), states.names


@pytest.mark.table
def test_pipelines_that_never_flush_share_states_to_the_last_bit():
    """Stages step by themselves there."""
    shared, separate = (run_ranks(fit_without_flush, 4, shards) for shards in (True, False))
    assert sum(len(names) for _, names in separate) == 2 * sum(len(names) for _, names in shared)
    for (got, _), (wanted, _) in zip(shared, separate, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_which_rank_updates_what_depends_on_sizes_alone():
    holders = {"a": (0, 1, 2), "b": (0, 1, 2), "c": (0, 1, 2), "d": (2,), "e": (0, 1)}
    sizes = {"a": 9, "b": 5, "c": 4, "d": 3, "e": 1}
    ranks = stepping_ranks(sizes, holders)
    assert ranks == stepping_ranks(dict(reversed(sizes.items())), dict(reversed(holders.items())))
    assert all(ranks[name] in own for name, own in holders.items())
    loads = Counter(dict.fromkeys(range(3), 0))
    for name, rank in ranks.items():
        loads[rank] += sizes[name]
    assert max(loads.values()) <= sum(sizes.values()) / 3 + max(sizes.values())


@pytest.mark.parametrize(
    ("make", "independent"),
    [
        (ADAMW, True),
        (adamw_ahead, True),
        (partial(torch.optim.Adagrad, lr=1e-2), True),  # has states before its first step
        (partial(torch.optim.Adafactor, lr=1e-2), True),
        (Muon, True),
        (partial(torch.optim.NAdam, foreach=False), True),
        (partial(CoupledSGD, lr=1e-2), False),
        (partial(Switching, lr=1e-2), True),  # but it may not be divided
        (Prodigy, False),
        (lambda groups: torch.optim.LBFGS([p for g in groups for p in g["params"]]), False),
    ],
)
def test_small_copies_tell_whether_an_optimizer_treats_parameters_by_themselves(make, independent):
    """The optimizer, its schedule and its parameters stay as they are."""
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((20, 30), (20,), (3, 30), (5,))]
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0}]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = make(groups)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    state = {id(p): len(value) for p, value in optimizer.state.items()}
    assert updates_independently(optimizer) is independent
    assert not seen
    assert {id(p): len(value) for p, value in optimizer.state.items()} == state
    for parameter, value in zip(parameters, before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is None


@pytest.mark.parametrize("has_closure", [False, True])
def test_a_step_that_calls_that_of_its_base_keeps_gradients_and_sends_once(
    has_closure, monkeypatch
):
    """Gradients of what others step were lost, after which holders disagreed on what is sent."""
    named = {name: nn.Parameter(torch.zeros(2)) for name in "ab"}
    torch.optim.AdamW(named.values())  # from now on torch calls hooks for steps of the base, too
    optimizer = Inheriting(named.values(), lr=1e-2)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("others"))
    mesh = SimpleNamespace(rank=0)
    sharding = OptimizerSharding(mesh, named, dict.fromkeys("ab", (0, 1)), {"a": 0, "b": 1})

    def sent(sharded):
        seen.append([p.grad.tolist() for p in sharded.values()])

    monkeypatch.setattr(sharding, "_send_updates", sent)
    detach = sharding.attach(optimizer)

    def closure():
        for p in named.values():
            p.grad = torch.ones(2)
        return 1.5

    for _ in range(2):
        if has_closure:
            assert optimizer.step(closure) == 1.5
        else:
            closure()
            optimizer.step()
    assert seen == ["others", [[1.0, 1.0]] * 2, "others"] * 2, "what is sent, before others see it"
    assert set(optimizer.state) == {named["a"]}
    detach()
    optimizer.step()
    assert seen[-2:] == ["others"] * 2


def fit_on(rank, make, strategy, world_size):
    module = Optimized(make).double()
    fit_module(module, world_size, strategy={"shard_optimizer": True, **strategy})


@pytest.mark.parametrize("make", [partial(CoupledSGD, lr=1e-2), row(partial(Switching, lr=1e-2))])
def test_optimizers_that_need_all_gradients_are_refused_by_name(make):
    with pytest.raises(
        RankError, match=rf"ConfigurationError: {make.func.__name__} computes steps"
    ):
        run_ranks(fit_on, 2, make, REPLICAS[1], 2)


class ReadyMade(Optimized):
    """Says before it is cut which optimizer it will have."""

    def __init__(self):
        super().__init__(Optimization()._made)
        self.optimization = Optimization()


def peaks_of(rank, module_class, shards, memory_bytes):
    limit = {"cluster": {"memory_bytes": memory_bytes}} if memory_bytes else {}
    strategy = {**REPLICAS[1], "shard_optimizer": shards, "checkpointing": "none", **limit}
    module = module_class() if module_class is ReadyMade else module_class(ADAMW)
    recorder = Recorder()
    fit_module(module.double(), 2, strategy=strategy, max_steps=1, callbacks=[recorder])
    plan = recorder.plan
    return plan.options.shard_optimizer, max(plan.planned.peak_memory_bytes)


def test_states_are_shared_by_themselves_where_memory_is_short_and_the_optimizer_is_known():
    (_, separate), _ = run_ranks(peaks_of, 2, ReadyMade, False, None)
    (_, shared), _ = run_ranks(peaks_of, 2, ReadyMade, True, None)
    limit = (separate + shared) // 2
    assert run_ranks(peaks_of, 2, ReadyMade, "auto", limit)[1] == (True, shared)
    with pytest.raises(RankError, match="shard_optimizer=True would fit"):
        run_ranks(peaks_of, 2, Optimized, "auto", limit)


def test_ready_made_modules_know_whether_their_optimizer_may_be_shared():
    assert Optimization().may_be_shared()
    assert Optimization(lr=1.0, optimizer=Prodigy).may_be_shared()
    assert not Optimization(optimizer=CoupledSGD).may_be_shared()
    assert not Optimization(optimizer=Switching).may_be_shared()
