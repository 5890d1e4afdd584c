"""The module calls that become layers: the frontier of the tree of calls, by cost.

One run of the step records the tree of module calls and what each costs. From the top, a call dearer than
`max_share` of the whole is replaced by the calls inside it, until no layer dominates:

    unet ── conv_in                    conv_in
         ├─ down_blocks.0 ─ resnets.0  down_blocks.0.resnets.0      (dear container: expanded)
         │                └ resnets.1  down_blocks.0.resnets.1
         ├─ mid_block                  mid_block                    (cheap enough: one layer)
         └─ ...

A module expanded in one of its calls is expanded in all of them, so that names are enough to tell what is a layer.
Calls without parameters are glue, unless they are dear. Modules that differentiate what they call (`side_effects`)
are not expanded, nor are those that call layers on as many rows as values say, as a mixture of experts does, or
change buffers themselves: batches differ in these sizes, and stages would keep a copy of the buffers each.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lightning_diffpipe.errors import ConfigurationError, GraphError
from lightning_diffpipe.graph.fakes import DEVICE_OF
from lightning_diffpipe.graph.layer import storage_key
from lightning_diffpipe.graph.repeats import Call, Repeats
from lightning_diffpipe.graph.side_effects import (
    is_of,
    is_users,
    num_transforms_around,
    stays_whole,
    transform_around,
)

_log = logging.getLogger(__name__)

ATOMIC_TYPES = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.RNNBase)
"""Their fast paths read parameters of their children without calling them."""

Forward = Callable[..., Any]

_INDEXING = ("index", "_unsafe_index")
_MASKS = (torch.bool, torch.uint8)
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns all tensors among the leaves of a tree."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) in (list, tuple, dict):  # pytree takes five times as long
        parts = tree.values() if isinstance(tree, dict) else tree
        return [tensor for part in parts for tensor in tensors_in(part)]
    if type(tree) not in pytree.SUPPORTED_NODES and not isinstance(tree, tuple):
        return []
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def operator_cost(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Returns FLOPs of matrix products, the number of elements written by all other operators; deterministic."""
    if func.is_view:
        return 0
    flops = flop_registry.get(func.overloadpacket)
    if flops is not None:
        return int(flops(*args, **kwargs, out_val=out))
    return sum(t.numel() for t in tensors_in(out))


def is_selection(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether values decide how large the result of an operator is: `nonzero()`, `x[mask]`."""
    if func.overloadpacket.__name__ in _INDEXING:
        return any(index.dtype in _MASKS for index in tensors_in((args[1:], kwargs)))
    return torch.Tag.dynamic_output_shape in func.tags


def reads_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether an operator makes values known to Python: `.item()`, `if tensor:`, and selections."""
    return is_selection(func, args, kwargs) or torch.Tag.data_dependent_output in func.tags


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the arguments that an operator changes."""
    arguments = func._schema.arguments
    values = {a.name: kwargs.get(a.name, v) for a, v in zip_longest(arguments, args)}
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if values.get("training"):
        names += [name for name in ("running_mean", "running_var") if name in values]
    return tensors_in([values[name] for name in names])


def put_back(module: nn.Module, attribute: str, value: Any) -> None:
    """Restores an attribute of an instance; one that was None is of the class again."""
    if value is None:
        module.__dict__.pop(attribute, None)
    else:
        module.__dict__[attribute] = value


@contextlib.contextmanager
def attributes_replaced(values: Iterable[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Gives instances other attributes inside: the module, the name and the value of each."""
    saved: list[tuple[nn.Module, str, Any]] = []
    try:
        for module, attribute, value in values:
            saved.append((module, attribute, module.__dict__.get(attribute)))
            module.__dict__[attribute] = value
        yield
    finally:
        for before in reversed(saved):
            put_back(*before)


def forward_replaced(
    root: nn.Module, names: Collection[str], make: Callable[[str, Forward], Forward]
) -> AbstractContextManager[None]:
    """Wraps `forward` of some instances for the time of a probe; wrappers of an `Interception` are bypassed."""
    replaced = set(names)

    def wrappers() -> Iterator[tuple[nn.Module, str, Any]]:
        for name, module in root.named_modules():
            if module.__dict__.get("_compiled_call_impl") is not None:
                yield module, "_compiled_call_impl", None  # compilers must not trace wrappers
            original = getattr(module.__dict__.get("forward"), "diffpipe_original", None)
            if name in replaced:
                original = original or module.forward
                wrapper = functools.update_wrapper(make(name, original), original)
                yield module, "forward", wrapper
            elif original is not None:
                yield module, "forward", original

    return attributes_replaced(wrappers())


def _refuse_collective(func: Any) -> None:
    """Raises ConfigurationError if a step calls other ranks, which run other stages of it."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    frames = traceback.extract_stack()
    # The strategy is not the user's either, which Lightning asks to gather.
    users = lambda path: is_users(path) and not is_of(path, "lightning_diffpipe")
    last = max((i for i, frame in enumerate(frames) if users(frame.filename)), default=0)
    called = (frame.name for frame in frames[last + 1 :] if frame.name != "wrapper")
    name = next(called, func._opname.strip("_"))
    where = f"{frames[last].filename}:{frames[last].lineno} ({frames[last].line})"
    raise ConfigurationError(
        f"training_step calls {name}, which waits for all ranks, in {where}. In a pipeline ranks run other layers "
        "of the step, once for each microbatch, so they would wait for ever. Return the loss of the batch that the "
        "step is given, and log with self.log, which gives all ranks of a pipeline the same value; with "
        "sync_dist=True it is the mean over pipelines, too. What needs other ranks' values belongs into "
        "on_train_batch_end"
    )


class OwnFunctions:
    """Tells whether code runs inside an `autograd.Function` that has a gradient to give.

    Checkpointing of a model's own (CompVis' U-Nets have one) calls layers there without gradients, and once more
    in the backward, all of them: what is called inside cannot be spread over stages.

    Attributes:
        depth: Number of functions the code is inside of.
    """

    def __init__(self) -> None:
        self.depth = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts functions that are applied inside."""
        kind: Any = torch.autograd.Function
        original = kind.__dict__["apply"]

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            counts = torch.is_grad_enabled()
            self.depth += counts
            try:
                return original.__get__(None, function)(*args, **kwargs)
            finally:
                self.depth -= counts

        kind.apply = classmethod(apply)
        try:
            yield
        finally:
            kind.apply = original


@dataclass
class CallNode:
    """One module call with the calls inside it.

    Attributes:
        depth: Autograd functions of the model's own around it.
        is_whole: Such a function calls modules inside it, so that it cannot be expanded.
        num_transforms: Function transforms (`torch.func.jvp`) around it.
        takes: The name of what differentiates modules inside it, so that it stays one layer if it can.
        keeps_together: Other work of its own code, so that it stays one layer unless it is half of the model.
        found: Observed dimensions of its arguments and output; None if it raised an error.
    """

    name: str
    cost: int = 0
    children: list[CallNode] = field(default_factory=list)
    depth: int = 0
    is_whole: bool = False
    num_transforms: int = 0
    takes: str | None = None
    keeps_together: str | None = None
    found: Any = None


class CallTree(TorchDispatchMode):
    """Records the tree of module calls and their costs.

    Args:
        record_of: Returns the record of a call, from its arguments and output.

    Attributes:
        names: The modules that were called, in order.
    """

    def __init__(
        self,
        root: nn.Module,
        record_of: Callable[[Any, Any], Any] | None = None,
        repeats: Repeats | None = None,
    ) -> None:
        super().__init__()
        self._repeats = repeats
        self.stack, self.names, self._record_of = [CallNode("")], list[str](), record_of
        self.functions = OwnFunctions()
        self._root = root
        self._buffers = {storage_key(buffer): name for name, buffer in root.named_buffers()}
        self._sized_by_values: dict[int, StorageWeakRef] = {}

    @property
    def top(self) -> CallNode:
        """The step itself."""
        return self.stack[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF:
            return args[0].device
        if func.namespace in _COLLECTIVES:
            _refuse_collective(func)
        out = func(*args, **(kwargs or {}))
        cost = operator_cost(func, args, kwargs or {}, out)
        for node in self.stack:
            node.cost += cost
        self._note_sizes(func, args, kwargs or {}, out)
        if func._schema.is_mutable:
            changed = [storage_key(tensor) for tensor in written_tensors(func, args, kwargs or {})]
            for name in (self._buffers[key] for key in changed if key in self._buffers):
                self.stack[-1].keeps_together = f"changes the buffer {name!r}"
        return out

    def _note_sizes(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Notes results that have as many rows as values say: `x[mask]`, and what is computed of it row by row."""
        selects = is_selection(func, args, kwargs)
        if not (selects or self._sized_by_values):
            return
        inputs = tensors_in((args, kwargs))
        sized = [tensor for tensor in inputs if storage_key(tensor) in self._sized_by_values]
        if not (selects or sized):
            return
        fixed = {tensor.shape for tensor in inputs} - {tensor.shape for tensor in sized}
        for tensor in tensors_in(out):
            if tensor.dim() and (selects or tensor.shape not in fixed):
                storage = StorageWeakRef(tensor.untyped_storage())
                self._sized_by_values[storage_key(tensor)] = storage

    def wrap(self, name: str, forward: Forward) -> Forward:
        """Makes the wrapper of one module."""
        module = self._root.get_submodule(name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            node, caller = CallNode(name, depth=self.functions.depth), self.stack[-1]
            caller.children.append(node)
            self.names.append(name)
            caller.is_whole |= node.depth > caller.depth
            node.num_transforms = num_transforms_around()
            if node.num_transforms > caller.num_transforms:
                caller.takes = transform_around()
            call = None
            if self._sized_by_values:
                inputs = tensors_in((args, kwargs))
                if any(storage_key(tensor) in self._sized_by_values for tensor in inputs):
                    caller.keeps_together = "calls layers on as many rows as values say"
            elif self._repeats is not None:
                call = self._repeats.call(name, args, kwargs, node.depth)
            if call is not None and call.known is not None:
                return self._repeated(call, node)
            num_names = len(self.names)
            buffers_before = dict(module._buffers)
            self.stack.append(node)
            try:
                out = forward(*args, **kwargs)
                node.found = self._record_of and self._record_of((args, kwargs), out)
                if call is not None:
                    inside = call.inside(self.names[num_names:])
                    stands_for_equal = inside is not None and not self._sized_by_values
                    notes = (_renamed(node, name, ""), inside) if stands_for_equal else None
                    call.keep(out, notes)
                return out
            finally:
                self.stack.pop()
                for buffer, value in module._buffers.items():
                    if value is not buffers_before.get(buffer):
                        node.keeps_together = f"changes the buffer {buffer!r}"

        return recorded

    def _repeated(self, call: Call, node: CallNode) -> Any:
        seen, inside = call.known.notes
        vars(node).update(vars(_renamed(seen, "", call.name)))
        self.names += (call.name + name for name in inside)
        for around in self.stack:
            around.cost += node.cost
        return call.result()[0]

    def note_gradients(self, function: str) -> None:
        """Notes that the module that runs calls a function that takes gradients."""
        self.stack[-1].takes = function


def _renamed(node: CallNode, old: str, new: str) -> CallNode:
    children = [_renamed(child, old, new) for child in node.children]
    return replace(node, name=new + node.name[len(old) :], children=children)


def callable_modules(root: nn.Module) -> list[str]:
    """Returns names of all modules whose calls may be seen: not the root, nothing inside an atomic module."""
    names: list[str] = []
    closed: list[str] = []
    for name, module in root.named_modules():
        if not name or any(name.startswith(prefix) for prefix in closed):
            continue
        names.append(name)
        if is_compiled(module) or isinstance(module, ATOMIC_TYPES):
            closed.append(name + ".")
    return names


def has_backward_hooks(module: nn.Module) -> bool:
    """Returns whether something waits for the gradients of a module's inputs or outputs."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_global_backward_hooks() -> bool:
    """Returns whether something waits for the gradients of inputs or outputs of all modules that there are."""
    hooks = nn.modules.module
    return bool(hooks._global_backward_hooks or hooks._global_backward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Returns whether calls inside the module cannot be seen because it is compiled."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def choose_layers(
    root: nn.Module, top: CallNode, max_share: float, expand: Collection[str]
) -> tuple[set[str], set[str]]:
    """Cuts the recorded tree of calls where no call is dearer than `max_share` of the whole.

    Modules of `expand` must be expanded, whatever they cost. Returns names of the modules whose calls are layers,
    and names of those that are expanded.

    Raises:
        GraphError: A module must be expanded, but calls others inside an autograd function.
    """
    whole = _whole(root, top, max_share * top.cost, expand)
    if torn := whole & {"", *expand}:
        raise GraphError(inside_function(min(torn) or "the step"))
    owns = {n for n, m in root.named_modules() if any(True for _ in m.parameters())}
    limit, expanded = max_share * top.cost, set(expand)

    def has_layers(node: CallNode) -> bool:
        return any(c.name in owns or has_layers(c) for c in node.children)

    def walk(node: CallNode, layers: set[str]) -> None:
        for child in node.children:
            dear, inside = child.cost > limit, has_layers(child)
            if child.name in expanded or (dear and inside and child.name not in whole):
                expanded.add(child.name)
                walk(child, layers)
            elif dear or child.name in owns or (inside and child.name in whole):
                layers.add(child.name)

    while True:
        before, layers = set(expanded), set[str]()
        walk(top, layers)
        if expanded == before and not expanded & layers:
            return layers, expanded


def _whole(root: nn.Module, top: CallNode, limit: float, expand: Collection[str]) -> set[str]:
    """Returns modules that cannot be expanded; warns of those that cost more than `limit`, FLOPs.

    Those that differentiate what they call may have to be: then the trace says where they do.
    """

    def num_trained(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if p.requires_grad)

    def is_half(node: CallNode) -> bool:
        trains_half = 2 * num_trained(root.get_submodule(node.name)) >= max(num_trained(root), 1)
        return 2 * node.cost >= top.cost or trains_half

    whole: set[str] = set()
    reasons: dict[str, str] = {}
    stack = [top]
    while stack:
        node = stack.pop()
        stack += node.children
        if node.is_whole:
            reason = inside_function(node.name)
        elif not node.children or node.name in {"", *expand}:
            continue
        elif node.takes:
            reason = stays_whole(node.name, f"uses {node.takes} on layers that it calls")
        elif node.keeps_together and not is_half(node):
            reason = stays_whole(node.name, node.keeps_together)
        else:
            continue
        whole.add(node.name)
        if node.name and node.cost > limit:
            reasons[node.name] = reason
    if reasons:
        _log.warning("%d modules stay whole, e.g.: %s", len(reasons), reasons[min(reasons)])
    return whole


def inside_function(name: str) -> str:
    """Says that a module cannot be cut, and what to do."""
    return (
        f"{name} calls layers inside an autograd.Function of its own, as CompVis' checkpointing does; "
        "they cannot be cut into stages there. Use torch.utils.checkpoint.checkpoint(function, *inputs, "
        "use_reentrant=False) instead"
    )


def uncalled_owners(root: nn.Module, seen: Collection[str], layers: Collection[str]) -> set[str]:
    """Returns modules with parameters that were neither called nor are inside a layer."""
    inside = tuple(name + "." for name in layers)
    return {
        name
        for name, module in root.named_modules()
        if name
        and name not in seen
        and not name.startswith(inside)
        and any(True for _ in module.parameters())
        and type(module).forward is not torch.nn.modules.module._forward_unimplemented
    }
