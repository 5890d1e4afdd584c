"""PipeFusion on ranks that wait for their whole device in every layer, where messages under way occupy it.

Running out of memory: how it is told from other errors, and what is let go of.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_diffpipe.errors import ConfigurationError, LayoutError
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.methods import Chooser, MethodOptions
from lightning_diffpipe.sampling.pipefusion import PipeFusion
from lightning_diffpipe.sampling.rehearsal import failing, needing_memory
from lightning_diffpipe.sampling.world import World
from tests.sampling.models import build
from tests.sampling.ranks_in_threads import sample_together


class Board:
    """Which messages were sent, and which receives have begun, on all ranks."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.done: dict[str, set[Any]] = {"sent": set(), "begun": set()}

    def note(self, what: str, message: Any) -> None:
        with self.changed:
            self.done[what].add(message)
            self.changed.notify_all()

    def wait_for(self, messages: set[Any]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: all(messages <= s for s in self.done.values()), 15)


class Receive:
    """A receive that begins after those posted before it on its edge."""

    def __init__(self, device: Device, incoming: Any, source: int) -> None:
        self.device, self.incoming, self.source, self.has_begun = device, incoming, source, False

    def begin(self) -> None:
        while not self.has_begun:
            self.device.begin_next(self.source)

    def wait(self) -> Any:
        self.begin()
        return self.incoming.wait()


class Device:
    """Links of one rank whose messages occupy its device until both ends have begun, as NCCL's do.

    Everything between two ranks is one queue, whatever its kind.
    """

    occupies_device = True

    def __init__(self, links: Any, board: Board) -> None:
        self.links, self.board = links, board
        self.under_way: set[Any] = set()
        self.numbers: Counter[Any] = Counter()
        self.posted: dict[int, deque[Receive]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.links, name)

    def occupy(self, what: str, source: int, to: int) -> None:
        message = source, to, self.numbers[source, to]
        self.numbers[source, to] += 1
        self.under_way.add(message)
        self.board.note(what, message)

    def synchronize(self) -> None:
        self.board.wait_for(self.under_way)
        self.under_way.clear()

    def send(self, tensor: Any, to: int, kind: Any) -> None:
        self.occupy("sent", self.rank, to)
        self.links.send(tensor, to, kind)

    def receive(self, shape: Any, source: int, kind: Any) -> Receive:
        receive = Receive(self, self.links.receive(shape, source, kind), source)
        self.posted.setdefault(source, deque()).append(receive)
        return receive

    def begin_next(self, source: int) -> None:
        self.occupy("begun", source, self.rank)
        self.posted[source].popleft().has_begun = True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "num_patches", "warmup_steps"),
    [(2, 4, 1), (2, 4, "auto"), (2, 2, 0), (3, 4, 1), (3, 2, 0), (4, 2, 1)],
)
def test_layers_may_wait_for_the_whole_device(num_ranks, num_patches, warmup_steps):
    """History: the first rank received latents before it had computed what they follow from, and in its first layer
    waited for them. Begun as late as they are needed, they would stop the last rank, and then all before it.
    """
    board = Board()

    def waiting(model, links):
        device = Device(links, board)
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_pre_hook(lambda *_: device.synchronize())
        return PipeFusion(
            model, device, num_patches=num_patches, warmup_steps=warmup_steps, verify=False
        )

    def plain(model, links):
        return PipeFusion(
            model, links, num_patches=num_patches, warmup_steps=warmup_steps, verify=False
        )

    tiny = build("sd3")
    found, _ = sample_together("sd3", tiny, num_ranks, waiting)
    expected, _ = sample_together("sd3", tiny, num_ranks, plain)
    assert all((x == y).all() for x, y in zip(found, expected, strict=True))


CPU = torch.device("cpu")
REFERENCES: list[weakref.ref] = []


def compute(error):
    """A step that fails while it holds an activation."""
    activation = torch.zeros(3)
    REFERENCES.append(weakref.ref(activation))
    raise error


def test_an_error_that_is_kept_holds_no_activations():
    """History: it held all that were alive where memory ran out, so that what was tried next had that much less."""
    with (
        pytest.raises(
            ConfigurationError, match="more memory here than there is: CUDA out of memory; "
        ) as kept,
        needing_memory("here", "use less"),
    ):
        compute(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"))
    assert REFERENCES.pop()() is None
    assert isinstance(kept.value.__cause__, torch.OutOfMemoryError)


def test_methods_that_were_refused_hold_no_activations():
    """History: `method="auto"` kept those of each method that it had tried, as long as the Predictor lived."""
    predictor = Predictor(None, MethodOptions("auto"), World.alone(CPU), CPU)
    predictor._chooser = chooser = Chooser(None, Link(), CPU, 2, None, predictor.options)

    def fail(*arguments):
        with failing("in 2 patches"):
            compute(RuntimeError("64 tokens expected, got 32"))

    def worker(sample):
        return SimpleNamespace(
            options=MethodOptions("pipefusion"), load=lambda call: {}, sample=sample,
            gather=lambda call, mine: mine, mesh_links=SimpleNamespace(abandon=lambda: None),
        )  # fmt: skip

    workers = iter([worker(fail), worker(lambda *arguments: "latents")])
    predictor._worker_for = lambda packed: next(workers)
    call = SimpleNamespace(timesteps=[], close=lambda: None)
    assert predictor._sampled(SimpleNamespace(unpacked=lambda device: call))[1] == "latents"
    [(_, error)] = chooser._refused
    assert isinstance(error, LayoutError)
    assert REFERENCES.pop()() is None
    assert error.__traceback__ is None, "its frames hold the worker and the call"


@pytest.mark.slow
@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.",
    ],
)
def test_libraries_run_out_of_memory_in_their_own_words(said):
    """History: a block was said to expect all tokens, and auto left the method out on every mesh."""
    with (
        pytest.raises(ConfigurationError, match="needs more memory in 2 patches"),
        failing("in 2 patches"),
    ):
        raise RuntimeError(said)


def test_other_errors_are_not_taken_for_it():
    with (
        pytest.raises(RuntimeError, match="64 tokens expected"),
        needing_memory("here", "use less"),
    ):
        raise RuntimeError("64 tokens expected, got 32")
