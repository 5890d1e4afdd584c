"""What takes the place of a pipeline's parts while its `__call__` runs for something else than an image.

A `StandIn` has some members of its own and passes on everything else, so that configs and types are those of the
real part. The functions below make those of training; `trial.py` makes further ones.
"""

import contextlib
import copy
import inspect
import itertools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from transformers import BatchEncoding

from lightning_diffpipe.errors import ConfigurationError

Draw = Callable[[Sequence[int]], Tensor]
"""Gives the noise of a shape."""


class Captured(Exception):
    """Ends a call once it has given what was wanted."""


def checked_arguments(pipeline: Any, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Runs a pipeline's call until it has checked its arguments, which needs no weights.

    Returns:
        What was checked, by name; None where the call checks nothing, or fails before it does, as for lack of a
        part.

    Raises:
        ConfigurationError: What the check says.
    """
    found: dict[str, Any] = {}
    twin = copy.copy(pipeline)

    def check(*values: Any, **named: Any) -> None:
        try:
            pipeline.check_inputs(*values, **named)
        except ValueError as error:
            raise ConfigurationError(f"{type(pipeline).__name__}: {error}") from error
        bound = inspect.signature(pipeline.check_inputs).bind(*values, **named)
        found.update(bound.arguments)
        raise Captured

    twin.check_inputs = check
    try:
        twin(**arguments)
    except ConfigurationError:
        raise
    except Captured:
        return found
    except Exception:  # without weights a call may fail in any way; with them it will say why
        return None
    return None


class StandIn:
    """A part some members of which are others.

    Args:
        real: The part.
        members: Attributes and methods in the place of its own; `call` is what calls of it do.
    """

    def __init__(self, real: Any, **members: Any) -> None:
        vars(self).update(members, _real=real)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not yet made, as in a deep copy
            raise AttributeError(name)
        return getattr(self._real, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Calls the part."""
        return vars(self).get("call", self._real)(*args, **options)


def torch_of_call(draw: Draw) -> StandIn:
    """Returns the module `torch` as methods of a pipeline see it: noise is ours, and so are times of samples."""

    def randn_tensor(shape: Sequence[int], *_: Any, dtype: Any = None, **__: Any) -> Tensor:
        return draw(shape).to(dtype=dtype)

    def randn(*size: Any, dtype: Any = None, **_: Any) -> Tensor:
        return randn_tensor(size[0] if isinstance(size[0], tuple | list) else size, dtype=dtype)

    def tensor(data: Any, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
        times = data[0] if isinstance(data, list) and data else None
        # Of `[t]` and `[t] * n` the times of the samples, where `t` is them all.
        if isinstance(times, Tensor) and times.ndim and all(value is times for value in data):
            return times.to(device=device, dtype=dtype)
        if isinstance(data, Tensor):  # class numbers, which a list would read from the device
            return data.detach().clone().to(device=device, dtype=dtype)
        return torch.tensor(data, dtype=dtype, device=device, **options)

    return StandIn(torch, randn=randn, randn_tensor=randn_tensor, tensor=tensor)


def one_timestep(
    real: Any, timesteps: Tensor, on_step: Callable[[Tensor, Tensor], Tensor]
) -> StandIn:
    """Returns a scheduler with one step at given times, which scales and computes nothing.

    Args:
        real: The pipeline's scheduler.
        timesteps: One for each sample, `(B,)`.
        on_step: Gets prediction and sample, and returns what goes on as latents.
    """

    # Pipelines look which arguments these methods take.
    def set_timesteps(
        num_inference_steps: Any = None,
        device: Any = None,
        timesteps: Any = None,
        sigmas: Any = None,
        mu: Any = None,
        **others: Any,
    ) -> None:
        pass

    def step(
        model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **options: Any
    ) -> Any:
        after = on_step(model_output, sample)
        if options.get("return_dict") is False:
            return (after, after)
        return types.SimpleNamespace(prev_sample=after, pred_original_sample=after)

    return StandIn(
        real,
        order=1,
        init_noise_sigma=1.0,
        # Only the scheduler knows it; what computes with it becomes NaN, and not wrong by a little.
        sigmas=(math.nan, math.nan),
        timesteps=timesteps[None],
        set_timesteps=set_timesteps,
        set_begin_index=lambda begin_index=0: None,
        scale_model_input=lambda sample, timestep=None: sample,
        step=step,
    )


class PaddingTokenizer(StandIn):
    """A tokenizer whose tensors have one length, and which makes no search for words that were cut off.

    Pipelines tokenize twice, the second time without a limit, and compare ids by value to warn of what was
    cut off. The second answer is shorter here than the first, so that there is nothing to compare.

    Args:
        real: The tokenizer.
        note: Is given it, the texts, its answer and the most tokens that it reads.
    """

    def __init__(self, real: Any, note: Callable[..., None]) -> None:
        super().__init__(real, _text=None, _answer=None, _note=note)

    def __call__(self, text: Any = None, *args: Any, **options: Any) -> Any:
        """Tokenizes."""
        if not options.get("truncation") and options.get("padding") == "longest":
            if text == self._text:
                return BatchEncoding({name: ids[:, :1] for name, ids in self._answer.items()})
        elif options.get("truncation") and options.get("padding") in (True, "longest"):
            options["padding"] = "max_length"
        self._text, self._answer = text, self._real(text, *args, **options)
        if options.get("truncation"):
            length = options.get("max_length") or self._real.model_max_length
            texts = [text] if isinstance(text, str) else text
            self._note(self._real, texts, self._answer, length)
        return self._answer


def in_own_precision(vae: Any, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Returns a context without autocast for an autoencoder that asks for it (`force_upcast` in its config)."""
    known = torch.amp.is_autocast_available(device.type)  # not so of models on paper
    if (
        known
        and getattr(vae.config, "force_upcast", False)
        and torch.is_autocast_enabled(device.type)
    ):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def decoding_in_own_precision(vae: Any) -> contextlib.AbstractContextManager[Any]:
    """Has an autoencoder decode latents of any type inside, which a pipeline gives it in that of its denoiser."""
    decode = vae.decode

    def decode_in_type(latents: Tensor, *args: Any, **options: Any) -> Any:
        with in_own_precision(vae, latents.device):
            return decode(latents.to(vae.dtype), *args, **options)

    return mock.patch.object(vae, "decode", decode_in_type)


def of_type(real: Any, dtype: torch.dtype) -> Any:
    """Returns a text encoder whose answers have a type; itself where it has that."""
    if getattr(real, "dtype", dtype) == dtype:
        return real

    def call(*args: Any, **options: Any) -> Any:
        return in_type(real(*args, **options), dtype)

    return StandIn(real, call=call, dtype=dtype)


def replaying(real: Any) -> Callable[[], StandIn]:
    """Returns what makes stand-ins of an encoder: the first computes, later ones give its answers in turn."""
    answers: list[Any] = []

    def make() -> StandIn:
        number = itertools.count()

        def call(*args: Any, **options: Any) -> Any:
            if (index := next(number)) == len(answers):
                answers.append(real(*args, **options))
            return answers[index]

        return StandIn(real, call=call)

    return make


def in_type(answer: Any, dtype: torch.dtype) -> Any:
    """Gives floating tensors a type, wherever they stand in an answer."""
    return pytree.tree_map_only(
        Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, answer
    )


def no_decoder(real: Any, give: Callable[[Tensor], None]) -> StandIn:
    """Returns an autoencoder that gives away what it shall decode, and ends the call; it encodes by itself."""

    def decode(latents: Tensor, *_: Any, **__: Any) -> Any:
        give(latents)
        raise Captured

    def encode(pixels: Tensor, *args: Any, **options: Any) -> Any:
        with in_own_precision(real, pixels.device):
            return real.encode(pixels.to(real.dtype), *args, **options)

    # In float32, so that the pipeline does not round what it unpacks.
    return StandIn(real, decode=decode, encode=encode, dtype=torch.float32)


def dropping_encoder(real: Any, shown: Tensor) -> StandIn:
    """Returns an autoencoder whose encodings of some samples are zeros, as a pipeline draws without an image.

    Args:
        real: Encodes; of what it returns only the mode of the posterior is left.
        shown: 1 for the samples whose encodings stay, 0 for the others, `(B,)`.
    """

    def encode(pixels: Tensor, *args: Any, **options: Any) -> Any:
        mode = real.encode(pixels, *args, **options).latent_dist.mode()
        latents = mode * shown.to(mode).view(-1, *[1] * (mode.ndim - 1))
        return types.SimpleNamespace(latent_dist=types.SimpleNamespace(mode=lambda: latents))

    return StandIn(real, encode=encode)


@dataclass(frozen=True)
class Place:
    """Where a denoiser is given a number that belongs to a sample, such as the height of its image.

    Attributes:
        path: Where it stands in `(args, options)` of the denoiser, as `given` has it: of lists before it the number
            of entries does not count, which may be that of the samples.
        argument: Of the pipeline's call, whose value it is.
        entry: Which number of that value.
        column: Along the last axis of the tensor; None if it has this number only, maybe for each token.
        factor: The denoiser is given `factor * number + offset`.
        offset: See `factor`.
    """

    path: pytree.KeyPath
    argument: str
    entry: int = 0
    column: int | None = None
    factor: float = 1.0
    offset: float = 0.0


def given(args: Sequence[Any], options: Mapping[str, Any]) -> dict[pytree.KeyPath, Any]:
    """Returns what a denoiser is given, by where it stands in tuples, lists and mappings.

    Example:
        >>> for path, value in given((["a", "b"], "c"), {"sizes": {"height": 64}}).items():
        ...     print(pytree.keystr(path), value)
        [0][0][0] a
        [0][0][1] b
        [0][1] c
        [1]['sizes']['height'] 64
    """
    return dict(_flat((args, options))[0])


def _flat(tree: Any) -> tuple[list[tuple[pytree.KeyPath, Any]], pytree.TreeSpec]:
    # Outputs of transformers and diffusers, which are mappings, too, have no paths.
    return pytree.tree_flatten_with_path(tree, lambda node: type(node) not in (tuple, list, dict))


def per_sample(real: Any, places: Sequence[Place], values: Mapping[str, Tensor]) -> Any:
    """Returns a denoiser that is given numbers for each sample where the pipeline gives it those of one.

    Args:
        real: Computes.
        places: Where they are given.
        values: The numbers, `(B, entries)`, by argument; those of the pipeline stay where there are none.
    """
    known = [place for place in places if place.argument in values]

    def call(*args: Any, **options: Any) -> Any:
        found, structure = _flat((args, options))
        leaves = dict(found)
        for place in known:
            # Pipelines that compare the time with a boundary have it on the host.
            common = leaves[place.path].to(values[place.argument].device)
            numbers = place.factor * values[place.argument][:, place.entry] + place.offset
            leaves[place.path] = own = numbers.to(common)
            if place.column is None:
                leaves[place.path] = own.view(-1, *[1] * (common.ndim - 1)).expand(
                    -1, *common.shape[1:]
                )
            else:
                columns = list(common.unbind(-1))
                columns[place.column] = own
                leaves[place.path] = torch.stack(columns, -1)
        args, options = pytree.tree_unflatten(leaves.values(), structure)
        return real(*args, **options)

    return StandIn(real, call=call) if known else real
