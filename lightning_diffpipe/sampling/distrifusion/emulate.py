"""All bands in one process: what N ranks compute, bit for bit, without N processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_diffpipe.comm.links import Links
from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.sampling.distrifusion.noise import OwnGenerators
from lightning_diffpipe.sampling.distrifusion.sampler import DistriFusion
from lightning_diffpipe.sampling.request import Request


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
    network = LoopbackNetwork(num_bands, request.latents.device, link, timeout_s)
    generators = OwnGenerators(request)
    requests = generators.of_each(num_bands)

    def band(links: Links) -> tuple[Tensor, DistriFusion]:
        sampler = DistriFusion(request.model, links, **options)
        return sampler.sample(requests[links.rank], on_step if links.rank == 0 else None), sampler

    results = network.run(band)
    generators.finish()
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
