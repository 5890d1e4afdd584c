"""One whole step with stamps at the borders of its layers, forward and backward; or layer by layer.

Layers are timed where they run, one after the other in one step: caches, allocator and autograd are then in the
state they will be in, and glue has a time of its own. Going forward, stamps are taken around each layer's call.
Going backward, a hook on a layer's outputs fires when their gradient is complete, just before the layer's own
backward begins, and the layer ends where that of an earlier layer begins. A second kind of backward asks for
gradients of the layers' outputs only: the difference is the weight-gradient part. The 30 microseconds for each
layer that this takes are left in: stages of a pipeline take longer than their layers in a plain step.

A module that is too large for the device is timed layer by layer (`OneByOneRun`): the step runs where the module
is, usually on the host, and each layer and its arguments go to the device, are timed there alone, and come back.
Glue, which takes next to nothing on a GPU, is left out.

Which layers glue counts for: `layer_costs.py`. Every rank times the same layers on its own device, reduces its
runs to medians, and the median over ranks counts. Medians of layers add up to less than a step, whose disturbances
are in another layer each time (6 to 8 % of a backward were missing), so they are scaled to what steps take.

Afterwards a module is as it was found, bit by bit. Restored are gradients, buffers (values, and which tensor is
bound to the name), training flags, counters and other plain attributes, and the random number generators of torch,
`random` and numpy. Values of parameters are not saved: no optimizer runs here.
"""

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_diffpipe.clock import Clock
from lightning_diffpipe.errors import ConfigurationError, GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.backward import NestedExits, input_gradients
from lightning_diffpipe.graph.calltree import tensors_in
from lightning_diffpipe.graph.fakes import without_garbage_collection
from lightning_diffpipe.graph.interception import Interception, Run, Site
from lightning_diffpipe.graph.layer import LayerGraph, other_calls
from lightning_diffpipe.graph.placement import (
    move_scales,
    moved,
    own_tensors,
    quantized,
    replace_parameters,
)
from lightning_diffpipe.graph.step import loss_of
from lightning_diffpipe.graph.trial import untouched

# Of gradients; more than most caches hold, so that adding to them takes as long as in training.
_SHARED_BYTES = 2**28


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Restores everything on exit; inside there are no gradients."""
    gradients = [(p, p.grad) for p in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with untouched(module):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def placeable(device: torch.device | str) -> torch.device:
    """Returns a device as tensors name it, a GPU with its number; raises ConfigurationError if there is none."""
    count = torch.cuda.device_count()
    try:
        place = torch.device(device)
        if place.type == "cuda" and (place.index or 0) >= count:
            raise RuntimeError(f"torch sees {count} GPUs")
    except RuntimeError as error:
        raise ConfigurationError(
            f"device={str(device)!r} cannot be used here; take cpu, or cuda where torch sees a GPU; it sees {count}"
        ) from error
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place


@contextlib.contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Makes a GPU the one whose random numbers are restored: of several that is the current one.

    It is initialised before, or the state in which its generator was would be unknown.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.init()
    with torch.cuda.device(device):
        yield


@contextlib.contextmanager
def placed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Lets a module live on a device for a while, quantized as there; its own tensors wait where they are.

    Nothing is copied back: what runs here must not change parameters, and changes of buffers and of the states of
    metrics are lost.
    """
    with quantized(module, device), _moved(module, device):
        yield


@contextlib.contextmanager
def _moved(module: nn.Module, device: torch.device) -> Iterator[None]:
    parameters = [(p, p.data, p.device) for p in module.parameters() if p.device != device]
    others = dict[Any, nn.Parameter]()
    dicts = [(m._buffers, dict(m._buffers)) for m in module.modules()]
    dicts += [(m.__dict__, tensors) for m, tensors in own_tensors(module.modules())]
    # `_device` is what `LightningModule.device` answers.
    devices = [(m, m.__dict__["_device"]) for m in module.modules() if "_device" in m.__dict__]
    try:
        for parameter, *_ in parameters:
            if (other := moved(parameter, device)) is not parameter:
                others[parameter] = other
        replace_parameters(module, others)
        for attributes, values in dicts:
            attributes.update(tree_to(values, device))
        for owner, _ in devices:
            owner.__dict__["_device"] = device
        yield
    finally:
        replace_parameters(module, {after: before for before, after in others.items()})
        for parameter, value, place in parameters:
            if parameter not in others:
                parameter.data = value
                move_scales(parameter, place)
        for attributes, values in dicts:
            attributes.update(values)
        for owner, before in devices:
            owner.__dict__["_device"] = before


def tree_to(tree: Any, device: torch.device) -> Any:
    """Moves all tensors of a tree."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)


def scratch_bytes(parameters: Iterable[Tensor]) -> int:
    """Returns the size of the gradients that `scratch_gradients` gives some parameters."""
    return sum(_scratch_length(alike) * alike[0].itemsize for alike in _by_type(parameters))


@contextlib.contextmanager
def scratch_gradients(module: nn.Module, names: frozenset[str]) -> Iterator[None]:
    """Gives parameters gradients to be added to, as they are in every microbatch but the first.

    Many of them share memory, as nobody reads their values: a rank that times a whole model need not have room for
    the gradients of all of it. Models on the meta device, where none takes memory, count each by itself.
    """
    chosen = [p for name, p in module.named_parameters() if name in names]
    try:
        for alike in _by_type(chosen):
            length, start = _scratch_length(alike), 0
            memory = torch.zeros(length, dtype=alike[0].dtype, device=alike[0].device)
            for parameter in alike:
                outline = torch.zeros_like(parameter, device="meta")
                if memory.is_meta:
                    parameter.grad = outline
                    continue
                start = start if start + parameter.numel() <= length else 0
                strides = outline.stride()
                parameter.grad = memory[start:].as_strided(parameter.shape, strides)
                start += _aligned_length(parameter)
        yield
    finally:
        for parameter in chosen:
            parameter.grad = None


def _by_type(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yields parameters of the same type on the same device."""
    key = lambda parameter: (str(parameter.device), str(parameter.dtype))
    for _, alike in itertools.groupby(sorted(parameters, key=key), key):
        yield list(alike)


def _aligned_length(parameter: Tensor) -> int:
    """Returns the number of elements after which the next gradient begins, at a multiple of 16 bytes."""
    step = max(16 // parameter.itemsize, 1)
    return -(-parameter.numel() // step) * step


def _scratch_length(parameters: Sequence[Tensor]) -> int:
    """Returns the number of gradients, of parameters of the same type, that are there at a time."""
    numbers = [_aligned_length(parameter) for parameter in parameters]
    return min(sum(numbers), max(_SHARED_BYTES // parameters[0].itemsize, *numbers))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step, layer by layer.

    Attributes:
        before: Glue before each layer; `tail` after the last.
        backward: Backward of each layer with the glue that feeds it; 0 where no gradient arrives.
        backward_tail: Backward of the glue after the last layer.
    """

    before: tuple[float, ...]
    inside: tuple[float, ...]
    tail: float
    backward: tuple[float, ...]
    backward_tail: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        return sum((*self.before, *self.inside, self.tail, *self.backward, self.backward_tail))


Rounds = Mapping[int, tuple[Sequence[StepTimes], Sequence[StepTimes]]]
"""Times of steps by sample count: with whole backward, and with that of inputs only, of which there may be none."""


def summed_up(rounds: Rounds) -> Rounds:
    """Reduces runs to one step for each sample count and kind of backward: medians, layer by layer."""
    return {
        count: ([middle(whole)], [middle(inputs)] if inputs else [])
        for count, (whole, inputs) in rounds.items()
    }


def pooled(ranks: Sequence[Rounds]) -> Rounds:
    """Returns the steps of all ranks together, by sample count.

    Example:
        >>> step = StepTimes((0.0,), (3.0,), 0.0, (6.0,), 0.0)
        >>> {count: len(whole) for count, (whole, _) in
        ...  pooled([{1: ([step], [step])}, {}, {1: ([step], [step]), 2: ([step], [step])}]).items()}
        {1: 2, 2: 1}
    """
    counts = sorted({count for rounds in ranks for count in rounds})
    return {
        count: (
            [step for rounds in ranks if count in rounds for step in rounds[count][0]],
            [step for rounds in ranks if count in rounds for step in rounds[count][1]],
        )
        for count in counts
    }


def middle(steps: Sequence[StepTimes]) -> StepTimes:
    """Reduces several steps to one of typical times, forward and backward.

    Example:
        >>> middle([StepTimes((0.0,), (t,), 0.0, (2 * t,), 0.0) for t in (3.0, 4.0, 9.0)]).backward
        (8.0,)
    """
    num_layers = len(steps[0].inside)
    *forward, tail = typical([(*step.before, *step.inside, step.tail) for step in steps])
    *backward, backward_tail = typical([(*step.backward, step.backward_tail) for step in steps])
    before, inside = tuple(forward[:num_layers]), tuple(forward[num_layers:])
    return StepTimes(before, inside, tail, tuple(backward), backward_tail)


def typical(rows: Sequence[Sequence[float]]) -> list[float]:
    """Returns medians of columns, scaled so that they add up to the median sum of a row.

    Example:
        >>> typical([(1.0, 1.0, 4.0), (4.0, 1.0, 1.0), (1.0, 4.0, 1.0)])
        [2.0, 2.0, 2.0]
    """
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    whole, parts = statistics.median(map(sum, rows)), sum(medians)
    return [whole / parts * median for median in medians] if parts > 0 else medians


Backward = Literal["whole", "inputs"]


class StepRun(Run):
    """Answers the calls of one step: runs every layer and takes stamps."""

    def __init__(self, graph: LayerGraph, clock: Clock) -> None:
        self._graph, self._clock, self.num_layers = graph, clock, len(graph.layers)
        self._layers = frozenset(graph.layer_names)
        self._names: list[str] = []
        self._stamps: list[Any] = []
        self._fired: dict[int, Any] = {}
        self._outputs: list[Tensor] = []
        self._inside = self._is_backward = False

    @property
    def position(self) -> int:
        """The layer that runs, or whose glue runs; after the last layer still the last one."""
        upcoming = len(self._names) - self._inside
        return min(upcoming, self.num_layers - 1)

    def measure(
        self,
        call: Callable[[], Any],
        interception: Interception,
        backward: Backward,
        saving: AbstractContextManager[Any] | None = None,
    ) -> StepTimes:
        """Runs the step forward and backward, whole or for gradients of inputs only.

        What `saving` gives, around the forward, as `saved_bytes` does, is kept as `num_saved_bytes`.

        Raises:
            GraphError: The step did not call the layers of the graph.
        """
        with self._answering(interception):
            self._clock.settle()
            self._stamps.append(self._clock.stamp())
            with saving or contextlib.nullcontext() as self.num_saved_bytes:
                loss = loss_of(call())
            self._stamps.append(self._clock.stamp())
            self._check()
            self._is_backward = True
            if backward == "whole":
                loss.backward()
            else:
                torch.autograd.grad(loss, self._outputs, allow_unused=True)
            end = self._clock.stamp()
        self._clock.settle()
        return self._times(end)

    def split_backward_s(self, call: Callable[[], Any], interception: Interception) -> float | None:
        """Returns seconds of a backward in two halves; None where a stage would run it as one piece."""
        with self._answering(interception):
            self._stamps.append(self._clock.stamp())
            loss = loss_of(call())
            if self.checkpointed or self._graph.changes_gradients or not self._outputs:
                return None
            start = self._clock.stamp()
            try:
                _, later = input_gradients([loss], [torch.ones_like(loss)], self._outputs[:1])
            except NestedExits:
                return None
            later.run()
            stop = self._clock.stamp()
        self._clock.settle()
        return self._clock.seconds(start, stop)

    def forward_only(self, call: Callable[[], Any], interception: Interception) -> Any:
        """Runs the step forward and returns what it returned."""
        with self._answering(interception):
            self._stamps.append(self._clock.stamp())
            return call()

    @contextlib.contextmanager
    def _answering(self, interception: Interception) -> Iterator[None]:
        try:
            with (
                without_garbage_collection(),  # no search for cycles in the middle of a layer
                interception.running(self),
                interception.recomputed_by(self),
                torch.enable_grad(),
            ):
                yield
        finally:
            # Their hooks hold this run, out of sight of the garbage collector: they would never be freed.
            self._outputs.clear()

    def call(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module; see `Run`."""
        if self._inside or self._is_backward or site.name not in self._layers:
            return site.diffpipe_original(*args, **kwargs)
        index = len(self._names)
        self._stamps.append(self._clock.stamp())
        self._names.append(site.name)
        self._inside = True
        try:
            out = self._run_layer(site, args, kwargs)
        finally:
            self._inside = False
        self._stamps.append(self._clock.stamp())
        self._await_gradients(index, out)
        return out

    def _await_gradients(self, index: int, out: Any) -> None:
        def fire(gradient: Tensor) -> None:
            if index not in self._fired:
                self._fired[index] = self._clock.stamp()

        for leaf in filter(_wants_gradient, pytree.tree_leaves(out)):
            self._outputs.append(leaf)
            leaf.register_hook(fire)

    def _run_layer(self, site: Site, args: Any, kwargs: Any) -> Any:
        if self.checkpointing:
            return checkpoint(self._seeded, site, args, kwargs, use_reentrant=False)
        return self._seeded(site, args, kwargs)

    def _seeded(self, site: Site, args: Any, kwargs: Any) -> Any:
        if site.name not in self._graph.seeded:
            return site.diffpipe_original(*args, **kwargs)
        with rng.private_stream(self._graph.host_random):
            return site.diffpipe_original(*args, **kwargs)

    def log(self, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Drops what is logged while measuring."""

    def checkpoints_layers(self) -> bool:
        """Returns whether a checkpoint called now would enclose layers."""
        return not self._inside

    def _check(self) -> None:
        if tuple(self._names) != self._graph.layer_names:
            difference = other_calls(self._graph.layer_names, self._names)
            raise GraphError(
                f"while it was timed the step called other layers than in its probe: {difference}"
            )

    def _times(self, end: Any) -> StepTimes:
        steps = [self._clock.seconds(a, b) for a, b in pairwise(self._stamps)]
        backward = [0.0] * len(self._names)
        events = [*self._fired.items()]
        for (index, stamp), later in zip(events, [s for _, s in events[1:]] + [end], strict=True):
            backward[index] = self._clock.seconds(stamp, later)
        first = events[0][1] if events else end
        return StepTimes(
            before=tuple(steps[0::2][:-1]),
            inside=tuple(steps[1::2]),
            tail=steps[-1],
            backward=tuple(backward),
            backward_tail=self._clock.seconds(self._stamps[-1], first),
        )


class KeptBytes(NamedTuple):
    """Bytes that a layer keeps for the backward: for each sample, and for each microbatch besides."""

    per_sample: float
    per_microbatch: float = 0.0


def kept_bytes(by_count: Mapping[int, Sequence[int]]) -> list[KeptBytes]:
    """Returns what layers keep, from what they saved of the smallest and of the largest number of samples.

    Example:
        >>> kept_bytes({1: [110, 10], 4: [140, 40]})
        [KeptBytes(per_sample=10.0, per_microbatch=100.0), KeptBytes(per_sample=10.0, per_microbatch=0.0)]
    """
    few, many = min(by_count), max(by_count)
    per_layer = []
    # A line through both points, or one above it where it would leave the positive.
    for a, b in zip(by_count[few], by_count[many], strict=True):
        if b * few >= a * many:  # also where there is one point only
            per_layer.append(KeptBytes(b / many))
        else:
            per_sample = max((b - a) / (many - few), 0.0)
            per_layer.append(KeptBytes(per_sample, a - few * per_sample))
    return per_layer


@contextlib.contextmanager
def saved_bytes(run: StepRun, known: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yields bytes that autograd keeps for the backward, by layer: of the one that saves it first.

    Parameters and buffers do not count, and a storage counts once. What `torch.func` keeps inside of `grad` and its
    like does not count either, as it allows no hooks.
    """
    num_bytes = [0] * run.num_layers
    storage = lambda tensor: tensor.untyped_storage()._cdata
    seen = set(map(storage, known))
    alive: list[Tensor] = []  # a storage that is freed may leave its address to another

    def pack(tensor: Tensor) -> Tensor:
        if storage(tensor) not in seen:
            seen.add(storage(tensor))
            alive.append(tensor)
            num_bytes[run.position] += tensor.untyped_storage().nbytes()
        # An output that its own node keeps, with its history, would never be freed.
        return tensor.detach()

    graph: Any = torch.autograd.graph
    refuse_hooks = graph.disable_saved_tensors_hooks
    hooks = graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    @contextlib.contextmanager
    def without_hooks(message: str) -> Iterator[None]:
        hooks.__exit__(None, None, None)
        try:
            with refuse_hooks(message):
                yield
        finally:
            hooks.__enter__()

    graph.disable_saved_tensors_hooks = without_hooks
    try:
        with hooks:
            yield num_bytes
    finally:
        graph.disable_saved_tensors_hooks = refuse_hooks
        alive.clear()


class OneByOneRun(StepRun):
    """Answers the calls of one step, and times every layer `repeats` times on the way, after once for nothing."""

    def __init__(self, graph: LayerGraph, clock: Clock, device: torch.device, repeats: int) -> None:
        super().__init__(graph, clock)
        self.num_saved_bytes = [0] * len(graph.layers)
        self._device, self._repeats = device, repeats
        # By layer and repetition: forward, whole backward, backward of inputs only.
        self._seconds: list[list[tuple[float, float, float]]] = []

    def walk(
        self, call: Callable[[], Any], interception: Interception
    ) -> tuple[list[StepTimes], list[StepTimes]]:
        """Runs the step once; returns `repeats` steps with whole backward, and as many with that of inputs only.

        Raises:
            GraphError: The step did not call the layers of the graph.
        """
        with self._answering(interception):
            call()
        self._check()
        return self._steps(1), self._steps(2)

    def _await_gradients(self, index: int, out: Any) -> None:
        """Does nothing, as the backward was timed already."""

    def _steps(self, backward: int) -> list[StepTimes]:
        nothing = (0.0,) * len(self._names)
        steps = (tuple(zip(*step, strict=True)) for step in zip(*self._seconds, strict=True))
        return [StepTimes(nothing, step[0], 0.0, step[backward], 0.0) for step in steps]

    def _run_layer(self, site: Site, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        home = tensors[0].device if tensors else torch.device("cpu")
        seconds = []
        with placed(site.module, self._device):
            arguments = tree_to((args, kwargs), self._device)
            parameters = [p for p in site.module.parameters() if p.requires_grad]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            state = [*site.module.parameters(), *site.module.buffers()]
            with saved_bytes(self, state) as saved:
                out = self._seeded(site, *_written(_leaves(arguments)))
            self.num_saved_bytes[self.position] += sum(saved)
            for _ in range(self._repeats + 1):
                whole = self._timed(site, arguments, "whole")
                seconds.append((*whole, self._timed(site, arguments, "inputs")[1]))
            for parameter in parameters:
                parameter.grad = None
        self._seconds.append(seconds[1:])

        def without_past(tensor: Tensor) -> Tensor:
            leaf = tensor.detach().to(home).requires_grad_(tensor.requires_grad)
            # Glue may write into it, but not into a leaf.
            return leaf.clone() if tensor.requires_grad else leaf

        return pytree.tree_map_only(Tensor, without_past, out)

    def _timed(self, site: Site, arguments: Any, backward: str) -> tuple[float, float]:
        clock = self._clock
        inputs = _leaves(arguments)
        leaves = [t for t in pytree.tree_leaves(inputs) if _wants_gradient(t)]
        args, kwargs = _written(inputs)
        clock.settle()
        start = clock.stamp()
        out = self._seeded(site, args, kwargs)
        middle = clock.stamp()
        outputs = [t for t in pytree.tree_leaves(out) if _wants_gradient(t)]
        gradients = [torch.ones_like(t) for t in outputs]
        before = clock.stamp()
        if outputs and backward == "whole":
            torch.autograd.backward(outputs, gradients)
        elif outputs and leaves:
            torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
        after = clock.stamp()
        clock.settle()
        return clock.seconds(start, middle), clock.seconds(before, after)


def _wants_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _leaves(arguments: Any) -> Any:
    """Returns the arguments as leaves of a graph of their own."""
    return _each(arguments, lambda t: t.detach().requires_grad_(t.requires_grad))


def _written(arguments: Any) -> Any:
    """Makes arguments fit to be written into: a layer may begin with an operation in place; leaves refuse it."""
    return _each(arguments, lambda t: t.clone() if t.requires_grad else t)


def _each(arguments: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Changes all tensors; one that is given twice stays one."""
    changed: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
        return changed[id(tensor)]

    return pytree.tree_map_only(Tensor, once, arguments)
