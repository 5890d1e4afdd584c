"""Optimizer states in host memory, on the device only while their parameters are stepped.

AdamW's two moments take twice as much as the gradients. They are needed once a step, when no activations are left:

    copies to the device | 0 | 1 | 2     | 3     |              buckets of parameters 0 to 3
    steps                    | 0 |   | 1 |   | 2 |   | 3 |
    copies to the host           | 0     | 1     | 2     | 3 |

So the user's own optimizer steps once for each bucket, while the gradients of all others are set aside. Optimizers
leave parameters without a gradient alone (decision 0044). States of two buckets at most are on the device at a
time: those that are stepped or on their way back, and the next ones. Values are those of a step of all parameters,
to the last bit, if the optimizer treats each by itself and counts no steps of its own, as trials of small copies
tell.

Source:
    Ren et al. (2021), https://arxiv.org/abs/2101.06840 (ZeRO-Offload), which steps on the host instead.
"""

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from lightning_diffpipe.graph.placement import is_placeholder
from lightning_diffpipe.graph.versions import plain_tensors
from lightning_diffpipe.runtime.optimizer_sharding import (
    same_steps,
    switches_weights,
    with_wrapped,
)

_HOST = torch.device("cpu")

Parameters = Sequence[nn.Parameter]


class OptimizerOffload:
    """Keeps the states of a rank's optimizers in host memory between their steps.

    A bucket is as large as the largest parameter of its optimizer on this rank.

    Args:
        device: Where the parameters are.
        one_by_one: Every parameter has a bucket of its own.

    Attributes:
        num_bytes_copied: Bytes copied so far, to the device and back.
        peak_bytes: Most bytes of states that were on the device at a time in a step.
    """

    def __init__(self, device: torch.device, one_by_one: bool = False) -> None:
        self._device, self._one_by_one = device, one_by_one
        self.num_bytes_copied = self.peak_bytes = 0
        self._hosts: dict[int, Tensor] = {}  # where a state on the device comes from, by its id
        self._leaving: list[Tensor] = []  # on the device until `_left`
        self._left: Callable[[], Any] = lambda: None
        self._on_device_bytes = 0
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def attach(self, optimizer: Optimizer) -> Callable[[], None]:
        """Moves an optimizer's states to the host, but for its steps; returns what undoes the latter."""
        buckets, gradients = self._buckets_of(optimizer), dict[nn.Parameter, Tensor]()
        for bucket in buckets:  # some have states from the start, such as Adagrad
            self._leave(optimizer, bucket)
        self._rest()
        last, depth = tuple[nn.Parameter, ...](), 0

        def before(_: Optimizer, args: Any, kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            if depth > 1:  # `step` of a class calls that of its base, which has the same hooks
                return None
            closure = kwargs.get("closure") or next(iter(args[1:]), None)

            def computed() -> Any:
                nonlocal last
                loss = closure() if closure else None
                trained = {p: p.grad for bucket in buckets for p in bucket if p.grad is not None}
                gradients.update(trained)
                for parameter in trained:
                    parameter.grad = None
                last = tuple(self._step_all_but_last(optimizer, buckets, gradients))
                return loss

            return (args[:1], {**kwargs, "closure": computed}) if closure else computed()

        def after(*_: Any) -> None:
            nonlocal last, depth
            depth -= 1
            if depth:
                return
            self._leave(optimizer, last)
            self._rest()
            last = ()
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            gradients.clear()

        first_hook = optimizer.register_step_pre_hook(before)
        last_hook = optimizer.register_step_post_hook(after)

        def detach() -> None:
            first_hook.remove()
            last_hook.remove()

        return detach

    def load(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Gives an optimizer a state dict; a bucket at a time is on the device, where torch loads it."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbers, loaded = {p: n for n, p in enumerate(parameters)}, dict[nn.Parameter, Any]()
        for bucket in self._buckets_of(optimizer):
            some = {n: state["state"][n] for p in bucket if (n := numbers[p]) in state["state"]}
            optimizer.load_state_dict({**state, "state": some})
            self._leave(optimizer, bucket)
            self._rest()
            loaded |= {p: optimizer.state[p] for p in bucket if p in optimizer.state}
        optimizer.state.clear()
        optimizer.state.update(loaded)

    def _buckets_of(self, optimizer: Optimizer) -> list[Parameters]:
        members = (p for group in optimizer.param_groups for p in group["params"])
        parameters = [parameter for parameter in members if not is_placeholder(parameter)]
        largest = max((parameter.nbytes for parameter in parameters), default=0)
        most = 0 if self._one_by_one else largest
        buckets, num_bytes = list[list[nn.Parameter]](), math.inf
        for parameter in parameters:
            num_bytes += parameter.nbytes
            if num_bytes > most:
                buckets.append([])
                num_bytes = parameter.nbytes
            buckets[-1].append(parameter)
        return buckets

    def _step_all_but_last(
        self,
        optimizer: Optimizer,
        buckets: Iterable[Parameters],
        gradients: Mapping[nn.Parameter, Tensor],
    ) -> Parameters:
        """Steps bucket by bucket; returns the last one, with states and gradients, for the step under way."""
        trained = [bucket for bucket in buckets if any(p in gradients for p in bucket)]
        if not trained:
            return ()
        arrived = self._bring(optimizer, trained[0])
        for bucket, following in pairwise(trained):
            coming = self._bring(optimizer, following)
            arrived()
            for parameter in bucket:
                parameter.grad = gradients.get(parameter)
            with _hooks_off(optimizer):
                type(optimizer).step(optimizer)  # that of the object counts for its scheduler
            for parameter in bucket:
                parameter.grad = None
            self._leave(optimizer, bucket)
            arrived = coming
        arrived()
        for parameter in trained[-1]:
            parameter.grad = gradients.get(parameter)
        return trained[-1]

    def _bring(self, optimizer: Optimizer, bucket: Parameters) -> Callable[[], Any]:
        """Begins to copy states of a bucket to the device, when those before the last have left it."""
        self._free()
        pairs = list[tuple[Tensor, Tensor]]()

        def arriving(host: Any) -> Any:
            if not _is_moved(host, _HOST):
                return host
            here = _empty_like(host, self._device)
            self._hosts[id(here)] = host
            pairs.append((here, host))
            return here

        _replace(optimizer, bucket, arriving)
        self._count(here for here, _ in pairs)
        return self._begin(pairs, 0)

    def _leave(self, optimizer: Optimizer, bucket: Parameters) -> None:
        """Begins to copy states of a bucket to the host: to where they were, or to new memory."""
        pairs, new = list[tuple[Tensor, Tensor]](), list[Tensor]()

        def leaving(here: Any) -> Any:
            if not _is_moved(here, self._device):
                return here
            host = self._hosts.pop(id(here), None)
            if host is None:
                new.append(here)
            if host is None or (host.shape, host.dtype) != (here.shape, here.dtype):
                host = _empty_like(here, _HOST, pinned=self._device.type == "cuda")
            pairs.append((host, here))
            return host

        _replace(optimizer, bucket, leaving)
        self._count(new)
        self._free()
        self._leaving = [here for _, here in pairs]
        self._left = self._begin(pairs, 1)

    def _count(self, arrived: Iterable[Tensor]) -> None:
        self._on_device_bytes += sum(map(_num_bytes, arrived))
        self.peak_bytes = max(self.peak_bytes, self._on_device_bytes)

    def _free(self) -> None:
        """Gives back the memory of states that have left; what comes after it may be written there."""
        self._left()
        self._on_device_bytes -= sum(map(_num_bytes, self._leaving))
        self._leaving = []

    def _rest(self) -> None:
        """Waits until all states are on the host, where anybody may read them."""
        self._free()
        self._hosts.clear()
        if self._device.type == "cuda":
            self._streams[1].synchronize()

    @torch.no_grad()
    def _begin(self, pairs: Sequence[tuple[Tensor, Tensor]], direction: int) -> Callable[[], Any]:
        """Begins to copy to the first tensor of each pair; returns what waits for the copies."""
        plain = [
            pair
            for to, source in pairs
            for pair in zip(plain_tensors(to), plain_tensors(source), strict=True)
        ]
        self.num_bytes_copied += sum(source.nbytes for _, source in plain)

        def copy() -> None:
            for to, source in plain:
                to.copy_(source, non_blocking=True)

        if self._device.type != "cuda":
            copy()
            return lambda: None
        stream, current = self._streams[direction], torch.cuda.current_stream(self._device)
        stream.wait_stream(current)  # what has been started so far may use that memory
        with torch.cuda.stream(stream):
            copy()
            copied = stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(copied)


def may_be_offloaded(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer's steps stay the same with states in host memory, by steps of small copies.

    Those that change weights between steps do it with their states; `sum_over_ranks` adds up over parameters.
    """
    if switches_weights(optimizer) or hasattr(optimizer, "sum_over_ranks"):
        return False
    device = optimizer.param_groups[0]["params"][0].device
    return same_steps(optimizer, attach=OptimizerOffload(device, one_by_one=True).attach) is True


def _is_moved(value: Any, source: torch.device) -> bool:
    """Returns whether a value of a state is copied: a tensor, but no count, which optimizers read on the host."""
    is_state = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    return is_state and value.dim() > 0 and value.device.type == source.type


def _replace(optimizer: Optimizer, bucket: Parameters, change: Callable[[Any], Any]) -> None:
    """Puts other values into the states of parameters, of wrapped optimizers as well."""
    for each in with_wrapped([optimizer]):
        for parameter in bucket:
            if parameter in each.state:
                state = each.state[parameter]
                state.update(pytree.tree_map(change, dict(state)))


def _empty_like(tensor: Tensor, device: torch.device, pinned: bool = False) -> Tensor:
    if is_traceable_wrapper_subclass(tensor):
        inner: Any = lambda _, plain: _empty_like(plain, device, pinned)
        return transform_subclass(tensor, inner)
    return torch.empty_like(tensor, device=device, pin_memory=pinned)


def _num_bytes(tensor: Tensor) -> int:
    return sum(plain.nbytes for plain in plain_tensors(tensor))


@contextlib.contextmanager
def _hooks_off(optimizer: Any) -> Iterator[None]:
    """Lets an optimizer step inside without anybody's hooks, which are for the step of all parameters."""
    names = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    hooks = [getattr(optimizer, name) for name in names]
    for name in names:
        setattr(optimizer, name, OrderedDict())
    try:
        yield
    finally:
        for name, own in zip(names, hooks, strict=True):
            setattr(optimizer, name, own)
