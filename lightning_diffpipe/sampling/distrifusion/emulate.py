"""All bands in one process: what N ranks compute, bit for bit, without N processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.sampling.distrifusion.sampler import DistriFusion
from lightning_diffpipe.sampling.links import Links
from lightning_diffpipe.sampling.loopback import LoopbackNetwork
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
    """
    network = LoopbackNetwork(num_bands, request.latents.device, link, timeout_s)

    def band(links: Links) -> tuple[Tensor, DistriFusion]:
        sampler = DistriFusion(request.model, links, **options)
        latents = sampler.sample(
            _with_own_generators(request), on_step if links.rank == 0 else None
        )
        return latents, sampler

    results = network.run(band)
    assert all(torch.equal(latents, results[0][0]) for latents, _ in results)
    return results[0][0], [sampler for _, sampler in results]


def _with_own_generators(request: Request) -> Request:
    """Threads must not draw from one generator."""
    arguments = {
        name: x.clone_state() if isinstance(x, torch.Generator) else x
        for name, x in request.step_kwargs.items()
    }
    return dataclasses.replace(request, step_kwargs=arguments)
