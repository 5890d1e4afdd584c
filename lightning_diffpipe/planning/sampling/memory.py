"""How much memory sampling takes on each rank, for every method; what decides where time must not.

Bytes that a rank needs beside what it holds already. Of weights w, b of them in blocks, keys and values k of all
calls of attention, and activations a of one step, with one rank's share f of the work (samples, branches of
guidance):

    one rank       w + f a
    sequence       w + f a / n
    synchronous    w + f a                                  rank 0 looks at all rows once
    distrifusion   w + f max(a, a / n + k)                  and then keys and values of all bands
    pipefusion     w - b + b / n + f (a + k / n) / q        in a ring, keys and values of all q ranks

Of k a band holds what others sent, and one message of its own under way to all of them. n ranks are beside each
other; in PipeFusion they are stages, and q ranks share the tokens of each. Synchronous steps of PipeFusion
compute all tokens at once, so patches save no activations. Blocks count as equally large.

Source:
    PipeFusion, Fang et al. (2024), https://arxiv.org/abs/2405.14430, table 1
"""

from __future__ import annotations

import math

from lightning_diffpipe.planning.sampling.candidates import DenoiserProfile, SamplingChoice


def memory_of_rank(profile: DenoiserProfile, choice: SamplingChoice) -> int:
    """Bytes that the rank which needs most of them needs.

    Args:
        profile: Of the denoiser.
        choice: How to sample.

    Example:
        >>> profile = DenoiserProfile(1.0, 0.0, 1, 1, 4, 64, 0, 0, key_value_bytes=800, sequence_bytes=0,
        ...     num_attention=4, weight_bytes=5000, block_bytes=4000, activation_bytes=100)
        >>> memory_of_rank(profile, SamplingChoice("sequence", 1.0, 1, 1, ranks=2))
        5050
        >>> memory_of_rank(profile, SamplingChoice("pipefusion", 1.0, 1, 1, ranks=2, num_patches=2))
        3500
    """
    samples = math.ceil(profile.num_samples / choice.data) / profile.num_samples
    share, ranks = samples / choice.guidance, choice.ranks
    weights = float(profile.weight_bytes)
    activations, kept = profile.activation_bytes / ranks, 0.0
    if choice.method in ("synchronous", "distrifusion"):
        activations += profile.key_value_bytes if choice.method == "distrifusion" else 0.0
        activations = max(activations, profile.activation_bytes)
    elif choice.method == "pipefusion":
        of_blocks = math.ceil(profile.num_blocks / ranks) / profile.num_blocks
        weights -= (1 - of_blocks) * profile.block_bytes
        activations = profile.activation_bytes / choice.sequence
        kept = of_blocks * profile.key_value_bytes
        kept /= 1 if choice.sequence_mode == "ring" else choice.sequence
    return math.ceil(weights + share * (activations + kept))
