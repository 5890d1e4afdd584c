"""What a denoiser needs first: token tensors of captions, and trainings of an autoencoder and of a text encoder.

Captions have one fixed length, because every microbatch must have the same shapes: padding to the longest caption
of a batch would give stages boundaries that change from batch to batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, T5EncoderModel

from lightning_diffpipe.data.captioned import Batch
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.modules.optimization import Optimization
from lightning_diffpipe.modules.parts import PartsModule, warn_of_cut


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
    """Turns a token mask into what is added to attention scores.

    transformers would do so itself, but first looks whether any token is padding: that waits for the
    device, and makes the course of the computation depend on the captions.

    Args:
        attention_mask: 1 where there is a token, `(B, L)`.
        dtype: Of the text encoder.

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


class AutoencoderTraining(PartsModule):
    """The `AutoencoderKL` of a latent diffusion model in training.

    Loss: L1 + L2 between picture and reconstruction, plus a small KL term that keeps the latents near a standard
    normal. There is no adversary and no perceptual network: for line art such as glyphs the pixel losses are sharp
    enough, and nothing has to be downloaded.

    After training, `save_pretrained` stores one over the standard deviation of the latents as the
    `scaling_factor`, so that a denoiser sees latents of unit variance.

    Args:
        vae: The autoencoder.
        kl_weight: Weight of the KL term, per latent value.
        optimization: Optimizer and learning rate.

    Source:
        Latent Diffusion, Rombach et al. (2022), https://arxiv.org/abs/2112.10752, without its discriminator
    """

    part_names = ("vae",)

    def __init__(
        self,
        vae: AutoencoderKL,
        kl_weight: float = 1e-3,
        optimization: Optimization | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["vae", "optimization"])
        self.vae = vae
        self.optimization = optimization or Optimization(lr=2e-3, weight_decay=1e-4)
        # Count, sum and sum of squares of the latents seen in the last validation.
        self.register_buffer("latent_moments", torch.zeros(3))

    def losses(
        self, batch: Mapping[str, Any], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Computes the loss of pictures, `(B, 3, H, W)` in [-1, 1], and its terms."""
        image = batch["image"]
        posterior = self.vae.encode(image).latent_dist
        mean, log_variance = posterior.mean.float(), posterior.logvar.float()
        latent = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        reconstruction = self.vae.decode(latent).sample.float()

        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        pixels = F.l1_loss(reconstruction, image) + F.mse_loss(reconstruction, image)
        return {"loss": pixels + self.hparams.kl_weight * kl, "pixel_loss": pixels, "kl": kl}

    def on_validation_epoch_start(self) -> None:
        """Starts measuring latents anew."""
        self.latent_moments.zero_()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs the peak signal-to-noise ratio, in dB, of the mean reconstruction."""
        image = batch["image"]
        latent = self.vae.encode(image).latent_dist.mode().float()
        reconstruction = self.vae.decode(latent).sample.float().clamp(-1, 1)
        error = ((reconstruction - image) / 2).square().mean()
        self.log(
            "val/psnr", -10 * error.log10(), prog_bar=True, batch_size=len(image), sync_dist=True
        )
        count = torch.full((), float(latent.numel()), device=latent.device)
        self.latent_moments += torch.stack([count, latent.sum(), latent.square().sum()])

    def on_validation_epoch_end(self) -> None:
        """Adds up what pipelines side by side, or other ranks, have measured of their shares."""
        total = self.trainer.strategy.reduce(self.latent_moments.clone(), reduce_op="sum")
        self.latent_moments.copy_(total)

    def save_pretrained(self, path: Any, dtype: torch.dtype | None = None) -> None:
        """Writes the autoencoder, with the measured `scaling_factor` if there was a validation."""
        count, total, squares = self.latent_moments.tolist()
        if count:
            variance = squares / count - (total / count) ** 2
            self.vae.register_to_config(scaling_factor=variance**-0.5)
        super().save_pretrained(path, dtype)


@torch.no_grad()
def look_at_neighbours(encoder: T5EncoderModel, strength: float = 8.0) -> None:
    """Sets the relative position bias so that head h looks at the h-th nearest neighbour.

    Args:
        encoder: Changed in place; its first block holds the bias all blocks share.
        strength: Logit of the chosen neighbour; the others have zero.
    """
    bias = encoder.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    num_buckets, num_heads = bias.shape
    # The lower half of the buckets is for earlier positions, the upper half for later ones. More
    # heads look back than ahead: a letter is named by the words before it.
    num_back = (num_heads * 5 + 4) // 8
    bias.zero_()
    for head in range(num_heads):
        ahead = head - num_back + 1
        bias[head + 1 if head < num_back else num_buckets // 2 + ahead, head] = strength


def picture_features(width: int) -> nn.Sequential:
    """Builds the throw-away network: grey pictures of any size to `(B, width)`."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(32),
        nn.Conv2d(1, 24, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Conv2d(24, 48, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Conv2d(48, 96, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(96 * 16, width),
    )


class TextAlignment(PartsModule):
    """A small byte-level text encoder in contrastive training against pictures: a tiny CLIP.

    A denoiser can only draw what its text states tell apart. A randomly initialised T5 attends almost uniformly, so
    in "latin small letter a" the last letter drowns among the others. Two remedies:

    1. Local heads: the relative position bias starts such that every head looks at one neighbour. The layers then
       hash growing n-grams, which already separates captions.
    2. A contrastive loss pulls the state of a caption towards the features of its picture and pushes it away from
       other pictures of the batch. The picture network is thrown away afterwards.

    Pairs of other microbatches are not contrasted: the loss of a batch depends on how it is split.

    Args:
        text_encoder: A T5 encoder; its hidden states will condition a denoiser.
        tokenizer: Its tokenizer.
        local_heads: Start with heads that look at one neighbour each.
        optimization: Optimizer and learning rate.

    Source:
        CLIP, Radford et al. (2021), https://arxiv.org/abs/2103.00020
    """

    part_names = ("text_encoder", "tokenizer")

    def __init__(
        self,
        text_encoder: T5EncoderModel,
        tokenizer: PreTrainedTokenizerBase,
        local_heads: bool = True,
        optimization: Optimization | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["text_encoder", "tokenizer", "optimization"])
        if not isinstance(text_encoder, T5EncoderModel):
            raise ConfigurationError(
                f"TextAlignment trains a T5EncoderModel, not a {type(text_encoder).__name__}"
            )
        self.text_encoder = text_encoder
        self.tokenizer = tokenizer
        self.optimization = optimization or Optimization(lr=1e-3, warmup_steps=50)
        width = text_encoder.config.d_model
        self.pictures = picture_features(width)
        self.projection = nn.Linear(width, width)
        self.query = nn.Parameter(0.1 * torch.randn(width))
        self.log_scale = nn.Parameter(torch.tensor(2.5))
        if local_heads:
            look_at_neighbours(text_encoder)

    def _similarities(self, batch: Batch) -> Tensor:
        """Returns scaled cosines, `(B captions, B pictures)`."""
        grey = (batch["image"].mean(dim=1, keepdim=True) + 1) / 2
        pictures = F.normalize(self.pictures(grey).float(), dim=-1)
        tokens = tokenize(self.tokenizer, batch["caption"], self.device)
        states = text_states(self.text_encoder, tokens)
        logits = (states @ self.query).float() + (tokens.attention_mask - 1) * 1e4
        pooled = (states * logits.softmax(dim=1)[..., None]).sum(dim=1)
        captions = F.normalize(self.projection(pooled).float(), dim=-1)
        return captions @ pictures.T * self.log_scale.exp()

    def losses(
        self, batch: Mapping[str, Any], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Computes the symmetric contrastive loss of the pairs of one batch."""
        similarities = self._similarities(batch)
        pairs = torch.arange(len(similarities), device=similarities.device)
        loss = F.cross_entropy(similarities, pairs) + F.cross_entropy(similarities.T, pairs)
        return {"loss": loss}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs how often the right picture is the nearest one."""
        similarities = self._similarities(batch)
        pairs = torch.arange(len(similarities), device=similarities.device)
        right = (similarities.argmax(dim=1) == pairs).float().mean()
        self.log("val/retrieved", right, prog_bar=True, batch_size=len(pairs), sync_dist=True)
