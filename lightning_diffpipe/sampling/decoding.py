"""Decoding on all ranks: each computes some of the calls of an autoencoder's decoder.

Problem: ranks denoise together, and then rank 0 decodes alone, with the time and memory of one device. Of large
images and videos that is much. Idea: where tiles or slices are turned on, diffusers decodes these one by one, and
calls the decoder once for each, or for each frame of a tile. Its own code is run with a decoder that answers:

    rank 0      looks      no call is computed: how many are there, and which continue an earlier one?    Division
    all ranks   compute    their own calls; others give an `Absent`, and so does everything made of one
    rank 0      replays    results of all ranks, in the order of calls                                    images

So no autoencoder's tiles or seams are written here, and images are those of one rank with the same tiles, bit for
bit. A call continues an earlier one if it is given what that left: a list of features that both are given, or a
cache that the one returned. Calls that belong together are of one rank. Decoders that draw noise, or remember
something in their modules, are left to rank 0. Nothing is sent before all ranks have computed, so that one that
fails keeps none waiting.

Source: `enable_tiling` and `enable_slicing` of diffusers' autoencoders.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.comm.links import Incoming
from lightning_diffpipe.comm.packing import TensorShape
from lightning_diffpipe.errors import ConfigurationError, GraphError
from lightning_diffpipe.graph.fakes import TrackedFakeMode, fake_batch, without_values
from lightning_diffpipe.graph.rng import draws
from lightning_diffpipe.sampling.loop import restored, settings_restored, snapshot
from lightning_diffpipe.sampling.record import copied, moved
from lightning_diffpipe.sampling.world import World

DECODING = ("auto", "rank_0")
"""Who decodes: all ranks what can be divided, or rank 0 in any case."""

Answer = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class Absent(Tensor):
    """Stands for a result that is not here, and for all that is computed from it; it has one entry on each axis."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes with the one entry; what that has not the size for gives the same again."""
        try:
            return super().__torch_function__(func, types, args, kwargs or {})
        except (RuntimeError, ValueError, IndexError):
            given = pytree.tree_leaves((args, kwargs))
            return next(x for x in given if isinstance(x, cls))


@dataclass(frozen=True)
class _NumAxes:
    """In place of a tensor that a decoder returns."""

    num: int

    def absent(self, device: torch.device) -> Tensor:
        return torch.zeros((1,) * self.num, device=device).as_subclass(Absent)


@dataclass(frozen=True)
class Division:
    """Who computes which call of a decoder.

    Attributes:
        owners: A rank for each call, in order.
        returned: What the decoder returns, with `_NumAxes` in place of tensors; the first leaf is the result.
    """

    owners: tuple[int, ...]
    returned: Any

    def answer(self, device: torch.device, result: Tensor | None = None) -> Any:
        """Returns what a call returns that was computed elsewhere, of which nothing but the result is known."""
        leaves, spec = pytree.tree_flatten(self.returned)
        answers = [x.absent(device) if isinstance(x, _NumAxes) else x for x in leaves]
        return pytree.tree_unflatten([answers[0] if result is None else result, *answers[1:]], spec)


class _UndividableError(Exception):
    """A decoder's calls cannot be made on several ranks."""


class _Decoder:
    """Stands for a decoder whose calls are answered."""

    def __init__(self, real: nn.Module, answer: Answer) -> None:
        self._real, self._answer = real, answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(args, kwargs)


def _decoded(
    vae: nn.Module, answer: Answer, settings: Mapping[str, Any], given: Mapping[str, Any]
) -> Any:
    """Runs the `decode` of an autoencoder, with attributes of another one and a decoder that is answered."""
    twin: Any = copy.copy(vae)
    own = vars(twin)
    own.update(vars(vae) | settings, decoder=_Decoder(vae.decoder, answer))
    own.pop("decode", None)
    return twin.decode(*given["args"], **given["kwargs"])


# ------------------------------------------------------------------------------------------ looking


def divide(
    vae: nn.Module, given: Mapping[str, Any], settings: Mapping[str, Any], num_ranks: int,
    looked: dict[str, Any],
) -> Division | None:  # fmt: skip
    """Divides the calls that an autoencoder makes of its decoder.

    Args:
        vae: The autoencoder.
        given: Arguments of its `decode`: `args` and `kwargs`.
        settings: Attributes that it has for this call.
        num_ranks: Ranks that can compute.
        looked: What is known of the decoder, which is looked at once.

    Returns:
        The division, as even as the sizes of what is decoded allow; None if one rank has to compute all.
    """
    groups, costs = list[int](), Counter[int]()
    left: dict[int, tuple[Any, int]] = {}  # by identity, which no other object has while it is kept

    def answer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not looked:
            looked["returned"] = _returned(vae.decoder, args, kwargs)
        values = [*args, *kwargs.values()]
        shared = [x for value in values for x in _changeable(value)]
        absent = [x for x in pytree.tree_leaves(values) if isinstance(x, Absent)]
        if looked["returned"] is None or any(id(x) not in left for x in absent):
            raise _UndividableError
        of = {left[id(x)][1] for x in (*shared, *absent) if id(x) in left}
        if len(of) > 1:
            raise _UndividableError
        group = of.pop() if of else len(costs)
        out = Division((), looked["returned"]).answer(torch.device("cpu"))
        groups.append(group)
        costs[group] += next(x.numel() for x in values if isinstance(x, Tensor))
        left.update({id(x): (x, group) for x in (*shared, *_kept(out))})
        return out

    try:
        _decoded(vae, answer, settings, given)
    except _UndividableError:
        return None
    ranks, loads = {}, [0] * num_ranks
    for group, cost in costs.most_common():
        ranks[group] = loads.index(min(loads))
        loads[ranks[group]] += cost
    if len(set(ranks.values())) < 2:
        return None
    return Division(tuple(ranks[group] for group in groups), looked["returned"])


def _changeable(value: Any) -> Iterator[Any]:
    """Returns what of an argument a call may leave something in."""
    if isinstance(value, tuple):
        yield from itertools.chain.from_iterable(map(_changeable, value))
    elif not isinstance(
        value, None | bool | int | float | str | torch.dtype | torch.device | Tensor
    ):
        yield value


def _kept(returned: Any) -> list[Any]:
    """Returns what a decoder returns beside its result."""
    return [x for x in pytree.tree_leaves(returned)[1:] if isinstance(x, Tensor)]


def _returned(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a call returns, on fake tensors, with `_NumAxes` in place of them.

    None if the decoder draws numbers, leaves something in its modules or cannot be run so.
    """

    def run(model: nn.Module, mode: TrackedFakeMode) -> Any:
        given = fake_batch(copied((args, kwargs)), mode)
        before, numbers = _attributes(model), _Draws()
        with numbers:
            out = model(*given[0], **given[1])
        after = _attributes(model)
        leaves = pytree.tree_leaves(out)
        changed = before.keys() != after.keys() or any(after[k] is not before[k] for k in before)
        if numbers.any or changed or not (leaves and isinstance(leaves[0], Tensor)):
            return None
        return pytree.tree_map_only(Tensor, lambda x: _NumAxes(x.ndim), out)

    try:
        with torch.inference_mode(False):
            return without_values(decoder, run)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # something that has no rule for fake tensors
        return None


def _attributes(model: nn.Module) -> dict[tuple[Any, ...], Any]:
    """Returns attributes of all modules of a model, and what is in lists and dictionaries among them."""
    found: dict[tuple[Any, ...], Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            found[name, key] = value
            pairs: Any = enumerate(value) if isinstance(value, list) else ()
            pairs = value.items() if isinstance(value, dict) else pairs
            found |= {(name, key, each): inner for each, inner in pairs}
    return found


class _Draws(TorchDispatchMode):
    """Notes whether anything draws random numbers."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.any |= draws(func, args, kwargs) or kwargs.get("generator") is not None
        return func(*args, **kwargs)


# ---------------------------------------------------------------------------------------- all ranks


@dataclass(frozen=True)
class _Job:
    """What all ranks need to know to decode once.

    Attributes:
        name: Of the autoencoder among the parts of the pipeline.
        given: Arguments of its `decode`.
        settings: Numbers and switches among its attributes on rank 0, such as sizes of tiles.
        dtypes: Of its parameters and buffers there: pipelines decode in float32, perhaps.
    """

    name: str
    division: Division
    given: dict[str, Any]
    settings: dict[str, Any]
    dtypes: list[torch.dtype]


class Decoding:
    """Decodes what one request has drawn.

    Args:
        world: All ranks.
        part: Returns an autoencoder by its name among the parts of the pipeline, on any rank.
        compare: Refuses, on all ranks, one that other ranks have otherwise.
        break_off: Told of an error after which ranks do not go on together.
        device: Where this rank computes.
        looked: What is known of decoders from earlier requests, by name; added to.

    Attributes:
        num_calls: Calls of the decoder that each rank has computed; on rank 0, empty if that decoded alone.
        num_bytes: Bytes that were sent to rank 0.
        weight_bytes: Bytes of the autoencoder's weights, which each rank holds then.
    """

    def __init__(
        self,
        world: World,
        part: Callable[[str], nn.Module],
        compare: Callable[[str], None],
        break_off: Callable[[BaseException], None],
        device: torch.device,
        looked: dict[str, dict[str, Any]],
    ) -> None:
        self._world, self._part, self._compare = world, part, compare
        self._break_off, self._device, self._looked = break_off, device, looked
        self._others_wait = False
        self.num_calls: list[int] = []
        self.num_bytes = self.weight_bytes = 0

    def begin(self) -> None:
        """Goes on, on rank 0, after all ranks have sampled."""
        self._others_wait = self._world.num_ranks > 1

    def end(self) -> None:
        """Lets other ranks go, on rank 0, when the pipeline's call has ended, by an error perhaps."""
        if self._others_wait:
            self._others_wait = False
            self._world.links.broadcast_object(lambda: None)

    def follow(self) -> None:
        """Decodes what rank 0 says, on other ranks, until it has ended.

        Raises:
            DiffPipeError: A rank failed; on all ranks.
        """
        while (job := self._world.links.broadcast_object(lambda: None)) is not None:
            self._share(job, None)

    def divided(self, parts: Mapping[str, Any], but: Sequence[str]) -> dict[str, Any]:
        """Returns parts of a pipeline with shallow copies of the autoencoders, which all ranks decode with.

        Args:
            parts: By name.
            but: Those that the loop calls, on every rank for itself.
        """
        found = dict(parts)
        for name, part in parts.items():
            own = getattr(part, "__dict__", {})
            is_vae = isinstance(part, nn.Module) and hasattr(part, "decode")
            if is_vae and name not in but and "decoder" in part._modules and "decode" not in own:
                found[name] = copy.copy(part)
                vars(found[name]).update(own, decode=partial(self._decode, name, found[name]))
        return found

    def _decode(self, name: str, vae: Any, *args: Any, **kwargs: Any) -> Any:
        """Decodes on all ranks what can be divided, and else here; on rank 0."""
        settings = {
            n: x for n, x in vars(vae).items() if isinstance(x, None | bool | int | float | str)
        }
        given = {"args": args, "kwargs": kwargs}
        looked = self._looked.setdefault(name, {})
        division = None
        if self._others_wait:  # else a callback decodes in the middle of the loop
            division = divide(vae, given, settings, self._world.num_ranks, looked)
        if division is None:
            return type(vae).decode(vae, *args, **kwargs)
        dtypes = [x.dtype for x in _states(vae)]
        job = _Job(name, division, moved(snapshot(given), "cpu"), settings, dtypes)
        self._others_wait = False  # unless all goes well
        self._world.links.broadcast_object(lambda: job)
        found = self._share(job, vae)
        self._others_wait = True
        return found

    def _share(self, job: _Job, vae: Any) -> Any:
        """Computes this rank's calls; returns what `decode` returns, on rank 0."""
        world, links = self._world, self._world.links
        try:
            if vae is None:
                vae = world.agree("reading the autoencoder", lambda: self._part(job.name))
            else:
                world.agree("reading the autoencoder", lambda: None)
            self._compare(job.name)
            own = world.agree("decoding", lambda: self._computed(job, vae))
            shapes = world.gather([TensorShape.of(x) for x in own])
            if world.rank > 0:
                for each in own:
                    links.send(each, 0, "images")
                links.finish()
                return None
            self.num_calls = [len(each) for each in shapes]
            self.num_bytes += sum(shape.nbytes for each in shapes[1:] for shape in each)
            self.weight_bytes = sum(x.numel() * x.element_size() for x in _states(vae))
            incoming: dict[int, deque[Incoming]] = defaultdict(deque)
            for rank, each in enumerate(shapes[1:], 1):
                incoming[rank] += (links.receive(shape, rank, "images") for shape in each)
            return self._replayed(job, vae, deque(own), incoming)
        except (ConfigurationError, GraphError) as error:
            error.is_of_all_ranks = True
            raise
        except BaseException as error:
            self._break_off(error)
            raise

    def _computed(self, job: _Job, vae: nn.Module) -> list[Tensor]:
        """Returns the results of this rank's calls, in order."""
        results, owners = list[Tensor](), iter(job.division.owners)

        def answer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            absent = job.division.answer(self._device)
            if next(owners) != self._world.rank:
                return absent
            leaves, spec = pytree.tree_flatten(vae.decoder(*args, **kwargs))
            results.append(leaves[0])
            return pytree.tree_unflatten([pytree.tree_leaves(absent)[0], *leaves[1:]], spec)

        given = moved(restored(job.given, self._device), self._device)
        with torch.inference_mode(), settings_restored({job.name: vae}):
            for tensor, dtype in zip(_states(vae), job.dtypes, strict=True):
                tensor.data = tensor.data.to(dtype)
            _decoded(vae, answer, job.settings, given)
        return results

    def _replayed(
        self, job: _Job, vae: nn.Module, own: deque[Tensor], incoming: dict[int, deque[Incoming]]
    ) -> Any:
        """Returns what `decode` returns, with the results of all ranks."""
        owners = iter(job.division.owners)

        def answer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            rank = next(owners)
            result = own.popleft() if rank == 0 else incoming[rank].popleft().wait()
            return job.division.answer(self._device, result)

        given = moved(restored(job.given, self._device), self._device)
        return _decoded(vae, answer, job.settings, given)


def _states(vae: nn.Module) -> list[Tensor]:
    return [*vae.parameters(), *vae.buffers()]
