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

Each kind of call of the model is analysed on rank 0, which broadcasts what it found. `analysis.py` sees values
that cross rows, but not numbers that come from shapes alone, such as coordinates made of `x.shape[-2]`. So the
first call of each kind is also made plainly, by rank 0, if it has the memory for all rows, and the two must agree.

Source:
    DistriFusion, Li et al. (2024), https://arxiv.org/abs/2402.19481 (its warm-up of w is our w + 1)
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_diffpipe.comm.links import Links
from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.errors import (
    ConfigurationError,
    GraphError,
    require_choice,
    require_number,
)
from lightning_diffpipe.graph.interception import Interception, Run
from lightning_diffpipe.graph.versions import settings_digest
from lightning_diffpipe.planning.cluster import Link
from lightning_diffpipe.sampling.distrifusion.analysis import CallAnalysis, ModelCall, analyse
from lightning_diffpipe.sampling.distrifusion.band_call import (
    MODEL,
    BandCall,
    GroupNormRule,
    StepKind,
)
from lightning_diffpipe.sampling.distrifusion.bands import Bands
from lightning_diffpipe.sampling.distrifusion.exchange import Exchange
from lightning_diffpipe.sampling.loop import with_own_generators
from lightning_diffpipe.sampling.rehearsal import (
    error_against,
    failing,
    needing_memory,
    refuse_if_other,
    relative_error,
    tolerance_of,
)
from lightning_diffpipe.sampling.report import SamplingStatistics, Stopwatch, measured
from lightning_diffpipe.sampling.request import Request, require_warmup
from lightning_diffpipe.sampling.schedulers import takes_generator
from lightning_diffpipe.sampling.step_caches import StepCache
from lightning_diffpipe.sampling.tracing.attention import KernelsAnswered

_REMEDY = "sample it with PipeFusion, sequence parallelism or one process"
_REMEDY_OF_ANALYSIS = (
    "sample it with PipeFusion or sequence parallelism, or with fewer prompts or rows at a time"
)

BandMode = Literal["displaced", "synchronous", "naive"]
_lock = threading.Lock()
_shared: dict[int, tuple[Interception, int]] = {}


class DistriFusion:
    """Samples on bands of rows, one for each rank.

    Args:
        model: The U-Net or transformer, with all weights on every rank.
        links: To the other ranks.
        mode: "displaced", "synchronous" or "naive".
        warmup_steps: Synchronous steps at the start, or "auto": until what the model is given in a step differs by
            less than `warmup_threshold` from the step before.
        group_norm: Rule by which displaced steps use other bands' statistics; see `band_call.py`.
        calls_per_message: Operators of one kind whose data share a message in displaced steps.
        warmup_threshold: Relative change of the model's input, the scaled latents, that ends the automatic warm-up.
        verify: Compare the first call of each kind with a plain one.

    Example:
        >>> latents = DistriFusion(unet, links, warmup_steps=4).sample(request)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        links: Links,
        mode: BandMode = "displaced",
        warmup_steps: int | Literal["auto"] = 4,
        group_norm: GroupNormRule = "predicted",
        calls_per_message: int = 16,
        warmup_threshold: float = 0.1,
        verify: bool = True,
    ) -> None:
        require_choice("mode", mode, get_args(BandMode))
        require_choice("group_norm", group_norm, get_args(GroupNormRule))
        require_warmup(warmup_steps, warmup_threshold)
        require_number("calls_per_message", calls_per_message, 1, whole=True)
        self.model, self.links, self.mode = model, links, mode
        self.warmup_steps, self.warmup_threshold = warmup_steps, warmup_threshold
        self.group_norm, self.calls_per_message, self.verify = group_norm, calls_per_message, verify
        self.statistics = SamplingStatistics()
        self.num_fallbacks = 0
        self.analyses: dict[Any, CallAnalysis] = {}  # the same on all ranks

    @KernelsAnswered()
    @torch.no_grad()  # inference mode would make tensors without versions, see `Constants`
    def sample(self, request: Request, on_step: Callable[[int], None] | None = None) -> Tensor:
        """Runs one request; see `Sampler.sample`.

        Raises:
            GraphError: The model mixes rows in a way bands have no rule for.
            ConfigurationError: The rows do not divide, or do not suffice for so many ranks.
            PipelineTimeoutError: A rank stopped, or did not answer in time.
        """
        settings = self.links.broadcast_object(lambda: settings_digest(self.model))
        cache = StepCache(request, [self.links])
        with (
            measured(self, request, self.links) as stopwatch,
            cache.installed(),
            intercepted(self.model) as interception,
        ):
            run = DistriFusionRun(self, request, interception, stopwatch, settings, cache)
            try:
                latents = run.run(on_step)
                for _, call in run.calls:
                    call.forget()
                self.links.finish()
            finally:
                self.num_fallbacks = sum(int(call.fallbacks) for _, call in run.calls)
                run.calls.clear()
        return latents


@dataclass
class DistriFusionRun(Run):
    """State of one request on this rank; a model with another digest of its settings is analysed again."""

    sampler: DistriFusion
    request: Request
    interception: Interception
    stopwatch: Stopwatch
    settings: str
    cache: StepCache

    def __post_init__(self) -> None:
        self._links = self.sampler.links
        # Each call of the model in a step, with what its arguments and the model's settings were like.
        self.calls: list[tuple[Any, BandCall]] = []
        self._num_calls = 0

    def run(self, on_step: Callable[[int], None] | None) -> Tensor:
        """Runs all steps, on whole latents."""
        request, sampler = self.request, self.sampler
        loop, latents = request.loop(), request.latents
        given_before: Tensor | None = None
        is_below, sampler.statistics.num_synchronous = False, 0
        for index in range(request.num_steps):
            if sampler.warmup_steps == "auto" and not is_below:
                given = request.scaler.scale(latents, index)
                if given_before is not None:
                    change = self._links.broadcast_object(partial(_change, given_before, given))
                    is_below = change < sampler.warmup_threshold
                given_before = given
            self._step = self._kind_of_step(index, is_below)
            sampler.statistics.num_synchronous += self._step.synchronous
            self._num_calls = 0
            self.cache.begin(index)
            with self.interception.running(self):
                prediction = loop.predict()
            self._check_number_of_calls(self._num_calls)
            latents = loop.step(loop.guided(prediction))
            self.stopwatch.step_done()
            if on_step is not None:
                on_step(index)
        return latents

    def _kind_of_step(self, index: int, is_below: bool) -> StepKind:
        """Returns the data of other bands that a step may read; `is_below` ends an automatic warm-up."""
        mode, warmup_steps = self.sampler.mode, self.sampler.warmup_steps
        automatic = warmup_steps == "auto"
        in_warmup = not is_below if automatic else index < warmup_steps
        # An automatic warm-up may end with any step; one that a step cache skips leaves nothing to be read.
        any_time = automatic or self.request.cache is not None
        next_may_be_displaced = mode == "displaced" and (any_time or index + 1 >= warmup_steps)
        return StepKind(
            index,
            synchronous=in_warmup or mode == "synchronous",
            alone=mode == "naive" and not in_warmup,
            keep=next_may_be_displaced and index < self.request.num_steps - 1,
        )

    def call(self, site: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers a call of the model: runs it on the band, and returns the whole prediction."""
        forward, latents = site.diffpipe_original, self.request.latents
        if site.name != MODEL or self._links.num_ranks == 1:
            return forward(*args, **kwargs)
        whole = ModelCall(self.interception, forward, args, kwargs, latents)
        call = self._band_call(whole)
        self._num_calls += 1
        return call.run(whole, self._step)

    def _band_call(self, call: ModelCall) -> BandCall:
        """Returns the `BandCall` of the next call of a step; the first step makes it."""
        kind, index = (call.signature(), self.settings), self._num_calls
        if index < len(self.calls):
            before, band_call = self.calls[index]
            if before != kind:
                raise GraphError(
                    f"call {index} of a step got arguments of other shapes than in the first step; bands "
                    "keep what was sent from step to step, and need the same shapes in every step"
                )
            return band_call
        if self._step.index > 0:
            self._check_number_of_calls(index + 1)
        analyses = self.sampler.analyses
        if kind not in analyses:
            analyses[kind] = self._analysed(call)
        new = self._new_call(analyses[kind])
        self.calls.append((kind, new))
        return new

    def _analysed(self, call: ModelCall) -> CallAnalysis:
        """Analyses a call on rank 0, and compares it on bands with a plain one; collective."""

        def analysis_of() -> CallAnalysis:
            with needing_memory("to be analysed on all rows at once", _REMEDY_OF_ANALYSIS):
                analysis = analyse(call)
            Bands.split(call.latents.shape[-2], self._links.num_ranks, analysis.unit, 0)
            return analysis

        with self.stopwatch.learning(), self.cache.off():
            analysis: CallAnalysis = self._links.broadcast_object(analysis_of)
            if self.sampler.verify:
                traffic = self._links.traffic.copy()
                self._compare(analysis, call)
                vars(self._links.traffic).update(vars(traffic))  # which is none of the request's
        return analysis

    def _check_number_of_calls(self, num_calls: int) -> None:
        if num_calls != len(self.calls):
            raise GraphError(
                f"step {self._step.index} called the model {num_calls} times, the first step {len(self.calls)} "
                "times: bands keep what was sent from step to step, and need the same calls in every step"
            )

    def _compare(self, analysis: CallAnalysis, whole: ModelCall) -> None:
        """Compares a synchronous call with a plain one of rank 0; all ranks decide together.

        Where all rows at once do not fit into rank 0's memory, nothing is compared.
        """

        def plain() -> Any:
            # Lists of their own, from which U-Nets take residuals out.
            args, kwargs = pytree.tree_map(lambda x: x, (whole.args, whole.kwargs))
            with whole.interception.running(None):
                return whole.forward(*args, **kwargs)

        bands = self._bands(analysis)
        cause = "it makes positions for all rows by itself"
        with failing(f"on a band of {bands.size} of {bands.num_rows} rows", _REMEDY, cause):
            result = self._new_call(analysis).run(whole, StepKind(0, synchronous=True))
        warning = "all rows of the latents do not fit into memory at once; bands are not compared with them"
        error = error_against(self._links, plain, result, warning)
        tolerance = tolerance_of(whole.interception.root, whole.latents, convolves_parts=True)
        where = f"on bands of {', '.join(map(str, bands.rows))} rows"
        refuse_if_other(error, tolerance, where, "the whole", _REMEDY)

    def _bands(self, analysis: CallAnalysis) -> Bands:
        num_rows = self.request.latents.shape[-2]
        return Bands.split(num_rows, self._links.num_ranks, analysis.unit, self._links.rank)

    def _new_call(self, analysis: CallAnalysis) -> BandCall:
        skips = self.request.cache is not None
        exchange = Exchange(self._links, self.sampler.calls_per_message, skips)
        bands, group_norm = self._bands(analysis), self.sampler.group_norm
        return BandCall(analysis, bands, exchange, group_norm, self.cache.hooked)


@contextlib.contextmanager
def intercepted(model: nn.Module) -> Iterator[Interception]:
    """Intercepts a model for as long as somebody samples.

    The ranks of an emulator are threads that share one model, so its modules are intercepted once, by the first
    that begins, and released by the last that ends. Who answers a call is decided per thread.
    """
    with _lock:
        # A module around the model, so that calls of the model itself are seen, too.
        around = nn.ModuleDict({MODEL: model})
        interception, users = _shared.get(id(model)) or (Interception(around, {MODEL}), 0)
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


def _change(before: Tensor, now: Tensor) -> float:
    """Returns how much a model's input has changed, relatively; one that is not finite never settles."""
    return relative_error(before, now) if now.isfinite().all() else math.inf


def emulate(
    request: Request,
    num_bands: int,
    link: Link | None = None,
    on_step: Callable[[int], None] | None = None,
    timeout_s: float = 300.0,
    **options: Any,
) -> tuple[Tensor, list[DistriFusion]]:
    """Samples with as many bands, each in a thread.

    Args:
        request: The request.
        num_bands: Ranks to emulate.
        link: Latency and bandwidth of messages; None for no delay.
        on_step: Called by band 0.
        timeout_s: Longest wait, in seconds.
        options: Options of `DistriFusion`.

    Returns:
        The final latents, and the samplers of all bands with their statistics.

    Raises:
        ConfigurationError: Bands have other noise.
    """
    device, default = request.latents.device, None
    if request.step_kwargs.get("generator") is None and takes_generator(request.scheduler):
        default = torch.default_generator
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            default = torch.cuda.default_generators[index]
    network = LoopbackNetwork(num_bands, device, link, timeout_s)
    kwargs = dict(request.step_kwargs) | ({} if default is None else {"generator": default})

    # A thread samples as if it were a process.
    own = [with_own_generators(kwargs) for _ in range(num_bands)]
    requests = [replace(request, step_kwargs=each) for each in own]

    def band(links: Links) -> tuple[Tensor, DistriFusion]:
        sampler = DistriFusion(request.model, links, **options)
        return sampler.sample(requests[links.rank], on_step if links.rank == 0 else None), sampler

    results = network.run(band)
    if default is not None:  # goes on where the copy of band 0 is, as in one process
        default.set_state(requests[0].step_kwargs["generator"].get_state())
    latents = results[0][0]
    for rank, (of_band, _) in enumerate(results):
        if not torch.allclose(of_band, latents, rtol=0.0, atol=0.0, equal_nan=True):
            name = type(request.scheduler).__name__
            raise ConfigurationError(
                f"bands 0 and {rank} of {num_bands} came to other latents: {name} or the request's closure "
                "uses torch's default generator, which these bands share as threads of one process; give "
                "it a generator or a seed of its own, or sample with processes"
            )
    return latents, [sampler for _, sampler in results]
