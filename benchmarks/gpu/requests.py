"""Requests of one square image to transformers with random weights, for parts that time steps of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from benchmarks.gpu.models import sized
from benchmarks.gpu.one_part import Place
from lightning_diffpipe.sampling.request import Request


def denoiser(name: str, place: Place, **changes: Any) -> tuple[dict[str, Any], nn.Module]:
    """Returns the configuration of a well-known transformer, with some changes, and the transformer."""
    configs = sized(name, not place.on_gpu)
    kind, config = configs["model_index"]["transformer"][1], configs["transformer"] | changes
    torch.manual_seed(0)
    with place.device:
        model = getattr(diffusers, kind)(**config).to(place.dtype).eval().requires_grad_(False)
    return config, model


def request_of(
    config: Mapping[str, Any], model: nn.Module, place: Place, resolution: int, num_steps: int = 6
) -> Request:
    """Returns a request without guidance, with random texts."""
    width = config.get("joint_attention_dim") or config["caption_channels"]
    torch.manual_seed(1)
    normal = partial(torch.randn, device=place.device, dtype=place.dtype)
    latents = normal(1, config["in_channels"], resolution // 8, resolution // 8)
    if "axes_dims_rope" in config:  # Flux: packed tokens, and their places
        side = resolution // 16
        rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        places = torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1)
        latents = normal(1, side * side, config["in_channels"])
        text = {"encoder_hidden_states": normal(1, 512, width), "guidance": normal(1)}
        text["pooled_projections"] = normal(1, config["pooled_projection_dim"])
        text |= {"img_ids": places.to(latents), "txt_ids": latents.new_zeros(512, 3)}
    elif "joint_attention_dim" in config:
        text = {"encoder_hidden_states": normal(1, 197, width)}
        text["pooled_projections"] = normal(1, config["pooled_projection_dim"])
    else:
        text = {"encoder_hidden_states": normal(1, 120, width)}
        text["encoder_attention_mask"] = torch.ones(1, 120, device=place.device, dtype=torch.long)
        text["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        steps = t.expand(1).to(place.device, place.dtype)
        return model(x.to(place.dtype), timestep=steps, **text).sample[:, : x.shape[1]]

    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(num_steps, device=place.device)
    return Request(model, denoise, scheduler, scheduler.timesteps, latents, scale_input=False)
