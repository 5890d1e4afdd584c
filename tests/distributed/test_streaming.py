"""Training with weights that are copied from host memory for each run of their layer equals one process."""

import itertools
from dataclasses import replace

import lightning as L
import pytest
import torch

from lightning_diffpipe.graph.placement import (
    held_bytes,
    host_value,
    is_offloaded,
    is_placeholder,
    quantize_when_placed,
)
from lightning_diffpipe.quantization import Weight8Bit
from tests.distributed.scenarios import (
    Settings,
    assert_equal_runs,
    fit,
    fit_module,
    make,
    reference,
    weights_of,
)
from tests.distributed.stored import IN_8_BITS, in_8_bits
from tests.distributed.tiny import Adapted, Data
from tests.ranks import RankError, run_in_turn, run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed


PARTS = [f"blocks.{index}.{name}" for index in range(8) for name in ("mix", "out")]
KINDS = "weight", "bias"


class In8Bits(Adapted):
    """Has frozen weights of 8 bits, or plain ones of the same values.

    Args:
        when: `placed`; `made`, by the user; or `never`.
    """

    def __init__(self, when="placed"):
        super().__init__()
        self.when = when
        for layer in (x for block in self.blocks for x in (block.mix, block.out)):
            with torch.no_grad():
                layer.weight.copy_(in_8_bits(layer.weight).dequantize())
            if when == "placed":
                quantize_when_placed(layer.weight, IN_8_BITS)

    def double(self):
        super().double()
        if self.when == "made":
            for layer in (x for block in self.blocks for x in (block.mix, block.out)):
                layer.weight = torch.nn.Parameter(in_8_bits(layer.weight), requires_grad=False)
        return self


class Straight(Adapted):
    """Has no layer that is called twice."""

    def __init__(self):
        super().__init__()
        del self.merge

    def denoise(self, noisy, t, text):
        condition = self.time(t[:, None]) + self.text(text).mean(1)
        for block in self.blocks:
            noisy = block(noisy, condition)
        return self.head(noisy)


class Watch(L.Callback):
    """Notes bytes copied until the end of each step, and parameters that have no memory then."""

    def __init__(self):
        self.copied, self.offloaded, self.plan, self.host_bytes = [], set(), None, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        stream = trainer.strategy.pipeline.engine.layout.steps.stream
        self.copied.append(stream.num_bytes_copied if stream else 0)
        self.plan, named = trainer.strategy.plan, dict(module.named_parameters())
        self.offloaded = {name for name, p in named.items() if is_offloaded(p)}
        assert all(is_placeholder(named[name]) for name in self.offloaded)
        self.host_bytes = sum(held_bytes(host_value(named[name])) for name in self.offloaded)


def fit_watched(rank, settings, world_size):
    watch = Watch()
    return fit(rank, settings, world_size, callbacks=[watch]), watch


def settings_of(num_stages, **strategy):
    options = {"num_stages": num_stages, "num_microbatches": 4, **strategy}
    trainer = {"max_epochs": 2, "accumulate_grad_batches": 2}
    data = {"size": 16, "batch_size": 8}
    return Settings(module_class=Adapted, data=data, trainer=trainer, strategy=options)


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "schedule", "more"),
    [(1, 1, "1f1b", {}), (2, 2, "1f1b", {}), (2, 4, "interleaved", {}), row(2, 2, "zero_bubble", {}),
     row(3, 3, "gpipe", {}), row(2, "auto", "v", {}), row(2, "auto", "zero_bubble_v", {}),
     row(3, 2, "1f1b", {"num_replicas": (2, 1)})],
)  # fmt: skip
def test_streamed_layers(num_ranks, num_stages, schedule, more):
    """With accumulation and validation; copies are those of the plan."""
    settings = settings_of(num_stages, schedule=schedule, streaming="all", **more)
    expected = reference(settings, 4)
    plain = settings_of(num_stages, schedule=schedule, **more)
    without, runs = run_in_turn(fit_watched, num_ranks, (plain, num_ranks), (settings, num_ranks))
    metrics = without[0][0].metrics
    outcomes = [outcome for outcome, _ in runs]
    assert_equal_runs(outcomes, expected)
    plan, frozen = outcomes[0].plan, {f"{part}.{kind}" for part in PARTS for kind in KINDS}
    assert set().union(*(watch.offloaded for _, watch in runs)) == frozen
    for rank, (outcome, watch) in enumerate(runs):
        assert outcome.metrics["val/loss"] == pytest.approx(metrics["val/loss"], 1e-10)
        steps = {b - a for a, b in itertools.pairwise(watch.copied)}
        assert steps == {plan.planned.copied_bytes[rank]}
    holders = {ranks[0] for ranks in plan.placement.stage_ranks}
    streamed = sum(plan.planned.streamed_bytes[rank] for rank in holders)
    assert streamed == sum(expected.weights[n].nbytes for n in frozen)


@pytest.mark.parametrize(
    ("num_ranks", "when", "schedule"),
    [(1, "placed", "1f1b"), (2, "placed", "zero_bubble"), (2, "made", "1f1b"),
     row(2, "placed", "1f1b"), row(1, "made", "1f1b"), row(2, "made", "zero_bubble")],
)  # fmt: skip
def test_quantized_weights_are_copied_as_they_are_packed(num_ranks, when, schedule):
    """Numbers are those of plain weights of the same values; bytes on the host and of copies are those planned."""
    settings = settings_of(num_ranks, schedule=schedule, streaming="all")
    settings = replace(settings, module_class=In8Bits, module={"when": "never"})
    expected = reference(settings, 4)
    runs = run_ranks(fit_watched, num_ranks, replace(settings, module={"when": when}), num_ranks)
    outcomes = [outcome for outcome, _ in runs]
    if when == "made":
        for outcome in outcomes:
            outcome.weights |= {
                n: w.dequantize() for n, w in outcome.weights.items() if type(w) is Weight8Bit
            }
    assert_equal_runs(outcomes, expected)
    planned = outcomes[0].plan.planned
    sizes = {
        f"{part}.{kind}": expected.weights[f"{part}.{kind}"] for part in PARTS for kind in KINDS
    }
    assert set().union(*(watch.offloaded for _, watch in runs)) == sizes.keys()
    packed = sum(IN_8_BITS.num_bytes(w) if w.ndim == 2 else w.nbytes for w in sizes.values())
    assert sum(planned.streamed_bytes) == packed
    for rank, (_, watch) in enumerate(runs):
        assert watch.host_bytes == planned.streamed_bytes[rank]
        steps = {b - a for a, b in itertools.pairwise(watch.copied)}
        assert steps == {planned.copied_bytes[rank]}


def fit_freely(rank, **options):
    module, watch = make(Straight), Watch()
    strategy = {"num_stages": "auto", "num_microbatches": "auto", **options}
    fit_module(module, 2, Data(32, 8), strategy, callbacks=[watch], max_epochs=2)
    return watch.copied, weights_of(module), watch.plan


def fit_with_and_without(rank):
    """Also without streaming in the same stages, whose cuts decide what PipeDream computes."""
    streaming = fit_freely(rank, num_stages=2, schedule="pipedream", streaming="all")
    plan = streaming[-1]
    stages = tuple(replace(stage, recomputed=(), streamed=()) for stage in plan.stages)
    options = replace(plan.options, streaming="none")
    return streaming, fit_freely(rank, plan=replace(plan, stages=stages, options=options))


def test_without_a_flush_nothing_changes():
    """PipeDream has several versions of weights that are trained, which streamed ones are not."""
    for (copied, weights, _), (none, expected, _) in run_ranks(fit_with_and_without, 2):
        assert copied[-1] > copied[0] > 0
        assert set(none) == {0}
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


def test_where_nothing_fits_without_layers_are_streamed():
    """As few as have to be; without streaming, 112,896 bytes would be needed."""
    settings = settings_of(2, checkpointing="all", filling="none")
    settings.trainer["max_steps"] = 2
    limited = {**settings.strategy, "cluster": {"memory_bytes": 110_000}}
    within = replace(settings, strategy=limited)
    without, runs = run_in_turn(fit_watched, 2, (settings, 2), (within, 2))
    assert_equal_runs([outcome for outcome, _ in runs], reference(settings, 4))
    plan = runs[0][0].plan
    assert not without[0][0].plan.streamed
    assert max(plan.planned.peak_memory_bytes) <= 110_000
    assert 0 < len(plan.streamed) < len(PARTS)
    weights = runs[0][0].initial
    for rank, (_, watch) in enumerate(runs):
        offloaded = sum(weights[name].nbytes for name in watch.offloaded)
        assert offloaded == plan.planned.streamed_bytes[rank]
    none = replace(settings, strategy={**limited, "streaming": "none"})
    with pytest.raises(RankError, match="num_microbatches=8 or streaming=auto would fit"):
        run_ranks(fit_watched, 2, none, 2)
