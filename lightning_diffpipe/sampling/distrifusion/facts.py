"""What must be known about a model before it runs on bands, found by looking, not declared per family.

The model runs two or three times on whole latents with NaN in some rows and stand-ins for operators that mix
rows (`ink.py`). From where the marks end up, it is read

* which arguments beside the latents grow with the rows (position ids, residuals of a ControlNet), on which axis;
* which modules embed the latents together with their position (a band alone would get the position of the top);
* for each attention, which keys are the image's and which the text's, in which order;
* which linear layers see the text only;
* how many rows strides and patches take together;
* that nothing else mixes rows: a mark outside its rows names the operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.errors import ConfigurationError, GraphError
from lightning_diffpipe.graph.interception import Interception, Site
from lightning_diffpipe.sampling.distrifusion.geometry import unsupported
from lightning_diffpipe.sampling.distrifusion.ink import Ink, Marks, lines

_NAN = float("nan")


@dataclass(frozen=True)
class JointKeys:
    """Keys of the image and of texts in one sequence: how many texts before and after it."""

    before: int
    after: int


@dataclass
class Facts:
    """About one call of a model, for one shape of its arguments. Plain data.

    Attributes:
        sample: The argument that holds the latents, as a leaf of `(args, kwargs)`.
        sliced: Further arguments that grow with the rows, and on which axis.
        outputs: Results that grow with the rows, and on which axis.
        embedders: Modules that embed the latents with their positions; axes of their results.
        keys: For each call of attention; None for cross-attention, which sees no other band.
        constant: Linear layers, by position among them, whose input holds no image, nor anything of it.
        unit: Rows of the latents that strides and patches take together.
    """

    sample: int
    sliced: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)
    embedders: dict[str, dict[int, int]] = field(default_factory=dict)
    keys: list[JointKeys | None] = field(default_factory=list)
    constant: frozenset[int] = frozenset()
    unit: int = 1


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Two calls with equal signatures have equal facts."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    return str(tree), tuple(
        (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None for x in leaves
    )


def find_facts(
    interception: Interception,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    latents: Tensor,
) -> Facts:
    """Looks at one call of a model.

    Args:
        interception: Of the model, installed.
        forward: The model's own.
        args: Of the call, whole.
        kwargs: Of the call, whole.
        latents: Of the request; rows are the last but one axis.

    Raises:
        GraphError: The model mixes rows in a way bands have no rule for; names the operator.
        ConfigurationError: Its strides do not divide the rows.
    """
    look = _Look(interception, forward, args, kwargs, latents.shape[-2])
    facts = Facts(sample=look.find_sample(latents))
    marks, facts.embedders, facts.outputs = look.mark_rows(facts.sample)
    facts.unit = _unit(marks.units, look.num_rows)
    marks, _, _ = look.run(facts.sample, None)
    facts.keys = [_keys(positions) for positions in marks.keys]
    untouched = marks.num_untouched
    facts.constant = frozenset(
        layer for layer in marks.unreached if untouched is None or layer < untouched
    )
    for leaf, axis in look.candidates(facts.sample):
        if leaf not in facts.sliced and look.follows_rows(leaf, axis, facts.outputs):
            facts.sliced[leaf] = axis
    return facts


class _Look:
    """Runs of one call with marks in different places."""

    def __init__(
        self,
        interception: Interception,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_rows: int,
    ) -> None:
        self._interception, self._forward = interception, forward
        self._leaves, self._tree = pytree.tree_flatten((args, kwargs))
        self.num_rows = num_rows
        power = (
            num_rows & -num_rows
        )  # marked rows must be whole units: take the largest power of two
        self.num_marked = power if power < num_rows else max(num_rows // 2, 1)

    def find_sample(self, latents: Tensor) -> int:
        """The first argument with the rows and columns of the latents."""
        for leaf, x in enumerate(self._leaves):
            if _is_float(x) and x.ndim >= 3 and x.shape[-2:] == latents.shape[-2:]:
                return leaf
        shapes = [tuple(x.shape) for x in self._leaves if isinstance(x, Tensor)]
        raise GraphError(
            f"no argument of the model has the rows and columns of the latents, {tuple(latents.shape)}; its "
            f"tensors are {shapes}"
        )

    def mark_rows(self, sample: int) -> tuple[Marks, dict[str, dict[int, int]], dict[int, int]]:
        """Marks the last rows of the latents; they must come out as the last rows of the prediction."""
        marks, embedders, out = self.run(sample, -2)
        outputs = self.axes(out)
        reached = [i for i, x in enumerate(pytree.tree_leaves(out)) if _is_marked(x)]
        if not reached or set(reached) != outputs.keys():
            named = self.run(sample, -2, name_spreaders=True)[0].spreader
            raise unsupported(f"{named}()" if named else "an operator")
        return marks, embedders, outputs

    def run(
        self, leaf: int, axis: int | None, name_spreaders: bool = False
    ) -> tuple[Marks, dict[str, dict[int, int]], Any]:
        """One run with marks in the last part of an axis of an argument, or in all of it."""
        given = self._leaves[leaf]
        marked = given.clone()
        leaves = [marked if x is given else x for x in self._leaves]  # ControlNets share theirs
        size = marked.numel() if axis is None else self._marked_part(marked.shape[axis])
        part = marked if axis is None else marked.narrow(axis, marked.shape[axis] - size, size)
        part.fill_(_NAN)
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        ink = Ink(self.num_rows, name_spreaders)
        watch = _Watch(self, ink, marked)
        names = {name for name, _ in self._interception.root.named_modules() if name}
        with self._interception.also_watching(names), self._interception.running(watch), ink:
            out = self._forward(*args, **kwargs)
        return ink.marks, watch.embedders, out

    def axes(self, tree: Any) -> dict[int, int]:
        """Results with marks in exactly the last part of one axis, and that axis."""
        found = {}
        for i, x in enumerate(pytree.tree_leaves(tree)):
            for axis in range(x.ndim if _is_marked(x) else 0):
                size = self._marked_part(x.shape[axis])
                marked = lines(x, axis)
                if (
                    size
                    and int(marked.sum()) == size
                    and bool(marked[-size:].all())
                    and size < len(marked)
                ):
                    found[i] = axis - x.ndim
        return found

    def candidates(self, sample: int) -> list[tuple[int, int]]:
        """Arguments and axes that may grow with the rows: not the last axis, not the one of samples."""
        num_samples = self._leaves[sample].shape[0]
        return [
            (leaf, axis - x.ndim)
            for leaf, x in enumerate(self._leaves)
            if x is not self._leaves[sample] and _is_float(x)
            for axis in range(x.ndim - 1)
            if self._marked_part(x.shape[axis]) and not (axis == 0 and x.shape[0] == num_samples)
        ]

    def follows_rows(self, leaf: int, axis: int, outputs: dict[int, int]) -> bool:
        """Marks at the end of this axis come out as the last rows."""
        _, _, out = self.run(leaf, axis)
        return self.axes(out) == outputs

    def _marked_part(self, size: int) -> int:
        """Indices that belong to the marked rows; 0 if the axis cannot grow with the rows."""
        whole, rest = divmod(size * self.num_marked, self.num_rows)
        return 0 if rest else whole


class _Watch:
    """Finds modules that embed the latents: the outermost that take them, and mix no rows."""

    checkpointing = checkpointed = False

    def __init__(self, look: _Look, ink: Ink, sample: Tensor) -> None:
        self._look, self._ink, self._sample = look, ink, sample
        self.embedders: dict[str, dict[int, int]] = {}

    def call(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Looks at one call of a module."""
        before = self._ink.num_exchanging
        out = site.diffpipe_original(*args, **kwargs)
        takes_sample = any(x is self._sample for x in (*args, *kwargs.values()))
        has_positions = not isinstance(site.module, nn.Conv2d | nn.Linear)
        if takes_sample and has_positions and self._ink.num_exchanging == before:
            inside = site.name + "."
            self.embedders = {k: v for k, v in self.embedders.items() if not k.startswith(inside)}
            self.embedders[site.name] = self._look.axes(out)
        return out

    def checkpoints_layers(self) -> bool:
        """Nothing is checkpointed while sampling."""
        return False

    def log(self, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Logging is of no interest."""
        return original(*args, **kwargs)


def _keys(marked: Tensor) -> JointKeys | None:
    positions = marked.nonzero().flatten().tolist()
    if not positions:
        return None
    first, last = positions[0], positions[-1]
    if last - first + 1 != len(positions):
        raise unsupported("attention whose keys of the image are not contiguous")
    return JointKeys(first, len(marked) - last - 1)


def _unit(units: list[float], num_rows: int) -> int:
    unit = 1
    for rows in units:
        if rows > 1 and not rows.is_integer():
            raise ConfigurationError(
                f"the latents have {num_rows} rows, which strides or patches of this model make "
                f"{round(num_rows / rows)} rows of: bands need a height that its strides divide"
            )
        unit = math.lcm(unit, max(int(rows), 1))
    return unit


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _is_marked(x: Any) -> bool:
    return _is_float(x) and bool(x.isnan().any())
