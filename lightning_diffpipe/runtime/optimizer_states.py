"""Optimizer states shared by the ranks that hold the same parameters (ZeRO, stage 1), or kept in host memory.

**Shared.** Replicas of a stage, and pipelines side by side, have the same weights and the same sums of gradients:
each would keep the same optimizer states and take the same step. Here each updates some of the parameters, and
sends them on:

    gradients summed, clipped -> those of parameters that others step set aside -> step -> parameters to all holders

Optimizers leave parameters without a gradient alone, and make states of those they step: so nothing of an optimizer
has to be changed for its states to be divided, whichever groups, wrappers and settings it has. Parameters are
updated whole, since some optimizers treat them as matrices.

That equals a step of all parameters where each is updated by its own gradient alone, as a few steps of small
copies tell (`updates_independently`); so does a step of each stage by itself.

**In host memory**, states are on the device only while their parameters are updated. AdamW's two moments take
twice as much as the gradients. They are needed once a step, when no activations are left:

    copies to the device | 0 | 1 | 2     | 3     |              buckets of parameters 0 to 3
    steps                    | 0 |   | 1 |   | 2 |   | 3 |
    copies to the host           | 0     | 1     | 2     | 3 |

So the user's own optimizer steps once for each bucket, while the gradients of all others are set aside. Optimizers
leave parameters without a gradient alone (decision 0044). States of two buckets at most are on the device at a
time: those that are updated or on their way back, and the next ones. Values are those of a step of all parameters,
to the last bit, if the optimizer treats each by itself and counts no steps of its own, as trials of small copies
tell.

Sources:
    Rajbhandari et al. (2020), https://arxiv.org/abs/1910.02054 (ZeRO).
    Ren et al. (2021), https://arxiv.org/abs/2101.06840 (ZeRO-Offload), which steps on the host instead.
"""

import contextlib
import copy
import math
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from lightning_diffpipe.comm.mesh import Mesh, Work, start_broadcast
from lightning_diffpipe.graph.placement import is_placeholder
from lightning_diffpipe.graph.rng import isolated_random_numbers
from lightning_diffpipe.graph.versions import plain_tensors
from lightning_diffpipe.runtime.reduction import MOST_UNDER_WAY, buckets_of

_TRIAL_SIZE = 8  # of every dimension
_TRIAL_SCALES = (1e-3, 1e3, *[1.0] * 4)  # of gradients: below and above bounds of their norms


def stepping_ranks(
    sizes: Mapping[str, int], holders: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Returns the world rank that steps each parameter, so that all step about as much.

    Example:
        >>> stepping_ranks({"a": 4, "b": 3, "c": 1}, dict.fromkeys("abc", (0, 1)))
        {'a': 0, 'b': 1, 'c': 1}
    """
    loads: defaultdict[int, int] = defaultdict(int)
    ranks = {}
    for name in sorted(holders, key=lambda each: (len(holders[each]), -sizes[each], each)):
        rank = min(holders[name], key=lambda each: (loads[each], each))
        loads[rank] += sizes[name]
        ranks[name] = rank
    return ranks


class OptimizerSharding:
    """Lets a rank's optimizers step its part of the parameters that it shares with others.

    Args:
        mesh: This rank's groups; groups for all sets of holders have been made.
        parameters: Trained parameters on this rank, by name.
        holders: World ranks that hold each trained parameter.
        ranks: World rank that steps each of them, see `stepping_ranks`.

    Attributes:
        ranks: As given.
        updated_here: Names of the parameters that this rank updates.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, nn.Parameter],
        holders: Mapping[str, tuple[int, ...]],
        ranks: Mapping[str, int],
    ) -> None:
        self.ranks = ranks
        self.updated_here = frozenset(name for name in parameters if ranks[name] == mesh.rank)
        self._mesh, self._parameters, self._holders = mesh, parameters, holders

    def attach(self, optimizer: Optimizer) -> Callable[[], None]:
        """Divides an optimizer's steps, now each a collective call of the holders; returns what undoes it."""
        members = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        named = {name: p for name, p in self._parameters.items() if id(p) in members}
        foreign = [p for name, p in named.items() if name not in self.updated_here]
        updated = {id(named[name]) for name in self.updated_here & named.keys()}
        for key in members.keys() - updated:  # some have states from the start, such as Adagrad
            optimizer.state.pop(members[key], None)
        set_aside: list[Tensor | None] = []

        def before() -> None:
            set_aside[:] = [parameter.grad for parameter in foreign]
            for parameter in foreign:
                parameter.grad = None

        def after() -> None:
            for parameter, gradient in zip(foreign, set_aside, strict=True):
                parameter.grad = gradient
            self._send_updates(named)

        return around_updates(optimizer, before, after)

    @torch.no_grad()
    def _send_updates(self, named: Mapping[str, nn.Parameter]) -> None:
        """Sends updated parameters to all ranks that hold them.

        Nothing is sent among ranks that share parameters of which none has a gradient, which all of them know:
        without a flush Lightning's own steps have none, and forwards under way need the weights.
        """
        updated = {self._holders[name] for name, p in named.items() if p.grad is not None}
        shared = {n: h for n in named if len(h := self._holders[n]) > 1 and h in updated}
        routes = {name: (self.ranks[name], *ranks) for name, ranks in shared.items()}
        under_way: deque[tuple[Work, Tensor, list[nn.Parameter]]] = deque()

        def receive() -> None:
            work, flat, bucket = under_way.popleft()
            work.wait()
            parts = flat.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.copy_(part.view_as(parameter))

        with self._mesh.naming({r for ranks in shared.values() for r in ranks}, patient=False):
            for (source, *ranks), bucket in buckets_of({n: named[n] for n in routes}, routes):
                flat = torch.cat([parameter.detach().reshape(-1) for parameter in bucket])
                group = self._mesh.reduction_group(tuple(ranks))
                under_way.append((start_broadcast(flat, source, group), flat, bucket))
                if len(under_way) == MOST_UNDER_WAY:
                    receive()
            while under_way:
                receive()


def around_updates(
    optimizer: Optimizer, before: Callable[[], None], after: Callable[[], None]
) -> Callable[[], None]:
    """Calls functions between each step's closure and its update, and after it; returns what undoes that.

    They are called once where a step calls that of its base class: torch calls hooks for both, if there has been an
    optimizer of that. Hooks of others that come after a step see what `after` leaves. Steps are known by their
    frames: where an update raises, torch calls no hook.
    """
    steps = list[FrameType]()  # under way, the outer one first

    def enter(_: Optimizer, args: Any, kwargs: Any) -> Any:
        step = sys._getframe(1)
        callers = [frame for frame, _ in walk_stack(step)]
        steps[:] = [*(each for each in steps if each in callers), step]
        if len(steps) > 1:
            return None
        closure = kwargs.get("closure") or next(iter(args[1:]), None)

        def computed() -> Any:
            outer, steps[:] = steps.copy(), []  # a closure may step as well, as without a flush
            try:
                loss = closure() if closure else None
                before()
            finally:  # an optimizer may catch what a closure raises
                steps[:] = outer
            return loss

        return (args[:1], {**kwargs, "closure": computed}) if closure else computed()

    def leave(*_: Any) -> None:
        steps.pop()
        if not steps:
            after()

    hooks = optimizer.register_step_pre_hook(enter), optimizer.register_step_post_hook(leave)
    optimizer._optimizer_step_post_hooks.move_to_end(hooks[1].id, last=False)

    def detach() -> None:
        for hook in hooks:
            hook.remove()

    return detach


# --------------------------------------------------------------------------- which optimizers can be divided


def with_wrapped(optimizers: Iterable[Optimizer]) -> Iterator[Optimizer]:
    """Yields optimizers, and those they hold (`Lookahead(AdamW(...))`)."""
    for optimizer in optimizers:
        yield optimizer
        yield from with_wrapped(v for v in vars(optimizer).values() if isinstance(v, Optimizer))


def may_be_divided(optimizer: Optimizer) -> bool:
    """Returns whether ranks may each step some of an optimizer's parameters.

    One with `sum_over_ranks` adds up over ranks what it needs of all.
    """
    if switches_weights(optimizer):
        return False
    return hasattr(optimizer, "sum_over_ranks") or updates_independently(optimizer) is True


def switches_weights(optimizer: Any) -> bool:
    """Returns whether an optimizer trains other weights than it ends with, as schedule-free ones do."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def updates_independently(optimizer: Optimizer) -> bool | None:
    """Returns whether an optimizer updates each parameter by its own gradient alone, and by a copy of it.

    A copy of the optimizer steps small parameters, one of each kind in each group with another next to it, once
    with the gradients of all and once without those of the others. Parameters, states, and what the optimizer knows
    of no parameter in particular, must come out the same to the last bit.

    Returns:
        None if that does not tell: copies cannot take a step, or sample random numbers.
    """
    return same_steps(optimizer, with_others=False)


def same_steps(optimizer: Optimizer, **way: Any) -> bool | None:
    """Returns whether small copies that step another way, see `_after_trial`, come to the same; None likewise."""
    try:
        usual, again = _after_trial(optimizer, 0), _after_trial(optimizer, 1)
        other = _after_trial(optimizer, 0, **way)
    except Exception:  # of whichever kind: it is somebody else's
        return None
    return None if not _equal(usual, again) else _equal(usual, other)


def _equal(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(_same, some, others))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one.cpu(), other.cpu())
    return bool(one == other) or callable(one)  # functions were copied, if they are bound


def _after_trial(
    optimizer: Optimizer,
    seed: int,
    with_others: bool = True,
    attach: Callable[[Optimizer], Callable[[], None]] | None = None,
) -> list[Any]:
    """Returns small parameters and their states after trial steps of a copy of an optimizer.

    The copy steps one small parameter for all of a group, shape, type and device, and a second one next to it in
    the same group. If gradients of the second ones (`with_others`) make no difference to the first, the optimizer
    updates each parameter by itself, and ranks can share them out. `attach` puts hooks on the trial's steps, and
    returns what removes them.
    """
    small: dict[int, Any] = {}  # by id of the original, as `deepcopy` has its memo
    kinds: dict[Hashable, nn.Parameter] = {}
    for each in with_wrapped([optimizer]):
        for number, group in enumerate(each.param_groups):
            for tensor in pytree.tree_leaves(group["params"]):
                shape = tuple(min(size, _TRIAL_SIZE) for size in tensor.shape)
                kind = number, shape, tensor.dtype, tensor.device
                if kind not in kinds:
                    value = torch.ones(shape, dtype=tensor.dtype, device=tensor.device)
                    kinds[kind] = nn.Parameter(value)
                small.setdefault(id(tensor), kinds[kind])
        for tensor in pytree.tree_leaves(list(each.state.values())):
            if isinstance(tensor, Tensor):
                small[id(tensor)] = tensor[tuple(slice(_TRIAL_SIZE) for _ in tensor.shape)].clone()
    observed = list(kinds.values())
    trial = object.__new__(type(optimizer))
    # `copy.deepcopy(optimizer)` would copy groups and states only. A `step` among its attributes is the wrapper of
    # a learning-rate scheduler, and steps the original.
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}
    vars(trial).update(copy.deepcopy(attributes, small))
    trial._optimizer_step_pre_hooks = OrderedDict()
    trial._optimizer_step_post_hooks = OrderedDict()
    others = {id(parameter): nn.Parameter(parameter.detach().clone()) for parameter in observed}
    optimizers = list(with_wrapped([trial]))
    # By id, since wrappers share lists and states with what they wrap; in a list, parameters that are one now.
    groups = [group for each in optimizers for group in each.param_groups]
    for members in {id(group["params"]): group["params"] for group in groups}.values():
        members[:] = dict.fromkeys(members)
        members += [others[id(parameter)] for parameter in members]
    for states in {id(each.state): each.state for each in optimizers}.values():
        of_others = {others[id(p)]: state for p, state in states.items() if id(p) in others}
        states.update({other: copy.deepcopy(state) for other, state in of_others.items()})
    with isolated_random_numbers(seed), torch.compiler.set_stance("force_eager"):
        if switches_weights(trial):
            trial.train()  # type: ignore[attr-defined]
        detach = attach(trial) if attach else lambda: None
        for scale in _TRIAL_SCALES:
            closure = partial(_give_gradients, scale, observed, others.values(), with_others)
            closure()
            trial.step(closure)
        detach()
    states_and_settings = list[Any]()
    for each in optimizers:
        states_and_settings += [each.state.get(parameter) for parameter in observed]
        states_and_settings += [{**group, "params": None} for group in each.param_groups]
        entries = vars(each).items()
        others_of = [v for n, v in entries if n not in ("state", "param_groups") and not _holds(v)]
        states_and_settings += others_of
    return [parameter.detach() for parameter in observed] + pytree.tree_leaves(states_and_settings)


@torch.no_grad()
def _give_gradients(
    scale: float,
    observed: Iterable[nn.Parameter],
    others: Iterable[nn.Parameter],
    with_others: bool,
) -> float:
    """Sets gradients that depend on the values of parameters, so that optimizers which look ahead are noticed."""
    for index, (parameter, other) in enumerate(zip(observed, others, strict=True)):
        slope = torch.linspace(-1, index + 2, parameter.numel(), device=parameter.device)
        slope = slope.view_as(parameter).to(parameter.dtype)
        parameter.grad = scale * (parameter + slope)
        other.grad = scale * (other - slope) if with_others else None
    return 1.0


def _holds(value: Any) -> bool:
    """Returns whether a value holds optimizers or parameters, which are compared elsewhere."""
    leaves = pytree.tree_leaves(value)
    return any(isinstance(leaf, (Optimizer, nn.Parameter)) for leaf in leaves)


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
