"""What NCCL does otherwise than gloo, as far as a CPU can show it: gloo under NCCL's rules.

* Communicators are made by the first operation that needs one, and that call blocks the host until all members
  have made it: two ranks for a message, the whole group for a sum or a batch of messages.
* Messages have no tags: the ends of a communicator see them in one order.
* `wait` orders streams and does not block the host; with a timeout it would.
* What has begun runs on the device, so whoever waits for the device waits for all of it.

    device = pretend_nccl()     # in a process of its own: nothing is put back
    DiffPipeStrategy(process_group_backend="nccl")
    device.synchronize()        # anywhere, in place of torch.cuda.synchronize()
"""

import datetime
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

_PATIENCE = datetime.timedelta(seconds=20)


class Operation(NamedTuple):
    """Stands for `dist.P2POp`."""

    run: Callable[..., Any]
    tensor: Any
    peer: int
    group: Any
    tag: int = 0


class Work:
    """Stands for a work of NCCL."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._is_over = False

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        assert timeout is None, "on NCCL a wait with a timeout blocks the host"
        if not self._is_over:  # a message of gloo can be waited for once
            self._work.wait()
            self._is_over = True
        return True

    def is_completed(self) -> bool:
        return self._is_over or self._work.is_completed()


class Device:
    """What has begun and may not be over."""

    def __init__(self) -> None:
        self._begun: list[Work] = []
        self.num_waits = 0

    def runs(self, work: Any) -> Work:
        """Something begins."""
        self._begun.append(Work(work))
        return self._begun[-1]

    def synchronize(self) -> None:
        """Waits for all that has begun."""
        for work in self._begun:
            work.wait()
        self.num_waits += bool(self._begun)
        self._begun.clear()


class _Communicators:
    """Groups that behave as those of NCCL, and which of their communicators exist."""

    def __init__(self) -> None:
        self.members: dict[Any, list[int]] = {}
        self._made: set[str] = set()
        self._store = dist.distributed_c10d._get_default_store()

    def meet(self, group: Any, ranks: Sequence[int]) -> None:
        """Blocks until all of these ranks need the same communicator."""
        key = f"nccl/{group.group_name}/{sorted(ranks)}"
        if key not in self._made:
            self._made.add(key)
            self._store.set(f"{key}/{dist.get_rank()}", "here")
            self._store.wait([f"{key}/{rank}" for rank in ranks], _PATIENCE)


def pretend_nccl() -> Device:
    """From now on groups of the backend "nccl" are gloo's under NCCL's rules, in this process."""
    real, made = {name: getattr(dist, name) for name in dir(dist)}, _Communicators()
    device = Device()

    def new_group(ranks: Any = None, *, backend: Any = None, **options: Any) -> Any:
        alike = backend == "nccl"
        group = real["new_group"](ranks, backend="gloo" if alike else backend, **options)
        everybody = list(range(dist.get_world_size()))
        if alike and isinstance(group, dist.ProcessGroup):
            made.members[group] = everybody if ranks is None else list(ranks)
        return group

    def one_sided(name: str, peer_name: str) -> Callable[..., Any]:
        def call(
            tensor: Any, peer: Any = None, group: Any = None, tag: int = 0, **named: Any
        ) -> Any:
            peer = named.get(peer_name, peer)
            if group not in made.members:
                return real[name](tensor, peer, group, tag)
            made.meet(group, [dist.get_rank(), peer])
            work = real[name](tensor, peer, group)
            return device.runs(work) if name in ("isend", "irecv") else work

        return call

    def collective(name: str) -> Callable[..., Any]:
        def call(*args: Any, group: Any = None, **named: Any) -> Any:
            if group not in made.members:
                return real[name](*args, group=group, **named)
            made.meet(group, made.members[group])
            work = real[name](*args, group=group, **named)
            return device.runs(work) if named.get("async_op") else work

        return call

    def batch(operations: Sequence[Operation]) -> list[Any]:
        if (group := operations[0].group) in made.members:
            made.meet(group, made.members[group])
        sends = {dist.isend: real["isend"], dist.irecv: real["irecv"]}
        alike = group in made.members
        works = [sends[o.run](o.tensor, o.peer, group, 0 if alike else o.tag) for o in operations]
        return [device.runs(work) if alike else work for work in works]

    for name, peer in (("isend", "dst"), ("irecv", "src"), ("send", "dst"), ("recv", "src")):
        setattr(dist, name, one_sided(name, peer))
    for name in ("all_reduce", "broadcast"):
        setattr(dist, name, collective(name))
    dist.new_group, dist.P2POp, dist.batch_isend_irecv = new_group, Operation, batch
    dist.is_backend_available = lambda name: True
    return device
