"""How far from one process do PipeFusion, DistriFusion and naive patches end up? PSNR of their images.

    python benchmarks/sampling_quality/main.py [--part transformer|unet|norms|caches] [--json FILE] [--images DIR]

All ranks are emulated in this process, which gives the very images that as many ranks give. Weights that do
not come with the package are trained first (some minutes) and kept in `outputs/sampling_quality`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler, hooks
from torch import Tensor

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import environment, table  # noqa: E402
from benchmarks.sampling_quality.denoisers import (  # noqa: E402
    built_in_model,
    pixel_unet,
)
from lightning_diffpipe import LatentDiffusion  # noqa: E402
from lightning_diffpipe.callbacks.sample_images import image_grid  # noqa: E402
from lightning_diffpipe.data.glyphs import GlyphDataset  # noqa: E402
from lightning_diffpipe.errors import ConfigurationError  # noqa: E402
from lightning_diffpipe.modules.latent_diffusion import tokenize  # noqa: E402
from lightning_diffpipe.sampling.distrifusion import emulate  # noqa: E402
from lightning_diffpipe.sampling.pipefusion import PipeFusion  # noqa: E402
from lightning_diffpipe.sampling.request import OneProcess, Request  # noqa: E402
from tests.sampling.models import request_for  # noqa: E402

PARTS = (2, 4, 8)
WARMUPS = (0, 1, 2, 4)
NUM_IMAGES = 12
Rows = list[dict[str, Any]]
Method = Callable[[Request, int, int], Tensor]
"""(request, number of patches or bands, synchronous steps) -> final latents"""


def with_pipefusion(request: Request, num_parts: int, warmup_steps: int) -> Tensor:
    """Patches flow through layers."""
    sampler = PipeFusion(request.model, num_patches=num_parts, warmup_steps=warmup_steps)
    return sampler.sample(request)


def with_distrifusion(request: Request, num_parts: int, warmup_steps: int) -> Tensor:
    """Bands see other bands as they were."""
    return emulate(request, num_parts, warmup_steps=warmup_steps)[0]


def with_naive_patches(request: Request, num_parts: int, warmup_steps: int) -> Tensor:
    """Bands see nothing."""
    return emulate(request, num_parts, mode="naive", warmup_steps=warmup_steps)[0]


def glyph_request(model: LatentDiffusion, num_steps: int, scale: float = 4.0) -> Request:
    """Twelve captions with guidance in the batch, as `LatentDiffusion.sample` does it."""
    dataset = GlyphDataset("all", alphabets=("digits", "latin"), shifts_per_axis=1)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(1))
    captions = [dataset.glyphs[i].caption for i in order[:NUM_IMAGES].tolist()]
    tokens = tokenize(model.tokenizer, [""] * NUM_IMAGES + captions, torch.device("cpu"))
    states = model.encode_text(tokens)

    def denoise(latents: Tensor, t: Tensor) -> Tensor:
        both = torch.cat([latents, latents])
        prediction = model.denoise(both, t.expand(len(both)), states, tokens.attention_mask)
        free, conditional = prediction.chunk(2)
        return free + scale * (conditional - free)

    model.scheduler.set_timesteps(num_steps)
    noise = torch.randn(NUM_IMAGES, 4, 8, 8, generator=torch.Generator().manual_seed(2))
    return Request(
        model.denoiser,
        denoise,
        model.scheduler,
        model.scheduler.timesteps,
        noise,
        scale_input=False,
    )


def psnr(images: Tensor, wanted: Tensor, peak: float = 1.0) -> Tensor:
    """Of each image, in dB."""
    error = (images - wanted).square().flatten(1).mean(1).clamp_min(1e-12)
    return 10 * torch.log10(peak**2 / error)


def compare(
    model: LatentDiffusion, methods: dict[str, Method], parts: tuple[int, ...], num_steps: int
) -> tuple[Rows, dict[str, Tensor]]:
    """Every method at every number of parts and synchronous steps, and the images of the hardest setting."""
    request = glyph_request(model, num_steps)
    wanted = model.decode_latents(OneProcess().sample(request))
    rows: Rows = []
    shown = {"one process": wanted}
    for name, method in methods.items():
        for warmup_steps in WARMUPS:
            row: dict[str, Any] = {"method": name, "W": warmup_steps}
            for num_parts in parts:
                images = model.decode_latents(method(request, num_parts, warmup_steps))
                row[f"{num_parts} parts, dB"] = round(float(psnr(images, wanted).mean()), 1)
                if num_parts == parts[-1] and warmup_steps == 1:
                    shown[name] = images
            rows.append(row)
            print(row, flush=True)
    floor = float(psnr(wanted, wanted.roll(1, 0)).mean())
    print(f"PSNR of two different images: {floor:.1f} dB")
    return rows, shown


def compare_norms(folder: Path, settings: list[tuple[int, ...]]) -> Rows:
    """Group norm rules, paired image by image: gain over "stale" with its standard error.

    Args:
        folder: Of trained weights.
        settings: (steps, bands, images).
    """
    model = pixel_unet(folder)
    rows: Rows = []
    for num_steps, num_bands, num_images in settings:
        scheduler = DDIMScheduler()
        scheduler.set_timesteps(num_steps)
        noise = torch.randn(
            num_images, 1, 32, 32, generator=torch.Generator().manual_seed(num_steps)
        )
        request = Request(
            model,
            lambda x, t: model(x, t.expand(len(x))).sample,
            scheduler,
            scheduler.timesteps,
            noise,
        )
        wanted = OneProcess().sample(request).clamp(-1, 1)
        scores: dict[str, Tensor] = {}
        for rule in ("stale", "separate", "corrected", "predicted", "synchronous"):
            started_s = time.perf_counter()
            latents, samplers = emulate(
                request, num_bands, group_norm=rule, warmup_steps=1, verify=False
            )
            scores[rule] = psnr(latents.clamp(-1, 1), wanted, peak=2.0)
            gain = (scores[rule] - scores["stale"]).tolist()
            rows.append(
                {
                    "steps": num_steps,
                    "bands": num_bands,
                    "images": num_images,
                    "rule": rule,
                    "PSNR, dB": round(float(scores[rule].mean()), 2),
                    "over stale, dB": f"{statistics.mean(gain):+.2f} ± {_standard_error(gain):.2f}",
                    "negative variances": sum(s.num_fallbacks for s in samplers),
                }
            )
            print(rows[-1], f"{time.perf_counter() - started_s:.0f} s", flush=True)
        gain = (scores["predicted"] - scores["corrected"]).tolist()
        print(
            f"  predicted - corrected: {statistics.mean(gain):+.2f} ± {_standard_error(gain):.2f}"
        )
    return rows


def compare_caches(num_steps: int) -> Rows:
    """Step caches of diffusers: runs of blocks and of attention, and the distance of latents from no cache."""
    always = (-1, 1001)  # timesteps
    caches = {
        "none": None,
        "first_block, 0.1": hooks.FirstBlockCacheConfig(threshold=0.1),
        "first_block, 0.2": hooks.FirstBlockCacheConfig(threshold=0.2),
        "first_block, 0.5": hooks.FirstBlockCacheConfig(threshold=0.5),
        "pyramid_attention, 2": hooks.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=always
        ),
        "taylor_seer, 3": hooks.TaylorSeerCacheConfig(
            cache_interval=3, taylor_factors_dtype=torch.float32
        ),
    }
    rows: Rows = []
    built_in = glyph_request(built_in_model("glyphs_transformer"), num_steps)
    for model, request in {
        "glyphs": built_in, "tiny Flux": request_for("flux", num_steps=num_steps)
    }.items():  # fmt: skip
        runs = _runs_of(request.model)
        exact = OneProcess().sample(request)
        patches = PipeFusion(request.model, num_patches=4, verify=False)
        patches.prepare(request)  # so that its runs are not counted
        for method, sampler in {"one process": OneProcess(), "4 patches": patches}.items():
            plain: Tensor | None = None
            for name, cache in caches.items():
                runs.update(blocks=0, attention=0)
                try:
                    latents = sampler.sample(replace(request, cache=cache))
                except ConfigurationError:  # the cache does not know the model
                    continue
                plain = latents if plain is None else plain
                rows.append(
                    {
                        "model": model, "method": method, "cache": name, **runs,
                        "from no cache": f"{float((latents - plain).norm() / plain.norm()):.1e}",
                        "from one process": f"{float((latents - exact).norm() / exact.norm()):.1e}",
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def _runs_of(model: Any) -> dict[str, int]:
    """Returns numbers that count runs of blocks and of their attention to images, by layers in each."""
    runs = {"blocks": 0, "attention": 0}
    ends = {
        "ff.net.0.proj": "blocks",
        "proj_mlp": "blocks",
        "attn.to_q": "attention",
        "attn1.to_q": "attention",
    }
    for name, module in model.named_modules():
        for kind in (kind for end, kind in ends.items() if name.endswith(end)):

            def count(*_: Any, kind: str = kind) -> None:
                runs[kind] += 1

            module.register_forward_hook(count)
    return runs


def _standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5


def main() -> None:
    """Runs the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("transformer", "unet", "norms", "caches"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--images", type=Path, default=Path(__file__).parent)
    parser.add_argument("--weights", type=Path, default=ROOT / "outputs" / "sampling_quality")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--norms",
        nargs="+",
        default=["50:2:16", "50:4:16", "50:8:24", "10:2:16", "10:4:16", "10:8:24"],
        help="steps:bands:images of the comparison of group norm rules",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bands: dict[str, Method] = {"DistriFusion": with_distrifusion, "naive": with_naive_patches}
    results: dict[str, Rows] = {}
    if arguments.part in (None, "transformer"):
        methods = {"PipeFusion": with_pipefusion, **bands}
        model = built_in_model("glyphs_transformer")
        rows, shown = compare(model, methods, PARTS, arguments.steps)
        results["transformer"] = rows
        grid = image_grid(torch.cat(list(shown.values())), columns=NUM_IMAGES)
        grid.save(arguments.images / "transformer.png")
    if arguments.part in (None, "unet"):
        rows, shown = compare(built_in_model("glyphs"), bands, (2, 4), arguments.steps)
        results["unet"] = rows
        grid = image_grid(torch.cat(list(shown.values())), columns=NUM_IMAGES)
        grid.save(arguments.images / "unet.png")
    if arguments.part in (None, "norms"):
        settings = [tuple(map(int, setting.split(":"))) for setting in arguments.norms]
        results["norms"] = compare_norms(arguments.weights, settings)
    if arguments.part in (None, "caches"):
        results["caches"] = compare_caches(arguments.steps)
    for name, rows in results.items():
        print(f"\n{name}\n{table(rows)}")
    if arguments.json:
        report = {"environment": environment(), **results}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
