"""From a batch to one rank's work: microbatches, frozen parts, the schedule with all communication.

    batch of 8 -> sizes 3 3 2 -> a MicrobatchWork each: layer graph of its size, seed, weight of its loss
                              -> frozen parts: which rank encodes which samples, in groups
                              -> the plan's schedule lowered for these sizes: this rank's program

Tensors and numpy arrays are cut along dimension 0; lists and tuples of strings with one entry per sample
(captions, ids, sizes, images) along their length. Dicts, tuples and lists of batched tensors are containers and
keep their structure. Scalars, `None` and zero-dimensional tensors go to every microbatch unchanged. A module may
cut its batches itself, with a method `split_batch`.

No layer runs here, and nothing is decided: everything follows from the plan and the batch's size. The last batch of
an epoch may be smaller, so lowered schedules are cached by size, and a size that is new is probed first. With fewer
samples than the plan has microbatches, it is cut into so many.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.comm.mesh import Mesh
from lightning_diffpipe.comm.transport import MessageKey, message_key
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.rng import microbatch_seed
from lightning_diffpipe.graph.step import (
    BatchSpec,
    ModuleSplit,
    Step,
    StepCall,
    change_samples,
    count_samples,
    sample_counts,
)
from lightning_diffpipe.planning.filling import (
    EncodePart,
    encode_parts,
    group_size_of,
    num_groups_of,
    split_evenly,
)
from lightning_diffpipe.planning.instruction import Instruction, Program, ShareResults
from lightning_diffpipe.planning.lowering import delivered, lower, lower_for_devices, prefix_frozen
from lightning_diffpipe.planning.passes import widened
from lightning_diffpipe.planning.schedule import Schedule
from lightning_diffpipe.runtime.bubbles import FrozenWork
from lightning_diffpipe.runtime.partitioned import PartitionedStepCache
from lightning_diffpipe.runtime.stage import MicrobatchWork


def num_samples(batch: Any, batch_spec: BatchSpec | ModuleSplit | None = None) -> int:
    """Counts the samples of a batch, the common length of its tensors and lists; or asks the module.

    Raises:
        ConfigurationError: No tensor or list shows the number of samples, or they disagree; or there are
            tensors in a container that is not known to pytree.
    """
    if isinstance(batch_spec, ModuleSplit):
        return count_samples(batch, batch_spec) or 0
    if any(map(_cannot_be_cut, pytree.tree_leaves(batch))):
        leaves = pytree.tree_flatten_with_path(batch)[0]
        path, leaf = next((path, leaf) for path, leaf in leaves if _cannot_be_cut(leaf))
        where = pytree.keystr(path) or "the batch"
        if isinstance(leaf, Tensor):
            raise ConfigurationError(
                f"{where} is a nested tensor, which cannot be cut into microbatches; pad it to one length "
                "(torch.nested.to_padded_tensor), and give the lengths or a mask besides"
            )
        container = "dict(...) of it" if isinstance(leaf, Mapping) else "a dict, list or tuple"
        raise ConfigurationError(
            f"{where} is a {type(leaf).__name__}, whose tensors cannot be cut into microbatches, as "
            f"torch.utils._pytree does not know the type; give {container}, "
            "or register a dataclass with torch.utils._pytree.register_dataclass"
        )
    sizes = sample_counts(batch)
    if not sizes:
        raise ConfigurationError(
            f"the batch ({type(batch).__name__}) holds no tensor and no list, so it cannot be cut into "
            "microbatches; give `training_step` a batch whose tensors have samples in dimension 0"
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path or 'batch'}: {size}" for path, size in sizes.items())
        raise ConfigurationError(
            f"the parts of the batch have different numbers of samples ({listed}); "
            "put as many samples in dimension 0 everywhere, as loaders of one batch size do; or move shared values "
            "out of the batch, or let the module cut batches itself (split_batch)"
        )
    return next(iter(sizes.values()))


def microbatch_sizes(num_samples: int, num_microbatches: int) -> tuple[int, ...]:
    """Returns sizes of the microbatches of a batch: as even as possible, larger ones first.

    Args:
        num_samples: Samples in the batch.
        num_microbatches: Microbatches the plan runs; fewer are made of fewer samples.

    Example:
        >>> microbatch_sizes(10, 4), microbatch_sizes(2, 4)
        ((3, 3, 2, 2), (1, 1))
    """
    return split_evenly(num_samples, max(1, min(num_samples, num_microbatches)))


def split(
    batch: Any, sizes: Sequence[int], batch_spec: BatchSpec | ModuleSplit | None = None
) -> list[Any]:
    """Cuts a batch into microbatches of the given sizes, in order.

    Args:
        batch: Any nesting of dicts, lists, tuples and dataclasses known to pytree.
        sizes: Samples of each microbatch; they add up to the samples of the batch, by which one knows
            the parts that have one entry per sample.
        batch_spec: Structure of the batch the run was planned with, which is surer than a small one; or how the
            module cuts it.

    Returns:
        One batch of the same structure for each size. Tensors and arrays are views.

    Example:
        >>> import torch
        >>> split({"x": torch.arange(3), "caption": ["a", "b", "c"], "scale": 2.0}, [2, 1])[1]
        {'x': tensor([2]), 'caption': ['c'], 'scale': 2.0}
    """
    if isinstance(batch_spec, ModuleSplit):
        return batch_spec.split(batch, sizes)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    slices = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return change_samples(batch, sum(sizes), [itemgetter(piece) for piece in slices], batch_spec)


def microbatches(
    batch: Any, number: int, batch_spec: BatchSpec | ModuleSplit | None = None
) -> list[Any]:
    """Cuts a batch into so many microbatches, as even as possible; fewer are made of fewer samples."""
    return split(batch, microbatch_sizes(num_samples(batch, batch_spec), number), batch_spec)


def _cannot_be_cut(leaf: Any) -> bool:
    """Returns whether this is a nested tensor, or has tensors or arrays inside where pytree does not look."""
    if isinstance(leaf, Tensor) and leaf.is_nested:
        return True
    if leaf is None or isinstance(leaf, Tensor | np.ndarray | str | bytes | int | float):
        return False
    inside: list[Any] = [getattr(leaf, "__dict__", None)]
    if isinstance(leaf, Mapping):
        inside += leaf.values()
    elif isinstance(leaf, list | tuple | set):
        inside += leaf
    elif dataclasses.is_dataclass(leaf):
        inside += [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
    return any(isinstance(part, Tensor | np.ndarray) for part in pytree.tree_leaves(inside))


_Messages = tuple[dict[MessageKey, list[MessageKey]], dict[Instruction, list[MessageKey]] | None]


@dataclass(frozen=True)
class StepWork:
    """One batch laid out for one rank.

    Attributes:
        base: The plan's schedule, or for more calls than planned one with stages before it.
        schedule: The same with communication for this batch: what all ranks of the pipeline do.
        messages: Which of the messages it sent each one that it receives confirms, and, over NCCL, before which
            instructions its receives begin.
        frozen: The frozen parts; `None` if nothing is frozen.
        total_groups: Groups of samples in which all ranks encode them.
        early: They may be encoded in bubbles of batches before.
        frozen_values: What they would have got when the batch was laid out, see `PartitionedStepCache`.
    """

    base: Schedule
    schedule: Schedule
    program: Program
    messages: _Messages
    works: list[MicrobatchWork]
    frozen: FrozenWork | None
    total_groups: int
    early: bool
    frozen_values: Sequence[Any]


@dataclass(eq=False)
class BatchLayout:
    """Lays batches out for one rank.

    Attributes:
        steps: Cut steps by signature.
        seed: Seed of the run; with it all random numbers of a step are derived.
        group_size: Samples on which frozen layers run at a time; `None` chooses.
        num_encoding: Number of ranks of the pipeline that encode, the last ones; `None` for all.
    """

    root: nn.Module
    step: Step
    schedule: Schedule
    steps: PartitionedStepCache
    mesh: Mesh
    seed: int
    group_size: int | None = None
    num_encoding: int | None = None

    def __post_init__(self) -> None:
        self._lowered = lru_cache(maxsize=128)(self._lower)
        self._widened = lru_cache(maxsize=8)(partial(widened, self.schedule))

    def lay_out(
        self,
        batch: Any,
        batch_index: int,
        arguments: tuple[Any, ...] = (),
        groups: Callable[[int], tuple[int, ...]] | None = None,
    ) -> StepWork:
        """Cuts a batch into microbatches and adds communication to the schedule; asks no rank and runs nothing.

        Args:
            batch: This pipeline's batch, on this rank's device.
            batch_index: Number of the batch since training began; seeds its random numbers.
            arguments: Further arguments of the step.
            groups: If its frozen layers are to run in bubbles of batches before: how so many groups are
                shared over the ranks.
        """
        sizes = microbatch_sizes(
            num_samples(batch, self.steps.batch_spec), self.schedule.num_microbatches
        )
        works = self._works(batch, sizes, batch_index, arguments)
        inputs = self.steps.frozen_values
        views = [work.partitioned.frozen_view for work in works]
        splits: bool | None = None  # there is no frozen work
        if any(view.cut.layers for view in views):
            splits = all(view.is_splittable for view in views)
        mesh, num_ranks = self.mesh, self.num_encoding or self.schedule.num_ranks
        group_size = (self.group_size or group_size_of(sizes, num_ranks)) if splits else max(sizes)
        total = num_groups_of(sizes, group_size)
        counts = groups(total) if groups else None
        starts = tuple(work.partitioned.first_stage for work in works)
        placement = works[0].partitioned.placement
        base = self.schedule
        if placement != base.placement:
            base = self._widened(placement)
        lowered, messages, parts = self._lowered(base, starts, sizes, splits, group_size, counts)
        frozen = None
        if parts:
            frozen = FrozenWork(
                parts, group_size if splits else None, works, placement, mesh.local_rank, mesh.device
            )  # fmt: skip
        program = lowered.programs[mesh.local_rank]
        return StepWork(
            base, lowered, program, messages, works, frozen, total, groups is not None, inputs
        )

    def still_has_its_sequences(self, step: StepWork) -> bool:
        """Returns whether a step that was laid out in advance has the call sequences that it had then."""
        return all(
            self.steps.of(work.call.batch, work.seed, work.call.arguments, work.index == 0).graph
            is work.partitioned.graph
            for work in step.works
        )

    def weigh(self, works: Sequence[MicrobatchWork], accumulate: int = 1) -> None:
        """Gives the losses of a batch their weights, so that all samples of all pipelines weigh the same.

        A collective call of all pipelines, once for each batch that is trained on; how often batches are laid out
        is each pipeline's own. A step that returns weights of its own, the same in all pipelines, asks nobody: its
        gradients are divided by their sum later.
        """
        weighted = works[0].partitioned.graph.weighted
        num_samples = sum(work.num_samples for work in works)
        total = 0.0 if weighted else self.mesh.summed_over_pipelines(num_samples)
        for work in works:
            work.loss_scale = (1 if weighted else work.num_samples / total) / accumulate

    def _works(
        self, batch: Any, sizes: tuple[int, ...], batch_index: int, arguments: tuple[Any, ...]
    ) -> list[MicrobatchWork]:
        microbatches = split(batch, sizes, self.steps.batch_spec)
        indices = range(len(microbatches))
        seeds = [microbatch_seed(self.seed, self.mesh.pipeline, batch_index, i) for i in indices]
        cut_steps = self.steps.of_batch(microbatches, seeds, arguments)
        works = []
        for index, microbatch in enumerate(microbatches):
            seed, cut_step = seeds[index], cut_steps[index]
            written = cut_step.graph.batch_writes
            works.append(
                MicrobatchWork(
                    index=index,
                    call=StepCall(self.step, self.root, microbatch, arguments, written),
                    seed=seed,
                    partitioned=cut_step,
                    num_samples=sizes[index],
                )
            )
        return works

    def _lower(
        self,
        schedule: Schedule,
        starts: tuple[int, ...],
        sizes: tuple[int, ...],
        splits_frozen: bool | None,
        group_size: int,
        groups: tuple[int, ...] | None,
    ) -> tuple[Schedule, _Messages, tuple[EncodePart, ...]]:
        """Returns the schedule with all communication, `StepWork.messages` and, if there is frozen work, its parts.

        All of these are of the programs that run: with fewer microbatches, or some that leave stages out, another
        message may be the one in front of which a receive has to begin.
        """
        parts: tuple[EncodePart, ...] = ()
        if len(sizes) < schedule.num_microbatches:
            schedule = schedule.of_first_microbatches(len(sizes))
        schedule = schedule.starting_at(starts)
        if splits_frozen is not None:
            parts = encode_parts(
                sizes, schedule.num_ranks, splits_frozen, group_size, groups, self.num_encoding
            )
        schedule = prefix_frozen(schedule, parts, encoded=groups is not None)
        rank, keys, receives_before = self.mesh.local_rank, partial(map, message_key), None
        if self.mesh.backend == "nccl":
            lowered, awaited = lower_for_devices(schedule)
            receives_before = {at: list(keys(receives)) for at, receives in awaited[rank].items()}
        else:
            lowered = lower(schedule)
        programs = tuple((*program, ShareResults()) for program in lowered.programs)
        confirmed = {message_key(w): list(keys(s)) for w, s in delivered(lowered)[rank].items()}
        return replace(lowered, programs=programs), (confirmed, receives_before), parts
