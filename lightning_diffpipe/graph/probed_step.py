"""Probes a step once, before anything is timed or planned: its layers, call sequences and chains.

    probe -> coins? -> probe of the longest call sequence -> chains -> does one sample suffice?

All of it is found here and returned as a `ProbedStep`: profiling times its layers, planning shares them among
ranks, and neither probes the step again.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_diffpipe.errors import ConfigurationError, DiffPipeError, GraphError
from lightning_diffpipe.graph.call_sequences import (
    MOST_SEQUENCES,
    CallSequences,
    Moment,
    names_of,
    survey,
    too_many_sequences,
)
from lightning_diffpipe.graph.chains import ONE_CHAIN, Chains, find_chains
from lightning_diffpipe.graph.layer import LayerGraph, not_repeated
from lightning_diffpipe.graph.probe import probe, probe_named
from lightning_diffpipe.graph.rng import microbatch_seed
from lightning_diffpipe.graph.step import BatchSpec, ModuleSplit, Step, take_samples
from lightning_diffpipe.planning.profile import SequenceShares

_log = logging.getLogger(__name__)
_NUM_PROBED_SAMPLES = 2


@dataclass(frozen=True)
class ProbedStep:
    """A step on a batch, and what was found out about it.

    Attributes:
        module: The whole module, on the host, equal on all ranks.
        step: Module and batch to loss.
        sequences: Call sequences of the step; the graph is that of the widest.
        chains: Backbones that know nothing of each other.
        least_samples: Samples that each microbatch must have.
    """

    module: nn.Module
    step: Step
    batch: Any
    small: Any
    graph: LayerGraph
    sequences: CallSequences
    chains: Chains = ONE_CHAIN
    num_samples: int = 1
    least_samples: int = 1

    @property
    def widest(self) -> Step:
        """The step with the call sequence of the graph."""
        return self.sequences.widest_of(self.step)

    @property
    def sequence_shares(self) -> SequenceShares | None:
        """Frequencies of the call sequences, and the first layers they call; None if there is only one sequence."""
        if self.sequences.widest is None:
            return None
        path = set(self.graph.path_names)
        calls = [sum(name in path for name in names) for names in self.sequences.names]
        shares: dict[int, float] = {}  # of all sequences that begin there
        for count, share in zip(calls, self.sequences.shares, strict=True):
            first = max(calls[0] - count, 0)
            shares[first] = shares.get(first, 0.0) + share
        return SequenceShares(
            tuple((share, first) for first, share in shares.items()), self.sequences.is_shared
        )


def probe_step(
    module: nn.Module,
    step: Step,
    batch: Any,
    num_samples: int,
    *,
    seed: int,
    planned: tuple[str, ...] = (),
    arguments: tuple[Any, ...] = (),
    moments: Sequence[Moment] = (),
    runs_ahead: bool = True,
) -> ProbedStep:
    """Finds out which layers a step calls, in which sequences, and which of them know nothing of each other.

    Args:
        module: The whole module, on the host; left as it is.
        step: Module and batch to loss.
        batch: One pipeline's batch, on the host.
        num_samples: Samples of the batch.
        seed: Seed of the run.
        planned: Trained layers that a given plan or profile names; they are taken where this module has them.
        arguments: Further arguments of the step for the first batch.
        moments: Later moments of training, at which the step may call other layers.
        runs_ahead: Frozen layers may run before the step of their batch, as on several ranks.

    Raises:
        GraphError: The step cannot be cut at its layers, or has too many call sequences.
        ConfigurationError: It chooses its layers by random numbers of a generator of its own.
    """
    split = ModuleSplit.of(module)
    batch_spec = split or BatchSpec.of(batch, num_samples)
    number = min(_NUM_PROBED_SAMPLES, num_samples)
    small = take_samples(batch, num_samples, number, split)
    with _telling_of_smaller_batch(number, num_samples):
        graph, sequences = _layers_and_sequences(
            module, step, small, batch_spec, seed, planned, arguments, moments, runs_ahead
        )
    widest = sequences.widest_of(step)
    chains, least = find_chains(module, widest, small, graph), 1
    if num_samples > 1 and any(isinstance(m, _BatchNorm) and m.training for m in module.modules()):
        least = _least_samples(module, widest, take_samples(batch, num_samples, 1, split), graph)
    return ProbedStep(module, step, batch, small, graph, sequences, chains, num_samples, least)


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
                f"training_step was run on {number} of the {size} samples of a batch, to find its layers: of "
                f"tensors with {size} rows and lists of {size} it got so many. If one of them holds no samples, "
                "but is a table that all share, leave it out of the batch, or let the module cut batches itself "
                "(split_batch)"
            )
        raise


def _layers_and_sequences(
    module: nn.Module,
    step: Step,
    batch: Any,
    batch_spec: BatchSpec | ModuleSplit,
    seed: int,
    planned: tuple[str, ...],
    arguments: tuple[Any, ...],
    moments: Sequence[Moment],
    runs_ahead: bool,
) -> tuple[LayerGraph, CallSequences]:
    """Returns the layers of a step, in its longest call sequence, and all its call sequences."""

    def probed(step: Step) -> LayerGraph:
        graph = probe(module, step, batch, seed=seed, batch_spec=batch_spec)
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
    given = partial(microbatch_seed, seed, 0), arguments, moments, runs_ahead
    try:
        widest, sequences = survey(module, step, batch, graph, *given)
    except DiffPipeError:
        raise
    except Exception as error:  # of any code, on numbers that mean nothing
        _log.info("whether the step has several call sequences cannot be found out: %s", str(error))
        return graph, CallSequences()
    if sequences.widest is None:
        return graph, sequences
    if graph.generators:
        refuse_own_generators(graph)
    # The probe may have needed values of coins, which the longest sequence fixes.
    if names_of(widest) != graph.layer_names or graph.needs_values:
        graph = probed(sequences.widest.of_step(step))
        widest, sequences = survey(module, step, batch, graph, *given)
        if names_of(widest) != graph.layer_names:
            raise not_repeated(names_of(widest), graph.layer_names)
    elif sequences.by_reads:
        graph = probed(sequences.widest.of_step(step))
    if len(sequences.replays) > MOST_SEQUENCES:
        raise GraphError(too_many_sequences(len(sequences.replays)))
    shares = ", ".join(f"{share:.0%}" for share in sequences.shares)
    _log.info("the step has %d call sequences, in %s of the trials", len(sequences.replays), shares)
    return graph, sequences


def refuse_own_generators(graph: LayerGraph) -> None:
    """Refuses a step that was probed to sample random numbers that no seed of a microbatch governs."""
    raise ConfigurationError(
        f"training_step draws random numbers from {min(graph.generators)}, which outlives the step. Every rank has "
        "its own copy, and draws from it at other times and more or less often than the next, so stages and frozen "
        "layers would see different numbers, and call different layers where these decide. Draw from torch's, "
        "Python's or numpy's global generator, which is kept in step on all ranks (leave `generator=` out), or "
        "make one inside the step, seeded with a number from the global one"
    )


def _least_samples(module: nn.Module, step: Step, sample: Any, graph: LayerGraph) -> int:
    """Returns the samples that batch norms need: two, where of one they would see one value per channel."""
    try:
        names, batch_spec = graph.layer_names, graph.batch_spec
        probe(module, step, sample, mode="fake", layer_names=names, batch_spec=batch_spec)
    except ValueError as error:
        return 2 if "more than 1 value per channel" in str(error) else 1
    except Exception as error:  # of any code, which needs values, say
        _log.debug("whether one sample is enough is unknown: %s", error)
    return 1
