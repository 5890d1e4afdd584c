"""Smallest parts of every kind a LatentDiffusion is made of, and a whole one."""

from unittest import mock

import diffusers
import lightning as L
import torch
import transformers
from torch.utils.data import DataLoader

from lightning_diffpipe import ControlNetDiffusion, LatentDiffusion
from lightning_diffpipe.modules import CascadedDiffusion
from tests import gpu_like
from tests.zoo.case import perturb


def tiny_vae(scaling_factor=0.7, block_out_channels=(8, 8), norm_num_groups=4, **options):
    depth = len(block_out_channels)
    return diffusers.AutoencoderKL(
        block_out_channels=block_out_channels, down_block_types=("DownEncoderBlock2D",) * depth,
        up_block_types=("UpDecoderBlock2D",) * depth, norm_num_groups=norm_num_groups,
        scaling_factor=scaling_factor, **options,
    )  # fmt: skip


def tiny_unet(**options):
    defaults = {
        "sample_size": 4, "in_channels": 4, "out_channels": 4, "block_out_channels": (8, 16),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "layers_per_block": 1, "cross_attention_dim": 16,
        "attention_head_dim": 8, "norm_num_groups": 4,
    }  # fmt: skip
    return diffusers.UNet2DConditionModel(**defaults | options)


def tiny_transformer(learns_variance=False):
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8 if learns_variance else 4,
        num_layers=2, cross_attention_dim=16, caption_channels=16, sample_size=4, patch_size=1,
        interpolation_scale=1, use_additional_conditions=False,
    )  # fmt: skip


def tiny_text_encoder():
    config = transformers.T5Config(
        vocab_size=384, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, dropout_rate=0.1
    )
    return transformers.T5EncoderModel(config)


def tiny_tokenizer():
    return transformers.ByT5Tokenizer(model_max_length=24)


SCHEDULERS = {
    "flow": lambda: diffusers.FlowMatchEulerDiscreteScheduler(),
    "epsilon": lambda: diffusers.DDIMScheduler(),
    "v": lambda: diffusers.DDIMScheduler(prediction_type="v_prediction"),
}


def tiny_latent_diffusion(denoiser="transformer", prediction="flow", in_channels=4, **options):
    """All parts together; the same arguments give the same weights."""
    torch.manual_seed(0)
    part = tiny_unet(in_channels=in_channels) if denoiser == "unet" else tiny_transformer()
    return LatentDiffusion(
        tiny_vae(), tiny_text_encoder(), tiny_tokenizer(), SCHEDULERS[prediction](), **{denoiser: part}, **options,
    )  # fmt: skip


def tiny_cascade(prediction="flow", unet=None, upscaler=None, **options):
    """A base of 4 pixels and an upscaler of 8; no weight of either is zero."""
    torch.manual_seed(0)
    base = {"in_channels": 3, "out_channels": 3}
    large = {"in_channels": 24, "out_channels": 12, "class_embed_type": "timestep"}
    module = CascadedDiffusion(
        tiny_unet(**base | (unet or {})), tiny_unet(**large | (upscaler or {})), tiny_text_encoder(),
        tiny_tokenizer(), SCHEDULERS[prediction](), **options,
    )  # fmt: skip
    for part in (module.unet, module.upscaler):
        perturb(part, torch.Generator().manual_seed(0))
    return module


def perturbed_latent_diffusion():
    """One whose transformer has no weights that are zero."""
    module = tiny_latent_diffusion()
    perturb(module.transformer, torch.Generator().manual_seed(0))
    return module


def tiny_clip(kind=transformers.CLIPTextModel, **options):
    """A text encoder whose padding is text, as in Stable Diffusion."""
    defaults = {
        "vocab_size": 384,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
    }
    return kind(transformers.CLIPTextConfig(num_attention_heads=2, **defaults | options))


def tiny_controlnet_diffusion(prediction="epsilon", perturbed=True, **options):
    """A ControlNet on a locked U-Net; `perturbed`: none of its weights is zero, as those of its exits would be."""
    torch.manual_seed(0)
    module = ControlNetDiffusion(
        tiny_vae(), tiny_clip(), tiny_tokenizer(), SCHEDULERS[prediction](), tiny_unet(), **options
    )
    if perturbed:
        perturb(module.controlnet, torch.Generator().manual_seed(0))
    return module


def save_with_averages(path):
    """A training checkpoint of one, with averaged weights that differ from the trained ones."""
    module = perturbed_latent_diffusion()
    averages = {n: p + 0.1 for n, p in module.named_parameters() if n.startswith("transformer.")}
    save_checkpoint(module, path, callbacks={"EMA": {"averages": averages, "num_updates": 1}})


def save_checkpoint(module, path, **further):
    """A training checkpoint of a module, without a trainer."""
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    module.on_save_checkpoint(checkpoint)
    torch.save(checkpoint | further, path)


def perturb_adapters(module):
    """Moves the adapters of LoRA from zero, with which they begin."""
    for name, weight in module.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)


def loss_of(module, batch, seed=0):
    """The loss of a training step, without a trainer, in whose loop alone Lightning logs."""
    torch.manual_seed(seed)
    with mock.patch.object(module, "log"):
        return module.training_step(batch, 0)


def fit(module, batch, folder, steps=3, validation=None, **options):
    """Trains some steps on one batch."""
    trainer = L.Trainer(
        max_steps=steps, accelerator=gpu_like.ACCELERATOR, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader([batch] * steps, batch_size=None), validation)
    return trainer
