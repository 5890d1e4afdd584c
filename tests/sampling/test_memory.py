"""Running out of memory: how it is told from other errors, and what is let go of."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from lightning_diffpipe.errors import ConfigurationError, LayoutError
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.predictor import Predictor
from lightning_diffpipe.sampling.methods import Chooser, MethodOptions
from lightning_diffpipe.sampling.rehearsal import failing, needing_memory
from lightning_diffpipe.sampling.world import World

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
