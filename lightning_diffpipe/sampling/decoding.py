"""Decoding on all ranks: each computes some of the calls of an autoencoder's decoder.

Problem: ranks denoise together, and then rank 0 decodes alone, with the time and memory of one device. Of large
images and videos that is much. Idea: where tiles or slices are turned on, diffusers decodes these one by one, and
calls the decoder for each, or for each frame of a tile. Its own code is run with a decoder that answers:

    rank 0      counts     no call is computed: how many are there, and which continue an earlier one?    Division
    all ranks   compute    their own calls; others give an `Absent`, and so does everything made of one
    rank 0      replays    results of all ranks, in the order of calls                                    images

So no autoencoder's tiles or seams are written here, and images are those of one rank with the same tiles, bit for
bit. A call continues an earlier one if it is given what that left: a list of features, or a cache that it returned.
These are of one rank. Decoders that sample noise, or keep something in their modules, are left to rank 0. Nothing
is sent before all ranks have computed, so that one that fails keeps none waiting.

Source: `enable_tiling` and `enable_slicing` of diffusers' autoencoders.
"""

import copy
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.fakes import TrackedFakeMode, fake_batch, without_values
from lightning_diffpipe.graph.rng import draws
from lightning_diffpipe.sampling.loop import (
    PipelineCall,
    answered_by,
    settings_restored,
    with_own_generators,
)
from lightning_diffpipe.sampling.record import copied, moved
from lightning_diffpipe.sampling.world import World

_PLAIN = None | bool | int | float | str
_KEEPS_NOTHING = _PLAIN | torch.dtype | torch.device | Tensor


class Absent(Tensor):
    """Stand-in for a result on another rank, and for values computed from it: one entry on each axis, no values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes with the one entry; an operation that fails for its size returns the entry as it is."""
        try:
            return super().__torch_function__(func, types, args, kwargs or {})
        except (RuntimeError, ValueError, IndexError):
            leaves = pytree.tree_leaves((args, kwargs))
            return next(x for x in leaves if isinstance(x, cls))


@dataclass(frozen=True)
class Division:
    """The ranks that compute the calls of a decoder.

    Attributes:
        owners: A rank for each call, in order.
        returned: Outline of the decoder's output: the number of axes in place of its first leaf, the result, and
            None in place of other leaves, which only the next call of the same rank may read.
    """

    owners: tuple[int, ...]
    returned: Any

    def answer(self, result: Tensor | None = None, others: Collection[Any] = ()) -> Any:
        """Returns the output of a call, with an `Absent` if another rank has the result."""
        (num_axes, *rest), spec = pytree.tree_flatten(self.returned)
        if result is None:
            result = torch.empty((1,) * num_axes, device="meta").as_subclass(Absent)
        return pytree.tree_unflatten([result, *(others or rest)], spec)


def _decoded(
    vae: Any, answer: Callable[[dict[str, Any]], Any], given: Any, settings: Mapping[str, Any]
) -> Any:
    """Runs the `decode` of an autoencoder with these attributes, and `answer` in place of its decoder."""
    answered = copy.copy(vae)
    vars(answered).update(vars(vae) | settings, decoder=answered_by(vae.decoder, answer))
    vars(answered).pop("decode", None)
    return answered.decode(*given["args"], **given["kwargs"])


# ----------------------------------------------------------------------------------------- counting


def divide(
    vae: nn.Module, given: Mapping[str, Any], num_ranks: int, known: dict[str, Any]
) -> Division | None:
    """Divides the calls that a `decode` makes of the decoder, as evenly as sizes allow; None if one rank has all.

    Args:
        vae: The autoencoder.
        given: Arguments of its `decode`: `args` and `kwargs`.
        num_ranks: Ranks that can compute.
        known: Properties of the decoder, which is examined once; added to.
    """
    groups, costs = list[int](), Counter[int]()  # of each call, calls that one rank has to compute
    # Objects that calls have read or returned, with their group, by id; held, so that ids stay theirs.
    group_of: dict[int, tuple[Any, int]] = {}

    def answer(arguments: dict[str, Any]) -> Any:
        if not known:
            known["returned"] = _returned(vae.decoder, arguments)
        leaves = pytree.tree_leaves(arguments)
        # Into lists and dictionaries a call may write; others may be what an earlier one has returned.
        stop = lambda x: isinstance(x, list | dict)
        objects = [x for value in arguments.values() for x in pytree.tree_leaves(value, stop)]
        objects = [x for x in (*objects, *leaves) if not isinstance(x, _KEEPS_NOTHING)]
        continued = {group_of[id(x)][1] for x in objects if id(x) in group_of}
        reads_result = any(isinstance(x, Absent) for x in leaves)
        if known["returned"] is None or reads_result or len(continued) > 1:
            raise GraphError("calls that depend on each other")
        group = continued.pop() if continued else len(costs)
        groups.append(group)
        costs[group] += next(x.numel() for x in leaves if isinstance(x, Tensor))
        others = [object() for _ in pytree.tree_leaves(known["returned"])[1:]]
        group_of.update({id(x): (x, group) for x in (*objects, *others)})
        return Division((), known["returned"]).answer(None, others)

    try:
        _decoded(vae, answer, given, {})
    except Exception:  # also of code that reads what it has decoded
        return None
    # The dearest group first, each to the rank with the least to compute.
    rank_of, loads = dict[int, int](), [0] * num_ranks
    for group, cost in costs.most_common():
        rank_of[group] = loads.index(min(loads))
        loads[rank_of[group]] += cost
    owners = tuple(rank_of[group] for group in groups)
    return Division(owners, known["returned"]) if len(set(owners)) > 1 else None


def _returned(decoder: nn.Module, arguments: dict[str, Any]) -> Any:
    """Returns the outline of a call's output, as a `Division` has it, by a call on fake tensors.

    None if the decoder samples numbers, leaves something in its modules, or cannot be run so.
    """

    def run(model: nn.Module, mode: TrackedFakeMode) -> Any:
        fakes = fake_batch(copied(arguments), mode)
        before, numbers = _attributes(model), _Draws()
        with numbers:
            leaves, spec = pytree.tree_flatten(model(**fakes))
        is_changed = [*map(id, before)] != [*map(id, _attributes(model))]
        if numbers.any or is_changed or not isinstance(leaves[0], Tensor):
            return None
        return pytree.tree_unflatten([leaves[0].ndim, *(None for _ in leaves[1:])], spec)

    try:
        with torch.inference_mode(False):
            return without_values(decoder, run)
    except Exception:  # something that has no rule for fake tensors
        return None


def _attributes(model: nn.Module) -> list[Any]:
    """Returns attributes of all modules of a model, and the values in lists and dictionaries among them."""
    values = [x for module in model.modules() for x in vars(module).values()]
    inner = [x.values() if isinstance(x, dict) else x for x in values if isinstance(x, dict | list)]
    return [*values, *(x for each in inner for x in each)]


class _Draws(TorchDispatchMode):
    """Finds out whether anything samples random numbers."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.any |= draws(func, args, kwargs) or kwargs.get("generator") is not None
        return func(*args, **kwargs)


# ---------------------------------------------------------------------------------------- all ranks


@dataclass(frozen=True)
class _Job:
    """One call of an autoencoder's `decode`, as it is sent to all ranks."""

    name: str  # of the autoencoder, among the parts of the pipeline
    division: Division
    given: dict[str, Any]  # arguments of its `decode`
    settings: dict[str, Any]  # numbers and switches among its attributes, such as sizes of tiles
    dtypes: list[torch.dtype]  # of its parameters and buffers: pipelines decode in float32, perhaps


@dataclass
class Decoding:
    """Decodes the latents of one request.

    Attributes:
        part: Returns an autoencoder by its name among the parts of the pipeline, on any rank.
        compare: Refuses, on all ranks, one that other ranks have otherwise.
        guard: Context of work that all ranks do together: an error ends the request on all of them.
        known: Properties of decoders from earlier requests, by name; added to.
        others_wait: On rank 0, whether all ranks have sampled, so that others wait for latents to decode.
        num_calls: Calls of the decoder that each rank has computed; on rank 0, empty if that decoded alone.
        num_bytes: Bytes that were sent to rank 0.
        weight_bytes: Bytes of the autoencoder's weights, which each rank holds then.
    """

    world: World
    part: Callable[[str], nn.Module]
    compare: Callable[[str], None]
    guard: Callable[[], AbstractContextManager[None]]
    device: torch.device
    known: dict[str, dict[str, Any]]
    others_wait: bool = False
    num_calls: list[int] = field(default_factory=list)
    num_bytes: int = 0
    weight_bytes: int = 0

    def end(self) -> None:
        """Ends `follow` on other ranks, from rank 0, when the pipeline's call has ended or failed."""
        if self.others_wait:
            self.others_wait = False
            self.world.links.broadcast_object(lambda: None)

    def follow(self) -> None:
        """Decodes the jobs of rank 0, on other ranks, until it ends; raises DiffPipeError if any rank fails."""
        while (job := self.world.links.broadcast_object(lambda: None)) is not None:
            self._share(job, None)

    def divide_in(self, pipeline: PipelineCall) -> None:
        """Lets all ranks decode after a pipeline's loop, on rank 0: parts become shallow copies of themselves."""
        for name, part in pipeline.parts.items():
            is_vae = isinstance(part, nn.Module) and hasattr(type(part), "decode")
            if is_vae and name not in pipeline.needed and "decoder" in part._modules:
                dividing = pipeline.parts[name] = copy.copy(part)
                vars(dividing).update(vars(part))
                vars(dividing).setdefault("decode", partial(self._decode, name, dividing))

    def _decode(self, name: str, vae: Any, *args: Any, **kwargs: Any) -> Any:
        """Decodes on all ranks if the calls can be divided, else on rank 0; called there."""
        division, arguments = None, {"args": args, "kwargs": kwargs}
        if self.others_wait:  # else a callback decodes in the middle of the loop
            known = self.known.setdefault(name, {})
            division = divide(vae, arguments, self.world.num_ranks, known)
        if division is None:
            return type(vae).decode(vae, *args, **kwargs)
        settings = {n: x for n, x in vars(vae).items() if isinstance(x, _PLAIN)}
        dtypes = [x.dtype for x in _states(vae)]
        job = _Job(name, division, moved(arguments, "cpu"), settings, dtypes)
        self.others_wait = False  # unless all goes well
        self.world.links.broadcast_object(lambda: job)
        images = self._share(job, vae)
        self.others_wait = True
        return images

    def _share(self, job: _Job, vae: Any) -> Any:
        """Computes this rank's calls; returns the value of `decode`, on rank 0."""
        world, links = self.world, self.world.links
        with self.guard():
            read = partial(self.part, job.name) if vae is None else lambda: vae
            part = world.agree("reading the autoencoder", read)
            self.compare(job.name)
            arguments = moved(with_own_generators(job.given, self.device), self.device)
            outputs = world.agree("decoding", lambda: self._computed(job, part, arguments))
            shapes = world.links.gather_object([TensorShape.of(x) for x in outputs])
            if world.rank > 0:
                for each in outputs:
                    links.send(each, 0, "images")
                links.finish()
                return None
            before = self.num_calls or [0] * len(shapes)
            self.num_calls = [num + len(each) for num, each in zip(before, shapes, strict=True)]
            self.num_bytes += sum(shape.nbytes for each in shapes[1:] for shape in each)
            self.weight_bytes = sum(x.numel() * x.element_size() for x in _states(part))
            results = [deque(partial(lambda x: x, x) for x in outputs)]
            for rank, each in enumerate(shapes[1:], 1):
                results += [deque(links.receive(shape, rank, "images").wait for shape in each)]
            owners = iter(job.division.owners)
            answer = lambda _: job.division.answer(results[next(owners)].popleft()())
            return _decoded(part, answer, arguments, job.settings)

    def _computed(self, job: _Job, vae: Any, given: Any) -> list[Tensor]:
        """Returns the results of this rank's calls, in order."""
        results, owners = list[Tensor](), iter(job.division.owners)

        def answer(arguments: dict[str, Any]) -> Any:
            if next(owners) != self.world.rank:
                return job.division.answer()
            result, *others = pytree.tree_leaves(vae.decoder(**arguments))
            results.append(result)
            return job.division.answer(None, others)

        with torch.inference_mode(), settings_restored({job.name: vae}):
            for tensor, dtype in zip(_states(vae), job.dtypes, strict=True):
                tensor.data = tensor.data.to(dtype)
            _decoded(vae, answer, given, job.settings)
        return results


def _states(vae: nn.Module) -> list[Tensor]:
    return [*vae.parameters(), *vae.buffers()]
