"""Tiny pipelines of diffusers, as data: one entry for each class that draws from prompts or classes alone.

An entry names the parts that differ from those of its neighbours; everything else that a class's `__init__` asks
for is None. Denoisers have the sizes of the zoo. Prompts are read as bytes, whatever tokenizer the model has in
earnest: what is tested is how a pipeline's `__call__` feeds its denoiser, not the words.
"""

import inspect
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.guiders import ClassifierFreeGuidance
from PIL import Image
from torch import nn

from tests.modules.tiny_parts import tiny_text_encoder, tiny_tokenizer
from tests.predictor import tiny_pipelines as tiny

from . import CASES
from .case import perturb, silence
from .qwen_processor import SPECIAL, processor

Parts = Mapping[str, Callable[[Path], Any]]

ATTENTION = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_hidden_layers=2)
LANGUAGE = dict(vocab_size=384, hidden_size=16, intermediate_size=16, pad_token_id=0) | ATTENTION
VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=16)
CHAT = (
    "{% for m in messages %}{{ m['role'] }}: "
    "{{ m['content'] if m['content'] is string else m['content'][-1]['text'] }}{% endfor %}"
)


@dataclass(frozen=True)
class TinyPipeline:
    """One tiny pipeline.

    Attributes:
        parts: By the names of its `__init__`, as functions of a folder that takes vocabularies.
        call: Further arguments of `__call__`.
        pixels: Shape of an image or video of the batch.
        drawn: Arguments of `__call__` with which one is drawn.
        settings: Attributes of the pipeline that a folder does not say, such as the sizes it draws.
        edits: Whether an image is given.
        references: Number of references of each sample, of pipelines whose processor reads them.
    """

    parts: Parts
    call: Mapping[str, Any] = field(default_factory=dict)
    pixels: tuple[int, ...] = (3, 32, 32)
    drawn: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    edits: bool = False
    references: int = 0


# ------------------------------------------------------------------ parts


def denoiser(name: str, **changes: Any) -> Callable[[Path], nn.Module]:
    """A denoiser of the zoo, some of whose sizes fit other parts."""
    return lambda _: getattr(diffusers, name.split()[0])(**{**CASES[name].config, **changes})


def with_denoiser(parts: Parts, name: str, **changes: Any) -> Parts:
    """Parts of a pipeline, and a transformer of the zoo."""
    return {**parts, "transformer": denoiser(name, **changes)}


def of(cls: Any, *arguments: Any, **options: Any) -> Callable[[Path], Any]:
    """What a class gives for these arguments."""
    return lambda _: cls(*arguments, **options)


def byte_tokenizer(_: Path) -> Any:
    """Reads bytes; knows a chat."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


def long_tokenizer(_: Path) -> Any:
    """Reads bytes, many of them: for templates around the prompt."""
    tokenizer = byte_tokenizer(_)
    tokenizer.model_max_length = 2048
    return tokenizer


def language_model(kind: str, head: str = "Model", **changes: Any) -> Callable[[Path], nn.Module]:
    """A decoder of transformers by its name, such as `"Qwen3"`."""

    def build(_: Path) -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(**{**LANGUAGE, **changes})
        return getattr(transformers, f"{kind}{head}")(config)

    return build


def vision_language_model(
    kind: str, head: str, num_hidden_layers: int = 2
) -> Callable[[Path], nn.Module]:
    """A decoder that could see images, too."""

    def build(_: Path) -> nn.Module:
        text = LANGUAGE | dict(
            rope_scaling={"rope_type": "default", "mrope_section": [1, 1, 2]},
            max_position_embeddings=4096,
            num_hidden_layers=num_hidden_layers,
        )
        config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=VISION)
        return getattr(transformers, f"{kind}{head}")(config)

    return build


def seeing_references(_: Path) -> nn.Module:
    """A decoder that sees the images that `processor` reads."""
    ids = processor().tokenizer.convert_tokens_to_ids(SPECIAL)
    names = "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"
    text = LANGUAGE | dict(
        vocab_size=400, max_position_embeddings=4096,
        rope_scaling={"rope_type": "default", "mrope_section": [1, 1, 2]},
    )  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=VISION, **dict(zip(names, ids, strict=True))
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def bert(_: Path) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=384, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    )  # fmt: skip
    return transformers.BertModel(config)


def clip77(_: Path) -> nn.Module:
    """A CLIP text encoder as long as pipelines take it for granted."""
    encoder = tiny.clip_encoder()
    encoder.config.max_position_embeddings = 77
    return type(encoder)(encoder.config)


def clip_vision(_: Path) -> nn.Module:
    """An encoder of images of 28 pixels, wide as the image tokens of Wan's denoiser of the zoo."""
    config = transformers.CLIPVisionConfig(
        hidden_size=6, projection_dim=6, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        image_size=28, patch_size=14,
    )  # fmt: skip
    return transformers.CLIPVisionModel(config)


def siglip_vision(_: Path) -> nn.Module:
    """Another encoder of images of 28 pixels."""
    config = transformers.SiglipVisionConfig(
        hidden_size=6, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        image_size=28, patch_size=14,
    )  # fmt: skip
    return transformers.SiglipVisionModel(config)


def llava(_: Path) -> nn.Module:
    """A decoder that sees images of 28 pixels as four tokens each, in the place of token 300."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=28,
        patch_size=14,
    )  # fmt: skip
    text = transformers.LlamaConfig(**LANGUAGE | dict(vocab_size=400, num_hidden_layers=3))
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=300, pad_token_id=0
    )
    return transformers.LlavaForConditionalGeneration(config)


def tokenizer_of_headers(_: Path) -> Any:
    """Reads bytes, and where a role's header ends."""
    tokenizer = long_tokenizer(_)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end_header_id|>"]})
    return tokenizer


def levels(kind: str, count: int = 4, width: int = 8) -> dict[str, Any]:
    """Blocks of a video autoencoder, by the prefix of their names."""
    return {
        "down_block_types": (f"{kind}DownBlock3D",) * count,
        "up_block_types": (f"{kind}UpBlock3D",) * count,
        "block_out_channels": (width,) * count,
        "latent_channels": 4,
        "layers_per_block": 1,
    }


VAE = {"vae": of(tiny.vae)}
SHIFTED = {"vae": of(tiny.vae, shift_factor=0.1)}
DEEP = {"vae": of(tiny.vae, block_out_channels=(8, 8, 8, 8), shift_factor=0.1)}
WAN_VAE = {"vae": of(tiny.wan_vae)}
HUNYUAN_VIDEO_VAE = {
    "vae": of(
        diffusers.AutoencoderKLHunyuanVideo, in_channels=3, out_channels=3, norm_num_groups=4, scaling_factor=0.5,
        spatial_compression_ratio=8, temporal_compression_ratio=4, **levels("HunyuanVideo"),
    )
}  # fmt: skip
QWEN_VAE = {
    "vae": of(
        diffusers.AutoencoderKLQwenImage, base_dim=12, z_dim=4, dim_mult=[1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True], latents_mean=[0.1, 0.2, -0.1, 0.0], latents_std=[1.0, 2.0, 0.5, 1.5],
    )
}  # fmt: skip
DC = {
    "vae": of(
        diffusers.AutoencoderDC, in_channels=3, latent_channels=4, attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1), decoder_layers_per_block=[1, 1], downsample_block_type="conv",
        upsample_block_type="interpolate", decoder_norm_types="rms_norm", decoder_act_fns="silu",
        scaling_factor=0.41,
    )
}  # fmt: skip

PATCHED = {
    "vae": of(
        diffusers.AutoencoderKLFlux2, block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, latent_channels=4,
    )
}  # fmt: skip

T5 = {"text_encoder": of(tiny_text_encoder), "tokenizer": byte_tokenizer}
CLIP = {"text_encoder": of(tiny.clip_encoder), "tokenizer": tiny.clip_tokenizer}
TWO_CLIPS = CLIP | {
    "text_encoder_2": of(tiny.clip_encoder, projection=16),
    "tokenizer_2": tiny.clip_tokenizer,
}
T5_2 = {"text_encoder_2": of(tiny_text_encoder), "tokenizer_2": byte_tokenizer}
T5_3 = {"text_encoder_3": of(tiny_text_encoder), "tokenizer_3": byte_tokenizer}
CLIP77_2 = {"text_encoder_2": clip77, "tokenizer_2": tiny.clip_tokenizer}
GEMMA2 = {"text_encoder": language_model("Gemma2"), "tokenizer": byte_tokenizer}
QWEN3 = {"text_encoder": language_model("Qwen3"), "tokenizer": long_tokenizer}
QWEN_VL = {
    "text_encoder": vision_language_model("Qwen2_5_VL", "ForConditionalGeneration"),
    "tokenizer": long_tokenizer,
}

FLOW = {"scheduler": of(diffusers.FlowMatchEulerDiscreteScheduler)}
SHIFTING = {"scheduler": of(diffusers.FlowMatchEulerDiscreteScheduler, use_dynamic_shifting=True)}
DDPM = {"scheduler": of(diffusers.DDPMScheduler)}
DDIM = {"scheduler": of(diffusers.DDIMScheduler, steps_offset=1, clip_sample=False)}
V = {
    "scheduler": of(
        diffusers.DDIMScheduler, steps_offset=1, clip_sample=False, prediction_type="v_prediction"
    )
}
UNIPC = {
    "scheduler": of(
        diffusers.UniPCMultistepScheduler,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
    )
}

SD = VAE | CLIP | DDIM | {"unet": of(tiny.unet), "requires_safety_checker": of(bool)}
SDXL_UNET = dict(
    cross_attention_dim=32,
    addition_embed_type="text_time",
    addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=16 + 6 * 8,
    transformer_layers_per_block=(1, 2),
)
SDXL = VAE | TWO_CLIPS | DDIM | {"unet": of(tiny.unet, **SDXL_UNET), "add_watermarker": of(bool)}
SD3 = with_denoiser(
    SHIFTED
    | FLOW
    | T5_3
    | {
        "text_encoder": of(tiny.clip_encoder, width=8, projection=8),
        "text_encoder_2": of(tiny.clip_encoder, width=8, projection=8),
        "tokenizer": tiny.clip_tokenizer,
        "tokenizer_2": tiny.clip_tokenizer,
    },
    "SD3Transformer2DModel",
    joint_attention_dim=16,
    pooled_projection_dim=16,
)
PIXART = with_denoiser(VAE | T5 | DDIM, "PixArtTransformer2DModel", caption_channels=16)
MOTION = {
    "motion_adapter": of(
        diffusers.MotionAdapter,
        block_out_channels=(8, 16),
        motion_layers_per_block=1,
        motion_norm_num_groups=4,
        motion_num_attention_heads=2,
    )
}
UNCONDITIONAL = {"unet": denoiser("UNet2DModel")}
HUNYUAN_DIT = with_denoiser(
    DEEP | DDPM | T5_2 | {
        "text_encoder": bert, "tokenizer": byte_tokenizer, "requires_safety_checker": of(bool),
    },
    "HunyuanDiT2DModel", cross_attention_dim=16, cross_attention_dim_t5=16, text_len=77, text_len_t5=256,
    pooled_projection_dim=16,
)  # fmt: skip
SANA = with_denoiser(
    GEMMA2 | DC | FLOW, "SanaTransformer2DModel", patch_size=1, caption_channels=16
)
WAN = with_denoiser(
    WAN_VAE | UNIPC | {"text_encoder": of(tiny.umt5), "tokenizer": byte_tokenizer},
    "WanTransformer3DModel",
    in_channels=16,
    out_channels=16,
)
COGVIDEOX = with_denoiser(
    T5 | {
        "scheduler": of(diffusers.CogVideoXDDIMScheduler, prediction_type="v_prediction"),
        "vae": of(
            diffusers.AutoencoderKLCogVideoX, in_channels=3, out_channels=3, norm_num_groups=2,
            temporal_compression_ratio=4, **levels("CogVideoX"),
        ),
    },
    "CogVideoXTransformer3DModel", text_embed_dim=16, max_text_seq_length=8,
)  # fmt: skip
LTX = with_denoiser(
    T5 | SHIFTING | {
        "vae": of(
            diffusers.AutoencoderKLLTXVideo, in_channels=3, out_channels=3, latent_channels=4,
            block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
            spatio_temporal_scaling=(True, True, False, False),
            decoder_spatio_temporal_scaling=(True, True, False, False), decoder_inject_noise=(False,) * 5,
            upsample_residual=(False,) * 4, upsample_factor=(1, 1, 1, 1), timestep_conditioning=False,
            patch_size=1, patch_size_t=1, encoder_causal=True, decoder_causal=False,
        ),
    },
    "LTXVideoTransformer3DModel", caption_channels=16,
)  # fmt: skip

CLIP_IMAGES = {
    "image_processor": of(
        transformers.CLIPImageProcessor,
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
    )
}
HUNYUAN_VIDEO_FROM_IMAGE: Parts = (
    HUNYUAN_VIDEO_VAE | FLOW | CLIP77_2 | CLIP_IMAGES
    | {"text_encoder": llava, "tokenizer": tokenizer_of_headers}
)  # fmt: skip
SEEN = {
    "template": "s<|end_header_id|><extra_id_41>d u<|end_header_id|>{}!a<|end_header_id|>",
    "crop_start": 7, "image_emb_len": 4, "image_emb_start": 2, "image_emb_end": 6,
}  # fmt: skip
"""A prompt of three roles with an image, `<extra_id_41>`, which is token 300."""
HUNYUAN_VIDEO_15 = with_denoiser(
    FLOW | T5_2 | {
        "guider": of(ClassifierFreeGuidance),
        "text_encoder": language_model(
            "Qwen2_5_VLText", rope_scaling={"rope_type": "default", "mrope_section": [1, 1, 2]},
        ),
        "tokenizer": long_tokenizer,
        "vae": of(
            diffusers.AutoencoderKLHunyuanVideo15, in_channels=3, out_channels=3, latent_channels=4,
            block_out_channels=(16, 16), layers_per_block=1, spatial_compression_ratio=4,
            temporal_compression_ratio=2, downsample_match_channel=False, upsample_match_channel=False,
        ),
        "image_encoder": siglip_vision,
        "feature_extractor": of(transformers.SiglipImageProcessor, size={"height": 28, "width": 28}),
    },
    "HunyuanVideo15Transformer3DModel", in_channels=9, patch_size=1, patch_size_t=1, text_embed_dim=16,
    text_embed_2_dim=16, target_size=16, task_type="t2v",
)  # fmt: skip
QWEN_EDIT = {
    "text_encoder": seeing_references, "tokenizer": lambda _: processor().tokenizer,
    "processor": lambda _: processor(),
}  # fmt: skip
SHORT = {"max_sequence_length": 8}
UNBINNED = {"use_resolution_binning": False}
FRAMES = {"num_frames": 5}
VIDEO = (3, 5, 32, 32)
PACKED = dict(in_channels=16, joint_attention_dim=16)
FLUX = with_denoiser(
    SHIFTED | CLIP | SHIFTING | T5_2, "FluxTransformer2DModel", **PACKED, pooled_projection_dim=16
)

PIPELINES: dict[str, TinyPipeline] = {
    # U-Nets
    "StableDiffusionPipeline": TinyPipeline(SD),
    "StableDiffusionPAGPipeline": TinyPipeline(SD),
    "StableDiffusionSAGPipeline": TinyPipeline(SD),
    "StableDiffusionPanoramaPipeline": TinyPipeline(SD),
    "StableDiffusionParadigmsPipeline": TinyPipeline(SD),
    "SemanticStableDiffusionPipeline": TinyPipeline(SD),
    "StableDiffusionGLIGENPipeline": TinyPipeline(
        SD | {"unet": of(tiny.unet, attention_type="gated")},
        drawn={"gligen_phrases": ["a cat"], "gligen_boxes": [[0.1, 0.2, 0.6, 0.9]]},
    ),
    "StableDiffusionPipelineSafe": TinyPipeline(SD),
    "StableDiffusionModelEditingPipeline": TinyPipeline(SD),
    "AltDiffusionPipeline": TinyPipeline(SD),
    "StableDiffusionInstructPix2PixPipeline": TinyPipeline(
        SD | {"unet": of(tiny.unet, in_channels=8)}, edits=True
    ),
    "LatentConsistencyModelPipeline": TinyPipeline(
        SD | {"unet": of(tiny.unet, time_cond_proj_dim=8), "scheduler": of(diffusers.LCMScheduler)}
    ),
    "LDMTextToImagePipeline": TinyPipeline(
        {"vqvae": DEEP["vae"], "bert": clip77} | DDIM | CLIP | {"unet": of(tiny.unet)}
    ),
    "StableDiffusionXLPipeline": TinyPipeline(SDXL),
    "StableDiffusionXLPAGPipeline": TinyPipeline(SDXL),
    "StableDiffusionXLInstructPix2PixPipeline": TinyPipeline(
        SDXL | {"unet": of(tiny.unet, **SDXL_UNET, in_channels=8)}, edits=True
    ),
    "IFPipeline": TinyPipeline(
        T5
        | DDPM
        | {
            "unet": of(tiny.unet, in_channels=3, out_channels=6),
            "requires_safety_checker": of(bool),
        },
        {"clean_caption": False},
    ),
    "Kandinsky3Pipeline": TinyPipeline(
        {
            **T5,
            **DDPM,
            "unet": denoiser("Kandinsky3UNet", encoder_hid_dim=16, in_channels=4),
            "movq": of(
                diffusers.VQModel, block_out_channels=(32,) * 3,
                down_block_types=("DownEncoderBlock2D",) * 2 + ("AttnDownEncoderBlock2D",),
                up_block_types=("AttnUpDecoderBlock2D",) + ("UpDecoderBlock2D",) * 2, norm_num_groups=4,
                latent_channels=4, norm_type="spatial", num_vq_embeddings=12, vq_embed_dim=4,
            ),
        }
    ),
    "AnimateDiffPipeline": TinyPipeline(SD | MOTION, FRAMES, VIDEO),
    "AnimateDiffPAGPipeline": TinyPipeline(SD | MOTION, FRAMES, VIDEO),
    "TextToVideoSDPipeline": TinyPipeline(
        SD | {"unet": denoiser("UNet3DConditionModel", cross_attention_dim=16)}, FRAMES, VIDEO
    ),
    "DreamLitePipeline": TinyPipeline(
        {
            "processor": long_tokenizer, **VAE, **FLOW,
            "text_encoder": vision_language_model("Qwen3VL", "ForConditionalGeneration"),
            "tokenizer": long_tokenizer, "unet": denoiser("DreamLiteUNetModel", cross_attention_dim=16),
        }
    ),
    # Images or sounds without a prompt
    "DDPMPipeline": TinyPipeline(UNCONDITIONAL | DDPM, pixels=(3, 16, 16)),
    "DDIMPipeline": TinyPipeline(UNCONDITIONAL | DDIM, pixels=(3, 16, 16)),
    "PNDMPipeline": TinyPipeline(
        UNCONDITIONAL | {"scheduler": of(diffusers.PNDMScheduler, skip_prk_steps=True)},
        pixels=(3, 16, 16),
    ),
    "ScoreSdeVePipeline": TinyPipeline(
        UNCONDITIONAL | {"scheduler": of(diffusers.ScoreSdeVeScheduler)}, pixels=(3, 16, 16)
    ),
    "KarrasVePipeline": TinyPipeline(
        UNCONDITIONAL | {"scheduler": of(diffusers.KarrasVeScheduler)}, pixels=(3, 16, 16)
    ),
    "ConsistencyModelPipeline": TinyPipeline(
        UNCONDITIONAL | {"scheduler": of(diffusers.CMStochasticIterativeScheduler)},
        pixels=(3, 16, 16),
    ),
    "LDMPipeline": TinyPipeline(
        {
            **DDIM, "vqvae": of(tiny.vae), "unet": denoiser("UNet2DModel", in_channels=4, out_channels=4),
        }
    ),
    "DiTPipeline": TinyPipeline(with_denoiser(VAE | DDIM, "DiTTransformer2DModel")),
    # Image transformers
    "PixArtAlphaPipeline": TinyPipeline(PIXART, {"clean_caption": False}, drawn=UNBINNED),
    "PixArtSigmaPipeline": TinyPipeline(PIXART, {"clean_caption": False}, drawn=UNBINNED),
    "PixArtSigmaPAGPipeline": TinyPipeline(PIXART, {"clean_caption": False}, drawn=UNBINNED),
    "HunyuanDiTPipeline": TinyPipeline(HUNYUAN_DIT, drawn=UNBINNED, pixels=(3, 64, 64)),
    "HunyuanDiTPAGPipeline": TinyPipeline(HUNYUAN_DIT, drawn=UNBINNED, pixels=(3, 64, 64)),
    "StableDiffusion3Pipeline": TinyPipeline(SD3, SHORT),
    "StableDiffusion3PAGPipeline": TinyPipeline(SD3, SHORT),
    "AuraFlowPipeline": TinyPipeline(
        with_denoiser(VAE | T5 | FLOW, "AuraFlowTransformer2DModel", joint_attention_dim=16),
        SHORT,
    ),
    "FluxPipeline": TinyPipeline(FLUX, SHORT),
    "FluxKontextPipeline": TinyPipeline(
        FLUX, SHORT, drawn={"max_area": 32 * 32, "_auto_resize": False}, edits=True
    ),
    "Flux2Pipeline": TinyPipeline(
        with_denoiser(
            PATCHED | SHIFTING | {
                "text_encoder": language_model("Mistral", "ForCausalLM"), "tokenizer": long_tokenizer,
            },
            "Flux2Transformer2DModel", **PACKED,
        ),
        SHORT | {"text_encoder_out_layers": (1,)},
    ),
    "Flux2KleinPipeline": TinyPipeline(
        with_denoiser(
            PATCHED | SHIFTING | {
                "text_encoder": language_model("Qwen3", "ForCausalLM"), "tokenizer": long_tokenizer,
            },
            "Flux2Transformer2DModel", **PACKED, guidance_embeds=False,
        ),
        SHORT | {"text_encoder_out_layers": (1,)},
    ),
    "ChromaPipeline": TinyPipeline(
        with_denoiser(SHIFTED | T5 | FLOW, "ChromaTransformer2DModel", **PACKED), SHORT
    ),
    "BriaPipeline": TinyPipeline(with_denoiser(SHIFTED | T5 | FLOW, "BriaTransformer2DModel", **PACKED), SHORT),
    "BriaFiboPipeline": TinyPipeline(
        with_denoiser(
            FLOW | {
                "vae": of(
                    diffusers.AutoencoderKLWan, base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                    temperal_downsample=[False, True, True], in_channels=12, out_channels=12, patch_size=2,
                    scale_factor_spatial=16,
                ),
                "text_encoder": language_model("SmolLM3", "ForCausalLM", vocab_size=128001),
                "tokenizer": byte_tokenizer,
            },
            "BriaFiboTransformer2DModel", in_channels=16, joint_attention_dim=32, text_encoder_dim=16,
        ),
        SHORT,
    ),
    "CogView3PlusPipeline": TinyPipeline(
        with_denoiser(
            VAE | T5 | {"scheduler": of(diffusers.CogVideoXDDIMScheduler, prediction_type="v_prediction")},
            "CogView3PlusTransformer2DModel", text_embed_dim=16, pos_embed_max_size=64,
        ),
        SHORT,
    ),
    "CogView4Pipeline": TinyPipeline(
        with_denoiser(
            VAE | SHIFTING | {"text_encoder": language_model("Glm"), "tokenizer": byte_tokenizer},
            "CogView4Transformer2DModel", text_embed_dim=16, pos_embed_max_size=64,
        ),
        SHORT,
    ),
    "ErnieImagePipeline": TinyPipeline(
        with_denoiser(
            PATCHED | FLOW | {"text_encoder": language_model("Qwen3"), "tokenizer": byte_tokenizer},
            "ErnieImageTransformer2DModel", in_channels=16, out_channels=16, text_in_dim=16,
        )
    ),
    "HiDreamImagePipeline": TinyPipeline(
        with_denoiser(
            SHIFTED | FLOW | T5_3 | {
                "text_encoder": of(tiny.clip_encoder, projection=16), "tokenizer": tiny.clip_tokenizer,
                "text_encoder_2": of(tiny.clip_encoder, projection=16), "tokenizer_2": tiny.clip_tokenizer,
                "text_encoder_4": language_model("Llama", "ForCausalLM"), "tokenizer_4": byte_tokenizer,
            },
            "HiDreamImageTransformer2DModel", caption_channels=[16, 16], text_emb_dim=32,
            llama_layers=(0, 1, 0, 1, 0, 1), max_resolution=(64, 64),
        ),
        SHORT,
        settings={"default_sample_size": 16},
    ),
    "HunyuanImagePipeline": TinyPipeline(
        with_denoiser(
            QWEN_VL | FLOW | T5_2 | {
                "vae": of(
                    diffusers.AutoencoderKLHunyuanImage, in_channels=3, out_channels=3, latent_channels=4,
                    block_out_channels=(32, 32, 32, 32), layers_per_block=1, scaling_factor=0.5,
                    spatial_compression_ratio=8, sample_size=128,
                ),
            },
            "HunyuanImageTransformer2DModel", text_embed_dim=16, text_embed_2_dim=16,
        )
    ),
    "Ideogram4Pipeline": TinyPipeline(
        PATCHED
        | FLOW
        | {
            "text_encoder": vision_language_model("Qwen3VL", "Model", num_hidden_layers=36),
            "tokenizer": long_tokenizer,
            **dict.fromkeys(
                ("transformer", "unconditional_transformer"),
                denoiser("Ideogram4Transformer2DModel", in_channels=16, llm_features_dim=13 * 16),
            ),
        },
        drawn={"guidance_schedule": None, "guidance_scale": 4.0},
    ),
    "Kandinsky5T2IPipeline": TinyPipeline(
        with_denoiser(
            QWEN_VL | DEEP | FLOW | CLIP77_2, "Kandinsky5Transformer3DModel", in_text_dim=16, in_text_dim2=16,
            patch_size=(1, 2, 2),
        ),
        SHORT,
        settings={"resolutions": [(32, 32)]},
    ),
    "Krea2Pipeline": TinyPipeline(
        with_denoiser(
            QWEN_VAE | SHIFTING | {
                "text_encoder": vision_language_model("Qwen3VL", "Model"), "tokenizer": long_tokenizer,
                "text_encoder_select_layers": of(tuple, (0, 1, 2)),
            },
            "Krea2Transformer2DModel", in_channels=16, text_hidden_dim=16,
        ),
        SHORT,
    ),
    "LongCatImagePipeline": TinyPipeline(
        with_denoiser(
            SHIFTING | QWEN_VL | {
                "vae": of(tiny.vae, latent_channels=16, shift_factor=0.1), "text_processor": long_tokenizer,
            },
            "LongCatImageTransformer2DModel", in_channels=64, joint_attention_dim=16, pooled_projection_dim=16,
        ),
        {"enable_prompt_rewrite": False},
    ),
    "Lumina2Pipeline": TinyPipeline(
        with_denoiser(GEMMA2 | DEEP | FLOW, "Lumina2Transformer2DModel", cap_feat_dim=16),
        SHORT,
    ),
    "LuminaPipeline": TinyPipeline(
        with_denoiser(
            DEEP | FLOW | {"text_encoder": language_model("Gemma", "ForCausalLM"), "tokenizer": byte_tokenizer},
            "LuminaNextDiT2DModel", cross_attention_dim=16,
        ),
        SHORT,
    ),
    "NucleusMoEImagePipeline": TinyPipeline(
        with_denoiser(
            QWEN_VAE | FLOW | {
                "text_encoder": vision_language_model("Qwen3VL", "ForConditionalGeneration"),
                "processor": long_tokenizer,
            },
            "NucleusMoEImageTransformer2DModel", joint_attention_dim=16, moe_enabled=False,
            capacity_factors=[8.0] * 6,
        ),
        {"max_sequence_length": 16, "return_index": -1},
    ),
    "OvisImagePipeline": TinyPipeline(
        with_denoiser(SHIFTED | QWEN3 | SHIFTING, "OvisImageTransformer2DModel", **PACKED, out_channels=16),
        SHORT,
    ),
    "PRXPipeline": TinyPipeline(
        with_denoiser(SHIFTED | T5 | FLOW, "PRXTransformer2DModel", context_in_dim=16),
        drawn=UNBINNED,
    ),
    "PRXPixelPipeline": TinyPipeline(
        with_denoiser(
            QWEN3 | FLOW | {"prompt_max_tokens": of(int, 16)}, "PRXTransformer2DModel", context_in_dim=16,
            in_channels=3, bottleneck_size=8, resolution_embeds=True,
        ),
        drawn=UNBINNED,
    ),
    "QwenImagePipeline": TinyPipeline(
        with_denoiser(QWEN_VL | QWEN_VAE | SHIFTING, "QwenImageTransformer2DModel", joint_attention_dim=16),
        SHORT,
    ),
    **{
        f"QwenImageEdit{kind}Pipeline": TinyPipeline(
            with_denoiser(
                QWEN_EDIT | QWEN_VAE | SHIFTING, "QwenImageTransformer2DModel", joint_attention_dim=16
            ),
            {"max_sequence_length": 480},
            edits=True,
            references=number,
        )
        for kind, number in (("", 1), ("Plus", 2))
    },
    "SanaPipeline": TinyPipeline(SANA, {"complex_human_instruction": None, **SHORT}, drawn=UNBINNED),
    "SanaPAGPipeline": TinyPipeline(SANA, {"complex_human_instruction": None, **SHORT}, drawn=UNBINNED),
    "SanaSprintPipeline": TinyPipeline(
        with_denoiser(
            SANA | {"scheduler": of(diffusers.SCMScheduler)}, "SanaTransformer2DModel", patch_size=1,
            caption_channels=16, guidance_embeds=True,
        ),
        {"complex_human_instruction": None, **SHORT},
        drawn=UNBINNED | {"intermediate_timesteps": None},
    ),
    "ZImagePipeline": TinyPipeline(
        with_denoiser(SHIFTED | QWEN3 | FLOW, "ZImageTransformer2DModel", cap_feat_dim=16),
        SHORT,
    ),
    # Video transformers
    "CogVideoXPipeline": TinyPipeline(
        COGVIDEOX,
        FRAMES | SHORT,
        VIDEO,
    ),
    "HunyuanVideoPipeline": TinyPipeline(
        with_denoiser(
            HUNYUAN_VIDEO_VAE | FLOW | CLIP77_2 | {
                "text_encoder": language_model("Llama"), "tokenizer": byte_tokenizer,
            },
            "HunyuanVideoTransformer3DModel", guidance_embeds=True, text_embed_dim=16, pooled_projection_dim=16,
        ),
        FRAMES | SHORT | {"prompt_template": {"template": "{}", "crop_start": 0}},
        VIDEO,
    ),
    "HunyuanVideo15Pipeline": TinyPipeline(HUNYUAN_VIDEO_15, FRAMES, VIDEO),
    "Kandinsky5T2VPipeline": TinyPipeline(
        with_denoiser(
            QWEN_VL | HUNYUAN_VIDEO_VAE | FLOW | CLIP77_2, "Kandinsky5Transformer3DModel", in_text_dim=16,
            in_text_dim2=16, patch_size=(1, 2, 2),
        ),
        FRAMES | SHORT,
        VIDEO,
    ),
    "LattePipeline": TinyPipeline(
        with_denoiser(
            VAE | T5 | DDIM, "LatteTransformer3DModel", caption_channels=16, sample_size=16, out_channels=8,
        ),
        {"video_length": 3, "clean_caption": False, "mask_feature": False},
        (3, 3, 32, 32),
    ),
    "LTXPipeline": TinyPipeline(
        LTX,
        FRAMES | SHORT,
        VIDEO,
    ),
    "MochiPipeline": TinyPipeline(
        with_denoiser(
            T5 | FLOW | {
                "vae": of(
                    diffusers.AutoencoderKLMochi, latent_channels=12, out_channels=3,
                    encoder_block_out_channels=(32, 32, 32, 32), decoder_block_out_channels=(32, 32, 32, 32),
                    layers_per_block=(1, 1, 1, 1, 1),
                ),
            },
            "MochiTransformer3DModel", in_channels=12, out_channels=None, text_embed_dim=16,
            pooled_projection_dim=16, max_sequence_length=8,
        ),
        {"num_frames": 7} | SHORT,
        (3, 7, 32, 32),
    ),
    "MotifVideoPipeline": TinyPipeline(
        with_denoiser(
            WAN_VAE | FLOW | T5 | {"guider": of(ClassifierFreeGuidance)}, "MotifVideoTransformer3DModel",
            in_channels=33, out_channels=16, patch_size=1, patch_size_t=1, text_embed_dim=16,
            image_embed_dim=None,
        ),
        FRAMES | SHORT,
        VIDEO,
    ),
    "SanaVideoPipeline": TinyPipeline(
        with_denoiser(
            GEMMA2 | WAN_VAE | UNIPC, "SanaVideoTransformer3DModel", in_channels=16, out_channels=16,
            caption_channels=16,
        ),
        {"complex_human_instruction": None, "frames": 5, **SHORT},
        VIDEO,
        drawn=UNBINNED,
    ),
    "SkyReelsV2Pipeline": TinyPipeline(
        with_denoiser(WAN, "SkyReelsV2Transformer3DModel", in_channels=16, out_channels=16),
        FRAMES | SHORT,
        VIDEO,
    ),
    "SkyReelsV2DiffusionForcingPipeline": TinyPipeline(
        with_denoiser(WAN, "SkyReelsV2Transformer3DModel", in_channels=16, out_channels=16),
        FRAMES | SHORT,
        VIDEO,
    ),
    "WanPipeline": TinyPipeline(WAN, FRAMES | SHORT, VIDEO),
    # Videos that begin with an image
    "WanImageToVideoPipeline": TinyPipeline(
        with_denoiser(
            WAN | {
                "image_encoder": clip_vision, **CLIP_IMAGES,
            },
            "WanTransformer3DModel image to video", in_channels=36, out_channels=16,
        ),
        FRAMES,  # its attention takes 512 tokens of the prompt for granted
        VIDEO,
        edits=True,
    ),
    "HunyuanVideoImageToVideoPipeline": TinyPipeline(
        with_denoiser(
            HUNYUAN_VIDEO_FROM_IMAGE, "HunyuanVideoTransformer3DModel token replace", text_embed_dim=16,
            pooled_projection_dim=16,
        ),
        FRAMES | {"max_sequence_length": 24, "prompt_template": SEEN},
        VIDEO,
        edits=True,
    ),
    "HunyuanVideo15ImageToVideoPipeline": TinyPipeline(
        HUNYUAN_VIDEO_15, FRAMES, VIDEO, edits=True,
        drawn={"image": Image.linear_gradient("L").convert("RGB").resize((32, 32))},  # takes one file
    ),
    "HunyuanSkyreelsImageToVideoPipeline": TinyPipeline(
        with_denoiser(
            HUNYUAN_VIDEO_VAE | FLOW | CLIP77_2 | {
                "text_encoder": language_model("Llama"), "tokenizer": byte_tokenizer,
            },
            "HunyuanVideoTransformer3DModel", in_channels=8, out_channels=4, guidance_embeds=False,
            text_embed_dim=16, pooled_projection_dim=16,
        ),
        FRAMES | SHORT | {"prompt_template": {"template": "{}", "crop_start": 0}},
        VIDEO,
        edits=True,
    ),
    "SkyReelsV2ImageToVideoPipeline": TinyPipeline(
        with_denoiser(
            WAN | {"image_encoder": clip_vision, **CLIP_IMAGES}, "SkyReelsV2Transformer3DModel", in_channels=36,
            out_channels=16, image_dim=6, added_kv_proj_dim=24,
        ),
        FRAMES,
        VIDEO,
        edits=True,
    ),
    "LTXImageToVideoPipeline": TinyPipeline(LTX, FRAMES | SHORT, VIDEO, edits=True),
    "CogVideoXImageToVideoPipeline": TinyPipeline(
        with_denoiser(
            COGVIDEOX, "CogVideoXTransformer3DModel", text_embed_dim=16, max_text_seq_length=8, in_channels=8,
            out_channels=4,
        ),
        FRAMES | SHORT,
        VIDEO,
        edits=True,
    ),
    "SanaImageToVideoPipeline": TinyPipeline(
        with_denoiser(
            GEMMA2 | WAN_VAE | FLOW, "SanaVideoTransformer3DModel", in_channels=16, out_channels=16,
            caption_channels=16,
        ),
        {"complex_human_instruction": None, "frames": 5, **SHORT},
        VIDEO,
        drawn=UNBINNED,
        edits=True,
    ),
    "ChronoEditPipeline": TinyPipeline(
        with_denoiser(
            WAN | FLOW | {"image_encoder": clip_vision, **CLIP_IMAGES}, "ChronoEditTransformer3DModel",
            in_channels=36, out_channels=16,
        ),
        FRAMES,
        VIDEO,
        edits=True,
    ),
    "AnimateDiffSDXLPipeline": TinyPipeline(SDXL | MOTION, FRAMES, VIDEO),
    "EasyAnimatePipeline": TinyPipeline(
        with_denoiser(
            FLOW | {
                "vae": of(
                    diffusers.AutoencoderKLMagvit, norm_num_groups=2, **levels("SpatialTemporal") | {
                        "down_block_types": ("SpatialDownBlock3D", *["SpatialTemporalDownBlock3D"] * 3),
                        "up_block_types": ("SpatialUpBlock3D", *["SpatialTemporalUpBlock3D"] * 3),
                    },
                ),
                "text_encoder": vision_language_model("Qwen2VL", "ForConditionalGeneration"),
                "tokenizer": long_tokenizer,
            },
            "EasyAnimateTransformer3DModel", text_embed_dim=16,
        ),
        FRAMES,
        VIDEO,
        drawn={"negative_prompt": ""},
    ),
    "Flux2KleinKVPipeline": TinyPipeline(
        with_denoiser(
            PATCHED | SHIFTING | {
                "text_encoder": language_model("Qwen3", "ForCausalLM"), "tokenizer": long_tokenizer,
            },
            "Flux2Transformer2DModel", **PACKED, guidance_embeds=False,
        ),
        SHORT | {"text_encoder_out_layers": (1,)},
    ),
}  # fmt: skip


def build(name: str, folder: Path, seed: int = 0, **parts: Any) -> Any:
    """One pipeline in evaluation mode, all weights of its denoiser perturbed; `parts` stand in for its own."""
    entry, cls = PIPELINES[name], getattr(diffusers, name)
    # Some clean captions with a library that they do not ask for.
    vars(sys.modules[cls.__module__]).setdefault("ftfy", types.SimpleNamespace(fix_text=str))
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    required = {p.name: None for p in parameters if p.default is p.empty}
    takes = {p.name for p in parameters}
    made = {part: make(folder) for part, make in entry.parts.items() if part in takes}
    pipeline = cls(**{**required, **made, **parts})
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            silence(part.eval())
    trained = next(n for n in ("transformer", "unet", "prior") if n in pipeline.components)
    perturb(pipeline.components[trained], torch.Generator().manual_seed(seed))
    return prepared(pipeline)


def prepared(pipeline: Any) -> Any:
    """A pipeline that draws small images, and says nothing."""
    name = type(pipeline).__name__
    vars(pipeline).update(PIPELINES[name].settings if name in PIPELINES else {})
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
