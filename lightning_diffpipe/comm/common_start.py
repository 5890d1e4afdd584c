"""What all ranks must have in common before there is a pipeline: seed, weights, layers, and how it goes wrong.

Every rank builds the module by itself. Rank 0's weights count where they differ, and its values where one is asked
for; what one rank refuses, all refuse, with the same words.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_diffpipe.comm.meeting import gloo_of_all_hosts
from lightning_diffpipe.comm.mesh import broadcast_object, gathered_objects
from lightning_diffpipe.errors import ConfigurationError, DiffPipeError, raised_by_all

_PLANNING_TIMEOUT_S = 1800.0


def world_group(world_size: int, timeout_s: float) -> dist.ProcessGroup | None:
    """A group of all ranks for what comes before there is a pipeline; None where there is one rank only.

    It is patient, as rank 0 may measure for long.
    """
    if world_size == 1:
        return None
    with gloo_of_all_hosts():
        patience = timedelta(seconds=max(timeout_s, _PLANNING_TIMEOUT_S))
        return dist.new_group(backend="gloo", timeout=patience)


def close_group(group: dist.ProcessGroup | None) -> None:
    """Gives the group up again, on all of its ranks."""
    if group is not None:
        dist.destroy_process_group(group)


def agree(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Rank 0's value on every rank."""
    if group is None:
        return value
    return broadcast_object(value, 0, group)


def on_all_ranks(make: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """What `make`, which talks to nobody, returns here; if it is refused on any rank, the same error on all."""
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
    """
    if group is None:
        return
    tensors = [*module.parameters(), *module.buffers()]
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
    """Two sums that tell different weights apart, NaN counted as a value."""
    value = torch.nan_to_num(tensor.detach().cpu().to(torch.float64).reshape(-1))
    weights = torch.arange(1, value.numel() + 1, dtype=torch.float64)
    return torch.stack([value.sum(), (value * (weights % 8191)).sum()])
