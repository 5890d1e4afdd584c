"""Calls of the model, from step to step, and what was found out about them, which outlives requests.

Each kind of call is analysed on rank 0, which broadcasts what it found, and compared with a plain call, once.
`analysis.py` sees values that cross rows, but not numbers that come from shapes alone, such as coordinates made of
`x.shape[-2]`. So the first call of each kind is made both ways, the plain one by rank 0, if it has the memory
for all rows. If they differ, both are repeated and compared function by function: the mean magnitudes of each
result along each axis, the band's next to its part of the whole. The first function that differs is where the
band was given other numbers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_diffpipe.comm.links import Links
from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.sampling.distrifusion.analysis import CallAnalysis, ModelCall, analyse
from lightning_diffpipe.sampling.distrifusion.band_call import BandCall, CallState, StepKind
from lightning_diffpipe.sampling.distrifusion.bands import Bands
from lightning_diffpipe.sampling.distrifusion.constants import Constants
from lightning_diffpipe.sampling.distrifusion.exchange import Exchange
from lightning_diffpipe.sampling.distrifusion.moments import GroupNormRule
from lightning_diffpipe.sampling.freshness import Freshness
from lightning_diffpipe.sampling.memory import (
    failing,
    is_out_of_memory,
    needing_memory,
    release_memory,
)
from lightning_diffpipe.sampling.one_process import tolerance_of
from lightning_diffpipe.sampling.statistics import Stopwatch

Profile = tuple[str, list[Tensor]]
"""The name of a function, and the mean magnitudes of its result along each axis."""

_log = logging.getLogger(__name__)
_REMEDY = "sample it with PipeFusion, sequence parallelism or one process"
_WITHOUT_A_LOOK = (
    "sample it with PipeFusion or sequence parallelism, or with fewer prompts or rows at a time"
)


class CallStates:
    """One state for each call of the model in a step."""

    def __init__(
        self, links: Links, group_norm: GroupNormRule, calls_per_message: int, verify: bool
    ) -> None:
        self._links, self._group_norm = links, group_norm
        self._calls_per_message, self._verify = calls_per_message, verify
        self._analyses: dict[Any, CallAnalysis] = {}
        self._states: list[tuple[Any, CallState]] = []

    def start_request(
        self, stopwatch: Stopwatch, freshness: Freshness | None, settings: str
    ) -> None:
        """Begins with nothing of an earlier request; a model of other settings is looked at anew."""
        self._states, self._stopwatch, self._freshness = [], stopwatch, freshness
        self._settings = settings

    def stop_request(self) -> int:
        """Forgets everything of the request; returns how many negative variances there were."""
        fallbacks = sum(int(state.fallbacks) for _, state in self._states)
        self._states = []
        return fallbacks

    def get(self, index: int, step: int, call: ModelCall) -> CallState:
        """The state of the `index`-th call of a step; the first step opens states.

        Raises:
            GraphError: The model cannot run on bands, or its arguments changed shape between steps.
        """
        kind = (call.signature(), self._settings)
        if index < len(self._states):
            before, state = self._states[index]
            if before != kind:
                raise GraphError(
                    f"call {index} of a step got arguments of other shapes than in the first step; bands "
                    "keep what was sent from step to step, and need the same shapes in every step"
                )
            return state
        if step > 0:
            self.check_number_of_calls(index + 1, step)
        if kind not in self._analyses:
            with self._stopwatch.learning():
                self._analyses[kind] = self._learned(call)
        state = self._new_state(self._analyses[kind], call.latents)
        state.freshness = self._freshness
        self._states.append((kind, state))
        return state

    def check_number_of_calls(self, num_calls: int, step: int) -> None:
        """Every step must call the model as often as the first."""
        if num_calls != len(self._states):
            raise GraphError(
                f"step {step} called the model {num_calls} times, the first step {len(self._states)} times: "
                "bands keep what was sent from step to step, and need the same calls in every step"
            )

    def _learned(self, call: ModelCall) -> CallAnalysis:
        def look() -> CallAnalysis:
            with needing_memory("to be looked at, on all rows at once,", _WITHOUT_A_LOOK):
                analysis = analyse(call)
            Bands.split(call.latents.shape[-2], self._links.num_ranks, analysis.unit, 0)
            return analysis

        analysis: CallAnalysis = self._links.broadcast_object(look)
        if self._verify:
            traffic = self._links.traffic.copy()
            self._compare(analysis, call)
            vars(self._links.traffic).update(vars(traffic))
        return analysis

    def _compare(self, analysis: CallAnalysis, whole: ModelCall) -> None:
        """One synchronous call against a plain one of rank 0; all ranks decide together.

        Where all rows at once do not fit into rank 0's memory, nothing is compared.
        """

        def on_bands() -> Any:
            call = BandCall(self._new_state(analysis, whole.latents), StepKind(0, True))
            return call.run(whole, set(analysis.embedders))

        def plain() -> Any:
            with whole.interception.running(None):
                return whole.forward(*whole.args, **whole.kwargs)

        bands = self._new_state(analysis, whole.latents).bands
        tolerance = tolerance_of(whole.interception.root, whole.latents, convolves_parts=True)
        with failing(
            f"on a band of {bands.size} of {bands.num_rows} rows",
            _REMEDY,
            "it makes positions for all rows by itself",
            GraphError,
            "use more ranks",
        ):
            result = on_bands()
        error: float = self._links.broadcast_object(lambda: error_beside(plain, result))
        if not error <= tolerance:
            expected: list[Profile] = []
            with contextlib.suppress(RuntimeError):  # too little memory; then without a name
                expected = profiled(plain)
            found = first_difference(expected, profiled(on_bands), bands, tolerance)
            name = self._links.broadcast_object(lambda: found) or found
            self._links.finish()  # all ranks refuse together, with nothing under way
            where = f" (first seen after {name}())" if name else ""
            raise GraphError(
                f"on bands of {', '.join(map(str, bands.rows))} rows this model computes something else than on "
                f"the whole: relative error {error:.1e}, allowed are {tolerance:.0e}{where}; {_REMEDY}, or pass "
                "verify=False if you accept this"
            )

    def _new_state(self, analysis: CallAnalysis, latents: Tensor) -> CallState:
        return CallState(
            analysis=analysis,
            bands=Bands.split(
                latents.shape[-2], self._links.num_ranks, analysis.unit, self._links.rank
            ),
            exchange=Exchange(self._links, self._calls_per_message, self._stopwatch),
            group_norm=self._group_norm,
            constants=Constants(analysis.constant),
        )


def relative_error(bands: Any, plain: Any) -> float:
    """The largest relative difference among the results of two calls; one that overflows anyway says nothing."""
    errors = [0.0]
    for a, b in zip(pytree.tree_leaves(bands), pytree.tree_leaves(plain), strict=True):
        if isinstance(a, Tensor) and a.is_floating_point():
            if a.shape != b.shape:
                return float("inf")
            if not b.isfinite().all():
                continue
            difference = (a - b).double().norm() / b.double().norm().clamp_min(1e-30)
            errors.append(float("inf") if bool(difference.isnan()) else float(difference))
    return max(errors)


def error_beside(plain: Callable[[], Any], bands: Any) -> float:
    """The relative error of results on bands against a plain call; 0 where memory does not suffice for one."""
    try:
        return relative_error(bands, plain())
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        _log.warning(
            "all rows of the latents do not fit into memory at once; bands are not compared with them"
        )
        return 0.0
    finally:
        release_memory()


class Profiles(TorchFunctionMode):
    """Notes the profile of every function's result."""

    def __init__(self) -> None:
        super().__init__()
        self.profiles: list[Profile] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls, and looks at the result."""
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and out.ndim:
            size = out.detach().double().abs()
            axes = range(out.ndim)
            profile = [
                size.mean([a for a in axes if a != axis]) if out.ndim > 1 else size for axis in axes
            ]
            self.profiles.append((getattr(func, "__name__", str(func)), profile))
        return out


def first_difference(
    whole: list[Profile], band: list[Profile], bands: Bands, tolerance: float
) -> str | None:
    """The name of the first function whose result on the band is no part of that on the whole."""
    for (name, plain), (_, mine) in zip(whole, band, strict=False):
        if len(plain) != len(mine):
            return name
        if any(not _agrees(a, b, bands, tolerance) for a, b in zip(plain, mine, strict=True)):
            return name
    return None


def _agrees(plain: Tensor, mine: Tensor, bands: Bands, tolerance: float) -> bool:
    """Only an axis that grows with the rows can be compared: on others, means are of other rows."""
    start, size = bands.part_of(len(plain))
    if len(plain) == len(mine) or size != len(mine):
        return True
    part = plain.narrow(0, start, size)
    scale = float(plain.abs().mean()) + 1e-30
    return float((part - mine).abs().max()) <= tolerance * scale


def profiled(run: Callable[[], Any]) -> list[Profile]:
    """Runs something and returns its profiles."""
    notes = Profiles()
    with notes:
        run()
    return notes.profiles
