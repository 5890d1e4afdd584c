"""The tracks of a request, and what was learned about the model, which outlives requests.

Facts are found on rank 0 and told to the others; each kind of call is looked at, and verified, once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_diffpipe.comm.links import Links
from lightning_diffpipe.errors import GraphError
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.sampling.distrifusion.band_call import BandCall, StepKind, Track
from lightning_diffpipe.sampling.distrifusion.bands import Bands
from lightning_diffpipe.sampling.distrifusion.constants import Constants
from lightning_diffpipe.sampling.distrifusion.exchange import Exchange
from lightning_diffpipe.sampling.distrifusion.facts import Facts, find_facts, signature
from lightning_diffpipe.sampling.distrifusion.moments import GroupNormRule
from lightning_diffpipe.sampling.distrifusion.verification import (
    Profile,
    error_beside,
    failing_on,
    first_difference,
    profiled,
    refusal,
)
from lightning_diffpipe.sampling.freshness import Freshness
from lightning_diffpipe.sampling.memory import needing_memory
from lightning_diffpipe.sampling.rounding import tolerance_of
from lightning_diffpipe.sampling.statistics import Stopwatch

Forward = Callable[..., Any]

_WITHOUT_A_LOOK = (
    "sample it with PipeFusion or sequence parallelism, or with fewer prompts or rows at a time"
)


class Tracks:
    """One track for each call of the model in a step.

    Args:
        links: To the ranks of the other bands.
        group_norm: Rule in displaced steps.
        calls_per_message: See `Exchange`.
        verify: Compare the first call of each kind with a plain one.
    """

    def __init__(
        self, links: Links, group_norm: GroupNormRule, calls_per_message: int, verify: bool
    ) -> None:
        self._links, self._group_norm = links, group_norm
        self._calls_per_message, self._verify = calls_per_message, verify
        self._facts: dict[Any, Facts] = {}
        self._tracks: list[tuple[Any, Track]] = []

    def start_request(
        self, stopwatch: Stopwatch, freshness: Freshness | None, settings: str
    ) -> None:
        """Begins with nothing of an earlier request; a model of other settings is looked at anew."""
        self._tracks, self._stopwatch, self._freshness = [], stopwatch, freshness
        self._settings = settings

    def stop_request(self) -> int:
        """Forgets everything of the request; returns how many negative variances there were."""
        fallbacks = sum(int(track.fallbacks) for _, track in self._tracks)
        self._tracks = []
        return fallbacks

    def get(
        self,
        index: int,
        step: int,
        interception: Interception,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        latents: Tensor,
    ) -> Track:
        """The track of the `index`-th call of a step; the first step opens tracks.

        Raises:
            GraphError: The model cannot run on bands, or its arguments changed shape between steps.
        """
        kind = (signature(args, kwargs), tuple(latents.shape), self._settings)
        if index < len(self._tracks):
            before, track = self._tracks[index]
            if before != kind:
                raise GraphError(
                    f"call {index} of a step got arguments of other shapes than in the first step; bands "
                    "keep what was sent from step to step, and need the same shapes in every step"
                )
            return track
        if step > 0:
            self.check_number_of_calls(index + 1, step)
        if kind not in self._facts:
            with self._stopwatch.learning():
                self._learn(kind, interception, forward, args, kwargs, latents)
        track = self._new_track(self._facts[kind], latents)
        track.freshness = self._freshness
        self._tracks.append((kind, track))
        return track

    def check_number_of_calls(self, num_calls: int, step: int) -> None:
        """Every step must call the model as often as the first."""
        if num_calls != len(self._tracks):
            raise GraphError(
                f"step {step} called the model {num_calls} times, the first step {len(self._tracks)} times: "
                "bands keep what was sent from step to step, and need the same calls in every step"
            )

    def _learn(
        self,
        kind: Any,
        interception: Interception,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        latents: Tensor,
    ) -> None:
        def look() -> Facts:
            with needing_memory("to be looked at, on all rows at once,", _WITHOUT_A_LOOK):
                facts = find_facts(interception, forward, args, kwargs, latents)
            Bands.split(latents.shape[-2], self._links.num_ranks, facts.unit, 0)
            return facts

        facts: Facts = self._links.broadcast_object(look)
        if self._verify:
            traffic = self._links.traffic.copy()
            self._compare(facts, interception, forward, args, kwargs, latents)
            self._links.traffic.bytes_sent = traffic.bytes_sent
            self._links.traffic.bytes_received = traffic.bytes_received
            self._links.traffic.messages_sent = traffic.messages_sent
        self._facts[kind] = facts

    def _compare(
        self,
        facts: Facts,
        interception: Interception,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        latents: Tensor,
    ) -> None:
        """One synchronous call against a plain one of rank 0; all ranks decide together.

        Where all rows at once do not fit into rank 0's memory, nothing is compared.
        """

        def on_bands() -> Any:
            call = BandCall(self._new_track(facts, latents), StepKind(0, True))
            with interception.also_watching(set(facts.embedders)), interception.running(call):
                return call.run(forward, args, kwargs)

        def plain() -> Any:
            with interception.running(None):
                return forward(*args, **kwargs)

        bands = self._new_track(facts, latents).bands
        tolerance = tolerance_of(interception.root, latents, convolves_parts=True)
        with failing_on(bands):
            result = on_bands()
        error: float = self._links.broadcast_object(lambda: error_beside(plain, result))
        if not error <= tolerance:
            whole: list[Profile] = []
            with contextlib.suppress(
                RuntimeError
            ):  # such as too little memory; then without a name
                whole = profiled(plain)
            name = first_difference(whole, profiled(on_bands), bands, tolerance)
            names = [self._links.broadcast_object(lambda: name)]
            self._links.finish()  # all ranks refuse together, with nothing under way
            raise refusal(error, tolerance, bands, names[0] or name)

    def _new_track(self, facts: Facts, latents: Tensor) -> Track:
        return Track(
            facts=facts,
            bands=Bands.split(
                latents.shape[-2], self._links.num_ranks, facts.unit, self._links.rank
            ),
            exchange=Exchange(self._links, self._calls_per_message, self._stopwatch),
            group_norm=self._group_norm,
            constants=Constants(facts.constant),
        )
