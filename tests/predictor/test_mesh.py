"""Meshes of ranks, and the rule that chooses a method.

The table of denoisers in `docs/sampling_models.md` says what happens: some rows of it, sampled again.
"""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_diffpipe import predictor
from lightning_diffpipe.comm.links import ProcessLinks
from lightning_diffpipe.comm.loopback import LoopbackNetwork
from lightning_diffpipe.errors import ConfigurationError, GraphError, LayoutError
from lightning_diffpipe.graph.placement import place_parameters
from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.sampling_rule import (
    SamplingCase,
    SamplingChoice,
    ranked_choices,
    reason_for,
)
from lightning_diffpipe.sampling import world
from lightning_diffpipe.sampling.methods import Chooser, MethodOptions
from lightning_diffpipe.sampling.pipefusion import SequenceParallel
from lightning_diffpipe.sampling.world import AXES, SamplingMesh, World, fit_mesh, fitting_meshes
from tests.predictor.write_models import PATH, request_of, row
from tests.zoo import CASES

sizes = st.integers(1, 4)


@given(st.builds(SamplingMesh, sizes, st.integers(1, 2), sizes, sizes))
def test_every_rank_is_in_one_group_of_each_axis(mesh):
    for axis in ("data", "guidance", "parallel", "sequence"):
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.num_ranks))
        for group in groups:
            places = [mesh.coordinates(rank) for rank in group]
            assert [place.pop(axis) for place in places] == list(range(getattr(mesh, axis)))
            assert all(place == places[0] for place in places)


@given(st.integers(1, 12), st.sampled_from(sorted(AXES)))
def test_fitting_meshes_have_all_ranks_and_are_all(num_ranks, method):
    meshes = list(fitting_meshes(num_ranks, AXES[method]))
    assert all(mesh.num_ranks == num_ranks for mesh in meshes)
    assert len(set(meshes)) == len(meshes)
    assert fit_mesh(num_ranks, method) in meshes


def test_a_mesh_that_does_not_fit_is_refused_with_those_that_do():
    with pytest.raises(ConfigurationError) as refused:
        fit_mesh(4, "distrifusion", guidance=2, parallel=4)
    assert str(refused.value) == (
        "method=distrifusion cannot use 4 ranks as guidance=2, parallel=4; these fit: parallel=4; "
        "guidance=2 x parallel=2; data=2 x parallel=2; data=2 x guidance=2; data=4"
    )


def test_ranks_of_a_stage_may_share_tokens():
    assert str(fit_mesh(8, "pipefusion", sequence=2)) == "parallel=4 x sequence=2"
    with pytest.raises(
        ConfigurationError, match=r"4 ranks as parallel=2, sequence=4; these fit: .*"
    ):
        fit_mesh(4, "pipefusion", parallel=2, sequence=4)


FAST, SLOW = Link(400e9, 5e-6), Link(1e9, 50e-6)
FLUX = SamplingCase(8, 1, 1, 28, convolves=False, bandwidth_bytes_per_s=1e9)
NVLINK = {"bandwidth_bytes_per_s": 400e9}
UNET = {"convolves": True, "num_branches": 2}
HEAVY = {"weight_bytes": 24 * 10**9} | NVLINK


@pytest.mark.parametrize(
    ("case", "method", "mesh", "why"),
    [
        ({"num_ranks": 1}, "single", "one rank", "there is one rank"),
        ({}, "pipefusion", "parallel=8", "links of 1 GB/s are slow (below 100)"),
        ({"device": "cpu"}, "sequence", "sequence=8", "links of 1 GB/s are fast (from 0.1)"),
        (NVLINK, "sequence", "sequence=8", "links of 400 GB/s are fast (from 100)"),
        ({"num_steps": 7}, "sequence", "sequence=8", "7 steps are too few for stale activations"),
        ({"num_branches": 2}, "pipefusion", "guidance=2 x parallel=4", "halves of guidance, and links"),
        ({"num_branches": 2, "num_ranks": 2}, "single", "guidance=2", "halves of guidance"),
        ({"num_branches": 2, "num_ranks": 3}, "pipefusion", "parallel=3", "links of"),
        (UNET, "distrifusion", "guidance=2 x parallel=4", "halves of guidance, and it convolves over rows"),
        (UNET | NVLINK, "distrifusion", "guidance=2 x parallel=4", "halves of guidance, and it convolves"),
        (UNET | {"num_steps": 4}, "synchronous", "guidance=2 x parallel=4", "halves of guidance, and 4 steps"),
        ({"num_samples": 8}, "single", "data=8", "8 samples are divided"),
        ({"num_samples": 16} | UNET, "single", "data=8", "16 samples are divided"),
        ({"num_samples": 4} | UNET, "single", "data=4 x guidance=2", "4 samples are divided, and halves"),
        ({"num_samples": 6}, "pipefusion", "data=2 x parallel=4", "6 samples are divided, and links"),
        ({"num_samples": 3}, "pipefusion", "parallel=8", "links of"),  # as even as it goes
        # 24 GB of weights and a fifth of the memory for activations.
        (HEAVY | {"memory_bytes": 31 * 10**9}, "sequence", "sequence=8", "links of"),
        (HEAVY | {"memory_bytes": 16 * 10**9}, "pipefusion", "parallel=8", "16 GB left for 24 GB of weights"),
        (HEAVY | {"memory_bytes": 16 * 10**9, "num_branches": 2}, "pipefusion", "guidance=2 x parallel=4", "ha"),
        (HEAVY | {"memory_bytes": 5 * 10**9, "num_branches": 2}, "pipefusion", "parallel=8", "5 GB left"),
        (HEAVY | {"memory_bytes": 9 * 10**9, "num_samples": 8}, "pipefusion", "data=2 x parallel=4", "8 samples"),
        (HEAVY | {"memory_bytes": 1}, "sequence", "sequence=8", "1e-09 GB left"),  # nothing fits
    ],
)  # fmt: skip
def test_the_rule(case, method, mesh, why):
    case = replace(FLUX, **case)
    first = ranked_choices(case)[0]
    assert (first.method, str(SamplingMesh(**first.axes))) == (method, mesh)
    reason = reason_for(first, case)
    assert reason.removeprefix(f"{method}: ").startswith(why)
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("given", "expected"), [(None, 16), (3, 3)], ids=["two for each stage", "given"]
)
def test_the_rule_takes_patches_that_keep_ranks_busy(given, expected):
    assert ranked_choices(FLUX, given)[0].num_patches == expected


def test_few_steps_and_little_memory_are_divided_exactly():
    """One patch on the stages of PipeFusion is what one process computes."""
    case = replace(FLUX, num_steps=4, weight_bytes=24 * 10**9, memory_bytes=16 * 10**9)
    first = ranked_choices(case)[0]
    assert (first.method, first.parallel, first.num_patches) == ("pipefusion", 8, 1)


@pytest.mark.slow
@given(
    st.builds(
        SamplingCase,
        st.sampled_from([1, 2, 3, 4, 6, 8, 12]), st.integers(1, 5), st.integers(1, 2), st.integers(1, 30),
        st.booleans(), st.sampled_from([1e9, 400e9]), weight_bytes=st.just(8),
        memory_bytes=st.sampled_from([None, 5, 50]),
    )
)  # fmt: skip
def test_the_rule_knows_every_way_once_and_ends_with_what_always_works(case):
    ranked = ranked_choices(case)
    assert len(set(ranked)) == len(ranked)
    for each in ranked:
        mesh = SamplingMesh(**each.axes)
        assert mesh in (*fitting_meshes(case.num_ranks, AXES[each.method]), SamplingMesh())
    exact = [
        c for c in ranked if c.num_patches == 1 or c.method not in ("pipefusion", "distrifusion")
    ]
    if case.num_steps < 8:
        assert ranked[: len(exact)] == exact
    if case.memory_bytes is None:
        assert exact[-1] == SamplingChoice("single")


class FakeCall:
    """What a choice asks of a request: one sample, without guidance."""

    num_shares, branches, timesteps, phases, mixes = 1, 1, range(28), (), frozenset()
    pipeline = SimpleNamespace(arguments={})

    def refuse_steps(method):
        pass

    def refuse_rows(warmup_steps):
        pass


def test_what_a_request_cannot_be_divided_by_is_not_tried():
    """No groups are made, nor weights read, to find out."""

    class Unlike(FakeCall):
        def refuse_steps(method):
            raise ConfigurationError("the steps of P call its unet 1, 2 times; leave that out")

    chosen = chooser(num_ranks=2).choose(Unlike)
    assert (chosen.method, str(chosen.mesh)) == ("single", "one rank")
    assert chosen.reason == (
        "single: on one rank; "
        + "; ".join(
            f"no {method} on {mesh}: the steps of P call its unet 1, 2 times"
            for method, mesh in [
                ("pipefusion", "parallel=2"), ("sequence", "sequence=2"),
                ("distrifusion", "parallel=2"), ("synchronous", "parallel=2"),
            ]
        )
    )  # fmt: skip


def chooser(link=SLOW, num_ranks=8, memory=None, **options):
    further = options.pop("further", {})
    wishes = MethodOptions("auto", further=further, **options)
    model = torch.nn.Conv2d(3, 3, 2, stride=2)  # an embedding of patches
    return Chooser(model, link, torch.device("cuda"), num_ranks, memory, wishes)


@pytest.mark.parametrize(
    ("wish", "method", "mesh"),
    [
        ({}, "pipefusion", "parallel=8"),
        ({"link": FAST}, "sequence", "sequence=8"),
        ({"link": FAST, "num_patches": 8}, "sequence", "sequence=8"),  # has no patches
        ({"sequence": 8}, "sequence", "sequence=8"),
        ({"parallel": 2, "sequence": 4}, "pipefusion", "parallel=2 x sequence=4"),
        ({"data": 1, "parallel": 1, "sequence": 1}, "single", "one rank"),
        ({"further": {"group_norm": "stale"}}, "distrifusion", "parallel=8"),
        ({"further": {"sequence_mode": "ring"}, "link": FAST}, "pipefusion", "parallel=8"),
    ],
)
def test_a_wish_is_kept(wish, method, mesh):
    chosen = chooser(**wish).choose(FakeCall)
    assert (chosen.method, str(chosen.mesh)) == (method, mesh)


def test_a_wish_that_nothing_fits_is_refused_with_what_there_is():
    with pytest.raises(ConfigurationError) as refused:
        chooser(num_ranks=2, data=2, parallel=2).choose(FakeCall)
    assert str(refused.value) == (
        "method=auto cannot use 2 ranks as data=2, parallel=2; these fit this request, among others: "
        "pipefusion on parallel=2; sequence on sequence=2; distrifusion on parallel=2; "
        "synchronous on parallel=2; single on one rank"
    )


def test_patches_and_warm_up_are_taken_as_wished():
    assert chooser().choose(FakeCall).warmup_steps == 1
    assert (
        chooser(warmup_steps=None, further={"group_norm": "own"}).choose(FakeCall).warmup_steps == 4
    )
    chosen = chooser(num_patches=5, warmup_steps="auto").choose(FakeCall)
    assert (chosen.num_patches, chosen.warmup_steps) == (5, "auto")


def test_what_was_refused_is_left_out_and_named():
    asked = chooser(num_ranks=4)
    first = asked.choose(FakeCall)
    asked.refuse(first, ConfigurationError("rows do not divide: 7 of them"))
    then = asked.choose(FakeCall)
    assert [(c.method, c.num_patches) for c in (first, then)] == [("pipefusion", n) for n in (8, 4)]
    asked.refuse(then, GraphError("tokens are mixed; draw it alone"))
    last = asked.choose(FakeCall)
    assert last.method == "sequence"
    assert last.reason.endswith(
        "; no pipefusion on parallel=4: rows do not divide; no pipefusion: tokens are mixed"
    )
    while last.mesh.num_ranks > 1:
        asked.refuse(last, ConfigurationError("not so"))
        last = asked.choose(FakeCall)
    assert last.method == "single"
    asked.refuse(last, ConfigurationError("nor so"))
    with pytest.raises(ConfigurationError, match="nor so"):
        asked.choose(FakeCall)
    assert asked.choose(FakeCall) == first, "it may be tried again"


def test_u_nets_and_weights_to_load_are_seen():
    asked = chooser(memory=10**6)
    asked._model = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3))
    assert asked.choose(FakeCall).method == "distrifusion"
    asked._model = torch.nn.Linear(400, 1000, bias=False)
    place_parameters(asked._model, (), "cpu")
    assert "0.001 GB left for 0.0016 GB of weights" in asked.choose(FakeCall).reason


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_links_are_measured_where_messages_of_denoisers_travel(backend, monkeypatch):
    measured = []

    def measure_cluster(group, device, budget_s):
        measured.append((group, device.type))
        return Cluster(4, ranks_per_host=2, p2p=FAST, p2p_between_hosts=SLOW)

    links = object.__new__(ProcessLinks)
    links.control, links.device = "gloo", torch.device("cuda")
    monkeypatch.setattr(world, "measure_cluster", measure_cluster)
    monkeypatch.setattr(world.dist, "new_group", lambda backend: backend)
    monkeypatch.setattr(world.torch.cuda, "device", nullcontext)
    monkeypatch.setattr(world.dist, "destroy_process_group", lambda group: None)
    assert World(links, backend).measured_link() == SLOW  # several hosts
    assert measured == [(backend, "cuda" if backend == "nccl" else "cpu")]


@pytest.mark.parametrize(
    ("method", "expected"), [("pipefusion", 1), ("distrifusion", 4), ("naive", 0), ("sequence", 1)]
)
def test_no_warm_up_asked_for_is_what_suits_the_method(method, expected):
    assert MethodOptions(method, warmup_steps=None).synchronous_steps == expected
    assert MethodOptions(method, warmup_steps=2).synchronous_steps == 2


@pytest.mark.parametrize(
    ("wish", "current", "expected"),
    [(None, 0, 2), ("cuda", 0, 2), ("cuda", 1, 1), ("cuda:0", 1, 0), ("cpu", 1, None)],
)
@pytest.mark.parametrize("world_size", ["1", "8"])
def test_every_process_takes_a_gpu_of_its_own(wish, current, expected, world_size, monkeypatch):
    """History: under torchrun all ranks took the first GPU, which NCCL refuses."""
    chosen = []
    monkeypatch.setenv("LOCAL_RANK", "6")
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    for name, answer in [
        ("is_available", lambda: True), ("device_count", lambda: 4),
        ("current_device", lambda: current), ("set_device", chosen.append),
    ]:  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, answer)
    device = predictor._device(wish)
    assert device.index == expected
    sets = wish in (None, "cuda") or (wish == "cuda:0" and world_size == "8")
    assert chosen == ([device] if sets else [])


NAMES = [
    "PixArtTransformer2DModel",  # yes to all
    "WanTransformer3DModel",  # a video
    "LuminaNextDiT2DModel",
    "ZImageTransformer2DModel",  # pads the image with text, once
    "HunyuanVideoTransformer3DModel token replace",  # not refused, and wrong
    "OmniGenTransformer2DModel",  # the probe admits it, attention does not
    "PRXTransformer2DModel",  # text does not attend itself, but is divided in a ring
    "UNet2DModel",
]


def test_text_that_does_not_attend_itself_is_refused_by_ulysses_and_the_ring_is_named():
    """History: heads were sent as if text had queries, and ended in an error of torch."""
    requests = [request_of(CASES["PRXTransformer2DModel"]) for _ in range(2)]

    def rank(links):
        return SequenceParallel(requests[links.rank].model, links, mode="ulysses").sample(
            requests[links.rank]
        )

    with pytest.raises(
        LayoutError, match=r"attends from .* which Ulysses does not divide; use ring"
    ):
        LoopbackNetwork(2).run(rank)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_the_table(name):
    assert row(CASES[name]) in PATH.read_text().splitlines()
