"""Passes: a step that calls its denoiser several times, one pass without gradients perhaps (self-conditioning).

A stage is a stretch of layer calls. Layers that are called in every pass are cut once, and stage `s` of every pass
lies on the rank of stage `s` of the first, where its weights exist once:

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

from __future__ import annotations

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
from lightning_diffpipe.planning.schedules.list_scheduling import ListScheduling, Work


def folded(profile: ModelProfile) -> ModelProfile:
    """Returns a profile whose layers each stand for all calls of theirs; as it is if there is one pass.

    The forward is that of the first pass, everything else counts as backward: then bounds hold. Of a step of
    several forms a call takes what it does on average.
    """
    backbone = profile.backbones[0]
    if len(backbone.seen.forms) > 1:
        share = backbone.seen.share_calling
        layers = tuple(layer.scaled(share(i)) for i, layer in enumerate(backbone.layers))
        backbone = replace(backbone, layers=layers)
        profile = replace(profile, backbones=(backbone, *profile.backbones[1:]))
    if not backbone.passes:
        return profile
    first, stop = backbone.passes[0]
    calls = [_calls(backbone, unit, unit + 1) for unit in range(stop - first)]
    layers = tuple(_unit(backbone, runs) for runs in calls)
    unit_of = {
        i: unit
        for unit, runs in enumerate(calls)
        for run in runs
        for i in range(run.first, run.stop)
    }
    read_by = lambda readers: tuple(sorted({unit_of[reader] for reader in readers}))
    encoders = tuple(encoder.read_at(read_by) for encoder in profile.encoders)
    chain = replace(backbone, layers=layers, passes=(), skips=())
    return replace(profile, backbones=(chain, *profile.backbones[1:]), encoders=encoders)


def runs_of(backbone: BackboneProfile, cuts: Sequence[Cut]) -> tuple[LayerRun, ...]:
    """Returns the calls of every stage of every pass, pass by pass, where the folded chain is cut so."""
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
    """Makes a schedule of all passes.

    Args:
        spec: The schedule of one pass.
        base: Where the stages of one pass run.
        placement: Where those of all passes do; from `unrolled`.
        num_microbatches: Microbatches of the batch.
    """
    one_pass = spec(base, num_microbatches)
    size, no_grad, last = base.num_stages, placement.no_grad, placement.num_stages - base.num_stages
    firsts = range(0, last, size)
    if not all(no_grad & {*range(first, first + size)} for first in firsts):
        return Schedule(placement, num_microbatches, _greedy(placement, one_pass))
    programs: list[Program] = []
    for of_last in one_pass.programs:
        program: list[Staged] = [  # forwards of all earlier passes come first, in waves
            (ForwardNoGrad if first + i.stage in no_grad else Forward)(
                first + i.stage, i.microbatch
            )
            for first in firsts
            for i in of_last
            if isinstance(i, Forward)
        ]
        for i in of_last:
            assert isinstance(i, (Forward, Backward, BackwardInput, BackwardWeight))
            program.append(replace(i, stage=last + i.stage))
            if not isinstance(i, Forward):  # layers before the first pass may get gradients, too
                others = (first + i.stage for first in reversed(firsts))
                program += [replace(i, stage=stage) for stage in others if stage not in no_grad]
        programs.append(tuple(program))
    return Schedule(placement, num_microbatches, tuple(programs))


def widened(schedule: Schedule, placement: Placement) -> Schedule:
    """Makes a schedule for a step that calls layers again before what was planned, where their weights lie.

    Without gradients the added stages are waves of forwards; else list scheduling finds the order of all.

    Args:
        schedule: Of the form that was planned, compute instructions only.
        placement: Ends with the ranks of its stages.

    Example:
        >>> from lightning_diffpipe.planning.schedules.gpipe import gpipe
        >>> twice = Placement(((0,), (1,)) * 2, no_grad=frozenset({0, 1}))
        >>> [str(i) for i in widened(gpipe(2, 2), twice).programs[1]]
        ['1P0', '1P1', '3F0', '3F1', '3B0', '3B1']
    """
    size, more = schedule.num_microbatches, placement.num_stages - schedule.num_stages
    planned = {more + stage for stage in schedule.placement.no_grad}
    programs: tuple[Program, ...]
    if placement.no_grad == planned | {*range(more)}:
        programs = tuple(
            (
                *(
                    ForwardNoGrad(stage, microbatch)
                    for stage in placement.stages_of(rank)
                    if stage < more
                    for microbatch in placement.microbatches_of(stage, rank, size)
                ),
                *(replace(i, stage=more + i.stage) for i in program if isinstance(i, Staged)),
            )
            for rank, program in enumerate(schedule.programs)
        )
    else:
        programs = _greedy(placement, schedule)
    return Schedule(placement, size, programs)


def _greedy(placement: Placement, one_pass: Schedule) -> tuple[Program, ...]:
    """Orders all passes by list scheduling; backwards run in two parts where they do in a schedule of one."""
    num_microbatches = one_pass.num_microbatches
    splits = any(isinstance(i, BackwardInput) for program in one_pass.programs for i in program)
    order: dict[type[Work], int] = {Forward: 0, ForwardNoGrad: 0, Backward: 1}
    if splits:
        order = {BackwardInput: 0, Forward: 1, ForwardNoGrad: 1, BackwardWeight: 2, Backward: 2}
    most = placement.num_stages - 1
    orders = ListScheduling(
        placement,
        num_microbatches,
        lambda kind, stage: 2 if kind is Backward else 1,
        lambda stage: most if stage == 0 else num_microbatches,
        splits,
    )
    return orders.programs(lambda work: (order[type(work)], work.microbatch, -work.stage))


def _calls(backbone: BackboneProfile, first: int, stop: int) -> list[LayerRun]:
    """Returns for each pass the calls that units stand for; those around passes count for the outermost units."""
    before, runs = 0, []
    for number, (start, end) in enumerate(backbone.passes):
        is_last = number == len(backbone.passes) - 1
        begin = before if first == 0 else start + first
        until = start + stop
        if stop == end - start and is_last:
            until = len(backbone.layers)
        runs.append(LayerRun(0, begin, until))
        before = end
    return runs


def _unit(backbone: BackboneProfile, runs: Sequence[LayerRun]) -> LayerProfile:
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
        **{name: sum(getattr(layer, name) for layer in every) for name in ADDED_UP},
    )
