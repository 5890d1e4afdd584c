"""The analysis of a model before it runs on bands, found by marking rows, not declared per family.

The model runs two or three times on whole latents with NaN in some rows and stand-ins for operators that mix
rows. From where the marks end up, it is read

* which arguments besides the latents grow with the rows (position ids, residuals of a ControlNet), on which axis;
* which modules embed the latents together with their position (a band alone would get the position of the top);
* for each attention, which keys are the image's and which the text's, in which order;
* which modules with linear layers are given a text only;
* how many rows strides and patches take together;
* that nothing else mixes rows: a mark outside its rows names the operator.

NaN survives arithmetic, so what is NaN after a function has been reached by what was NaN before it.
Operators that mix rows, and for which bands have a rule, are replaced by stand-ins of the same shapes that do
not. A mark then stays in its rows; if it does not, the model mixes rows in a way that no rule knows.

    operator                 stand-in
    attention                the query
    group norm               its input
    convolution              the pixel under the centre of the kernel, averaged over channels

Reading: `tracing/marks.py` follows single tokens through blocks of a transformer in the same way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.errors import ConfigurationError, GraphError
from lightning_diffpipe.graph.interception import Interception, Run, Site
from lightning_diffpipe.sampling.distrifusion.bands import (
    Window,
    input_first,
    refuse,
    unsupported,
    windows_of,
)
from lightning_diffpipe.sampling.tracing.attention import Kernel
from lightning_diffpipe.sampling.tracing.layout import shapes_of
from lightning_diffpipe.sampling.tracing.marks import MixingSearch, has_nan, lines


@dataclass(frozen=True)
class JointKeys:
    """Keys of the image and of texts in one sequence: how many texts before and after it."""

    before: int
    after: int

    @classmethod
    def of(cls, marked: Tensor) -> JointKeys | None:
        """Finds those of an attention, where keys of the image are marked; None if none is."""
        positions = marked.nonzero().flatten().tolist()
        if not positions:
            return None
        first, last = positions[0], positions[-1]
        if last - first + 1 != len(positions):
            raise unsupported("attention whose keys of the image are not contiguous")
        return cls(first, len(marked) - last - 1)


@dataclass
class CallAnalysis:
    """Properties of one call of a model, for one shape of its arguments. Plain data.

    Attributes:
        sample: The argument that holds the latents, as a leaf of `(args, kwargs)`.
        sliced: Further arguments that grow with the rows, and on which axis.
        outputs: Results that grow with the rows, and on which axis.
        embedders: Modules that embed the latents with their positions; axes of their results.
        keys: For each call of attention; None for cross-attention, which sees no other band.
        constant: Modules with linear layers that are given a text only, which has nothing of the image.
        unit: Rows of the latents that strides and patches take together.
    """

    sample: int
    sliced: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)
    embedders: dict[str, dict[int, int]] = field(default_factory=dict)
    keys: list[JointKeys | None] = field(default_factory=list)
    constant: frozenset[str] = frozenset()
    unit: int = 1


class ModelCall(NamedTuple):
    """One call of a model, on all rows.

    Attributes:
        latents: Latents of the request; rows are the last but one axis.
    """

    interception: Interception
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    latents: Tensor

    def signature(self) -> Any:
        """Returns a key that is the same for all calls with the same analysis."""
        inputs = self.args, self.kwargs
        return str(pytree.tree_structure(inputs)), shapes_of(inputs), tuple(self.latents.shape)


def analyse(call: ModelCall) -> CallAnalysis:
    """Analyses one call of a model.

    Raises:
        GraphError: The model mixes rows in a way bands have no rule for; names the operator.
        ConfigurationError: Its strides do not divide the rows.
    """
    runs = _MarkedRuns(call)
    analysis = CallAnalysis(sample=runs.find_sample(call.latents))
    run, analysis.outputs = runs.mark_rows(analysis.sample)
    analysis.unit, analysis.embedders = run.unit(), run.embedders
    run = runs.run(analysis.sample, None)
    analysis.keys = [JointKeys.of(positions) for positions in run.keys]
    analysis.constant = frozenset(run.constant)
    for leaf, axis in runs.candidates(analysis.sample):
        # Marks at the end of this axis come out as the last rows.
        if leaf not in analysis.sliced and runs.axes(runs.run(leaf, axis).out) == analysis.outputs:
            analysis.sliced[leaf] = axis
    return analysis


class _MarkedRuns:
    """Runs one call with marks in different places."""

    def __init__(self, call: ModelCall) -> None:
        self._interception, self._forward = call.interception, call.forward
        self._leaves, self._tree = pytree.tree_flatten((call.args, call.kwargs))
        self.num_rows = num_rows = call.latents.shape[-2]
        power = num_rows & -num_rows  # the largest, as marked rows must be whole units
        self.num_marked = power if power < num_rows else max(num_rows // 2, 1)

    def find_sample(self, latents: Tensor) -> int:
        for leaf, x in enumerate(self._leaves):
            if _is_float(x) and x.ndim >= 3 and x.shape[-2:] == latents.shape[-2:]:
                return leaf
        shapes = [tuple(x.shape) for x in self._leaves if isinstance(x, Tensor)]
        raise GraphError(
            f"no argument of the model has the rows and columns of the latents, {tuple(latents.shape)}; its "
            f"tensors are {shapes}"
        )

    def mark_rows(self, sample: int) -> tuple[MarkedRun, dict[int, int]]:
        """Marks the last rows of the latents; they must come out as the last rows of the prediction."""
        run = self.run(sample, -2)
        outputs = self.axes(run.out)
        reached = [i for i, x in enumerate(pytree.tree_leaves(run.out)) if has_nan(x)]
        if not reached or set(reached) != outputs.keys():
            with MixingSearch([]) as search:
                self.run(sample, -2)
            raise unsupported(f"{search.found[0]}()" if search.found else "an operator")
        return run, outputs

    def run(self, leaf: int, axis: int | None) -> MarkedRun:
        """Runs it with marks in the last part of an axis of an argument, or in all of it."""
        whole = self._leaves[leaf]
        marked = whole.clone()
        leaves = [marked if x is whole else x for x in self._leaves]  # ControlNets share theirs
        size = marked.numel() if axis is None else self._marked_part(marked.shape[axis])
        part = marked if axis is None else marked.narrow(axis, marked.shape[axis] - size, size)
        part.fill_(math.nan)
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        run = MarkedRun(self, marked)
        names = {name for name, _ in self._interception.root.named_modules() if name}
        with self._interception.also_watching(names), self._interception.running(run), run:
            run.out = self._forward(*args, **kwargs)
        return run

    def axes(self, tree: Any) -> dict[int, int]:
        """Returns results with marks in exactly the last part of one axis, and that axis."""
        axes = {}
        for i, x in enumerate(pytree.tree_leaves(tree)):
            for axis in range(x.ndim if has_nan(x) else 0):
                size = self._marked_part(x.shape[axis])
                marked = lines(x, axis)
                if 0 < size == int(marked.sum()) < len(marked) and marked[-size:].all():
                    axes[i] = axis - x.ndim
        return axes

    def candidates(self, sample: int) -> list[tuple[int, int]]:
        """Returns arguments and axes that may grow with the rows: not the last axis, not the one of samples."""
        num_samples = self._leaves[sample].shape[0]
        return [
            (leaf, axis - x.ndim)
            for leaf, x in enumerate(self._leaves)
            if x is not self._leaves[sample] and _is_float(x)
            for axis in range(x.ndim - 1)
            if self._marked_part(x.shape[axis]) and not (axis == 0 and x.shape[0] == num_samples)
        ]

    def _marked_part(self, size: int) -> int:
        """Indices that belong to the marked rows; 0 if the axis cannot grow with the rows."""
        whole, rest = divmod(size * self.num_marked, self.num_rows)
        return 0 if rest else whole


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class MarkedRun(Run, TorchFunctionMode):
    """One run of the model with stand-ins, and its findings; naming operators that spread marks is slow.

    Attributes:
        out: Results of the model.
        keys: For each attention call, which positions of the keys are marked.
        embedders: Modules that embed the latents, the outermost ones; axes of their results.
        constant: Modules that are given a text without marks only, once; the outermost ones.
        spreader: The first function that had marked and clean rows before it and none clean after it.
    """

    def __init__(self, runs: _MarkedRuns, sample: Tensor) -> None:
        super().__init__()
        self.out: Any = None
        self.keys: list[Tensor] = []
        self.embedders: dict[str, dict[int, int]] = {}
        self.constant: set[str] = set()
        self._runs, self._sample = runs, sample
        self._num_calls: Counter[str] = Counter()
        self._num_exchanging = 0  # calls of functions that look beyond a band
        self._units: list[float] = []  # rows of the latents for one row after each convolution
        # An attention has given texts something of the image, which its stand-in does not: what is not marked may
        # depend on the image all the same.
        self._texts_see_image = False
        self._rules: dict[Any, Callable[..., Tensor]] = {
            torch.conv2d: self._conv2d,
            F.group_norm: self._group_norm,
            F.scaled_dot_product_attention: self._attention,
        }

    def unit(self) -> int:
        """Returns the rows that strides and patches take together, or raises ConfigurationError."""
        unit, num_rows = 1, self._runs.num_rows
        for rows in self._units:
            if rows > 1 and not rows.is_integer():
                raise ConfigurationError(
                    f"the latents have {num_rows} rows, which strides or patches of this model make "
                    f"{round(num_rows / rows)} rows of: bands need a height that its strides divide"
                )
            unit = math.lcm(unit, max(int(rows), 1))
        return unit

    def call(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module, and records whether it embeds the latents or is given a text only."""
        num_before, given = self._num_exchanging, (*args, *kwargs.values())
        self._num_calls[site.name] += 1
        out = site.diffpipe_original(*args, **kwargs)
        inside, is_local = f"{site.name}.", self._num_exchanging == num_before
        takes_sample = any(x is self._sample for x in given)
        has_positions = not isinstance(site.module, nn.Conv2d | nn.Linear)
        if takes_sample and has_positions and is_local:
            self.embedders = {k: v for k, v in self.embedders.items() if not k.startswith(inside)}
            self.embedders[site.name] = self._runs.axes(out)
        # Functions that look beyond a band are known by their position, so that none is left out later.
        may_run_once = is_local and self._num_calls[site.name] == 1 and len(given) == 1
        if (
            may_run_once
            and not self._texts_see_image
            and any(isinstance(inner, nn.Linear) for inner in site.module.modules())
            and all(_is_float(x) and x.ndim >= 3 and not has_nan(x) for x in (*given, out))
        ):
            self.constant = {name for name in self.constant if not name.startswith(inside)}
            self.constant.add(site.name)
        else:
            self.constant.discard(site.name)
        return out

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse(func)
        rule = self._attention if isinstance(func, Kernel) else self._rules.get(func)
        if rule is not None:
            args, kwargs = input_first(args, kwargs)
            return rule(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        self._num_exchanging += 1
        keys = key.isnan().any(-1).flatten(0, -2).any(0)
        self.keys.append(keys)
        self._texts_see_image |= bool(keys.any() and not query.isnan().any(-1).all())
        size = value.shape[-1]
        if query.shape[-1] == size:
            return query
        return query.mean(-1, keepdim=True).expand(*query.shape[:-1], size)

    def _group_norm(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._num_exchanging += 1
        return x.clone()

    def _conv2d(self, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows, columns = windows_of(weight, *args, **kwargs)
        # Of whole patches every input is read once, and nothing is seen beyond a band.
        if rows.padding or rows.reach != rows.stride - 1:
            self._num_exchanging += 1
        picked = x[..., _centres(rows, x.shape[-2], x.device), :]
        picked = picked[..., _centres(columns, x.shape[-1], x.device)]
        self._units.append(self._runs.num_rows / picked.shape[-2])
        mixed = picked.mean(-3, keepdim=True)
        return mixed.repeat(*[1] * (x.ndim - 3), weight.shape[0], 1, 1)


def _centres(window: Window, size: int, device: torch.device) -> Tensor:
    """Returns the input index under the centre of the kernel, for every output index."""
    first = (window.reach // 2) - window.padding
    centres = torch.arange(window.outputs(size), device=device) * window.stride + first
    return centres.clamp(0, size - 1)
