"""What DistriFusion on several ranks is compared with: its bands as threads of one process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_diffpipe.comm.links import Links
from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.sampling.distrifusion.sampler import DistriFusion
from lightning_diffpipe.sampling.loop import with_own_generators
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
        request: The request.
        num_bands: Ranks to emulate.
        link: Latency and bandwidth of messages; None for no delay.
        on_step: Called by band 0.
        timeout_s: Longest wait, in seconds.
        options: Options of `DistriFusion`.

    Returns:
        The final latents, and the samplers of all bands with their statistics.

    Raises:
        ConfigurationError: Bands have other noise.
    """
    device, default = request.latents.device, None
    if request.step_kwargs.get("generator") is None and takes_generator(request.scheduler):
        default = torch.default_generator
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            default = torch.cuda.default_generators[index]
    network = LoopbackNetwork(num_bands, device, link, timeout_s)
    kwargs = dict(request.step_kwargs) | ({} if default is None else {"generator": default})

    # A thread samples as if it were a process.
    own = [with_own_generators(kwargs) for _ in range(num_bands)]
    requests = [replace(request, step_kwargs=each) for each in own]

    def band(links: Links) -> tuple[Tensor, DistriFusion]:
        sampler = DistriFusion(request.model, links, **options)
        return sampler.sample(requests[links.rank], on_step if links.rank == 0 else None), sampler

    results = network.run(band)
    if default is not None:  # goes on where the copy of band 0 is, as in one process
        default.set_state(requests[0].step_kwargs["generator"].get_state())
    latents = results[0][0]
    for rank, (of_band, _) in enumerate(results):
        if not torch.allclose(of_band, latents, rtol=0.0, atol=0.0, equal_nan=True):
            name = type(request.scheduler).__name__
            raise ConfigurationError(
                f"bands 0 and {rank} of {num_bands} stepped to other latents: {name} or the request's closure "
                "uses torch's default generator, which these bands share as threads of one process; give "
                "it a generator or a seed of its own, or sample with processes"
            )
    return latents, [sampler for _, sampler in results]
