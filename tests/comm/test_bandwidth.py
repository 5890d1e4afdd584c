import socket
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_diffpipe.comm import bandwidth as links
from lightning_diffpipe.comm.bandwidth import (
    _ranks_per_host,
    fit_link,
    measure_cluster,
    memory_bytes,
)
from lightning_diffpipe.comm.rendezvous import gloo_of_all_hosts
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.cluster import Cluster
from tests.ranks import run_ranks

SIZES = (1e3, 1e4, 1e5, 1e6, 1e7)


@pytest.mark.parametrize("bandwidth", [1e6, 1e9, 3e11])
@pytest.mark.parametrize("latency_s", [0.0, 1e-6, 1e-3])
def test_finds_the_line_again(bandwidth, latency_s):
    link = fit_link([(size, latency_s + size / bandwidth) for size in SIZES])
    assert link.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-6)
    assert link.latency_s == pytest.approx(latency_s, abs=1e-9 + 1e-6 * latency_s)


def test_a_small_message_counts_as_much_as_a_large_one():
    """One large outlier must not decide about the latency."""
    times = [(size, 1e-3 + size / 1e9) for size in SIZES]
    times[-1] = (times[-1][0], 1.3 * times[-1][1])
    assert fit_link(times).latency_s == pytest.approx(1e-3, rel=0.05)


def test_a_latency_is_never_negative_and_noise_is_no_bandwidth():
    assert fit_link([(1000, 1e-6), (1_000_000, 1e-2)]).latency_s == 0.0
    flat = fit_link([(1000, 3e-3), (2000, 2e-3)])
    assert flat.bandwidth_bytes_per_s == float("inf")
    assert 2e-3 <= flat.latency_s <= 3e-3


def test_hosts_count_only_if_they_are_regular():
    assert _ranks_per_host(["a", "a"]) is None
    assert _ranks_per_host(["a", "a", "b", "b"]) == 2
    assert _ranks_per_host(["a", "b"]) == 1
    assert _ranks_per_host(["a", "a", "b"]) is None


def test_one_rank_has_no_links():
    cluster = measure_cluster(None, torch.device("cpu"))
    assert cluster == Cluster(1, host_bytes_per_s=cluster.host_bytes_per_s)
    assert 1e8 < cluster.host_bytes_per_s < 1e13


@pytest.mark.parametrize(("card_gib", "left_gib"), [(80, 80 * 0.92), (8, 7)])
def test_plans_do_not_get_the_whole_card(monkeypatch, card_gib, left_gib):
    """History: plans filled a card to its last byte, and the CUDA context did not fit beside them."""
    card = SimpleNamespace(total_memory=card_gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert memory_bytes(torch.device("cuda")) == pytest.approx(left_gib * (1 << 30))
    assert memory_bytes(torch.device("cpu")) is None


def _measure(rank):
    group = dist.new_group(backend="gloo")
    return measure_cluster(group, torch.device("cpu"), sizes=(1 << 10, 1 << 20), budget_s=0.2)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_get_the_same_cluster(world_size):
    clusters = run_ranks(_measure, world_size)
    assert all(cluster == clusters[0] for cluster in clusters)
    assert clusters[0].num_ranks == world_size
    assert clusters[0].ranks_per_host is None
    for link in (clusters[0].p2p, clusters[0].all_reduce):
        assert link.bandwidth_bytes_per_s > 1e6
        assert 0 <= link.latency_s < 1


def _measure_on(rank, hosts):
    """The cluster, and who took part in which messages: sizes of groups that were summed over, peers."""
    sums, peers = set(), set()
    all_reduce, send = dist.all_reduce, dist.send

    def counted_sum(buffer, group):
        sums.add(dist.get_world_size(group))
        return all_reduce(buffer, group=group)

    def counted_send(buffer, peer, **options):
        peers.add(peer)
        return send(buffer, peer, **options)

    with (
        mock.patch.object(dist, "all_reduce", counted_sum),
        mock.patch.object(dist, "send", counted_send),
        mock.patch.object(socket, "gethostname", return_value=hosts[rank]),
    ):
        return _measure(rank), sums, peers


def _measure_on_hosts(rank):
    return _measure_on(rank, "aabb"), _measure_on(rank, "aaab")


@pytest.mark.distributed
def test_links_inside_and_between_hosts_are_distinguished():
    """History: the sum over all ranks counted inside a host, too; unequal hosts counted as one with NVLink."""
    regular, irregular = zip(*run_ranks(_measure_on_hosts, 4), strict=True)
    cluster = regular[0][0]
    assert all(found == cluster for found, _, _ in regular)
    assert (cluster.ranks_per_host, cluster.all_reduce_between_hosts is None) == (2, False)
    assert [sums for _, sums, _ in regular] == [{2, 4}, {2, 4}, {4}, {4}]
    assert regular[0][2] == {1, 2}
    cluster = irregular[0][0]
    assert (cluster.ranks_per_host, cluster.p2p_between_hosts) == (None, None)
    assert [sums for _, sums, _ in irregular] == [{4}] * 4
    assert irregular[0][2] == {3}


def _measure_on_unequal_gpus(rank):
    with mock.patch.object(links, "memory_bytes", return_value=(80 << 30, 40 << 30)[rank]):
        return _measure(rank).rank_memory_bytes


@pytest.mark.distributed
def test_each_gpu_has_its_own_limit():
    """History: the memory of rank 0 counted for all, and stages on smaller cards ran out of it."""
    assert run_ranks(_measure_on_unequal_gpus, 2) == [(80 << 30, 40 << 30)] * 2


def test_for_a_host_that_is_its_own_loopback_the_error_names_what_to_set(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu7")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    reason = "Gloo connectFullMesh failed with [pair.cc:144] no error"
    with (
        pytest.raises(ConfigurationError, match=r"\(gpu7\).*127\.0\.1\.1.*GLOO_SOCKET_IFNAME"),
        gloo_of_all_hosts(),
    ):
        raise RuntimeError(reason)
    with pytest.raises(RuntimeError, match="another"), gloo_of_all_hosts():
        raise RuntimeError("another")


@pytest.mark.parametrize(("bytes_per_s", "num_sizes"), [(1e6, 4), (1e9, 5)])
def test_large_messages_are_left_out_where_a_link_is_slow(bytes_per_s, num_sizes, monkeypatch):
    """History: over 10 Mbit/s, ranks measured for minutes before they planned."""
    monkeypatch.setattr(dist, "broadcast", lambda *arguments, **options: None)
    bench = object.__new__(links._LinkBench)
    bench._sizes, bench._device = links.SIZES, torch.device("cpu")
    bench._group, bench._ranks = None, [0]
    bench._timed_s = lambda run: run()
    times = bench._times(lambda size: 0.1 + size / bytes_per_s, lambda size: size, budget_s=1.0)
    assert [size for size, _ in times] == list(links.SIZES[:num_sizes])
