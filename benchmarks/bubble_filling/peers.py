"""The systems compared: each as a function that runs one step and leaves gradients, on two ranks.

All train the same denoiser on the same batch with the same microbatches. Those that cannot fill bubbles run
the frozen encoders data-parallel: each rank encodes half of the samples, and the pipelines among them gather
the halves. No optimizer steps: it would take the same time everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.bubble_filling.workloads import LAYERS, Batch, Workload
from lightning_diffpipe.planning.filling import LOOKAHEAD_BATCHES
from lightning_diffpipe.runtime.upcoming import Filling
from lightning_diffpipe.training.pipeline import Pipeline, Process
from lightning_diffpipe.training.plan_source import PipelineOptions
from lightning_diffpipe.training.preparation import prepare

Step = Callable[[], Any]
READING_LR = 1024.0  # gradients are read from the change of weights: far above its rounding
NUM_RANKS = 2


def prepared(
    model: Workload, batch: Batch, microbatches: int, rank: int, filling: str, **options: Any
) -> Pipeline:
    """This project's pipeline, not yet filled."""
    return prepare(
        model,
        lambda module, part, *arguments: module.training_step(part, 0),
        batch,
        PipelineOptions(
            **{
                "num_stages": NUM_RANKS,
                "num_microbatches": microbatches,
                "filling": filling,
                **options,
            }
        ),
        Process(rank, NUM_RANKS, torch.device("cpu"), "gloo", timeout_s=120.0),
    )


def unfilled(model: Workload, batch: Batch, microbatches: int, rank: int, **options: Any) -> Step:
    """Ours, frozen layers spread over both ranks before the pipeline."""
    engine = prepared(model, batch, microbatches, rank, "none", **options).engine
    numbers = iter(range(10**9))
    return lambda: engine.run_step(batch, next(numbers))


def filled(model: Workload, batch: Batch, microbatches: int, rank: int, **options: Any) -> Step:
    """Ours, frozen layers of the next batch in the bubbles of this one."""
    pipeline = prepared(model, batch, microbatches, rank, "shares", **options)
    engine = pipeline.engine
    engine.fill_bubbles(Filling(planned_shares=pipeline.planned_shares))
    numbers = iter(range(10**9))
    work_s: list[float] = []

    def step() -> None:
        number = next(numbers)
        known = engine.num_prepared_after(number)
        upcoming = [(batch, ())] * (LOOKAHEAD_BATCHES - known)
        recording = engine.run_step(batch, number, upcoming=upcoming).recording
        work_s.append(recording.compute_s + recording.encode_s)

    step.planned = pipeline.plan.planned  # type: ignore[attr-defined]
    step.work_s = work_s  # type: ignore[attr-defined]
    return step


def filled_interleaved(*arguments: Any, **options: Any) -> Step:
    """The same with two stages on each rank: fewer bubbles, for frozen work that is shorter than 1F1B's."""
    return filled(*arguments, schedule="interleaved", num_stages=2 * NUM_RANKS, **options)


def filled_zero_bubble(*arguments: Any, **options: Any) -> Step:
    """The same on a schedule that puts weight gradients into bubbles, too."""
    return filled(*arguments, schedule="zero_bubble", **options)


def half_of(batch: Batch, rank: int) -> Batch:
    return {name: value.chunk(NUM_RANKS)[rank] for name, value in batch.items()}


def encoded(model: Workload, batch: Batch, rank: int) -> Tensor:
    """The frozen part, half of the samples on each rank, gathered."""
    with torch.no_grad():
        own = model.encoder(half_of(batch, rank))
    halves = [torch.empty_like(own) for _ in range(NUM_RANKS)]
    dist.all_gather(halves, own)
    return torch.cat(halves)


def torch_pipelining(
    kind: type, model: Workload, batch: Batch, microbatches: int, rank: int
) -> Step:
    """A schedule of torch.distributed.pipelining over the same two halves."""
    middle = LAYERS // NUM_RANKS
    half = model.denoiser[:middle] if rank == 0 else model.denoiser[middle:]
    stage = PipelineStage(half, rank, NUM_RANKS, torch.device("cpu"))
    schedule = kind(stage, microbatches, loss_fn=F.mse_loss)

    def step() -> None:
        tokens = encoded(model, batch, rank)
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=batch["target"], losses=[])

    return step


def torch_1f1b(*arguments: Any) -> Step:
    return torch_pipelining(Schedule1F1B, *arguments)


def torch_gpipe(*arguments: Any) -> Step:
    return torch_pipelining(ScheduleGPipe, *arguments)


def halves_in_microbatches(
    model: Workload, batch: Batch, microbatches: int, rank: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's half of the batch, encoded, in microbatches of the pipelines' size."""
    own, count = half_of(batch, rank), microbatches // NUM_RANKS
    with torch.no_grad():
        tokens = model.encoder(own)
    yield from zip(tokens.chunk(count), own["target"].chunk(count), strict=True)


def ddp(model: Workload, batch: Batch, microbatches: int, rank: int) -> Step:
    """DDP: each rank trains the whole denoiser on half of the microbatches."""
    wrapped = DistributedDataParallel(model.denoiser)
    count = microbatches // NUM_RANKS

    def step() -> None:
        for index, (part, target) in enumerate(
            halves_in_microbatches(model, batch, microbatches, rank), 1
        ):
            wrapped.require_backward_grad_sync = index == count
            (F.mse_loss(wrapped(part), target) / count).backward()

    return step


def fsdp2(model: Workload, batch: Batch, microbatches: int, rank: int) -> Step:
    """FSDP2: as DDP, parameters sharded block by block."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for block in model.denoiser:
        fully_shard(block, mesh=mesh)
    fully_shard(model.denoiser, mesh=mesh)
    count = microbatches // NUM_RANKS

    def step() -> None:
        for index, (part, target) in enumerate(
            halves_in_microbatches(model, batch, microbatches, rank), 1
        ):
            model.denoiser.set_requires_gradient_sync(index == count)
            (F.mse_loss(model.denoiser(part), target) / count).backward()

    return step


def deepspeed_pipeline(model: Workload, batch: Batch, microbatches: int, rank: int) -> Step:
    """DeepSpeed's pipeline engine, on gloo; its gradients are read from one step of SGD."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), LOCAL_SIZE=str(NUM_RANKS))
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    layers = PipelineModule(
        list(model.denoiser), num_stages=NUM_RANKS, loss_fn=F.mse_loss, partition_method="uniform"
    )
    trained = [p for p in layers.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=layers,
        optimizer=torch.optim.SGD(trained, lr=READING_LR),
        config={
            "train_micro_batch_size_per_gpu": len(batch["target"]) // microbatches,
            "gradient_accumulation_steps": microbatches,
            "gradient_clipping": 0.0,  # otherwise to a norm of 1
            "steps_per_print": 10**9,
        },
    )

    def step() -> None:
        tokens = encoded(model, batch, rank)
        pairs = zip(tokens.chunk(microbatches), batch["target"].chunk(microbatches), strict=True)
        engine.train_batch(pairs)

    before = {name: p.detach().clone() for name, p in model.denoiser.named_parameters()}
    step()
    for name, parameter in model.denoiser.named_parameters():
        if not torch.equal(parameter, before[name]):
            parameter.grad = (before[name] - parameter.detach()) / READING_LR
        parameter.data.copy_(before[name])
    found = gradients(model)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    step.gradients = found  # type: ignore[attr-defined]
    return step


def limit(model: Workload, batch: Batch, microbatches: int, rank: int) -> Step:
    """All work over both ranks, without a pipeline: half of the samples on each, nothing exchanged."""
    return lambda: train(model, halves_in_microbatches(model, batch, microbatches, rank))


def limit_out_of_step(model: Workload, batch: Batch, microbatches: int, rank: int) -> Step:
    """The same, but one rank encodes while the other trains, as the ranks of a pipeline do."""
    encoded_before = list(halves_in_microbatches(model, batch, microbatches, rank))

    def step() -> None:
        if rank == 0:
            train(model, halves_in_microbatches(model, batch, microbatches, rank))
        else:
            train(model, encoded_before)
            list(halves_in_microbatches(model, batch, microbatches, rank))

    return step


def train(model: Workload, parts: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Forward and backward of some microbatches, which are all there are."""
    pairs = list(parts)
    for part, target in pairs:
        (F.mse_loss(model.denoiser(part), target) / len(pairs)).backward()


SYSTEMS: dict[str, Callable[..., Step]] = {
    "limit": limit,  # beside what is compared with it, as the machine's speed drifts
    "filled": filled,
    "limit out of step": limit_out_of_step,
    "filled interleaved": filled_interleaved,
    "filled zero-bubble": filled_zero_bubble,
    "unfilled": unfilled,
    "torch 1F1B": torch_1f1b,
    "torch GPipe": torch_gpipe,
    "DDP": ddp,
    "FSDP2": fsdp2,
    "DeepSpeed": deepspeed_pipeline,
}


FILLED = ("filled", "filled interleaved", "filled zero-bubble")
OURS = (*FILLED, "unfilled")
LIMITS = ("limit", "limit out of step")


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """A copy of what a module accumulated, and a clean slate."""
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
    module.zero_grad(set_to_none=True)
    return found
