"""Whether the loss of a batch is the mean of those of its microbatches, found out before training.

A pipeline takes that mean, weighed by samples or as the step says. A mean over tokens, or a loss over pairs of
rows, is something else, and would train something else without an error. What makes the difference is nearly always
the code after the last layer. So the step is run on the example batch, and on two parts of it, without any layer:

    layers          random numbers in (0, 1) stand for what they give, larger for later samples, alike in parts
    random numbers  what the step draws for a part are the rows that it drew for the batch

Nothing but the loss's own code is computed, in milliseconds and on the host, however large the model is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.graph.cut import tail
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import LayerGraph, TensorKey, TensorSpec
from lightning_diffpipe.graph.samples import ModuleSplit
from lightning_diffpipe.graph.step import StepCall
from lightning_diffpipe.graph.view import StageView
from lightning_diffpipe.profiling.state import undisturbed
from lightning_diffpipe.runtime.microbatch import num_samples, split
from lightning_diffpipe.runtime.partitioned import Step

_log = logging.getLogger(__name__)

_TOLERANCE = 1e-4


@dataclass(frozen=True)
class MeanCheck:
    """Compares the loss of a batch with those of two parts of it.

    Attributes:
        module: The module, whole and on the host.
        step: Module and batch to loss.
        batch: One pipeline's batch.
        graph: The layers of the step.
        interception: The installed wrappers.
    """

    module: nn.Module
    step: Step
    batch: Any
    graph: LayerGraph
    interception: Interception

    def difference(self, num_microbatches: int) -> str:
        """Returns what is different, why, and a remedy; empty if nothing is, or it cannot be found out."""
        total = num_samples(self.batch, self.graph.form)
        if num_microbatches == 1 or total < 2:
            return ""
        if isinstance(self.graph.form, ModuleSplit):
            _log.info("the module cuts its batches itself, so that losses are not compared")
            return ""
        first = -(-total // num_microbatches)
        try:
            with undisturbed(self.module):
                draws = [self._losses(total, first, seed) for seed in (0, 1)]
        except Exception as error:  # of any code, on numbers that mean nothing
            _log.info(
                "the loss of a batch cannot be compared with those of its parts: %s", str(error)
            )
            return ""
        return _said(draws, (first, total - first), self.graph.weighted, self._tolerance)

    @property
    def _tolerance(self) -> float:
        """Relative; low precision rounds losses, too."""
        kinds = {p.dtype for p in self.module.parameters() if p.dtype.is_floating_point}
        return max(_TOLERANCE, *(4 * torch.finfo(kind).eps for kind in kinds))

    def _losses(self, total: int, first: int, seed: int) -> _Losses:
        values, drawn = _StandIns(self.graph, total, seed), _RowsOfDraws(total)
        everything, rows = slice(0, total), (slice(0, first), slice(first, total))
        whole, _ = self._run(self.batch, everything, values, drawn, seed)
        if self.graph.host_random:  # of which nobody knows for which sample they are
            again, _ = self._run(self.batch, everything, values, drawn, seed + 2)
            if again != whole:
                raise ValueError("it depends on random numbers of Python's or numpy's generators")
        parts = split(self.batch, (first, total - first), self.graph.form)
        pieces = [
            self._run(part, some, values, drawn, seed)
            for part, some in zip(parts, rows, strict=True)
        ]
        return _Losses(whole, *pieces)

    def _run(
        self, batch: Any, rows: slice, values: _StandIns, drawn: _RowsOfDraws, seed: int
    ) -> tuple[float, float]:
        """Returns the loss of some of the samples and its weight."""
        size = rows.stop - rows.start
        layers = [
            replace(
                layer,
                outputs=tuple(
                    _spec_of_size(output, size) if isinstance(output, TensorSpec) else output
                    for output in layer.outputs
                ),
            )
            for layer in self.graph.layers
        ]
        graph = replace(self.graph, layers=tuple(layers))
        view = StageView(self.module, graph, tail(graph), self.interception)
        call = StepCall(self.step, self.module, batch, written=graph.batch_writes)
        with drawn.of(rows):
            run = view.forward(call, seed=seed, received=values.of(rows), log=lambda *_: None)
        assert run.loss is not None
        return float(run.loss.detach()), float(size if run.weight is None else run.weight)


@dataclass(frozen=True)
class _Losses:
    """The loss of a batch; losses and weights of its parts."""

    whole: float
    first: tuple[float, float]
    second: tuple[float, float]

    @property
    def mean(self) -> float:
        """What a pipeline makes of the parts."""
        pairs = [(loss, weight) for loss, weight in (self.first, self.second) if weight]
        return sum(loss * weight for loss, weight in pairs) / sum(weight for _, weight in pairs)

    @property
    def error(self) -> float:
        """How far that is off, relative to the larger of both."""
        scale = max(abs(self.whole), abs(self.mean), 1e-30)
        return abs(self.mean - self.whole) / scale

    @property
    def share(self) -> float:
        """What the first part must count as for the mean to be right."""
        between = self.first[0] - self.second[0]
        return (self.whole - self.second[0]) / between if between else float("nan")


def _said(
    draws: Sequence[_Losses], sizes: tuple[int, int], weighted: bool, tolerance: float
) -> str:
    one, other = draws
    if not (abs(one.whole) < float("inf") and abs(other.whole) < float("inf")):
        _log.info("losses cannot be compared: that of a batch of random numbers is %s", one.whole)
        return ""
    if max(one.error, other.error) <= tolerance:  # NaN is larger than anything
        return ""
    weights = ", weighed by what it returns," if weighted else ""
    found = (
        f"the loss of training_step is not a mean over samples: with random numbers in place of layers it is "
        f"{one.whole:.6g} for the example batch of {sum(sizes)} samples, but {one.first[0]:.6g} and "
        f"{one.second[0]:.6g} for the first {sizes[0]} and the other {sizes[1]} of them, whose mean{weights} is "
        f"{one.mean:.6g} ({one.error:.1%} off). A pipeline takes the mean over its microbatches, so that training "
        "would differ from one process in the same way. "
    )
    if all(_close(d.whole, d.first[0] + d.second[0], tolerance) for d in draws):
        return f"{found}The loss is a sum over samples: divide it by their number"
    if 0 < one.share < 1 and _close(one.share, other.share, 10 * tolerance):
        return (
            f"{found}The first part counts as {one.share:.1%}, though it has {sizes[0] / sum(sizes):.1%} of the "
            "samples: a mean over tokens, labels other than -100, or pixels of a mask, of which parts have unlike "
            'numbers. Return {"loss": loss, "weight": that number} from training_step'
        )
    return (
        f"{found}It depends on which samples come together, as with pairs in one batch (prior preservation, "
        "preferences), negatives from the batch, or a divisor that samples do not share out. Give the module "
        "split_batch(batch, sizes), and count_samples(batch) if a sample is not a row; or train with "
        "strategy.num_microbatches=1. See docs/training.md"
    )


def _close(value: float, other: float, tolerance: float) -> bool:
    return abs(value - other) <= tolerance * max(abs(value), abs(other))


def _spec_of_size(spec: TensorSpec, size: int) -> TensorSpec:
    if not spec.rows:  # shared by all samples, or unknown, which is refused where it is read
        return spec
    shape = (spec.rows * size, *spec.shape[1:])
    return replace(spec, shape=shape, stride=torch.empty(shape, device="meta").stride())


class _StandIns:
    """Random numbers in place of what layers give.

    In (0, 1), as some losses take logarithms or probabilities, and not alike for all samples, so that it shows what
    each of them counts. Numbers of classes and flags are zero.

    Args:
        graph: The step; the loss's code reads some of its layers.
        total: Samples in the batch.
        seed: Seeds them.
    """

    def __init__(self, graph: LayerGraph, total: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._values: dict[TensorKey, tuple[Tensor, int]] = {}
        for key in sorted(graph.tail_reads):
            spec = graph.spec(key)
            if spec.rows is None:
                name = graph.layers[key[0]].name
                raise ValueError(
                    f"nobody knows which rows of what {name} gives belong to which sample"
                )
            shape = _spec_of_size(spec, total).shape
            value = torch.rand(shape, generator=generator, dtype=torch.float64)
            if spec.rows:
                of_sample = torch.arange(1, total + 1).repeat_interleave(spec.rows) / total
                value = value * of_sample.view(-1, *[1] * (value.dim() - 1))
            real = spec.dtype.is_floating_point or spec.dtype.is_complex
            self._values[key] = (0.1 + 0.8 * value if real else 0 * value).to(spec.dtype), spec.rows

    def of(self, rows: slice) -> Mapping[TensorKey, Tensor]:
        """Returns the values of some samples."""
        return {
            key: value[rows.start * n : rows.stop * n] if n else value
            for key, (value, n) in self._values.items()
        }


class _RowsOfDraws(TorchDispatchMode):
    """Gives a part of a batch the random numbers that were drawn for these samples in the whole.

    Args:
        total: Samples in the batch.
    """

    def __init__(self, total: int) -> None:
        super().__init__()
        self._total, self._drawn = total, list[tuple[Any, Tensor]]()
        self._rows, self._position = slice(0, total), 0
        self._is_first = True

    def of(self, rows: slice) -> _RowsOfDraws:
        """Returns itself, for a run on some samples; the first one is on all of them."""
        self._is_first, self._rows, self._position = not self._drawn, rows, 0
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return out
        position, self._position = self._position, self._position + 1
        if self._is_first:
            self._drawn.append((func, out.clone()))
            return out
        made, whole = self._drawn[position]
        if made is not func or "randperm" in str(func):
            raise ValueError(f"the step draws {func} for some samples, and {made} for all")
        return out.copy_(self._part(whole, out))

    def _part(self, whole: Tensor, part: Tensor) -> Tensor:
        size = self._rows.stop - self._rows.start
        if whole.shape == part.shape:
            return whole
        if whole.shape[1:] != part.shape[1:] or len(whole) * size != len(part) * self._total:
            raise ValueError(
                f"the step draws {tuple(part.shape)} numbers for {size} samples, and {tuple(whole.shape)} for "
                f"{self._total}"
            )
        n = len(whole) // self._total
        return whole[self._rows.start * n : self._rows.stop * n]
