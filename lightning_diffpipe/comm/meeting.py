"""Where the processes of a run meet, and what they must have in common before there is a pipeline.

They meet at a store, in which each says that it has come:

    rank 0 | opens the store, has come     waits: a warning that names rank 2      all are there
    rank 1 |         connects, has come    waits                                   all are there
    rank 2 |                                                 connects, has come    all are there

Torch's own meeting says nothing for as long as it waits, and then not for whom.

Then every rank builds the module by itself. Rank 0's weights count where they differ, and its values where one is
asked for (`agree`); what one rank refuses, all refuse, with the same words (`on_all_ranks`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_diffpipe.comm.mesh import broadcast_object, connected_group, gathered_objects
from lightning_diffpipe.comm.packing import as_bytes
from lightning_diffpipe.comm.waiting import in_thread, in_words
from lightning_diffpipe.errors import (
    ConfigurationError,
    DiffPipeError,
    PipelineTimeoutError,
    raised_by_all,
)
from lightning_diffpipe.graph.versions import bytes_of

_log = logging.getLogger(__name__)
_NOTICE_S = 30.0  # imports from a cold disk take that long
_LONGEST_PAUSE_S = 0.5  # between two looks at who has come
_PLANNING_TIMEOUT_S = 1800.0
_FROZEN_S = 5.0  # after the store should have said who has not


def open_meeting_place() -> dist.TCPStore:
    """Opens the store where processes of this machine will meet, on a port that it takes at once.

    A port that was found free and given back could be anybody's seconds later, when rank 0 has come so far. The
    default process group of this process takes over the store of its `MASTER_PORT`, and keeps it.

    Returns:
        To be held until that group is there; its port is `.port`.
    """
    while True:
        place = _store("127.0.0.1", 0)
        try:
            _store("127.0.0.1", place.port)
        except dist.DistNetworkError:
            # PyTorch (2.13) finds shared stores in a table of their ports. An entry of a closed store stays there
            # when port 0 gives its port to a new one, until somebody looks for it in vain, as was done just now.
            continue
        return place


def _store(host: str, port: int) -> dist.TCPStore:
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True)


def meet(rank: int, num_ranks: int, patience_s: float, notice_s: float = _NOTICE_S) -> dist.Store:
    """Waits at the place in the environment (`MASTER_ADDR`, `MASTER_PORT`) until all ranks have come there.

    Args:
        rank: This one.
        num_ranks: All ranks.
        patience_s: After so long it is given up.
        notice_s: After so long a warning names the ranks that have not come.

    Returns:
        The store of the default process group to be made.

    Raises:
        ConfigurationError: Another process has the port.
        PipelineTimeoutError: Some ranks have not come, which it names.
    """
    arrival = _Arrival(rank, num_ranks, patience_s)
    # Of a store whose process is frozen, calls never return.
    arriving = in_thread(arrival.run, "diffpipe-meeting")
    if notice_s < patience_s and wait([arriving], notice_s).not_done:
        _log.warning("%s; it waits up to %g s", arrival.waited(notice_s), patience_s)
    if wait([arriving], max(patience_s - notice_s, 0.0) + _FROZEN_S).not_done:
        raise PipelineTimeoutError(arrival.waited(patience_s))
    try:
        return arriving.result()
    except RuntimeError as error:  # of torch
        if "EADDRINUSE" in str(error):
            raise ConfigurationError(
                f"port {arrival.place[1]}, where rank 0 lets all ranks meet, is in use by another process; "
                "give all ranks another MASTER_PORT (torchrun: --master-port, or --standalone, which finds one)"
            ) from error
        raise PipelineTimeoutError(f"{arrival.waited(patience_s)}: {error}") from error


@dataclass
class _Arrival:
    """How far one rank has come, and who else has."""

    rank: int
    num_ranks: int
    patience_s: float
    missing: list[int] | None = None  # not known before the store answers

    def __post_init__(self) -> None:
        self.place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # The store of torchrun may have seen an attempt that failed.
        self.name = f"diffpipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def run(self) -> dist.Store:
        """Tells the others that this rank has come, and waits for all of them.

        Returns:
            The store of the default process group to be made.
        """
        deadline_s = time.monotonic() + self.patience_s
        opens = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = dist.TCPStore(
            *self.place,
            is_master=opens,
            wait_for_workers=False,
            multi_tenant=opens,
            timeout=timedelta(seconds=self.patience_s / 2),  # it tries twice
        )
        turn = store.add(f"{self.name}/come/{self.rank}", 1)  # processes may meet more than once
        come, pause_s = [False] * self.num_ranks, 0.01
        while not all(come):
            for rank in range(self.num_ranks):
                come[rank] = come[rank] or store.add(f"{self.name}/come/{rank}", 0) >= turn
            self.missing = [rank for rank in range(self.num_ranks) if not come[rank]]
            if self.missing and time.monotonic() > deadline_s:
                raise PipelineTimeoutError(self.waited(self.patience_s))
            if self.missing:
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        return dist.PrefixStore(f"{self.name}/group/{turn}", store)

    def waited(self, seconds: float) -> str:
        """Returns the message about a wait: who has not come, and why perhaps."""
        host, port = self.place
        missing = self.missing
        if missing is None:
            why = "nobody has opened that place: rank 0, or the launcher, torchrun, starts slowly, has stopped, "
        elif len(missing) == 1:
            why = f"{in_words(missing)} has not come, and starts slowly, has stopped, "
        else:
            why = f"{in_words(missing)} have not come, and start slowly, have stopped, "
        return (
            f"rank {self.rank} could not meet all of {self.num_ranks} ranks at {host}:{port} within {seconds:g} s: "
            f"{why}or cannot be reached"
        )


@contextlib.contextmanager
def gloo_of_all_hosts() -> Iterator[None]:
    """Makes the first gloo group inside.

    Raises:
        ConfigurationError: This host gives an address that the others cannot reach, as Debian and Ubuntu do for
            their own name; plain data parallelism over NCCL does not notice.
    """
    try:
        yield
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        host = socket.gethostname()
        try:
            address = socket.gethostbyname(host)
        except OSError:
            address = "no address"
        raise ConfigurationError(
            f"processes cannot reach each other over gloo, which carries losses and errors beside NCCL: this host "
            f"({host}) gives its address as {address}. Set GLOO_SOCKET_IFNAME on every host to the network "
            f"interface between them (`ip -br addr` lists them), as NCCL_SOCKET_IFNAME does for NCCL. "
            f"torch said: {error}"
        ) from error


def world_group(world_size: int, timeout_s: float) -> dist.ProcessGroup | None:
    """Makes a group of all ranks for what comes before there is a pipeline; None where there is one rank only.

    It is patient, as rank 0 may measure for long.
    """
    if world_size == 1:
        return None
    with gloo_of_all_hosts():
        patience = timedelta(seconds=max(timeout_s, _PLANNING_TIMEOUT_S))
        return connected_group(None, "gloo", patience)


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
    equal, and then nothing but checksums travels.

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
    sums = torch.tensor([zlib.crc32(bytes_of(tensor)) for tensor in tensors])
    expected = sums.clone()
    dist.broadcast(expected, src=0, group=group)
    differs = (sums != expected).to(torch.uint8)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=group)
    with torch.no_grad():
        for tensor, differing in zip(tensors, differs.tolist(), strict=True):
            if differing:
                value = tensor.detach().cpu().contiguous()
                dist.broadcast(as_bytes(value), src=0, group=group)
                tensor.copy_(value)
