"""Latent diffusion: a denoiser trained on the latents of a frozen autoencoder, conditioned on text.

`training_step` is an ordinary one: encode images, encode captions, add noise, predict, compare. It
has no control flow on values of tensors and never reads one on the host, so a strategy may run any
stretch of it on any rank, and a GPU is never waited for.

Caption dropout, which makes classifier-free guidance possible, replaces token ids by those of the empty caption
before the text encoder runs: no second encoder call, and the frozen text encoder stays free of anything random.

Captions have one fixed length, because every microbatch must have the same shapes: padding to the longest caption
of a batch would give stages boundaries that change from batch to batch.

With self-conditioning the denoiser also gets an estimate of the clean latents, in input channels of its own:
zeros, or, if a coin says so, what a first pass without gradients makes of the same noisy latents. Sampling
gives it the estimate of the step before.

Sources:
    Latent Diffusion, Rombach et al. (2022), https://arxiv.org/abs/2112.10752
    Classifier-free guidance, Ho & Salimans (2022), https://arxiv.org/abs/2207.12598
    Self-conditioning: Analog Bits, Chen et al. (2022), https://arxiv.org/abs/2208.04202
"""

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import diffusers
import torch
from diffusers import (
    AutoencoderKL,
    PixArtTransformer2DModel,
    SchedulerMixin,
    Transformer2DModel,
    UNet2DConditionModel,
)
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_diffpipe.errors import ConfigurationError, require_number
from lightning_diffpipe.modules.adapters import Lora
from lightning_diffpipe.modules.noise import Noise, NoiseSchedule, noise_schedule_of
from lightning_diffpipe.modules.optimization import Optimization
from lightning_diffpipe.modules.part_files import PartOutline, read_index
from lightning_diffpipe.modules.parts import PartsModule, warn_of_cut
from lightning_diffpipe.modules.pipeline_diffusion import Expert, PipelineDiffusion
from lightning_diffpipe.pipelines.stand_ins import in_own_precision
from lightning_diffpipe.sampling.schedulers import takes_generator

WITHOUT_CONTROLNET = {"StableDiffusionControlNetPipeline": "StableDiffusionPipeline"}
LORA_LOADER = diffusers.StableDiffusionPipeline
"""Reads LoRA files of this project's models, too, of any denoiser."""
# Old PixArt folders name the class that all transformers once had; reading one gives the right one.
_DENOISERS: dict[str, tuple[type, ...]] = {
    "unet": (UNet2DConditionModel,),
    "transformer": (PixArtTransformer2DModel, Transformer2DModel),
}


class Tokens(NamedTuple):
    """Token ids and mask (1 where there is a token), both int64 `(B, L)`."""

    input_ids: Tensor
    attention_mask: Tensor


def tokenize(
    tokenizer: PreTrainedTokenizerBase, captions: Sequence[str], device: torch.device
) -> Tokens:
    """Tokenizes captions, padded and cut to the tokenizer's `model_max_length`.

    Returns:
        Tensors of shape `(B, model_max_length)`, on the device.

    Raises:
        ConfigurationError: The tokenizer has no maximal length.
    """
    length = tokenizer.model_max_length
    if length > 100_000:
        raise ConfigurationError(
            f"the tokenizer's model_max_length is {length}, that is, none; captions are padded to "
            "it, so set it, for example to 77"
        )
    encoded = tokenizer(list(captions), padding="max_length", truncation=True, max_length=length)
    warn_of_cut(tokenizer, captions, encoded, length)
    # `device=` would let the host wait for a GPU, and thereby for messages, in every microbatch.
    return Tokens(
        torch.tensor(encoded["input_ids"]).to(device, non_blocking=True),
        torch.tensor(encoded["attention_mask"]).to(device, non_blocking=True),
    )


def attention_bias(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turns a token mask into the bias that is added to attention scores.

    transformers would do so itself, but first reads whether any token is padding: that waits for the
    device, and makes the course of the computation depend on the captions.

    Args:
        attention_mask: 1 where there is a token, `(B, L)`.
        dtype: Type of the text encoder.

    Returns:
        Zero where there is a token and a large negative number elsewhere, `(B, 1, L, L)`.
    """
    length = attention_mask.shape[1]
    bias = (1 - attention_mask.to(dtype)) * torch.finfo(torch.float16).min
    return bias[:, None, None, :].expand(-1, 1, length, -1)


def uses_mask(text_encoder: PreTrainedModel) -> bool:
    """Returns whether padding is hidden from a text encoder, and from the denoiser that reads its states."""
    # CLIP pads with ordinary tokens, and every model conditioned on it was trained to see them.
    return not text_encoder.config.model_type.startswith("clip")


def text_states(text_encoder: PreTrainedModel, tokens: Tokens) -> Tensor:
    """Returns the states of captions, `(B, L, D)`."""
    bias = None
    if uses_mask(text_encoder):
        bias = attention_bias(tokens.attention_mask, text_encoder.dtype)
    return text_encoder(input_ids=tokens.input_ids, attention_mask=bias)[0]


def drop_captions(tokenizer: PreTrainedTokenizerBase, tokens: Tokens, share: float) -> Tokens:
    """Puts the empty caption in place of a random share of the captions."""
    device = tokens.input_ids.device
    empty = tokenize(tokenizer, [""], device)
    drop = torch.rand(len(tokens.input_ids), 1, device=device) < share
    return Tokens(
        torch.where(drop, empty.input_ids, tokens.input_ids),
        torch.where(drop, empty.attention_mask, tokens.attention_mask),
    )


def latent_size(
    vae: Mapping[str, Any], denoiser: Mapping[str, Any], height: int | None, width: int | None
) -> tuple[int, int]:
    """Returns rows and columns of the latents of an image.

    Args:
        vae: Config of the autoencoder.
        denoiser: Config of the U-Net or transformer.
        height: In pixels; None takes that of the model.
        width: In pixels.

    Raises:
        ConfigurationError: A size is no multiple of what autoencoder and patches of tokens shrink images by; or
            none is given, and the model has none.
    """
    trained, patch = denoiser["sample_size"], denoiser.get("patch_size") or 1
    if trained is None and None in (height, width):
        raise ConfigurationError(
            "the denoiser does not say which size it samples (sample_size is None in its config); give height and "
            "width, or set it: denoiser.register_to_config(sample_size=rows of its latents)"
        )
    default = tuple(trained) if isinstance(trained, list | tuple) else (trained, trained)
    scale = 2 ** (len(vae["block_out_channels"]) - 1)
    unit, sizes = scale * patch, []
    for name, pixels, rows in (("height", height, default[0]), ("width", width, default[1])):
        if pixels is not None and (pixels < unit or pixels % unit):
            by = f"the autoencoder and patches of {patch} shrink"
            by = by if patch > 1 else "the autoencoder shrinks"
            near = dict.fromkeys(max(unit, n * unit) for n in (pixels // unit, pixels // unit + 1))
            raise ConfigurationError(
                f"{name}={pixels} is no multiple of {unit}, by which {by} images; take "
                + " or ".join(map(str, near))
            )
        sizes.append(rows if pixels is None else pixels // scale)
    return sizes[0], sizes[1]


class LatentDiffusion(PartsModule):
    """A text-conditional latent diffusion model in training, and a plain sampler.

    Args:
        vae: Frozen autoencoder.
        text_encoder: Frozen text encoder, unless `train_text_encoder`.
        tokenizer: Its tokenizer, with a `model_max_length`.
        scheduler: Names the prediction target, and samples: `FlowMatchEulerDiscreteScheduler` for
            flow matching, any DDPM-like one for epsilon or v.
        unet: Denoiser, if it is a U-Net.
        transformer: Denoiser, if it is a PixArt transformer. Exactly one of the two is given.
        caption_dropout: Share of the training samples that lose their caption.
        train_text_encoder: Train the text encoder along.
        optimization: Optimizer and learning rate.
        lora: Train adapters in place of the weights of the denoiser, and of text encoders that are trained.
        noise: Distribution of the trained times, and their weights in the loss.
        self_conditioning: Share of the microbatches whose denoiser is given an estimate of its own, 0.5 for
            example; it then has twice as many input channels as latents have. None: it is given noisy latents only.

    Raises:
        ConfigurationError: Not exactly one denoiser, one that needs further conditions, or one whose input channels
            do not fit.
    """

    part_names = ("unet", "transformer", "vae", "text_encoder", "tokenizer", "scheduler")

    def __init__(
        self,
        vae: AutoencoderKL,
        text_encoder: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        scheduler: SchedulerMixin,
        unet: UNet2DConditionModel | None = None,
        transformer: PixArtTransformer2DModel | None = None,
        caption_dropout: float = 0.1,
        train_text_encoder: bool = False,
        optimization: Optimization | None = None,
        lora: Lora | None = None,
        noise: Noise | None = None,
        self_conditioning: float | None = None,
    ) -> None:
        super().__init__()
        require_number("caption_dropout", caption_dropout, 0, 1)
        if self_conditioning is not None:
            require_number("self_conditioning", self_conditioning, 0, 1)
        self.save_hyperparameters("caption_dropout", "train_text_encoder", "self_conditioning")
        self.self_conditioning = self_conditioning
        if (unet is None) == (transformer is None):
            count = "neither" if unet is None else "both"
            raise ConfigurationError(f"give either unet or transformer; {count} was given")
        name, denoiser = ("unet", unet) if unet is not None else ("transformer", transformer)
        config = getattr(denoiser, "config", {})
        if name == "transformer" and not hasattr(config, "use_additional_conditions"):
            raise ConfigurationError(_other_denoiser(name, type(transformer)))
        _check_conditions(config)
        _check_channels(config, vae.config, self_conditioning)
        self.vae = vae
        self.text_encoder = text_encoder
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        # The other is not registered, so that this one appears once in the state dict.
        setattr(self, name, denoiser)
        self.optimization = optimization or Optimization()
        self.noise_schedule: NoiseSchedule = noise_schedule_of(scheduler, noise)
        # Arguments of `sample` for `trainer.predict`, and a seed.
        self.sampling: dict[str, Any] = {}
        self.frozen_parts = ("vae",) if train_text_encoder else ("vae", "text_encoder")
        self.freeze_parts()
        self.add_lora(lora, train_text_encoder, LORA_LOADER)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        call: Mapping[str, Any] | None = None,
        condition_dropout: float | None = None,
        expert: Expert | None = None,
        image_noise: Sequence[float] | None = None,
        pipeline_class: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Reads a diffusers folder or hub id.

        Folders of other pipelines than Stable Diffusion 1 and 2 and PixArt become a `PipelineDiffusion`, which
        trains them by their own call.

        Args:
            path: Folder with `model_index.json`, or a hub id.
            call: Further arguments of the call of such a pipeline.
            condition_dropout: As in `PipelineDiffusion`.
            expert: As in `PipelineDiffusion`.
            image_noise: As in `PipelineDiffusion`.
            pipeline_class: As in `PipelineDiffusion.from_pretrained`.
            kwargs: Further arguments of `__init__`; a part given here replaces the stored one.

        Raises:
            ConfigurationError: There is no such folder, or nothing here can train it.
        """
        arguments = {"call": dict(call)} if call else {}
        further: dict[str, Any] = {"condition_dropout": condition_dropout, "expert": expert}
        further |= {"image_noise": image_noise, "pipeline_class": pipeline_class}
        arguments |= {name: value for name, value in further.items() if value is not None}
        if cls is LatentDiffusion:
            index = read_index(str(path))
            # Pipelines of diffusers with other parts than these are for their own call.
            classes = {n: entry[1] for n, entry in index.items() if isinstance(entry, list)}
            names = {name: [kind.__name__ for kind in kinds] for name, kinds in _DENOISERS.items()}
            knows = any(classes.get(name) in trained for name, trained in names.items())
            is_plain = knows and classes.get("text_encoder") and not classes.get("text_encoder_2")
            if hasattr(diffusers, str(index.get("_class_name"))) and not is_plain:
                return PipelineDiffusion.from_pretrained(path, **arguments, **kwargs)  # type: ignore[return-value]
        for name, value in arguments.items():
            raise ConfigurationError(
                f"{name}={value} is for pipelines that are trained by their own call; {path} is trained by "
                f"{cls.__name__}'s step: leave it out, or use PipelineDiffusion.from_pretrained"
            )
        return super().from_pretrained(path, **kwargs)

    @classmethod
    def _check_outlines(cls, outlines: Mapping[str, PartOutline]) -> None:
        for name, classes in _DENOISERS.items():
            if (outline := outlines.get(name)) is not None:
                if not issubclass(outline.cls, classes):
                    raise ConfigurationError(_other_denoiser(name, outline.cls))
                _check_conditions(outline.config)
                _check_channels(outline.config, outlines["vae"].config)

    def _replaced(self, index: Mapping[str, Any]) -> dict[str, Any]:
        name = self.pipeline_index.get("_class_name", "LatentDiffusion")
        entries = {"_class_name": WITHOUT_CONTROLNET.get(name, name)}
        absent = (*_DENOISERS, "controlnet")
        return entries | {name: [None, None] for name in absent if name in index}

    @property
    def denoiser(self) -> UNet2DConditionModel | PixArtTransformer2DModel:
        """The U-Net or transformer."""
        return self.unet if hasattr(self, "unet") else self.transformer

    # ------------------------------------------------------------------ the four computations

    def encode_images(self, images: Tensor, sample: bool = True) -> Tensor:
        """Encodes images.

        Args:
            images: `(B, 3, H, W)` in [-1, 1].
            sample: Sample the posterior, rather than take its mean.

        Returns:
            fp32 latents of about unit variance, `(B, C, h, w)`.

        Raises:
            ConfigurationError: The model has no latents for images of this size.
        """
        self.require_size(*images.shape[-2:])
        with in_own_precision(self.vae, images.device):
            posterior = self.vae.encode(images.to(self.vae.dtype)).latent_dist
        latents = (posterior.sample() if sample else posterior.mode()).float()
        return (latents - (self.vae.config.shift_factor or 0)) * self.vae.config.scaling_factor

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Decodes latents to images, `(B, 3, H, W)` in [0, 1]."""
        latents = latents / self.vae.config.scaling_factor + (self.vae.config.shift_factor or 0)
        with in_own_precision(self.vae, latents.device):
            images = self.vae.decode(latents.to(self.vae.dtype)).sample.float()
        return (images / 2 + 0.5).clamp(0, 1)

    def encode_text(self, tokens: Tokens) -> Tensor:
        """Returns the text states, `(B, L, D)`."""
        return text_states(self.text_encoder, tokens)

    def denoise(
        self,
        noisy: Tensor,
        timesteps: Tensor,
        states: Tensor,
        mask: Tensor,
        estimate: Tensor | None = None,
        **conditions: Any,
    ) -> Tensor:
        """Predicts the target of the noise schedule.

        Args:
            noisy: `(B, C, h, w)`.
            timesteps: `(B,)`.
            states: Text states, `(B, L, D)`.
            mask: 1 where there is a token, `(B, L)`.
            estimate: Clean latents as they were estimated before, with self-conditioning; zeros if not given.
            conditions: Further arguments of the denoiser.

        Returns:
            fp32, `(B, C, h, w)`.
        """
        seen = mask if uses_mask(self.text_encoder) else None
        kwargs = {"encoder_attention_mask": seen, **conditions}
        if not hasattr(self, "unet"):
            size: tuple[Tensor | None, ...] = None, None
            # The config says None where the class decides, by the size of the images.
            if self.transformer.use_additional_conditions:
                scale = 2 ** (len(self.vae.config.block_out_channels) - 1)
                height, width = scale * noisy.shape[-2], scale * noisy.shape[-1]
                numbers = torch.tensor([height, width, height / width], dtype=torch.float32)
                numbers = numbers.to(noisy.device, non_blocking=True).expand(len(noisy), 3)
                size = numbers[:, :2], numbers[:, 2:]
            kwargs["added_cond_kwargs"] = {"resolution": size[0], "aspect_ratio": size[1]}
        inputs = noisy
        if self.self_conditioning is not None:
            estimate = torch.zeros_like(noisy) if estimate is None else estimate
            inputs = torch.cat([noisy, estimate], 1)
        prediction = self.denoiser(
            inputs.to(self.denoiser.dtype),
            timestep=timesteps,
            encoder_hidden_states=states.to(self.denoiser.dtype),
            **kwargs,
        ).sample
        # Transformers may predict a variance after the mean, which is not trained here.
        return prediction[:, : noisy.shape[1]].float()

    # ------------------------------------------------------------------ training

    def losses(
        self, batch: Mapping[str, Any], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Computes the loss of images, `(B, 3, H, W)` in [-1, 1], and `caption`, B strings.

        A `mask` and a `weight` of each sample say where and how much it counts (`noise.py`).
        """
        is_training = generator is None
        latents = self.encode_images(batch["image"], sample=is_training)
        tokens = tokenize(self.tokenizer, batch["caption"], self.device)
        if is_training:
            tokens = drop_captions(self.tokenizer, tokens, self.hparams.caption_dropout)
        conditions = self._conditions(batch)
        corrupted = self.noise_schedule.corrupt(latents, generator)
        states = self.encode_text(tokens)
        inputs = corrupted.noisy, corrupted.timesteps, states, tokens.attention_mask
        share = self.self_conditioning
        # Validation estimates whenever training does. The coin is Python's: nobody waits for a GPU to throw it.
        if share and (not is_training or random.random() < share):
            # Weights that autocast keeps from a pass without gradients would carry none in the next.
            kind = corrupted.noisy.device.type
            cast = torch.autocast(
                kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), False
            )
            with torch.no_grad(), cast:
                first = self.denoise(*inputs, **conditions)
                estimate = self.noise_schedule.clean(corrupted.noisy, first, corrupted.timesteps)
            conditions["estimate"] = estimate
        prediction = self.denoise(*inputs, **conditions)
        return self.noise_schedule.losses(corrupted, prediction, batch)

    def _conditions(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns further arguments of the denoiser from a batch, a row for each sample; for subclasses."""
        return {}

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[str],
        num_inference_steps: int = 25,
        guidance_scale: float = 4.0,
        generator: torch.Generator | None = None,
        height: int | None = None,
        width: int | None = None,
    ) -> Tensor:
        """Samples one image per prompt, in this process; `Predictor` does it with several.

        Args:
            prompts: Texts, one for each image.
            num_inference_steps: Denoising steps.
            guidance_scale: Strength of classifier-free guidance; 1 for none.
            generator: Generator of the start noise (and of a stochastic scheduler); its device may be another.
            height: In pixels; that of the training images if not given.
            width: In pixels.

        Returns:
            `(len(prompts), 3, H, W)` in [0, 1].

        Raises:
            ConfigurationError: The model has no latents for images of this size.
        """
        return self._drawn(prompts, num_inference_steps, guidance_scale, generator, (height, width))

    def _drawn(
        self,
        prompts: Sequence[str],
        num_inference_steps: int,
        guidance_scale: float,
        generator: torch.Generator | None,
        pixels: tuple[int | None, int | None],
        **conditions: Tensor,
    ) -> Tensor:
        """Samples in evaluation mode."""
        guided, size = guidance_scale != 1, self.require_size(*pixels)
        conditions = {n: torch.cat([c, c]) if guided else c for n, c in conditions.items()}
        tokens = tokenize(self.tokenizer, [""] * len(prompts) * guided + list(prompts), self.device)
        estimate: dict[str, Tensor] = {}

        def predict(noisy: Tensor, timesteps: Tensor) -> Tensor:
            prediction = self.denoise(
                noisy, timesteps, states, tokens.attention_mask, **estimate, **conditions
            )
            if self.self_conditioning:
                estimate["estimate"] = self.noise_schedule.clean(noisy, prediction, timesteps)
            return prediction

        shape = len(prompts), self.vae.config.latent_channels, *size
        settings = num_inference_steps, guidance_scale, generator
        with self.evaluating():
            states = self.encode_text(tokens)
            start = start_noise(shape, generator, self.device)
            return self.decode_latents(denoised(self.scheduler, start, predict, *settings))

    def require_size(self, height: int | None, width: int | None) -> tuple[int, int]:
        """Returns rows and columns of the latents of images of a size in pixels; see `latent_size`."""
        return latent_size(self.vae.config, self.denoiser.config, height, width)

    def predict_step(self, batch: Any, batch_idx: int) -> list[Image.Image]:
        """Samples the captions of a batch: `trainer.predict(module, prompts)`.

        Each rank samples all prompts of its pipeline alone, and pipelines side by side (`data_parallel`) a share
        each; `Predictor.from_module(module, "pipefusion")` samples every prompt with all ranks.

        Args:
            batch: Captions, or a batch of training data with `caption`.
            batch_idx: Number of the batch among those of this share. With its place among those of all shares, it
                makes the seed of the start noise, so that with one caption in a batch images do not depend on their
                number.

        Returns:
            One image per caption.
        """
        prompts = batch["caption"] if isinstance(batch, dict) else batch
        settings = dict(self.sampling)
        if isinstance(batch, dict):
            settings |= self._conditions(batch)
        # Not `trainer`, which raises without one.
        share = getattr(self._trainer, "distributed_sampler_kwargs", None)
        number, place = (share["num_replicas"], share["rank"]) if share else (1, 0)
        seed = settings.pop("seed", 0) + batch_idx * number + place
        generator = torch.Generator().manual_seed(seed)
        return as_pil(self.sample(list(prompts), generator=generator, **settings))


def start_noise(
    shape: Sequence[int], generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """Samples standard normal numbers in fp32 where the generator is, and brings them to the device."""
    sampled_on = generator.device if generator is not None else device
    return torch.randn(
        tuple(shape), generator=generator, device=sampled_on, dtype=torch.float32
    ).to(device)


def denoised(
    scheduler: SchedulerMixin,
    noise: Tensor,
    predict: Callable[[Tensor, Tensor], Tensor],
    num_inference_steps: int,
    guidance_scale: float,
    generator: torch.Generator | None,
) -> Tensor:
    """Takes the noise out, step by step.

    Args:
        scheduler: Stays as it is.
        noise: Standard normal, `(N, ...)`.
        predict: Denoises, given noisy samples and their time steps; with guidance twice as many, the first half
            of which has no caption.
        num_inference_steps: Denoising steps.
        guidance_scale: Strength of classifier-free guidance; 1 for none.
        generator: Generator of a stochastic scheduler.
    """
    scheduler = copy.deepcopy(scheduler)  # schedulers count their steps
    scheduler.set_timesteps(num_inference_steps, device=noise.device)
    samples = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    extra = {"generator": generator} if takes_generator(scheduler) else {}
    guided = guidance_scale != 1
    for timestep in scheduler.timesteps:
        noisy = samples
        if hasattr(scheduler, "scale_model_input"):
            noisy = scheduler.scale_model_input(noisy, timestep)
        noisy = torch.cat([noisy, noisy]) if guided else noisy
        prediction = predict(noisy, timestep.expand(len(noisy)))
        if guided:
            free, conditional = prediction.chunk(2)
            prediction = free + guidance_scale * (conditional - free)
        samples = scheduler.step(prediction, timestep, samples, **extra).prev_sample
    return samples


def as_pil(images: Tensor) -> list[Image.Image]:
    """Turns `(N, 3, H, W)` in [0, 1] into N images of 8 bits."""
    pixels = (images.permute(0, 2, 3, 1) * 255).round().byte().cpu().numpy()
    return [Image.fromarray(image) for image in pixels]


def _other_denoiser(name: str, cls: type) -> str:
    trained = "U-Nets of Stable Diffusion 1 and 2" if name == "unet" else "PixArt transformers"
    return (
        f"LatentDiffusion trains {trained}; this is a {cls.__name__}. Write a LightningModule whose training_step "
        "calls it; the strategy runs it unchanged"
    )


def _check_conditions(denoiser: Mapping[str, Any]) -> None:
    """Refuses a denoiser that needs more than latents and text, by its config."""
    addition = denoiser.get("addition_embed_type")
    if addition is not None:
        raise ConfigurationError(
            f"this U-Net needs added conditions ({addition}), as SDXL's does; LatentDiffusion has "
            "one text encoder and none of them. Write a LightningModule whose training_step gives "
            "added_cond_kwargs; the strategy runs it unchanged"
        )


def _check_channels(
    denoiser: Mapping[str, Any], vae: Mapping[str, Any], *self_conditioning: float | None
) -> None:
    """Refuses other input channels than those of latents, or twice as many with self-conditioning."""
    takes, has = denoiser.get("in_channels", 4), vae.get("latent_channels", 4)
    allowed = [has if share is None else 2 * has for share in self_conditioning]
    if takes in (allowed or [has, 2 * has]):
        return
    if takes == has:
        raise ConfigurationError(
            f"self_conditioning={self_conditioning[0]} needs {2 * has} input channels, {has} for noisy latents "
            f"and {has} for an estimate of clean ones, and this denoiser has {takes}. Build it with in_channels="
            f"{2 * has} and train it from nothing, or leave self_conditioning out"
        )
    also = (
        ", or give self_conditioning if it has been trained with that" if takes == 2 * has else ""
    )
    raise ConfigurationError(
        f"this denoiser takes {takes} channels, and latents of the autoencoder have {has}: models for "
        "inpainting, depth or upscaling are given images besides, and LatentDiffusion has none. Write a "
        f"LightningModule whose training_step gives them; the strategy runs it unchanged{also}"
    )
