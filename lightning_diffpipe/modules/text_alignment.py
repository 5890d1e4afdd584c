"""Teaches a small byte-level text encoder which words matter: a tiny CLIP.

A denoiser can only draw what its text states tell apart. A randomly initialised T5 attends almost
uniformly, so in "latin small letter a" the last letter drowns among the others. Two remedies:

1. Local heads: the relative position bias starts such that every head looks at one neighbour. The
   layers then hash growing n-grams, which already separates captions.
2. A contrastive loss pulls the state of a caption towards the features of its picture and pushes it
   away from other pictures of the batch. The picture network is thrown away afterwards.

Pairs of other microbatches are not contrasted: the loss of a batch depends on how it is split.

Source: CLIP, Radford et al. (2021), https://arxiv.org/abs/2103.00020
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, T5EncoderModel

from lightning_diffpipe.data.captioned import Batch
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.modules.optimization import Optimization
from lightning_diffpipe.modules.parts import PartsModule
from lightning_diffpipe.modules.text import attention_bias, tokenize


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
    """A text encoder in contrastive training against pictures.

    Args:
        text_encoder: A T5 encoder; its hidden states will condition a denoiser.
        tokenizer: Its tokenizer.
        local_heads: Start with heads that look at one neighbour each.
        optimization: Optimizer and learning rate.
    """

    part_names: ClassVar[tuple[str, ...]] = ("text_encoder", "tokenizer")

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

    def _text_features(self, captions: list[str]) -> Tensor:
        tokens = tokenize(self.tokenizer, captions, self.device)
        bias = attention_bias(tokens.attention_mask, self.text_encoder.dtype)
        states = self.text_encoder(input_ids=tokens.input_ids, attention_mask=bias)[0]
        logits = (states @ self.query).float() + (tokens.attention_mask - 1) * 1e4
        pooled = (states * logits.softmax(dim=1)[..., None]).sum(dim=1)
        return F.normalize(self.projection(pooled).float(), dim=-1)

    def _similarities(self, batch: Batch) -> Tensor:
        """Returns scaled cosines, `(B captions, B pictures)`."""
        grey = (batch["image"].mean(dim=1, keepdim=True) + 1) / 2
        pictures = F.normalize(self.pictures(grey).float(), dim=-1)
        return self._text_features(batch["caption"]) @ pictures.T * self.log_scale.exp()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the symmetric contrastive loss of the pairs of one batch."""
        similarities = self._similarities(batch)
        pairs = torch.arange(len(similarities), device=similarities.device)
        loss = F.cross_entropy(similarities, pairs) + F.cross_entropy(similarities.T, pairs)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(pairs))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs how often the right picture is the nearest one."""
        similarities = self._similarities(batch)
        pairs = torch.arange(len(similarities), device=similarities.device)
        right = (similarities.argmax(dim=1) == pairs).float().mean()
        self.log("val/retrieved", right, prog_bar=True, batch_size=len(pairs), sync_dist=True)
