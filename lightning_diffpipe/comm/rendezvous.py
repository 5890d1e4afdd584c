"""The meeting of the processes of a run, and what they must have in common before there is a pipeline.

They meet at a store, where rank 0 says how to connect to it (`watcher.py`):

    rank 0 | opens the store      waits: a warning that names rank 2      all are there
    rank 1 |         connects     waits                                   all are there
    rank 2 |                                                 connects     all are there

Torch's own rendezvous says nothing for as long as it waits, and then not for whom.

Then every rank builds the module by itself. Rank 0's weights count where they differ, and its values where one is
asked for (`agree`); what one rank refuses, all refuse, with the same words (`on_all_ranks`).
"""

import contextlib
import logging
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_diffpipe.comm.mesh import broadcast_object, connected_group, gathered_objects
from lightning_diffpipe.comm.packing import as_bytes
from lightning_diffpipe.comm.waiting import in_thread, in_words
from lightning_diffpipe.comm.watcher import Watcher, watcher
from lightning_diffpipe.errors import (
    ConfigurationError,
    DiffPipeError,
    PipelineTimeoutError,
    raised_by_all,
)
from lightning_diffpipe.graph.placement import forget_stored, stored_value
from lightning_diffpipe.graph.versions import bytes_of, digest_of_tensor, plain_tensors

_log = logging.getLogger(__name__)
_NOTICE_S = 30.0  # imports from a cold disk take that long
_LONGEST_PAUSE_S = 0.5  # between two checks of who has come


def open_store() -> dist.TCPStore:
    """Opens the store where processes of this machine will meet, on a free port, which stays this process's own.

    The default process group takes over the store at `MASTER_PORT`; hold it until then. Its port is `.port`.
    """
    own_store = partial(
        dist.TCPStore, "127.0.0.1", is_master=True, wait_for_workers=False, multi_tenant=True
    )
    while True:
        store = own_store(0)
        try:
            own_store(store.port)
        except dist.DistNetworkError:
            # PyTorch (2.13) finds shared stores in a table of their ports. An entry of a closed store stays there
            # when port 0 gives its port to a new one, until somebody looks for it in vain, as was done just now.
            continue
        return store


def rendezvous(
    rank: int,
    num_ranks: int,
    timeout_s: float,
    patience_s: float,
    notice_s: float = _NOTICE_S,
    watcher: Watcher = watcher,
) -> dist.Store:
    """Waits until all ranks are connected; they watch each other from then on.

    They meet at the store of the default process group; if there is none, at the address in the environment
    (`MASTER_ADDR`, `MASTER_PORT`).

    Args:
        rank: Rank of this process.
        num_ranks: Number of all ranks.
        timeout_s: Longest silence of a connected rank, in seconds.
        patience_s: Longest wait for ranks that are not connected, in seconds.
        notice_s: Seconds after which a warning names the ranks that are not connected.
        watcher: Watcher of this process.

    Returns:
        The store of the default process group, made or to be made.

    Raises:
        ConfigurationError: Another process has the port; or rank 0 cannot be reached.
        LostRankError: A connected rank was lost.
        PipelineTimeoutError: Some ranks have not connected, which it names.
    """
    meeting = _Meeting(rank, num_ranks, watcher, patience_s)
    # In a thread, as a store that is frozen never answers.
    connecting = in_thread(partial(meeting.connect, timeout_s), "diffpipe-rendezvous")
    started_s, warn_after_s, pause_s = time.monotonic(), notice_s, 0.01
    while not connecting.done() or (connecting.exception() is None and watcher.missing()):
        watcher.refuse_loss()
        waited_s = time.monotonic() - started_s
        if waited_s > patience_s:
            raise PipelineTimeoutError(meeting.missing_after(patience_s))
        if waited_s > warn_after_s:
            warn_after_s = patience_s
            _log.warning("%s; it waits up to %g s", meeting.missing_after(notice_s), patience_s)
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
    watcher.refuse_loss()
    try:
        return connecting.result()
    except RuntimeError as error:  # of torch
        if "EADDRINUSE" in str(error):
            raise ConfigurationError(
                f"port {meeting.port}, where rank 0 lets all ranks meet, is in use by another process; "
                "give all ranks another MASTER_PORT (torchrun: --master-port, or --standalone, which finds one)"
            ) from error
        raise PipelineTimeoutError(f"{meeting.missing_after(patience_s)}: {error}") from error


class _Meeting:
    """The store at which ranks meet, and who is missing there."""

    def __init__(self, rank: int, num_ranks: int, watcher: Watcher, patience_s: float) -> None:
        self._rank, self._num_ranks, self._watcher = rank, num_ranks, watcher
        self._patience_s = patience_s
        self._host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self.port = int(os.environ.get("MASTER_PORT", "0"))
        self._store: dist.Store | None = None
        self._is_connected = False

    def connect(self, timeout_s: float) -> dist.Store:
        if dist.is_initialized():
            self._store = dist.distributed_c10d._get_default_store()
        else:
            opens = self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            self._store = dist.TCPStore(
                self._host,
                self.port,
                is_master=opens,
                multi_tenant=opens,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._patience_s),
            )
        prefix = self._watcher.connect(self._store, self._rank, self._num_ranks, timeout_s)
        self._is_connected = True
        return dist.PrefixStore(prefix, self._store)  # processes may meet more than once

    def missing_after(self, seconds: float) -> str:
        """Returns the words of an error, or a warning, that so many seconds were not enough."""
        missing = self._watcher.missing() if self._rank == 0 or self._is_connected else [0]
        who = f"{in_words(missing)} {'have' if len(missing) > 1 else 'has'} not come"
        if self._store is None:
            who = "nobody has opened that place: rank 0, or the launcher, torchrun"
        return (
            f"rank {self._rank} could not meet all of {self._num_ranks} ranks at {self._host}:{self.port} within "
            f"{seconds:g} s: {who}: slow to start, stopped, or out of reach"
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
            f"processes cannot reach each other over gloo, which carries losses and errors next to NCCL: this host "
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
        patience = timedelta(seconds=max(timeout_s, watcher.patience_s))
        return connected_group(None, "gloo", patience)


def close_group(group: dist.ProcessGroup | None) -> None:
    """Destroys the group, on all of its ranks."""
    if group is not None:
        dist.destroy_process_group(group)


def agree(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Returns rank 0's value on every rank."""
    return value if group is None else broadcast_object(value, 0, group)


def on_all_ranks(make: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Returns what `make`, which communicates with no rank, gives here; raises the first rank's error on all."""
    if group is None:
        return make()
    value, own_error = None, None
    try:
        value = make()
    except DiffPipeError as error:
        own_error = error
    for first in filter(None, gathered_objects(own_error, group)):
        # This rank's own error knows where it was raised.
        with raised_by_all():
            raise own_error if str(own_error) == str(first) else first
    return value


def require_equal(digest: str, group: dist.ProcessGroup | None) -> None:
    """Raises ConfigurationError on ranks that see other layers than rank 0, by the digests of their graphs."""
    if group is None:
        return
    digests = gathered_objects(digest, group)
    if len(set(digests)) > 1:
        ranks = [rank for rank, other in enumerate(digests) if other != digests[0]]
        raise ConfigurationError(
            f"ranks {ranks} see other layers in training_step than rank 0; build the same module with "
            "the same options on every rank, and keep rank-dependent branches out of training_step"
        )


def _checksum(tensor: Tensor) -> int:
    """Returns a checksum of all bytes, or of samples of what is mapped from a file."""
    if (stored := stored_value(tensor)) is not None:
        return zlib.crc32(digest_of_tensor(stored).encode())
    checksum = 0
    for plain in plain_tensors(tensor):
        checksum = zlib.crc32(bytes_of(plain), checksum)
    return checksum


def align_parameters(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Gives every rank rank 0's weights where they differ.

    Without `seed_everything` each process initialises other weights; from checkpoints they are
    equal, and then nothing but checksums travels. Checksums of mapped files are those of samples.

    Raises:
        ConfigurationError: A rank has other tensors than rank 0; names the first.
    """
    if group is None:
        return
    named = dict([*module.named_parameters(), *module.named_buffers()])
    tensors = [named[name] for name in sorted(named)]  # ranks may have them in another order
    kinds = {name: f"{tuple(x.shape)} of {x.dtype}" for name, x in named.items()}
    first, here = agree(kinds, group), dist.get_rank()

    def require_same_tensors() -> None:
        name = next((n for n in {**first, **kinds} if first.get(n) != kinds.get(n)), None)
        if name is not None:
            raise ConfigurationError(
                f"ranks built different modules: {name!r} is {kinds.get(name, 'missing')} on rank {here}, and "
                f"{first.get(name, 'missing')} on rank 0; build the same module with the same options on every rank"
            )

    on_all_ranks(require_same_tensors, group)
    sums = torch.tensor([_checksum(tensor) for tensor in tensors])
    expected = sums.clone()
    dist.broadcast(expected, src=0, group=group)
    differs = (sums != expected).to(torch.uint8)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=group)
    with torch.no_grad():
        for tensor, differing in zip(tensors, differs.tolist(), strict=True):
            if differing:
                forget_stored(tensor)
                for plain in plain_tensors(tensor):
                    value = plain.detach().cpu().contiguous()
                    dist.broadcast(as_bytes(value), src=0, group=group)
                    plain.copy_(value)
