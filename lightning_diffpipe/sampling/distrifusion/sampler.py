r"""DistriFusion: every rank denoises its band of rows, and sees the others as they were one step ago.

    step         0           1           2           3
    rank 0   [ band 0 ]  [ band 0 ]  [ band 0 ]  [ band 0 ]
                  X           \          \           \         X: activations exchanged inside the step
    rank 1   [ band 1 ]  [ band 1 ]  [ band 1 ]  [ band 1 ]     \: sent during one step, read in the next
             synchronous  displaced   displaced   displaced

The model's own forward runs on the band; operators that see beyond it are intercepted (`band_call.py`).
Neighbouring steps of a sampler differ little, so stale activations cost little quality, and their transport hides
behind a whole step of computation. Predictions are put together at the end of each step, and every rank steps the
scheduler on the whole latents.

Modes: "displaced"; "synchronous" waits for fresh activations always, and is exact; "naive" never asks for them.
`warmup_steps` counts synchronous steps at the start. With none, the first step sees no other band at all.

Source:
    DistriFusion, Li et al. (2024), https://arxiv.org/abs/2402.19481 (its warm-up of w is our w + 1)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_diffpipe.comm.links import Links, ProcessLinks
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph.interception import ForwardOnlyRun, Interception
from lightning_diffpipe.graph.memo import settings_digest
from lightning_diffpipe.planning.instruction import ForwardNoGrad
from lightning_diffpipe.sampling.distrifusion.analysis import ModelCall
from lightning_diffpipe.sampling.distrifusion.band_call import MODEL, BandCall, StepKind
from lightning_diffpipe.sampling.distrifusion.calls import CallStates
from lightning_diffpipe.sampling.distrifusion.moments import GroupNormRule
from lightning_diffpipe.sampling.freshness import Freshness
from lightning_diffpipe.sampling.request import InputScaler, Request
from lightning_diffpipe.sampling.schedulers import drawing_from, random_states
from lightning_diffpipe.sampling.statistics import SamplingStatistics, Stopwatch, measured

Mode = Literal["displaced", "synchronous", "naive"]


class DistriFusion:
    """Samples on bands of rows, one for each rank.

    Args:
        model: The U-Net or transformer, with all weights on every rank.
        links: To the other ranks.
        mode: "displaced", "synchronous" or "naive".
        warmup_steps: Synchronous steps at the start, or "auto": until what the model is given in a step differs by
            less than `settled` from the step before.
        group_norm: What displaced steps make of other bands' statistics; see `moments.py`.
        calls_per_message: Operators of one kind whose data share a message in displaced steps.
        settled: Relative change of the model's input, the scaled latents, that ends the automatic warm-up.
        verify: Compare the first call of each kind with a plain one.
        record_freshness: Note in `statistics.freshness` how old was what this band read.

    Example:
        >>> latents = DistriFusion(unet, links, warmup_steps=4).sample(request)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        links: Links,
        mode: Mode = "displaced",
        warmup_steps: int | Literal["auto"] = 4,
        group_norm: GroupNormRule = "predicted",
        calls_per_message: int = 16,
        settled: float = 0.1,
        verify: bool = True,
        record_freshness: bool = False,
    ) -> None:
        _check("mode", mode, get_args(Mode))
        _check("group_norm", group_norm, get_args(GroupNormRule))
        if warmup_steps != "auto" and warmup_steps < 0:
            raise ConfigurationError(f"warmup_steps={warmup_steps}; choose 0 or more, or 'auto'")
        if calls_per_message < 1:
            raise ConfigurationError(f"calls_per_message={calls_per_message}; choose 1 or more")
        self.model, self.links, self.mode = model, links, mode
        self.warmup_steps, self.settled = warmup_steps, settled
        self.record_freshness = record_freshness
        self.statistics = SamplingStatistics()
        self.num_fallbacks = 0
        self.num_synchronous = 0
        self._states = CallStates(links, group_norm, calls_per_message, verify)

    @torch.no_grad()  # inference mode would make tensors without versions, see `constants.py`
    def sample(self, request: Request, on_step: Callable[[int], None] | None = None) -> Tensor:
        """Runs one request; see `Sampler.sample`.

        Raises:
            GraphError: The model mixes rows in a way bands have no rule for.
            ConfigurationError: The rows do not divide, or do not suffice for so many ranks.
            PipelineTimeoutError: A rank stopped, or did not answer in time.
        """
        freshness = Freshness() if self.record_freshness else None
        settings = self.links.broadcast_object(lambda: settings_digest(self.model))
        with (
            measured(self, request, self.links, freshness=freshness) as stopwatch,
            drawing_alike(self.links, request.latents.device),
            intercepted(self.model) as interception,
        ):
            self._states.start_request(stopwatch, freshness, settings)
            try:
                latents = _Loop(self, request, interception, stopwatch).run(on_step)
                self.links.finish()
            finally:
                self.num_fallbacks = self._states.stop_request()
        self.statistics.num_synchronous = self.num_synchronous
        return latents


class _Loop(ForwardOnlyRun):
    """The denoising loop of one request."""

    def __init__(
        self,
        sampler: DistriFusion,
        request: Request,
        interception: Interception,
        stopwatch: Stopwatch,
    ) -> None:
        self._sampler, self._request = sampler, request
        self._states, self._links = sampler._states, sampler.links
        self._interception, self._stopwatch = interception, stopwatch
        self._settled = False
        self._num_calls = 0

    def run(self, on_step: Callable[[int], None] | None) -> Tensor:
        """All steps, on whole latents."""
        request, rank = self._request, self._links.rank
        loop, latents = request.loop(), request.latents
        scaler = InputScaler(request)
        before: Tensor | None = None
        self._sampler.num_synchronous = 0
        for index, timestep in enumerate(request.timesteps):
            inputs = scaler.scale(latents, timestep, index)
            self._watch_change(inputs, before)
            before = inputs
            self._step = self._kind_of(index)
            self._sampler.num_synchronous += self._step.synchronous
            with self._stopwatch.working(ForwardNoGrad(rank, index)):
                self._num_calls = 0
                with self._interception.running(self):
                    prediction = loop.predict()
                self._states.check_number_of_calls(self._num_calls, index)
                latents = loop.step(loop.guided(prediction))
            self._stopwatch.step_done()
            if on_step is not None:
                on_step(index)
        return latents

    def _kind_of(self, index: int) -> StepKind:
        mode, warmup_steps = self._sampler.mode, self._sampler.warmup_steps
        by_itself = warmup_steps == "auto"  # the warm-up ends at the beginning of any step
        warm = not self._settled if by_itself else index < warmup_steps
        next_may_be_displaced = mode == "displaced" and (by_itself or index + 1 >= warmup_steps)
        return StepKind(
            index,
            synchronous=warm or mode == "synchronous",
            alone=mode == "naive" and not warm,
            keep=next_may_be_displaced and index < self._request.num_steps - 1,
        )

    def _watch_change(self, inputs: Tensor, before: Tensor | None) -> None:
        """Ends the automatic warm-up on all ranks together."""
        sampler = self._sampler
        if sampler.warmup_steps != "auto" or self._settled or before is None:
            return

        def is_settled() -> bool:
            change = (inputs - before).norm() / inputs.norm().clamp_min(1e-30)
            return float(change) < sampler.settled

        self._settled = self._links.broadcast_object(is_settled)

    # ------------------------------------------------------------ calls of the model

    def call(self, site: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers a call of the model: runs it on the band, and returns the whole prediction."""
        if site.name != MODEL or self._links.num_ranks == 1:
            return site.diffpipe_original(*args, **kwargs)
        whole = ModelCall(
            self._interception, site.diffpipe_original, args, kwargs, self._request.latents
        )
        state = self._states.get(self._num_calls, self._step.index, whole)
        self._num_calls += 1
        watched = set(state.analysis.embedders)
        if state.freshness is not None:  # layers are to be named
            watched = {name for name, _ in self._interception.root.named_modules()} - {"", MODEL}
        return BandCall(state, self._step).run(whole, watched)


class _Holder(nn.Module):
    """A module around the model, so that calls of the model itself are seen, too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


_lock = threading.Lock()
_shared: dict[int, tuple[Interception, int]] = {}


@contextlib.contextmanager
def intercepted(model: nn.Module) -> Iterator[Interception]:
    """Intercepts a model for as long as somebody samples.

    The ranks of an emulator are threads that share one model, so its modules are intercepted once, by the first
    that begins, and released by the last that ends. Who answers a call is decided per thread.
    """
    with _lock:
        interception, users = _shared.get(id(model)) or (Interception(_Holder(model), {MODEL}), 0)
        interception.install()
        _shared[id(model)] = (interception, users + 1)
    try:
        yield interception
    finally:
        with _lock:
            interception, users = _shared.pop(id(model))
            if users > 1:
                _shared[id(model)] = (interception, users - 1)
            else:
                interception.uninstall()


@contextlib.contextmanager
def drawing_alike(links: Links, device: torch.device) -> Iterator[None]:
    """A context in which default generators of all processes go on from where those of rank 0 are; collective.

    Every band steps the whole latents, so all must draw the same. A generator in the request is the same on all
    ranks, as the request is; where a scheduler is given none, it draws from the default ones. On other ranks they
    are as they were after it. Threads, which share theirs, are left alone: `emulate` gives each a copy.
    """
    if not isinstance(links, ProcessLinks) or links.num_ranks == 1:
        yield
        return
    states = links.broadcast_object(lambda: random_states(device))
    with drawing_from(states, device) if links.rank else contextlib.nullcontext():
        yield


def _check(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{option}={value!r}; choose one of {', '.join(allowed)}")
