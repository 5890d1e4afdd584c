"""Clusters as JSON, as runs and `diffpipe profile` write them."""

import json
import re
from dataclasses import replace

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


@pytest.mark.parametrize("link", ["p2p", "all_reduce", "p2p_between_hosts"])
@pytest.mark.parametrize("key", ["bandwidth_bytes_per_s", "latency_s"])
def test_one_value_of_a_link_is_changed_alone(link, key):
    """History: a new latency made the rest of a measured link infinitely fast, without a word."""
    changed = MEASURED.changed({link: {key: 7.0}})
    assert changed == replace(MEASURED, **{link: replace(getattr(MEASURED, link), **{key: 7.0})})


def test_a_link_between_hosts_that_was_not_measured_is_changed_from_that_inside_one():
    changed = MEASURED.changed({"all_reduce_between_hosts": {"latency_s": 1.0}, "num_ranks": 8})
    between = replace(MEASURED.all_reduce, latency_s=1.0)
    assert changed == replace(MEASURED, num_ranks=8, all_reduce_between_hosts=between)


@pytest.mark.parametrize(
    ("ranks", "gigabytes_per_s"),
    [
        ((0, 8), 20),
        ((0, 1, 8, 9), 35),
        ((0, 1, 2, 3, 8), 20),
        (tuple(range(16)), 140),
        ((0, 7), 230),
    ],
)
def test_sums_between_hosts_run_over_the_adapters_of_their_ranks_alone(ranks, gigabytes_per_s):
    """History: two pipelines over two hosts, whose groups have one adapter a host, were planned with all eight."""
    inside, single, all_ranks = Link(230e9, 3e-5), Link(20e9, 2e-5), Link(140e9, 6e-5)
    cluster = Cluster(16, 8, None, inside, inside, single, all_ranks)
    n = len(ranks)
    ring_s = 2 * (n - 1) / n * 3e9 / (gigabytes_per_s * 1e9)
    latency_s = 3e-5 if ranks == (0, 7) else 6e-5
    found_s = cluster.all_reduce_among(ranks).all_reduce_s(3e9, n)
    assert found_s == pytest.approx(latency_s + ring_s)


def test_an_adapter_that_ranks_of_a_host_share_is_not_divided():
    """As gloo has it: one ring over all ranks is as fast as a message between hosts."""
    cluster = Cluster(4, 2, None, Link(3e9), Link(2e9), Link(1e9), Link(0.9e9))
    assert cluster.all_reduce_among((0, 2)) == Link(0.9e9)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"p2p": {"latency": 1}}, "unknown key 'p2p.latency'"),
        ({"p2p": 3}, "p2p: expected an object; got 3"),
    ],
)
def test_bad_changes_of_a_cluster(values, complaint):
    with pytest.raises(ConfigurationError, match=re.escape(complaint)):
        MEASURED.changed(values)
