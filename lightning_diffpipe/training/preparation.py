"""From a module and one batch to a running pipeline.

    equal weights -> probe -> profile -> plan (rank 0, broadcast) -> fold -> groups -> place -> engine
    comm/rendezvous  graph/   plan_source                            assembly

Every rank builds the whole module on the host, agrees on its weights, and looks at it in the same way;
rank 0 alone plans. Then each rank keeps its own stages and the frozen layers, and gives the memory of
everything else back.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_diffpipe.comm.rendezvous import (
    agree,
    align_parameters,
    close_group,
    on_all_ranks,
    require_equal,
    world_group,
)
from lightning_diffpipe.comm.watcher import watcher
from lightning_diffpipe.errors import DiffPipeError, GraphError, raised_by_all
from lightning_diffpipe.graph.chains import find_chains
from lightning_diffpipe.graph.fakes import without_garbage_collection
from lightning_diffpipe.graph.forms import MOST_FORMS, Forms, Moment, names_of, survey
from lightning_diffpipe.graph.layer import LayerGraph, other_calls
from lightning_diffpipe.graph.probe import probe, probe_named
from lightning_diffpipe.graph.rng import microbatch_seed
from lightning_diffpipe.graph.step import BatchForm, ModuleSplit
from lightning_diffpipe.host_memory import keep_freed_memory
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.profiling.measure import Subject
from lightning_diffpipe.profiling.profiler import bar
from lightning_diffpipe.profiling.state import take_samples
from lightning_diffpipe.runtime.batch_layout import num_samples
from lightning_diffpipe.runtime.partitioned import Step, too_many_forms
from lightning_diffpipe.training.assembly import assemble
from lightning_diffpipe.training.pipeline import Basis, Pipeline, ProbedStep, Process
from lightning_diffpipe.training.plan_source import PipelineOptions, plan_of_rank_0, planned_layers
from lightning_diffpipe.training.refusals import (
    refuse_own_generators,
    refuse_untrainable,
    warn_of_whole_compiled,
)

_log = logging.getLogger(__name__)
_NUM_PROBED_SAMPLES = 2
_TIMING_S, _TOLD_S = 1.0, 0.05


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
    if process.device.type == "cpu":
        keep_freed_memory()
    before = watcher.seconds.copy()
    probed, seed, plan, basis = _probed_and_planned(
        module, step, batch, options, process, arguments, moments
    )
    with watcher.inside("placing stages"):
        pipeline = assemble(probed, plan, process, options, seed)
    if process.rank == 0:
        seconds = watcher.seconds - before
        told = (f"{what} {part_s:.1f} s" for what, part_s in seconds.items() if part_s >= _TOLD_S)
        _log.info("ready in %.1f s: %s", seconds.total(), ", ".join(told))
    return replace(pipeline, basis=basis)


@without_garbage_collection()
def _probed_and_planned(
    module: nn.Module,
    step: Step,
    batch: Any,
    options: PipelineOptions,
    process: Process,
    arguments: tuple[Any, ...] = (),
    moments: Sequence[Moment] = (),
) -> tuple[ProbedStep, int, PipelinePlan, Basis | None]:
    """Returns what `assemble` needs: the step, the seed of the run, and the plan; and the basis of that."""
    shows = process.rank == 0 and sys.stderr.isatty() and _log.isEnabledFor(logging.INFO)
    with watcher.inside("aligning weights"):
        world = world_group(process.world_size, process.timeout_s)
        own_seed = os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())
        seed = agree(int(own_seed) if options.seed is None else options.seed, world)
        align_parameters(module, world)
    with raised_by_all():
        split = ModuleSplit.of(module)
        size = num_samples(batch, split)
        form = split or BatchForm.of(batch, size)
        small = take_samples(batch, size, min(_NUM_PROBED_SAMPLES, size), split)
    with watcher.inside("probing the step"):
        planned = agree(planned_layers(options) if process.rank == 0 else (), world)
        with bar(shows, "probing the layers of a step", counted=False, stays=False):
            survey_all = partial(
                _surveyed, module, step, small, form, seed, planned, arguments, moments
            )
            with _telling_of_smaller_batch(min(_NUM_PROBED_SAMPLES, size), size):
                graph, forms = on_all_ranks(survey_all, world)
        with raised_by_all():
            require_equal(graph.digest, world)
    if forms.moves_frozen and process.world_size > 1:
        _log.info(
            "what frozen layers get depends on the step's number: they run when a batch is due"
        )
        options = replace(options, filling="none")
    probed = ProbedStep(module, step, batch, small, graph, forms)
    chains = find_chains(module, probed.widest, small, graph)
    warn_of_whole_compiled(module, graph)
    count = options.num_microbatches
    with bar(shows, "timing layers and links, and planning", stays=False) as report:
        subject = Subject(
            module, probed.widest, batch, graph, device=process.device, progress=report,
            splits_backward=options.schedule in SCHEDULES and SCHEDULES[options.schedule].splits_backward,
            budget_s=_TIMING_S, looks_at_results=process.world_size > 1 or options.encode_first,
            microbatch_size=math.ceil(size / count) if isinstance(count, int) else None,
            least_samples=_least_samples(module, probed.widest, take_samples(batch, size, 1, split), size, graph),
        )  # fmt: skip
        plan, basis = plan_of_rank_0(subject, chains, forms, options, process, world)
    close_group(world)
    return probed, seed, plan, basis


@contextlib.contextmanager
def _telling_of_smaller_batch(number: int, size: int) -> Iterator[None]:
    """Adds to an error of the step's own that the batch was cut, for what shapes do not fit any more."""
    try:
        yield
    except DiffPipeError:
        raise
    except Exception as error:
        if number < size:
            error.add_note(
                f"training_step was run on {number} of the {size} samples of a batch, to look at its layers: of "
                f"tensors with {size} rows and lists of {size} it got so many. If one of them holds no samples, "
                "but is a table that all share, leave it out of the batch, or let the module cut batches itself "
                "(split_batch)"
            )
        raise


def _surveyed(
    module: nn.Module,
    step: Step,
    batch: Any,
    form: BatchForm | ModuleSplit,
    seed: int,
    planned: tuple[str, ...],
    arguments: tuple[Any, ...],
    moments: Sequence[Moment],
) -> tuple[LayerGraph, Forms]:
    """Returns the layers of a step, in the form with most calls, and the forms it takes.

    The layers are those that a plan or profile names (`planned`), perhaps finer, if this module has them.
    """

    def probed(step: Step) -> LayerGraph:
        graph = probe(module, step, batch, seed=seed, form=form)
        if not planned or graph.path_names == planned:
            return graph
        try:
            return probe_named(module, step, batch, graph, planned, seed=seed)
        except GraphError as error:
            _log.info(
                "the layers of the given plan or profile are not those of this module: %s", error
            )
            return graph

    graph = probed(step)
    seed_of = partial(microbatch_seed, seed, 0)
    try:
        with watcher.inside("looking for coins"):
            widest, forms = survey(module, step, batch, graph, seed_of, arguments, moments)
    except DiffPipeError:
        raise
    except Exception as error:  # of any code, on numbers that mean nothing
        _log.info("whether the step takes several forms cannot be found out: %s", str(error))
        return graph, Forms()
    if forms.widest is None:
        return graph, forms
    if graph.generators:
        refuse_own_generators(graph)
    # Values of coins, say, which are known now.
    if names_of(widest) != graph.layer_names or graph.needs_values:
        graph = probed(forms.widest.of_step(step))
        widest, forms = survey(module, step, batch, graph, seed_of, arguments, moments)
        if names_of(widest) != graph.layer_names:
            raise GraphError(
                "the form of the step with most calls cannot be probed: run again with what it drew, "
                f"{other_calls(names_of(widest), graph.layer_names)}"
            )
    elif forms.by_reads:
        graph = probed(forms.widest.of_step(step))
    if len(forms.exemplars) > MOST_FORMS:
        raise GraphError(too_many_forms(len(forms.exemplars)))
    shares = ", ".join(f"{share:.0%}" for share in forms.shares)
    _log.info("the step takes %d forms, in %s of the trials", len(forms.exemplars), shares)
    return graph, forms


def _least_samples(module: nn.Module, step: Step, sample: Any, size: int, graph: LayerGraph) -> int:
    """Returns samples that each microbatch must have: two, where batch norms would see one value per channel."""
    norms = any(isinstance(m, _BatchNorm) and m.training for m in module.modules())
    if size == 1 or not norms:
        return 1
    try:
        probe(module, step, sample, mode="fake", layer_names=graph.layer_names, form=graph.form)
    except ValueError as error:
        return 2 if "more than 1 value per channel" in str(error) else 1
    except Exception as error:  # of any code, which needs values, say
        _log.debug("whether one sample is enough is unknown: %s", error)
    return 1
