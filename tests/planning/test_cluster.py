"""Clusters as JSON, as runs and `diffpipe profile` write them."""

import json
import re

import pytest

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.cluster import Cluster, Link

MEASURED = Cluster(
    4, 2, 80_000_000_000, Link(3e9, 1e-5, holds_sender=True), Link(2e9, 3e-5), Link(1e8, 1e-4)
)


@pytest.mark.parametrize(
    "cluster", [Cluster(1), Cluster(2, p2p=Link(latency_s=1e-6), device="a100"), MEASURED]
)
def test_clusters_round_trip(cluster):
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert "Infinity" not in cluster.to_json()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": "x"}, 'c.json: format: expected "diffpipe-cluster/1"; got "x"'),
        ({"num_ranks": 0}, "c.json: num_ranks: expected a whole number >= 1; got 0"),
        ({"ranks": 2}, "c.json: unknown key 'ranks'; known keys here: format, num_ranks"),
        ({"p2p": {"latency_s": -1}}, "c.json: p2p.latency_s: expected a number >= 0; got -1"),
    ],
)
def test_bad_cluster_files(changes, complaint):
    text = json.dumps({**json.loads(MEASURED.to_json()), **changes})
    with pytest.raises(ConfigurationError, match=re.escape(complaint)):
        Cluster.from_json(text, "c.json")
