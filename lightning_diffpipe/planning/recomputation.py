"""Activation checkpointing as a choice of the plan: which layers the backward computes again, so that a rank fits.

A layer that is recomputed keeps its inputs instead of its activations, and its backward takes a forward longer. An
early stage of 1F1B stores the activations of many microbatches, the last one those of one: so stages recompute
different shares of their layers, and stages have fewer layers where more are recomputed.

    1. recompute everything that frees memory, and search the fastest cuts that fit
    2. with these cuts, stop recomputing on each rank while it fits, layers that save most seconds a byte first
    3. search the cuts again with what is still recomputed, as stages have become faster; until nothing changes

Source:
    Checkpointing: Chen et al. (2016), https://arxiv.org/abs/1604.06174; a part of a stage only: Korthikanti et al.
    (2022), https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from lightning_diffpipe.planning.evaluation import Evaluator, Proposal
from lightning_diffpipe.planning.memory import Waiting
from lightning_diffpipe.planning.profile import LayerProfile, ModelProfile, Seconds


def recomputable(profile: ModelProfile, frees_memory: bool = True) -> frozenset[int]:
    """Returns positions of layers of the one backbone that may be recomputed, or only where it frees memory."""
    return frozenset(
        position
        for position, layer in enumerate(profile.backbones[0].layers)
        if layer.gradient and (left := layer.input_bytes_per_sample) is not None
        if not frees_memory or left < layer.activation_bytes_per_sample
    )


def checkpointed(profile: ModelProfile, positions: Collection[int]) -> ModelProfile:
    """Returns the profile of a step that recomputes the layers at these positions of the one backbone, too."""
    (backbone,) = profile.backbones
    layers = list(backbone.layers)
    for position in positions:
        layer = layers[position]
        if layer.uncheckpointed:
            continue
        layers[position] = replace(
            layer,
            backward_s=Seconds.sum((layer.backward_s, layer.forward_s)),
            activation_bytes_per_sample=layer.input_bytes_per_sample or 0,
            activation_bytes_per_microbatch=0,
            uncheckpointed=layer,
        )
    return replace(profile, backbones=(replace(backbone, layers=tuple(layers)),))


def recomputed_where_needed(
    evaluator: Evaluator, proposal: Proposal, peak_memory_bytes: Collection[int]
) -> frozenset[int]:
    """Returns positions of the layers whose recomputation makes the cuts fit.

    The evaluator's profile, and the memory of every rank, are those with all layers recomputed that may be.
    """
    cluster, pipeline = evaluator.model.cluster, evaluator.frame(proposal).pipeline
    count = len(peak_memory_bytes)
    limits = [cluster.memory_of(rank, count) or 0 for rank in range(count)]
    size, layers = max(proposal.shape.sizes), evaluator.calls.backbone.layers
    # By rank and recomputed layer: the bytes of activations that are stored if it is not, and while it is.
    stored: list[dict[int, tuple[float, float]]] = [{} for _ in peak_memory_bytes]
    s_per_byte: dict[int, float] = {}
    for stage, run in enumerate(evaluator.runs(proposal)):
        for position in range(run.first, run.stop):
            if (whole := layers[position].uncheckpointed) is None:
                continue
            for rank in pipeline.placement.stage_ranks[stage]:
                waiting = pipeline.peak(rank)[stage]
                single = Waiting(waiting.samples / max(waiting.microbatches, 1), 1)
                more = _kept_bytes(whole, waiting) - _kept_bytes(layers[position], waiting)
                stored[rank][position] = more, _kept_bytes(whole, single)
            # A streamed layer stays recomputed: its backward needs weights that are copied again.
            if layers[position].streamed_bytes:
                continue
            most = max(savings[position][0] for savings in stored if position in savings)
            s_per_byte[position] = whole.forward_s.at(size) / max(most, 1.0)
    room = [
        limit - peak + _largest(savings)
        for limit, peak, savings in zip(limits, peak_memory_bytes, stored, strict=True)
    ]
    # Layers whose recomputation costs most time for the bytes it frees are the first to be stored.
    for position in sorted(s_per_byte, key=lambda each: (-s_per_byte[each], each)):
        ranks = [rank for rank, savings in enumerate(stored) if position in savings]
        rest = {r: {k: v for k, v in stored[r].items() if k != position} for r in ranks}
        if all(room[r] - stored[r][position][0] >= _largest(rest[r]) for r in ranks):
            for rank in ranks:
                room[rank] -= stored[rank][position][0]
                stored[rank] = rest[rank]
    return frozenset(position for savings in stored for position in savings)


def _largest(stored: Mapping[int, tuple[float, float]]) -> float:
    """Returns most bytes of activations that a rank recomputes at a time."""
    return max((again for _, again in stored.values()), default=0.0)


def _kept_bytes(layer: LayerProfile, waiting: Waiting) -> float:
    of_samples = waiting.samples * layer.activation_bytes_per_sample
    return of_samples + waiting.microbatches * layer.activation_bytes_per_microbatch
