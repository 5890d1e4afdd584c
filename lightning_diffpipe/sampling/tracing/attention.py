"""Answering attention while a model is run in parts, whichever kernel computes it.

Problem: patches, bands and ranks that share tokens answer each call of attention themselves, and then let attention
compute. Code asks for it in three ways: by torch's name, by a function it has taken out of torch, and by diffusers'
dispatch, behind which stand kernels that torch does not know (flash, sage, xformers, flex). Idea: diffusers looks a
kernel up in its registry at every call. While ranks sample, a `Kernel` stands there: to who answers attention it is
one more function of torch, and what it computes with is the user's kernel.

    block ── dispatch_attention_fn ── Kernel ── handler of patches or bands ── the user's kernel, on all keys

In compiled blocks, which no handler can enter, attention is one operator of known shapes, since a compiler looks
attention up once, and no graph can hold messages and caches. When a graph runs, that operator asks who answers
attention in this thread; without anybody it is torch's own.

    block    norm ── q, k, v ── lightning_diffpipe::attend ── projection ── feed-forward     a graph for each shape
                                │
                                └── the sampler's handler, or torch's attention

Kernels of diffusers take tokens before heads, `(batch, tokens, heads, width)`; here heads come first, as in torch.

Source: diffusers' `attention_dispatch.py` and `compile_repeated_blocks`; PyTorch's `__torch_function__` and custom
operators.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.calltree import is_compiled

Attend = Callable[..., Tensor]
"""`attend(query, key, value, **options)`, as torch's scaled dot-product attention."""

AttentionHandler = Callable[..., Tensor]
"""`handler(attend, query, key, value, **options)` answers a call of attention."""

_ATTENTION = F.scaled_dot_product_attention  # its name may stand for something else later


class Kernel:
    """A kernel of diffusers' registry as attention with heads before tokens, which answers like torch's.

    Args:
        name: Diffusers' name of it, such as "flash".
        compute: The kernel, tokens before heads.

    Attributes:
        tokens_first: Normalisers have tokens before heads as well, as those of flash attention 3 in diffusers.
    """

    def __init__(self, name: str, compute: Callable[..., Any]) -> None:
        self.name, self._compute, self.tokens_first = name, compute, False
        self.__name__ = f"attention by {name}"
        self._taken = inspect.signature(compute).parameters
        self.dispatched = self._dispatched  # one object, by which graphs of compiled blocks know it

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Computes attention `(batch, heads, tokens, width)`, unless a function mode answers."""
        tensors = query, key, value
        if has_torch_function(tensors):
            answered: Tensor = handle_torch_function(self, tensors, *tensors, **options)
            return answered
        # What a kernel does not take, diffusers' dispatch has not given it either.
        options = {name: x for name, x in options.items() if name in self._taken}
        with AttentionByName(None):  # some call torch's attention
            out: Tensor = self._compute(*(x.transpose(1, 2) for x in tensors), **options)
        return out.transpose(1, 2)

    def _dispatched(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Computes a call from diffusers' registry, tokens before heads."""
        if options.pop("_parallel_config", None) is not None:
            raise ConfigurationError(
                "ranks of a Predictor share the work, and so do those of enable_parallelism; leave that out"
            )
        tensors = [x.transpose(1, 2) for x in (query, key, value)]
        if torch.compiler.is_compiling():
            out = torch.ops.lightning_diffpipe.attend(*tensors, **options, answered_by=self.name)
        else:
            out = self.answered(*tensors, **options)
        return out.transpose(1, 2)

    def answered(self, *given: Tensor, **options: Any) -> Tensor:
        """Passes attention to this thread's handler of attention by name; computes it without one."""
        handler = AttentionByName.here()
        if handler is None:
            return self(*given, **options)
        return answer_attention(handler, self, given, options)

    def with_normaliser(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns attention and the logarithm of its normaliser, `(batch, heads, queries, 1)`."""
        tensors = (x.transpose(1, 2) for x in (query, key, value))
        with AttentionByName(None):
            out, norm, *_ = self._compute(*tensors, scale=scale, return_lse=True)
        norm = norm.mT if self.tokens_first else norm
        return out.transpose(1, 2), norm.reshape(*query.shape[:-1], 1)


_of_kernel = functools.cache(Kernel)


class KernelsAnswered(contextlib.ContextDecorator):
    """Lets kernels of diffusers' dispatch answer as torch's attention does meanwhile, in all threads.

    `native` is left alone: it is torch's attention, and answers as that.
    """

    by_name: ClassVar[dict[str, Kernel]] = {}
    _plain: ClassVar[dict[Any, Callable[..., Any]]] = {}
    _users, _lock = 0, threading.Lock()

    def __enter__(self) -> None:
        cls, registry = KernelsAnswered, _dispatch()._AttentionBackendRegistry
        with cls._lock:
            if cls._users == 0:
                cls._plain = {n: x for n, x in registry._backends.items() if n.value != "native"}
                kernels = {n: _of_kernel(n.value, compute) for n, compute in cls._plain.items()}
                cls.by_name = {kernel.name: kernel for kernel in kernels.values()}
                registry._backends.update({n: kernel.dispatched for n, kernel in kernels.items()})
            cls._users += 1

    def __exit__(self, *error: object) -> None:
        cls = KernelsAnswered
        with cls._lock:
            cls._users -= 1
            if cls._users == 0:
                backends = _dispatch()._AttentionBackendRegistry._backends
                for name, compute in cls._plain.items():  # but for what was registered meanwhile
                    if backends[name] is cls.by_name[name.value].dispatched:
                        backends[name] = compute


def _dispatch() -> Any:
    from diffusers.models import attention_dispatch

    return attention_dispatch


def set_attention(denoiser: nn.Module, name: str) -> None:
    """Chooses the kernel of a denoiser's attention, by diffusers' name.

    Raises:
        ConfigurationError: There is no such kernel here, or the denoiser cannot take another one than torch's.
    """
    registry = _dispatch()._AttentionBackendRegistry
    active, _ = registry.get_active_backend()
    try:
        denoiser.set_attention_backend(name)
        registry.set_active_backend(active)  # which diffusers changes for all models of a process
        if not _asked_for(denoiser):
            raise ValueError("its attention has one kind of kernel, torch's own choice")
    except (AttributeError, ValueError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"attention={name}: {type(denoiser).__name__} cannot: {reason}"
        ) from error


def kernels_of(denoiser: nn.Module) -> list[Kernel]:
    """Returns the kernels that a denoiser's attention goes through, but for torch's own choice."""
    active, _ = _dispatch()._AttentionBackendRegistry.get_active_backend()
    with KernelsAnswered():
        names = {getattr(name or active, "value", name) for name in _asked_for(denoiser)}
        return [KernelsAnswered.by_name[name] for name in sorted(names - {"native"})]


def _asked_for(denoiser: nn.Module) -> list[Any]:
    """Returns names of kernels, one for each processor that can take another; None for the active one."""
    processors = (getattr(module, "processor", None) for module in denoiser.modules())
    return [p._attention_backend for p in processors if hasattr(p, "_attention_backend")]


class AttentionIntercepted(TorchFunctionMode):
    """Lets a handler answer every `scaled_dot_product_attention` of this thread, and every `Kernel`."""

    def __init__(self, handler: AttentionHandler) -> None:
        super().__init__()
        self._handler = handler

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not _ATTENTION and not isinstance(func, Kernel):
            return func(*args, **kwargs)
        return answer_attention(self._handler, func, args, kwargs)


def answer_attention(
    handler: AttentionHandler, attend: Attend, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """Passes a call of attention to a handler."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    options = dict(zip(names, args, strict=False)) | dict(kwargs)
    query, key, value = (options.pop(name) for name in names[:3])
    return handler(attend, query, key, value, **options)


class AttentionByName:
    """Lets a handler answer every attention of this thread that is looked up by name.

    Nearly all code says `F.scaled_dot_product_attention` when it wants attention, not when it is imported. So the
    name is given another meaning while a block runs, for the thread that runs it, and nothing else in the block
    costs more than it does without. Code that took the function out of its module beforehand is not seen; the probe
    counts whether that happens (`Layout.attention_by_name`), and such models pass every function of torch through
    `AttentionIntercepted` instead, at 2 microseconds each.

    Example:
        >>> import torch
        >>> x = torch.ones(1, 1, 2, 4)
        >>> with AttentionByName(lambda attend, q, k, v, **options: q - 1):
        ...     float(F.scaled_dot_product_attention(x, x, x).sum())
        0.0
        >>> float(F.scaled_dot_product_attention(x, x, x).sum())
        8.0
    """

    _here = threading.local()
    # The name is shared by all threads; the last one that needs it puts the function back.
    _users, _plain, _lock = 0, _ATTENTION, threading.Lock()

    def __init__(self, handler: AttentionHandler | None) -> None:
        self._handler = handler
        self._before: AttentionHandler | None = None

    def __enter__(self) -> AttentionByName:
        cls = AttentionByName
        with cls._lock:
            cls._users += 1
            if cls._users == 1:
                cls._plain = F.scaled_dot_product_attention
                F.scaled_dot_product_attention = _by_name
        self._before, cls._here.handler = cls.here(), self._handler
        return self

    def __exit__(self, *error: object) -> None:
        cls = AttentionByName
        cls._here.handler = self._before
        with cls._lock:
            cls._users -= 1
            if cls._users == 0:
                F.scaled_dot_product_attention = cls._plain

    @classmethod
    def here(cls) -> AttentionHandler | None:
        """Returns the handler of attention in this thread; None if torch computes it."""
        return getattr(cls._here, "handler", None)

    @classmethod
    def answer(cls, *args: Any, **kwargs: Any) -> Tensor:
        """Answers a call of attention."""
        handler = cls.here()
        if handler is None:
            return cls._plain(*args, **kwargs)
        return answer_attention(handler, cls._plain, args, kwargs)


def _by_name(*args: Any, **kwargs: Any) -> Tensor:
    """Stands under attention's name; in graphs of compiled blocks is an operator that does the same."""
    if torch.compiler.is_compiling():
        return torch.ops.lightning_diffpipe.attend(*args, **kwargs)
    return AttentionByName.answer(*args, **kwargs)


# ------------------------------------------------------------------------------------ compiled blocks

_LIBRARY = library.Library("lightning_diffpipe", "DEF")
# No argument may be called `kernel`: inductor passes one of that name beside them.
_LIBRARY.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, str? answered_by=None) -> Tensor"
)


def _attend(*args: Any, answered_by: str | None = None, **kwargs: Any) -> Tensor:
    """Answers attention with a result in the memory order of most kernels, tokens outside of heads."""
    answer = AttentionByName.answer
    if answered_by:
        answer = KernelsAnswered.by_name[answered_by].answered
    return answer(*args, **kwargs).transpose(-3, -2).contiguous().transpose(-3, -2)


def _outcome(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    *lead, heads, tokens, _ = query.shape
    return query.new_empty(*lead, tokens, heads, value.shape[-1]).transpose(-3, -2)


_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
library.register_fake("lightning_diffpipe::attend", _outcome)


class CompiledBlock:
    """A compiled block: a graph of `torch.compile` for each shape."""

    def __init__(self, block: nn.Module, backend: str | Callable[..., Any]) -> None:
        self._compiled = torch.compile(block._call_impl, backend=backend, dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the graph, with attention by the handler of this thread."""
        with AttentionByName(AttentionByName.here()):
            return self._compiled(*args, **kwargs)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks that a denoiser repeats: those that diffusers names, or else entries of lists.

    Lists count (`nn.ModuleList`) that have several modules of one class and no others, each with modules inside.

    Raises:
        ConfigurationError: There are none.
    """
    names = getattr(model, "_repeated_blocks", None) or ()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if blocks := blocks or list(_in_lists(model)):
        return blocks
    raise ConfigurationError(
        f"compile=blocks: a {type(model).__name__} has no list of blocks of one class, and diffusers names none "
        "(_repeated_blocks); leave it out"
    )


def _in_lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        entries = list(child) if isinstance(child, nn.ModuleList) else []
        is_repeated = len(entries) > 1 and len({*map(type, entries)}) == 1
        if is_repeated and all(any(entry.children()) for entry in entries):
            yield from entries
        else:
            yield from _in_lists(child)


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any]) -> None:
    """Compiles the blocks of `repeated_blocks` at their first calls; raises what that does."""
    for block in repeated_blocks(model):
        block._compiled_call_impl = CompiledBlock(block, backend)


def compiled_modules(model: nn.Module) -> dict[str, bool]:
    """Returns the compiled modules of a model, by name, with whether attention can be answered in them."""
    called = {n: m._compiled_call_impl for n, m in model.named_modules() if is_compiled(m)}
    return {
        n: isinstance(getattr(x, "diffpipe_original", x), CompiledBlock) for n, x in called.items()
    }
