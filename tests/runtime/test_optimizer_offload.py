"""Optimizers whose states lie elsewhere between steps: the same bits, and two slots."""

import copy
import weakref
from functools import partial

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_diffpipe.graph.placement import placeholder_of
from lightning_diffpipe.modules import Muon, Optimization, Prodigy
from lightning_diffpipe.runtime import optimizer_states
from lightning_diffpipe.runtime.optimizer_states import (
    OptimizerOffload,
    around_updates,
    may_be_offloaded,
)
from tests.distributed.tiny import Inheriting, Switching

SHAPES = (20, 30), (20,), (3, 30), (5,), (20, 29)
LARGEST = 20 * 30 * 4


def groups_of(parameters):
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0}]


def made(make):
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    return parameters, make(groups_of(parameters))


class FailingOnce(Inheriting):
    """Runs out of memory in its first update."""

    has_failed = False

    def _init_group(self, *arguments, **options):
        if not self.has_failed:
            self.has_failed = True
            raise torch.OutOfMemoryError
        return super()._init_group(*arguments, **options)


@pytest.mark.parametrize("closure", [None, lambda: 1.5])
def test_a_step_after_one_that_has_failed_is_one_of_its_own(closure):
    """History: it counted as part of that one, so that nobody was called before and after it, ever again."""
    calls = []
    _, optimizer = made(FailingOnce)
    around_updates(optimizer, lambda: calls.append("before"), lambda: calls.append("after"))
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step(closure)
    for _ in range(2):
        optimizer.step(closure)
    assert calls == ["before", *["before", "after"] * 2]


class Counting(torch.optim.SGD):
    """Counts its steps, and decays by that."""

    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.num_steps
        return super().step(closure)


class Listing(torch.optim.SGD):
    """Makes its states again in each step, and has some in a list."""

    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"]):
                if p.grad is not None:
                    state = self.state[p]
                    (before,) = state.get("sums", [torch.zeros_like(p)])
                    state["sums"] = [before + p.grad]
                    p.sub_(0.01 * state["sums"][0])
        return loss


ADAMW = partial(torch.optim.AdamW, lr=1e-2)


@pytest.mark.parametrize(
    "make",
    [
        ADAMW,
        partial(ADAMW, fused=True),
        partial(ADAMW, foreach=False, amsgrad=True),
        partial(torch.optim.Adagrad, lr=1e-2),  # has states before its first step
        partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
        partial(torch.optim.NAdam, lr=1e-2),
        partial(torch.optim.Adafactor, lr=1e-2),
        partial(Listing, lr=1e-2),
        partial(Inheriting, lr=1e-2),
        Muon,
    ],
)
@pytest.mark.parametrize("has_closure", [False, True])
def test_steps_bucket_by_bucket_are_those_of_all_parameters_to_the_last_bit(make, has_closure):
    """Another parameter has no gradient in each step; hooks are called as often, and gradients stay."""
    (ours, optimizer), (theirs, plain) = made(make), made(make)
    assert may_be_offloaded(optimizer)
    seen, offload = [], OptimizerOffload(torch.device("cpu"))
    detach = offload.attach(optimizer)
    for each in (optimizer, plain):
        each.register_step_post_hook(lambda which, *_: seen.append(which))
    of_all = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    hooks = [register(lambda which, *_: seen.append(which)) for register in of_all]
    for step in range(5):

        def closure(parameters, step=step):
            generator = torch.Generator().manual_seed(step)
            for index, p in enumerate(parameters):
                value = torch.randn(p.shape, generator=generator)
                p.grad = None if index == step else value
            return 1.5

        for parameters, each in ((ours, optimizer), (theirs, plain)):
            if has_closure:
                assert each.step(partial(closure, parameters)) == 1.5
            else:
                closure(parameters)
                each.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad)
    for hook in hooks:
        hook.remove()
    assert seen.count(optimizer) == seen.count(plain) >= 15
    got, wanted = optimizer.state_dict(), plain.state_dict()
    assert got["param_groups"] == wanted["param_groups"]
    leaves = (pytree.tree_leaves(each["state"]) for each in (got, wanted))
    for one, other in zip(*leaves, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    detach()
    copied = offload.num_bytes_copied
    optimizer.step()
    assert offload.num_bytes_copied == copied > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: Prodigy(groups, lr=1.0),
        partial(Counting, lr=1e-2),
        partial(Switching, lr=1e-2),
        lambda groups: torch.optim.LBFGS([p for group in groups for p in group["params"]]),
    ],
)
def test_optimizers_that_would_step_otherwise_are_told(make):
    _, optimizer = made(make)
    assert not may_be_offloaded(optimizer)


def test_a_stage_without_trained_parameters_has_no_states_to_keep():
    """It was an error on that rank."""
    placeholders = [placeholder_of(p, torch.device("cpu")) for p in made(ADAMW)[0]]
    optimizer = ADAMW(placeholders)
    assert may_be_offloaded(optimizer)
    OptimizerOffload(torch.device("cpu")).attach(optimizer)
    optimizer.step()
    assert not optimizer.state


def test_ready_made_modules_know_whether_their_states_may_leave():
    assert Optimization().may_be_offloaded()
    assert not Optimization(lr=1.0, optimizer=Prodigy).may_be_offloaded()


def test_no_more_than_two_buckets_are_on_the_device(monkeypatch):
    """Counted by the memory that is made for states on the device, until it is free."""
    parameters, optimizer = made(ADAMW)
    held, make = [0], optimizer_states._empty_like

    def counted(tensor, device, **pinned):
        new = make(tensor, device, **pinned)
        if not pinned:  # on the device
            held.append(held[-1] + new.nbytes)
            weakref.finalize(new, lambda num_bytes: held.append(held[-1] - num_bytes), new.nbytes)
        return new

    monkeypatch.setattr(optimizer_states, "_empty_like", counted)
    offload = OptimizerOffload(torch.device("cpu"))
    offload.attach(optimizer)
    places = set()
    for _ in range(3):
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        places.add(tuple(v.data_ptr() for v in pytree.tree_leaves([*optimizer.state.values()])[:2]))
        assert held[-1] == 0
    states = 2 * sum(p.nbytes for p in parameters)
    assert offload.num_bytes_copied == states + 2 * 2 * states
    assert LARGEST * 2 < max(held) <= 2 * LARGEST * 2 < states
    assert len(places) == 1, "memory of the host is used again"


class Failing(torch.optim.AdamW):
    """Has no room for one of its steps."""

    fails_at = None

    def step(self, closure=None):
        if self.fails_at is not None and self.fails_at.grad is not None:
            raise MemoryError
        return super().step(closure)


@pytest.mark.parametrize("fails", ["step", "memory"])
def test_a_step_that_fails_leaves_states_and_gradients_and_can_be_made_again(fails, monkeypatch):
    parameters, optimizer = made(partial(Failing, lr=1e-2))
    OptimizerOffload(torch.device("cpu")).attach(optimizer)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.deepcopy([optimizer.state[p] for p in parameters])
    if fails == "step":
        optimizer.fails_at = parameters[2]  # in the second bucket
    else:
        make, room = optimizer_states._empty_like, iter(range(3))

        def made_or_not(tensor, device, **pinned):
            if not pinned and next(room, None) is None:
                raise MemoryError
            return make(tensor, device, **pinned)

        monkeypatch.setattr(optimizer_states, "_empty_like", made_or_not)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in parameters)
    for p, state in zip(parameters, before, strict=True):
        if optimizer.state[p]["step"] == 1:
            assert all(torch.equal(optimizer.state[p][name], state[name]) for name in state)
    assert {int(optimizer.state[p]["step"]) for p in parameters} == (
        {1, 2} if fails == "step" else {1}
    )
    monkeypatch.undo()
    optimizer.fails_at = None
    steps = [int(optimizer.state[p]["step"]) for p in parameters]
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in parameters] == [n + 1 for n in steps]


def test_parameters_of_a_group_that_is_added_later_are_stepped_once():
    (ours, optimizer), (theirs, plain) = made(ADAMW), made(ADAMW)
    OptimizerOffload(torch.device("cpu")).attach(optimizer)
    for parameters, each in ((ours, optimizer), (theirs, plain)):
        parameters.append(nn.Parameter(torch.ones(4, 5)))
        each.add_param_group({"params": [parameters[-1]], "lr": 1e-3})
        for p in parameters:
            p.grad = p.detach().sin()
        each.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_loaded_state_dict_goes_to_the_host_and_on():
    (ours, optimizer), (theirs, plain) = made(ADAMW), made(ADAMW)
    offload = OptimizerOffload(torch.device("cpu"))
    offload.attach(optimizer)

    def step(parameters, each):
        for p in parameters:
            p.grad = p.detach().sin()
        each.step()

    step(theirs, plain)
    step(theirs, plain)
    saved = copy.deepcopy(plain.state_dict())
    with torch.no_grad():
        for one, other in zip(ours, theirs, strict=True):
            one.copy_(other)
    offload.load(optimizer, saved)
    assert optimizer.state_dict()["state"].keys() == saved["state"].keys()
    for _ in range(2):
        step(ours, optimizer)
        step(theirs, plain)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    later = optimizer.state_dict()["state"], plain.state_dict()["state"]
    for one, other in zip(*map(pytree.tree_leaves, later), strict=True):
        assert torch.equal(one, other)
