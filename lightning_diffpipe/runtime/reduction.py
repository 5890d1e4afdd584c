"""Gradients and norms over ranks that hold the same parameters.

A parameter is held by several ranks when its stage has replicas, when pipelines run side by side, or
when two stages read it (tied weights, a module called twice). Each holder has the gradient of the
samples and calls it saw, and losses are scaled by their share of all samples, so the true gradient is
the plain sum over the holders, whatever the reason they share it.

Sums travel while the rank does something else, if it has something: frozen layers of coming batches.

The global norm counts each parameter once: its first holder in the pipeline contributes it.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn

from lightning_diffpipe.comm.mesh import Mesh, Work, start_sum
from lightning_diffpipe.comm.transport import PendingWork
from lightning_diffpipe.graph.cut import Cut
from lightning_diffpipe.graph.trial import HooksOf

Awaited = Callable[[Sequence[Work], str, Callable[[], None]], PendingWork]

_GRAD = attrgetter("grad")
_BUCKET_BYTES = 32 * 1024 * 1024
MOST_UNDER_WAY = 16  # buckets; each needs memory of its own


def holders_of(pieces: Cut, mesh: Mesh, trained: frozenset[str]) -> Mapping[str, tuple[int, ...]]:
    """Returns world ranks that hold each trained parameter, over all pipelines."""
    stages_of: dict[str, set[int]] = {}
    for stage in pieces.stages:
        for name in sorted(stage.parameters & trained):
            stages_of.setdefault(name, set()).add(stage.index)
    return {name: mesh.layout.ranks_of_stages(stages) for name, stages in stages_of.items()}


@torch.no_grad()
def call_hooks(parameter: nn.Parameter, hooks: HooksOf, earlier: Tensor | None = None) -> None:
    """Calls the hooks of a parameter as a backward would that adds its gradient to an earlier one."""
    of_gradient, after = hooks.get(parameter, ({}, {}))
    for hook in list(of_gradient.values()):
        changed = hook(parameter.grad)
        parameter.grad = parameter.grad if changed is None else changed
    if earlier is not None:
        parameter.grad = parameter.grad + earlier
    for hook in list(after.values()):
        hook(parameter)


class GradientReducer:
    """Sums gradients over the ranks that hold the same parameters.

    Args:
        mesh: This rank's groups; groups for all sets of holders have been made.
        parameters: Trained parameters resident on this rank, by name.
        holders: World ranks that hold each of them, see `holders_of`.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, nn.Parameter],
        holders: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._mesh = mesh
        self.parameters = tuple(parameters.values())
        self._buckets = [
            (ranks, bucket) for ranks, bucket in buckets_of(parameters, holders) if len(ranks) > 1
        ]
        self._sums_anywhere = any(len(ranks) > 1 for ranks in holders.values())
        pipeline = set(mesh.layout.pipeline_ranks(mesh.pipeline))
        self._counted = frozenset(
            name for name in parameters if min(pipeline.intersection(holders[name])) == mesh.rank
        )

    def start(self, awaited: Awaited) -> PendingWork | None:
        """Begins to sum gradients; waiting for it puts the sums into `.grad`.

        A holder without a gradient contributes zeros; if none has one, as a step may leave layers out, there is
        none afterwards, so that the optimizer leaves the parameter alone. Frozen ones get no sum. Every
        holder must call it at the same point of its program.

        Returns:
            `None` if this rank shares no parameter.
        """
        return Reduction(self._mesh, self._buckets, awaited) if self._buckets else None

    def agreed(self, asks: bool) -> bool:
        """Returns whether any rank of the world asks for it, where some of them sum gradients; collective there.

        Hooks on weights may be on one rank only: W&B watches gradients on rank 0.
        """
        if not self._sums_anywhere:
            return asks
        count = torch.tensor(float(asks), device=self._mesh.device)
        self._mesh.reduce(count)
        return self._mesh.summed_over_pipelines(float(count)) > 0

    def take(self) -> tuple[Tensor | None, ...]:
        """Takes away the gradients that are there, without a copy; a step adds to none."""
        gradients = tuple(map(_GRAD, self.parameters))
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def restore(self, gradients: Sequence[Tensor | None]) -> None:
        """Restores the gradients that `take` removed from the parameters."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def add(
        self, earlier: Sequence[Tensor | None], hooks: HooksOf, weight: Tensor | None = None
    ) -> None:
        """Calls hooks with the gradients of one batch, summed over all holders, and adds earlier ones.

        Args:
            earlier: Gradients that `take` returned.
            hooks: Hooks that `hooks_off` returned.
            weight: If gradients are those of a weighted sum, and shall be of a mean: the sum of the weights of this
                pipeline; a scalar, equal on its ranks.
        """
        total: Tensor | float | None = weight
        if weight is not None and self._mesh.layout.num_pipelines > 1:
            total = self._mesh.summed_over_pipelines(float(weight))
        for parameter, before in zip(self.parameters, earlier, strict=True):
            if parameter.grad is None:
                parameter.grad = before
                continue
            if total is not None:
                parameter.grad.div_(total)
            call_hooks(parameter, hooks, before)

    def global_norm(self, parameters: Mapping[str, nn.Parameter], norm_type: float) -> Tensor:
        """Returns the norm of the gradients of all stages, each parameter counted once.

        Args:
            parameters: Those of this rank that take part, by name.
            norm_type: Order of the norm; `math.inf` for the largest absolute value.

        Returns:
            A scalar, equal on all ranks of the pipeline.
        """
        # One type on all ranks, also on those that count no parameter; a norm loses nothing in it.
        device, dtype = self._mesh.device, self._mesh.number_dtype
        # GPUs sum float32 many times as fast; what is wider already may not be narrowed.
        least = torch.float64 if device.type == "cpu" else torch.float32
        counted = (p.grad for name, p in parameters.items() if name in self._counted)
        gradients = [g.abs() if g.is_complex() else g for g in counted if g is not None]
        wide = [torch.promote_types(g.dtype, least) for g in gradients]
        norms = [
            torch.linalg.vector_norm(gradient, norm_type, dtype=wide_dtype).to(dtype)
            for gradient, wide_dtype in zip(gradients, wide, strict=True)
        ]
        total = torch.stack(norms) if norms else torch.zeros(1, dtype=dtype, device=device)
        if math.isinf(norm_type):
            total = total.max()
            self._mesh.reduce(total, largest=True)
            return total
        total = total.pow(norm_type).sum()
        self._mesh.reduce(total)
        return total.pow(1.0 / norm_type)

    def clip(self, parameters: Mapping[str, nn.Parameter], bound: float) -> None:
        """Scales gradients of parameters, by name, so that their norm over all stages is at most `bound`."""
        scale = (bound / (self.global_norm(parameters, 2.0) + 1e-6)).clamp(max=1.0)
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.device, parameter.grad.dtype))


class Reduction:
    """Gradients on their way to be summed; a `PendingWork`.

    A bucket is started whenever one is over, so that all are waited for in turn, however many there are.
    """

    def __init__(
        self,
        mesh: Mesh,
        buckets: Sequence[tuple[tuple[int, ...], list[nn.Parameter]]],
        awaited: Awaited,
    ) -> None:
        self._mesh, self._awaited = mesh, awaited
        self._later = deque(buckets[MOST_UNDER_WAY:])
        self._under_way = deque(self._begin(*bucket) for bucket in buckets[:MOST_UNDER_WAY])

    def is_ready(self) -> bool:
        """Returns whether all sums are there; takes those that are, and begins others."""
        while self._under_way and self._under_way[0].is_ready():
            self._take()
        return not self._under_way

    def wait(self) -> None:
        """Waits for all sums and puts them into `.grad`."""
        while self._under_way:
            self._take()

    def _take(self) -> None:
        self._under_way.popleft().wait()
        if self._later:
            self._under_way.append(self._begin(*self._later.popleft()))

    def _begin(self, ranks: tuple[int, ...], bucket: list[nn.Parameter]) -> PendingWork:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in bucket]
        # After them, of each parameter, whether this rank has a gradient: summed, how many holders have one.
        has = torch.tensor([p.grad is not None for p in bucket], dtype=bucket[0].dtype)
        has = has.to(bucket[0].device, non_blocking=True)
        flat = torch.cat([*(g.detach().reshape(-1) for g in gradients), has])
        work = start_sum(flat, self._mesh.reduction_group(ranks))
        return self._awaited([work], "summed gradients", partial(_put, flat, bucket))


def _put(flat: Tensor, bucket: Sequence[nn.Parameter]) -> None:
    """Puts the sums of a bucket into `.grad`; only who lacks a gradient asks the device whether others have it."""
    lacks = any(p.grad is None and p.requires_grad for p in bucket)
    num_having = flat[-len(bucket) :].tolist() if lacks else [1] * len(bucket)
    start = 0
    for parameter, having in zip(bucket, num_having, strict=True):
        summed = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
        # With zeros what is frozen during training, or was left out of all holders' steps, would decay.
        if not having or not parameter.requires_grad:
            continue
        if parameter.grad is None or parameter.grad.is_sparse:  # rows of others may be others
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(summed)


def buckets_of(
    parameters: Mapping[str, nn.Parameter], holders: Mapping[str, tuple[int, ...]]
) -> Iterable[tuple[tuple[int, ...], list[nn.Parameter]]]:
    """Returns parameters of the same holders and dtype, together up to a size; equal on all holders.

    Sorted by name, because holders may have registered different stages in a different order.
    """
    groups: dict[tuple[tuple[int, ...], str], list[nn.Parameter]] = {}
    for name in sorted(parameters):
        parameter = parameters[name]
        groups.setdefault((holders[name], str(parameter.dtype)), []).append(parameter)
    for (ranks, _), members in sorted(groups.items(), key=lambda item: item[0]):
        bucket: list[nn.Parameter] = []
        size = 0
        for parameter in members:
            num_bytes = parameter.numel() * parameter.element_size()
            if bucket and size + num_bytes > _BUCKET_BYTES:
                yield ranks, bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += num_bytes
        if bucket:
            yield ranks, bucket
