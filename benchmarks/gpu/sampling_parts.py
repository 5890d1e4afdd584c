"""Parts of `main.py` about a step of sampling in one process: kernels, CUDA graphs, step caches, quantized weights.

The model is a third of Flux. Two patches stand for what one rank of PipeFusion runs, without its links.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig
from torch import Tensor, nn

from benchmarks.gpu.one_part import Place, Report
from benchmarks.gpu.requests import denoiser, request_of
from lightning_diffpipe.graph.placement import quantize_all
from lightning_diffpipe.profiling.measure import give_back
from lightning_diffpipe.quantization import quantization_named, quantize_components
from lightning_diffpipe.sampling.pipefusion import PipeFusion
from lightning_diffpipe.sampling.request import Request
from lightning_diffpipe.sampling.tracing.attention import compile_blocks, set_attention

DEPTH = {"num_layers": 6, "num_single_layers": 12}
ATTENTION = ("native", "_native_math", "_native_efficient", "_native_flash", "_native_cudnn")
ATTENTION += ("flash", "_flash_3", "sage", "xformers")
"""Backends of diffusers. A row of one whose package is missing, or that refuses the device, says so."""


def attention(place: Place, report: Report) -> None:
    """A step with each attention backend of diffusers, plain and in two patches, and how far results are apart."""
    model, request = _model_and_request(place)
    plain = None
    for backend in ATTENTION:
        for num_patches in (1, 2):
            row: dict[str, Any] = {"attention": backend, "num_patches": num_patches}
            try:
                set_attention(model, backend)
                step_s, latents = step_of(PipeFusion(model, num_patches=num_patches), request)
            except Exception as error:
                report(**row, refused=str(error)[-300:])
                break
            plain = latents if plain is None else plain
            report(**row, step_s=step_s, difference=_relative(latents, plain))


def compiled(place: Place, report: Report) -> None:
    """A step with and without `compile=blocks`; graphs and recompilations are counted."""
    for blocks in (False, True):
        model, request = _model_and_request(place)
        if blocks:
            compile_blocks(model, "inductor" if place.on_gpu else "aot_eager")
        for num_patches in (1, 2):
            torch._dynamo.utils.counters.clear()
            step_s, _ = step_of(PipeFusion(model, num_patches=num_patches), request)
            counters = torch._dynamo.utils.counters
            report(
                compile="blocks" if blocks else None,
                num_patches=num_patches,
                step_s=step_s,
                graphs=counters["stats"]["unique_graphs"],
                breaks=sum(counters["graph_break"].values()),
                peak_bytes=place.peak_bytes(),
            )


@torch.inference_mode()
def graphs(place: Place, report: Report) -> None:
    """A forward of the denoiser as a CUDA graph beside an eager one: what is left for the host to cost.

    A graph holds the whole denoiser. Of PipeFusion it could hold what a rank runs between two messages: there
    shapes and addresses of inputs stay, and nothing is allocated outside of the graph's own pool.
    """
    _, request = _model_and_request(place)
    latents, time = request.latents.clone(), request.timesteps[:1].clone()
    eager_s = place.seconds(lambda: request.denoise(latents, time))
    report(eager_s=eager_s)
    if not place.on_gpu:
        return
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(3):
            request.denoise(latents, time)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = request.denoise(latents, time)
    graph_s = place.seconds(graph.replay)
    report(
        graph_s=graph_s,
        ratio=graph_s / eager_s,
        difference=_relative(result, request.denoise(latents, time)),
    )


def caches(place: Place, report: Report) -> None:
    """All steps of a request with a step cache and without, plain and in two patches."""
    model, request = _model_and_request(place, num_steps=20)
    for num_patches in (1, 2):
        plain = None
        for threshold in (None, 0.05, 0.2):
            cache = None if threshold is None else FirstBlockCacheConfig(threshold)
            sampler = PipeFusion(model, num_patches=num_patches)
            _, latents = step_of(sampler, replace(request, cache=cache))
            plain = latents if plain is None else plain
            report(
                num_patches=num_patches,
                threshold=threshold,
                seconds=sum(sampler.statistics.step_s),
                difference=_relative(latents, plain),
            )


def quantized(place: Place, report: Report) -> None:
    """A step with quantized linear layers: seconds, most memory, distance from plain weights."""
    plain = None
    for name in (None, "float8", "int8", "nf4"):
        model, request = _model_and_request(place)
        try:
            if name is not None:
                chosen = {"transformer": quantization_named(name)}
                quantize_components(chosen, {"transformer": model}, trains=False)
                quantize_all(model, place.device)
            step_s, latents = step_of(PipeFusion(model, num_patches=1), request)
        except Exception as error:
            report(quantization=name, refused=str(error)[-300:])
            continue
        plain = latents if plain is None else plain
        report(
            quantization=name,
            step_s=step_s,
            difference=_relative(latents, plain),
            peak_bytes=place.peak_bytes(),
        )
        del model, request
        give_back(place.device)


def _model_and_request(place: Place, num_steps: int = 6) -> tuple[nn.Module, Request]:
    config, model = denoiser("flux", place, **(DEPTH if place.on_gpu else {}))
    return model, request_of(config, model, place, 1024 if place.on_gpu else 64, num_steps)


def step_of(sampler: PipeFusion, request: Request) -> tuple[float, Tensor]:
    """Returns seconds of a step after the warm-up, in the second of two requests, and the latents."""
    for _ in range(2):
        latents = sampler.sample(request)
    assert torch.isfinite(latents).all(), "the result is not finite"
    return statistics.median(sampler.statistics.step_s[2:]), latents


def _relative(latents: Tensor, plain: Tensor) -> float:
    """The norm of the difference over that of the plain latents."""
    return float((latents - plain).float().norm() / plain.float().norm())


ALL: dict[str, Callable[[Place, Report], None]] = {
    part.__name__: part for part in (attention, compiled, graphs, caches, quantized)
}
