"""How the autoencoder and the text encoder of the built-in glyph models were trained.

`diffpipe train -cd examples/conf experiment=glyphs_vae`, and `experiment=glyphs_text`, in the checkout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from lightning_diffpipe.data.captioned import Batch
from lightning_diffpipe.modules.latent_diffusion import text_states, tokenize
from lightning_diffpipe.modules.optimization import Optimization
from lightning_diffpipe.modules.parts import PartsModule


class AutoencoderTraining(PartsModule):
    """The `AutoencoderKL` of a latent diffusion model in training.

    Loss: L1 + L2 between image and reconstruction, plus a small KL term that keeps the latents near a standard
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
        """Computes the loss of images, `(B, 3, H, W)` in [-1, 1], and its terms."""
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


def image_features(width: int) -> nn.Sequential:
    """Builds the throw-away network: grey images of any size to `(B, width)`."""
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
    """A small byte-level text encoder in contrastive training against images: a tiny CLIP.

    A denoiser can only sample what its text states tell apart. A randomly initialised T5 attends almost uniformly,
    so in "latin small letter a" the last letter drowns among the others. Two remedies:

    1. Local heads: the relative position bias starts such that every head looks at one neighbour. The layers then
       hash growing n-grams, which already separates captions.
    2. A contrastive loss pulls the state of a caption towards the features of its image and pushes it away from
       other images of the batch. The image network is thrown away afterwards.

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
        self.text_encoder = text_encoder
        self.tokenizer = tokenizer
        self.optimization = optimization or Optimization(lr=1e-3, warmup_steps=50)
        width = text_encoder.config.d_model
        self.images = image_features(width)
        self.projection = nn.Linear(width, width)
        self.query = nn.Parameter(0.1 * torch.randn(width))
        self.log_scale = nn.Parameter(torch.tensor(2.5))
        if local_heads:
            look_at_neighbours(text_encoder)

    def _similarities(self, batch: Batch) -> Tensor:
        """Returns scaled cosines, `(B captions, B images)`."""
        grey = (batch["image"].mean(dim=1, keepdim=True) + 1) / 2
        images = F.normalize(self.images(grey).float(), dim=-1)
        tokens = tokenize(self.tokenizer, batch["caption"], self.device)
        states = text_states(self.text_encoder, tokens)
        logits = (states @ self.query).float() + (tokens.attention_mask - 1) * 1e4
        pooled = (states * logits.softmax(dim=1)[..., None]).sum(dim=1)
        captions = F.normalize(self.projection(pooled).float(), dim=-1)
        return captions @ images.T * self.log_scale.exp()

    def losses(
        self, batch: Mapping[str, Any], generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Computes the symmetric contrastive loss of the pairs of one batch."""
        similarities = self._similarities(batch)
        pairs = torch.arange(len(similarities), device=similarities.device)
        loss = F.cross_entropy(similarities, pairs) + F.cross_entropy(similarities.T, pairs)
        return {"loss": loss}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs how often the right image is the nearest one."""
        similarities = self._similarities(batch)
        pairs = torch.arange(len(similarities), device=similarities.device)
        right = (similarities.argmax(dim=1) == pairs).float().mean()
        self.log("val/retrieved", right, prog_bar=True, batch_size=len(pairs), sync_dist=True)
