"""Several ranks as threads of one process, each with a copy of the model of its own."""

import copy
from collections.abc import Callable

from torch import Tensor, nn

from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.graph.placement import place_parameters
from lightning_diffpipe.sampling.pipefusion.patch import resident_parameters
from tests.sampling.models import Tiny, knowing, request_for


def sample_together(
    name: str,
    tiny: Tiny,
    num_ranks: int,
    make: Callable[[nn.Module, object], object],
    free_foreign: bool = False,
    make_generator: Callable[[], object] | None = None,
    timeout_s: float = 20.0,
    **options,
) -> tuple[list[Tensor], list[object]]:
    """Runs one request on all ranks; returns their latents and their samplers.

    Rank 0 knows the layout and tells the others. With `free_foreign`, weights of blocks of other ranks are
    gone before sampling. Generators are made for each rank, as in processes.
    """
    network = LoopbackNetwork(num_ranks, timeout_s=timeout_s)
    models = [copy.deepcopy(tiny.model) for _ in range(num_ranks)]
    samplers = [make(model, links) for model, links in zip(models, network.links, strict=True)]
    if hasattr(samplers[0], "layouts"):
        knowing(samplers[0], name, tiny)

    def rank(links):
        model, sampler = models[links.rank], samplers[links.rank]
        own = {} if make_generator is None else {"generator": make_generator()}
        request = request_for(name, tiny=tiny._replace(model=model), **options, **own)
        if free_foreign:
            setting = sampler.prepare(request)
            own = resident_parameters(model, setting.layout, setting.stages, links.rank)
            assert place_parameters(model, own, "cpu"), "nothing was freed"
        return sampler.sample(request)

    return network.run(rank), samplers
