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
    network = LoopbackNetwork(num_bands, request.latents.device, link, timeout_s)
    generators = OwnGenerators(request)
    requests = [generators.copied() for _ in range(num_bands)]

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


class OwnGenerators:
    """Generators for threads that each run a request, as if each were a process."""

    def __init__(self, request: Request) -> None:
        self._request = request
        given = request.step_kwargs.get("generator")
        self._default: torch.Generator | None = None
        if given is None and takes_generator(request.scheduler):
            device = request.latents.device
            if device.type == "cuda":
                index = torch.cuda.current_device() if device.index is None else device.index
                self._default = torch.cuda.default_generators[index]
            else:
                self._default = torch.default_generator
        self._copies: list[torch.Generator] = []

    def finish(self) -> None:
        """The default generator goes on where the first thread's copy is, as in one process."""
        if self._default is not None:
            self._default.set_state(self._copies[0].get_state())

    def copied(self) -> Request:
        """The request with generators of its own, for one more thread."""
        copies: dict[int, torch.Generator] = {}  # samples may share one

        def copy(x: torch.Generator) -> torch.Generator:
            return copies.setdefault(id(x), x.clone_state())

        given = dict(self._request.step_kwargs)
        arguments = pytree.tree_map_only(torch.Generator, copy, given)
        if self._default is not None:
            self._copies.append(self._default.clone_state())
            arguments["generator"] = self._copies[-1]
        return dataclasses.replace(self._request, step_kwargs=arguments)
