"""The backward of a stage: in one piece or in two halves, with gradients in memory of their own.

The stage before waits for the gradients of this stage's inputs only; zero-bubble schedules move the second half,
the gradients of weights, into places where a rank would idle. Autograd computes only what is asked for, so the two
halves are two kinds of questions to the same graph:

    root ── u1 ──── u2 ──── u3 ── input          u: nodes on a way to some input
            │       │       │
            w1      w2      w3 (weights)         hanging off them: ways to weights only

    first half    gradients of the inputs; what flows into each u is recorded on the way
    second half   for each u, from what was recorded, the gradients of the weights that hang off it

A weight that hangs off several u (tied weights) is asked for where its way leaves the u's: that gradient is kept
from the first half, and continued later. Weights of a group norm are asked for in the first half, as torch's
kernel for channels-last tensors on CPUs ends the process where those alone are asked for; so are those of compiled
blocks and of an `autograd.Function`, whose backward would run twice.

Autograd gives a parameter its first gradient without a copy and adds later ones in place, though it may be a view
of memory that somebody else holds: of `rows[None] + columns[None]` both first gradients are views of one tensor; of
`x.view(1, h, w, d) + positions` the gradient of x may still be on its way to the stage before.

Source:
    Zero Bubble Pipeline Parallelism, Qi et al. (2023), https://arxiv.org/abs/2401.10241
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge


@contextlib.contextmanager
def in_own_memory(
    parameters: Iterable[Tensor], others: Callable[[], Sequence[Tensor | None]]
) -> Iterator[None]:
    """Runs a backward inside; then copies first gradients of parameters that share memory, also with `others`."""
    first = [parameter for parameter in parameters if parameter.grad is None]
    yield
    # Those in one piece of memory. There are a thousand, so that nothing of Python's is called for each.
    have = [p for p in first if (g := p.grad) is not None and g.layout is torch.strided]
    theirs = [t for t in others() if t is not None and t.layout is torch.strided] if have else []
    memory = map(Tensor.untyped_storage, [*theirs, *map(_GRAD, have)])
    addresses = list(map(torch.UntypedStorage.data_ptr, memory))
    if len(set(addresses)) == len(addresses):
        return
    seen = set(addresses[: len(theirs)])
    for parameter, address in zip(have, addresses[len(theirs) :], strict=True):
        if address in seen:
            parameter.grad = parameter.grad.clone()
        seen.add(address)


_GRAD = attrgetter("grad")


Node = Any  # torch.autograd.graph.Node, without stubs for what is used here


@dataclass
class WeightGradients:
    """The second half, waiting to be run.

    Attributes:
        calls: For each question to autograd: edges to start from, what flows in, the weights asked for.
    """

    calls: list[tuple[list[Any], list[Tensor], list[Tensor]]] = field(default_factory=list)

    def run(self) -> None:
        """Adds the gradients of the weights to their `.grad` and frees the graph."""
        while self.calls:
            edges, flows, weights = self.calls.pop(0)
            # What was recorded may have left as a message already: gradients of inputs, untouched on their way.
            with in_own_memory(weights, lambda flows=flows: flows):
                torch.autograd.backward(edges, flows, retain_graph=bool(self.calls), inputs=weights)


def input_gradients(
    roots: Sequence[Tensor], flows: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightGradients]:
    """Runs the first half, from roots and their gradients `flows`.

    Returns:
        Gradients of leaves, `inputs`, `None` for those that roots do not depend on; and the second half.
    """
    graph = _Graph(roots, inputs)
    if not graph.towards_inputs:
        joint = [(list(roots), list(flows), graph.weights_below([r.grad_fn for r in roots]))]
        return [None] * len(inputs), WeightGradients([call for call in joint if call[2]])
    weights_of, shared = graph.exits()
    # The backwards of these nodes compute all gradients at once, so their weights get theirs in this half.
    norm = "NativeGroupNormBackward0"
    undivided = [n for n in weights_of if isinstance(n, BackwardCFunction) or n.name() == norm]
    early_weights = [weight for node in undivided for weight in weights_of.pop(node)]
    # Gradients that flow into each of the other nodes.
    recorded: dict[Node, tuple[Tensor | None, ...]] = {}
    handles = [node.register_prehook(partial(recorded.__setitem__, node)) for node in weights_of]
    edges = [GradientEdge(node, number) for node, number in shared]
    pairs = list(zip(roots, flows, strict=True))
    to_inputs = [(r, f) for r, f in pairs if r.grad_fn in graph.towards_inputs]
    to_weights_only = [(r, f) for r, f in pairs if r.grad_fn not in graph.towards_inputs]
    heads, flows_in = [r for r, _ in to_inputs], [f for _, f in to_inputs]
    targets = [*inputs, *edges, *early_weights]
    try:
        grads = torch.autograd.grad(heads, targets, flows_in, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    rest = iter(grads)  # in the order of `targets`
    of_inputs, of_edges = list(islice(rest, len(inputs))), list(islice(rest, len(edges)))
    second_half = WeightGradients()
    early = [(w, flow) for w, flow in zip(early_weights, rest, strict=True) if flow is not None]
    if early:  # known already; the second half adds them to `.grad` with all others
        weights = [weight for weight, _ in early]
        second_half.calls.append((weights, [flow for _, flow in early], weights))
    for node, weights in weights_of.items():
        arrived = [(i, flow) for i, flow in enumerate(recorded.get(node, ())) if flow is not None]
        if arrived:
            outputs = [GradientEdge(node, i) for i, _ in arrived]
            second_half.calls.append((outputs, [flow for _, flow in arrived], weights))
    # Weights that several nodes share: from the edges kept for them, and from roots that lead to no input.
    remaining = list(zip(edges, of_edges, strict=True)) + to_weights_only
    remaining = [(edge, flow) for edge, flow in remaining if flow is not None]
    nodes = [edge.node if isinstance(edge, GradientEdge) else edge.grad_fn for edge, _ in remaining]
    if weights := graph.weights_below(nodes):
        second_half.calls.append(([e for e, _ in remaining], [f for _, f in remaining], weights))
    return of_inputs, second_half


class _Graph:
    """The autograd graph below some roots; from nodes in `towards_inputs` some input can be reached."""

    def __init__(self, roots: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        targets = {get_gradient_edge(leaf).node for leaf in inputs}
        self._order = nodes_below([root.grad_fn for root in roots])
        self.towards_inputs: set[Node] = set()
        self._weights: dict[Node, frozenset[Tensor]] = {}
        for node in self._order:  # children first
            children = [child for child, _ in node.next_functions if child is not None]
            if node in targets or any(child in self.towards_inputs for child in children):
                self.towards_inputs.add(node)
            elif hasattr(node, "variable"):
                self._weights[node] = frozenset([node.variable])
            else:
                below = (self._weights.get(child, frozenset()) for child in children)
                self._weights[node] = frozenset().union(*below)

    def weights_below(self, nodes: Iterable[Node]) -> list[Tensor]:
        below: dict[Tensor, None] = {}
        reached = frozenset().union(*(self._weights.get(node, frozenset()) for node in nodes))
        for node in self._order:
            if hasattr(node, "variable") and node.variable in reached:
                below[node.variable] = None
        return list(below)

    def exits(self) -> tuple[dict[Node, list[Tensor]], list[tuple[Node, int]]]:
        """Returns the nodes where paths to weights branch off the paths to inputs.

        Returns:
            Nodes with weights that hang off them alone; and, for all other weights, the edges (node, input number)
            below the exit. No exit of the second kind is below another.
        """
        leaving: dict[tuple[Node, int], set[Node]] = {}
        for node in self._order:
            if node in self.towards_inputs:
                for child, number in node.next_functions:
                    if child is not None and self._weights.get(child):
                        leaving.setdefault((child, number), set()).add(node)
        shared = self._shared(leaving)
        separate: dict[Node, list[Tensor]] = {}
        for (child, number), nodes in leaving.items():
            if (child, number) not in shared:
                (node,) = nodes
                have = separate.setdefault(node, [])
                have += [w for w in self.weights_below([child]) if not any(w is h for h in have)]
        heads = {child for child, _ in shared}
        below = nodes_below(c for head in heads for c, _ in head.next_functions)
        if not heads.isdisjoint(below):  # their gradients would be counted twice
            raise NestedExits
        return separate, [
            exit_
            for node in self._order
            for exit_ in leaving
            if exit_ in shared and exit_[0] is node
        ]

    def _shared(self, leaving: dict[tuple[Node, int], set[Node]]) -> set[tuple[Node, int]]:
        """Returns exits from which some weight can be reached that hangs off another node, too."""
        owners: dict[Tensor, set[Node]] = {}
        for (child, _), nodes in leaving.items():
            for weight in self._weights[child]:
                owners.setdefault(weight, set()).update(nodes)
        contested = {weight for weight, nodes in owners.items() if len(nodes) > 1}
        shared: set[tuple[Node, int]] = set()
        while True:  # an exit that shares a weight with a shared exit is shared, too
            more = {exit_ for exit_ in leaving if self._weights[exit_[0]] & contested} - shared
            if not more:
                return shared
            shared |= more
            contested |= frozenset().union(*(self._weights[child] for child, _ in more))


class NestedExits(Exception):
    """The graph cannot be split this way; run the backward as one piece."""


def nodes_below(roots: Iterable[Node]) -> list[Node]:
    """Returns all nodes of the autograd graph from some roots on, each after everything below it."""
    order: list[Node] = []
    seen: set[Node] = set()
    for root in roots:
        stack = [(root, False)] if root is not None else []
        while stack:
            node, expanded = stack.pop()
            if expanded:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order
