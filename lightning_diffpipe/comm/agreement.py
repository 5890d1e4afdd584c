"""How ranks agree: on what they must have in common before there is a pipeline, and on what to do between steps.

**Before**: seed, weights, layers, and errors. Every rank builds the module by itself. Rank 0's weights count where
they differ, and its values where one is asked for; what one rank refuses, all refuse, with the same words.

**Between steps** (`Agreement`): yes or no, whether to stop, whether to validate. The answer travels along a tree,
on the host, and comes from rank 0:

    rank 0 ─┬─ 1                    first ranks of pipelines answer to rank 0,
            ├─ 2                    all others to the first rank of their pipeline
            └─ 4 ─┬─ 5
                  └─ 6

Every rank waits for the answer from above, and none for wishes from below: they are read in the next round, when
they have long arrived. So a rank that is still busy with the step before delays none that has work to do.

Between steps ranks may be busy for long, saving or drawing. Rank 0, which does most of that, is waited for here, as
patiently as for weights; another rank is missed in the step, after `timeout_s`. One that is gone is missed at once.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_diffpipe.comm.meeting import gloo_of_all_hosts
from lightning_diffpipe.comm.mesh import Mesh, broadcast_object, gathered_objects
from lightning_diffpipe.errors import ConfigurationError, DiffPipeError, raised_by_all

_PLANNING_TIMEOUT_S = 1800.0


def world_group(world_size: int, timeout_s: float) -> dist.ProcessGroup | None:
    """Makes a group of all ranks for what comes before there is a pipeline; None where there is one rank only.

    It is patient, as rank 0 may measure for long.
    """
    if world_size == 1:
        return None
    with gloo_of_all_hosts():
        patience = timedelta(seconds=max(timeout_s, _PLANNING_TIMEOUT_S))
        return dist.new_group(backend="gloo", timeout=patience)


def close_group(group: dist.ProcessGroup | None) -> None:
    """Destroys the group, on all of its ranks."""
    if group is not None:
        dist.destroy_process_group(group)


def agree(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Returns rank 0's value on every rank."""
    if group is None:
        return value
    return broadcast_object(value, 0, group)


def on_all_ranks(make: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Returns what `make`, which communicates with no rank, gives here; raises the first rank's error on all."""
    if group is None:
        return make()
    value, error = None, None
    try:
        value = make()
    except DiffPipeError as raised:
        error = raised
    errors = gathered_objects(error, group)
    first = next((each for each in errors if each is not None), None)
    if first is not None:
        # This rank's own one, which knows where it was raised, if it says the same.
        with raised_by_all():
            raise error if error is not None and str(error) == str(first) else first
    return value


def require_equal(digest: str, group: dist.ProcessGroup | None) -> None:
    """Refuses ranks that see other layers than rank 0, by the digest of their graphs.

    Raises:
        ConfigurationError: There are some; names them.
    """
    if group is None:
        return
    digests = gathered_objects(digest, group)
    if len(set(digests)) > 1:
        ranks = [rank for rank, other in enumerate(digests) if other != digests[0]]
        raise ConfigurationError(
            f"ranks {ranks} see other layers in training_step than rank 0; build the same module with "
            "the same options on every rank, and keep rank-dependent branches out of training_step"
        )


def align_parameters(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Gives every rank rank 0's weights where they differ.

    Without `seed_everything` each process initialises other weights; from checkpoints they are
    equal, and then nothing but sums travels.

    Raises:
        ConfigurationError: A rank has other tensors than rank 0; names the first.
    """
    if group is None:
        return
    named = dict([*module.named_parameters(), *module.named_buffers()])
    tensors = [named[name] for name in sorted(named)]  # ranks may have them in another order
    own = {name: f"{tuple(x.shape)} of {x.dtype}" for name, x in named.items()}
    first, here = agree(own, group), dist.get_rank()

    def require_same_tensors() -> None:
        name = next((n for n in {**first, **own} if first.get(n) != own.get(n)), None)
        if name is not None:
            raise ConfigurationError(
                f"ranks built different modules: {name!r} is {own.get(name, 'missing')} on rank {here}, and "
                f"{first.get(name, 'missing')} on rank 0; build the same module with the same options on every rank"
            )

    on_all_ranks(require_same_tensors, group)
    sums = torch.stack([_checksum(tensor) for tensor in tensors]) if tensors else torch.zeros(0, 2)
    expected = sums.clone()
    dist.broadcast(expected, src=0, group=group)
    differs = (sums != expected).any(dim=1).to(torch.uint8)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=group)
    with torch.no_grad():
        for tensor, differing in zip(tensors, differs.tolist(), strict=True):
            if differing:
                value = tensor.detach().cpu().contiguous()
                dist.broadcast(value.reshape(-1).view(torch.uint8), src=0, group=group)
                tensor.copy_(value)


def _checksum(tensor: Tensor) -> Tensor:
    """Returns two sums that tell different weights apart, NaN counted as a value."""
    value = torch.nan_to_num(tensor.detach().cpu().to(torch.float64).reshape(-1))
    weights = torch.arange(1, value.numel() + 1, dtype=torch.float64)
    return torch.stack([value.sum(), (value * (weights % 8191)).sum()])


_TAG = 3_666_666


class _Neighbour(NamedTuple):
    """A rank of the world one step up or down the tree, and where to talk to it."""

    rank: int
    group: dist.ProcessGroup | None


class _Vote(NamedTuple):
    """A yes or no, on its way to or from a rank."""

    peer: int
    value: Tensor
    work: dist.Work | None


class Agreement:
    """Lets all ranks of the world decide together; every rank must make the same calls.

    Args:
        mesh: This rank's groups.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        layout = mesh.layout
        self._above: _Neighbour | None = None
        self._below: list[_Neighbour] = []
        if mesh.local_rank:
            self._above = _Neighbour(mesh.world_rank(0), mesh.transfers)
        else:
            firsts = range(0, layout.world_size, layout.ranks_per_pipeline)
            if mesh.pipeline:
                self._above = _Neighbour(firsts[0], mesh.data_parallel)
            else:
                self._below = [_Neighbour(first, mesh.data_parallel) for first in firsts[1:]]
            self._below += [_Neighbour(rank, mesh.transfers) for rank in mesh.pipeline_ranks[1:]]
        self._asked = False
        self._wishes: list[_Vote] = []  # of the latest round, from below
        self._sent: list[_Vote] = []  # until sent, as gloo sends when the other end receives

    def of_any(self, wish: bool, last: bool = False) -> bool:
        """Returns whether any rank has wished for it; a wish takes a round for each step up the tree.

        Args:
            wish: This rank's.
            last: Wait for the wishes of this round, too, and leave nothing under way.

        Raises:
            PipelineTimeoutError: A neighbour in the tree is gone, or silent for too long.
        """
        self._await_all(self._sent)
        self._read(wish)
        self._wishes = [self._receive(neighbour) for neighbour in self._below]
        if last:
            self._read(wish)
        if self._above is not None:
            self._send(self._above, self._asked)
        decision = self._pass_down(self._asked)
        if last or decision:  # who goes now may not come back
            self._await_all(self._sent)
        return decision

    def of_first(self, decision: bool) -> bool:
        """Returns what rank 0 has decided, whatever others would.

        Raises:
            PipelineTimeoutError: As `of_any`.
        """
        self._await_all(self._sent)
        return self._pass_down(decision)

    def _pass_down(self, decision: bool) -> bool:
        if self._above is not None:
            message = self._receive(self._above)
            self._await(message)
            decision = bool(message.value)
        for neighbour in self._below:
            self._send(neighbour, decision)
        return decision

    def _read(self, wish: bool) -> None:
        values = [message.value for message in self._wishes]
        self._await_all(self._wishes)
        self._asked = self._asked or wish or any(map(bool, values))

    def _send(self, neighbour: _Neighbour, value: bool) -> None:
        buffer = torch.tensor([value], dtype=torch.uint8)
        with self._mesh.naming([neighbour.rank]):
            work = dist.isend(buffer, neighbour.rank, group=neighbour.group, tag=_TAG)
        self._sent.append(_Vote(neighbour.rank, buffer, work))

    def _receive(self, neighbour: _Neighbour) -> _Vote:
        buffer = torch.zeros(1, dtype=torch.uint8)
        with self._mesh.naming([neighbour.rank]):
            work = dist.irecv(buffer, neighbour.rank, group=neighbour.group, tag=_TAG)
        return _Vote(neighbour.rank, buffer, work)

    def _await_all(self, messages: list[_Vote]) -> None:
        while messages:
            self._await(messages.pop(0))

    def _await(self, message: _Vote) -> None:
        assert message.work is not None
        with self._mesh.naming([message.peer]):
            message.work.wait(datetime.timedelta(seconds=self._mesh.patience_s))
