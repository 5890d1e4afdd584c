"""Following values through a model without knowing it: they are marked with NaN.

NaN survives every arithmetic operation, so what is NaN after a function has been reached by what was NaN before
it. To read a whole map from indices to indices in few runs, each index gets a code word and run `b`
marks the indices whose word has bit `b`. All words have the same number of ones, so that a place reached by two
indices shows too many marks and can never be mistaken for a third:

    index       0     1     2     3     4     5
    code word  1100  1010  1001  0110  0101  0011        8 runs read a map of 70 indices

Booleans cannot be NaN; they are flipped and compared with an unmarked run.

Nearly all time of a run goes into the products of linear layers, whose numbers nobody looks at: one NaN in a row
makes the whole row NaN, whatever the weights are. `WithoutProducts` therefore multiplies nothing.

And of equal blocks one runs. Where NaN goes is decided by how a block computes and by where NaN is in what it is
given, not by its weights. Marks are followed some tens of times through the blocks of a model, of which Flux has
57, of two kinds. So of the calls of one run those are answered like an earlier one that are of a block of the same
kind (structure and settings) on arguments of the same shapes with NaN at the same places (`RepeatedCalls`).

    block      0       1       2       3        all of one kind
    marks      a       b       b       b        of their arguments
    runs       yes     yes     as 1    as 1
"""

import contextlib
import hashlib
import itertools
import math
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from itertools import combinations, islice
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
import torch.nn.modules.module as hooks
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.errors import LayoutError
from lightning_diffpipe.graph.calltree import Forward, forward_replaced, tensors_in
from lightning_diffpipe.graph.placement import is_placeholder
from lightning_diffpipe.graph.repeats import UnlikeError, described
from lightning_diffpipe.graph.versions import OF_EVERY_MODULE, bytes_of, plain_tensors
from lightning_diffpipe.sampling.tracing.attention import (
    Attend,
    AttentionHandler,
    AttentionIntercepted,
)

UNREACHED, MIXED = -1, -2
_GROWTH = 1.001
# They pick what they return, so that its share of NaN says nothing.
_PICKING = ("index", "gather", "select", "slice", "embedding", "split", "where", "masked_fill")
_CASTS = {"long", "int", "short", "char", "byte", "to", "type", "type_as", "copy_"}
_SEARCHES = {"bucketize", "searchsorted"}
_LINEAR = {"linear": 0, "mm": 0, "addmm": 1}  # position of the tokens among their arguments
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_DESCRIBED_OTHERWISE = {*OF_EVERY_MODULE, "forward", "_compiled_call_impl"}

T = TypeVar("T")
Marks = list[tuple[Tensor, Tensor | None]]
"""Of each tensor that a call is given, where it is NaN, or else its numbers; and itself if it is to be the same."""

CallAnswer = Callable[[str, Forward, tuple[Any, ...], dict[str, Any]], Any]
"""`answer(name, forward, args, kwargs)` answers a call of a module."""


@contextlib.contextmanager
def calls_answered(model: nn.Module, names: Collection[str], answer: CallAnswer) -> Iterator[None]:
    """Answers calls of these modules meanwhile, but for those inside each other."""
    inside = False

    def make(name: str, forward: Forward) -> Forward:
        def answered(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return forward(*args, **kwargs)
            inside = True
            try:
                return answer(name, forward, args, kwargs)
            finally:
                inside = False

        return answered

    with forward_replaced(model, names, make):
        yield


@contextlib.contextmanager
def finite_placeholders(model: nn.Module) -> Iterator[None]:
    """Context in which placeholders, which are NaN, have a number, so small that wide layers do not overflow.

    Otherwise numbers grow from block to block, until the variance of a norm is infinite.
    """
    absent = [p for p in model.parameters() if is_placeholder(p) and p.is_floating_point()]
    scalars = [p.data.as_strided((), ()) for p in absent]
    for scalar, p in zip(scalars, absent, strict=True):
        scalar.fill_(min(0.01, len(p) / p.numel()) if p.ndim > 1 else 0.01)
    try:
        yield
    finally:
        for scalar in scalars:
            scalar.fill_(math.nan)


class WithoutProducts(TorchFunctionMode):
    """Runs linear layers without multiplying: NaN goes where it would go, all other numbers mean nothing.

    Weights that are NaN themselves, and types that are cast on the way, are left to torch. Whole numbers made of
    NaN are refused: they stand nowhere in a table, and a lookup would end the CUDA context.

    Args:
        exactly: Skip only what is NaN throughout, so that all numbers are those of torch; but features differ where
            the weights are a placeholder, one number for all, or a norm after would make anything the same.

    Example:
        >>> with WithoutProducts():
        ...     F.linear(torch.tensor([[1.0, 2.0], [3.0, math.nan]]), torch.ones(3, 2)).isnan().any(1)
        tensor([False,  True])
    """

    def __init__(self, exactly: bool = False) -> None:
        super().__init__()
        self._exactly = exactly
        self._finite: dict[int, bool] = {}  # parameters live as long as their model

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _CASTS | _SEARCHES and isinstance(out, Tensor):
            if out.is_floating_point() or out.is_complex() or out.dtype == torch.bool:
                return out
            if any(map(has_nan, (*args, *(kwargs or {}).values()))):
                raise LayoutError(
                    "whole numbers, such as an index into a codebook, are made of latents, a hidden state or a "
                    "timestep: what reads which tokens cannot be followed through them; sample with method=single"
                )
        return out

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        plain = input.is_floating_point() and input.dtype == weight.dtype and weight.ndim == 2
        if not plain or torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, bias)
        reached = input.amax(-1, keepdim=True).isnan()  # in one pass
        skips = bool(reached.all()) if self._exactly else self._is_finite(weight, bias)
        if not skips:
            out = F.linear(input, weight, bias)
            if any(weight.stride()):
                return out
            features = torch.linspace(1, 2, len(weight), dtype=out.dtype, device=out.device)
            return out * features + features.square()
        # All features differ, as they would, so that nothing is divided by a difference of zero.
        numbers = torch.linspace(0.01, 0.02, len(weight), dtype=input.dtype, device=input.device)
        return torch.where(reached, math.nan, numbers)

    def _is_finite(self, *parameters: Tensor | None) -> bool:
        for p in (p for p in parameters if p is not None):
            if id(p) not in self._finite or not isinstance(p, nn.Parameter):
                # A placeholder is one number for all.
                value = p.detach().as_strided((), ()) if not any(p.stride()) else p
                self._finite[id(p)] = all(bool(x.isfinite().all()) for x in plain_tensors(value))
            if not self._finite[id(p)]:
                return False
        return True


class CodeWords:
    """Code words of equal weight for `n` indices.

    Example:
        >>> words = CodeWords(6)
        >>> words.num_bits, words.weight
        (4, 2)
        >>> words.decode([torch.tensor([b, False]) for b in (True, False, True, False)]).tolist()
        [1, -1]
    """

    def __init__(self, n: int) -> None:
        self.num_bits = next(b for b in range(1, 64) if math.comb(b, b // 2) >= n)
        self.weight = max(self.num_bits // 2, 1)
        words = list(islice(combinations(range(self.num_bits), self.weight), n))
        self.marks = torch.zeros(self.num_bits, n, dtype=torch.bool)
        for index, bits in enumerate(words):
            self.marks[list(bits), index] = True
        self._index = {sum(1 << bit for bit in bits): index for index, bits in enumerate(words)}

    def decode(self, lines: Sequence[Tensor]) -> Tensor:
        """Returns for each place the index that reached it, `UNREACHED` or, if several did, `MIXED`."""
        words = sum(line.long() << bit for bit, line in enumerate(lines)).tolist()
        index_of = self._index | {0: UNREACHED}
        return torch.tensor([index_of.get(word, MIXED) for word in words], dtype=torch.long)


def lines(x: Tensor, axis: int, base: Tensor | None = None) -> Tensor:
    """Returns which indices of `axis` hold a NaN anywhere; for booleans, which differ from `base`."""
    if x.is_floating_point() and x.numel():
        others = [a for a in range(x.ndim) if a != axis % x.ndim]
        return (x.amax(others) if others else x).isnan().cpu()  # in one pass
    changed = x ^ base if x.dtype == torch.bool else x.isnan()
    return changed.movedim(axis, 0).flatten(1).any(1).cpu()


def marked(x: Tensor, axis: int, mask: Tensor) -> Tensor:
    """Copies a tensor, with NaN, or flipped booleans, at the marked indices of `axis`."""
    y = x.clone(memory_format=torch.contiguous_format)
    at = (*[slice(None)] * (axis % x.ndim), mask.to(x.device))
    if y.dtype == torch.bool:
        y[at] = ~y[at]
    else:
        y[at] = complex(math.nan, math.nan) if y.is_complex() else math.nan
    return y


def can_be_marked(x: Any) -> bool:
    """Returns whether NaN, or a flip, can be written into it."""
    return isinstance(x, Tensor) and (
        x.is_floating_point() or x.is_complex() or x.dtype == torch.bool
    )


def has_nan(x: Any) -> bool:
    """Returns whether a mark has reached it."""
    return isinstance(x, Tensor) and bool(x.isnan().any())


def token_local(log: list[tuple[Tensor, Tensor | None]], strict: bool = False) -> AttentionHandler:
    """Stand-in for attention: returns the query, so that a token reaches only itself.

    Args:
        log: Gets key and mask of every call.
        strict: NaN in a key or value also reaches the output of its position, so that tokens
            mixed on the way there are seen.
    """

    def handler(
        attend: Attend, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **options: Any
    ) -> Tensor:
        log.append((k, attn_mask))
        if strict and q.shape[-2] == k.shape[-2]:
            reached = (k.amax((1, -1), keepdim=True).isnan(), v.amax((1, -1), keepdim=True).isnan())
            q = q.clone().masked_fill_(reached[0] | reached[1], math.nan)
        return q

    return handler


def all_to_all(attend: Attend, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Stand-in for attention: one NaN in a key or value reaches every output."""
    reached = k.isnan().any() | v.isnan().any()
    # Ordered in memory as the query is, like results of attention, of which models take views.
    return q.clone().masked_fill_(reached, math.nan)


class MixingSearch(TorchDispatchMode):
    """Finds the first operator that spreads NaN."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.found: tuple[str, nn.Module | None] | None = None
        self._modules = modules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_")
        if self.found is None and not func.is_view and not name.startswith(_PICKING):
            before = max(map(_share, tensors_in((args, kwargs))), default=0.0)
            if name in _LINEAR:
                before = max(before, _share(args[_LINEAR[name]].sum(-1)))
            returned = max(map(_share, tensors_in(out)), default=0.0)
            if before > 0 and returned > _GROWTH * before:
                self.found = (name, self._modules[-1] if self._modules else None)
        return out


def _share(x: Tensor) -> float:
    floating = x.is_floating_point() or x.is_complex()
    return float(x.isnan().float().mean()) if floating and x.numel() else 0.0


def mixing_operator(
    model: nn.Module,
    denoise: Callable[[Tensor, Tensor], Tensor],
    latents: Tensor,
    axis: int,
    t: Tensor,
) -> str | None:
    """Returns the operator that mixes tokens outside attention, so that a model cannot run in parts.

    NaN is put into some rows. As long as operators are local to a token, the share of NaN in what they return is no
    larger than in what they are given. The first one that returns a larger share has mixed tokens. Linear layers
    mix features, so of what they are given a token counts as a whole. No weight may be NaN.

    Returns:
        Such as "convolution in blocks.0.ff.depthwise (Conv2d)"; None if no values go from token to token.
    """
    num_rows = latents.shape[axis]
    # A power of two, so that no token is cut.
    rows = torch.arange(num_rows) < 1 << (max(num_rows // 2, 1).bit_length() - 1)
    stack: list[nn.Module] = []
    watch = MixingSearch(stack)
    push = hooks.register_module_forward_pre_hook(lambda module, args: stack.append(module))
    pop = hooks.register_module_forward_hook(lambda module, args, out: (stack.pop(), None)[1])
    try:
        with torch.no_grad(), AttentionIntercepted(token_local([], strict=True)), watch:
            denoise(marked(latents, axis, rows), t)
    finally:
        push.remove()
        pop.remove()
    if watch.found is None:
        return None
    operator, module = watch.found
    names = {id(m): name for name, m in model.named_modules()}
    if module is None or not names.get(id(module)):
        return f"{operator} outside all submodules"
    return f"{operator} in {names[id(module)]} ({type(module).__name__})"


class BlockKinds:
    """Describes calls of a model's blocks, so that equal descriptions mean calls of one kind."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: dict[str, Hashable] = {}
        self._numbers = itertools.count()
        # Those of instances, before anything is wrapped around them.
        self._forwards: dict[nn.Module, Any] = {}
        for module in model.modules():
            forward = vars(module).get("forward")
            forward = getattr(forward, "diffpipe_original", forward)
            is_of_class = getattr(forward, "__func__", None) is type(module).forward
            if forward is not None and not is_of_class:
                self._forwards[module] = forward

    def of(self, name: str, args: Any, kwargs: Any) -> Hashable:
        """Returns the kind of a call, by its block's code and shapes; a new kind if these cannot be described."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        try:
            if name not in self._modules:
                self._modules[name] = self._described(name)
            leaves = [
                (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else described(x) for x in flat
            ]
        except UnlikeError:
            return next(self._numbers)
        return self._modules[name], str(spec), tuple(leaves)

    def _described(self, block: str) -> Hashable:
        """Describes a block by its modules, their tensors, settings and hooks, or raises UnlikeError."""
        parts = []
        for name, module in self._model.get_submodule(block).named_modules(prefix=block):
            attributes = vars(module)
            settings = [(k, x) for k, x in attributes.items() if k not in _DESCRIBED_OTHERWISE]
            settings += [(k, hook) for k in _HOOKS for hook in attributes[k].values()]
            settings.append(("forward", self._forwards.get(module)))
            tensors = (*module._parameters.items(), *module._buffers.items())
            of_tensors = [(k, x if x is None else _of_tensor(x)) for k, x in tensors]
            of_settings = [(k, described(x, name)) for k, x in settings]
            inner = name.removeprefix(block)
            parts.append((inner, type(module), tuple(of_tensors), tuple(of_settings)))
        return tuple(parts)


def _of_tensor(x: Tensor) -> Hashable:
    """Describes a tensor of a block: whole numbers, such as indices, decide where values go, and others do not."""
    kind = type(x), x.dtype, tuple(x.shape)
    if x.is_floating_point() or x.is_complex() or isinstance(x, nn.Parameter) or x.is_meta:
        return kind
    return kind, *(hashlib.sha256(bytes_of(each)).hexdigest() for each in plain_tensors(x))


class RepeatedCalls:
    """Answers repeated calls of the blocks in one run.

    Args:
        kinds: Kinds of blocks of the model.
        by_value: Numbers matter, too: what is no result of a block must be the same tensor.
    """

    def __init__(self, kinds: BlockKinds, by_value: bool = False) -> None:
        self._kinds, self._by_value = kinds, by_value
        self._known: dict[Hashable, list[tuple[Marks, int, Any]]] = {}
        self._results: dict[int, weakref.ref[Tensor]] = {}  # of blocks
        self.sources: list[int] = []
        """For each call the number of the one that ran in its place."""

    def answer(self, name: str, args: Any, kwargs: Any, run: Callable[[], T]) -> T:
        """Runs a call of a block; returns the result, or a copy of that of an equal call before it."""
        kind, flat = self._kinds.of(name, args, kwargs), pytree.tree_leaves((args, kwargs))
        marks, here = self._marks(flat), len(self.sources)
        for before, source, answer in self._known.get(kind, ()):
            if _equal(marks, before):
                self.sources.append(source)
                return self._recorded(_copied(answer))
        self.sources.append(here)
        answer = run()
        if _equal(marks, self._marks(flat)):  # else it has written into what it was given
            self._known.setdefault(kind, []).append((marks, here, _copied(answer)))
        return self._recorded(answer)

    def _recorded(self, answer: T) -> T:
        for x in pytree.tree_leaves(answer) if self._by_value else ():
            if isinstance(x, Tensor):
                self._results[id(x)] = weakref.ref(x)
        return answer

    def _marks(self, flat: Sequence[Any]) -> Marks:
        marks: Marks = []
        for x in flat:
            if isinstance(x, Tensor):
                by_value = self._by_value and self._results.get(id(x), lambda: None)() is not x
                is_number = x.is_floating_point() or x.is_complex()
                marks.append((x.isnan() if is_number else x.clone(), x if by_value else None))
        return marks


def _copied(answer: T) -> T:
    """Copies the tensors of an answer, into which others may write."""
    copied: T = pytree.tree_map_only(Tensor, torch.clone, answer)
    return copied


def _equal(marks: Marks, others: Marks) -> bool:
    pairs = zip(marks, others, strict=True)
    return all(torch.equal(a, b) and x is y for (a, x), (b, y) in pairs)
