"""Captions to token tensors of one fixed length.

Fixed, because every microbatch must have the same shapes: padding to the longest caption of a batch
would give stages boundaries that change from batch to batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_diffpipe.errors import ConfigurationError


class Tokens(NamedTuple):
    """Token ids and mask (1 where there is a token), both int64 `(B, L)`."""

    input_ids: Tensor
    attention_mask: Tensor


def tokenize(
    tokenizer: PreTrainedTokenizerBase, captions: Sequence[str], device: torch.device
) -> Tokens:
    """Tokenizes captions, padded and cut to the tokenizer's `model_max_length`.

    Args:
        tokenizer: Any tokenizer with a sensible `model_max_length`.
        captions: `B` captions.
        device: Where the tensors shall be.

    Returns:
        Tensors of shape `(B, model_max_length)`.

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
    return Tokens(
        torch.tensor(encoded["input_ids"], device=device),
        torch.tensor(encoded["attention_mask"], device=device),
    )
