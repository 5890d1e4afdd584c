"""Which rows of a loop's tensors belong to which sample.

Ranks that divide samples, or the two branches of guidance, give the denoiser some of its rows. Sizes do not say
which: a text may have as many tokens as there are rows, frames may lie in the batch, both branches of a sample may
follow each other. So it is observed, on rank 0, by runs that compute nothing of the denoiser (`call.py`):

    one sample more        what grows with the samples has rows of them, and nothing else has
    NaN in the last one    what becomes NaN is its rows; what still is NaN at the end the last step does not tell

Row r belongs to sample (r // inner) % num:

    inner 1        without 0, without 1, with 0, with 1       two prompts with guidance, as most pipelines have them
    inner 2        without 0, with 0, without 1, with 1
    inner frames   frames of 0, frames of 1
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_OF_PROMPTS = ("prompt", "prompts", "class_labels", "prompt_embeds")
_PER_PROMPT = ("num_images_per_prompt", "num_videos_per_prompt")


class NotApartError(Exception):
    """Why it cannot be told which rows belong to which sample."""


@dataclass(frozen=True)
class Samples:
    """The samples of a request, and where their rows are.

    Attributes:
        num: How many; 1 if they cannot be told apart.
        latents: `inner` of what the scheduler is given.
        inputs: `inner` of the latents that the denoiser is given.
        inner: Of its arguments by their places, 0 for those that all samples share. Others have rows of samples if
            they have as many as the latents.
        reason: Why samples cannot be drawn apart, or None.
        copies: Whether the loop copies the first prediction of a step before it asks for the second.
    """

    num: int
    latents: int = 1
    inputs: int = 1
    inner: Mapping[str, int] = field(default_factory=dict)
    reason: str | None = None
    copies: bool = False

    @property
    def unknown(self) -> str | None:
        """Why it is not known which arguments have rows of samples, or None."""
        return None if self.inner else self.reason

    def rows(self, size: int, inner: int, samples: Collection[int]) -> list[int]:
        """Returns the rows of some samples, in order."""
        return [row for row in range(size) if (row // inner) % self.num in samples]

    def cut(
        self, arguments: Mapping[str, Any], num_rows: int, keep: Callable[[int, int], list[int]]
    ) -> dict[str, Any]:
        """Returns arguments of the denoiser with the rows that `keep(size, inner)` gives."""
        taken: dict[int, Any] = {}  # what was one tensor stays one

        def cut(value: Any, place: str) -> Any:
            is_list, is_tensor = isinstance(value, list), isinstance(value, Tensor)
            size = len(value) if is_list or (is_tensor and value.ndim) else 0
            as_latents = self.inputs if is_tensor and size == num_rows else 0
            inner = self.inner.get(place, as_latents)
            if size and inner and size % self.num == 0:  # a row alone is of all samples
                if id(value) not in taken:
                    rows = keep(size, inner)
                    taken[id(value)] = [value[r] for r in rows] if is_list else value[rows]
                return taken[id(value)]
            if isinstance(value, dict):
                return {name: cut(each, f"{place}.{name}") for name, each in value.items()}
            if type(value) in (list, tuple):
                return type(value)(cut(each, f"{place}.{i}") for i, each in enumerate(value))
            return value

        return {name: cut(value, name) for name, value in arguments.items()}


def count_samples(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many prompts a pipeline is given, and how many samples it draws of each."""
    given = [arguments[name] for name in _OF_PROMPTS if arguments.get(name) is not None]
    prompts = len(given[0]) if given and isinstance(given[0], list | tuple | Tensor) else 1
    each = [arguments[name] for name in _PER_PROMPT if arguments.get(name)]
    return arguments.get("batch_size") or prompts, each[0] if each else 1


def with_more_samples(
    arguments: Mapping[str, Any], known: Collection[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields arguments of a pipeline for more samples, with their number: the first that can be drawn will do.

    Args:
        arguments: Of the request.
        known: Names of all that the pipeline takes.
    """
    prompts, each = count_samples(arguments)

    def of(num: int, changed: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        others = dict(arguments) | dict(changed)
        if isinstance(others.get("generator"), list):
            others["generator"] = others["generator"][0]
        if isinstance(start := others.get("latents"), Tensor):
            others["latents"] = torch.cat([start, start])[: len(start) // (prompts * each) * num]
        return num, others

    def longer(kinds: type | tuple[type, ...]) -> dict[str, Any]:
        lists = {
            n: [*v, v[0]]
            for n, v in arguments.items()
            if isinstance(v, list) and len(v) == prompts and isinstance(v[0], kinds)
        }
        if "batch_size" in arguments:
            lists["batch_size"] = prompts + 1
        return lists

    tensors = {
        name: torch.cat([v, v[:1]])
        for name, v in arguments.items()
        if isinstance(v, Tensor) and v.ndim and len(v) == prompts and name != "latents"
    }
    every = longer(object) | tensors
    numbers = {n for n, v in every.items() if isinstance(v, list) and isinstance(v[0], int | float)}
    # Two layers to skip are not those of two prompts, unless the pipeline wants three for three.
    if numbers := numbers.difference(_OF_PROMPTS):
        yield of((prompts + 1) * each, {n: v for n, v in every.items() if n not in numbers})
    yield of((prompts + 1) * each, every)
    plain = (str, int, float, list, tuple, dict, Tensor, torch.Generator, type(None))
    alone = {n: [v] * (prompts + 1) for n, v in arguments.items() if not isinstance(v, plain)}
    yield of((prompts + 1) * each, longer((str, int)))
    yield of((prompts + 1) * each, longer(object) | tensors | alone)  # an image for each
    for name in set(_PER_PROMPT) & set(known):  # where only one prompt is taken
        yield of(prompts * (each + 1), {name: each + 1})


def growing(one: Any, more: Any, num: int, num_more: int, place: str = "") -> dict[str, int]:
    """Compares what is given for some samples and for more; returns rows for each sample, by place; 0 if shared.

    Raises NotApartError if something has samples otherwise than in rows.
    """
    if isinstance(one, Tensor) and isinstance(more, Tensor):
        sizes, sizes_more = list(one.shape), list(more.shape)
    elif isinstance(one, list | tuple) and isinstance(more, list | tuple):
        sizes, sizes_more = [len(one)], [len(more)]
        if sizes == sizes_more:
            inside = [(each, more[i], f"{place}.{i}") for i, each in enumerate(one)]
            return _together(place, inside, num, num_more)
    elif isinstance(one, dict) and isinstance(more, dict) and one.keys() == more.keys():
        inside = [(v, more[n], f"{place}.{n}" if place else n) for n, v in one.items()]
        return _together(place, inside, num, num_more)
    elif type(one) is not type(more) or (isinstance(one, int | str) and one != more):
        raise NotApartError(f"{place} is another for {num_more} samples than for {num}")
    else:
        return {}
    if sizes == sizes_more:
        return {place: 0}
    if sizes[0] * num_more != sizes_more[0] * num or sizes[1:] != sizes_more[1:]:
        raise NotApartError(
            f"{place} has sizes {tuple(sizes)} for {num} samples and {tuple(sizes_more)} for {num_more}"
        )
    return {place: sizes[0] // num}


def _together(place: str, inside: list[Any], num: int, num_more: int) -> dict[str, int]:
    found = {place: 0} if place else {}
    for one, more, inner_place in inside:
        found |= growing(one, more, num, num_more, inner_place)
    return found


def inner_of(places: Mapping[str, int], name: str, inputs: int, arguments: Any) -> dict[str, int]:
    """Returns `inner` of all arguments of a call of the denoiser, given that of its latents.

    Args:
        places: Rows for each sample, from `growing`.
        name: Of the argument with the latents.
        inputs: `inner` of these.
        arguments: Of that call.

    Raises:
        NotApartError: An argument has other rows than the latents, in an order that is not known.
    """
    inner = {}
    for place, each in places.items():
        times, rest = divmod(each, places[name])
        if each <= 1 or (each == places[name]):
            inner[place] = min(each, 1) * (inputs if each == places[name] else 1)
            continue
        value = _at(arguments, place)
        rows = value.unflatten(0, (-1, times)) if isinstance(value, Tensor) and not rest else None
        if rows is None or not torch.equal(rows, rows[:, :1].expand_as(rows)):
            raise NotApartError(
                f"{place} has {each} rows for each sample, and {name} {places[name]}, in an order that is not known"
            )
        inner[place] = inputs * times
    return inner


def _at(value: Any, place: str) -> Any:
    for key in place.split("."):
        value = value[key if isinstance(value, dict) else int(key)]
    return value


def rows_with_nan(x: Tensor) -> set[int]:
    """Returns the rows in which something is NaN."""
    return set(x.isnan().flatten(1).any(1).nonzero().flatten().tolist())


def inner_of_rows(rows: Collection[int], size: int, num: int) -> int:
    """Returns the order of rows among which those of the last sample are known, or raises NotApartError."""
    for inner in range(1, size // num + 1):
        if Samples(num).rows(size, inner, {num - 1}) == sorted(rows):
            return inner
    raise NotApartError("the pipeline's own code brings samples together")
