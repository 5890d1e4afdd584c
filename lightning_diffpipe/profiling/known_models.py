"""Well-known models, from their published configurations: what they are made of and how they are trained.

Each entry holds the configurations of the parts as they are published with the weights (shortened to what differs
from the classes' defaults), so that parameters, shapes and operations are exact. Parts are built on the meta
device: no memory, no download. The step is the usual one: encode pictures and captions, add noise, predict,
compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_diffpipe.graph.placement import created_in

Config = Mapping[str, Any]
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class KnownModel:
    """A model by its published configurations.

    Attributes:
        title: What it is called by people.
        denoiser: Class in diffusers and its configuration.
        vae: Class in diffusers and its configuration.
        text_encoders: For each: class in transformers, its configuration, tokens of a caption.
        resolution: Pixels along an edge, as published.
        num_parameters: Parameters of the denoiser, as published; checked by the tests.
        call: Runs the denoiser: (module, noisy latents, timesteps, text states, batch) -> prediction.
        controlnet: Configuration of a ControlNet trained over the locked denoiser, if there is one.
        source: On the hub.
        num_frames: Of a video; None of models of pictures.
    """

    title: str
    denoiser: tuple[str, Config]
    vae: tuple[str, Config]
    text_encoders: tuple[tuple[str, Config, int], ...]
    resolution: int
    num_parameters: int
    call: Callable[[nn.Module, Tensor, Tensor, list[Any], Batch], Tensor]
    controlnet: Config | None = None
    source: str = ""
    num_frames: int | None = None


# ------------------------------------------------------------------------------ parts they share

_BLOCKS = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}
_WITHOUT_CONVOLUTIONS = {"use_quant_conv": False, "use_post_quant_conv": False}
VAE = "AutoencoderKL", _BLOCKS | {"latent_channels": 4}
VAE_16 = "AutoencoderKL", _BLOCKS | {"latent_channels": 16} | _WITHOUT_CONVOLUTIONS


def _clip(
    width: int, layers: int, heads: int, projection: int, act: str, kind: str = "CLIPTextModel"
) -> tuple[str, Config, int]:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    more = {"num_attention_heads": heads, "projection_dim": projection, "hidden_act": act}
    return kind, {**sizes, **more, "vocab_size": 49408, "max_position_embeddings": 77}, 77


CLIP_L = _clip(768, 12, 12, 768, "quick_gelu")
CLIP_L_PROJECTED = _clip(768, 12, 12, 768, "quick_gelu", "CLIPTextModelWithProjection")
CLIP_H = _clip(1024, 23, 16, 512, "gelu")
CLIP_BIG_G = _clip(1280, 32, 20, 1280, "gelu", "CLIPTextModelWithProjection")
T5_XXL = {
    "d_model": 4096,
    "d_ff": 10240,
    "d_kv": 64,
    "num_layers": 24,
    "num_heads": 64,
    "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
}


def _t5(num_tokens: int) -> tuple[str, Config, int]:
    return "T5EncoderModel", T5_XXL, num_tokens


UMT5 = "UMT5EncoderModel", T5_XXL | {"vocab_size": 256384}, 512


# ------------------------------------------------------------------------------ how each is called


def _call_sd(
    module: nn.Module, noisy: Tensor, steps: Tensor, text: list[Any], batch: Batch
) -> Tensor:
    states = text[0].last_hidden_state
    down, middle = None, None
    if "hint" in batch:
        down, middle = module.controlnet(
            noisy, steps, states, controlnet_cond=batch["hint"], return_dict=False
        )
    return module.denoiser(
        noisy,
        steps,
        encoder_hidden_states=states,
        down_block_additional_residuals=down,
        mid_block_additional_residual=middle,
    ).sample


def _call_sdxl(
    module: nn.Module, noisy: Tensor, steps: Tensor, text: list[Any], batch: Batch
) -> Tensor:
    states = torch.cat([encoded.hidden_states[-2] for encoded in text], -1)
    conditions = {"text_embeds": text[1].text_embeds, "time_ids": batch["time_ids"]}
    return module.denoiser(
        noisy, steps, encoder_hidden_states=states, added_cond_kwargs=conditions
    ).sample


def _call_sd3(
    module: nn.Module, noisy: Tensor, steps: Tensor, text: list[Any], batch: Batch
) -> Tensor:
    clip = torch.cat([encoded.hidden_states[-2] for encoded in text[:2]], -1)
    t5 = text[2].last_hidden_state
    clip = torch.nn.functional.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
    pooled = torch.cat([encoded.text_embeds for encoded in text[:2]], -1)
    return module.denoiser(
        noisy,
        encoder_hidden_states=torch.cat([clip, t5], 1),
        pooled_projections=pooled,
        timestep=steps,
    ).sample


def _call_packed(
    module: nn.Module, noisy: Tensor, steps: Tensor, text: list[Any], batch: Batch
) -> Tensor:
    samples, channels, height, width = noisy.shape
    packed = noisy.view(samples, channels, height // 2, 2, width // 2, 2)
    packed = packed.permute(0, 2, 4, 1, 3, 5).reshape(samples, height * width // 4, 4 * channels)
    states = text[1].last_hidden_state
    out = module.denoiser(
        packed,
        encoder_hidden_states=states,
        pooled_projections=text[0].pooler_output,
        timestep=steps,
        img_ids=torch.zeros(packed.shape[1], 3, device=noisy.device),
        txt_ids=torch.zeros(states.shape[1], 3, device=noisy.device),
        guidance=torch.ones(samples, device=noisy.device, dtype=noisy.dtype),
    ).sample
    out = out.view(samples, height // 2, width // 2, channels, 2, 2)
    return out.permute(0, 3, 1, 4, 2, 5).reshape(noisy.shape)


def _call_pixart(
    module: nn.Module, noisy: Tensor, steps: Tensor, text: list[Any], batch: Batch
) -> Tensor:
    out = module.denoiser(
        noisy,
        encoder_hidden_states=text[0].last_hidden_state,
        timestep=steps,
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        encoder_attention_mask=batch["mask"],
    ).sample
    return out[:, : noisy.shape[1]]


def _call_wan(
    module: nn.Module, noisy: Tensor, steps: Tensor, text: list[Any], batch: Batch
) -> Tensor:
    return module.denoiser(noisy, steps, text[0].last_hidden_state).sample


# ------------------------------------------------------------------------------ the models

_SD21_UNET = {
    "sample_size": 64,
    "block_out_channels": (320, 640, 1280, 1280),
    "attention_head_dim": (5, 10, 20, 20),
    "cross_attention_dim": 1024,
    "use_linear_projection": True,
}

KNOWN_MODELS = {
    "sd21": KnownModel(
        "Stable Diffusion 2.1",
        ("UNet2DConditionModel", _SD21_UNET),
        VAE,
        (CLIP_H,),
        resolution=512,
        num_parameters=865_910_724,
        call=_call_sd,
        source="stabilityai/stable-diffusion-2-1-base",
    ),
    "controlnet": KnownModel(
        "ControlNet over Stable Diffusion 2.1",
        ("UNet2DConditionModel", _SD21_UNET),
        VAE,
        (CLIP_H,),
        resolution=512,
        num_parameters=865_910_724,
        call=_call_sd,
        controlnet={key: value for key, value in _SD21_UNET.items() if key != "sample_size"},
        source="thibaud/controlnet-sd21-canny-diffusers",
    ),
    "sdxl": KnownModel(
        "Stable Diffusion XL",
        (
            "UNet2DConditionModel",
            {
                "sample_size": 128,
                "block_out_channels": (320, 640, 1280),
                "down_block_types": ("DownBlock2D", *("CrossAttnDownBlock2D",) * 2),
                "up_block_types": (*("CrossAttnUpBlock2D",) * 2, "UpBlock2D"),
                "transformer_layers_per_block": (1, 2, 10),
                "attention_head_dim": (5, 10, 20),
                "cross_attention_dim": 2048,
                "use_linear_projection": True,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 256,
                "projection_class_embeddings_input_dim": 2816,
            },
        ),
        VAE,
        (CLIP_L, CLIP_BIG_G),
        resolution=1024,
        num_parameters=2_567_463_684,
        call=_call_sdxl,
        source="stabilityai/stable-diffusion-xl-base-1.0",
    ),
    "sd3": KnownModel(
        "Stable Diffusion 3 medium",
        (
            "SD3Transformer2DModel",
            {
                "sample_size": 128,
                "patch_size": 2,
                "in_channels": 16,
                "out_channels": 16,
                "num_layers": 24,
                "num_attention_heads": 24,
                "attention_head_dim": 64,
                "joint_attention_dim": 4096,
                "caption_projection_dim": 1536,
                "pooled_projection_dim": 2048,
                "pos_embed_max_size": 192,
            },
        ),
        VAE_16,
        (CLIP_L_PROJECTED, CLIP_BIG_G, _t5(256)),
        resolution=1024,
        num_parameters=2_028_328_000,
        call=_call_sd3,
        source="stabilityai/stable-diffusion-3-medium-diffusers",
    ),
    "flux": KnownModel(
        "Flux.1-dev",
        (
            "FluxTransformer2DModel",
            {
                "patch_size": 1,
                "in_channels": 64,
                "num_layers": 19,
                "num_single_layers": 38,
                "num_attention_heads": 24,
                "attention_head_dim": 128,
                "joint_attention_dim": 4096,
                "pooled_projection_dim": 768,
                "guidance_embeds": True,
                "axes_dims_rope": (16, 56, 56),
            },
        ),
        VAE_16,
        (CLIP_L, _t5(512)),
        resolution=1024,
        num_parameters=11_901_408_320,
        call=_call_packed,
        source="black-forest-labs/FLUX.1-dev",
    ),
    "pixart": KnownModel(
        "PixArt-Sigma",
        (
            "PixArtTransformer2DModel",
            {
                "sample_size": 128,
                "patch_size": 2,
                "in_channels": 4,
                "out_channels": 8,
                "num_layers": 28,
                "num_attention_heads": 16,
                "attention_head_dim": 72,
                "cross_attention_dim": 1152,
                "caption_channels": 4096,
                "use_additional_conditions": False,
            },
        ),
        VAE,
        (_t5(300),),
        resolution=1024,
        num_parameters=610_856_096,
        call=_call_pixart,
        source="PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
    ),
    "wan": KnownModel(
        "Wan 2.1 of 1.3 G parameters",
        (
            "WanTransformer3DModel",
            {
                "patch_size": (1, 2, 2),
                "in_channels": 16,
                "out_channels": 16,
                "num_layers": 30,
                "num_attention_heads": 12,
                "attention_head_dim": 128,
                "text_dim": 4096,
                "ffn_dim": 8960,
            },
        ),
        ("AutoencoderKLWan", {}),
        (UMT5,),
        resolution=512,
        num_parameters=1_418_996_800,
        call=_call_wan,
        source="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        num_frames=33,
    ),
}


# ------------------------------------------------------------------------------ building and training


class KnownTraining(nn.Module):
    """All parts of a known model, and its training step.

    Args:
        known: The model.
        dtype: Of all weights.
        device: Where they are: without memory by default, else with random values.
    """

    def __init__(
        self, known: KnownModel, dtype: torch.dtype, device: torch.device | str = "meta"
    ) -> None:
        import diffusers
        import transformers

        super().__init__()
        self.known, self.dtype, self.device = known, dtype, torch.device(device)
        class_name, denoiser_config = known.denoiser
        with self.device, created_in(dtype if self.device.type != "meta" else torch.float32):
            vae_class, vae_config = known.vae
            self.vae = getattr(diffusers, vae_class)(**vae_config)
            self.text_encoders = nn.ModuleList()
            for kind, config, _ in known.text_encoders:
                name = kind.replace("EncoderModel", "Config") if "T5" in kind else "CLIPTextConfig"
                of = getattr(transformers, name)
                encoder = getattr(transformers, kind)(of(**config, attn_implementation="sdpa"))
                self.text_encoders.append(encoder)
            self.denoiser = getattr(diffusers, class_name)(**denoiser_config)
            if known.controlnet is not None:
                self.controlnet = diffusers.ControlNetModel(**known.controlnet)
        self.to(dtype).requires_grad_(False).eval()
        self.trained.requires_grad_(True)
        self.trained.train()

    @property
    def trained(self) -> nn.Module:
        """The part that is trained."""
        return self.denoiser if self.known.controlnet is None else self.controlnet

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Tensor:
        """Returns the loss."""
        posterior = self.vae.encode(batch["image"]).latent_dist
        latents = posterior.sample() * 0.18215
        hidden = self.known.call in (_call_sdxl, _call_sd3)  # the others read the last state
        text = [
            encoder(batch[f"tokens_{index}"], output_hidden_states=hidden)
            for index, encoder in enumerate(self.text_encoders)
        ]
        noise = torch.randn_like(latents)
        steps = torch.randint(0, 1000, (len(latents),), device=latents.device)
        share = (steps / 1000).view(-1, *(1,) * (latents.ndim - 1)).to(latents.dtype)
        noisy = (1 - share) * latents + share * noise
        prediction = self.known.call(self, noisy, steps, text, batch)
        return (prediction.float() - noise.float()).square().mean()

    def batch(self, num_samples: int, resolution: int) -> Batch:
        """Returns a batch of random values, where the weights are."""
        frames = () if self.known.num_frames is None else (self.known.num_frames,)
        picture = (num_samples, 3, *frames, resolution, resolution)
        batch = {"image": torch.randn(picture, device=self.device, dtype=self.dtype)}
        for index, (_, _, length) in enumerate(self.known.text_encoders):
            shape = (num_samples, length)
            batch[f"tokens_{index}"] = torch.randint(1, 1000, shape, device=self.device)
        if self.known.call is _call_sdxl:
            batch["time_ids"] = torch.ones((num_samples, 6), device=self.device, dtype=self.dtype)
        if self.known.call is _call_pixart:
            shape = (num_samples, self.known.text_encoders[0][2])
            batch["mask"] = torch.ones(shape, device=self.device, dtype=torch.long)
        if self.known.controlnet is not None:
            batch["hint"] = torch.randn(picture, device=self.device, dtype=self.dtype)
        return batch
