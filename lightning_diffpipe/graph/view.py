"""Running one stage: the step's own code, with stubs for the layers of other stages.

    view = StageView(module, graph, cut.stages[1], interception)
    run = view.forward(lambda: module.training_step(microbatch, 0), seed=17, received=tensors)
    send(run.outputs)                                # to the stage after it
    gradients = run.backward(gradients_of_outputs)   # for the stage before it

Every stage runs the same callable from the same seed. A layer call is executed where it belongs; elsewhere it
returns received tensors if something here reads them, or else dummies, full of NaN. So a stage is a function of
received tensors and parameters, and by the chain rule gradients are plain sums over stages. The run stops when its
last own layer is done.

All that can be known in advance is worked out once per `View`, so that a stubbed call costs a few microseconds. The
sequence of calls and the shapes, types and constants of all executed outputs are compared with the probe; a step
that behaves differently stops with a clear error.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.backward import (
    NestedExits,
    WeightGradients,
    in_own_memory,
    input_gradients,
)
from lightning_diffpipe.graph.cut import StageCut
from lightning_diffpipe.graph.interception import Interception, Run, Site
from lightning_diffpipe.graph.layer import Layer, LayerGraph, Opaque, SameAs, TensorKey, TensorSpec
from lightning_diffpipe.graph.placement import is_placeholder
from lightning_diffpipe.graph.side_effects import Attributes, NoHooksWithoutGradients, caller
from lightning_diffpipe.graph.step import loss_of, weight_of
from lightning_diffpipe.graph.streaming import WeightStream


class Memo(Protocol):
    """Remembers what frozen layers gave; see `graph/memo.py`."""

    def call(
        self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, run: Callable[[], Any]
    ) -> Any:
        """Returns what a layer gives for these arguments; `run` executes it."""


class Stop(BaseException):
    """Ends the step after the last own layer (no Exception, so that steps do not swallow it)."""


class OpaqueOutput:
    """Stands for an output of a foreign layer that cannot travel; any use of it is an error."""

    def __init__(self, layer_name: str, type_name: str) -> None:
        self._names = layer_name, type_name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        layer_name, type_name = self._names
        raise GraphError(
            f"{layer_name} returns a {type_name}, of which {name!r} is read on another stage; only tensors, "
            "numbers, strings and containers known to torch.utils._pytree can cross: register the type "
            "with torch.utils._pytree.register_dataclass, or return a tuple"
        )


class DummyMemory:
    """Memory that all dummies of a rank share, whatever they stand for: they are only read.

    It is full of NaN, so that a step that reads what it did not when it was probed cannot go on with numbers that
    look right. They are no inference tensors, as writing into one leaves no trace.
    """

    _spacing = 0  # elements between the first ones of two dummies

    def __init__(self) -> None:
        self._largest: dict[tuple[torch.dtype, str], Tensor] = {}
        self._versions: dict[tuple[torch.dtype, str], int] = {}

    @torch.inference_mode(False)
    def of(self, spec: TensorSpec, number: int = 0) -> Tensor:
        """Returns a dummy of the right shape, strides and type; memory grows to that of the largest one."""
        key, first = (spec.dtype, spec.device), number * self._spacing
        memory, size = self._largest.get(key), first + torch.Size(spec.shape).numel()
        if memory is None:
            memory = self._largest[key] = torch.empty(0, dtype=spec.dtype, device=spec.device)
        if memory.numel() < size:  # in place, as dummies made before are views of it
            memory.resize_(size)
            floating = spec.dtype.is_floating_point or spec.dtype.is_complex
            self._fill(memory) if floating else memory.fill_(0)
            self._versions[key] = memory._version
        return memory.as_strided(spec.shape, spec.stride, first)

    def _fill(self, memory: Tensor) -> None:
        memory.fill_(math.nan)

    def require_unwritten(self) -> None:
        """Raises GraphError if dummies were written."""
        for key, memory in self._largest.items():
            if memory._version != self._versions.get(key, memory._version):
                raise GraphError(
                    f"the step writes in place into a {key[0]} output of a layer, which it did not when it was "
                    "probed. Write into a copy, or from the first step on"
                )


class NumberMemory(DummyMemory):
    """Memory of dummies that are numbers, others for each, so that no difference between two is zero."""

    _spacing = 8

    def _fill(self, memory: Tensor) -> None:
        places = torch.arange(len(memory), dtype=torch.float64, device=memory.device)
        memory.copy_((places * 0.618).frac() + 0.5)


def _by_layer(keys: Any) -> dict[int, frozenset[int]]:
    leaves_of: dict[int, set[int]] = {}
    for layer, leaf in keys:
        leaves_of.setdefault(layer, set()).add(leaf)
    return {layer: frozenset(leaves) for layer, leaves in leaves_of.items()}


_NONE: frozenset[int] = frozenset()


class View:
    """A module whose step runs with some of its layers, and stubs for all others.

    Args:
        cut: Layers executed, and tensors received and sent here.
        interception: Installed on the root; shared by all views of it.
        memory: Storage of dummies, to be shared by all views of a rank.
        recomputed: Layers, before folding, whose activations the backward computes again instead of storing them.
        stream: Weights of the layers among them that are streamed.

    Attributes:
        pauses: Something is done before each layer of the fine graph.
        may_vary: All layers are executed here, nothing is sent, and other calls of them than were probed just run.
        has_varied: There were some.
        fine: Layers of the fine graph, inside own layers, whose calls are intercepted.
    """

    pauses = may_vary = has_varied = False

    def __init__(
        self,
        root: nn.Module,
        graph: LayerGraph,
        cut: StageCut,
        interception: Interception,
        memory: DummyMemory | None = None,
        recomputed: frozenset[str] = frozenset(),
        stream: WeightStream | None = None,
    ) -> None:
        self.root, self.graph, self.cut, self.interception = root, graph, cut, interception
        self.recomputed, self.stream = recomputed, stream
        interception.watch(graph.site_names)
        # What runs ask at every call of a module.
        self.names, self.sites = graph.layer_names, graph.site_names
        self.seeded = graph.seeded
        layers = [graph.layers[index] for index in cut.layers]
        inside = frozenset(n for layer in layers for n in graph.fine_names[slice(*layer.fine)])
        # All or none: one that nothing is done for may call another, and the outer one counts.
        asks = self.pauses or stream is not None or not inside.isdisjoint(self.seeded | recomputed)
        self.fine = inside if asks else frozenset[str]()
        self.final = len(graph.layers) if cut.is_last else max(cut.layers, default=-1)
        received = set(cut.received)
        self.sent = _by_layer(key for key in cut.sent if key not in received)
        self.returned = {layer for layer, _ in cut.sent_gradients} & cut.layers
        self.needed = _by_layer(cut.needed)
        self.memo: Memo | None = None
        self.dummy_memory = memory or DummyMemory()
        self._dummies: dict[TensorKey, Tensor] = {}

    def remember(self, memo: Memo | None) -> None:
        """Calls frozen layers through a memo from now on, or through none."""
        self.memo = memo

    def dummy(self, layer: Layer, leaf: int) -> Tensor:
        """Stands for an output of a foreign layer that nothing here reads."""
        key = (layer.index, leaf)
        if key not in self._dummies:
            self._dummies[key] = self.dummy_memory.of(layer.outputs[leaf], len(self._dummies))
        dummy = self._dummies[key]
        return dummy.clone() if leaf in layer.mutated else dummy.detach()

    @cached_property
    def restored(self) -> Attributes:
        """Attributes that a run puts back: all that the code between layers sets."""
        return Attributes(self.root, self.graph.toggled | self.graph.left)

    def walked(self, run: StubbedRun, call: Callable[[], Any], seed: int) -> None:
        """Lets a run answer the step from a seed; random numbers and the attributes in `restored` are put back."""
        host = self.graph.host_random
        with rng.preserved(host), self.restored.preserved(), self.interception.running(run):
            rng.seed_all(seed, host)
            run.walk(call)


class StubbedRun(Run):
    """One walk through the step.

    Attributes:
        outputs: Tensors made here that others read, still attached to the autograd graph.
        flows: Gradients that other stages have returned for outputs.
        reached: Layers to whose outputs a gradient came from what reads them here.
    """

    def __init__(self, view: View) -> None:
        self.outputs: dict[TensorKey, Tensor] = {}
        self.flows: dict[TensorKey, Tensor] = {}
        self.reached: set[int] = set()
        self._view = view
        self._position = 0
        self._inside = self._in_fine = self._stopping = False

    def checkpoints_layers(self) -> bool:
        """Returns whether a checkpoint called now would enclose layers."""
        return not self._inside

    def log(self, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Mutes what is logged, as its values may be dummies."""

    def call(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Executes or stubs the next layer."""
        view, position = self._view, self._position
        if self._inside:
            if view.fine:
                return self.call_inside(site, args, kwargs)
            return site.diffpipe_original(*args, **kwargs)
        if site.name not in view.sites:
            return site.diffpipe_original(*args, **kwargs)  # an expanded container: glue
        if self._stopping:
            raise Stop
        if position >= len(view.names) or view.names[position] != site.name:
            position = self._out_of_turn(site.name)
        layer = view.graph.layers[position]
        self._position = position + 1
        if position not in view.cut.layers:
            for _ in range(layer.num_seeds):
                rng.draw_seed()
            return self._stub(layer)
        out = self.execute(layer, site, args, kwargs)
        if view.has_varied:  # what this call gives was not probed
            return out
        out = self._checked(layer, out)
        if position == view.final:
            # Hooks of the layer shall see its output; then the next layer call stops.
            hooks = site.module._forward_hooks or nn.modules.module._global_forward_hooks
            self._stopping = bool(hooks)
            if not hooks:
                raise Stop
        return out

    def call_inside(self, site: Site, args: Any, kwargs: Any) -> Any:
        """Runs a layer of the fine graph inside a layer, and again in the backward if it is recomputed."""
        view = self._view
        if self._in_fine or site.name not in view.fine:
            return site.diffpipe_original(*args, **kwargs)
        if site.name not in view.recomputed or not torch.is_grad_enabled():
            return self._call_fine(site, args, kwargs)
        self.checkpointed = True
        return checkpoint(self._call_fine, site, args, kwargs, use_reentrant=False)

    def _call_fine(self, site: Site, args: Any, kwargs: Any) -> Any:
        """Runs a layer as it was probed, before layers were folded into stages.

        If it draws, its random numbers have a seed of their own; streamed weights are on the device for the run.
        """
        view, self._in_fine = self._view, True
        try:
            self.before_fine_layer(site.name)
            run = partial(site.diffpipe_original, *args, **kwargs)
            if view.stream is not None and site.name in view.stream.layers:
                run = partial(view.stream.call, site.name, run)
            if site.name not in view.seeded:
                return run()
            with rng.private_stream(view.graph.host_random):
                return run()
        finally:
            self._in_fine = False

    def before_fine_layer(self, name: str) -> None:
        """Does nothing; frozen runs pause."""

    def execute(self, layer: Layer, site: Site, args: Any, kwargs: Any) -> Any:
        """Calls an own layer, or remembers what it gave for these arguments."""
        memo = self._view.memo
        if memo is None or not layer.frozen:
            return self._execute(layer, site, args, kwargs)
        run = partial(self._execute, layer, site, args, kwargs)
        return memo.call(layer, site.module, args, kwargs, run)

    def _execute(self, layer: Layer, site: Site, args: Any, kwargs: Any) -> Any:
        checkpointing = self.checkpointing and torch.is_grad_enabled()
        self._inside = True
        try:
            state = rng.capture(host=False)
            if checkpointing:
                out = checkpoint(self.call_inside, site, args, kwargs, use_reentrant=False)
            else:
                out = self.call_inside(site, args, kwargs)
            rng.require_only_seeds_drawn(state, layer.name, layer.num_seeds)
            return out
        finally:
            self._inside = False

    def received(self, layer: Layer, leaf: int) -> Tensor:
        """Returns the tensor of a foreign layer that is read here."""
        raise NotImplementedError

    def walk(self, call: Callable[[], Any]) -> Any:
        """Runs the step until its end, or until all own layers are done (then the result is None)."""
        view = self._view
        if view.final < 0:
            return None
        hooks = NoHooksWithoutGradients() if view.graph.hooks else contextlib.nullcontext()
        try:
            with hooks:
                result, stopped = call(), False
        except Stop:
            result, stopped = None, True
        view.dummy_memory.require_unwritten()
        if not stopped and self._position < min(view.final + 1, len(view.names)):
            if not view.may_vary:
                raise GraphError(
                    f"the step ended after {self._position} layer calls, the probe saw {len(view.names)}; the next "
                    f"would have been {view.names[self._position]}. All batches must call the same layers"
                )
            view.has_varied = True
        return result

    def _out_of_turn(self, name: str) -> int:
        """Returns the index of a layer that is called where another was to come."""
        view = self._view
        if not view.may_vary:
            raise self._unexpected(name)
        if name not in view.names:
            raise not_probed(name)
        view.has_varied = True
        return view.names.index(name)

    def _unexpected(self, name: str) -> GraphError:
        names, position = self._view.names, self._position
        if position < len(names):
            expected = f"{names[position]} was to come"
        else:
            expected = f"its sequence has {len(names)} layer calls, with which another one begins"
        return GraphError(
            f"{caller()} calls {name} as layer call {position}, where {expected}: the step takes another way than "
            "when it was probed. Let coins of torch's, Python's or numpy's global generators decide, or the number "
            "of the batch, step or epoch, all of which are tried before training; or move the branch inside the "
            "forward of one module, so that all batches call the same layers"
        )

    def _stub(self, layer: Layer) -> Any:
        needed = self._view.needed.get(layer.index, _NONE)
        flat: list[Any] = []
        for leaf, expected in enumerate(layer.outputs):
            if isinstance(expected, TensorSpec):
                if leaf in needed:
                    flat.append(self.received(layer, leaf))
                else:
                    flat.append(self._view.dummy(layer, leaf))
            elif isinstance(expected, SameAs):
                flat.append(flat[expected.leaf])
            elif isinstance(expected, Opaque):
                flat.append(OpaqueOutput(layer.name, expected.type_name))
            else:
                flat.append(expected)
        return pytree.tree_unflatten(flat, layer.spec)

    def _checked(self, layer: Layer, out: Any) -> Any:
        """Compares an output with the probe, stores what will be sent, returns the rest."""
        flat, spec = ([out], None) if isinstance(out, Tensor) else pytree.tree_flatten(out)
        if len(flat) != len(layer.outputs):
            raise GraphError(
                f"{layer.name} returned {len(flat)} values, the probe saw {len(layer.outputs)}; a module "
                "must return the same structure for all batches of one signature"
            )
        sent = self._view.sent.get(layer.index, _NONE)
        is_watched, changed = layer.index in self._view.returned, bool(layer.mutated)
        for leaf, expected in enumerate(layer.outputs):
            value = flat[leaf]
            if isinstance(expected, TensorSpec):
                if not isinstance(value, Tensor) or expected.mismatch(value):
                    raise _wrong_output(layer, leaf, value, expected)
                if leaf in sent:
                    flat[leaf] = self._keep(layer, leaf, value, expected)
                    changed = changed or flat[leaf] is not value
                if is_watched and value.requires_grad:
                    key = layer.index, leaf
                    self.outputs.get(key, value).register_hook(self._noting(key))
            elif not isinstance(expected, SameAs | Opaque) and not is_equal(value, expected):
                raise _wrong_output(layer, leaf, value, expected)
        if not changed:
            return out
        for leaf in layer.mutated:
            flat[leaf] = flat[leaf].clone()
        for leaf, expected in enumerate(layer.outputs):
            if isinstance(expected, SameAs):
                flat[leaf] = flat[expected.leaf]
        return flat[0] if spec is None else pytree.tree_unflatten(flat, spec)

    def _noting(self, key: TensorKey) -> Callable[[Tensor], None]:
        reached, flows = self.reached, self.flows  # not the run, which would hold itself

        def note(gradient: Tensor) -> None:
            if gradient is not flows.get(key):  # but a sum with something from here
                reached.add(key[0])

        return note

    def _keep(self, layer: Layer, leaf: int, value: Tensor, expected: TensorSpec) -> Tensor:
        # One that needs no gradient any more, as what makes it was frozen, is where the backward ends.
        if torch.is_grad_enabled() and value.requires_grad and not expected.requires_grad:
            raise GraphError(
                f"output {leaf} of {layer.name} needs a gradient, which it did not when the step was probed: "
                "parameters were unfrozen since, which changes the plan; do it before training starts"
            )
        value = with_layout(value, expected)
        self.outputs[layer.index, leaf] = value
        # Gradients from other stages must not pass hooks of glue, which belong to what reads the tensor here.
        return value.view_as(value) if self._view.graph.hooks else value


def not_probed(name: str) -> GraphError:
    """Returns the error of a layer that no graph of the step has."""
    return GraphError(
        f"the step calls {name}, which it did not call when it was probed, so that no rank was planned to "
        "run it. Let the step call it from the first batch on (multiply by 0 what shall not count yet), "
        "or move the branch inside the forward of one module"
    )


def with_layout(value: Tensor, spec: TensorSpec) -> Tensor:
    """Returns the tensor in the memory layout of the probe: receivers reserve it, and `*_like` depends on it."""
    stride = value.stride()
    if stride == spec.stride or all(
        size < 2 or a == b for size, a, b in zip(spec.shape, stride, spec.stride, strict=True)
    ):
        return value
    empty = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device)
    return empty.copy_(value)


def is_equal(value: Any, expected: Any) -> bool:
    """Returns whether two constants are of one type and equal; NaN equals NaN."""
    return type(value) is type(expected) and (value == expected or value != value)


def _wrong_output(layer: Layer, leaf: int, value: Any, expected: Any) -> GraphError:
    if isinstance(expected, TensorSpec) and isinstance(value, Tensor):
        return GraphError(
            f"output {leaf} of {layer.name} is {expected.mismatch(value)}; batches of another size need "
            "a graph of their own (reprobe), sizes that depend on values cannot be cut here"
        )
    if isinstance(expected, TensorSpec):
        expected = "a tensor"
    return GraphError(
        f"output {leaf} of {layer.name} is {value!r}, the probe saw {expected!r}. Other stages use the value "
        "the probe saw, so it must not vary between batches: return it as a tensor, or compute it outside"
    )


Log = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
"""Receives what the step logs: name of the method ("log" or "log_dict"), arguments."""


class StageView(View):
    """Runs a step as one stage of it; arguments as for `View`."""

    @cached_property
    def restored(self) -> Attributes:
        """Attributes that a run puts back: flags that the step itself resets, and counters.

        What the step leaves set remains.
        """
        return Attributes(self.root, self.graph.toggled | self.graph.counters.keys())

    @cached_property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that may get gradients here."""
        return [p for p in self.root.parameters() if p.requires_grad and not is_placeholder(p)]

    def forward(
        self,
        call: Callable[[], Any],
        *,
        seed: int,
        received: Mapping[TensorKey, Tensor] | None = None,
        log: Log | None = None,
    ) -> StageRun:
        """Runs the layers of this stage for one microbatch.

        Args:
            call: Runs the user's step, e.g. `lambda: module.training_step(microbatch, 0)`.
            seed: Seed of the glue; the same on all stages for one microbatch.
            received: Tensors from the stage before (`cut.received`) and from frozen layers (`cut.frozen_received`).
            log: Gets what the step logs, on the last stage; None leaves the step's own logging alone.

        Raises:
            GraphError: The step differs from its probe, or a tensor is missing.
        """
        run = StageRun(self, received or {}, log)
        self.walked(run, call, seed)
        return run


class StageRun(StubbedRun):
    """One microbatch on one stage, between its forward and its backward pass.

    Attributes:
        weight: Weight in the mean over microbatches, on the last stage of a step that returns one.
        result: All that the step returned, on the last stage.
        outputs: Tensors for the stage after it, including those passed through, attached to autograd.
    """

    def __init__(
        self, view: StageView, received: Mapping[TensorKey, Tensor], log: Log | None
    ) -> None:
        super().__init__(view)
        self.loss: Tensor | None = None
        self.weight: Tensor | float | None = None
        self.result: Any = None
        self._trained, self._received, self._log = view.trained, received, log
        self._leaves: dict[TensorKey, Tensor] = {}
        self._later: WeightGradients | None = None

    def log(self, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Passes logged values on where all that the loss reads is real."""
        if not self._view.cut.is_last or not self._view.cut.sees_all:
            return None
        return original(*args, **kwargs) if self._log is None else self._log(method, args, kwargs)

    def received(self, layer: Layer, leaf: int) -> Tensor:
        """Returns a received tensor as a leaf of this stage's autograd graph."""
        key, spec = (layer.index, leaf), layer.outputs[leaf]
        value = self._received.get(key)
        if value is None:
            raise GraphError(
                f"stage {self._view.cut.index} did not receive output {leaf} of {layer.name}"
            )
        if spec.mismatch(value):
            raise GraphError(f"received for output {leaf} of {layer.name}: {spec.mismatch(value)}")
        tensor = with_layout(value.detach(), spec)
        tensor.requires_grad_(spec.requires_grad and not layer.frozen)
        self._leaves[key] = tensor
        return tensor.clone() if leaf in layer.mutated else tensor

    def walk(self, call: Callable[[], Any]) -> Any:
        """Runs the step, and takes what the last stage returns and later stages read."""
        result, cut = super().walk(call), self._view.cut
        if cut.is_last:
            self.result, self.loss, self.weight = result, loss_of(result), weight_of(result)
            if (self.weight is not None) != self._view.graph.weighted:
                raise GraphError(
                    'the step returns a "weight" besides its loss for some batches only; return it always'
                )
        for key in cut.sent:
            if key not in self.outputs:
                self.outputs[key] = self._received[key].detach()
        self._received = {}
        return result

    def backward(
        self,
        grad_outputs: Mapping[TensorKey, Tensor] | None = None,
        loss_scale: float | Tensor = 1.0,
    ) -> dict[TensorKey, Tensor]:
        """Backpropagates through this stage, into `.grad` of its parameters.

        Args:
            grad_outputs: Gradients of `cut.sent_gradients`.
            loss_scale: This microbatch's loss is multiplied by it, on the last stage, besides its own weight.

        Returns:
            Gradients of `cut.received_gradients`; zeros where nothing here reads a tensor.
        """
        grads = grad_outputs or {}
        roots, flows = self._roots(grads, loss_scale)
        # Gradients that come from other stages or go to them.
        passing = lambda: [*flows, *(leaf.grad for leaf in self._leaves.values())]
        if roots:
            self._inside = True  # layers that are called now are computed again
            with (
                rng.preserved(self._view.graph.host_random),
                self._view.interception.running(self),
                self._view.interception.recomputed_by(self),
                in_own_memory(self._trained, passing),
            ):
                torch.autograd.backward(roots, flows)
        return self._input_gradients(grads)

    def backward_input(
        self,
        grad_outputs: Mapping[TensorKey, Tensor] | None = None,
        loss_scale: float | Tensor = 1.0,
    ) -> dict[TensorKey, Tensor]:
        """Runs the half of `backward` that the stage before waits for; `backward_weight` must follow.

        Takes and returns what `backward` does. Where the graph cannot be split (activation checkpointing, which
        would recompute for every question, and hooks on gradients, which both halves would run) it runs whole.
        """
        grads = grad_outputs or {}
        roots, flows = self._roots(grads, loss_scale)
        leaves = [leaf for leaf in self._leaves.values() if leaf.requires_grad]
        hooked = self._view.graph.changes_gradients or any(p._backward_hooks for p in self._trained)
        if self.checkpointed or hooked:
            return self.backward(grad_outputs, loss_scale)
        if roots:
            try:
                with rng.preserved(self._view.graph.host_random):
                    gradients, self._later = input_gradients(roots, flows, leaves)
            except NestedExits:
                return self.backward(grad_outputs, loss_scale)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient
        return self._input_gradients(grads)

    def backward_weight(self) -> None:
        """Runs the other half of `backward`: gradients of this stage's parameters, into their `.grad`."""
        if self._later is not None:
            self._later.run()
        self._later = None
        self.flows.clear()

    def _roots(
        self, grads: Mapping[TensorKey, Tensor], loss_scale: float | Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the tensors at which the backward starts, and their gradients."""
        sent = filter(grads.__contains__, self._view.cut.sent_gradients)
        keys = [key for key in sent if self.outputs[key].requires_grad]
        roots, flows = [self.outputs[key] for key in keys], [grads[key] for key in keys]
        self.flows.update(zip(keys, flows, strict=True))
        if self.loss is not None and self.loss.requires_grad:
            roots.append(self.loss)
            flow = torch.ones_like(self.loss) * loss_scale
            flows.append(flow if self.weight is None else flow.mul_(self.weight))
        return roots, flows

    def _input_gradients(self, grads: Mapping[TensorKey, Tensor]) -> dict[TensorKey, Tensor]:
        result: dict[TensorKey, Tensor] = {}
        for key in self._view.cut.received_gradients:
            leaf = self._leaves.get(key)
            both = None if leaf is None else leaf.grad, grads.get(key)
            gradients = [gradient for gradient in both if gradient is not None]
            if both[0] is not None:
                self.reached.add(key[0])
            if gradients:  # from layers here, and passed through
                result[key] = gradients[0] if len(gradients) == 1 else gradients[0] + gradients[1]
            else:
                device = leaf.device if leaf is not None else None
                result[key] = self._view.graph.spec(key).empty(device).zero_()
        self.outputs.clear()
        self._leaves.clear()
        if self._later is None:
            self.flows.clear()
        self.loss = None if self.loss is None else self.loss.detach()
        return result
