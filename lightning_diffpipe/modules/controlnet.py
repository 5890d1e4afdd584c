"""ControlNet: a second image says where things shall be, and a trained copy of half a U-Net listens to it.

    condition ──> ControlNet (trained) ──┬─ residuals of every level
                      ▲                  ▼
    noisy latents ────┴──> U-Net, down ──+── up ──> prediction
                           (locked)         (locked, but gradients go through)

The way down of the locked U-Net needs noise, time and text only, neither the ControlNet nor any weight in training.
So it is frozen work like the autoencoder and the text encoder, though it cannot be computed once for all epochs,
and a pipeline runs it in its bubbles.

Source: Adding Conditional Control to Text-to-Image Diffusion Models, Zhang et al. (2023), https://arxiv.org/abs/2302.05543.
Half of the captions are dropped as in its section 3.3, so that the condition has to be understood without them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import AutoencoderKL, ControlNetModel, SchedulerMixin, UNet2DConditionModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.modules.latent_diffusion import WITHOUT_CONTROLNET, LatentDiffusion
from lightning_diffpipe.modules.optimization import Optimization
from lightning_diffpipe.sampling.source import load_part

_WITH_CONTROLNET = {plain: name for name, plain in WITHOUT_CONTROLNET.items()}
_COPIED = ("block_out_channels", "down_block_types", "layers_per_block", "cross_attention_dim")
_EMBEDDING = (16, 32, 96, 256)  # channels of the condition on its way down to the size of latents


class ControlNetDiffusion(LatentDiffusion):
    """A ControlNet in training on a locked latent diffusion model, and a plain sampler.

    Batches have a `condition`, next to `image` and `caption`: `(B, 3, H, W)` in [0, 1], of the size of the images.
    The data modules of this package add one (`condition="edges"`, or images of your own).

    Parts and settings are those of `LatentDiffusion`, whose U-Net is locked, and:

    Args:
        controlnet: Goes on from this one; None copies the U-Net's way down, and begins without any influence.

    Raises:
        ConfigurationError: The ControlNet was made for another U-Net, or another autoencoder.

    Example:
        >>> module = ControlNetDiffusion.from_pretrained("examples/glyphs")  # doctest: +SKIP
        >>> trainer.fit(module, GlyphDataModule(condition="edges"))  # doctest: +SKIP
        >>> module.sample(["digit four, serif"], condition=edges)  # doctest: +SKIP
    """

    part_names = ("unet", "controlnet", "vae", "text_encoder", "tokenizer", "scheduler")
    samples_to_conditions = True  # the callback SampleImages asks

    def __init__(
        self,
        vae: AutoencoderKL,
        text_encoder: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        scheduler: SchedulerMixin,
        unet: UNet2DConditionModel,
        controlnet: ControlNetModel | None = None,
        caption_dropout: float = 0.5,
        optimization: Optimization | None = None,
    ) -> None:
        super().__init__(
            vae,
            text_encoder,
            tokenizer,
            scheduler,
            unet=unet,
            caption_dropout=caption_dropout,
            optimization=optimization,
        )
        for name in ("train_text_encoder", "self_conditioning"):  # no arguments of this class
            self.hparams.pop(name)
        levels = len(vae.config.block_out_channels)
        if controlnet is None:
            channels = (*_EMBEDDING, *_EMBEDDING[-1:] * levels)[:levels]
            controlnet = ControlNetModel.from_unet(
                unet, conditioning_embedding_out_channels=channels
            )
        _check_controlnet(controlnet, unet, levels)
        self.controlnet = controlnet
        self.frozen_parts = ("vae", "text_encoder", "unet")
        self.freeze_parts()

    @classmethod
    def from_pretrained(
        cls, path: str | Path, controlnet: ControlNetModel | str | Path | None = None, **kwargs: Any
    ) -> Self:
        """Reads the model that is locked, and a ControlNet if there is one in its folder.

        Args:
            path: Folder with `model_index.json`, or a hub id.
            controlnet: Goes on from this one, or from that of a folder or hub id of its own; None takes that of
                `path` if it has one, and makes a new one otherwise.
            kwargs: Further arguments of `__init__`; a part given here replaces the stored one.

        Raises:
            ConfigurationError: There is no such folder.
            CheckpointError: The folder of the ControlNet lacks weights.
        """
        if isinstance(controlnet, (str, Path)):
            try:
                controlnet = load_part(str(controlnet), "", ("diffusers", "ControlNetModel"))
            except OSError as error:
                raise ConfigurationError(
                    f"{str(controlnet)!r} is neither a folder of a ControlNet (config.json beside its weights) nor "
                    "a hub model on this machine; check controlnet, or allow downloads (offline=false on the "
                    f"command line). The reason: {str(error).strip()}"
                ) from error
        parts = {} if controlnet is None else {"controlnet": controlnet}
        return super().from_pretrained(path, **parts, **kwargs)

    def _replaced(self, index: Mapping[str, Any]) -> dict[str, Any]:
        entries = super()._replaced(index)
        name = entries["_class_name"]
        return entries | {"_class_name": _WITH_CONTROLNET.get(name, name)}

    def denoise(
        self, noisy: Tensor, timesteps: Tensor, states: Tensor, mask: Tensor, **conditions: Tensor
    ) -> Tensor:
        """Predicts as `LatentDiffusion.denoise`, with the ControlNet's residuals in the U-Net.

        Conditions are `condition`, `(B, 3, H, W)` in [0, 1]. The mask is for the U-Net, as ControlNets take none.
        """
        dtype = self.controlnet.dtype
        down, middle = self.controlnet(
            noisy.to(dtype),
            timesteps,
            encoder_hidden_states=states.to(dtype),
            controlnet_cond=conditions["condition"].to(dtype),
            return_dict=False,
        )
        return super().denoise(
            noisy,
            timesteps,
            states,
            mask,
            down_block_additional_residuals=down,
            mid_block_additional_residual=middle,
        )

    def _conditions(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        condition = batch.get("condition")
        if condition is None:
            raise ConfigurationError(
                "batches have no 'condition', the image that a ControlNet is shown: (B, 3, H, W) in [0, 1]. "
                "Data modules of this package add one with condition='edges' (data.condition=edges), or with "
                "images of your own, see docs/pretrained.md"
            )
        if "image" in batch and condition.shape[-2:] != batch["image"].shape[-2:]:
            raise ConfigurationError(
                f"conditions of {_size(condition)} pixels next to images of {_size(batch['image'])}: they must be "
                "of one size, as a ControlNet says where in the image something shall be"
            )
        return {"condition": condition}

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[str],
        num_inference_steps: int = 25,
        guidance_scale: float = 4.0,
        generator: torch.Generator | None = None,
        condition: Tensor | None = None,
    ) -> Tensor:
        """Samples one image per prompt and condition, of the condition's size, as `LatentDiffusion.sample`.

        Guidance sees the condition, `(len(prompts), 3, H, W)` in [0, 1], with and without the prompt.

        Raises:
            ConfigurationError: There is no condition, or not one for each prompt.
        """
        count = 0 if condition is None else len(condition)
        if condition is None or count != len(prompts):
            raise ConfigurationError(
                f"{len(prompts)} prompts and {count} conditions: a ControlNet samples each prompt to a condition. "
                "Give condition=(len(prompts), 3, H, W) in [0, 1]; images sampled while training take captions and "
                "conditions of the data where no prompts are named (callbacks.samples.prompts=null)"
            )
        height, width = condition.shape[-2:]
        settings = num_inference_steps, guidance_scale, generator, (height, width)
        return self._drawn(prompts, *settings, condition=condition.to(self.device))


def _size(images: Tensor) -> str:
    return "x".join(map(str, images.shape[-2:]))


def _check_controlnet(
    controlnet: ControlNetModel, unet: UNet2DConditionModel, vae_levels: int
) -> None:
    """Refuses what would fail inside a layer, by configs."""
    if not isinstance(controlnet, ControlNetModel):
        raise ConfigurationError(
            f"controlnet must be a ControlNetModel; this is a {type(controlnet).__name__}. Write a LightningModule "
            "whose training_step calls it; the strategy runs it unchanged"
        )
    for key in _COPIED:
        value, base = _plain(controlnet.config[key]), _plain(unet.config[key])
        if value != base:
            raise ConfigurationError(
                f"this ControlNet was made for another U-Net: its {key} is {value}, and that of this U-Net {base}"
            )
    channels = controlnet.config.conditioning_embedding_out_channels
    if len(channels) != vae_levels:
        raise ConfigurationError(
            f"this ControlNet shrinks conditions by {2 ** (len(channels) - 1)}, but the autoencoder shrinks "
            f"images by {2 ** (vae_levels - 1)}; make one with {vae_levels} conditioning_embedding_out_channels"
        )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value
