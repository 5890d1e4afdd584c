"""Running the frozen layers of a step: at once, or in pieces that fit into the bubbles of a pipeline.

The same callable runs with the frozen layers as its own, so that encoders need not be declared:

    view = FrozenView(module, graph, cut.frozen, interception)
    results = view.whole(lambda: module.training_step(microbatch, 0), seed=17)

    run = view.start(lambda: module.training_step(next_microbatch, 0), seed=18)
    while not run.advance():       # in a bubble: one layer of the fine graph
        ...                        # anything else, e.g. a stage run of another microbatch
    results = run.results

A paused run waits in a thread of its own, in the middle of the model's code. The hand-off is strict: one
of the two threads always waits, and the states of the random number generators are swapped with it. The
thread is kept for the next run, as memory that is touched for the first time makes a new one slow.

With `samples=(start, stop)` a layer runs on some samples of the microbatch only: its arguments are cut
in front of it, its outputs padded behind it, and the glue sees full shapes.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.cut import StageCut
from lightning_diffpipe.graph.interception import Interception, Site
from lightning_diffpipe.graph.layer import Layer, LayerGraph, TensorKey, TensorSpec
from lightning_diffpipe.graph.layer_run import LayerRun, RunPlan

Samples = tuple[int, int]
Results = dict[TensorKey, Tensor]


class FrozenView:
    """Runs the frozen layers of a step, without gradients.

    Args:
        root: The module whose step it is.
        graph: The probed step, for batches of one signature.
        cut: The frozen part of a `Cut`.
        interception: Installed on the root; shared by all views of it.
        verify: Fill dummies with NaN.
    """

    def __init__(
        self,
        root: nn.Module,
        graph: LayerGraph,
        cut: StageCut,
        interception: Interception,
        *,
        verify: bool = False,
    ) -> None:
        self.root, self.graph, self.cut, self.interception = root, graph, cut, interception
        interception.watch(graph.site_names)
        self._plan = RunPlan(graph, cut, float("nan") if verify else 0.0)
        self._samples_compared = False

    @property
    def why_not_splittable(self) -> str:
        """What keeps frozen layers from running on some of the samples only; empty if nothing does."""
        for index in sorted(self.cut.layers):
            layer = self.graph.layers[index]
            if layer.draws_random:
                return f"{layer.name} draws random numbers, which depend on the number of samples"
            if layer.written_buffers:
                return f"{layer.name} updates statistics over all samples; call .eval() on it"
            if not layer.splits_samples:
                return f"{layer.name} has arguments or outputs without a dimension of samples"
        return ""

    @property
    def is_splittable(self) -> bool:
        """Whether `samples` may be given; the first such run compares its values with a whole one."""
        return not self.why_not_splittable

    def whole(
        self, call: Callable[[], Any], seed: int, samples: Samples | None = None
    ) -> Results:
        """Runs all frozen layers.

        Args:
            call: Runs the user's step on the microbatch.
            seed: Seed of the microbatch.
            samples: Half-open range of samples to encode, None for all.

        Returns:
            The results that stages read (`cut.sent`); with `samples`, their rows of tensors that have
            rows of samples.

        Raises:
            GraphError: The step differs from its probe, or layers mix samples.
        """
        if samples is not None and samples != (0, self.graph.num_samples):
            self._require_splittable(call, seed, samples)
        return self._whole(call, seed, samples)

    def start(
        self, call: Callable[[], Any], seed: int, samples: Samples | None = None
    ) -> PausedRun:
        """Prepares a run that goes on only while `advance` or `finish` is called; see `whole`."""
        if samples is not None and samples != (0, self.graph.num_samples):
            self._require_splittable(call, seed, samples)
        return PausedRun(self, call, seed, samples)

    def _whole(self, call: Callable[[], Any], seed: int, samples: Samples | None) -> Results:
        run = FrozenRun(self._plan, samples)
        host = self.graph.host_random
        with rng.preserved(host), self.interception.running(run), torch.no_grad():
            rng.seed_all(seed, host)
            run.walk(call)
        return run.results()

    def _require_splittable(self, call: Callable[[], Any], seed: int, samples: Samples) -> None:
        if self.why_not_splittable:
            raise GraphError(f"frozen layers must run on whole microbatches: {self.why_not_splittable}")
        if self._samples_compared:
            return
        whole, part = self._whole(call, seed, None), self._whole(call, seed, samples)
        for key, value in part.items():
            rows = self.graph.spec(key).rows or 0
            expected = whole[key][samples[0] * rows : samples[1] * rows] if rows else whole[key]
            difference = _relative_difference(value, expected)
            if difference > _tolerance(value.dtype):
                raise GraphError(
                    f"{self.graph.layers[key[0]].name} mixes samples: run on samples {samples} of "
                    f"{self.graph.num_samples}, it differs by {difference:.1e} from a run on all. Encode "
                    "whole microbatches instead of parts of them"
                )
        self._samples_compared = True


def join_samples(graph: LayerGraph, parts: Sequence[Mapping[TensorKey, Tensor]]) -> Results:
    """Puts the results of runs on consecutive ranges of samples together."""
    joined: Results = {}
    for key, first in parts[0].items():
        spec = graph.spec(key)
        if not spec.rows:
            joined[key] = first
            continue
        joined[key] = spec.empty(first.device)
        torch.cat([part[key] for part in parts], out=joined[key])
    return joined


class FrozenRun(LayerRun):
    """One walk through the frozen layers of a step."""

    def __init__(self, plan: RunPlan, samples: Samples | None) -> None:
        super().__init__(plan)
        self.at = ""
        self.pause: Callable[[], None] | None = None
        num_samples = plan.graph.num_samples
        self._samples = None if samples in (None, (0, num_samples)) else samples

    def before_fine_layer(self, name: str) -> None:
        """A paused run waits here."""
        self.at = name
        if self.pause is not None:
            self.pause()

    def received(self, layer: Layer, leaf: int) -> Tensor:
        """Frozen layers read nothing but frozen layers."""
        raise GraphError(f"frozen layers read output {leaf} of {layer.name}, which is trained")

    def execute(self, layer: Layer, site: Site, args: Any, kwargs: Any) -> Any:
        """Calls a layer, on some of the samples if so asked."""
        if self._samples is None:
            return super().execute(layer, site, args, kwargs)
        flat, spec = pytree.tree_flatten((args, kwargs))
        args, kwargs = pytree.tree_unflatten(self._rows_of(layer, flat), spec)
        out = super().execute(layer, site, args, kwargs)
        flat, spec = pytree.tree_flatten(out)
        return pytree.tree_unflatten(self._padded(layer, flat), spec)

    def results(self) -> Results:
        """The rows that were asked for, of all results."""
        if self._samples is None:
            return dict(self.outputs)
        start, stop = self._samples
        results = {}
        for key, value in self.outputs.items():
            rows = self._plan.graph.spec(key).rows or 0
            results[key] = value[start * rows : stop * rows] if rows else value
        return results

    def _rows_of(self, layer: Layer, flat: list[Any]) -> list[Any]:
        assert self._samples is not None
        start, stop = self._samples
        known = layer.argument_rows or ()
        if len(known) != len(flat):
            raise GraphError(
                f"{layer.name} was called with {len(flat)} arguments, the probe saw {len(known)}"
            )
        return [
            value[start * rows : stop * rows] if rows and isinstance(value, Tensor) else value
            for value, rows in zip(flat, known, strict=True)
        ]

    def _padded(self, layer: Layer, flat: list[Any]) -> list[Any]:
        assert self._samples is not None
        start, stop = self._samples
        padded, seen = [], {}
        for value, expected in zip(flat, layer.outputs, strict=False):
            if isinstance(expected, TensorSpec) and expected.rows and isinstance(value, Tensor):
                whole = expected.empty(value.device).zero_()
                whole[start * expected.rows : stop * expected.rows].copy_(value)
                seen[id(value)] = whole
                padded.append(whole)
            else:
                padded.append(seen.get(id(value), value))
        return padded


class _Cancelled(BaseException):
    """Unwinds a paused run (no Exception, so that a model does not swallow it)."""


class _Worker:
    """A thread that is kept for later runs."""

    _idle: list[_Worker] = []  # noqa: RUF012
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="diffpipe-frozen", daemon=True).start()

    @classmethod
    def submit(cls, work: Callable[[], None]) -> None:
        """Runs something in an idle thread, or in a new one if none is idle."""
        with cls._lock:
            worker = cls._idle.pop() if cls._idle else None
        (worker or cls())._work.put(work)

    def _loop(self) -> None:
        while True:
            work = self._work.get()
            work()
            del work  # it holds a batch
            with self._lock:
                self._idle.append(self)


class PausedRun:
    """A frozen run that goes on in pieces. Its methods belong to one thread, the owner's.

    Attributes:
        done: Nothing is left to run.
        num_layers_done: Layers of the fine graph that were started.
    """

    def __init__(
        self, view: FrozenView, call: Callable[[], Any], seed: int, samples: Samples | None
    ) -> None:
        self.done, self.num_layers_done = False, 0
        self._view, self._call = view, call
        self._run = FrozenRun(view._plan, samples)
        self._run.pause = self._pause
        self._host = view.graph.host_random
        with rng.preserved(self._host):
            rng.seed_all(seed, self._host)
            self._state = rng.capture(self._host)
        self._budget: float = 0
        self._cancelled = self._started = False
        self._error: BaseException | None = None
        self._settings = _ThreadSettings()
        self._context = contextvars.copy_context()
        self._go, self._back = threading.Lock(), threading.Lock()  # held: wait for your turn
        self._go.acquire()
        self._back.acquire()

    @property
    def next_layer(self) -> str:
        """The layer in front of which it is paused; empty before the first piece and after the last."""
        return "" if self.done else self._run.at

    @property
    def results(self) -> Results:
        """The results, when done; see `FrozenView.whole`.

        Raises:
            GraphError: The run is not done.
        """
        if not self.done or self._cancelled:
            state = "was cancelled" if self._cancelled else "is not done; call finish()"
            raise GraphError(f"the frozen run {state}")
        return self._run.results()

    def advance(self, num_layers: float = 1) -> bool:
        """Runs at most so many layers of the fine graph; says whether all is done.

        Raises:
            Exception: Whatever the step raised, with the name of the layer added.
        """
        if not self.done:
            self._budget = num_layers
            self._switch()
        return self.done

    def finish(self) -> Results:
        """Runs what is left."""
        self.advance(float("inf"))
        return self.results

    def cancel(self) -> None:
        """Unwinds the step where it is paused and frees what it holds."""
        if self.done:
            return
        self._cancelled = True
        if self._started:
            self._switch()
        self.done = True

    def _switch(self) -> None:
        """Hands control to the worker until it hands it back."""
        outside = rng.capture(self._host)
        rng.restore(self._state)
        if not self._started:
            self._started = True
            _Worker.submit(lambda: self._context.run(self._work))
        self._settings.stream = _current_stream()
        self._go.release()
        try:
            self._back.acquire()
        except BaseException:  # interrupted: the worker must not run on beside us
            self._cancelled = True
            self._back.acquire()
            raise
        finally:
            self._state = rng.capture(self._host)
            rng.restore(outside)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        """What the worker does: the whole step, pausing inside."""
        self._go.acquire()
        try:
            with self._settings.entered(), self._view.interception.running(self._run):
                self._run.walk(self._call)
        except _Cancelled:
            pass
        except BaseException as error:
            if self._run.at:
                error.add_note(f"in a frozen run, at layer {self._run.at}")
            self._error, self._cancelled = error, True
        del self._call
        self.done = True
        self._back.release()

    def _pause(self) -> None:
        """Called by the worker before every layer of the fine graph."""
        while self._budget < 1 and not self._cancelled:
            self._back.release()
            self._go.acquire()
            self._settings.follow_stream()
        if self._cancelled:
            raise _Cancelled
        self._budget -= 1
        self.num_layers_done += 1


class _ThreadSettings:
    """What a thread does not inherit: autocast, CUDA device and stream, number of threads."""

    def __init__(self) -> None:
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in ("cpu", "cuda")
        ]
        self._cache = torch.is_autocast_cache_enabled()
        self._threads = torch.get_num_threads()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.stream: Any = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        torch.set_num_threads(self._threads)
        if self._device is not None:
            torch.cuda.set_device(self._device)
        self.follow_stream()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for kind, dtype, enabled in self._autocast:
                if enabled:
                    stack.enter_context(
                        torch.autocast(kind, dtype, enabled, cache_enabled=self._cache)
                    )
            yield

    def follow_stream(self) -> None:
        """Work goes to the stream the owner is using now, so that order needs no events."""
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)


def _current_stream() -> Any:
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def _relative_difference(value: Tensor, expected: Tensor) -> float:
    if torch.equal(value, expected):
        return 0.0
    if not value.dtype.is_floating_point:
        return float("inf")
    scale = expected.abs().max().clamp_min(1e-30)
    return float(((value - expected).abs().max() / scale).nan_to_num(float("inf")))


def _tolerance(dtype: torch.dtype) -> float:
    """Kernels are chosen by size, so that parts of a batch may differ by rounding."""
    if dtype.is_floating_point:
        return float(min(0.1, 1e4 * torch.finfo(dtype).eps))
    return 0.0
