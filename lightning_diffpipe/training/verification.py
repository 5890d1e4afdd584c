"""Proof before training: the pipeline's loss and gradients against a run of the whole module.

The probe follows every value through PyTorch's dispatcher. Custom kernels that read raw pointers, or code
that keeps tensors where nobody looks, can escape it. Dummies hold NaN, so that a value that should have been
sent is loud; with `verify=True` one batch is run both ways before training begins, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.fake import untouched
from lightning_diffpipe.graph.float32 import rounding_of
from lightning_diffpipe.graph.forms import Exemplar
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph, TensorSpec
from lightning_diffpipe.graph.step import StepCall
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.runtime.engine import Engine
from lightning_diffpipe.runtime.microbatch import microbatch_sizes, num_samples, split
from lightning_diffpipe.runtime.partitioned import PartitionedStepCache, Step
from lightning_diffpipe.runtime.seeding import microbatch_seed

_log = logging.getLogger(__name__)

# Relative to the largest gradient: rounding of the types, summed in another order.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@dataclass
class WholeRun:
    """Loss and gradients of one batch, computed without cutting anything.

    Attributes:
        loss: Mean over the samples.
        gradients: By name.
        dtypes: Those in which layers computed, which autocast chooses.
    """

    loss: float
    gradients: dict[str, Tensor]
    dtypes: frozenset[torch.dtype]


def run_whole(
    module: nn.Module,
    step: Step,
    graph: LayerGraph,
    interception: Interception,
    batch: Any,
    num_microbatches: int,
    seed: int,
    pipeline: int = 0,
    exemplar: Exemplar | None = None,
) -> WholeRun:
    """Runs all layers of a batch on this rank; the module must still be whole.

    Args:
        module: The module, with its wrappers installed.
        step: Module and batch to loss.
        graph: The graph the pipeline uses.
        interception: The installed wrappers.
        batch: One pipeline's batch.
        num_microbatches: As planned.
        seed: Seed of the run.
        pipeline: Index of this rank's pipeline, which draws its own random numbers.
        exemplar: Makes the step take the graph's form, if it takes several.
    """
    steps = PartitionedStepCache(
        module, step, graph, (), Placement(((0,),)), 0, interception, next(module.parameters()).device,
        exemplar=exemplar,
    )  # fmt: skip
    sizes = microbatch_sizes(num_samples(batch, graph.form), num_microbatches)
    loss, total, dtypes = 0.0, 0.0, {parameter.dtype for parameter in module.parameters()}
    with untouched(module):
        parts = split(batch, sizes, graph.form)
        for index, (size, part) in enumerate(zip(sizes, parts, strict=True)):
            number = microbatch_seed(seed, pipeline, 0, index)
            partitioned = steps.of(part, number)
            known = partitioned.graph
            outputs = (leaf for layer in known.layers for leaf in layer.outputs)
            dtypes |= {leaf.dtype for leaf in outputs if isinstance(leaf, TensorSpec)}
            run = partitioned.stage_views[0].forward(
                StepCall(step, module, part, written=known.batch_writes),
                seed=number,
                log=lambda *arguments: None,
            )
            assert run.loss is not None
            weight = float(size if run.weight is None else run.weight)
            loss, total = loss + float(run.loss.detach()) * weight, total + weight
            run.backward(loss_scale=size if run.weight is None else 1.0)
    gradients = {n: p.grad / total for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return WholeRun(loss / total, gradients, frozenset(dtypes))


def compare(
    module: nn.Module,
    engine: Engine,
    batch: Any,
    trained: Mapping[str, nn.Parameter],
    whole: WholeRun,
) -> None:
    """Runs the same batch as a pipeline and compares; leaves no gradients behind.

    With several pipelines side by side only losses are compared: gradients are sums over all of them.

    Raises:
        GraphError: The loss or a gradient differs by more than rounding.
    """
    with untouched(module):
        result = engine.run_step(batch, batch_index=0, reduce_gradients=engine.num_pipelines == 1)
    worst, name = 0.0, ""
    scale = max((g.abs().max().item() for g in whole.gradients.values()), default=0.0) or 1.0
    for key, parameter in trained.items():
        if engine.num_pipelines == 1:
            error = _difference(parameter.grad, whole.gradients.get(key), scale)
            if error > worst:
                worst, name = error, key
    for parameter in trained.values():
        parameter.grad = None
    device = result.loss.device
    tolerance = max(_tolerance(dtype, device) for dtype in whole.dtypes)
    loss_error = abs(float(result.loss) - whole.loss) / max(abs(whole.loss), 1e-12)
    if not (worst <= tolerance and loss_error <= tolerance):  # a loss may be NaN
        raise GraphError(
            f"verify=True: as a pipeline the loss differs by {loss_error:.1e} and the gradient of "
            f"{name or 'no parameter'} by {worst:.1e} from a run of the whole module (rounding would be "
            f"below {tolerance:.0e}). A layer reads or writes something the probe cannot see, such as a "
            "custom kernel's buffer or a tensor kept in a global; pass it through arguments and outputs"
        )
    _log.info("verified: loss to %.1e, gradients to %.1e", loss_error, worst)


def _tolerance(dtype: torch.dtype, device: torch.device) -> float:
    if dtype in _TOLERANCE and rounding_of(dtype, device) > torch.finfo(dtype).eps:
        return _TOLERANCE[torch.float16]  # TF32 has as many digits
    return _TOLERANCE.get(dtype, 0.0)


def _difference(gradient: Tensor | None, expected: Tensor | None, scale: float) -> float:
    """Returns by how much a gradient is off, relative to `scale`; a missing one counts as zeros.

    Infinity where a value is not finite: NaN compares with nothing, and the next gradient would hide it.
    """
    if gradient is None or expected is None:
        there = expected if gradient is None else gradient
        error = 0.0 if there is None else there.abs().max().item()
    else:
        error = (gradient - expected.to(gradient.device)).abs().max().item()
    return error / scale if math.isfinite(error / scale) else math.inf
