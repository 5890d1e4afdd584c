"""Profiles and clusters for tests: equal layers, and random ones."""

import random

from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.profile import (
    BackboneProfile,
    EncoderLayerProfile,
    EncoderProfile,
    FrozenResult,
    LayerProfile,
    ModelProfile,
    Seconds,
)


def equal_profile(num_layers=12, frozen_share=0.0, forward_s=1.0, backward_s=2.0, **sizes):
    """Layers of 1 + 2 seconds a sample; frozen work of `frozen_share` times all of them."""
    forward, backward = Seconds.per_sample(forward_s), Seconds.per_sample(backward_s)
    layers = [
        LayerProfile(f"layer{i}", forward, backward, None, **sizes) for i in range(num_layers)
    ]
    frozen_s = frozen_share * num_layers * (forward_s + backward_s)
    encoder = EncoderProfile("vae", (EncoderLayerProfile("whole", Seconds.per_sample(frozen_s)),))
    return ModelProfile(
        "equal", (BackboneProfile("unet", tuple(layers)),), (encoder,) if frozen_share else ()
    )


def random_times(rng, scale):
    per_sample, overhead = rng.uniform(0.1, 1) * scale, rng.uniform(0, 0.3) * scale
    return Seconds.of({1: overhead + per_sample, 8: overhead + 8 * per_sample})


def random_profile(rng, num_layers, frozen=False):
    layers = []
    for i in range(num_layers):
        scale = rng.uniform(0.5, 1.5)
        layers.append(
            LayerProfile(
                f"layer{i}",
                random_times(rng, scale),
                random_times(rng, 2 * scale),
                None,
                parameter_bytes=rng.randint(1, 50),
                gradient_bytes=rng.randint(0, 50),
                boundary_bytes_per_sample=rng.randint(1, 20),
                activation_bytes_per_sample=rng.randint(1, 20),
            )
        )
    whole = EncoderLayerProfile("whole", random_times(rng, 2), 20, 4)
    encoder = EncoderProfile("vae", (whole,), (), (FrozenResult(3, (0, num_layers - 1)),))
    return ModelProfile(
        "random", (BackboneProfile("unet", tuple(layers)),), (encoder,) if frozen else ()
    )


def random_cluster(rng, num_ranks, memory_bytes=None):
    return Cluster(
        num_ranks,
        memory_bytes=memory_bytes,
        p2p=Link(rng.choice([10, 50, 1000]), rng.uniform(0, 0.3)),
        all_reduce=Link(rng.choice([5, 50, 1000]), rng.uniform(0, 0.5)),
    )


def random_case(seed, max_layers=8, max_ranks=4, memory=False):
    rng = random.Random(seed)
    num_layers, num_ranks = rng.randint(1, max_layers), rng.randint(1, max_ranks)
    profile = random_profile(rng, num_layers, frozen=rng.random() < 0.5)
    limit = rng.randint(300, 2500) if memory else None
    return profile, random_cluster(rng, num_ranks, limit), rng.choice([4, 6, 8, 12])
