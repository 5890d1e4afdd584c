"""Passes: a step that calls its denoiser several times, one pass without gradients perhaps (self-conditioning).

A stage is a stretch of layer calls. Layers that are called in every pass are cut once, and stage `s` of every pass
is on the rank of stage `s` of the first, where its weights exist once:

    calls     a b c d   a b c d         a b | c d on two ranks: stages  0: a b   1: c d   2: a b   3: c d
    passes    0         1               on ranks                        0        1        0        1

The search cuts the *folded* chain, whose layers stand for all calls of theirs; what it finds is simulated, and
written down, call by call. Passes without gradients run first, as a wave of forwards that keep nothing; then the
schedule runs as if there were no others. With equal stages, free links and a feedback of `T_F` an iteration of
1F1B takes `max(M f, S f + T_F) + (M + S - 1)(f + b)`. Where several passes carry gradients, the order is found by
list scheduling.

Source:
    The extra forward: DiffusionPipe, Tian et al. (2024), https://arxiv.org/abs/2405.01248; the rest is ours.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightning_diffpipe.planning.cost import LayerRun
from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ForwardNoGrad,
    Program,
    Staged,
)
from lightning_diffpipe.planning.partition import Cut
from lightning_diffpipe.planning.profile import (
    ADDED_UP,
    BackboneProfile,
    LayerProfile,
    ModelProfile,
    Seconds,
)
from lightning_diffpipe.planning.schedule import Placement, Schedule, ScheduleSpec
from lightning_diffpipe.planning.schedules.list_scheduling import chain_programs


def folded(profile: ModelProfile) -> ModelProfile:
    """Returns a profile whose layers each stand for all calls of theirs; as it is if there is one pass.

    The forward is that of the first pass, everything else counts as backward: then bounds hold. If the
    step has several call sequences, a call takes its mean time.
    """
    backbone = profile.backbones[0]
    if len(backbone.seen.sequences) > 1:
        layers = tuple(
            layer.scaled(sum(share for share, first in backbone.seen.sequences if first <= i))
            for i, layer in enumerate(backbone.layers)
        )
        backbone = replace(backbone, layers=layers)
        profile = replace(profile, backbones=(backbone, *profile.backbones[1:]))
    if not backbone.passes:
        return profile
    first, stop = backbone.passes[0]
    calls = [_calls(backbone, index, index + 1) for index in range(stop - first)]
    layers = tuple(_folded_layer(backbone, runs) for runs in calls)
    numbered = ((index, run) for index, runs in enumerate(calls) for run in runs)
    folded_index = {i: index for index, run in numbered for i in range(run.first, run.stop)}
    read_by = lambda readers: tuple(sorted({folded_index[reader] for reader in readers}))
    encoders = tuple(encoder.read_at(read_by) for encoder in profile.encoders)
    chain = replace(backbone, layers=layers, passes=(), skips=())
    return replace(profile, backbones=(chain, *profile.backbones[1:]), encoders=encoders)


def runs_of(backbone: BackboneProfile, cuts: Sequence[Cut]) -> tuple[LayerRun, ...]:
    """Returns the calls of every stage of every pass, pass by pass, for cuts of the folded chain."""
    of_stage = [_calls(backbone, first, stop) for first, stop, _ in cuts]
    return tuple(runs[p] for p in range(len(backbone.passes)) for runs in of_stage)


def unrolled(base: Placement, backbone: BackboneProfile, runs: Sequence[LayerRun]) -> Placement:
    """Returns where the stages of all passes run, and which of them get no gradient."""
    no_grad = {
        stage
        for stage, run in enumerate(runs[:-1])
        if not any(layer.gradient for layer in backbone.layers[run.first : run.stop])
    }
    return replace(
        base,
        stage_ranks=base.stage_ranks * (len(runs) // base.num_stages),
        no_grad=frozenset(no_grad),
    )


def schedule_of_passes(
    spec: ScheduleSpec, base: Placement, placement: Placement, num_microbatches: int
) -> Schedule:
    """Makes a schedule of all passes."""
    return widened(spec(base, num_microbatches), placement, base.num_stages)


def widened(schedule: Schedule, placement: Placement, pass_size: int = 1) -> Schedule:
    """Makes a schedule for a step that calls layers again before what is planned, on the ranks with their weights.

    Passes of `pass_size` stages whose last one gets no gradient become waves of forwards, stage by stage; backwards
    of their earlier stages follow those of the planned stages, with which `placement` ends. For other passes list
    scheduling finds the order.

    Example:
        >>> from lightning_diffpipe.planning.schedules.gpipe import gpipe
        >>> twice = Placement(((0,), (1,)) * 2, no_grad=frozenset({0, 1}))
        >>> [str(i) for i in widened(gpipe(2, 2), twice).programs[1]]
        ['1P0', '1P1', '3F0', '3F1', '3B0', '3B1']
    """
    size, more = schedule.num_microbatches, placement.num_stages - schedule.num_stages
    no_grad = placement.no_grad
    planned = {more + stage for stage in schedule.placement.no_grad}
    passes = (range(first, first + pass_size) for first in range(0, more, pass_size))
    if no_grad - {*range(more)} != planned or not all(stages[-1] in no_grad for stages in passes):
        splits = any(isinstance(i, BackwardInput) for program in schedule.programs for i in program)
        most = placement.num_stages - 1
        return Schedule(placement, size, chain_programs(placement, size, most, splits))
    programs: list[Program] = []
    for rank, rank_program in enumerate(schedule.programs):
        program: list[Staged] = [
            (ForwardNoGrad if stage in no_grad else Forward)(stage, microbatch)
            for stage in placement.stages_of(rank)
            if stage < more
            for microbatch in placement.microbatches_of(stage, rank, size)
        ]
        for i in rank_program:
            if not isinstance(i, Staged):
                continue  # frozen work, which every batch has of its own
            program.append(replace(i, stage=more + i.stage))
            if isinstance(i, (Backward, BackwardInput, BackwardWeight)):
                calls = reversed(range(i.stage % pass_size, more, pass_size))
                program += [replace(i, stage=stage) for stage in calls if stage not in no_grad]
        programs.append(tuple(program))
    return Schedule(placement, size, tuple(programs))


def _calls(backbone: BackboneProfile, first: int, stop: int) -> list[LayerRun]:
    """Returns for each pass its calls of folded layers; those around passes count for the first and the last."""
    before, runs = 0, []
    for number, (start, end) in enumerate(backbone.passes):
        is_last = number == len(backbone.passes) - 1
        begin = before if first == 0 else start + first
        until = start + stop
        if stop == end - start and is_last:
            until = len(backbone.layers)
        runs.append(LayerRun(begin, until))
        before = end
    return runs


def _folded_layer(backbone: BackboneProfile, runs: Sequence[LayerRun]) -> LayerProfile:
    """Returns one layer for all calls of some layers: its forward is that of the first pass."""
    calls = [backbone.layers[run.first : run.stop] for run in runs]
    first, later = calls[0], [layer for layers in calls[1:] for layer in layers]
    every = [*first, *later]
    weight = [layer.weight_gradient_s for layer in every if layer.weight_gradient_s is not None]
    return replace(
        calls[0][-1],
        forward_s=Seconds.sum([layer.forward_s for layer in first]),
        backward_s=Seconds.sum([*(x.backward_s for x in every), *(x.forward_s for x in later)]),
        weight_gradient_s=Seconds.sum(weight) if weight else None,
        boundary_bytes_per_sample=min(layers[-1].boundary_bytes_per_sample for layers in calls),
        gradient=True,
        largest_gradient_bytes=max(layer.largest_gradient_bytes for layer in every),
        **{name: sum(getattr(layer, name) for layer in every) for name in ADDED_UP},
    )
