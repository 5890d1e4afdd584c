"""The machines: how many ranks, how much memory, how fast the links between them.

Format `diffpipe-cluster/1`, what a run has measured; the same keys as in a Hydra group of `conf/cluster`:

    {"format": "diffpipe-cluster/1", "num_ranks": 2, "memory_bytes": 80000000000,
     "p2p": {"bandwidth_bytes_per_s": 3e9, "latency_s": 1e-5, "holds_sender": true},
     "all_reduce": {"bandwidth_bytes_per_s": 2e9, "latency_s": 3e-5}}

Ranks that differ are listed, one of 24 GB and one of 12 GB and half the speed: `"rank_memory_bytes": [24e9, 12e9],
"rank_speeds": [1, 0.5]`. What is left out has no limit: a link without a bandwidth is infinitely fast.
`all_reduce_between_hosts` is the bus bandwidth among all ranks; of groups with fewer ranks on a host it is scaled
down. `"device": "h100"` says what models on paper are timed on.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.codec import Node, read_fields, stored, write

FORMAT = "diffpipe-cluster/1"


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes to travel; infinitely fast by default.

    Attributes:
        bandwidth_bytes_per_s: Bytes per second in one direction; the other direction is as fast.
        latency_s: Seconds until a message of no length arrives.
        holds_sender: Whether the processor of the sending rank moves the message itself and can compute
            nothing meanwhile, as with gloo; a network adapter or a copy engine works by itself.
    """

    bandwidth_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    holds_sender: bool = False

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0 or not 0 <= self.latency_s < math.inf:
            raise ConfigurationError(
                f"a link needs a bandwidth > 0 and a latency >= 0; got "
                f"{self.bandwidth_bytes_per_s} bytes/s and {self.latency_s} s"
            )

    def seconds(self, num_bytes: float) -> float:
        """Returns the time for a message."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s

    def all_reduce_s(self, num_bytes: float, num_ranks: int) -> float:
        """Returns the time of an all-reduce over a ring: every byte passes `2 (n - 1) / n` times."""
        if num_ranks <= 1 or num_bytes <= 0:
            return 0.0
        passed = 2 * (num_ranks - 1) / num_ranks * num_bytes
        return self.latency_s + passed / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Cluster:
    """The ranks there are, numbered host by host, and the links between them.

    Attributes:
        ranks_per_host: None means one host.
        memory_bytes: Memory of one rank; None means that it is no limit.
        p2p: Between two ranks of one host.
        all_reduce: Among ranks of one host.
        p2p_between_hosts: Between two ranks of different hosts; None means like `p2p`.
        all_reduce_between_hosts: Among all ranks of several hosts; None means like `all_reduce`. Its bandwidth
            counts the adapters of all ranks of a host; see `all_reduce_among`.
        device: Name of the device of a rank, if known.
        rank_memory_bytes: Memory of every rank, if they differ; `memory_bytes` is that of the largest then.
        rank_speeds: Speed of every rank, as a share of that of the fastest, if they differ.
        host_bytes_per_s: Rate of copies from host memory to a rank's device while all ranks copy.
        host_memory_bytes: Memory of a host for what its ranks copy from there; None means that it is no limit.
    """

    num_ranks: int = stored(minimum=1)
    ranks_per_host: int | None = stored(None, minimum=1)
    memory_bytes: int | None = stored(None, minimum=1)
    p2p: Link = field(default_factory=Link)
    all_reduce: Link = field(default_factory=Link)
    p2p_between_hosts: Link | None = None
    all_reduce_between_hosts: Link | None = None
    device: str | None = None
    rank_memory_bytes: tuple[int, ...] = stored((), minimum=1)
    rank_speeds: tuple[float, ...] = ()
    host_bytes_per_s: float = math.inf
    host_memory_bytes: int | None = stored(None, minimum=1)

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or (self.ranks_per_host is not None and self.ranks_per_host < 1):
            raise ConfigurationError(
                f"a cluster needs at least one rank, and one rank per host; got "
                f"num_ranks={self.num_ranks}, ranks_per_host={self.ranks_per_host}"
            )
        for name in ("rank_memory_bytes", "rank_speeds"):
            if len(figures := getattr(self, name)) not in (0, self.num_ranks):
                raise ConfigurationError(
                    f"{name} has {len(figures)} numbers, but there are {self.num_ranks} ranks (num_ranks); give "
                    "one for each"
                )
        if self.rank_speeds and not 0 < min(self.rank_speeds) <= max(self.rank_speeds) == 1:
            raise ConfigurationError(
                "rank_speeds are shares of the speed of the fastest rank, which has 1; got "
                f"{list(self.rank_speeds)}"
            )
        if not self.host_bytes_per_s > 0:
            raise ConfigurationError(
                f"host_bytes_per_s must be a number > 0; got {self.host_bytes_per_s}"
            )
        if self.rank_memory_bytes:
            object.__setattr__(self, "memory_bytes", max(self.rank_memory_bytes))

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Cluster:
        """Makes a cluster of plain values, such as a Hydra group; None leaves a value at its default.

        Raises:
            ConfigurationError: Names the key that is unknown, missing or out of range.
        """
        return read_fields(cls, Node(dict(values), "", ConfigurationError, "cluster"))

    @classmethod
    def from_json(cls, text: str, source: str = "cluster") -> Cluster:
        """Reads `diffpipe-cluster/1`; a ConfigurationError names `source` and the key that is unknown or wrong."""
        return read_fields(cls, Node.of_text(text, ConfigurationError, source, FORMAT), "format")

    def to_dict(self) -> dict[str, object]:
        """Returns plain values, as `from_dict` takes them; what is at its default is left out."""
        return dict(write(self))

    def changed(self, values: Mapping[str, object]) -> Cluster:
        """Returns the cluster with other values, as `from_dict` takes them; of a link, what is not given stays.

        A link between hosts that was as those inside a host differs from them by the values given.

        Raises:
            ConfigurationError: See `from_dict`.

        Example:
            >>> Cluster(2, p2p=Link(1e9, 1e-5)).changed({"p2p": {"latency_s": 2e-5}}).p2p.bandwidth_bytes_per_s
            1000000000.0
        """
        merged = self.to_dict()
        for key, value in values.items():
            old = merged.get(key, merged.get(key.removesuffix("_between_hosts")))
            both = isinstance(old, Mapping) and isinstance(value, Mapping)
            merged[key] = {**old, **value} if both else value  # type: ignore[dict-item]
        return Cluster.from_dict(merged)

    def to_json(self) -> str:
        """Writes `diffpipe-cluster/1`."""
        return json.dumps({"format": FORMAT, **self.to_dict()}, indent=1) + "\n"

    def memory_of(self, position: int, ranks_per_pipeline: int) -> int | None:
        """Returns the memory of the ranks at one position of all pipelines: of the smallest of them."""
        return min(self.rank_memory_bytes[position::ranks_per_pipeline], default=self.memory_bytes)

    def host_of(self, rank: int) -> int:
        """Returns the host of a rank."""
        return rank // self.ranks_per_host if self.ranks_per_host else 0

    def p2p_between(self, rank: int, peer: int) -> Link:
        """Returns the link between two ranks."""
        if self.p2p_between_hosts is not None and self.host_of(rank) != self.host_of(peer):
            return self.p2p_between_hosts
        return self.p2p

    def all_reduce_among(self, ranks: tuple[int, ...]) -> Link:
        """Returns the link that an all-reduce among these ranks runs at: its slowest part.

        A host has as many rings to other hosts as it has ranks, each over an adapter of its own. A
        group with fewer ranks on some host has so many rings less, but at least the adapter of one rank.

        Example:
            >>> cluster = Cluster(
            ...     16, 8, p2p_between_hosts=Link(20e9), all_reduce_between_hosts=Link(140e9)
            ... )
            >>> [cluster.all_reduce_among(g).bandwidth_bytes_per_s / 1e9 for g in ((0, 8), tuple(range(16)))]
            [20.0, 140.0]
        """
        counts = Counter(map(self.host_of, ranks))
        whole = self.all_reduce_between_hosts
        if whole is None or len(counts) == 1 or self.ranks_per_host is None:
            return self.all_reduce
        share = min(1.0, min(counts.values()) / self.ranks_per_host)
        single = self.p2p_between_hosts or self.p2p
        bandwidth = max(share * whole.bandwidth_bytes_per_s, single.bandwidth_bytes_per_s)
        return replace(whole, bandwidth_bytes_per_s=min(bandwidth, whole.bandwidth_bytes_per_s))
