"""The oracle of the project: on any number of ranks, the numbers of one process.

Double precision; the reference runs the untouched `training_step` on one device, microbatch by
microbatch, in Lightning's own loops. Losses, every gradient of every step and all weights are compared.
"""

import time

import pytest
import torch
from torch import nn

from lightning_diffpipe import DiffPipeStrategy
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.instruction import Encode
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.search import find_plan
from lightning_diffpipe.profiling.layer_costs import estimate_profile
from tests.distributed.scenarios import (
    Settings,
    assert_equal_runs,
    build,
    check_parity,
    fit_module,
    on_ranks,
    reference,
    weights_of,
)
from tests.distributed.tiny import WIDTH, Block, Data, Samples, TinyDiffusion
from tests.ranks import run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed

FIVE_STEPS = {"max_steps": 5, "max_epochs": -1}


def check(world_size, num_microbatches, num_pipelines=1, tolerance=1e-10, trainer=(), **settings):
    trainer = {**FIVE_STEPS, **dict(trainer)}
    return check_parity(
        world_size, num_microbatches, num_pipelines, tolerance, trainer=trainer, **settings
    )


TWO, PAIR = {"num_stages": 2}, {"num_stages": 2, "num_replicas": 1}
WHOLE = {"num_stages": 1, "num_replicas": 2}
UP_AND_DOWN = {"num_stages": 3, "num_replicas": (1, 2, 1), "schedule": "zero_bubble"}
INTERLEAVED = {"num_stages": 4, "schedule": "interleaved", "data_parallel": 2}
TIED = {"module": {"tied": True}}
LAYOUTS = {
    "one rank": (1, 2, 1, {}, {}),
    "fewer microbatches than stages": (3, 1, 1, {"num_stages": 3}, {}),
    "fewer microbatches than four stages": (4, 2, 1, {"num_stages": 4}, {}),
    "tied weights on two stages": (2, 2, 1, TWO, {**TIED, "trainer": {"gradient_clip_val": 0.1}}),
    "tied weights, zero bubble and a replica": (4, 4, 1, UP_AND_DOWN, TIED),
    "tied weights, interleaved pipelines, clipping": (4, 2, 2, INTERLEAVED, {
        **TIED, "data": {"batch_size": 4}, "trainer": {"gradient_clip_val": 0.05}, "tolerance": 1e-9,
    }),
    # History: a last batch smaller than its microbatches, here one sample for four, ended the run.
    "a last batch of one sample on stages": (2, 4, 1, TWO, {"data": {"size": 13}}),
    "a last batch of one sample on replicas": (2, 4, 1, WHOLE, {"data": {"size": 13}}),
    "microbatches of 3, 2 and 2 samples": (2, 3, 1, TWO, {"data": {"size": 20, "batch_size": 7}}),
    # History: where the cut was verified, every pipeline was compared with the first one's noise.
    "two verified pipelines": (4, 2, 2, {**PAIR, "verify": True}, {"data": {"batch_size": 4}}),
    "two pipelines": (4, 2, 2, {**PAIR, "verify": False}, {"data": {"batch_size": 4}}),
    "windows of three batches, the last of two": (2, 2, 1, TWO, {
        "trainer": {"accumulate_grad_batches": 3, "max_steps": -1, "max_epochs": 2}, "data": {"batch_size": 3},
    }),
    "windows over two pipelines": (4, 2, 2, PAIR, {
        "trainer": {"accumulate_grad_batches": 2}, "data": {"batch_size": 3},
    }),
    # History: with a mean over each replica's microbatches, 4 over 3 replicas weighs them unequally.
    "replicas (1, 3)": (4, 4, 1, {"num_stages": 2, "num_replicas": (1, 3)}, {}),
    "replicas (3, 1)": (4, 4, 1, {"num_stages": 2, "num_replicas": (3, 1)}, {}),
    "replicas (2, 1, 1)": (4, 4, 1, {"num_stages": 3, "num_replicas": (2, 1, 1)}, {}),
    "replicas (2, 2)": (4, 4, 1, {"num_stages": 2, "num_replicas": (2, 2)}, {}),
}  # fmt: skip
"""Ranks, microbatches, pipelines, the strategy and other settings of a run."""
OF_TABLE = {
    "fewer microbatches than four stages",
    "two pipelines",
    "replicas (1, 3)",
    "replicas (2, 2)",
}


@pytest.mark.parametrize("layout", [row(n) if n in OF_TABLE else n for n in LAYOUTS])
def test_layouts_and_batches(layout):
    world_size, num_microbatches, num_pipelines, strategy, settings = LAYOUTS[layout]
    check(world_size, num_microbatches, num_pipelines, strategy=strategy, **settings)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_two_stages(schedule):
    outcomes, _ = check(2, 3, strategy={"num_stages": 2, "schedule": schedule})
    assert outcomes[0].plan.options.filling == "shares", "filling=auto fills where that gains time"


@pytest.mark.parametrize("given", ["profile", "plan"])
def test_a_profile_of_coarser_layers_is_followed_with_its_layers(given):
    """History: one made with another max_share, as advice asks for, was refused, and `strategy.plan` was blamed."""
    settings, samples = Settings(), Samples(2)
    module, batch = build(settings), torch.utils.data.default_collate([samples[0], samples[1]])
    graph = probe(module, lambda module, batch: module.loss(batch), batch, max_share=1 / 4)
    profile = estimate_profile(module, graph)
    plan = find_plan(profile, Cluster(2), PlanOptions(6, num_stages=2, num_microbatches=3))
    choice = {"plan": plan} if given == "plan" else {"profile": profile, "num_stages": 2}
    outcomes, _ = check(2, 3, strategy=choice, trainer={"max_steps": 2})
    assert outcomes[1].plan.layers == graph.path_names
    assert len(graph.path_names) < len(probe(module, lambda m, batch: m.loss(batch), batch).path)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [row(4, 2), (6, 4)])
def test_several_stages_on_each_rank(num_stages, num_microbatches):
    """Two or three stages a rank; a skip from the first stage to the last passes the other rank twice."""
    strategy = {"num_stages": num_stages, "schedule": "interleaved"}
    outcomes, _ = check(2, num_microbatches, strategy=strategy, data={"batch_size": 8})
    assert [stage.ranks for stage in outcomes[0].plan.stages] == [(0,), (1,)] * (num_stages // 2)


@pytest.mark.parametrize(
    ("num_ranks", "schedule", "filling"),
    [
        (2, "v", "auto"),
        (3, "v", "none"),
        row(4, "v", "auto"),
        row(2, "zero_bubble_v", "none"),
        (3, "zero_bubble_v", "auto"),
    ],
)
def test_v_placement(num_ranks, schedule, filling):
    """Skips of the tiny model go from the first half of the chain to the second: most stay on their rank."""
    strategy = {"schedule": schedule, "filling": filling}
    outcomes, _ = check(num_ranks, 3, strategy=strategy, module={"tied": num_ranks == 2})
    down = [(rank,) for rank in range(num_ranks)]
    plan = outcomes[0].plan
    assert [stage.ranks for stage in plan.stages] == down + down[::-1]
    assert plan.planned.sent_bytes < plan.planned.chain_sent_bytes * 2


class Guarded(TinyDiffusion):
    """Looks at its loss, so that it can only be probed on values; can be summed up with sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(1, 4, WIDTH, dtype=torch.float64)

    def forward(self, latent):
        return self.head(self.blocks[0](latent, torch.zeros_like(latent[:, 0])))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if not torch.isfinite(loss):
            raise FloatingPointError("diverged")
        return loss


class Normed(TinyDiffusion):
    """Normalizes on the last stage, over the samples of a microbatch."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Sequential(torch.nn.BatchNorm1d(5), Counts(), self.head)


class Counts(torch.nn.Module):
    """Counts its calls in a buffer that checkpoints leave out, and replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls = self.calls + 1
        return x


class NormedEncoder(TinyDiffusion):
    """Its frozen encoder normalizes, and nobody has called `.eval()` on that part."""

    def __init__(self):
        super().__init__()
        self.encoder.second = torch.nn.Sequential(
            torch.nn.BatchNorm1d(WIDTH).requires_grad_(False), self.encoder.second
        )


def test_statistics_of_a_frozen_encoder_in_training_mode():
    """History: each rank encoded some of the samples, and had statistics of these."""
    outcomes, _ = check(2, 2, module_class=NormedEncoder, strategy={"num_stages": 2})
    assert "encoder.second.0" in outcomes[0].plan.layers
    assert outcomes[0].metrics["val/loss"] == outcomes[1].metrics["val/loss"]


class Freezes(TinyDiffusion):
    """Freezes a block after two steps."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_step == 2:
            self.blocks[2].requires_grad_(False)


class FreezesFirst(TinyDiffusion):
    """Freezes what the other stage reads for one step, and trains it again."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        first = torch.nn.ModuleList([self.time, self.blocks[0]])
        first.requires_grad_(self.trainer.global_step != 1)


@pytest.mark.parametrize("replicas", [row((1, 1)), (1, 3)])
def test_clipping_by_the_norm_over_all_stages(replicas):
    """History: Lightning clips what a rank holds, so every stage was scaled by another factor."""
    world_size = sum(replicas)
    strategy = {"num_replicas": replicas, "num_stages": 2}
    _, expected = check(
        world_size, 4, trainer={"gradient_clip_val": 0.05}, strategy=strategy, tolerance=1e-9
    )
    free = reference(Settings(trainer=FIVE_STEPS), 4)
    assert free.losses[-1] != expected.losses[-1], "the clip value does not bind"


class Filter(torch.nn.Module):
    """Weighs frequencies by complex numbers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex128))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=WIDTH)


class OfFrequencies(TinyDiffusion):
    """Every block begins with a filter, and the largest gradient is logged."""

    def __init__(self, **options):
        super().__init__(**options)
        for block in self.blocks:
            block.norm = torch.nn.Sequential(block.norm, Filter())

    def on_before_optimizer_step(self, optimizer):
        if isinstance(self.trainer.strategy, DiffPipeStrategy):
            largest = self.trainer.strategy.gradient_norm(norm_type=torch.inf)
        else:
            largest = max(p.grad.abs().max() for p in self.parameters() if p.grad is not None)
        self.log("largest", largest)


def test_clipping_with_complex_weights():
    """History: the norm over all stages was refused by torch, which wants another type for it."""
    outcomes, expected = check(
        2, 2, module_class=OfFrequencies, trainer={"gradient_clip_val": 0.05}, strategy={"num_stages": 2},
        tolerance=1e-9,
    )  # fmt: skip
    for outcome in outcomes:
        assert outcome.metrics["largest"] == pytest.approx(expected.metrics["largest"], rel=1e-6)


class ClipsInHook(TinyDiffusion):
    """Clips where Lightning asks it to."""

    def configure_gradient_clipping(self, optimizer, **_):
        self.clip_gradients(optimizer, gradient_clip_val=0.05)


class ClipsByItself(TinyDiffusion):
    """Clips as scripts for one process do."""

    def configure_gradient_clipping(self, optimizer, **_):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class HooksWeights(TinyDiffusion):
    """Bounds every gradient, and halves it where it has been added to those of the window."""

    def on_train_start(self):
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
                parameter.register_post_accumulate_grad_hook(self.halve)

    def halve(self, parameter):
        parameter.grad.mul_(0.5)


@pytest.mark.parametrize(
    ("ranks", "pipelines", "strategy"),
    [
        (2, 1, {"num_stages": 2, "schedule": "zero_bubble"}),
        row(3, 1, {"num_stages": 2, "num_replicas": (1, 2)}),
        row(2, 2, {"num_stages": 1, "num_replicas": 1, "data_parallel": 2}),
    ],
)
def test_hooks_on_weights_see_the_gradient_of_a_batch(ranks, pipelines, strategy):
    """History: they saw that of each microbatch, and of tied or replicated weights that of a part of the ranks."""
    trainer = {"accumulate_grad_batches": 2}
    module = {"tied": True, "lr": 1e-3}
    check(
        ranks, 2, pipelines, module_class=HooksWeights, module=module, trainer=trainer, strategy=strategy,
    )  # fmt: skip


class WatchesWeights(TinyDiffusion):
    """Looks at gradients on rank 0, as W&B does."""

    def on_train_start(self):
        for parameter in self.parameters() if self.global_rank == 0 else ():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: None)


SIDE_BY_SIDE = {"num_stages": 1, "num_replicas": 1, "data_parallel": 2}


@pytest.mark.parametrize(
    ("module_class", "num_microbatches", "num_pipelines", "strategy", "trainer"),
    [
        # History: microbatches of other sizes than two were probed on NaN, and its own check ended the run; and the
        # model summary ran `forward` on the example input, of which each rank had some layers only.
        (Guarded, 2, 1, TWO, {"enable_model_summary": True}),
        # History: other ranks had running statistics of theirs in the end, and checkpoints those of the first rank.
        (Normed, 2, 1, TWO, {}),
        # History: where a stage had replicas frozen layers got gradients of zero, and weight decay moved them.
        (Freezes, 2, 1, WHOLE, {}),
        # History: an output of one stage that needed no gradient any more ended the run.
        (FreezesFirst, 2, 1, TWO, {}),
        (ClipsInHook, 4, 1, TWO, {}),
        (ClipsByItself, 4, 1, WHOLE, {}),  # a rank has all gradients
        # History: one rank summed gradients after each batch of a window, and waited for those that waited for it.
        (WatchesWeights, 2, 2, SIDE_BY_SIDE, {"accumulate_grad_batches": 2}),
    ],
)
def test_modules_that_look_at_losses_gradients_or_statistics(
    module_class, num_microbatches, num_pipelines, strategy, trainer
):
    check(
        2, num_microbatches, num_pipelines, 1e-9, module_class=module_class, strategy=strategy, trainer=trainer
    )  # fmt: skip


@pytest.mark.parametrize("num_stages", [row(2), 3])
def test_results_do_not_depend_on_stages_even_with_dropout(num_stages):
    """Dropout draws from a stream of its own layer, so cutting elsewhere changes nothing."""
    settings = {"module": {"dropout": 0.3}, "trainer": FIVE_STEPS}
    (alone,) = on_ranks(1, **settings)
    assert_equal_runs(on_ranks(num_stages, **settings), alone)


def test_metrics_reach_every_rank():
    """One of them is logged at every other step, so that names change all the time."""
    outcomes, expected = check(
        2, 3, module={"log_extra": True}, strategy={"num_stages": 2}, trainer={"max_steps": -1, "max_epochs": 2},
    )  # fmt: skip
    for outcome in outcomes:
        assert outcome.metrics.keys() >= {"train/loss", "train/double", "train/one", "val/loss"}
        assert outcome.metrics["train/one"] == 1.0
        assert outcome.metrics == outcomes[0].metrics
    last_epoch = expected.losses[-4:]
    assert outcomes[0].metrics["train/loss"] == pytest.approx(last_epoch[-1])
    assert outcomes[0].metrics["train/double"] == pytest.approx(2 * sum(last_epoch) / 4)
    assert outcomes[0].metrics["train/odd"] == pytest.approx(
        3 * (last_epoch[1] + last_epoch[3]) / 2
    )


def test_hooks_fire_in_the_order_of_one_device():
    outcomes, expected = check(
        2, 2, strategy={"num_stages": 2}, trainer={"accumulate_grad_batches": 2}
    )
    assert outcomes[1].hooks == expected.hooks


class Precision(TinyDiffusion):
    """Notes the type its blocks compute in. AdamW would make whole steps of what rounding leaves of a gradient."""

    def denoise(self, noisy, t, text):
        h = super().denoise(noisy, t, text)
        assert h.dtype == torch.bfloat16, f"computed in {h.dtype}"
        return h

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def fit_bf16(rank, world_size):
    torch.manual_seed(3)
    module, data = Precision(), Data(dtype=torch.float32)
    initial, trained = weights_of(module), dict(module.named_parameters())
    fit_module(module, world_size, data, precision="bf16-mixed", limit_val_batches=0, **FIVE_STEPS)
    moves = {name for name, p in trained.items() if p.requires_grad}
    return initial, weights_of(module), moves


def test_bf16_mixed():
    """History: without the precision plugin's context a bf16 run silently computes in fp32."""
    ((initial, alone, moves),) = run_ranks(fit_bf16, 1, 1)
    for _, weights, _ in run_ranks(fit_bf16, 2, 2):
        for name, value in alone.items():
            moved = float((value - initial[name]).abs().max())
            assert bool(moved) == (name in moves)
            torch.testing.assert_close(weights[name], value, atol=0.1 * moved, rtol=0)


def test_all_weights_move():
    """Parity tests pass for the wrong reason when weights never move."""
    expected = reference(Settings(trainer=FIVE_STEPS), 2)
    frozen = {n for n, p in build(Settings()).named_parameters() if not p.requires_grad}
    still = {n for n, v in expected.weights.items() if torch.equal(v, expected.initial[n])}
    assert still == frozen


@pytest.mark.parametrize(
    ("num_ranks", "schedule"),
    [(1, "1f1b"), (2, "1f1b"), (2, "zero_bubble"), row(2, "interleaved"), row(3, "v")],
)
def test_recomputed_layers(num_ranks, schedule):
    stages = {"interleaved": 2 * num_ranks, "v": "auto"}.get(schedule, num_ranks)
    strategy = {"num_stages": stages, "schedule": schedule, "checkpointing": "all"}
    outcomes, _ = check(num_ranks, 4, strategy=strategy, data={"batch_size": 8})
    recomputed = [stage.recomputed for stage in outcomes[0].plan.stages]
    assert all(recomputed), recomputed


@pytest.mark.parametrize(
    ("num_ranks", "num_encoding", "filling", "schedule"),
    [(2, 1, "shares", "1f1b"), (2, 1, "none", "1f1b"), (3, 2, "shares", "1f1b"), row(3, 1, "none", "v"),
     row(3, 1, "shares", "v")],
)  # fmt: skip
def test_ranks_without_encoders(num_ranks, num_encoding, filling, schedule):
    """Those before the last ones hold none of the frozen layers, and encode nothing."""
    stages = num_ranks if schedule == "1f1b" else "auto"
    strategy = {"filling": filling, "encoding_ranks": num_encoding, "schedule": schedule}
    outcomes, _ = check(num_ranks, 3, strategy={"num_stages": stages, **strategy})
    plan = outcomes[0].plan
    assert plan.options.encoding_ranks == num_encoding
    encoding = [
        rank
        for rank, program in enumerate(plan.programs)
        if any(isinstance(i, Encode) for i in program)
    ]
    assert encoding == [*range(num_ranks)][-num_encoding:]
    for rank, outcome in enumerate(outcomes):
        assert outcome.holds_frozen == (rank in encoding)


class SlowLinear(nn.Linear):
    """Sleeps, on rank 1 three times as long."""

    def forward(self, x):
        slow = torch.distributed.is_initialized() and torch.distributed.get_rank()
        time.sleep(0.012 if slow else 0.004)
        return super().forward(x)


class Slow(TinyDiffusion):
    def __init__(self, **options):
        super().__init__(**options)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        for block in self.blocks:
            block.mix = SlowLinear(WIDTH, 2 * WIDTH)


@pytest.mark.table
def test_a_slower_rank_gets_less():
    """Its speed is measured with the layers."""
    strategy = {"num_stages": 2, "profile": "measure"}
    outcomes, _ = check(2, 2, strategy=strategy, module_class=Slow, trainer={"max_steps": 2})
    fast, slow = (
        sum(name.endswith(".mix") for name in outcomes[0].plan.layers[s.first_layer : s.stop])
        for s in outcomes[0].plan.stages
    )
    assert fast >= slow + 2, (fast, slow)
