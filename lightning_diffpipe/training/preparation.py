"""From a module and one batch to a running pipeline.

    equal weights -> layers ------------> costs ------> plan ------> fold -> groups -> place -> engine
    comm/rendezvous  graph/probed_step    plan_source   plan_source  assembly

Three stations, each of which returns plain data once: which layers there are (`ProbedStep`), what they and the
links cost (`Basis`), what each rank does (`PipelinePlan`). Every rank builds the whole module on the host, agrees
on its weights, and probes it in the same way; rank 0 alone plans. Then each rank keeps its own stages and the
frozen layers, and gives the memory of everything else back.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_diffpipe.comm.rendezvous import (
    agree,
    align_parameters,
    close_group,
    on_all_ranks,
    require_equal,
    world_group,
)
from lightning_diffpipe.comm.watcher import watcher
from lightning_diffpipe.errors import raised_by_all
from lightning_diffpipe.graph.call_sequences import Moment
from lightning_diffpipe.graph.fakes import without_garbage_collection
from lightning_diffpipe.graph.probed_step import probe_step
from lightning_diffpipe.graph.step import ModuleSplit, Step
from lightning_diffpipe.host_memory import keep_freed_memory
from lightning_diffpipe.profiling.profiler import bar
from lightning_diffpipe.runtime.batch_layout import num_samples
from lightning_diffpipe.training.assembly import assemble
from lightning_diffpipe.training.pipeline import Pipeline, Process
from lightning_diffpipe.training.plan_source import (
    PipelineOptions,
    basis_of,
    plan_of_rank_0,
    planned_layers,
)
from lightning_diffpipe.training.refusals import (
    refuse_ahead,
    refuse_changing_step,
    refuse_one_chain,
    refuse_untrainable,
    warn_of_whole_compiled,
)

_log = logging.getLogger(__name__)
_TOLD_S = 0.05


def prepare(
    module: nn.Module,
    step: Step,
    batch: Any,
    options: PipelineOptions,
    process: Process,
    arguments: tuple[Any, ...] = (),
    moments: Sequence[Moment] = (),
) -> Pipeline:
    """Plans a module's pipeline and sets this rank's part of it up.

    Args:
        module: The whole module, on the host.
        step: Module and batch to loss.
        batch: A batch of one pipeline, on the host; equal on all ranks.
        options: The user's decisions.
        process: Rank and device of this process.
        arguments: Further arguments of the step for the first batch.
        moments: Later moments of training, at which the step may call other layers.

    Raises:
        ConfigurationError: The module trains nothing, or the options do not fit it.
        PlanError: A given plan was made for another model or world.
        GraphError: The step cannot be cut at its layers.
    """
    with raised_by_all():
        refuse_untrainable(module)
        size = num_samples(batch, ModuleSplit.of(module))
    if process.device.type == "cpu":
        keep_freed_memory()
    before = watcher.seconds.copy()
    shows = process.rank == 0 and sys.stderr.isatty() and _log.isEnabledFor(logging.INFO)
    with without_garbage_collection():
        with watcher.inside("aligning weights"):
            world = world_group(process.world_size, process.timeout_s)
            own_seed = os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())
            seed = agree(int(own_seed) if options.seed is None else options.seed, world)
            align_parameters(module, world)
        with watcher.inside("probing the step"):
            planned = agree(planned_layers(options) if process.rank == 0 else (), world)
            probe_all = partial(
                probe_step, module, step, batch, size, seed=seed, planned=planned,
                arguments=arguments, moments=moments, runs_ahead=process.world_size > 1,
            )  # fmt: skip
            with bar(shows, "probing the layers of a step", counted=False, stays=False):
                probed = on_all_ranks(probe_all, world)
            with raised_by_all():
                require_equal(probed.graph.digest, world)
                refuse_changing_step(probed.graph)
                refuse_one_chain(probed.chains, options)
            # One that reads a clock may have found another.
            sequences = replace(probed.sequences, carried=agree(probed.sequences.carried, world))
            probed = replace(probed, sequences=sequences)
        if sequences.moves_frozen and options.plan is None:
            _log.info(
                "what frozen layers get follows the step: they run in the step of their batch"
            )
            options = replace(options, filling="none")
        warn_of_whole_compiled(module, probed.graph)
        with bar(shows, "timing layers and links, and planning", stays=False) as report:
            basis = basis_of(probed, options, process, world, report)
            plan = plan_of_rank_0(probed, basis, options, process, world)
        with raised_by_all():
            refuse_ahead(plan, probed)
        close_group(world)
    with watcher.inside("placing stages"):
        pipeline = assemble(probed, plan, process, options, seed)
    if process.rank == 0:
        seconds = watcher.seconds - before
        told = (f"{what} {part_s:.1f} s" for what, part_s in seconds.items() if part_s >= _TOLD_S)
        _log.info("ready in %.1f s: %s", seconds.total(), ", ".join(told))
    return replace(pipeline, basis=basis)
