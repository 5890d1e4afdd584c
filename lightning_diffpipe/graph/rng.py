"""Random numbers that depend on the model and the seed, never on how the work was cut.

Two rules make a split step sample the same numbers as an unsplit one. A whole segment (the forward pass of a
microbatch on a stage, a frozen encoder) starts from its own seed, and the state outside is put back. And a layer
that samples takes *one* number from the stream of the glue, whether it is executed or stubbed, to seed a private
stream: so the stream of the glue is the same on all stages, and recomputation (activation checkpointing restores
the outer state and calls again) repeats the private one.

Seeds are made from the run's seed and numbers that all ranks of a pipeline know (data-parallel rank, batch,
microbatch), so that filling, restarts and other cuts change nothing.

`torch.manual_seed` takes 0.15 ms as it visits every backend; generators are seeded directly instead.
"""

import contextlib
import functools
import hashlib
import itertools
import pickle
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_diffpipe.errors import GraphError

_SEED_BOUND = 2**63 - 1


class RandomState(NamedTuple):
    """States of the global generators; `host` (random, numpy) is None where no code samples from them."""

    cpu: Tensor
    cuda: Tensor | None
    host: tuple[Any, Any] | None


def _cuda_generator() -> torch.Generator | None:
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.default_generators[torch.cuda.current_device()]


def capture(host: bool) -> RandomState:
    """Reads the global generators: CPU, the current CUDA device, with `host` random and numpy."""
    cuda = _cuda_generator()
    return RandomState(
        torch.default_generator.get_state(),
        cuda.get_state() if cuda is not None else None,
        (random.getstate(), np.random.get_state()) if host else None,
    )


def restore(state: RandomState) -> None:
    """Writes the global generators."""
    torch.default_generator.set_state(state.cpu.to("cpu", copy=True))  # of a message it is a part
    cuda = _cuda_generator()
    if cuda is not None and state.cuda is not None:
        cuda.set_state(state.cuda.to("cpu", copy=True))
    if state.host is not None:
        random.setstate(state.host[0])
        np.random.set_state(state.host[1])


def moved(before: RandomState) -> RandomState | None:
    """Returns the states of those global generators now; None if they are what they were."""
    now = capture(before.host is not None)
    cuda = before.cuda is None or now.cuda is None or torch.equal(now.cuda, before.cuda)
    same = cuda and torch.equal(now.cpu, before.cpu)
    same = same and (now.host is None or pickle.dumps(now.host) == pickle.dumps(before.host))
    return None if same else now


def seed_all(seed: int, host: bool) -> None:
    """Seeds the global generators."""
    torch.default_generator.manual_seed(seed)
    cuda = _cuda_generator()
    if cuda is not None:
        cuda.manual_seed(seed)
    if host:
        seed_host(seed)


def seed_host(seed: int) -> None:
    """Seeds `random` and `numpy.random`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextlib.contextmanager
def preserved(host: bool) -> Iterator[None]:
    """Restores the global generators on exit."""
    state = capture(host)
    try:
        yield
    finally:
        restore(state)


def derived_seed(*parts: int | str) -> int:
    """Returns a 63-bit seed made from numbers and words, the same on every machine.

    Example:
        >>> derived_seed(1, 0, 5, 2) == derived_seed(1, 0, 5, 2) != derived_seed(1, 1, 5, 2)
        True
    """
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def microbatch_seed(seed: int, pipeline: int, batch_index: int, microbatch: int) -> int:
    """Returns the seed of a microbatch outside its layers; the same on all ranks of its pipeline."""
    return derived_seed(seed, pipeline, batch_index, microbatch)


@contextlib.contextmanager
def isolated_random_numbers(seed: int) -> Iterator[None]:
    """Seeds torch (CPU and this rank's GPU), `random` and numpy inside, and puts their states back afterwards."""
    with preserved(host=True):
        seed_all(seed, host=True)
        yield


def draw_seed() -> int:
    """Takes one number from the stream of the glue."""
    return int(torch.randint(_SEED_BOUND, (), device="cpu"))


@contextlib.contextmanager
def private_stream(host: bool) -> Iterator[None]:
    """Runs a layer with a stream of its own, seeded with one number from the stream of the glue."""
    seed = draw_seed()
    with preserved(host):
        seed_all(seed, host)
        yield


def require_only_seeds_drawn(state: RandomState, name: str, num_seeds: int) -> None:
    """Checks that a layer has taken so many numbers from the stream of the glue, as its stub does on other stages.

    Kernels of one's own sample past the dispatcher, perhaps on a GPU only, where no probe has seen them. `state` is
    what `capture(host=False)` gave before the layer ran.

    Raises:
        GraphError: It has sampled something else: the streams of its stage and of others would differ from now on.
    """
    if num_seeds:  # else it shall leave what it found, as most layers do
        before, state = state, capture(host=False)
        restore(before)
        for _ in range(num_seeds):
            draw_seed()
    if (other := moved(state)) is not None:
        raise GraphError(
            f"{name} draws random numbers on the {'GPU' if state.cpu.equal(other.cpu) else 'host'}, which it did "
            "not when it was probed: by a kernel of its own perhaps, as dropout of flash attention, or from some "
            "step on only; other stages would go on with other numbers. Sample one by an operator of torch in its "
            "forward from the first step on (torch.rand(())), and it gets a stream of its own; or sample nothing"
        )


def is_global(generator: torch.Generator) -> bool:
    """Returns whether a generator is torch's own for a device."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    # Operators are given another object for the same generator.
    return any(generator._cdata == default._cdata for default in (torch.default_generator, *cuda))


_DROPOUT_ARGUMENTS = ("dropout_p", "p", "dropout")
_TRAINING_ARGUMENTS = ("train", "training")


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether an operator takes numbers from a global generator.

    The tag of the operator alone says too much: attention without dropout and dropout outside training are tagged,
    but sample nothing.
    """
    is_tagged = torch.Tag.nondeterministic_seeded in func.tags
    is_torchs = func.namespace in ("aten", "prims")
    if (is_torchs and not is_tagged) or "backward" in func.__name__:
        return False
    schema = func._schema.arguments
    values = {a.name: kwargs.get(a.name, a.default_value) for a in schema}
    values.update({a.name: value for a, value in zip(schema, args, strict=False)})
    generator = values.get("generator")
    if generator is not None and not is_global(generator):
        return False
    if any(values.get(name) is False for name in _TRAINING_ARGUMENTS):
        return False
    if not is_tagged:  # nobody tags flash attention
        return any(values.get(argument) for argument in ("dropout_p", "dropout"))
    name = func.overloadpacket.__name__
    if "dropout" in name or "attention" in name or "rnn" in name:
        return not any(values.get(argument) in (0, 0.0) for argument in _DROPOUT_ARGUMENTS)
    return True


_NUMBERS = (
    (random, ("random", "uniform", "randint", "randrange", "gauss", "normalvariate")),
    (np.random, ("random", "random_sample", "rand", "randn", "randint", "uniform", "normal")),
)
"""By module: functions that sample numbers, which can be compared."""
# Later ones are as they fall: a step may sample until it likes what it gets.
_NUM_SAMPLED, _MOST_CALLS = 64, 1000
_MOST_NUMBERS = 4096  # of more nobody makes a coin


class Extremes(TorchDispatchMode):
    """Lets numbers that are sampled inside be the smallest or the largest of 64, so that coins fall on either side.

    Args:
        sides: Whether they are large, call by call, in turns.

    Attributes:
        sees_all: On exit: of Python's and numpy's generators nothing was sampled but by functions of `_NUMBERS`.
    """

    def __init__(self, sides: Sequence[bool]) -> None:
        super().__init__()
        self.sees_all = False
        self._sides = itertools.islice(itertools.cycle(sides), _MOST_CALLS)
        self._functions = [(m, n, getattr(m, n)) for m, names in _NUMBERS for n in names]

    def __enter__(self) -> Self:
        for module, name, function in self._functions:
            setattr(module, name, functools.partial(self._sampled_on_host, function))
        self._before = host_state()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.sees_all = self._before == host_state()
        for function in self._functions:
            setattr(*function)

    def _sampled_on_host(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if (is_large := next(self._sides, None)) is None:
            return function(*args, **kwargs)
        with preserved(host=True):
            sampled = [function(*args, **kwargs) for _ in range(_NUM_SAMPLED)]
        if isinstance(sampled[0], np.ndarray):
            return (np.max if is_large else np.min)(sampled, axis=0)
        return max(sampled) if is_large else min(sampled)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sample = functools.partial(func, *args, **(kwargs or {}))
        out = sample()
        is_few = isinstance(out, Tensor) and out.numel() <= _MOST_NUMBERS
        if not (is_few and draws(func, args, kwargs or {})):
            return out
        if (is_large := next(self._sides, None)) is None:
            return out
        sampled = torch.stack([sample().clone() for _ in range(_NUM_SAMPLED)])
        return out.copy_(sampled.amax(0) if is_large else sampled.amin(0))


def host_state() -> tuple[Any, ...]:
    """Returns a comparable image of the states of `random` and `numpy.random`."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), *state[2:]
