"""Optimizer states in host memory, on the device only while their parameters are updated.

AdamW's two moments take twice as much as the gradients. They are needed once a step, when no activations are left:

    copies to the device | 0 | 1 | 2     | 3     |              buckets of parameters 0 to 3
    steps                    | 0 |   | 1 |   | 2 |   | 3 |
    copies to the host           | 0     | 1     | 2     | 3 |

So the user's own optimizer steps once for each bucket, while the gradients of all others are set aside. Optimizers
leave parameters without a gradient alone (decision 0044). States of two buckets at most are on the device at a
time: those that are updated or on their way back, and the next ones. Values are those of a step of all parameters,
to the last bit, if the optimizer treats each by itself and counts no steps of its own, as trials of small copies
tell.

Source:
    Ren et al. (2021), https://arxiv.org/abs/2101.06840 (ZeRO-Offload), which steps on the host instead.
"""

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from lightning_diffpipe.graph.placement import is_placeholder
from lightning_diffpipe.graph.versions import plain_tensors
from lightning_diffpipe.runtime.optimizer_sharding import (
    around_updates,
    same_steps,
    switches_weights,
    with_wrapped,
)

_HOST = torch.device("cpu")
Bucket = tuple[nn.Parameter, ...]
Gradients = dict[nn.Parameter, Tensor]


class OptimizerOffload:
    """Keeps the states of a rank's optimizers in host memory between their steps.

    A bucket is as large as the largest parameter of its optimizer on this rank.

    Args:
        device: Where the parameters are.

    Attributes:
        num_bytes_copied: Bytes copied so far, to the device and back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.num_bytes_copied = device, 0
        self._hosts: dict[int, Tensor] = {}  # where a state on the device comes from, by its id
        self._leaving: list[Tensor] = []  # on the device until `_left`
        self._left: Callable[[], Any] = lambda: None
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def attach(self, optimizer: Optimizer) -> Callable[[], None]:
        """Moves an optimizer's states to the host, but for its steps; returns what undoes the latter."""
        gradients = Gradients()

        def settle() -> None:
            for bucket in _buckets_of(optimizer):
                self._leave(optimizer, bucket)
            self._rest()

        def before() -> None:
            buckets = _buckets_of(optimizer)  # groups may have been added
            every = (p for bucket in buckets for p in bucket)
            gradients.update((p, p.grad) for p in every if p.grad is not None)
            try:
                self._step_each(optimizer, buckets, gradients)
            except BaseException:
                self._rest()
                settle()
                after()
                raise

        def after() -> None:
            _give(gradients, gradients)
            gradients.clear()

        settle()  # some have states from the start, such as Adagrad
        return around_updates(optimizer, before, after)

    def load(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Gives an optimizer a state dict; a bucket at a time is on the device, where torch loads it."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        numbers, loaded = {p: n for n, p in enumerate(parameters)}, dict[nn.Parameter, Any]()
        for bucket in _buckets_of(optimizer):
            some = {n: state["state"][n] for p in bucket if (n := numbers[p]) in state["state"]}
            optimizer.load_state_dict({**state, "state": some})
            self._leave(optimizer, bucket)
            loaded |= optimizer.state
        self._rest()
        optimizer.state.clear()  # in the order of the parameters again
        optimizer.state.update(loaded)

    def _step_each(
        self, optimizer: Optimizer, buckets: Iterable[Bucket], gradients: Gradients
    ) -> None:
        """Steps bucket by bucket; the step under way then finds no gradients."""
        trained = [bucket for bucket in buckets if not gradients.keys().isdisjoint(bucket)]
        _give({}, gradients)
        arrived = self._bring(optimizer, trained[0]) if trained else self._left
        for bucket, following in zip_longest(trained, trained[1:]):
            coming = self._bring(optimizer, following) if following else self._left
            arrived()
            _give(gradients, bucket)
            with _hooks_off(optimizer):
                type(optimizer).step(optimizer)  # that of the object counts for its scheduler
            _give({}, bucket)
            self._leave(optimizer, bucket)
            arrived = coming
        self._rest()

    def _bring(self, optimizer: Optimizer, bucket: Bucket) -> Callable[[], Any]:
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

        try:
            _replace(optimizer, bucket, arriving)
        finally:  # of memory for some of the states, if there is none for others
            copied = self._begin(pairs, 0)
        return copied

    def _leave(self, optimizer: Optimizer, bucket: Bucket) -> None:
        """Begins to copy states of a bucket to the host: to where they were, or to new memory."""
        pairs = list[tuple[Tensor, Tensor]]()

        def leaving(here: Any) -> Any:
            if not _is_moved(here, self._device):
                return here
            host = self._hosts.pop(id(here), None)
            if host is None or (host.shape, host.dtype) != (here.shape, here.dtype):
                host = _empty_like(here, _HOST, pinned=self._device.type == "cuda")
            pairs.append((host, here))
            return host

        _replace(optimizer, bucket, leaving)
        self._free()
        self._leaving = [here for _, here in pairs]
        self._left = self._begin(pairs, 1)

    def _free(self) -> None:
        """Gives back the memory of states that have left; what comes after it may be written there."""
        self._left()
        self._leaving = []

    def _rest(self) -> None:
        """Waits until states are where they go, such as on the host, where anybody may read them."""
        self._free()
        self._hosts.clear()
        if self._device.type == "cuda":
            for stream in self._streams:
                stream.synchronize()

    @torch.no_grad()
    def _begin(self, pairs: Sequence[tuple[Tensor, Tensor]], direction: int) -> Callable[[], Any]:
        """Begins to copy to the first tensor of each pair; returns what waits for the copies."""
        inner = (zip(*map(plain_tensors, pair), strict=True) for pair in pairs)
        plain = [pair for each in inner for pair in each]
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
    devices = [p.device for bucket in _buckets_of(optimizer) for p in bucket]
    device = devices[0] if devices else _HOST  # a stage may train nothing
    return same_steps(optimizer, attach=OptimizerOffload(device).attach) is True


def _buckets_of(optimizer: Optimizer) -> list[Bucket]:
    members = (p for group in optimizer.param_groups for p in group["params"])
    parameters = [parameter for parameter in members if not is_placeholder(parameter)]
    most = max((parameter.nbytes for parameter in parameters), default=0)
    buckets, num_bytes = list[Bucket](), math.inf
    for parameter in parameters:
        num_bytes += parameter.nbytes
        if num_bytes > most:
            buckets.append(())
            num_bytes = parameter.nbytes
        buckets[-1] += (parameter,)
    return buckets


def _give(gradients: Gradients, parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = gradients.get(parameter)


def _is_moved(value: Any, source: torch.device) -> bool:
    """Returns whether a value of a state is copied: a tensor, but no count, which optimizers read on the host."""
    is_state = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    return is_state and value.dim() > 0 and value.device.type == source.type


def _replace(optimizer: Optimizer, bucket: Bucket, change: Callable[[Any], Any]) -> None:
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


@contextlib.contextmanager
def _hooks_off(optimizer: Optimizer) -> Iterator[None]:
    """Lets an optimizer step inside without anybody's hooks, which are for the step of all parameters."""
    every = vars(torch_optimizer)  # of all optimizers (`register_optimizer_step_pre_hook`)
    places = [
        *((vars(optimizer), f"_optimizer_step_{when}_hooks") for when in ("pre", "post")),
        *((every, f"_global_optimizer_{when}_hooks") for when in ("pre", "post")),
    ]
    hooks = [owner[name] for owner, name in places]
    for owner, name in places:
        owner[name] = OrderedDict()
    try:
        yield
    finally:
        for (owner, name), before in zip(places, hooks, strict=True):
            owner[name] = before
