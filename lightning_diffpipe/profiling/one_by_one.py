"""Timing layer by layer, for a module that is too large for the device.

The step runs where the module is, usually on the host, and pauses at every layer: the layer and its arguments
go to the device, are timed there alone, and come back. So the device holds one layer at a time, and
nothing is kept for a backward pass of the whole. Glue is left out: it runs on the host here, and takes next to
nothing on a GPU. Layers timed alone find their data in caches more often than they will in training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from lightning_diffpipe.clock import Clock
from lightning_diffpipe.graph.calltree import tensors_in
from lightning_diffpipe.graph.interception import Interception, Site
from lightning_diffpipe.graph.layer import LayerGraph
from lightning_diffpipe.profiling.state import placed, tree_to
from lightning_diffpipe.profiling.step_run import SavedBytes, StepRun
from lightning_diffpipe.profiling.step_times import StepTimes


class OneByOneRun(StepRun):
    """Answers the calls of one step, and times every layer `repeats` times on the way.

    Args:
        graph: The layers, unfolded.
        clock: The device's.
        device: Where layers are timed.
        repeats: Timed runs of each layer, after one that does not count.
    """

    def __init__(self, graph: LayerGraph, clock: Clock, device: torch.device, repeats: int) -> None:
        super().__init__(graph, clock)
        self.num_saved_bytes = [0] * len(graph.layers)
        self._device, self._repeats = device, repeats
        self._forward: list[list[float]] = []
        self._whole: list[list[float]] = []
        self._inputs: list[list[float]] = []

    def walk(
        self, call: Callable[[], Any], interception: Interception
    ) -> tuple[list[StepTimes], list[StepTimes]]:
        """Runs the step once.

        Returns:
            Steps with whole backward, and steps with that of inputs only, as many as `repeats`.

        Raises:
            GraphError: The step did not call the layers of the graph.
        """
        with self._answering(interception):
            call()
        self._check()
        return self._steps(self._whole), self._steps(self._inputs)

    def _await_gradients(self, index: int, out: Any) -> None:
        """The backward was timed already."""

    def _steps(self, backward: list[list[float]]) -> list[StepTimes]:
        nothing = (0.0,) * len(self._names)
        return [
            StepTimes(
                nothing, tuple(f[i] for f in self._forward), 0.0, tuple(b[i] for b in backward), 0.0
            )
            for i in range(self._repeats)
        ]

    def _run_layer(self, site: Site, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        home = tensors[0].device if tensors else torch.device("cpu")
        forward, whole, inputs = [], [], []
        with placed(site.module, self._device):
            arguments = tree_to((args, kwargs), self._device)
            parameters = [p for p in site.module.parameters() if p.requires_grad]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            known = [*site.module.parameters(), *site.module.buffers()]
            with SavedBytes(self, known, len(self._graph.layers)) as saved:
                out = self._seeded(site, *_written(_leaves(arguments)))
                self.num_saved_bytes[self.position] += sum(saved.num_bytes)
            for turn in range(self._repeats + 1):
                timed = (
                    self._timed(site, arguments, "whole"),
                    self._timed(site, arguments, "inputs"),
                )
                if turn:
                    forward.append(timed[0][0])
                    whole.append(timed[0][1])
                    inputs.append(timed[1][1])
            for parameter in parameters:
                parameter.grad = None
        self._forward.append(forward)
        self._whole.append(whole)
        self._inputs.append(inputs)
        return pytree.tree_map_only(Tensor, lambda t: _cut_off(t, home), out)

    def _timed(self, site: Site, arguments: Any, backward: str) -> tuple[float, float]:
        """Seconds of one forward and one backward."""
        clock = self._clock
        own = _leaves(arguments)
        leaves = [t for t in pytree.tree_leaves(own) if _wants_gradient(t)]
        args, kwargs = _written(own)
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


def _cut_off(tensor: Tensor, home: torch.device) -> Tensor:
    """Returns an output without its past, at home; not a leaf, so that glue may write into it."""
    leaf = tensor.detach().to(home).requires_grad_(tensor.requires_grad)
    return leaf.clone() if tensor.requires_grad else leaf
