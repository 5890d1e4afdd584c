"""Token tensors of captions, the first input of a denoiser.

Captions have one fixed length, because every microbatch must have the same shapes: padding to the longest caption
of a batch would give stages boundaries that change from batch to batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.modules.parts import warn_of_cut


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

    transformers would do so itself, but first looks whether any token is padding: that waits for the
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
