"""Running the frozen layers of a step: at once, or in pieces that fit into the bubbles of a pipeline.

The same callable runs with the frozen layers as its own, so that encoders need not be declared:

    view = FrozenView(module, graph, cut.frozen, interception)
    results = view.whole(lambda: module.training_step(microbatch, 0), seed=17)

    run = view.start(lambda: module.training_step(next_microbatch, 0), seed=18)
    while not run.advance_while(there_is_time):     # in a bubble: asked before each layer of the fine graph
        ...                                         # anything else, e.g. a stage run of another microbatch
    results = run.results

A paused run is a coroutine that waits in the middle of the model's code. What threads share is swapped with it:
states of random number generators, the default dtype, attributes of modules that the step sets.

With `samples=(start, stop)` a layer runs on some samples of the microbatch only: its arguments are cut before it,
its outputs padded after it, and the glue sees full shapes. Kernels are chosen by size, so results are equal bit for
bit only where groups are: they begin at multiples of `group_size`. A layer may be run so if it samples nothing and
all its arguments and outputs have a dimension of samples; whether it mixes samples inside shows when results of
groups are compared with those of all samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from lightning_diffpipe.coroutine import Coroutine
from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.interception import Site
from lightning_diffpipe.graph.layer import Layer, LayerGraph, TensorKey, TensorSpec
from lightning_diffpipe.graph.versions import rounding_of
from lightning_diffpipe.graph.view import StubbedRun, View

Samples = tuple[int, int]
"""A half-open range of samples."""


def why_not_splittable(layer: Layer) -> str:
    """Returns what keeps a frozen layer from running on some of the samples only; empty if nothing is seen."""
    if layer.draws_random:
        return "draws random numbers, which depend on the number of samples"
    if not layer.splits_samples:
        return "has arguments or outputs without a dimension of samples"
    return ""


def sample_groups(start: int, stop: int, size: int) -> tuple[Samples, ...]:
    """Cuts a range of samples at the multiples of a size.

    Example:
        >>> sample_groups(2, 9, 4)
        ((2, 4), (4, 8), (8, 9))
    """
    cuts = [start, *range((start // size + 1) * size, stop, size), stop]
    return tuple(itertools.pairwise(cuts))


def join_samples(
    graph: LayerGraph, parts: Sequence[Mapping[TensorKey, Tensor]]
) -> dict[TensorKey, Tensor]:
    """Joins the results of runs on consecutive ranges of samples."""
    joined: dict[TensorKey, Tensor] = {}
    for key, first in parts[0].items():
        spec = graph.spec(key)
        if not spec.rows:
            joined[key] = first
            continue
        joined[key] = spec.empty(first.device)
        torch.cat([part[key] for part in parts], out=joined[key])
    return joined


def rows_of(layer: Layer, flat: list[Any], group: Samples) -> list[Any]:
    """Returns arguments of a layer, of tensors with rows of samples those of a group."""
    start, stop = group
    layer_rows = layer.argument_rows or ()
    if len(layer_rows) != len(flat):
        raise GraphError(
            f"{layer.name} was called with {len(flat)} arguments, the probe saw {len(layer_rows)}"
        )
    return [
        value[start * rows : stop * rows] if rows and isinstance(value, Tensor) else value
        for value, rows in zip(flat, layer_rows, strict=True)
    ]


def relative_difference(value: Tensor, expected: Tensor) -> float:
    """Returns the largest difference of two tensors by the largest expected value; infinite for unlike integers."""
    if torch.equal(value, expected):
        return 0.0
    if not value.dtype.is_floating_point:
        return float("inf")
    scale = expected.abs().max().clamp_min(1e-30)
    return float(((value - expected).abs().max() / scale).nan_to_num(float("inf")))


def tolerance_of(graph: LayerGraph, layers: Iterable[int], value: Tensor) -> float:
    """Returns by how much a result may differ, as kernels are chosen by size, and parts of a batch round otherwise.

    It is that of the coarsest type on the way: under autocast a text encoder's products are bfloat16, and the
    norm after them makes float32 of it.
    """
    if not value.dtype.is_floating_point:
        return 0.0
    specs = (spec for i in layers for spec in graph.layers[i].outputs)
    dtypes = {value.dtype} | {spec.dtype for spec in specs if isinstance(spec, TensorSpec)}
    for kind, dtype in map(str.split, graph.autocast):
        if kind == value.device.type:
            dtypes.add(getattr(torch, dtype.removeprefix("torch.")))
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    eps = max(rounding_of(dtype, value.device) for dtype in floating)
    return min(0.1, 1e4 * eps)


Results = dict[TensorKey, Tensor]


class FrozenView(View):
    """Runs the frozen layers of a step, the frozen part of a `Cut`, without gradients; arguments as for `View`."""

    pauses = True
    _samples_compared = False

    @property
    def why_not_splittable(self) -> str:
        """The reason why frozen layers run on all samples of a microbatch; empty if there is none."""
        for index in sorted(self.cut.layers):
            layer = self.graph.layers[index]
            if reason := why_not_splittable(layer):
                return f"{layer.name} {reason}"
        return ""

    @property
    def is_splittable(self) -> bool:
        """Whether `samples` may be given; the first such run compares its values with a whole one."""
        return not self.why_not_splittable

    def whole(
        self,
        call: Callable[[], Any],
        seed: int,
        samples: Samples | None = None,
        group_size: int | None = None,
    ) -> Results:
        """Runs all frozen layers on one microbatch.

        Args:
            call: Runs the user's step.
            seed: Seed of the microbatch.
            samples: Half-open range of samples to encode, None for all.
            group_size: Most samples a layer runs on at a time, None for all of `samples`.

        Returns:
            The results that stages read (`cut.sent`); with `samples`, their rows of tensors that have rows of
            samples.

        Raises:
            GraphError: The step differs from its probe, or layers mix samples.
        """
        groups = self._groups(call, seed, samples, group_size)
        return self._whole(call, seed, groups)

    def start(
        self,
        call: Callable[[], Any],
        seed: int,
        samples: Samples | None = None,
        group_size: int | None = None,
    ) -> PausedRun:
        """Prepares a run that goes on only inside `advance_while`; see `whole`."""
        return PausedRun(self, call, seed, self._groups(call, seed, samples, group_size))

    def mixing(self, call: Callable[[], Any], seed: int) -> frozenset[str]:
        """Returns names of layers whose results for single samples are not rows of those for all.

        Only results that stages read are compared: a layer that mixes samples inside shows in those.
        """
        singles = sample_groups(0, self.graph.num_samples or 0, 1)
        if len(singles) < 2 or not self.is_splittable:
            return frozenset()
        return frozenset(self._differences(call, seed, singles))

    def _groups(
        self, call: Callable[[], Any], seed: int, samples: Samples | None, group_size: int | None
    ) -> tuple[Samples, ...]:
        """Returns what layers run on, one after the other; empty for all samples at once."""
        num_samples = self.graph.num_samples
        if samples is None and (group_size is None or num_samples is None):
            return ()
        start, stop = samples or (0, num_samples or 0)
        groups = sample_groups(start, stop, group_size or stop)
        if groups == ((0, num_samples),):
            return ()
        if self.why_not_splittable:
            raise GraphError(
                f"frozen layers must run on whole microbatches: {self.why_not_splittable}"
            )
        differences = {} if self._samples_compared else self._differences(call, seed, groups)
        for name, difference in differences.items():
            raise GraphError(
                f"{name} mixes samples, or what it reads does: run on samples {groups[0][0]} to "
                f"{groups[-1][1]} of {num_samples} in {len(groups)} groups, it differs by "
                f"{difference:.1e} from a run on all. Keep microbatches whole: strategy."
                f"frozen_group_size={num_samples}, or the size of a larger microbatch; where "
                "strategy.plan is given, plan again with it"
            )
        self._samples_compared = True
        return groups

    def _whole(self, call: Callable[[], Any], seed: int, groups: tuple[Samples, ...]) -> Results:
        run = FrozenRun(self, groups)
        with torch.no_grad():
            self.walked(run, call, seed)
        return run.results()

    def _differences(
        self, call: Callable[[], Any], seed: int, groups: tuple[Samples, ...]
    ) -> dict[str, float]:
        """Returns by how much results differ between runs on groups and one on all samples, where they do."""
        whole, differences = self._whole(call, seed, ()), dict[str, float]()
        for start, stop in groups:  # by themselves: code between layers may mix samples, too
            for key, value in self._whole(call, seed, ((start, stop),)).items():
                expected = self.graph.spec(key).rows_of(whole[key], start, stop)
                difference = relative_difference(value, expected)
                if difference > tolerance_of(self.graph, self.cut.layers, value):
                    differences[self.graph.layers[key[0]].name] = difference
        return differences


class FrozenRun(StubbedRun):
    """One walk through the frozen layers of a step."""

    def __init__(self, view: FrozenView, groups: tuple[Samples, ...]) -> None:
        super().__init__(view)
        self.at = ""  # the layer of the fine graph that was started last
        self.pause: Callable[[], None] | None = None
        self._groups = groups

    def before_fine_layer(self, name: str) -> None:
        """Waits, if the run is to pause."""
        self.at = name
        if self.pause is not None:
            self.pause()

    def received(self, layer: Layer, leaf: int) -> Tensor:
        """Raises, as frozen layers read nothing but frozen layers."""
        raise GraphError(f"frozen layers read output {leaf} of {layer.name}, which is trained")

    def execute(self, layer: Layer, site: Site, args: Any, kwargs: Any) -> Any:
        """Calls a layer, on one group of samples after the other if so asked."""
        if not self._groups:
            return super().execute(layer, site, args, kwargs)
        arguments, spec = pytree.tree_flatten((args, kwargs))
        whole: dict[int, Tensor] = {}  # by leaf of the output
        flat, out_spec = list[Any](), None
        for start, stop in self._groups:
            rows = rows_of(layer, arguments, (start, stop))
            out = super().execute(layer, site, *pytree.tree_unflatten(rows, spec))
            flat, out_spec = pytree.tree_flatten(out)
            for leaf, (value, expected) in enumerate(zip(flat, layer.outputs, strict=False)):
                if isinstance(expected, TensorSpec) and expected.rows and isinstance(value, Tensor):
                    if leaf not in whole:
                        whole[leaf] = expected.empty(value.device).zero_()
                    expected.rows_of(whole[leaf], start, stop).copy_(value)
        # By identity, as a tensor may be returned twice.
        seen = {id(flat[leaf]): tensor for leaf, tensor in whole.items()}
        return pytree.tree_unflatten([seen.get(id(value), value) for value in flat], out_spec)

    def results(self) -> Results:
        """Returns the rows that were asked for, of all results."""
        if not self._groups:
            return dict(self.outputs)
        start, stop = self._groups[0][0], self._groups[-1][1]
        spec = self._view.graph.spec
        return {key: spec(key).rows_of(x, start, stop) for key, x in self.outputs.items()}


class PausedRun:
    """A frozen run that goes on in pieces. Its methods belong to one thread, the owner's."""

    def __init__(
        self, view: FrozenView, call: Callable[[], Any], seed: int, groups: tuple[Samples, ...]
    ) -> None:
        self._run, self._interception, self._call = FrozenRun(view, groups), view.interception, call
        self._run.pause = self._pause
        self._host = view.graph.host_random
        with rng.preserved(self._host):
            rng.seed_all(seed, self._host)
            self._state = rng.capture(self._host)
        self._dtype = torch.get_default_dtype()
        self._attributes = view.restored
        self._set: Any = None  # what they are inside; before the run begins, whatever they are
        self._goes_on: Callable[[str], bool] = lambda name: False
        self._coroutine = Coroutine(self._work)

    @property
    def done(self) -> bool:
        """Nothing is left to run."""
        return self._coroutine.done

    @property
    def results(self) -> dict[TensorKey, Tensor]:
        """The results, when done; see `FrozenView.whole`.

        Raises:
            GraphError: The run is not done.
        """
        if not self.done or self._coroutine.is_cancelled:
            state = "was cancelled" if self._coroutine.is_cancelled else "is not done"
            raise GraphError(f"the frozen run {state}")
        return self._run.results()

    def advance_while(self, goes_on: Callable[[str], bool]) -> bool:
        """Runs layers of the fine graph for as long as a function says yes; says whether all is done.

        The function is called in the run's own thread with the name of each next layer. What the step raises has
        the name of its layer added.
        """
        if not self.done:
            self._goes_on = goes_on
            self._switch(self._coroutine.resume)
        return self.done

    def cancel(self) -> None:
        """Unwinds the step where it is paused and frees what it holds."""
        if not self.done:
            self._switch(self._coroutine.cancel)

    def _switch(self, act: Callable[[], None]) -> None:
        """Runs the coroutine until it pauses or ends, with its own state of what threads share."""
        outside, dtype = rng.capture(self._host), torch.get_default_dtype()
        attributes = self._attributes.capture()
        rng.restore(self._state)
        torch.set_default_dtype(self._dtype)
        if self._set is not None:
            self._attributes.restore(self._set)
        try:
            act()
        finally:
            self._state, self._dtype = rng.capture(self._host), torch.get_default_dtype()
            self._set = self._attributes.capture()
            rng.restore(outside)
            torch.set_default_dtype(dtype)
            self._attributes.restore(attributes)

    def _work(self) -> None:
        try:
            with self._interception.running(self._run):
                self._run.walk(self._call)
        except Exception as error:
            if self._run.at:
                error.add_note(f"in a frozen run, at layer {self._run.at}")
            raise
        finally:
            del self._call

    def _pause(self) -> None:
        """Pauses as often as the owner wants; called by the coroutine before every layer of the fine graph."""
        while self._coroutine.is_cancelled or not self._goes_on(self._run.at):
            self._coroutine.pause()
