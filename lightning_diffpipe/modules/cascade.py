"""A cascade: a denoiser of small images, and one that upscales them, both in pixels and conditioned on text.

Both are trained at once, each on a loss of its own. The upscaler sees the training image made small, with noise
of a random level, which is an input, too (noise-conditioning augmentation): what the base samples later is no more
perfect than that. As neither reads what the other gives, stages of both run in opposite directions under
`schedule=bidirectional`.

Denoisers see patches: squares of pixels are folded into channels, so that a U-Net of few levels sees far.

Sources:
    Cascaded Diffusion Models, Ho et al. (2021), https://arxiv.org/abs/2106.15282
    Text-conditional cascades: Imagen, Saharia et al. (2022), https://arxiv.org/abs/2205.11487
"""

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import SchedulerMixin, UNet2DConditionModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_diffpipe.errors import ConfigurationError, require_number
from lightning_diffpipe.modules.latent_diffusion import (
    Tokens,
    denoised,
    drop_captions,
    start_noise,
    text_states,
    tokenize,
    uses_mask,
)
from lightning_diffpipe.modules.noise import Noise, noise_schedule_of
from lightning_diffpipe.modules.optimization import Optimization
from lightning_diffpipe.modules.parts import PartsModule


class CascadedDiffusion(PartsModule):
    """A text-conditional cascade of two pixel denoisers in training, and a plain sampler.

    Args:
        unet: The base: takes and gives `3 p p` channels for patches of `p` pixels, or `p p` of grey images; samples
            `sample_size * p` pixels.
        upscaler: Takes twice as many channels, of the noisy image and the small one as large as that, and gives
            half of them; has `class_embed_type="timestep"`, for the level of noise in the small one.
        text_encoder: Frozen text encoder, for both.
        tokenizer: Its tokenizer, with a `model_max_length`.
        scheduler: Names the prediction target of both, and samples.
        caption_dropout: Share of the training samples that lose their caption.
        most_noise: Highest level of noise in the small image, in [0, 1]; levels are sampled evenly below it.
        optimization: Optimizer and learning rate.

    Raises:
        ConfigurationError: A denoiser of other channels or sizes, or a number out of its range.
    """

    part_names = ("unet", "upscaler", "text_encoder", "tokenizer", "scheduler")

    def __init__(
        self,
        unet: UNet2DConditionModel,
        upscaler: UNet2DConditionModel,
        text_encoder: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        scheduler: SchedulerMixin,
        caption_dropout: float = 0.1,
        most_noise: float = 0.5,
        optimization: Optimization | None = None,
    ) -> None:
        super().__init__()
        require_number("caption_dropout", caption_dropout, 0, 1)
        require_number("most_noise", most_noise, 0, 1)
        _check_cascade({"unet": unet.config, "upscaler": upscaler.config})
        self.save_hyperparameters("caption_dropout", "most_noise")
        self.unet, self.upscaler = unet, upscaler
        self.text_encoder, self.tokenizer = text_encoder, tokenizer
        self.scheduler = scheduler
        self.optimization = optimization or Optimization()
        self.noise_schedule = noise_schedule_of(scheduler, Noise(logit_mean=0.3))
        self.frozen_parts = ("text_encoder",)
        self.freeze_parts()

    def _replaced(self, index: Mapping[str, Any]) -> dict[str, Any]:
        entries = {"_class_name": type(self).__name__}
        return entries | {name: [None, None] for name in index if name in ("vae", "transformer")}

    # ------------------------------------------------------------------ training

    def require_size(self, height: int, width: int) -> None:
        """Raises ConfigurationError unless images have the size, in pixels, that the upscaler samples."""
        if {height, width} != {self._pixels(self.upscaler)}:
            raise ConfigurationError(
                f"the upscaler samples {self._pixels(self.upscaler)} pixels, but images have {width}; "
                "set data.resolution, or the upscaler's sample_size"
            )

    def losses(
        self, batch: Mapping[str, Any], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Computes the losses of the base and of the upscaler, and their sum.

        The batch has `image`, `(B, 3, H, W)` in [-1, 1], of the upscaler's size, and `caption`, B strings; the
        generator is that of the noise in validation, None in training.
        """
        images = batch["image"]
        tokens = tokenize(self.tokenizer, batch["caption"], self.device)
        if generator is None:
            tokens = drop_captions(self.tokenizer, tokens, self.hparams.caption_dropout)
        states, pixels = text_states(self.text_encoder, tokens), self._pixels(self.unet)
        self.require_size(*images.shape[-2:])
        if _colors(self.unet.config) == 1:
            images = images.mean(1, keepdim=True)
        small = F.interpolate(images, (pixels, pixels), mode="area")
        corrupted = self.noise_schedule.corrupt(self._folded(small, self.unet), generator)
        prediction = self._predict(self.unet, corrupted.noisy, corrupted.timesteps, states, tokens)
        base = F.mse_loss(prediction, corrupted.target)

        corrupted = self.noise_schedule.corrupt(self._folded(images, self.upscaler), generator)
        at = {"generator": generator, "device": images.device}
        level = self.hparams.most_noise * torch.rand(len(images), **at)
        noise = torch.randn(small.shape, dtype=small.dtype, **at)
        conditions = self._upscaler_inputs(small, level, noise)
        prediction = self._predict(
            self.upscaler, corrupted.noisy, corrupted.timesteps, states, tokens, *conditions
        )
        upscaled = F.mse_loss(prediction, corrupted.target)
        return {"base_loss": base, "upscaler_loss": upscaled, "loss": base + upscaled}

    def _upscaler_inputs(
        self, small: Tensor, level: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the small image with noise, enlarged to the upscaler's size, and the level of the noise."""
        spread = level.view(-1, 1, 1, 1)
        noisy = (1 - spread.square()).sqrt() * small + spread * noise
        size = (self._pixels(self.upscaler),) * 2
        large = F.interpolate(noisy, size, mode="bilinear", align_corners=False)
        return self._folded(large, self.upscaler), level

    def _predict(
        self,
        denoiser: UNet2DConditionModel,
        noisy: Tensor,
        timesteps: Tensor,
        states: Tensor,
        tokens: Tokens,
        small: Tensor | None = None,
        level: Tensor | None = None,
    ) -> Tensor:
        """Returns the target of the noise schedule, fp32."""
        mask = tokens.attention_mask if uses_mask(self.text_encoder) else None
        seen = noisy if small is None else torch.cat([noisy, small], 1)
        return denoiser(
            seen.to(denoiser.dtype),
            timestep=timesteps,
            encoder_hidden_states=states.to(denoiser.dtype),
            encoder_attention_mask=mask,
            class_labels=None if level is None else 1000 * level,
        ).sample.float()

    def _folded(self, images: Tensor, denoiser: UNet2DConditionModel) -> Tensor:
        return F.pixel_unshuffle(images, _patch(denoiser.config))

    def _pixels(self, denoiser: UNet2DConditionModel) -> int:
        """Returns the width, in pixels, of the images of a denoiser."""
        return denoiser.config.sample_size * _patch(denoiser.config)

    # ------------------------------------------------------------------ sampling

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[str],
        num_inference_steps: int = 25,
        guidance_scale: float = 4.0,
        generator: torch.Generator | None = None,
        noise_level: float = 0.1,
        small: Tensor | None = None,
    ) -> Tensor:
        """Samples one image per prompt: first the base, then the upscaler.

        Args:
            prompts: Texts, one for each image.
            num_inference_steps: Denoising steps of each.
            guidance_scale: Strength of classifier-free guidance; 1 for none.
            generator: Generator of all noise; its device may be another.
            noise_level: Level of the noise added to the base's images, in [0, 1]; CDM tries several after training.
            small: Images to upscale, `(len(prompts), 3, h, w)` in [0, 1]; sampled by the base if not given.

        Returns:
            `(len(prompts), 3, H, W)` in [0, 1].
        """
        require_number("noise_level", noise_level, 0, 1)
        twice, is_grey = 1 + (guidance_scale != 1), _colors(self.unet.config) == 1
        captions = [""] * len(prompts) * (twice - 1) + list(prompts)
        tokens = tokenize(self.tokenizer, captions, self.device)

        def noise(pixels: int) -> Tensor:
            shape = (len(prompts), _colors(self.unet.config), pixels, pixels)
            return start_noise(shape, generator, self.device)

        def sampled(denoiser: UNet2DConditionModel, *conditions: Tensor) -> Tensor:
            conditions = tuple(torch.cat([each] * twice) for each in conditions)
            patch = _patch(denoiser.config)
            start = noise(self._pixels(denoiser))
            patches = denoised(
                self.scheduler,
                F.pixel_unshuffle(start, patch),
                lambda noisy, t: self._predict(denoiser, noisy, t, states, tokens, *conditions),
                num_inference_steps,
                guidance_scale,
                generator,
            )
            return F.pixel_shuffle(patches, patch).clamp(-1, 1)

        with self.evaluating():
            states = text_states(self.text_encoder, tokens)
            if small is None:
                small = sampled(self.unet)
            else:
                small = 2 * small.to(self.device) - 1
                small = small.mean(1, keepdim=True) if is_grey else small
            level = torch.full((len(prompts),), noise_level, device=self.device)
            inputs = self._upscaler_inputs(small, level, noise(small.shape[-1]))
            return sampled(self.upscaler, *inputs).expand(-1, 3, -1, -1) / 2 + 0.5


def _colors(config: Mapping[str, Any]) -> int:
    """Returns 1 for a denoiser of grey images, of which the mean of the colors is trained, and 3 for others.

    It gives `p p` or `3 p p` channels, and three times a square is no square.
    """
    gives = config["out_channels"]
    return 1 if isqrt(gives) ** 2 == gives else 3


def _patch(config: Mapping[str, Any]) -> int:
    """Returns the width of the squares of pixels that a denoiser sees as one."""
    return isqrt(config["out_channels"] // _colors(config))


def _check_denoiser(name: str, config: Mapping[str, Any]) -> None:
    """Raises ConfigurationError where channels are not those of patches, or the size is not known."""
    takes, gives = config["in_channels"], config["out_channels"]
    is_upscaler = name == "upscaler"
    if _colors(config) * _patch(config) ** 2 != gives or takes != gives * (1 + is_upscaler):
        inputs = " and takes twice as many, half of them of the small image" * is_upscaler
        raise ConfigurationError(
            f"{name} takes {takes} channels and gives {gives}: in a cascade it gives 3 p p, for colors of "
            f"patches of p x p pixels, or p p for grey ones{inputs}"
        )
    if not isinstance(config.get("sample_size"), int):
        raise ConfigurationError(
            f"{name}.sample_size={config.get('sample_size')}: give the width, in patches, of what it samples"
        )


def _check_cascade(configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ConfigurationError unless both denoisers can be trained, and fit each other's images."""
    for name, config in configs.items():
        _check_denoiser(name, config)
    colors = {name: _colors(config) for name, config in configs.items()}
    if colors["unet"] != colors["upscaler"]:
        raise ConfigurationError(
            f"by their output channels the unet samples {colors['unet']} colors and the upscaler "
            f"{colors['upscaler']}; both sample colored images (3 p p channels), or grey ones (p p)"
        )
    if configs["upscaler"].get("class_embed_type") != "timestep":
        raise ConfigurationError(
            "the upscaler takes the level of noise in the small image by class_embed_type=timestep; got "
            f"{configs['upscaler'].get('class_embed_type')!r}"
        )
    small, large = (
        configs[name]["sample_size"] * _patch(configs[name]) for name in ("unet", "upscaler")
    )
    if small >= large:
        raise ConfigurationError(
            f"the upscaler samples {large} pixels (sample_size times its patches), and the base {small}: not fewer"
        )
