"""What DistriFusion sends: bytes and messages of one rank and request, as pure arithmetic.

Three kinds of operators see beyond a band. With N bands of r_i rows out of R, batch B, and e bytes per element, one
of each makes rank i send

    key_value     (N - 1) 2 B l C e r_i / R      keys and values of its share of l tokens of width C
    halo          (above_{i+1} + below_{i-1}) B C W e    border rows, to neighbours only
    statistics    (N - 1) 2 B G e                 variance and mean of G groups
    prediction    (N - 1) n e r_i / R             its share of n elements, in every step

Of S steps, W wait for data of the same step, and each other one but the last sends for the next: data travel S - 1
times, or S times if W = S. In synchronous steps each operator sends a message to each peer; in displaced
ones a message holds up to k operators of one kind.

Source:
    DistriFusion, Li et al. (2024), https://arxiv.org/abs/2402.19481; its all-gather of halos sends both
    edges to everybody, which is N - 1 times as much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_diffpipe.errors import ConfigurationError

Kind = Literal["key_value", "halo", "statistics"]
_KINDS: tuple[Kind, ...] = ("key_value", "halo", "statistics")


@dataclass(frozen=True, slots=True)
class BandOperator:
    """One operator of the forward that sees beyond its band.

    Attributes:
        kind: What it sends.
        num_bytes: Of what all bands have together for `key_value`, of one row for `halo`, of the moments
            of one band for `statistics`.
        above: Rows of the upper neighbour that a band reads, for `halo`.
        below: Rows of the lower neighbour.
    """

    kind: Kind
    num_bytes: int
    above: int = 0
    below: int = 0

    @classmethod
    def attention(cls, samples: int, tokens: int, width: int, element_bytes: int) -> BandOperator:
        """Self- or joint attention over `tokens` of the image, keys and values `width` wide."""
        return cls("key_value", 2 * samples * tokens * width * element_bytes)

    @classmethod
    def convolution(
        cls, samples: int, channels: int, columns: int, above: int, below: int, element_bytes: int
    ) -> BandOperator:
        """A convolution of `channels` that reads rows `above` and `below` its band."""
        return cls("halo", samples * channels * columns * element_bytes, above, below)

    @classmethod
    def norm(cls, samples: int, groups: int, element_bytes: int = 4) -> BandOperator:
        """Group norm; moments are sent in at least float32."""
        return cls("statistics", 2 * samples * groups * element_bytes)

    def sent_to(self, peer: int, rank: int, rows: Sequence[int]) -> int:
        """Bytes `rank` sends to `peer`."""
        if self.kind == "key_value":
            return self.num_bytes * rows[rank] // sum(rows)
        if self.kind == "statistics":
            return self.num_bytes
        return self.num_bytes * {rank - 1: self.below, rank + 1: self.above}.get(peer, 0)


@dataclass(frozen=True, slots=True)
class DistriFusionPlan:
    """One request on paper.

    Attributes:
        operators: Of one call of the model, in order.
        prediction_bytes: Of one whole prediction.
        rows: Of each band.
        num_steps: S.
        warmup_steps: W.
        mode: "displaced", "synchronous" or "naive".
        group_norm: Rule in displaced steps.
        calls_per_message: k.
        num_calls: Calls of the model in a step.

    Example:
        >>> norm = BandOperator.norm(samples=2, groups=32)
        >>> plan = DistriFusionPlan((norm,), 4096, (8, 8), num_steps=10, warmup_steps=2)
        >>> dict(plan.bytes_sent(0)), dict(plan.messages_sent(0))
        ({'statistics': 4608, 'prediction': 20480}, {'statistics': 9, 'prediction': 10})
    """

    operators: tuple[BandOperator, ...]
    prediction_bytes: int
    rows: tuple[int, ...]
    num_steps: int
    warmup_steps: int
    mode: Literal["displaced", "synchronous", "naive"] = "displaced"
    group_norm: str = "predicted"
    calls_per_message: int = 16
    num_calls: int = 1

    def __post_init__(self) -> None:
        if self.num_steps < 1 or self.warmup_steps < 0:
            raise ConfigurationError(
                f"{self.num_steps} steps, {self.warmup_steps} of them synchronous: choose at least 1 and 0"
            )

    @property
    def num_ranks(self) -> int:
        """N, one for each band."""
        return len(self.rows)

    def synchronous_steps(self, kind: Kind) -> int:
        """Steps in which operators of a kind wait for data of the same step."""
        if self.mode == "synchronous":
            return self.num_steps
        if self.mode == "displaced" and kind == "statistics" and self.group_norm == "synchronous":
            return self.num_steps
        return min(self.warmup_steps, self.num_steps)

    def displaced_sends(self, kind: Kind) -> int:
        """Steps in which operators of a kind send for the next step."""
        if self.mode != "displaced":
            return 0
        if kind == "statistics" and self.group_norm == "separate":
            return 0
        return max(self.num_steps - self.synchronous_steps(kind) - 1, 0)

    def bytes_sent(self, rank: int) -> Counter[str]:
        """Bytes by kind, of one rank, over the request."""
        total: Counter[str] = Counter()
        for operator in self.operators:
            sends = self.synchronous_steps(operator.kind) + self.displaced_sends(operator.kind)
            for peer in self._peers(rank):
                total[operator.kind] += sends * operator.sent_to(peer, rank, self.rows)
        share = self.prediction_bytes * self.rows[rank] // sum(self.rows)
        total["prediction"] = self.num_steps * (self.num_ranks - 1) * share
        return +Counter({kind: self.num_calls * size for kind, size in total.items()})

    def messages_sent(self, rank: int) -> Counter[str]:
        """Messages by kind, of one rank, over the request."""
        total: Counter[str] = Counter()
        for kind in _KINDS:
            chosen = [operator for operator in self.operators if operator.kind == kind]
            for peer in self._peers(rank):
                sends = [operator.sent_to(peer, rank, self.rows) > 0 for operator in chosen]
                k = self.calls_per_message
                ranges = [any(sends[i : i + k]) for i in range(0, len(sends), k)]
                total[kind] += self.synchronous_steps(kind) * sum(sends)
                total[kind] += self.displaced_sends(kind) * sum(ranges)
        total["prediction"] = self.num_steps * (self.num_ranks - 1)
        return +Counter({kind: self.num_calls * count for kind, count in total.items()})

    def _peers(self, rank: int) -> list[int]:
        return [peer for peer in range(self.num_ranks) if peer != rank]
