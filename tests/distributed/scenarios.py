"""Training runs to compare: on several ranks with the strategy, and in one process without it."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_diffpipe import DiffPipeStrategy
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.placement import is_placeholder
from lightning_diffpipe.graph.rng import derived_seed
from lightning_diffpipe.graph.step import ModuleSplit
from lightning_diffpipe.runtime.batch_layout import microbatch_sizes, num_samples, split
from tests import gpu_like
from tests.distributed.tiny import Data, TinyDiffusion
from tests.ranks import run_ranks

SEED = 11


@dataclass
class Settings:
    """One run: the module, the data, the trainer and the strategy."""

    module: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    module_class: type = TinyDiffusion
    data_class: type = Data


@dataclass
class Outcome:
    """What a run leaves on one rank."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    initial: dict[str, torch.Tensor]
    metrics: dict[str, float]
    steps: int
    hooks: list[str]
    plan: Any = None
    basis: Any = None
    held_bytes: int = 0
    holds_frozen: bool = True


class Recorder(L.Callback):
    """Notes losses, gradients before the optimizer step, and the order of hooks."""

    def __init__(self) -> None:
        self.losses, self.gradients, self.hooks = [], [], []
        self.plan = self.basis = None
        self.held_bytes, self.holds_frozen = 0, True

    def on_before_backward(self, trainer, module, loss):
        self.hooks.append("before_backward")

    def on_before_zero_grad(self, trainer, module, optimizer):
        self.hooks.append("before_zero_grad")

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.hooks.append("before_optimizer_step")
        self.gradients.append(
            {n: p.grad.cpu().clone() for n, p in module.named_parameters() if p.grad is not None}
        )
        self.plan = getattr(trainer.strategy, "plan", None)
        self.basis = getattr(getattr(trainer.strategy, "pipeline", None), "basis", None)
        if pipeline := getattr(trainer.strategy, "pipeline", None):
            layers, named = pipeline.graph.layers, dict(module.named_parameters())
            read = {name for index in pipeline.graph.frozen for name in layers[index].parameters}
            self.holds_frozen = not any(is_placeholder(named[name]) for name in read)
        trained = [p.untyped_storage() for p in module.parameters() if p.requires_grad]
        self.held_bytes = sum({s.data_ptr(): s.nbytes() for s in trained}.values())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.hooks.append("batch_end")
        self.losses.append(float(outputs["loss"]))


def quiet_trainer(**options: Any) -> L.Trainer:
    """A trainer that prints and writes nothing and leaves the order of samples alone."""
    defaults = {
        "accelerator": gpu_like.ACCELERATOR, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False,
        "num_sanity_val_steps": 0, "max_epochs": 1,
    }  # fmt: skip
    return L.Trainer(**{**defaults, **options})


def quick_strategy(**options: Any) -> DiffPipeStrategy:
    """The strategy with a seed, a plan from counted operations and little patience."""
    return DiffPipeStrategy(**{"seed": SEED, "profile": "flops", "timeout_s": 20, **options})


def weights_of(module: L.LightningModule) -> dict[str, torch.Tensor]:
    """A copy of the module's state."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def make(module_class: type = TinyDiffusion, **options: Any) -> L.LightningModule:
    """The module in double precision, with weights that depend on nothing else."""
    torch.manual_seed(3)
    return module_class(**options).double()


def build(settings: Settings) -> L.LightningModule:
    """The module of a run."""
    return make(settings.module_class, **settings.module)


def fit_module(
    module: Any = TinyDiffusion,
    world_size: int = 1,
    data: Any = Data,
    strategy: Any = (),
    ckpt_path: Any = None,
    val_dataloaders: Any = None,
    **trainer_options: Any,
) -> L.Trainer:
    """Trains; called on every rank.

    Args:
        module: A module, or the class of one that is made.
        world_size: As many stages there are; if 0, Lightning's own strategy trains in this process.
        data: A data module or its class, or a loader; none where the module has loaders.
        strategy: Its arguments, where they are not one stage for each rank and two microbatches.
        ckpt_path: What training goes on from.
        val_dataloaders: What is validated on beside a loader.
        **trainer_options: Of the trainer.

    Returns:
        The trainer.
    """
    if world_size:
        defaults = {"num_stages": world_size, "num_microbatches": 2}
        trainer_options["strategy"] = quick_strategy(**{**defaults, **dict(strategy)})
    trainer = quiet_trainer(devices=max(world_size, 1), **trainer_options)
    module = make(module) if isinstance(module, type) else module
    data = data() if isinstance(data, type) else data
    trainer.fit(module, data, val_dataloaders, ckpt_path=ckpt_path)
    return trainer


def fit(
    rank: int,
    settings: Settings,
    world_size: int,
    folder: Any = None,
    ckpt_path: Any = None,
    callbacks: Iterable[L.Callback] = (),
) -> Outcome:
    """Trains with the strategy; called on every rank.

    Args:
        rank: This one.
        settings: Of the run.
        world_size: Number of ranks.
        folder: Where a checkpoint of each epoch is left, if anywhere.
        ckpt_path: What training goes on from.
        callbacks: Beside those of the settings.
    """
    module, recorder = build(settings), Recorder()
    initial = weights_of(module)
    strategy = quick_strategy(**settings.strategy)
    saving = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if folder else []
    callbacks = [recorder, *settings.trainer.get("callbacks", []), *callbacks, *saving]
    options = {"enable_checkpointing": bool(folder), **settings.trainer, "callbacks": callbacks}
    trainer = quiet_trainer(devices=world_size, strategy=strategy, **options)
    data = settings.data_class(**settings.data)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return outcome(trainer, module, recorder, initial)


def on_ranks(world_size: int, **settings: Any) -> list[Outcome]:
    """What training leaves on each rank: of one stage on each and two microbatches, unless told otherwise."""
    wanted = Settings(**settings)
    defaults = {"num_stages": world_size, "num_microbatches": 2}
    wanted.strategy = {**defaults, **wanted.strategy}
    return run_ranks(fit, world_size, wanted, world_size)


def outcome(trainer, module, recorder, initial) -> Outcome:
    """Collects what a run leaves."""
    return Outcome(
        recorder.losses, recorder.gradients, weights_of(module), initial,
        {name: float(value) for name, value in trainer.callback_metrics.items()}, trainer.global_step,
        recorder.hooks, recorder.plan, recorder.basis, recorder.held_bytes, recorder.holds_frozen,
    )  # fmt: skip


def reference(settings: Settings, num_microbatches: int, num_pipelines: int = 1) -> Outcome:
    """The oracle: Lightning's own loops on one device, microbatches run one after the other."""
    plain_class = settings.module_class

    class Serial(plain_class):
        """Runs a global batch as the pipelines would: share by share, microbatch by microbatch."""

        def training_step(self, batch, batch_idx):
            batch_spec = ModuleSplit.of(self)
            total = num_samples(batch, batch_spec)
            number, loss = self.trainer.fit_loop.epoch_loop.total_batch_idx, 0.0
            for pipeline, share in enumerate(shares(batch, num_pipelines)):
                sizes = microbatch_sizes(num_samples(share, batch_spec), num_microbatches)
                parts = split(share, sizes, batch_spec)
                for index, (size, part) in enumerate(zip(sizes, parts, strict=True)):
                    rng.seed_all(derived_seed(SEED, pipeline, number, index), host=True)
                    loss = loss + super().training_step(part, batch_idx) * size / total
            return loss

    settings = replace(settings, strategy={}, module_class=Serial)
    module, recorder = build(settings), Recorder()
    initial = weights_of(module)
    options = {**settings.trainer, "callbacks": [recorder]}
    trainer = quiet_trainer(devices=1, **options)
    batch_size = settings.data.get("batch_size", 6) * num_pipelines
    data = settings.data_class(**{**settings.data, "batch_size": batch_size})
    trainer.fit(module, datamodule=data)
    return outcome(trainer, module, recorder, initial)


def check_parity(
    world_size: int,
    num_microbatches: int = 2,
    num_pipelines: int = 1,
    tolerance: float = 1e-10,
    run: Callable[..., Outcome] = fit,
    **settings: Any,
) -> tuple[list[Outcome], Outcome]:
    """Trains three steps on ranks, and compares with the oracle.

    Args:
        world_size: The number of ranks.
        num_microbatches: Of each batch of a pipeline.
        num_pipelines: As many as the strategy places side by side.
        tolerance: The largest error, relative to the largest value of a tensor.
        run: What each rank runs.
        **settings: Fields of `Settings`.

    Returns:
        What the run left on each rank, and what the oracle left.
    """
    wanted = Settings(**settings)
    wanted.trainer = {"max_steps": 3, "max_epochs": -1, **wanted.trainer}
    expected = reference(wanted, num_microbatches, num_pipelines)
    wanted.strategy = {"num_microbatches": num_microbatches, **wanted.strategy}
    outcomes = run_ranks(run, world_size, wanted, world_size)
    assert_equal_runs(outcomes, expected, tolerance)
    return outcomes, expected


def shares(batch: Any, num_pipelines: int) -> list[Any]:
    """What each pipeline sees of a global batch: every n-th sample, as `DistributedSampler` deals."""
    return [
        {key: value[pipeline::num_pipelines] for key, value in batch.items()}
        for pipeline in range(num_pipelines)
    ]


def assert_equal_runs(outcomes: list[Outcome], expected: Outcome, tolerance: float = 1e-10) -> None:
    """Losses, gradients and weights of every rank equal the oracle's, and something was learnt."""
    moved = [
        name
        for name, value in expected.weights.items()
        if not torch.equal(value, expected.initial[name])
    ]
    assert moved, "the reference did not train"
    gradients = [merged(outcomes, step) for step in range(len(expected.gradients))]
    for step, (got, wanted) in enumerate(zip(gradients, expected.gradients, strict=True)):
        assert got.keys() == wanted.keys(), f"step {step}: other parameters have gradients"
        for name in wanted:
            assert_close(got[name], wanted[name], tolerance, f"step {step}, gradient of {name}")
    for step, wanted in enumerate(expected.losses):
        # A rank reports the loss of its own pipeline's batch.
        got = sum(outcome_.losses[step] for outcome_ in outcomes) / len(outcomes)
        assert abs(got - wanted) <= tolerance * abs(wanted), (
            f"step {step}: loss {got}, not {wanted}"
        )
    for rank, outcome_ in enumerate(outcomes):
        assert outcome_.steps == expected.steps
        for name, value in expected.weights.items():
            assert_close(outcome_.weights[name], value, tolerance, f"rank {rank}, {name}")


def assert_weights_are_shared_out(outcomes: list[Outcome]) -> None:
    """Each rank of a pipeline holds 1/S of the trained bytes and what several hold, give or take a block.

    Stages take equally long, not equally many bytes.
    """
    holders = Counter(name for outcome_ in outcomes for name in outcome_.gradients[0])
    num_bytes = {name: outcomes[0].initial[name].nbytes for name in holders}
    blocks: Counter[str] = Counter()
    for name in holders:
        if found := re.match(r".*blocks\.\d+\.", name):
            blocks[found[0]] += num_bytes[name]
    shared = sum(num_bytes[name] for name, count in holders.items() if count > 1)
    whole = sum(num_bytes.values())
    most = (whole - shared) / len(outcomes) + shared + max(blocks.values())
    for rank, outcome_ in enumerate(outcomes):
        assert 0 < outcome_.held_bytes <= most < whole, f"rank {rank} of {len(outcomes)}"


def merged(outcomes: list[Outcome], step: int) -> dict[str, torch.Tensor]:
    """Gradients of all ranks; ranks that hold the same parameter must agree bit for bit."""
    whole: dict[str, torch.Tensor] = {}
    for outcome_ in outcomes:
        for name, gradient in outcome_.gradients[step].items():
            if name in whole:
                assert torch.equal(whole[name], gradient), f"holders of {name} disagree"
            whole[name] = gradient
    return whole


def assert_close(got, wanted, tolerance, what) -> None:
    """Equal up to rounding, relative to the largest value of the tensor."""
    scale = max(wanted.abs().max().item(), 1e-8)
    difference = (got - wanted).abs().max().item()
    assert difference <= tolerance * scale, f"{what}: off by {difference / scale:.1e}"
