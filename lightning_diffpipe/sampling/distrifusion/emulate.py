"""All bands in one process: what N ranks compute, bit for bit, without N processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from lightning_diffpipe.comm.links import Links
from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.sampling.distrifusion.sampler import DistriFusion
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.schedulers import takes_generator


def emulate(
    request: Request,
    num_bands: int,
    link: Link | None = None,
    on_step: Callable[[int], None] | None = None,
    timeout_s: float = 300.0,
    **options: Any,
) -> tuple[Tensor, list[DistriFusion]]:
    """Samples with as many bands, each in a thread.

    Args:
        request: What is sampled.
        num_bands: Ranks to emulate.
        link: How fast messages travel; None means at once.
        on_step: Called by band 0.
        timeout_s: How long any wait may last.
        options: Of `DistriFusion`.

    Returns:
        The final latents, and the samplers of all bands with their statistics.

    Raises:
        ConfigurationError: The bands drew other noise.
    """
    device, default = request.latents.device, None
    if request.step_kwargs.get("generator") is None and takes_generator(request.scheduler):
        default = torch.default_generator
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            default = torch.cuda.default_generators[index]
    network = LoopbackNetwork(num_bands, device, link, timeout_s)
    requests = [_with_own_generators(request, default) for _ in range(num_bands)]

    def band(links: Links) -> tuple[Tensor, DistriFusion]:
        sampler = DistriFusion(request.model, links, **options)
        return sampler.sample(requests[links.rank], on_step if links.rank == 0 else None), sampler

    results = network.run(band)
    if default is not None:  # goes on where the copy of band 0 is, as in one process
        default.set_state(requests[0].step_kwargs["generator"].get_state())
    latents = results[0][0]
    for rank, (found, _) in enumerate(results):
        if not torch.allclose(found, latents, rtol=0.0, atol=0.0, equal_nan=True):
            name = type(request.scheduler).__name__
            raise ConfigurationError(
                f"bands 0 and {rank} of {num_bands} stepped to other latents: {name} or the request's closure "
                "draws from torch's default generator, which these bands share as threads of one process; give "
                "it a generator or a seed of its own, or sample with processes"
            )
    return latents, [sampler for _, sampler in results]


def _with_own_generators(request: Request, default: torch.Generator | None) -> Request:
    """A request for a thread that draws as if it were a process; from a copy of the default generator if given."""
    copies: dict[int, torch.Generator] = {}  # samples may share one

    def copy(x: torch.Generator) -> torch.Generator:
        return copies.setdefault(id(x), x.clone_state())

    given = dict(request.step_kwargs) | ({} if default is None else {"generator": default})
    arguments = pytree.tree_map_only(torch.Generator, copy, given)
    return dataclasses.replace(request, step_kwargs=arguments)
