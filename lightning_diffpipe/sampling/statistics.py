"""What a sampler counted while it ran: bytes and messages on the wire, seconds, spans."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lightning_diffpipe.planning.timeline import Span


@dataclass
class Traffic:
    """Bytes and messages of one rank, counted where they are sent and received, by kind.

    Attributes:
        bytes_sent: Payload bytes put on the wire.
        bytes_received: Payload bytes taken from it.
        messages_sent: Messages put on the wire.
    """

    bytes_sent: Counter[str] = field(default_factory=Counter)
    bytes_received: Counter[str] = field(default_factory=Counter)
    messages_sent: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        """Starts counting from zero."""
        self.bytes_sent.clear()
        self.bytes_received.clear()
        self.messages_sent.clear()

    def copy(self) -> Traffic:
        """A snapshot."""
        return Traffic(
            Counter(self.bytes_sent), Counter(self.bytes_received), Counter(self.messages_sent)
        )


@dataclass
class SamplingStatistics:
    """Of one request on one rank.

    Attributes:
        traffic: What this rank sent and received.
        step_s: Seconds from the end of one denoising step to the end of the next, on this rank.
        spans: What this rank did when, from the start of the request; waiting is not a span.
        total_s: Seconds of the whole request.
    """

    traffic: Traffic = field(default_factory=Traffic)
    step_s: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    total_s: float = 0.0
