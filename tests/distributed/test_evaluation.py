"""Validation, testing and sampling use the whole module, on all ranks together."""

import contextlib

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, Metric, SumMetric

from lightning_diffpipe.runtime.results import ResultSharing
from tests.distributed.scenarios import fit_module, make, on_ranks, quick_strategy, quiet_trainer
from tests.distributed.tiny import Data, Samples, TinyDiffusion
from tests.ranks import RankError, run_ranks
from tests.rows import row

pytestmark = pytest.mark.distributed


class Quiet(TinyDiffusion):
    """Validation without random numbers, so that plain Lightning is an oracle for it."""

    def validation_step(self, batch, batch_idx):
        t = torch.full((len(batch["image"]),), 0.5, dtype=batch["image"].dtype)
        mean, _ = self.encoder(batch["image"]).chunk(2, -1)
        loss = self.denoise(mean, t, batch["text"]).pow(2).mean()
        self.log("val/loss", loss, sync_dist=True)

    test_step = validation_step


def validate_between(rank, world_size):
    module = make(Quiet)
    trainer = fit_module(
        module, world_size, max_epochs=2, val_check_interval=2, num_sanity_val_steps=1,
    )  # fmt: skip
    during = float(trainer.callback_metrics["val/loss"])
    after = trainer.validate(module, datamodule=Data(), verbose=False)[0]["val/loss"]
    tested = trainer.test(module, datamodule=Data(), verbose=False)[0]["val/loss"]
    return during, after, tested


def test_validation_in_training_equals_validation_afterwards():
    """Evaluated by two ranks in lock step, then by each rank with the whole module."""
    (during, after, tested), second = run_ranks(validate_between, 2, 2)
    assert during == pytest.approx(after, rel=1e-12)
    assert tested == pytest.approx(after, rel=1e-12)
    assert second == (during, after, tested)


class Cropped(Quiet):
    """Changes batches of validation at random on their way to the device, and notes what came of them."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "image": batch["image"] + torch.rand(())}

    def on_validation_batch_start(self, batch, batch_idx):
        self.seen = (*getattr(self, "seen", ()), float(batch["image"].sum()))


def validate_on_random_batches(rank):
    module = make(Cropped)
    torch.manual_seed(rank)  # as processes have it without seed_everything
    trainer = fit_module(module, 2, strategy={"seed": None}, max_epochs=2, num_sanity_val_steps=1)
    return module.seen, float(trainer.callback_metrics["val/loss"])


def test_ranks_of_a_pipeline_validate_on_the_same_batches():
    """History: each rank drew its own, and a scheduler that follows val/loss gave stages unlike learning rates."""
    (first, loss), (second, other) = run_ranks(validate_on_random_batches, 2)
    assert (first, loss) == (second, other)
    num_batches = len(first) // 2
    assert first[0] == first[1], "the sanity check looks at the first batch"
    assert first[1 : 1 + num_batches] == first[1 + num_batches :], "passes differ"
    assert len(set(first)) == num_batches > 1


class Sampling(L.Callback):
    """Samples in mid-training, as an image-logging callback does."""

    def __init__(self):
        self.samples = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        x = torch.ones(2, 5, 12, dtype=torch.float64)
        text = torch.zeros(2, 4, dtype=torch.long)
        with trainer.strategy.whole_model(), torch.no_grad():
            for step in range(3):
                t = torch.full((2,), 1 - step / 3, dtype=torch.float64)
                x = x - module.denoise(x, t, text) / 3
        self.samples.append(x)


def sample(rank, world_size):
    sampling = Sampling()
    fit_module(world_size=world_size, max_steps=2, callbacks=[sampling])
    return sampling.samples


def test_a_callback_samples_with_the_module_that_is_being_trained():
    (alone,) = run_ranks(sample, 1, 1)
    for samples in run_ranks(sample, 3, 3):
        for got, wanted in zip(samples, alone, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)


class Trespasser(L.Callback):
    """Calls a layer of another stage in a hook."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.head(torch.zeros(1, 12, dtype=torch.float64))
        module.blocks[0](torch.zeros(1, 5, 12).double(), torch.zeros(1, 12).double())


def test_a_hook_that_calls_a_foreign_layer_learns_whose_it_is():
    with pytest.raises(
        RankError, match=r"was called outside a pipeline step.* live on stage [01] \(rank"
    ):
        on_ranks(2, trainer={"callbacks": [Trespasser()]})


def fit_validate_fit(rank):
    module, groups = make(), len(dist.distributed_c10d._world.pg_map)
    trainer = fit_module(module, 2, max_epochs=1)
    trainer.validate(module, datamodule=Data(), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=Data())
    assert module.head.weight.is_contiguous()
    assert "forward" not in vars(module.head)
    return groups, len(dist.distributed_c10d._world.pg_map), trainer.current_epoch


def test_a_trainer_can_be_used_again_and_leaves_nothing_behind():
    for before, after, epoch in run_ranks(fit_validate_fit, 2):
        assert before == after, "process groups leaked"
        assert epoch == 2


class Counting(Quiet):
    """Logs what can be counted by hand, with the reductions and weights that `self.log` knows."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        image, size = batch["image"], len(batch["image"])
        once = {"on_step": False, "on_epoch": True}
        options = {**once, "sync_dist": True}
        self.log("train/mean", image.mean(), batch_size=size, **options)
        self.log("train/samples", float(size), reduce_fx="sum", **options)
        self.log("train/largest", image.max(), reduce_fx="max", **options)
        self.log("train/smallest", image.min(), reduce_fx=torch.min, **options)
        self.log("train/by_place", image.sum(), False, None, False, True, "sum", sync_dist=True)
        for token in batch["text"][:, 0].unique().tolist():
            mine = image[batch["text"][:, 0] == token]
            self.log(f"train/sum_{token}", mine.sum(), reduce_fx="sum", **once)
            self.log(f"train/largest_{token}", mine.max(), reduce_fx="max", **once)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/samples", float(len(batch["image"])), reduce_fx="sum", sync_dist=True)


def count(rank, world_size, options, size):
    trainer = fit_module(Counting, world_size, Data(size=size, batch_size=8), options)
    module = trainer.lightning_module
    agreed = trainer.strategy.reduce_boolean_decision(True)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    after = trainer.validate(module, datamodule=Data(), verbose=False)[0]["val/samples"]
    return found, after, agreed


@pytest.mark.parametrize(
    ("world_size", "num_stages", "num_replicas", "pipelines"),
    [row(2, 2, 1, 1), row(2, 1, 2, 1), (4, 2, 1, 2)],
)
def test_what_is_logged_is_what_one_process_logs(world_size, num_stages, num_replicas, pipelines):
    """Batches of 8 and 5 samples in each pipeline, of two ranks or two replicas."""
    options = {"num_stages": num_stages, "num_replicas": num_replicas, "num_microbatches": 4}
    alone, _, _ = count(0, 0, (), 13 * pipelines)
    alone = {name: value for name, value in alone.items() if name.startswith("train/")}
    del alone["train/loss"]  # its random numbers are drawn for microbatches
    if pipelines > 1:  # a pipeline knows its own tokens only
        alone = {name: value for name, value in alone.items() if not name[-1].isdigit()}
    else:
        assert any(name.startswith("train/sum_") for name in alone)
    for found, after, agreed in run_ranks(count, world_size, world_size, options, 13 * pipelines):
        assert {name: found[name] for name in alone} == pytest.approx(alone)
        assert found["val/samples"] == after == 8
        assert agreed


class Measuring(Quiet):
    """Has metrics that step, evaluation and hooks of both compute."""

    def __init__(self, **options):
        super().__init__(**options)
        self.trained, self.steps, self.samples = MeanMetric(), SumMetric(), SumMetric()
        self.others = [SumMetric(), CatMetric()]  # no modules of this one

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.trained.update(loss.detach())
        self.steps.update(len(batch["image"]))
        self.log("train/so_far", self.trained.compute(), on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.counted = float(self.steps.compute()), float(self.trained.compute())

    def validation_step(self, batch, batch_idx):
        for metric in self.others:
            metric.update(batch["image"].sum((1, 2)))
        self.samples.update(len(batch["image"]))
        self.log("val/samples", self.samples)

    def on_validation_epoch_end(self):
        total, single = (metric.compute() for metric in self.others)
        self.validated = float(total), sorted(single.tolist())


def measure(rank, world_size, options, size):
    module, sync = make(Measuring), Metric.sync
    trainer = fit_module(module, world_size, Data(size=size, batch_size=8), options)
    assert Metric.sync is sync
    return module.counted, module.validated, float(trainer.callback_metrics["val/samples"])


@pytest.mark.parametrize(
    ("world_size", "num_stages", "num_replicas", "pipelines"),
    [row(2, 2, 1, 1), row(2, 1, 2, 1), pytest.param(4, 2, 1, 2, marks=pytest.mark.slow)],
)
def test_metrics_count_every_sample_once(world_size, num_stages, num_replicas, pipelines):
    """History: `compute()` in a step waited for stages that never come there, and a validation counted ranks."""
    options = {"num_stages": num_stages, "num_replicas": num_replicas, "profile": None}
    size = 16 * pipelines
    _, validated, _ = measure(0, 0, (), size)
    results = run_ranks(measure, world_size, world_size, options, size)
    for (samples, mean), (total, single), logged in results:
        assert samples == size
        assert mean == pytest.approx(results[0][0][1])
        assert total == pytest.approx(validated[0])
        assert single == pytest.approx(validated[1])
        assert logged == len(single) == 8


def test_what_is_logged_keeps_no_activations(monkeypatch):
    """History: logged tensors held the graph of every microbatch until the end of the step."""
    seen = []
    start = ResultSharing.start
    monkeypatch.setattr(
        ResultSharing,
        "start",
        lambda self, works, *more: seen.extend(works) or start(self, works, *more),
    )
    fit_module(make(log_extra=True), max_steps=1)
    logged = pytree.tree_leaves([work.logged for work in seen])
    tensors = [value for value in logged if isinstance(value, torch.Tensor)]
    assert len(tensors) == 4
    assert not any(tensor.requires_grad for tensor in tensors)


class Evaluates(TinyDiffusion):
    """Draws in layers and between them from a seed, enters the whole model, or takes a gradient."""

    def __init__(self, how="plainly"):
        super().__init__(dropout=0.5)
        self.how, self.seen = how, []

    def validation_step(self, batch, batch_idx):
        if self.how != "without a seed":
            torch.manual_seed(batch_idx)
        self.blocks.train()
        strategy = self.trainer.strategy
        enters = self.how.startswith("whole") and not isinstance(strategy, SingleDeviceStrategy)
        with strategy.whole_model() if enters else contextlib.nullcontext():
            self.seen += [float(self.loss(batch)), float(torch.rand(()))]
            if self.how.endswith("gradient"):
                with torch.enable_grad():
                    mean = self.encoder(batch["image"]).chunk(2, -1)[0].requires_grad_()
                    out = self.denoise(mean, mean[:, 0, 0], batch["text"])
                    torch.autograd.grad(out.sum(), mean)
        if self.how == "transform":
            mean = self.encoder(batch["image"]).chunk(2, -1)[0]
            torch.func.grad(lambda x: self.denoise(x, x[:, 0, 0], batch["text"]).sum())(mean)


def evaluate(rank, world_size, how):
    module = make(Evaluates, how=how)
    options = {"num_sanity_val_steps": 2, "limit_val_batches": 2, "inference_mode": False}
    fit_module(module, world_size, max_steps=1, **options)
    return module.seen[:4]


@pytest.mark.parametrize("how", ["plainly", row("whole")])
def test_evaluation_draws_what_one_process_draws(how):
    """History: layers that draw were all seeded alike; `whole_model()` in a step waited beyond every limit."""
    expected = evaluate(0, 0, "plainly")
    for found in run_ranks(evaluate, 2, 2, how):
        assert found == pytest.approx(expected, rel=1e-9)


def test_evaluation_without_a_seed_draws_the_same_on_any_number_of_ranks():
    """What is drawn follows the run's seed and the batch, so not what plain Lightning has drawn in training."""
    (expected,) = run_ranks(evaluate, 1, 1, "without a seed")
    assert len(set(expected)) == 4
    for found in run_ranks(evaluate, 2, 2, "without a seed"):
        assert found == pytest.approx(expected, rel=1e-9)


class EvaluatesTwice(Evaluates):
    test_step = Evaluates.validation_step


def evaluate_alone(rank, world_size, fits):
    """Returns losses and numbers of two validations and a test; a fit leaves the generators as they were."""
    trained, module = (make(EvaluatesTwice, how="without a seed") for _ in range(2))
    torch.manual_seed(7 + rank)  # as processes have it without seed_everything
    strategy = {"strategy": quick_strategy(num_stages=world_size)} if world_size else {}
    trainer = quiet_trainer(devices=max(world_size, 1), max_steps=1, **strategy)
    if fits:
        trainer.fit(trained, Data())
    data = DataLoader(Samples(12), 6, shuffle=True)
    for run in (trainer.validate, trainer.validate, trainer.test):
        run(module, data, verbose=False)
    return module.seen


@pytest.mark.parametrize(("world_size", "fits"), [(1, False), (1, True), (2, True)])
def test_evaluation_by_itself_draws_what_plain_lightning_draws(world_size, fits):
    """History: each run began with the seed of `seed_everything`, so that two validations drew the same noise."""
    expected = evaluate_alone(0, 0, fits=False)
    assert len(set(expected)) == 12
    for found in run_ranks(evaluate_alone, world_size, world_size, fits):
        assert found == expected


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("gradient", "a gradient is taken through head"),
        row("whole, gradient", "a gradient is taken through head"),
        row("transform", r"torch\.func\.grad or vjp is taken through "),
    ],
)
def test_gradients_taken_in_a_validation_are_refused_by_name(how, said):
    """History: torch said on one rank that a tensor had no graph, and the other waited for it."""
    with pytest.raises(RankError, match=rf"GraphError: {said}.*, which pos.*num_stages=1"):
        run_ranks(evaluate, 2, 2, how)
