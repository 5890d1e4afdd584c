"""Running one stage: the step's own code, with stubs for the layers of other stages.

    view = StageView(module, graph, cut.stages[1], interception)
    run = view.forward(lambda: module.training_step(microbatch, 0), seed=17, received=tensors)
    send(run.outputs)                                # to the stage after it
    gradients = run.backward(gradients_of_outputs)   # for the stage before it

Every stage runs the same callable from the same seed. A layer call is executed where it belongs;
elsewhere it hands out received tensors if something here reads them, or else dummies, full of NaN. So a stage is a
function of received tensors and parameters, and by the chain rule gradients are plain sums over stages.
The run stops when its last own layer is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.backward import (
    NestedExits,
    WeightGradients,
    in_own_memory,
    input_gradients,
)
from lightning_diffpipe.graph.cut import StageCut
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.layer import Layer, LayerGraph, TensorKey
from lightning_diffpipe.graph.layer_run import DummyMemory, Memo, RunPlan, StubbedRun, with_layout
from lightning_diffpipe.graph.side_effects import Attributes
from lightning_diffpipe.graph.step import loss_of, weight_of

Log = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
"""Receives what the step logs: name of the method ("log" or "log_dict"), arguments."""


class StageView:
    """Runs a step as one stage of it.

    Args:
        root: The module whose step it is.
        graph: The probed step, for batches of one signature.
        cut: What this stage executes, receives and sends.
        interception: Installed on the root; shared by all views of it.
        memory: What dummies are made of, to be shared by all views of a rank.
    """

    def __init__(
        self,
        root: nn.Module,
        graph: LayerGraph,
        cut: StageCut,
        interception: Interception,
        memory: DummyMemory | None = None,
    ) -> None:
        self.root, self.graph, self.cut, self.interception = root, graph, cut, interception
        interception.watch(graph.site_names)
        self._plan = RunPlan(graph, cut, memory)
        self._attributes = Attributes(root, graph.toggled | graph.counters.keys())
        names = cut.parameters & graph.trained
        self._trained = [p for name, p in root.named_parameters() if name in names]

    def remember(self, memo: Memo | None) -> None:
        """Calls frozen layers through a memo from now on, or through none."""
        self._plan.memo = memo

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
            received: Tensors from the stage before (`cut.received`) and from frozen layers
                (`cut.frozen_received`).
            log: Gets what the step logs, on the last stage; logging on others is muted. None leaves the
                step's own logging alone.

        Returns:
            The run, with its outputs; on the last stage with its loss.

        Raises:
            GraphError: The step differs from its probe, or a tensor is missing.
        """
        run = StageRun(self._plan, self.interception, self._trained, received or {}, log)
        host = self.graph.host_random
        with rng.preserved(host), self._attributes.preserved(), self.interception.running(run):
            rng.seed_all(seed, host)
            run._finish(run.walk(call))
        return run


class StageRun(StubbedRun):
    """One microbatch on one stage, between its forward and its backward pass.

    Attributes:
        loss: The loss, on the last stage.
        weight: How much it weighs, on the last stage of a step that says so.
        result: All that the step returned, on the last stage.
        outputs: Tensors for the stage after it, including those passed through, attached to autograd.
    """

    def __init__(
        self,
        plan: RunPlan,
        interception: Interception,
        trained: Sequence[nn.Parameter],
        received: Mapping[TensorKey, Tensor],
        log: Log | None,
    ) -> None:
        super().__init__(plan)
        self.loss: Tensor | None = None
        self.weight: Tensor | float | None = None
        self.result: Any = None
        self._interception, self._log = interception, log
        self._trained, self._received = trained, received
        self._leaves: dict[TensorKey, Tensor] = {}
        self._later: WeightGradients | None = None

    def log(self, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Passes logged values on where all that the loss reads is real."""
        if not self._plan.cut.is_last or not self._plan.cut.sees_all:
            return None
        if self._log is None:
            return original(*args, **kwargs)
        return self._log(method, args, kwargs)

    def received(self, layer: Layer, leaf: int) -> Tensor:
        """Returns a received tensor as a leaf of this stage's autograd graph."""
        key, spec = (layer.index, leaf), layer.outputs[leaf]
        value = self._received.get(key)
        if value is None:
            raise GraphError(
                f"stage {self._plan.cut.index} did not receive output {leaf} of {layer.name}"
            )
        if spec.mismatch(value):
            raise GraphError(f"received for output {leaf} of {layer.name}: {spec.mismatch(value)}")
        tensor = with_layout(value.detach(), spec)
        tensor.requires_grad_(spec.requires_grad and not layer.frozen)
        self._leaves[key] = tensor
        return tensor.clone() if leaf in layer.mutated else tensor

    def _finish(self, result: Any) -> None:
        cut = self._plan.cut
        if cut.is_last:
            self.result, self.loss, self.weight = result, loss_of(result), weight_of(result)
            if (self.weight is not None) != self._plan.graph.weighted:
                raise GraphError(
                    'the step returns a "weight" beside its loss for some batches only; return it always'
                )
        for key in cut.sent:
            if key not in self.outputs:
                self.outputs[key] = self._received[key].detach()
        self._received = {}

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
            with self._recomputing(), in_own_memory(self._trained, passing):
                torch.autograd.backward(roots, flows)
        return self._input_gradients(grads)

    def backward_input(
        self,
        grad_outputs: Mapping[TensorKey, Tensor] | None = None,
        loss_scale: float | Tensor = 1.0,
    ) -> dict[TensorKey, Tensor]:
        """Runs the half of `backward` that the stage before waits for; `backward_weight` must follow.

        Takes and returns what `backward` does. Where the graph cannot be split (activation
        checkpointing, which would recompute for every question, and hooks on gradients, which both halves would
        run) all of it runs here.
        """
        grads = grad_outputs or {}
        roots, flows = self._roots(grads, loss_scale)
        leaves = [leaf for leaf in self._leaves.values() if leaf.requires_grad]
        hooked = self._plan.graph.changes_gradients or any(p._backward_hooks for p in self._trained)
        if self.checkpointed or hooked:
            return self.backward(grad_outputs, loss_scale)
        if roots:
            try:
                with rng.preserved(self._plan.graph.host_random):
                    found, self._later = input_gradients(roots, flows, leaves)
            except NestedExits:
                return self.backward(grad_outputs, loss_scale)
            for leaf, gradient in zip(leaves, found, strict=True):
                leaf.grad = gradient
        return self._input_gradients(grads)

    def backward_weight(self) -> None:
        """Runs the other half of `backward`: gradients of this stage's parameters, into their `.grad`."""
        if self._later is not None:
            self._later.run()
        self._later = None

    def _roots(
        self, grads: Mapping[TensorKey, Tensor], loss_scale: float | Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the tensors at which the backward starts, and their gradients."""
        keys = [
            k for k in self._plan.cut.sent_gradients if k in grads and self.outputs[k].requires_grad
        ]
        roots, flows = [self.outputs[key] for key in keys], [grads[key] for key in keys]
        if self.loss is not None and self.loss.requires_grad:
            roots.append(self.loss)
            flow = torch.ones_like(self.loss) * loss_scale
            flows.append(flow if self.weight is None else flow.mul_(self.weight))
        return roots, flows

    @contextlib.contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Counts calls of layers inside as recomputation."""
        self._inside = True
        with (
            rng.preserved(self._plan.graph.host_random),
            self._interception.running(self),
            self._interception.recomputed_by(self),
        ):
            yield

    def _input_gradients(self, grads: Mapping[TensorKey, Tensor]) -> dict[TensorKey, Tensor]:
        result = {key: self._gradient(key, grads) for key in self._plan.cut.received_gradients}
        self.outputs.clear()
        self._leaves.clear()
        self.loss = None if self.loss is None else self.loss.detach()
        return result

    def _gradient(self, key: TensorKey, grads: Mapping[TensorKey, Tensor]) -> Tensor:
        leaf, passed = self._leaves.get(key), grads.get(key)
        own = leaf.grad if leaf is not None else None
        if own is not None and passed is not None:
            return own + passed
        if own is not None or passed is not None:
            return own if own is not None else passed
        return self._plan.graph.spec(key).empty(leaf.device if leaf is not None else None).zero_()
