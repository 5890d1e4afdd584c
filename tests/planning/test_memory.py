"""Memory of frozen work: encodings of this batch and of the next, and what a frozen layer works on."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from lightning_diffpipe.errors import ConfigurationError, PlanError
from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.cut_search import Bounds, StageNeeds
from lightning_diffpipe.planning.evaluation import Evaluator, Proposal
from lightning_diffpipe.planning.filling import split_evenly
from lightning_diffpipe.planning.instruction import (
    Backward,
    BackwardWeight,
    Forward,
    Receive,
    Send,
    Wait,
)
from lightning_diffpipe.planning.lowering import delivered, lower
from lightning_diffpipe.planning.memory import FrozenLoad, peak_memory_bytes
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import (
    EncoderLayerProfile,
    EncoderProfile,
    FrozenResult,
    ModelProfile,
    Seconds,
    encoded_first,
)
from lightning_diffpipe.planning.proposals import Shape
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.planning.search import find_plan
from lightning_diffpipe.viewing.report import explain, report

from .profiles import equal_profile, peak_samples


def with_encoder(profile, results, output_bytes=100, weight_bytes=1000):
    layer = EncoderLayerProfile("whole", Seconds.per_sample(1.0), weight_bytes, output_bytes)
    return replace(profile, encoders=(EncoderProfile("vae", (layer,), (), results),))


FOUR = equal_profile(4, activation_bytes_per_sample=10)
READ = (FrozenResult(10, (0,)), FrozenResult(5, (0, 1, 2, 3)))


def test_a_small_case_by_hand():
    """Two ranks, four microbatches of two samples; 15 bytes are read of a sample, 10 of them by stage 0.

    Activations of two samples and two layers: 40 bytes, alive twice on rank 0, once on rank 1. Each rank
    reads the encodings of 8 samples (120 and 40 bytes). It makes those of 4 samples (60), two at a time
    (200 in and out of the layer): with filling for the next two batches, beside all this; without, before.
    """
    profile = with_encoder(FOUR, READ)
    plan_of = lambda filling: find_plan(
        profile,
        Cluster(2),
        PlanOptions(8, 2, 4, filling=filling, partition="uniform", data_parallel=1),
    )
    assert plan_of("none").planned.peak_memory_bytes == (
        1000 + max(2 * 40 + 120, 60 + max(200, 2 * 120)),
        1000 + max(40 + 40, 60 + max(200, 2 * 40)),
    )
    assert plan_of("shares").planned.peak_memory_bytes == (
        1000 + 2 * 40 + 120 + 2 * 60 + 200,
        1000 + 40 + 40 + 2 * 60 + 200,
    )


def test_ranks_that_hold_a_stage_divide_optimizer_states_and_no_averages():
    """Two stages on two ranks each, in each of two pipelines: four ranks share Adam's 400 bytes of two layers."""
    profile = equal_profile(4, parameter_bytes=100, gradient_bytes=100)
    cluster = Cluster(8, all_reduce=Link(100))
    options = PlanOptions(
        16, 2, 2, 2, 2, averages_bytes_factor=1, partition="uniform", shard_optimizer=True
    )
    shared = find_plan(profile, cluster, options)
    separate = find_plan(profile, cluster, replace(options, shard_optimizer=False))
    assert set(shared.planned.peak_memory_bytes) == {200 + 200 + 200 + 400 / 4}
    assert set(separate.planned.peak_memory_bytes) == {200 + 200 + 200 + 400}
    assert shared.costs.all_reduce_s == tuple(1.5 * each for each in separate.costs.all_reduce_s)
    assert shared.planned.iteration_s > separate.planned.iteration_s
    left_open = replace(options, shard_optimizer="auto")
    for memory, shares in ((None, False), (1000, False), (999, True), (700, True)):
        plan = find_plan(profile, replace(cluster, memory_bytes=memory), left_open)
        assert plan.options.shard_optimizer is shares
    unshared = replace(options, shard_optimizer=False)
    with pytest.raises(PlanError, match="shard_optimizer=True would fit"):
        find_plan(profile, replace(cluster, memory_bytes=999), unshared)


def test_states_in_host_memory_take_two_slots():
    """Two layers a rank, each with parameters of 60 and 40 bytes: 200 of weights, 200 of gradients, 400 of states.

    Two slots for the states of 60 bytes take 240. Copies there and back of 400 bytes at 100 a second take 8 seconds
    after the pipeline.
    """
    sizes = {"parameter_bytes": 100, "gradient_bytes": 100, "largest_gradient_bytes": 60}
    options = PlanOptions(4, 2, 4, 1, 1, partition="uniform", optimizer_offload="all")
    cluster = Cluster(2, host_bytes_per_s=100.0)
    profile = equal_profile(4, **sizes, activation_bytes_per_sample=10)
    away = find_plan(profile, cluster, options)
    here = find_plan(profile, cluster, replace(options, optimizer_offload="none"))
    assert here.planned.peak_memory_bytes == (400 + 400 + 40, 400 + 400 + 20)
    assert away.planned.peak_memory_bytes == (400 + 240 + 40, 400 + 240 + 20)
    assert away.planned.offloaded_bytes == (400, 400)
    assert here.planned.offloaded_bytes == ()
    assert away.planned.iteration_s == pytest.approx(here.planned.iteration_s + 8)
    assert away.pipeline_s == pytest.approx(here.pipeline_s)
    assert PipelinePlan.from_json(away.to_json()) == away
    assert "up to 400 B of states in host memory, copied there and back in 8.00 s" in report(away)
    assert "without copying optimizer states: 8.00 s less" in str(explain(away))


def test_states_go_to_hosts_where_nothing_fits_otherwise_and_hosts_have_room():
    sizes = {"parameter_bytes": 100, "gradient_bytes": 100, "largest_gradient_bytes": 60}
    profile, options = equal_profile(4, **sizes), PlanOptions(4, 2, 4, 1, 1)
    limits = {"host_bytes_per_s": 100.0, "host_memory_bytes": 800}
    for memory, where in ((800, "none"), (799, "all"), (640, "all")):
        plan = find_plan(profile, Cluster(2, memory_bytes=memory, **limits), options)
        assert plan.options.optimizer_offload == where
    with pytest.raises(PlanError, match=r"the smallest needs 640 .*, 1 too many"):
        find_plan(profile, Cluster(2, memory_bytes=639, **limits), options)
    short = Cluster(2, memory_bytes=799, **limits | {"host_memory_bytes": 799})
    with pytest.raises(PlanError, match="copied from hosts then does not fit into 799 bytes"):
        find_plan(profile, short, options)
    none = replace(options, optimizer_offload="none")
    with pytest.raises(PlanError, match="; optimizer_offload=all would fit"):
        find_plan(profile, Cluster(2, memory_bytes=799, **limits), none)


def test_without_a_flush_copies_are_in_the_pipeline():
    profile = equal_profile(4, parameter_bytes=100, gradient_bytes=100)
    options = PlanOptions(4, 2, 1, 1, 1, "pipedream", partition="uniform", optimizer_offload="all")
    away = find_plan(profile, Cluster(2, host_bytes_per_s=100.0), options)
    here = find_plan(profile, Cluster(2), replace(options, optimizer_offload="none"))
    assert away.planned.iteration_s == pytest.approx(here.planned.iteration_s + 8)
    assert away.pipeline_s == away.planned.iteration_s


def test_an_exchange_holds_what_was_made_and_packed_and_what_arrives():
    """A rank made all of 8 samples (15 bytes each); stage 0, elsewhere, reads all that, its own stage 5."""
    model = CostModel(with_encoder(FOUR, READ), Cluster(2))
    load = FrozenLoad(read={1: 8}, made=8, working=1, fills=False)
    assert load.num_bytes(model, [LayerRun(0, 1), LayerRun(1, 4)]) == (
        8 * 5,
        8 * 15 + 8 * 15 + 8 * 5,
    )


def test_microbatches_that_differ_do_not_count_as_the_largest():
    """Three ranks with 20 layers each, a byte a layer and sample; GPipe keeps all nine samples."""
    profile = equal_profile(60, activation_bytes_per_sample=1)
    options = PlanOptions(9, 3, 8, schedule="gpipe", data_parallel=1)
    plan = find_plan(profile, Cluster(3, memory_bytes=180), options)
    assert plan.planned.peak_memory_bytes == (180, 180, 180)
    with pytest.raises(
        PlanError, match="no plan fits into 179 bytes a rank: the smallest needs 180"
    ):
        find_plan(profile, Cluster(3, memory_bytes=179), options)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if not SCHEDULES[name].place])
@pytest.mark.parametrize("seed", range(5))
def test_no_rank_keeps_fewer_samples_than_its_bound(schedule, seed):
    """For random microbatches, larger ones first, stages and replicas."""
    rng = random.Random(seed)
    sizes = split_evenly(rng.randint(8, 40), rng.randint(1, 8))
    replicas = [rng.randint(1, 3) for _ in range(rng.randint(1, 4))]
    placement = Placement.of_replicas(replicas)
    model = CostModel(FOUR, Cluster(sum(replicas)))
    bounds = Bounds(model, Shape(1, sum(replicas), len(replicas), sizes, schedule))
    peaks = peak_samples(SCHEDULES[schedule](placement, len(sizes)), sizes)
    for stage, ranks in enumerate(placement.stage_ranks):
        later_ranks = sum(replicas[stage + 1 :])
        least = bounds.alive_sizes(replicas[stage], later_ranks)
        assert sizes[0] <= sum(least) <= max(peaks[rank][stage].samples for rank in ranks)
        assert 1 <= len(least) <= max(peaks[rank][stage].microbatches for rank in ranks)


def held_at_most(schedule, rank, sizes):
    """Bytes of one rank where they are most: 3 a sample that waits for a backward, 1 a sample in a message.

    A message that is sent is held until `delivered` says that it is there; one that is received from when its
    receive is posted until it is used.
    """
    confirmed, held, most = delivered(schedule)[rank], Counter(), 0
    for i in schedule.programs[rank]:
        match i:
            case Forward(stage, m):
                held["waits", stage, m] = 3 * sizes[m]
                held["activation", stage, m] = 0  # a part of what waits
            case Backward(stage, m) | BackwardWeight(stage, m):
                held["waits", stage, m] = held["gradient", stage, m] = 0
            case Send(kind, stage, m, _):
                held["sent", kind, stage, m] = sizes[m]
            case Receive(kind, stage, m, _):
                held[kind, stage, m] = sizes[m]
            case Wait():
                for sent in confirmed[i]:
                    held["sent", sent.kind, sent.stage, sent.microbatch] = 0
        most = max(most, held.total())
    return most


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero_bubble", "interleaved"])
@pytest.mark.parametrize("num_microbatches", [4, 8, 24])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_plan_counts_all_messages_that_are_held(name, num_microbatches, ranks):
    """History: what a step sent stayed to its end, and no plan counted it."""
    num_microbatches *= ranks if SCHEDULES[name].place else 1
    stages = 2 * ranks if SCHEDULES[name].place else ranks
    placement = Placement.round_robin(stages, ranks)
    sizes = split_evenly(3 * num_microbatches - 1, num_microbatches)
    layers = equal_profile(stages, activation_bytes_per_sample=3, boundary_bytes_per_sample=1)
    runs = [LayerRun(stage, stage + 1) for stage in range(stages)]
    schedule = SCHEDULES[name](placement, num_microbatches)
    planned = peak_memory_bytes(
        CostModel(layers, Cluster(ranks)), peak_samples(schedule, sizes), runs
    )
    held = [held_at_most(lower(schedule), rank, sizes) for rank in range(ranks)]
    assert all(h <= p for h, p in zip(held, planned, strict=True)), (held, planned)
    least = 0.6 if SCHEDULES[name].place else 0.75
    assert all(h >= least * p - 12 for h, p in zip(held, planned, strict=True)), (held, planned)


@pytest.mark.parametrize("seed", range(20))
def test_memory_grows_with_samples_and_with_filling(seed):
    rng = random.Random(seed)
    layers = rng.randint(4, 8)
    readers = tuple(sorted(rng.sample(range(layers), 2)))
    # Activations large enough for a rank to be at its fullest in the middle of a step.
    profile = equal_profile(layers, activation_bytes_per_sample=rng.randint(500, 900))
    profile = with_encoder(profile, (FrozenResult(rng.randint(1, 99), readers),))
    stages, microbatches = rng.randint(2, 4), rng.randint(1, 4)

    def needs(samples, filling):
        options = PlanOptions(
            samples, stages, microbatches, 1, filling=filling, partition="uniform"
        )
        return find_plan(profile, Cluster(stages), options).planned.peak_memory_bytes

    few, many = 4 * stages * microbatches, 8 * stages * microbatches
    for filling in ("none", "shares"):
        assert all(a < b for a, b in zip(needs(few, filling), needs(many, filling), strict=True))
    assert all(a < b for a, b in zip(needs(few, "none"), needs(few, "shares"), strict=True))


def test_a_stage_that_reads_nothing_holds_nothing():
    """The skips of a locked U-Net are read by the decoder alone; a plan for them once counted one output."""
    model = CostModel(with_encoder(FOUR, READ), Cluster(2))
    assert [model.read_bytes_per_sample(LayerRun(a, b)) for a, b in ((0, 1), (1, 4))] == [15, 5]
    assert model.encoding_bytes_per_sample == 15
    unknown = CostModel(with_encoder(FOUR, ()), Cluster(2))
    assert unknown.read_bytes_per_sample(LayerRun(1, 2)) == 100


def test_encodings_that_do_not_fit_are_refused_with_what_would_fit():
    profile, options = with_encoder(FOUR, READ), PlanOptions(8, 2, 4, data_parallel=1)
    cluster = Cluster(2, memory_bytes=1350)
    with pytest.raises(PlanError) as error:
        find_plan(profile, cluster, replace(options, filling="shares"))
    assert "no plan fits into 1,350 bytes a rank: the smallest needs 1,480" in str(error.value)
    assert "130 too many" in str(error.value)
    assert "filling=none would fit" in str(error.value)
    assert find_plan(profile, cluster, replace(options, filling="auto")).options.filling == "none"
    # Two ranks a stage leave no choice of stages, and two stages none of ranks: both have to go.
    many = replace(options, num_replicas=2, filling="none")
    heavy = replace(FOUR.backbones[0], layers=tuple(
        replace(layer, parameter_bytes=100) for layer in FOUR.backbones[0].layers
    ))  # fmt: skip
    with pytest.raises(
        PlanError, match=r"num_stages=3, .*num_replicas=\[1, 1, 2\].* together would fit"
    ):
        find_plan(replace(FOUR, backbones=(heavy,)), Cluster(4, memory_bytes=220), many)


def heavy_encoders(cacheable=True):
    """Encoders of 5,000 bytes; layers with 40 bytes of weights, 10 of which are trained, and activations."""
    profile = equal_profile(8, activation_bytes_per_sample=30, boundary_bytes_per_sample=1)
    layers = tuple(
        replace(layer, parameter_bytes=40, gradient_bytes=10)
        for layer in profile.backbones[0].layers
    )
    profile = replace(profile, backbones=(replace(profile.backbones[0], layers=layers),))
    profile = with_encoder(profile, READ, weight_bytes=5000)
    (encoder,) = profile.encoders
    return replace(profile, encoders=(replace(encoder, cacheable=cacheable),))


def test_encoding_first_counts_the_larger_of_encoding_and_training():
    """By hand: two ranks with 4 layers each, 8 samples in 4 microbatches of 2.

    Before training there are encoders, and 2 samples of 100 bytes that a layer of theirs gives; in training
    weights, gradients, two states of Adam, and activations of 2 microbatches on rank 0 and of 1 on rank 1.
    """
    profile, cluster = heavy_encoders(), Cluster(2)
    options = PlanOptions(8, 2, 4, partition="uniform", data_parallel=1)
    beside = find_plan(profile, cluster, options).planned.peak_memory_bytes
    first = replace(options, encode_first=True)
    plan = find_plan(profile, cluster, first)
    before = 5000 + 2 * 100
    assert plan.planned.peak_memory_bytes == (before, before)
    assert plan.planned.frozen_s < find_plan(profile, cluster, options).planned.frozen_s
    light = replace(profile, encoders=with_encoder(FOUR, READ, weight_bytes=20).encoders)
    for rank, bytes_beside in enumerate(
        find_plan(light, cluster, options).planned.peak_memory_bytes
    ):
        assert bytes_beside - beside[rank] == 20 - 5000
        in_training = find_plan(light, cluster, first).planned.peak_memory_bytes[rank]
        assert in_training == bytes_beside - 20, "training needs more than encoding did"
    assert PipelinePlan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_encoding_first_is_what_makes_a_plan_fit():
    """Cuts are chosen by what ranks need before training, too, and noise keeps encoders in memory."""
    options = PlanOptions(8, data_parallel=1, filling="auto")
    need = max(
        find_plan(heavy_encoders(), Cluster(2), replace(options, num_stages=2, encode_first=True))
        .planned.peak_memory_bytes
    )  # fmt: skip
    cluster = Cluster(2, memory_bytes=need)
    with pytest.raises(PlanError, match=r"encode_first=true \(\S+ s a step\)"):
        find_plan(heavy_encoders(), cluster, options)
    plan = find_plan(heavy_encoders(), cluster, replace(options, encode_first=True))
    assert max(plan.planned.peak_memory_bytes) <= need
    with pytest.raises(PlanError) as error:
        find_plan(heavy_encoders(cacheable=False), cluster, options)
    assert "encode_first" not in str(error.value)
    with pytest.raises(
        ConfigurationError, match=r"none of its encoders \(vae\) follow from the sample"
    ):
        find_plan(heavy_encoders(cacheable=False), cluster, replace(options, encode_first=True))


@pytest.mark.parametrize("seed", range(10))
def test_needs_of_stages_are_those_of_plans_that_encode_first(seed):
    """What cuts are chosen by is what the plan then says, for encoders of any size."""
    rng = random.Random(seed)
    profile = heavy_encoders()
    (encoder,) = profile.encoders
    weights = replace(encoder.layers[0], parameter_bytes=rng.randint(0, 1500))
    profile = replace(profile, encoders=(replace(encoder, layers=(weights,)),))
    model = CostModel(encoded_first(profile), Cluster(2))
    options = PlanOptions(8, 2, rng.choice([1, 2, 4]), data_parallel=1, encode_first=True)
    evaluator = Evaluator(model, options)
    for cut in range(1, 8):
        sizes = split_evenly(8, options.num_microbatches)
        proposal = Proposal(Shape(1, 2, 2, sizes, "1f1b"), ((0, cut, 1), (cut, 8, 1)))
        needs = StageNeeds.of(model, evaluator.frame(proposal))
        (first,) = needs.need_bytes(0, 0, range(cut, cut + 1))
        (last,) = needs.need_bytes(1, cut, range(8, 9))
        peak = evaluator.peak_bytes(proposal)
        assert first <= peak[0]
        assert last <= peak[1]
        assert first == peak[0] or last == peak[1]


def test_what_is_known_of_results_is_kept_in_a_profile():
    encoder = EncoderProfile(
        "vae", (EncoderLayerProfile("whole", Seconds.per_sample(1.0)),), (), READ, False, 77
    )
    profile = replace(FOUR, encoders=(encoder,))
    assert ModelProfile.from_json(profile.to_json()) == profile


def test_uneven_shares_that_do_not_fit_are_not_named_by_a_negative_number():
    """History: "the smallest needs 500, -4 too many", as the smallest was counted with even shares."""
    profile = with_encoder(equal_profile(6, activation_bytes_per_sample=0), READ, weight_bytes=0)
    options = PlanOptions(12, 3, 3, filling="shares", data_parallel=1)
    with pytest.raises(PlanError, match=r"would need 500 .* with even shares .*filling=none would"):
        find_plan(profile, Cluster(3, memory_bytes=504), options)
    with pytest.raises(PlanError, match=r"the smallest needs 500 .*, 1 too many"):
        find_plan(profile, Cluster(3, memory_bytes=499), options)


def test_what_every_microbatch_keeps_counts_for_each_that_waits():
    """History: casts of weights counted as activations, and shrank with the microbatch."""
    layers = equal_profile(4, activation_bytes_per_sample=10, activation_bytes_per_microbatch=7)
    assert ModelProfile.from_json(layers.to_json()) == layers
    for schedule, waiting in (("gpipe", (4, 4)), ("1f1b", (2, 1))):
        options = PlanOptions(8, 2, 4, schedule=schedule, data_parallel=1, partition="uniform")
        needs = find_plan(layers, Cluster(2), options).planned.peak_memory_bytes
        assert needs == tuple(n * 2 * (2 * 10 + 7) for n in waiting)
        fits = Cluster(2, memory_bytes=max(needs))
        assert find_plan(layers, fits, replace(options, partition="auto"))
        with pytest.raises(PlanError, match="no plan fits"):
            find_plan(layers, Cluster(2, memory_bytes=max(needs) - 1), options)
