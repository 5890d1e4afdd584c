"""Smallest diffusers pipelines of every kind that can be sampled, with random weights, built offline.

Every parameter is perturbed, so that no gate or output layer starts at zero and hides what is behind it.
"""

import functools
import json
import shutil

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image

from tests.modules.tiny_parts import (
    tiny_clip,
    tiny_text_encoder,
    tiny_tokenizer,
    tiny_unet,
    tiny_vae,
)
from tests.zoo.case import perturb

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}


def clip_tokenizer(folder):
    """A CLIP tokenizer that knows single characters only."""
    pieces = [*LETTERS, *(letter + "</w>" for letter in LETTERS)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = folder / "vocab.json"
    vocabulary.write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    merges = folder / "merges.txt"
    merges.write_text("#version: 0.2\n")
    return transformers.CLIPTokenizer(str(vocabulary), str(merges), model_max_length=12)


def clip_encoder(width=16, projection=None):
    kind = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return tiny_clip(
        kind, vocab_size=80, hidden_size=width, intermediate_size=width, num_hidden_layers=2,
        max_position_embeddings=12, projection_dim=projection or width, bos_token_id=72, eos_token_id=73,
        pad_token_id=73,
    )  # fmt: skip


vae = functools.partial(tiny_vae, 0.18215)


def unet(**config):
    defaults = {
        "sample_size": 16, "down_block_types": ("CrossAttnDownBlock2D",) * 2,
        "up_block_types": ("CrossAttnUpBlock2D",) * 2, "attention_head_dim": 4,
    }  # fmt: skip
    return tiny_unet(**defaults | config)


def stable_diffusion(folder):
    return diffusers.StableDiffusionPipeline(
        vae=vae(), text_encoder=clip_encoder(), tokenizer=clip_tokenizer(folder), unet=unet(),
        scheduler=diffusers.EulerDiscreteScheduler(steps_offset=1), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip


def sdxl(folder):
    return diffusers.StableDiffusionXLPipeline(
        vae=vae(),
        text_encoder=clip_encoder(),
        text_encoder_2=clip_encoder(projection=16),
        tokenizer=clip_tokenizer(folder),
        tokenizer_2=clip_tokenizer(folder),
        unet=unet(
            cross_attention_dim=32,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=16 + 6 * 8,
            transformer_layers_per_block=(1, 2),
        ),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        add_watermarker=False,
    )


def pixart(folder, num_layers=4):
    return diffusers.PixArtAlphaPipeline(
        vae=vae(),
        text_encoder=tiny_text_encoder(),
        tokenizer=tiny_tokenizer(),
        transformer=diffusers.PixArtTransformer2DModel(
            **HEADS, in_channels=4, out_channels=8, num_layers=num_layers, cross_attention_dim=16,
            caption_channels=16, sample_size=16, patch_size=2, norm_num_groups=4,
        ),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )  # fmt: skip


def sd3(folder):
    return diffusers.StableDiffusion3Pipeline(
        vae=vae(latent_channels=4, shift_factor=0.1),
        text_encoder=clip_encoder(width=8, projection=8),
        text_encoder_2=clip_encoder(width=8, projection=8),
        text_encoder_3=tiny_text_encoder(),
        tokenizer=clip_tokenizer(folder),
        tokenizer_2=clip_tokenizer(folder),
        tokenizer_3=tiny_tokenizer(),
        transformer=diffusers.SD3Transformer2DModel(
            **HEADS, sample_size=16, in_channels=4, out_channels=4, num_layers=4, joint_attention_dim=16,
            caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=24,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )  # fmt: skip


def flux(folder, guidance_embeds=True):
    return diffusers.FluxPipeline(
        vae=vae(latent_channels=4, shift_factor=0.1),
        text_encoder=clip_encoder(),
        text_encoder_2=tiny_text_encoder(),
        tokenizer=clip_tokenizer(folder),
        tokenizer_2=tiny_tokenizer(),
        transformer=diffusers.FluxTransformer2DModel(
            in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(2, 2, 4),
            guidance_embeds=guidance_embeds,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    )  # fmt: skip


def dit(folder):
    return diffusers.DiTPipeline(
        vae=vae(),
        transformer=diffusers.DiTTransformer2DModel(
            **HEADS, in_channels=4, out_channels=8, num_layers=4, sample_size=16, norm_num_groups=4
        ),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
    )


def umt5():
    config = transformers.UMT5Config(
        vocab_size=384, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4
    )
    return transformers.UMT5EncoderModel(config)


def wan_vae():
    return diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
    )  # fmt: skip


def wan(folder):
    return diffusers.WanPipeline(
        vae=wan_vae(),
        text_encoder=umt5(),
        tokenizer=tiny_tokenizer(),
        transformer=diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16, num_layers=4,
            text_dim=16, freq_dim=32, ffn_dim=32, rope_max_seq_len=32,
        ),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )  # fmt: skip


def wan_experts(folder):
    """Wan 2.2, with a denoiser for noisier times and one for the others."""
    parts = wan(folder).components
    parts["transformer_2"] = diffusers.WanTransformer3DModel.from_config(
        parts["transformer"].config
    )
    return diffusers.WanPipeline(**parts, boundary_ratio=0.875)


PIPELINES = {f.__name__: f for f in (stable_diffusion, sdxl, pixart, sd3, flux, dit, wan)}

PROMPTS = {"dit": [3, 7]}
SIZE = {"height": 32, "width": 32}
OPTIONS = {
    "dit": {},
    "pixart": SIZE | {"use_resolution_binning": False, "clean_caption": False},
    "sd3": SIZE | {"max_sequence_length": 8},
    "flux": SIZE | {"max_sequence_length": 8},
    "wan": {"height": 64, "width": 32, "num_frames": 5, "max_sequence_length": 8},
}
OPTIONS["wan_experts"] = OPTIONS["wan"]


def prompts_of(name):
    return PROMPTS.get(name, ["a cat 1", "dog b"])


def options_of(name):
    return OPTIONS.get(name, SIZE)


def images_of(output):
    """Images or videos of a pipeline's output."""
    return output.frames if hasattr(output, "frames") else output.images


def by_diffusers(path, name="stable_diffusion", seed=0, dtype=torch.float32, **options):
    """Images or videos that diffusers alone draws, of the prompts of a tiny pipeline."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(path), dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    given = {"generator": torch.Generator().manual_seed(seed), "output_type": "pil", **options}
    if "prompt_embeds" not in options:
        given["class_labels" if name == "dit" else "prompt"] = prompts_of(name)
    torch.manual_seed(0)  # some encode an image with noise of the default generator
    return images_of(pipeline(**given))


def random_image(seed=0):
    values = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    return Image.fromarray(values)


def build(name, folder, seed=0):
    """One pipeline with perturbed weights in evaluation mode; `folder` takes vocabularies."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    pipeline = (PIPELINES | {"wan_experts": wan_experts})[name](folder)
    generator = torch.Generator().manual_seed(seed)
    for part in ("unet", "transformer", "transformer_2"):
        if denoiser := pipeline.components.get(part):
            perturb(denoiser, generator)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def with_scheduler(folder, to, scheduler):
    """A copy of a saved pipeline that has another scheduler."""
    shutil.copytree(folder, to)
    scheduler.save_pretrained(to / "scheduler")
    index = json.loads((to / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", type(scheduler).__name__]
    (to / "model_index.json").write_text(json.dumps(index))
    return to


def thresholding():
    """A scheduler that looks at all rows of the latents in one step."""
    return diffusers.DDIMScheduler(
        thresholding=True, sample_max_value=9.0, steps_offset=1, clip_sample=False
    )
