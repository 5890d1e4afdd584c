"""Tiny pipelines that animate an image, in training: one for each way in which denoisers are given it."""

import tempfile
from pathlib import Path
from typing import Any

import diffusers
import torch

from lightning_diffpipe.modules import PipelineDiffusion

from .case import perturb
from .pipelines import PIPELINES, build, denoiser

CAPTIONS = ["a cat 1", "dog b", "x"]
KINDS = ("wan21", "wan22", "wan22_5b", "ltx", "cogvideox", "hunyuan", "hunyuan_concat", "hunyuan15")
"""Wan 2.1, the experts of Wan 2.2, its model of 5 billion weights, and others; three models of HunyuanVideo."""

_CLASSES = {
    "ltx": "LTXImageToVideoPipeline",
    "cogvideox": "CogVideoXImageToVideoPipeline",
    "hunyuan": "HunyuanVideoImageToVideoPipeline",
    "hunyuan_concat": "HunyuanVideoImageToVideoPipeline",
    "hunyuan15": "HunyuanVideo15ImageToVideoPipeline",
}


def pipeline_of(kind: str, folder: Path) -> Any:
    """One of the pipelines; Wan 2.2 has no encoder of images."""
    pipeline = build(_CLASSES.get(kind, "WanImageToVideoPipeline"), folder)
    if kind == "cogvideox":  # deep, or its autoencoder is most of the step
        config = dict(pipeline.transformer.config) | {"num_layers": 10}
        torch.manual_seed(1)
        pipeline.transformer = type(pipeline.transformer).from_config(config).eval()
        perturb(pipeline.transformer, torch.Generator().manual_seed(1))
    if kind == "hunyuan_concat":
        config = {n: v for n, v in pipeline.transformer.config.items() if not n.startswith("_")}
        changes = {
            "image_condition_type": "latent_concat",
            "in_channels": 9,
            "guidance_embeds": False,
        }
        torch.manual_seed(1)
        pipeline.transformer = type(pipeline.transformer)(**config | changes).eval()
        perturb(pipeline.transformer, torch.Generator().manual_seed(1))
    if not kind.startswith("wan22"):
        return pipeline
    channels = 36 if kind == "wan22" else 16  # with the image beside the noise, or in its place
    torch.manual_seed(1)
    build_denoiser = denoiser("WanTransformer3DModel", in_channels=channels, out_channels=16)
    denoisers = [build_denoiser(folder).eval() for _ in range(2)]
    for part in denoisers:
        perturb(part, torch.Generator().manual_seed(1))
    names = ("vae", "text_encoder", "tokenizer", "scheduler")
    parts = {name: getattr(pipeline, name) for name in names} | {"transformer": denoisers[0]}
    if kind == "wan22":
        parts |= {"transformer_2": denoisers[1], "boundary_ratio": 0.9}
    else:
        parts |= {"expand_timesteps": True}
    return diffusers.WanImageToVideoPipeline(**parts)


class Animating(PipelineDiffusion):
    """One of the pipelines in training, equal in every process, with captions as they are."""

    def __init__(self, kind: str, **options: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            pipeline = pipeline_of(kind, Path(folder))
        name = _CLASSES.get(kind, "WanImageToVideoPipeline")
        call = {n: v for n, v in PIPELINES[name].call.items() if n != "num_frames"}
        if kind.startswith("wan22"):
            call["max_sequence_length"] = 8
        super().__init__(pipeline, **{"caption_dropout": 0.0, "call": call, **options})


def clips(num_frames: int = 5, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Three, of 8 bits."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (3, 3, num_frames, 32, 32), generator=generator)
    return {"video": (pixels / 127.5 - 1).to(dtype), "caption": CAPTIONS}
