"""Ranks that hold different layers run any code together, in lock step.

A result of any type reaches the other ranks, its tensors on their devices.
"""

import contextlib
import copy
import dataclasses
import io
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from torch import nn

from lightning_diffpipe.comm import mesh
from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.errors import ForeignLayerError
from lightning_diffpipe.graph.placement import is_placeholder, place_parameters
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.runtime.relay import RelayChannel, RelayView
from tests.graph.emulate import intercepted
from tests.graph.steps import Block, Tower, rows


class Share:
    """Hands one rank's output to all, like a broadcast, between threads."""

    def __init__(self, num_ranks):
        self.barrier = threading.Barrier(num_ranks, timeout=20)
        self.box, self.calls = None, []

    def of(self, rank):
        def share(owner, output):
            if rank == owner:
                self.box = output
                self.calls.append(owner)
            self.barrier.wait()
            output = self.box
            self.barrier.wait()
            if isinstance(output, tuple) and rank != owner:
                # Threads share the generators: restored late, they would go back while the owner draws again.
                output = output[0], None
            return output

        return share


def on_all_ranks(root, owner_of, work, twice=False):
    """Runs `work(module)` on copies of a module that hold the parameters owned by their rank.

    `owner_of(name)` is a rank, or None for parameters and buffers that all ranks hold.
    """
    names = [n for n, _ in (*root.named_parameters(), *root.named_buffers())]
    owners = {n: owner_of(n) for n in names if owner_of(n) is not None}
    num_ranks = max(owners.values()) + 1
    share, results, errors = Share(num_ranks), [None] * num_ranks, []

    def run(rank, module):
        try:
            with intercepted(module) as interception, torch.no_grad():
                here = {n for n, _ in root.named_parameters() if owners.get(n, rank) == rank}
                gone = place_parameters(module, here, "cpu")
                interception.refuse(dict.fromkeys(gone, "another rank"))
                view = RelayView(module, interception, owners, share.of(rank))
                with view.active(), view.active() if twice else contextlib.nullcontext():
                    results[rank] = work(module)
        except BaseException as error:
            errors.append(error)
            share.barrier.abort()

    modules = [copy.deepcopy(root) for _ in range(num_ranks)]
    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(modules)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if real or errors:
        raise (real or errors)[0]
    return results, share.calls


def by_block(name):
    return int(name.split(".")[1]) // 3 if name.startswith("blocks") else None


def validate(module):
    return module.run(rows()).pow(2).mean()


def check_alike(root, owner_of, calls, work=validate, **options):
    """All ranks get the result of one process, by messages of these owners."""
    results, made = on_all_ranks(root, owner_of, work, **options)
    assert all(torch.equal(result, validate(root)) for result in results)
    assert made == calls


class Halves(Tower):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Block(), Block()) for _ in range(2)])


@pytest.mark.parametrize(
    ("root", "owner_of", "calls", "twice"),
    [
        (Tower, by_block, [0, 0, 0, 1, 1, 1], False),
        # The outermost call on one rank is one message.
        (Halves, lambda name: int(name.split(".")[1]), [0, 1], False),
        # Modules that all ranks hold run everywhere.
        (Tower, lambda name: 1 if name.startswith("blocks.5") else None, [1], False),
        # History: `whole_model()` inside `validation_step` let ranks wait for each other beyond every limit.
        (Tower, by_block, [0, 0, 0, 1, 1, 1], True),
    ],
)
def test_all_ranks_get_the_result_of_one_process(root, owner_of, calls, twice):
    check_alike(root(), owner_of, calls, twice=twice)


@pytest.mark.parametrize(
    "move",
    [
        lambda module: module.to("cpu"),
        lambda module: module.to(torch.device("cpu"), torch.float32),
        lambda module: module.cpu(),
    ],
)
def test_a_module_is_moved_to_where_it_is_without_its_weights(move):
    """History: diffusers' `pipe.to(self.device)` in a validation_step brought all weights to all ranks."""
    check_alike(Tower(), by_block, [0, 0, 0, 1, 1, 1], lambda module: validate(move(module)))


def test_parameters_read_between_modules_are_lent():
    """By a container's own code, and as tied weights."""

    class Scaled(Tower):
        def __init__(self):
            super().__init__()
            self.body = Tower()
            self.body.scale = nn.Parameter(torch.full((16,), 1.5))

        def run(self, x):
            assert self.body.scale.shape == (16,)
            x = self.body.run(x) * self.body.scale
            return x @ self.blocks[0].linear.weight.t() + torch.cat([self.body.scale] * 1)

    root = Scaled()
    owner = lambda name: 0 if "blocks.0" in name or "blocks.1" in name else 1
    results, calls = on_all_ranks(root, owner, lambda module: (validate(module), validate(module)))
    assert torch.equal(results[0][1], validate(root))
    assert torch.equal(results[1][0], validate(root))
    assert calls.count(0) + calls.count(1) == 2 * 6 + 2  # each parameter is borrowed once


def test_running_statistics_are_read_where_they_are_kept():
    """History: a batch norm without parameters ran on every rank, with statistics that only one had."""

    class Normed(Tower):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(16, affine=False).eval()

        def run(self, x):
            return self.norm(super().run(x))

    def validate_after_training(module):
        if not is_placeholder(module.blocks[5].linear.weight):  # on the rank that keeps them
            module.norm.running_mean.fill_(3.0)
        return validate(module)

    root = Normed()
    owner = lambda name: 1 if name.startswith("norm") else by_block(name)
    results, calls = on_all_ranks(root, owner, validate_after_training)
    assert calls == [0, 0, 0, 1, 1, 1, 1]
    root.norm.running_mean.fill_(3.0)
    assert torch.equal(results[0], validate(root))
    assert torch.equal(results[1], validate(root))


def test_wrappers_for_the_relay_are_gone_afterwards():
    root = Tower()
    with intercepted(root) as interception:
        owners = {name: 0 for name, _ in root.named_parameters()}
        with RelayView(root, interception, owners, lambda owner, output: output).active():
            assert "forward" in root.blocks[0].linear.__dict__
        assert "forward" not in root.blocks[0].linear.__dict__


def test_errors_of_one_rank_are_not_hidden():
    class Broken(Block):
        def forward(self, x):
            raise RuntimeError("no more memory")

    root = Tower()
    root.blocks[1] = Broken()
    with pytest.raises(RuntimeError, match="no more memory"):
        on_all_ranks(root, by_block, validate)


CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")


class NoTensors(pickle.Pickler):
    """A tensor in a pickle comes back on a device of whoever wrote it."""

    def persistent_id(self, value: Any) -> None:
        assert not isinstance(value, torch.Tensor | torch.device), f"pickled: {value}"


class Wire:
    """Stands for `torch.distributed`: what the owner, who is asked first, sends is what the other receives."""

    def __init__(self):
        self.sent = []

    def broadcast_object_list(self, box, src, group):
        if self.owner_sends:
            file = io.BytesIO()
            NoTensors(file).dump(box)
            self.sent.append(file.getvalue())
        else:
            box[:] = pickle.loads(self.sent.pop(0))

    def barrier(self, group):
        pass

    def broadcast(self, buffer, src, group, async_op):
        if self.owner_sends:
            self.sent.append(buffer)
        else:
            buffer.copy_(self.sent.pop(0))
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def relayed(monkeypatch):
    """Sends a value from rank 0 to rank 1, and returns what that one gets."""
    wire = Wire()
    monkeypatch.setattr(mesh, "dist", wire)
    placement = Placement.of_replicas([1, 1])

    def on(rank, device, output):
        wire.owner_sends = rank == 0
        own = Mesh(RankLayout(2, placement), rank, device, "gloo", 1.0)
        return RelayChannel(own)(0, output)

    def send(output, device=CPU):
        assert on(0, CPU, output) is output
        got = on(1, device, None)
        assert not wire.sent, "something was sent that nobody receives"
        return got

    send.on = on
    return send


@dataclasses.dataclass
class Plain:
    """Not registered with pytree."""

    values: torch.Tensor
    again: torch.Tensor
    device: torch.device
    name: str = "a"


def test_tensors_inside_objects_arrive_on_the_device_of_the_rank(relayed):
    """History: they were pickled, and came back on the owner's device, so that rank 1 computed on rank 0's."""
    normal = torch.distributions.Normal(torch.randn(2, 3), torch.ones(2, 3))
    posterior = DiagonalGaussianDistribution(torch.randn(1, 4, 2, 2))
    shared = torch.randn(3)
    output = (normal, {"latent": AutoencoderKLOutput(posterior)}, Plain(shared, shared, CPU))
    got_normal, got_latent, plain = relayed(output)
    assert torch.equal(got_normal.loc, normal.loc)
    assert torch.equal(got_normal.scale, normal.scale)
    assert torch.equal(got_latent["latent"].latent_dist.mode(), posterior.mode())
    assert torch.equal(plain.values, shared)
    assert plain.values is plain.again
    assert plain.name == "a"
    normal, latent, plain = relayed(output, ELSEWHERE)
    found = [normal.loc, normal.scale, latent["latent"].latent_dist.parameters, plain.values]
    assert {tensor.device for tensor in found} == {ELSEWHERE}
    assert plain.device == ELSEWHERE


@pytest.mark.parametrize("output", [None, 3, torch.randn(2, 3), [torch.empty(0, 4), "x"]])
def test_plain_outputs(relayed, output):
    """History: a tensor without elements arrived as its description."""
    got = relayed(output)
    assert type(got) is type(output)
    expected, got = (pytree.tree_leaves(value) for value in (output, got))
    assert [str(leaf) for leaf in got] == [str(leaf) for leaf in expected]


def test_what_cannot_travel_is_refused_on_all_ranks(relayed):
    """History: the owner raised pickle's error, and the other ranks waited for it until the timeout."""
    reason = r"a layer returns a function, which cannot be sent .*return tensors"
    with pytest.raises(ForeignLayerError, match=reason):
        relayed.on(0, CPU, lambda: None)
    with pytest.raises(ForeignLayerError, match=reason):
        relayed.on(1, CPU, None)
