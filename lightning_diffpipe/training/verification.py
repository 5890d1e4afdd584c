"""Comparisons before training: a batch's loss with that of its parts, a pipeline with the whole module.

**A mean over samples.** A pipeline takes the mean of its microbatches' losses, weighed by samples or as the step
says, and of what they log. A mean over tokens, or a loss over pairs of rows, is something else, and would train
something else without an error. What makes the difference is nearly always the code after the last layer. So the
step is run on the example batch, and on two parts of it, without any layer, in milliseconds and on the host,
however large the model is:

    layers          random numbers in (0, 1) stand for what they give, larger for later samples, alike in parts
    random numbers  what the step samples for a part are the rows that it sampled for the batch

**Loss and gradients** (`verify=True`). The probe follows every value through PyTorch's dispatcher. Custom kernels
that read raw pointers, or code that keeps tensors where nobody looks, can escape it. Dummies hold NaN, so that a
value that should have been sent is loud; one batch run both ways finds the rest.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.cut import tail
from lightning_diffpipe.graph.fakes import without_garbage_collection
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph, TensorKey, TensorSpec
from lightning_diffpipe.graph.probed_step import ProbedStep
from lightning_diffpipe.graph.rng import draws, microbatch_seed
from lightning_diffpipe.graph.step import ModuleSplit, StepCall, logged_values
from lightning_diffpipe.graph.trial import untouched
from lightning_diffpipe.graph.versions import rounding_of
from lightning_diffpipe.graph.view import StageView
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.profiling.step_run import undisturbed
from lightning_diffpipe.runtime.batch_layout import microbatch_sizes, num_samples, split
from lightning_diffpipe.runtime.engine import Engine
from lightning_diffpipe.runtime.partitioned import PartitionedStepCache
from lightning_diffpipe.runtime.results import kind_of, metrics_in

_log = logging.getLogger(__name__)

# Relative to the largest gradient: rounding of the types, summed in another order.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@dataclass
class WholeRun:
    """Loss and gradients of one batch, computed without cutting anything.

    Attributes:
        dtypes: Types in which layers computed, which autocast chooses.
    """

    loss: float
    gradients: dict[str, Tensor]
    dtypes: frozenset[torch.dtype]


def run_whole(
    probed: ProbedStep,
    interception: Interception,
    batch: Any,
    num_microbatches: int,
    seed: int,
    pipeline: int = 0,
) -> WholeRun:
    """Runs all layers of a batch on this rank; the module must still be whole.

    Args:
        probed: The module and its step; a step of several call sequences takes the longest.
        interception: The installed wrappers.
        batch: One pipeline's batch, where the module is.
        num_microbatches: As planned.
        seed: Seed of the run.
        pipeline: Index of this rank's pipeline, which has its own random numbers.
    """
    module, step, graph = probed.module, probed.step, probed.graph
    steps = PartitionedStepCache(
        module, step, graph, (), Placement(((0,),)), 0, interception, next(module.parameters()).device,
        trials=probed.sequences,
    )  # fmt: skip
    sizes = microbatch_sizes(num_samples(batch, graph.batch_spec), num_microbatches)
    loss, total, dtypes = 0.0, 0.0, {parameter.dtype for parameter in module.parameters()}
    with untouched(module):
        parts = split(batch, sizes, graph.batch_spec)
        for index, (size, part) in enumerate(zip(sizes, parts, strict=True)):
            part_seed = microbatch_seed(seed, pipeline, 0, index)
            partitioned = steps.of(part, part_seed)
            layer_graph = partitioned.graph
            outputs = (leaf for layer in layer_graph.layers for leaf in layer.outputs)
            dtypes |= {leaf.dtype for leaf in outputs if isinstance(leaf, TensorSpec)}
            run = partitioned.stage_views[0].forward(
                StepCall(step, module, part, written=layer_graph.batch_writes),
                seed=part_seed,
                log=lambda *arguments: None,
            )
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
    scale = max((g.abs().max().item() for g in whole.gradients.values()), default=0.0) or 1.0
    compared = trained.items() if engine.num_pipelines == 1 else ()
    errors = [(_difference(p.grad, whole.gradients.get(n), scale), n) for n, p in compared]
    worst, name = max(errors, default=(0.0, "no parameter"))
    for parameter in trained.values():
        parameter.grad = None
    device = result.loss.device
    tolerance = max(_tolerance(dtype, device) for dtype in whole.dtypes)
    loss_error = abs(float(result.loss) - whole.loss) / max(abs(whole.loss), 1e-12)
    if not (worst <= tolerance and loss_error <= tolerance):  # a loss may be NaN
        raise GraphError(
            f"verify=True: as a pipeline the loss differs by {loss_error:.1e} and the gradient of "
            f"{name} by {worst:.1e} from a run of the whole module (rounding would be "
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
        either = expected if gradient is None else gradient
        error = 0.0 if either is None else either.abs().max().item()
    else:
        error = (gradient - expected.to(gradient.device)).abs().max().item()
    return error / scale if math.isfinite(error / scale) else math.inf


_LOSS_TOLERANCE = 1e-4
_LOSS = ""  # a name that nothing logged has


@dataclass(frozen=True)
class MeanCheck:
    """Compares the loss of a batch, and what it logs, with those of two parts of it.

    Attributes:
        probed: The step and its batch; the module is whole and on the host.
    """

    probed: ProbedStep
    interception: Interception
    _views: dict[int, StageView] = field(default_factory=dict, init=False)

    @without_garbage_collection()
    def difference(self, num_microbatches: int) -> str:
        """Returns what is different, why, and a remedy; empty if nothing is, or it cannot be found out.

        Where the loss is, nothing is said of what is logged.
        """
        total = num_samples(self.probed.batch, self.probed.graph.batch_spec)
        if num_microbatches == 1 or total < 2:
            return ""
        if isinstance(self.probed.graph.batch_spec, ModuleSplit):
            _log.info("the module cuts its batches itself, so that losses are not compared")
            return ""
        first = -(-total // num_microbatches)
        sizes, weighted = (first, total - first), self.probed.graph.weighted
        try:
            with undisturbed(self.probed.module):
                graph = self.probed.graph
                has_several_rows = any((graph.spec(k).rows or 0) > 1 for k in graph.tail_reads)
                for repeated in (False, True) if has_several_rows else (False,):
                    draws = [self._compared(total, first, seed, repeated) for seed in (0, 1)]
                    losses = [draw[_LOSS] for draw in draws]
                    problem = _why_loss_differs(losses, sizes, weighted, self._tolerance)
                    if not problem:
                        return _why_logged_differs(draws, self._tolerance)
        except Exception as error:  # of any code, on numbers that mean nothing
            _log.info("the loss of a batch cannot be compared with those of its parts: %s", error)
            return ""
        return problem

    @cached_property
    def _tolerance(self) -> float:
        """The relative tolerance; low precision rounds losses, too."""
        kinds = {p.dtype for p in self.probed.module.parameters() if p.dtype.is_floating_point}
        return max(_LOSS_TOLERANCE, *(4 * torch.finfo(kind).eps for kind in kinds))

    def _compared(self, total: int, first: int, seed: int, repeated: bool) -> dict[str, _Losses]:
        """Returns the loss and what is logged as a mean, by name, of the batch and of its two parts."""
        values = _StandIns(self.probed.graph, total, seed, repeated)
        sampled = _RowsOfDraws(total, repeated)
        everything, rows = slice(0, total), (slice(0, first), slice(first, total))
        whole, _ = self._run(self.probed.batch, everything, values, sampled, seed)
        parts = split(self.probed.batch, (first, total - first), self.probed.graph.batch_spec)
        pieces = [
            self._run(part, part_rows, values, sampled, seed)
            for part, part_rows in zip(parts, rows, strict=True)
        ]
        comparisons = {
            name: _Losses(value, *((part.get(name, 0.0), w * (name in part)) for part, w in pieces))
            for name, value in whole.items()
        }
        if all(each.error <= self._tolerance for each in comparisons.values()):
            return comparisons
        # Nobody knows for which sample those of the host are; what is logged may depend on the clock, too.
        again, _ = self._run(self.probed.batch, everything, values, sampled, seed + 2)
        if self.probed.graph.host_random and again[_LOSS] != whole[_LOSS]:
            raise ValueError("it depends on random numbers of Python's or numpy's generators")
        return {n: x for n, x in comparisons.items() if n == _LOSS or again.get(n) == x.whole}

    def _run(
        self, batch: Any, rows: slice, values: _StandIns, sampled: _RowsOfDraws, seed: int
    ) -> tuple[dict[str, float], float]:
        """Returns the loss of some of the samples, and what they log as means; and what they weigh."""
        size = rows.stop - rows.start
        view = self._view(size)
        written = view.graph.batch_writes
        call = StepCall(self.probed.widest, self.probed.module, batch, written=written)
        calls: list[tuple[str, Any, Any]] = []

        def log(method: str, *given: Any) -> None:
            calls.append((method, *logged_values(self.probed.module, given)))

        with sampled.of(rows):
            run = view.forward(call, seed=seed, received=values.of(rows), log=log)
        means = {_LOSS: float(run.loss.detach())} | {
            name: float(value)
            for name, value, options in metrics_in(calls)
            if kind_of(options) == "mean" and "metric_attribute" not in options
        }
        return means, float(size if run.weight is None else run.weight)

    def _view(self, size: int) -> StageView:
        """Returns the code after the last layer alone, for so many samples."""
        if size not in self._views:
            of_size = partial(pytree.tree_map_only, TensorSpec, lambda spec: spec.of_samples(size))
            layers = [replace(x, outputs=of_size(x.outputs)) for x in self.probed.graph.layers]
            graph = replace(self.probed.graph, layers=tuple(layers))
            view = StageView(self.probed.module, graph, tail(graph), self.interception)
            self._views[size] = view
        return self._views[size]


@dataclass(frozen=True)
class _Losses:
    """The loss of a batch, or what it logs; those of its parts, and what they weigh."""

    whole: float
    first: tuple[float, float]
    second: tuple[float, float]

    @property
    def mean(self) -> float:
        pairs = [(loss, weight) for loss, weight in (self.first, self.second) if weight]
        total = sum(weight for _, weight in pairs)
        return sum(loss * weight for loss, weight in pairs) / total if pairs else math.nan

    @property
    def error(self) -> float:
        """Error of that mean, relative to the larger of both."""
        scale = max(abs(self.whole), abs(self.mean), 1e-30)
        return abs(self.mean - self.whole) / scale

    @property
    def share(self) -> float:
        """Weight of the first part with which the mean would be right."""
        between = self.first[0] - self.second[0]
        return (self.whole - self.second[0]) / between if between else float("nan")


def _why_loss_differs(
    draws: Sequence[_Losses], sizes: tuple[int, int], weighted: bool, tolerance: float
) -> str:
    """Returns why the loss is no mean over samples, and a remedy; empty if it is one."""
    one, other = draws
    if not (abs(one.whole) < float("inf") and abs(other.whole) < float("inf")):
        _log.info("losses cannot be compared: that of a batch of random numbers is %s", one.whole)
        return ""
    if max(one.error, other.error) <= tolerance:  # NaN is larger than anything
        return ""
    weights = ", weighed by what it returns," if weighted else ""
    finding = (
        f"the loss of training_step is not a mean over samples: with random numbers in place of layers it is "
        f"{one.whole:.6g} for the example batch of {sum(sizes)} samples, but {one.first[0]:.6g} and "
        f"{one.second[0]:.6g} for the first {sizes[0]} and the other {sizes[1]} of them, whose mean{weights} is "
        f"{one.mean:.6g} ({one.error:.1%} off). A pipeline takes the mean over its microbatches, so that training "
        "would differ from one process in the same way. "
    )
    if all(_close(d.whole, d.first[0] + d.second[0], tolerance) for d in draws):
        return f"{finding}The loss is a sum over samples: divide it by their number"
    if 0 < one.share < 1 and _close(one.share, other.share, 10 * tolerance):
        return (
            f"{finding}The first part counts as {one.share:.1%}, though it has {sizes[0] / sum(sizes):.1%} of the "
            "samples: a mean over tokens, labels other than -100, or pixels of a mask, of which parts have unlike "
            'numbers. Return {"loss": loss, "weight": that number} from training_step'
        )
    return (
        f"{finding}It depends on which samples come together, as with pairs in one batch (prior preservation, "
        "preferences), negatives from the batch, or a divisor that samples do not share out. Give the module "
        "split_batch(batch, sizes), and count_samples(batch) if a sample is not a row; or train with "
        "strategy.num_microbatches=1. See docs/training.md"
    )


def _why_logged_differs(draws: Sequence[Mapping[str, _Losses]], tolerance: float) -> str:
    one, other = draws
    deviations = [
        (name, each)
        for name in sorted(one.keys() & other.keys() - {_LOSS})
        for each in (one[name], other[name])
        if math.isfinite(each.whole) and not each.error <= tolerance  # NaN is larger than anything
    ]
    if not deviations:
        return ""
    names = ", ".join(repr(name) for name in dict(deviations))
    name, each = deviations[0]
    return (
        f"training_step logs what is not a mean over samples: {names}. With random numbers in place of layers one "
        f"process would log {each.whole:.6g} as {name!r} for the example batch, and a pipeline, whose value is the "
        f"mean over microbatches, {each.mean:.6g}. Training does not depend on it. Log a sum and a count with "
        'reduce_fx="sum" instead, or an object of torchmetrics, which counts every sample once'
    )


def _close(value: float, other: float, tolerance: float) -> bool:
    return abs(value - other) <= tolerance * max(abs(value), abs(other))


class _StandIns:
    """Random numbers in place of what layers give.

    They are in (0, 1), as some losses take logarithms or probabilities, and differ between samples, to show what
    each of them counts. Numbers of classes and flags are zero.

    Args:
        total: Samples in the batch.
        repeated: As for `_of_samples`.
    """

    def __init__(self, graph: LayerGraph, total: int, seed: int, repeated: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._total, self._repeated = total, repeated
        self._values: dict[TensorKey, tuple[Tensor, int]] = {}
        for key in sorted(graph.tail_reads):
            spec = graph.spec(key)
            if spec.rows is None:
                name = graph.layers[key[0]].name
                raise ValueError(
                    f"nobody knows which rows of what {name} gives belong to which sample"
                )
            shape = spec.of_samples(total).shape
            value = torch.rand(shape, generator=generator, dtype=torch.float64)
            if spec.rows:
                counts = torch.arange(1, total + 1) / total
                of_sample = (
                    counts.repeat(spec.rows) if repeated else counts.repeat_interleave(spec.rows)
                )
                value = value * of_sample.view(-1, *[1] * (value.dim() - 1))
            real = spec.dtype.is_floating_point or spec.dtype.is_complex
            self._values[key] = (0.1 + 0.8 * value if real else 0 * value).to(spec.dtype), spec.rows

    def of(self, rows: slice) -> Mapping[TensorKey, Tensor]:
        return {
            key: _of_samples(value, rows, self._total, self._repeated) if n else value
            for key, (value, n) in self._values.items()
        }


def _of_samples(whole: Tensor, samples: slice, total: int, repeated: bool) -> Tensor:
    """Returns the rows of some of `total` samples, of which each has as many as the next.

    `repeated` says that all samples come one after the other, and then all again, as `torch.cat([x, x])` has them.
    """
    if repeated:
        return whole.unflatten(0, (-1, total))[:, samples].flatten(0, 1)
    n = len(whole) // total
    return whole[samples.start * n : samples.stop * n]


class _RowsOfDraws(TorchDispatchMode):
    """Gives a part of a batch the random numbers that were sampled for its samples in the whole batch."""

    def __init__(self, total: int, repeated: bool) -> None:
        super().__init__()
        self._total, self._repeated = total, repeated
        self._drawn = list[tuple[Any, Tensor]]()
        self._rows, self._position = slice(0, total), 0
        self._is_first = True

    def of(self, rows: slice) -> _RowsOfDraws:
        """Returns itself, for a run on some samples; the first one is on all of them."""
        self._is_first, self._rows, self._position = not self._drawn, rows, 0
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not draws(
            func, args, {**(kwargs or {}), "generator": None}
        ):  # counts those of its own, too
            return out
        position, self._position = self._position, self._position + 1
        if self._is_first:
            self._drawn.append((func, out.clone()))
            return out
        recorded, whole = self._drawn[position]
        if recorded is not func or "randperm" in str(func):
            raise ValueError(f"the step draws {func} for some samples, and {recorded} for all")
        return out.copy_(self._part(whole, out))

    def _part(self, whole: Tensor, part: Tensor) -> Tensor:
        """Returns those of the random numbers of a whole batch that its microbatch would have sampled."""
        size = self._rows.stop - self._rows.start
        if whole.shape == part.shape:
            return whole
        if whole.shape[1:] != part.shape[1:] or len(whole) * size != len(part) * self._total:
            raise ValueError(
                f"the step draws {tuple(part.shape)} numbers for {size} samples, and {tuple(whole.shape)} for "
                f"{self._total}"
            )
        return _of_samples(whole, self._rows, self._total, self._repeated)
