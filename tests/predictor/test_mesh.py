"""Meshes of ranks, and the choice of a method: pure arithmetic."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_diffpipe import predictor
from lightning_diffpipe.comm.links import ProcessLinks
from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.sampling_choice import (
    MIN_STEPS,
    DenoiserProfile,
    Refusal,
    SamplingWish,
    candidates,
    choose_sampling,
    memory_of_rank,
)
from lightning_diffpipe.sampling import world
from lightning_diffpipe.sampling.auto import options_of, wish_of
from lightning_diffpipe.sampling.mesh import AXES, SamplingMesh, fit_mesh, fitting_meshes
from lightning_diffpipe.sampling.methods import MethodOptions
from lightning_diffpipe.sampling.world import World

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


# Flux-like: 57 blocks, 4608 tokens of 3072 numbers in bf16; a step takes a second.
HIDDEN = 4608 * 3072 * 2
LARGE = DenoiserProfile(
    step_s=1.0,
    glue_s=0.005,
    num_samples=1,
    branches=1,
    num_blocks=57,
    num_units=64,
    cut_bytes=HIDDEN,
    latent_bytes=4096 * 64 * 2,
    key_value_bytes=57 * 2 * HIDDEN,
    sequence_bytes=57 * 4 * HIDDEN,
    num_attention=57,
)
FAST, SLOW = Link(400e9, 5e-6), Link(1e9, 50e-6)


@pytest.mark.parametrize(
    ("profile", "link", "num_ranks", "num_steps", "expected"),
    [
        (LARGE, FAST, 8, 28, "sequence"),  # exact, and nearly as fast: NVLink
        (LARGE, SLOW, 8, 28, "pipefusion"),  # Ethernet
        (LARGE, SLOW, 8, 4, "sequence"),  # a few-step model
        (LARGE, SLOW, 1, 28, "single"),
        (replace(LARGE, num_samples=8), SLOW, 8, 28, "single"),  # one prompt each
        (replace(LARGE, num_blocks=0), Link(20e9, 1e-5), 8, 28, "distrifusion"),  # a U-Net
        (replace(LARGE, branches=2), SLOW, 2, 28, "single"),  # halves of guidance are exact
    ],
)
def test_the_choice_is_what_published_measurements_say(
    profile, link, num_ranks, num_steps, expected
):
    assert choose_sampling(profile, link, num_ranks, num_steps).method == expected


# As many ranks as blocks would leave over; more heads than ranks, unless said otherwise.
SHALLOW = replace(LARGE, num_blocks=4, num_heads=24, num_key_heads=24)
GUIDED = replace(LARGE, branches=2, warmup_microbatches=2)
UNET = replace(GUIDED, num_blocks=0, halo_bytes=HIDDEN // 8, num_norms=60)


@pytest.mark.parametrize(
    ("profile", "link", "num_ranks", "num_steps", "method", "mesh"),
    [
        (LARGE, SLOW, 8, 28, "pipefusion", "parallel=8"),
        (SHALLOW, Link(5e9, 2e-5), 8, 50, "pipefusion", "parallel=4 x sequence=2"),
        (GUIDED, SLOW, 8, 28, "pipefusion", "guidance=2 x parallel=4"),
        (
            replace(SHALLOW, branches=2),
            Link(5e9, 2e-5),
            16,
            50,
            "pipefusion",
            "guidance=2 x parallel=4 x sequence=2",
        ),
        (GUIDED, FAST, 8, 28, "sequence", "guidance=2 x sequence=4"),
        (UNET, Link(20e9, 1e-5), 8, 28, "distrifusion", "guidance=2 x parallel=4"),
        (UNET, SLOW, 2, 28, "single", "guidance=2"),
        (replace(GUIDED, num_samples=2), SLOW, 16, 28, "pipefusion", "data=2 x guidance=2 x parallel=4"),
        # Two halves and two prompts leave nothing to share, and nothing beats that.
        (replace(GUIDED, num_samples=2), SLOW, 4, 28, "single", "data=2 x guidance=2"),
    ],
)  # fmt: skip
def test_every_combination_wins_somewhere(profile, link, num_ranks, num_steps, method, mesh):
    chosen = choose_sampling(profile, link, num_ranks, num_steps)
    assert (chosen.method, chosen.mesh) == (method, mesh), chosen.reason
    assert str(SamplingMesh(**chosen.axes)) == mesh
    assert SamplingMesh(**chosen.axes).num_ranks == num_ranks
    # The others are named with what they would take.
    assert chosen.reason.startswith(f"{method} is expected to take {chosen.seconds:.3g} s")


def test_a_mesh_of_several_axes_is_justified_by_the_next_best():
    reason = choose_sampling(GUIDED, SLOW, 8, 28).reason
    assert "on guidance=2 x parallel=4, since other meshes take longer: " in reason
    assert "parallel=8 " in reason


def test_more_ranks_than_heads_attend_in_a_ring():
    few = replace(LARGE, num_heads=2, num_key_heads=2)
    chosen = choose_sampling(few, FAST, 8, 4)
    assert (chosen.method, chosen.ranks) == ("sequence", 8)
    assert options_of(chosen) == {"mode": "ring"}
    assert "in a ring, since heads cannot be spread over 8 ranks" in chosen.reason
    # 24 heads in 8 groups go round on 8 ranks, not on 3.
    grouped = replace(few, num_heads=24, num_key_heads=8)
    assert grouped.spreads_heads(8)
    assert not grouped.spreads_heads(3)
    shallow = replace(SHALLOW, num_heads=3, num_key_heads=3)
    found = candidates(shallow, SLOW, 16, 28)
    inside = {c.sequence: c.sequence_mode for c in found if c.method == "pipefusion"}
    assert inside == {4: "ring", 8: "ring"}  # 16 ranks on 4 or 2 stages


def test_patches_have_a_row_for_every_rank_of_a_stage():
    low = replace(SHALLOW, num_units=9)
    for choice in candidates(low, SLOW, 8, 28):
        if choice.method == "pipefusion":
            assert choice.num_patches * choice.sequence <= 9


# 24 GB of weights, of which 22 are in blocks.
HEAVY = replace(LARGE, weight_bytes=24 * 10**9, block_bytes=22 * 10**9, activation_bytes=10**9)


@pytest.mark.parametrize(
    ("memory_gb", "method", "said"),
    [
        (None, "sequence", ""),
        (80, "sequence", ""),
        # 24.1 GB with all weights, 27.4 with all keys and values; an eighth of the blocks is 6.5 GB in all.
        (25, "sequence", "; a rank has 25 GB left, too little for distrifusion 27.4 GB"),
        (
            16,
            "pipefusion",
            "; a rank has 16 GB left, too little for distrifusion 27.4 GB, sequence",
        ),
        (2, "pipefusion", ": what needs least is taken"),
    ],
)
def test_what_does_not_fit_a_rank_is_left_out(memory_gb, method, said):
    limit = None if memory_gb is None else memory_gb * 10**9
    chosen = choose_sampling(HEAVY, FAST, 8, 28, limit)
    assert chosen.method == method
    assert said in chosen.reason
    assert said or "a rank has" not in chosen.reason


def test_more_stages_need_less_memory_where_others_hold_everything():
    needs = {(c.method, c.mesh): memory_of_rank(HEAVY, c) for c in candidates(HEAVY, FAST, 8, 28)}
    assert (
        needs["pipefusion", "parallel=8"]
        < needs["pipefusion", "parallel=4 x sequence=2"]
        < needs["pipefusion", "parallel=2 x sequence=4"]
        < needs["sequence", "sequence=8"]
        < needs["single", "one rank"]
    )
    # Keys and values of all bands.
    displaced, waited_for = needs["distrifusion", "parallel=8"], needs["synchronous", "parallel=8"]
    step, kept = HEAVY.activation_bytes, HEAVY.key_value_bytes
    assert displaced == HEAVY.weight_bytes + step // 8 + kept
    # Rank 0 looks at all rows before they become bands.
    assert waited_for == needs["single", "one rank"] == HEAVY.weight_bytes + step
    few_keys = replace(HEAVY, key_value_bytes=step // 2)
    bands = next(c for c in candidates(few_keys, FAST, 8, 28) if c.method == "distrifusion")
    assert memory_of_rank(few_keys, bands) == waited_for


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
    ("link", "wish", "expected"),
    [
        (SLOW, SamplingWish(), ("pipefusion", "guidance=2 x parallel=4")),
        (SLOW, SamplingWish(guidance=1), ("pipefusion", "parallel=8")),
        (SLOW, SamplingWish(guidance=2, sequence=2), ("pipefusion", "guidance=2 x parallel=2 x sequence=2")),
        (SLOW, SamplingWish(sequence=8), ("sequence", "sequence=8")),
        (SLOW, SamplingWish(data=1, parallel=1, sequence=1), ("single", "one rank")),
        (Link(20e9, 1e-5), SamplingWish(methods=("distrifusion",), guidance=1), ("distrifusion", "parallel=8")),
        (FAST, SamplingWish(), ("sequence", "guidance=2 x sequence=4")),
        (FAST, SamplingWish(num_patches=8), ("sequence", "guidance=2 x sequence=4")),  # has no patches
        (FAST, SamplingWish(parallel=2, sequence=2), ("pipefusion", "guidance=2 x parallel=2 x sequence=2")),
    ],
)  # fmt: skip
def test_a_wish_is_kept(link, wish, expected):
    chosen = choose_sampling(GUIDED, link, 8, 28, wish=wish)
    assert (chosen.method, chosen.mesh) == expected, chosen.reason


def test_patches_warm_up_and_mode_are_taken_as_wished():
    wish = SamplingWish(num_patches=5, warmup_steps=3, sequence_mode="ring")
    found = list(candidates(GUIDED, SLOW, 8, 28, wish))
    assert {c.num_patches for c in found if c.method == "pipefusion"} == {5}
    assert {c.warmup_steps for c in found if c.method in ("pipefusion", "distrifusion")} == {3}
    assert {c.sequence_mode for c in found} == {"", "ring"}
    # More synchronous steps take longer, and not longer than all steps.
    bands = SamplingWish(methods=("distrifusion",), guidance=1)
    times = [
        choose_sampling(GUIDED, SLOW, 8, 28, wish=replace(bands, warmup_steps=w)).seconds
        for w in (0, 3, 28, 99)
    ]
    assert times[0] < times[1] < times[2] == times[3]


def test_displaced_bands_put_several_operators_into_a_message():
    """57 calls of attention and 60 norms: 117 messages to a peer while waited for, 4 + 4 otherwise."""
    late = Link(latency_s=1.0)

    def step_s(method, **wish):
        found = candidates(UNET, late, 2, 28, SamplingWish(methods=(method,), guidance=1, **wish))
        (choice,) = (choice for choice in found if choice.ranks == 2)
        return choice.seconds / 28

    prediction_s = 1.0
    assert step_s("synchronous") == pytest.approx(1.1 / 2 + 117 + prediction_s)
    assert step_s("distrifusion", warmup_steps=0) == pytest.approx(8 + prediction_s)


@pytest.mark.parametrize(("ranks", "num_neighbours"), [(2, 1), (4, 2), (8, 2)])
def test_bands_tell_their_neighbours_of_every_convolution(ranks, num_neighbours):
    """History: the rows of 50 convolutions took only as long as their bytes, however late messages were."""
    late = Link(latency_s=1.0)

    def seconds(profile, method):
        wish = SamplingWish(methods=(method,), guidance=1, warmup_steps=0)
        found = candidates(profile, late, ranks, 28, wish)
        return next(choice.seconds for choice in found if choice.ranks == ranks) / 28

    convolving = replace(UNET, num_halos=50)
    for method, messages in (("synchronous", 50), ("distrifusion", 4)):
        more_s = seconds(convolving, method) - seconds(UNET, method)
        assert more_s == pytest.approx(messages * num_neighbours)


def test_a_wish_that_nothing_fits_is_refused_with_what_there_is():
    with pytest.raises(ConfigurationError) as refused:
        choose_sampling(UNET, SLOW, 2, 28, wish=SamplingWish(data=2, parallel=2))
    assert str(refused.value) == (
        "method=auto cannot use 2 ranks as data=2, parallel=2; these fit this request: "
        "synchronous on parallel=2; distrifusion on parallel=2; single on guidance=2, one rank"
    )


def test_more_patches_than_rows_leave_pipefusion_out_and_are_named():
    chosen = choose_sampling(LARGE, SLOW, 8, 28, wish=SamplingWish(num_patches=65))
    assert chosen.method != "pipefusion"
    assert "; no pipefusion: num_patches=65, but there are 64 rows" in chosen.reason


def test_what_was_refused_is_not_chosen_again_and_named():
    mixes = Refusal("pipefusion", "tokens are mixed")
    chosen = choose_sampling(GUIDED, SLOW, 8, 28, wish=SamplingWish(refused=(mixes,)))
    uneven = Refusal(chosen.method, "rows do not divide", chosen.axes)
    then = choose_sampling(GUIDED, SLOW, 8, 28, wish=SamplingWish(refused=(mixes, uneven)))
    assert "pipefusion" not in (chosen.method, then.method)
    assert (chosen.method, chosen.mesh) != (then.method, then.mesh)
    assert then.seconds >= chosen.seconds
    reasons = f"; no pipefusion: tokens are mixed; no {chosen.method} on {chosen.mesh}: rows do not divide"
    assert then.reason.endswith(reasons)


def test_options_that_are_given_become_wishes():
    options = MethodOptions("auto", 3, 2, data=1, further={"sequence_mode": "ring"})
    expected = SamplingWish(3, 2, data=1, sequence_mode="ring", methods=("pipefusion",))
    assert wish_of(options) == expected
    bands = wish_of(MethodOptions("auto", warmup_steps="auto", further={"group_norm": "stale"}))
    assert bands == SamplingWish(methods=("synchronous", "distrifusion"))
    assert wish_of(MethodOptions("auto")) == wish_of(MethodOptions("auto", warmup_steps=None))


@pytest.mark.parametrize(
    ("method", "expected"),
    [("pipefusion", 1), ("distrifusion", 4), ("naive", 0), ("sequence", 1)],
)
def test_no_warm_up_asked_for_is_what_suits_the_method(method, expected):
    assert MethodOptions(method, warmup_steps=None).synchronous_steps == expected
    assert MethodOptions(method, warmup_steps=2).synchronous_steps == 2


def test_the_reason_is_one_line_with_numbers():
    reason = choose_sampling(LARGE, SLOW, 8, 4).reason
    assert reason.startswith("sequence is expected to take ")
    assert "single 4 s" in reason
    assert f"4 steps are too few for stale activations, which need {MIN_STEPS}" in reason
    assert "\n" not in reason


def test_tokens_that_cannot_be_shared_are_not():
    apart = replace(GUIDED, shares_tokens=False)
    methods = {(c.method, c.sequence) for c in candidates(apart, FAST, 8, 28)}
    assert ("pipefusion", 1) in methods
    assert all(method != "sequence" and share == 1 for method, share in methods)


@pytest.mark.slow
@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 30), st.integers(1, 5))
def test_no_candidate_beats_perfect_division(num_ranks, num_steps, num_samples):
    profile = replace(LARGE, num_samples=num_samples, glue_s=0.0)
    found = list(candidates(profile, Link(), num_ranks, num_steps))
    for choice in found:
        assert SamplingMesh(**choice.axes) in (
            *fitting_meshes(num_ranks, AXES[choice.method]),
            SamplingMesh(),
        )
        assert choice.seconds >= num_steps / num_ranks * (1 - 1e-9)
        assert math.isfinite(choice.seconds)
    chosen = choose_sampling(profile, Link(), num_ranks, num_steps)
    assert chosen.seconds <= 1.1 * min(choice.seconds for choice in found) + 1e-12


@pytest.mark.parametrize(
    ("wish", "current", "expected"),
    [(None, 0, 2), ("cuda", 0, 2), ("cuda", 1, 1), ("cuda:0", 1, 0), ("cpu", 1, None)],
)
@pytest.mark.parametrize("world_size", ["1", "8"])
def test_every_process_takes_a_gpu_of_its_own(wish, current, expected, world_size, monkeypatch):
    """History: under torchrun all ranks took the first GPU, which NCCL refuses; and one named by its index did not
    become the current one, which exchanges over NCCL need."""
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
