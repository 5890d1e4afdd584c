"""Memory bought with time, as a choice of the plan: which layers are computed again, and which are streamed.

A layer that is *recomputed* (activation checkpointing) stores its inputs instead of its activations, and its
backward takes a forward longer. An early stage of 1F1B stores the activations of many microbatches, the last one
those of one: so stages recompute different shares of their layers, and have fewer layers where more are recomputed.

A *streamed* layer stores only what is trained of it on the device. Its frozen weights are copied there for each of
its runs, into one of two slots, while the layers before it compute:

    compute  | layer 0 | layer 1 | layer 2 | wait | layer 3 | layer 4 |     layers 1, 3 and 5 are streamed: the
    copy     | 1 ----- | 3 ---------------------- | 5 --------------- |     copy of 3 begins when 1 does

Its backward needs its weights, too, and so runs its forward again: a streamed layer is a recomputed one, whose
weights are copied for a forward and for a backward. A run takes longer by what the copy takes beyond the runs that
cover it. So streamed layers are spread evenly over a stage, and layers that are not cover the copies of others.

Here is what a profile becomes by that; `search.py` decides for which layers.

Sources:
    Checkpointing: Chen et al. (2016), https://arxiv.org/abs/1604.06174; a part of a stage only: Korthikanti et al.
    (2022), https://arxiv.org/abs/2205.05198.
    Prefetching of weights from host memory: Rhu et al. (2016), https://arxiv.org/abs/1602.08124 (vDNN); Ren et al.
    (2021), https://arxiv.org/abs/2101.06840 (ZeRO-Offload).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    Forward,
    ForwardNoGrad,
    Program,
)
from lightning_diffpipe.planning.memory import NUM_SLOTS
from lightning_diffpipe.planning.profile import LayerProfile, ModelProfile, Seconds

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of samples for which waits are computed: they fall with the samples, down to none."""


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


def streamable(profile: ModelProfile) -> frozenset[int]:
    """Returns positions of layers of the one backbone whose frozen weights may be streamed."""
    backbone = profile.backbones[0]
    if backbone.passes:  # whose later calls read what is a part of the first
        return frozenset()
    return frozenset(
        position
        for position, layer in enumerate(backbone.layers)
        if layer.streamable_bytes and layer.gradient and layer.input_bytes_per_sample is not None
    )


def streamed(
    profile: ModelProfile, positions: Collection[int], host_bytes_per_s: float
) -> ModelProfile:
    """Returns the profile of a step that streams the layers at these positions of the one backbone.

    Args:
        profile: In which they are recomputed.
        positions: Positions of the layers.
        host_bytes_per_s: Rate of copies from host memory to a device.
    """
    (backbone,) = profile.backbones
    whole, layers, order = backbone.layers, list(backbone.layers), sorted(positions)
    for index, at in enumerate(order):
        layer, before, after = whole[at], order[index - 1], order[(index + 1) % len(order)]
        copy_s = layer.streamable_bytes / host_bytes_per_s
        # Forwards come from the streamed layer before it, backwards from the one after it.
        ahead, behind = _between(whole, before, at), _between(whole, at + 1, after + 1)
        layers[at] = replace(
            layer,
            forward_s=_with_wait(layer.forward_s, copy_s, [x.forward_s for x in ahead]),
            backward_s=_with_wait(layer.backward_s, copy_s, [x.backward_s for x in behind]),
            parameter_bytes=layer.parameter_bytes - layer.streamable_bytes,
            streamed_bytes=layer.streamable_bytes,
        )
    return replace(profile, backbones=(replace(backbone, layers=tuple(layers)),))


def _between(layers: Sequence[LayerProfile], first: int, stop: int) -> Sequence[LayerProfile]:
    """Returns layers from one position to another, over the end if that is before it."""
    return layers[first:stop] if first < stop else (*layers[first:], *layers[:stop])


def _with_wait(own: Seconds, copy_s: float, covering: Sequence[Seconds]) -> Seconds:
    """Returns the times of a run with the wait for its copy, which begins when those that cover it do."""
    covered = Seconds.sum(covering)
    counts = {*(count for count, _ in own.points), *_COUNTS}
    return Seconds.of({n: own.at(n) + max(copy_s - covered.at(n), 0.0) for n in counts})


def streamed_where_needed(sizes: Mapping[int, int], room: float) -> frozenset[int]:
    """Returns which streamed layers of a rank still have to be where it has room for some, spread evenly.

    Args:
        sizes: Bytes of the streamed weights by position, ascending.
        room: Bytes that the rank has left while it streams all of them.

    Example:
        >>> sorted(streamed_where_needed(dict.fromkeys(range(8), 10), room=40))
        [0, 2, 4, 6]
    """
    slots, total = NUM_SLOTS * max(sizes.values(), default=0), sum(sizes.values())
    if total <= room + slots:  # without streaming there are no slots
        return frozenset()
    needed, saved = dict(sizes), 0.0
    for position, size in sizes.items():
        saved += size * room / total
        if saved >= size:
            saved -= size
            del needed[position]
    return frozenset(needed)


_Layer = TypeVar("_Layer")


def streamed_runs(
    program: Program, streamed_layers: Mapping[int, Sequence[_Layer]]
) -> tuple[_Layer, ...]:
    """Returns the streamed layers that a program of a rank runs, in order."""
    runs = list[_Layer]()
    for instruction in program:
        match instruction:
            case Forward(stage, _) | ForwardNoGrad(stage, _):
                runs += streamed_layers.get(stage, ())
            case Backward(stage, _) | BackwardInput(stage, _):
                runs += reversed(streamed_layers.get(stage, ()))
    return tuple(runs)


def copies(runs: Sequence[int]) -> tuple[int, ...]:
    """Returns the copies of a step, by layer and in order, where steps with the same runs follow each other.

    The copy for the next run begins with each run, unless a slot has that layer still.

    Example:
        >>> copies((1, 2, 3, 3, 2, 1))
        (3, 1)
    """
    other: int | None = None  # what the slot has that the running layer does not have
    for _ in range(2):  # the second time slots are full from the beginning
        copied = list[int]()
        for run, coming in zip(runs, [*runs[1:], *runs[:1]], strict=True):
            if coming not in (run, other):
                copied.append(coming)
            if coming != run:
                other = run
    return tuple(copied) if runs else ()
