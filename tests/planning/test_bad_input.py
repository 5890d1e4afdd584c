"""Bad input: every complaint names what is wrong, with the numbers."""

import json
import math
import re

import pytest

from lightning_diffpipe.errors import ConfigurationError, PartitionError, PlanError, ProfileError
from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import BackboneProfile, LayerProfile, ModelProfile, Seconds
from lightning_diffpipe.planning.schedules import SCHEDULES
from lightning_diffpipe.planning.search import find_plan

from .profiles import equal_profile, several_backbones

PROFILE = json.loads(equal_profile(3, 0.5).to_json())


def edited(document, path, value):
    """A copy with one value replaced, added, or removed (`value=...`)."""
    copy = json.loads(json.dumps(document))
    *parents, last = path
    place = copy
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(copy)


LAYER = ("backbones", 0, "layers", 1)


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("format",), "diffpipe-profile/2", 'format: expected "diffpipe-profile/1"; got "diffpipe-'),
        (("colour",), 1, "unknown key 'colour'; known keys here: format, name, backbones"),
        ((*LAYER, "forwards"), {}, "unknown key 'backbones[0].layers[1].forwards'"),
        ((*LAYER, "forward_s"), ..., "missing key 'backbones[0].layers[1].forward_s'"),
        ((*LAYER, "backward_s"), {}, "layers[1].backward_s: expected at least one measured number"),
        ((*LAYER, "backward_s"), None, "layers[1].backward_s: expected an object; got nothing"),
        ((*LAYER, "forward_s", "1"), -0.5, "forward_s.1: expected a number >= 0; got -0.5"),
        ((*LAYER, "forward_s", "1"), "fast", 'forward_s.1: expected a number >= 0; got "fast"'),
        ((*LAYER, "forward_s", "1"), float("nan"), "forward_s.1: expected a number >= 0; got NaN"),
        # History: a bare assertion of the search, for which every plan took for ever.
        ((*LAYER, "forward_s", "1"), 1e308, "forward_s.1: expected a number >= 0 and <= 1e+30; got 1e+308"),
        ((*LAYER, "forward_s", "many"), 1, "numbers of samples such as \"4\" as keys, not 'many'"),
        ((*LAYER, "forward_s", "01"), 5.0, "numbers of samples such as \"4\" as keys, not '01'"),
        ((*LAYER, "forward_s", "9" * 5000), 1, 'numbers of samples such as "4" as keys'),
        ((*LAYER, "parameter_bytes"), 10**400, "a whole number of at most 9223372036854775807"),
        ((*LAYER, "parameter_bytes"), 1.5, "parameter_bytes: expected a whole number >= 0; got 1.5"),
        ((*LAYER, "weight_gradient_s"), {"1": 2.5},
         "layers[1].weight_gradient_s.1: expected at most the backward_s of 1 samples, 2, of which it is a part"),
        ((*LAYER, "name"), 3, "layers[1].name: expected a string; got 3"),
        (("backbones",), [], "profile 'equal' has no backbone; nothing can be trained"),
        (("backbones", 0, "layers"), [], "'unet' of profile 'equal' has no layers"),
        (("backbones", 0, "layers"), {}, "backbones[0].layers: expected an array; got {}"),
        (("encoders", 0, "needs"), ["clip"], "encoder 'vae' needs 'clip', which is none"),
        (("encoders", 0, "needs"), ["vae"], "encoders need each other in a circle: ['vae']"),
        (("encoders", 0, "name"), "unet", "backbones and encoders need different names"),
        (("backbones", 0, "passes"), [[0, 1]], "passes: expected two ranges of layers or more"),
        (("backbones", 0, "passes"), [[0, 1], [1, 3]], "equally long, one after the other, 3 at most"),
        (("backbones", 0, "seen"), {"forms": [[0.5, 0], [0.5, 50]]}, "whose shares sum to 1, of 3 layers"),
        (("backbones", 0, "skips"), [{"bytes_per_sample": 1, "made": 2, "readers": [1]}],
         "readers: expected positions after layer 2, ascending, 3 at most"),
    ],
)  # fmt: skip
def test_bad_profiles(path, value, complaint):
    with pytest.raises(ProfileError, match=re.escape(complaint)):
        ModelProfile.from_json(edited(PROFILE, path, value), "profile.json")


def test_times_are_linear_between_and_beyond_what_was_measured():
    seconds = Seconds.of({2: 1.0, 4: 3.0, 8: 4.0})
    assert [seconds.at(n) for n in (2, 3, 4, 6, 8, 12)] == [1.0, 2.0, 3.0, 3.5, 4.0, 5.0]
    assert Seconds.of({2: 3.0, 4: 4.0}).at(1) == 2.5
    assert Seconds.per_sample(0.5).at(3) == 1.5


def test_more_samples_are_never_free():
    """History: times that fell by noise reached zero at a large microbatch, which the planner then took."""
    fell = Seconds.of({8: 1.0, 16: 0.9})
    assert [fell.at(n) for n in (8, 12, 16, 24, 512)] == [1.0, 0.95, 0.9, 0.9, 0.9]


def test_few_samples_are_never_free():
    """History: below the first count a line through noise fell to zero, and a plan of 0 seconds was promised."""
    rose = Seconds.of({8: 0.010, 32: 0.060})
    assert [rose.at(n) for n in (1, 4, 8, 20)] == pytest.approx([0.00125, 0.005, 0.010, 0.035])
    layers = tuple(LayerProfile(f"layer{i}", rose, rose.scaled(2)) for i in range(4))
    profile = ModelProfile("noisy", (BackboneProfile("unet", layers),))
    plan = find_plan(profile, Cluster(2), PlanOptions(64, num_stages=2))
    assert plan.planned.iteration_s > 64 * 4 * 3 * 0.00125 / 2


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "missing key 'num_ranks'"),
        ({"num_ranks": 0}, "num_ranks: expected a whole number >= 1; got 0"),
        ({"num_ranks": 4, "gpus": 4}, "unknown key 'gpus'"),
        ({"num_ranks": 4, "p2p": {"bandwith": 1}}, "unknown key 'p2p.bandwith'"),
        ({"num_ranks": 4, "p2p": {"latency_s": -1}}, "p2p.latency_s: expected a number >= 0"),
        ({"num_ranks": 4, "p2p": {"bandwidth_bytes_per_s": 0}}, "needs a bandwidth > 0"),
        ({"num_ranks": 4, "memory_bytes": "80GB"}, 'expected a whole number >= 1; got "80GB"'),
    ],
)
def test_bad_clusters(values, complaint):
    with pytest.raises(ConfigurationError, match=re.escape(complaint)):
        Cluster.from_dict(values)


def test_clusters_from_plain_values():
    values = {
        "num_ranks": 16,
        "ranks_per_host": 8,
        "memory_bytes": 80e9,
        "p2p": {"bandwidth_bytes_per_s": 1e9, "latency_s": None},
        "all_reduce": {"bandwidth_bytes_per_s": None, "latency_s": 1e-5},
        "p2p_between_hosts": {"bandwidth_bytes_per_s": 1e8},
    }
    cluster = Cluster.from_dict(values)
    assert cluster.p2p == Link(1e9)
    assert cluster.p2p_between(0, 7) == Link(1e9)
    assert cluster.p2p_between(7, 8) == Link(1e8)
    assert cluster.all_reduce.all_reduce_s(1e12, 4) == 1e-5
    assert Cluster(4).p2p.seconds(1e12) == 0


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "missing key 'global_batch_size'"),
        ({"global_batch_size": 0}, "global_batch_size must be a whole number >= 1; got 0"),
        ({"global_batch_size": 8, "num_stages": 2.5}, "num_stages must be a whole number >= 1 or"),
        ({"global_batch_size": 8, "stages": 2}, "unknown key 'stages'"),
        ({"global_batch_size": 8, "schedule": "2f2b"}, "schedule='2f2b'; choose auto, "),
        ({"global_batch_size": 8, "filling": "sand"}, "filling='sand'; choose none, shares or auto"),
        ({"global_batch_size": 8, "num_replicas": [1, 0]}, "num_replicas must be a whole number >= 1"),
        ({"global_batch_size": 8, "num_replicas": []},
         "num_replicas names no stage: []; give a number for all stages"),
        ({"global_batch_size": 8, "frozen_splittable": "false"},
         "frozen_splittable must be true or false; got 'false'"),
        ({"global_batch_size": 8, "optimizer_bytes_factor": None}, "number >= 0, such as 2 for Adam; got None"),
        ({"global_batch_size": 8, "averages_bytes_factor": -1}, "averages_bytes_factor must be a number"),
        ({"global_batch_size": 8, "shard_optimizer": "all"}, "must be true, false or 'auto'; got 'all'"),
        ({"global_batch_size": 8, "optimizer_offload": True},
         "optimizer_offload=True; choose auto, none or all"),
        ({"global_batch_size": 8, "optimizer_bytes_factor": math.nan}, "must be a number >= 0"),
        ({"global_batch_size": 8, "num_replicas": [1, 2], "num_stages": 3},
         "num_replicas=(1, 2) names 2 stages, but num_stages=3"),
    ],
)  # fmt: skip
def test_bad_options(values, complaint):
    with pytest.raises(ConfigurationError, match=re.escape(complaint)):
        PlanOptions.from_dict(values)


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        (
            {"num_stages": 5},
            PartitionError,
            "cannot cut 3 layers into 5 stages; choose num_stages between 1 and 3. Stages are cut from the first "
            "trained layer on; frozen layers before it run on all ranks. With num_stages=1 these share",
        ),
        ({"num_replicas": (1, 2)}, ConfigurationError,
         "num_replicas=(1, 2) take 3 ranks, which do not add up to the 4 ranks there are"),
        ({"num_replicas": (2, 2), "data_parallel": 2}, ConfigurationError,
         "take 4 ranks, which do not add up to the 4 ranks there are, in [2] pipelines"),
        (
            {"num_replicas": 3},
            ConfigurationError,
            "num_replicas=3 alone needs pipelines of as many ranks or a multiple, for at most 3 stages (one a "
            "layer); possible are pipelines of [4, 2, 1] ranks",
        ),
        ({"data_parallel": 3}, ConfigurationError, "data_parallel=3 must divide the 4 ranks and the"),
        ({"num_microbatches": 9}, ConfigurationError, "num_microbatches=9 is more than the 8 samples"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_met(options, error, complaint):
    with pytest.raises(error, match=re.escape(complaint)):
        find_plan(equal_profile(3), Cluster(4), PlanOptions(8, **options))


def test_a_profile_is_no_plan():
    """History: it was said to have the unknown key 'name'."""
    complaint = 'format: expected "diffpipe-plan/1"; got "diffpipe-profile/1"'
    with pytest.raises(PlanError, match=re.escape(complaint)):
        PipelinePlan.from_json(json.dumps(PROFILE))


def test_replicas_alone_may_be_one_stage_on_all_ranks():
    """History: it was left out as the same as one pipeline for each rank, which has no such replicas."""
    plan = find_plan(equal_profile(3), Cluster(2), PlanOptions(8, num_replicas=2))
    assert [stage.num_replicas for stage in plan.stages] == [2]


def test_memory_that_cannot_fit_says_by_how_much_and_what_would_fit():
    profile = equal_profile(
        8, parameter_bytes=100, gradient_bytes=100, activation_bytes_per_sample=10
    )
    cluster = Cluster(4, memory_bytes=1200)
    with pytest.raises(PlanError) as error:
        find_plan(profile, cluster, PlanOptions(8, num_stages=2, optimizer_offload="none"))
    # Four layers with weights, gradients and Adam's states on two ranks: 1200 bytes; one sample of activations: 40,
    # of two microbatches.
    assert str(error.value) == (
        "no plan fits into 1,200 bytes a rank: the smallest needs 1,280 (num_stages=2, "
        "num_microbatches=4), 80 too many; num_stages=4 would fit"
    )
    assert find_plan(profile, cluster, PlanOptions(8)).num_stages == 4
    with pytest.raises(PlanError, match="use devices with more memory, or smaller samples"):
        find_plan(profile, Cluster(2, memory_bytes=10), PlanOptions(8))


PLAN = find_plan(
    equal_profile(6, 0.5), Cluster(3), PlanOptions(12, num_stages=3, num_microbatches=4)
)


@pytest.mark.slow
@pytest.mark.parametrize("frozen_share", [0, 0.5])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_plans_round_trip(frozen_share, schedule):
    num_stages = 6 if SCHEDULES[schedule].place else 3
    options = PlanOptions(12, num_stages=num_stages, schedule=schedule, filling="auto")
    profile = equal_profile(6, frozen_share)
    if SCHEDULES[schedule].opposite:
        profile = several_backbones(profile, equal_profile(4))
    plan = find_plan(profile, Cluster(3), options)
    text = plan.to_json()
    again = PipelinePlan.from_json(text)
    assert again == plan
    assert again.digest == plan.digest
    assert again.timeline == plan.timeline
    assert PipelinePlan.from_json(again.to_json()) == plan


def test_a_plan_written_by_hand_needs_neither_digest_nor_costs():
    """History: with another order of work, or other stages, it kept the times that were promised before."""
    document = json.loads(PLAN.to_json())
    del document["digest"]
    with pytest.raises(PlanError, match="costs: expected none in a plan without a digest"):
        PipelinePlan.from_json(json.dumps(document))
    del document["costs"]
    plan = PipelinePlan.from_json(json.dumps(document))
    assert plan.lowered == PLAN.lowered
    assert str(plan.timeline).startswith("rank 0 | E0  . F0 F1 F2")


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("format",), "diffpipe-plan/9", 'format: expected "diffpipe-plan/1"; got "diffpipe-plan/9"'),
        (("extra",), 1, "unknown key 'extra'; known keys here: format, options, stages"),
        (("programs", "1"), ..., "missing key 'programs.1'"),
        (("programs", "1"), "E1 E2 X F0 F1 Q0", "programs.1: 'Q0' is no instruction"),
        (("programs", "1"), "E1 E2 X F0 B0", "programs: stage 1 does nothing for microbatch 1"),
        (("programs", "1"), "E1 E2 X B0 F0 B1 F1 F2 B2 F3 B3", "stage 1 does Backward, Forward for microbatch 0"),
        (("programs", "2"), "E3 E4 X F3 F2 F1 F0 B0 B1 B2 B3", "each waits for the other"),
        (("programs", "1"), "E1 X F0 F1 B0 F2 B1 F3 B2 B3", "frozen part 2 is never run"),
        (("programs", "1"), "E2 E2 X F0 F1 B0 F2 B1 F3 B2 B3", "programs.1: E2 is not a frozen part"),
        (("stages", 1, "first_layer"), 3, "stage 1 starts at layer 3, but stage 0 ends at layer 1"),
        (("stages", 1, "index"), 2, "stages[1].index: expected 1; got 2"),
        (("stages", 1, "num_replicas"), 2, "missing key 'programs.3'"),
        (("stages", 1, "ranks"), [1], "stage 1 names its ranks, but stage 0 does not"),
        (("stages", 1, "ranks"), [1, 2], "stage 1 has 1 replicas, but names 2 ranks: [1, 2]"),
        (("stages", 1, "ranks"), [-1], "stages[1].ranks[0]: expected a whole number >= 0; got -1"),
        (("stages", 2, "last_layer"), 3, "stage 2 needs at least one layer; got layers 4-3"),
        (("options", "num_stages"), "auto", "digest: expected"),
        (("options", "num_microbatches"), "auto", "options.num_microbatches: a plan needs a number"),
        # History: a KeyError, as nobody had asked before the schedule was looked up.
        (("options", "schedule"), "auto", "options.schedule: a plan needs the schedule"),
        (("options", "color"), 1, "unknown key 'options.color'"),
        (("planned", "iteration_s"), -1, "planned.iteration_s: expected a number >= 0; got -1"),
        (("planned", "bubble_ratio"), ..., "missing key 'planned.bubble_ratio'"),
        # History: a TypeError that named an argument of a constructor.
        (("costs", "backward_s"), None, "costs.backward_s: expected an object; got nothing"),
        (("costs", "forward_s", "3"), ..., "missing key 'costs.forward_s.3'"),
        (("costs", "encode_s"), [0], "the digest of this content"),
        (("options", "global_batch_size"), 2,
         "options.num_microbatches: 4 microbatches need a sample each, but a pipeline has 2"),
        (("options", "data_parallel"), 5,
         "global_batch_size: 12 samples cannot be divided evenly among data_parallel=5"),
        (("options", "num_replicas"), 5, "options.num_replicas: 5, but the stages have [1, 1, 1]"),
        (("options", "num_stages"), 2, "options: num_replicas=(1, 1, 1) names 3 stages"),
        (("planned", "iteration_s"), 10**400, "planned.iteration_s: expected a number >= 0"),
        (("options", "global_batch_size"), 10**400, "global_batch_size must be a whole number >= 1"),
        (("digest",), "0123456789abcdef", "the digest of this content"),
    ],
)  # fmt: skip
def test_bad_plans(path, value, complaint):
    with pytest.raises(PlanError, match=re.escape(complaint)):
        PipelinePlan.from_json(edited(json.loads(PLAN.to_json()), path, value))


def test_a_complaint_names_its_place_once():
    """History: `plan: programs.1: plan: programs.1: expected a string`."""
    with pytest.raises(PlanError) as refusal:
        PipelinePlan.from_json(edited(json.loads(PLAN.to_json()), ("programs", "1"), 7))
    assert str(refusal.value) == "plan: programs.1: expected a string; got 7"


def test_no_key_is_there_twice():
    """History: the last of two values counted."""
    with pytest.raises(PlanError, match="has the key 'format' twice, with \"diffpipe"):
        PipelinePlan.from_json('{"format": "diffpipe-plan/1", "format": 2}')


def test_costs_of_uneven_microbatches_have_a_row_for_each_stage():
    """History: a row that was too short ended in a traceback."""
    plan = find_plan(equal_profile(3), Cluster(3), PlanOptions(4, num_stages=3, num_microbatches=3))
    text = edited(json.loads(plan.to_json()), ("costs", "backward_s", "1"), [1.0])
    with pytest.raises(PlanError, match=r"backward_s.1: expected 3 numbers, one for each stage"):
        PipelinePlan.from_json(text)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("whole", "error"), [(PLAN, PlanError), (equal_profile(3), ProfileError)])
def test_a_file_cut_in_half(whole, error, share):
    text = whole.to_json()
    said = r"half.json is not JSON: .* at line \d+.*(cut short|edited by hand)"
    with pytest.raises(error, match=said):
        type(whole).from_json(text[: int(share * len(text))], "half.json")


def test_ranks_of_interleaved_stages_are_checked():
    options = PlanOptions(12, num_stages=6, num_microbatches=3, schedule="interleaved")
    document = json.loads(find_plan(equal_profile(6), Cluster(3), options).to_json())
    assert [stage["ranks"] for stage in document["stages"]] == [[0], [1], [2]] * 2
    gap = edited(document, ("stages", 2, "ranks"), [7])
    with pytest.raises(PlanError, match=r"ranks must be numbered from 0 without gaps; got \[0, 1"):
        PipelinePlan.from_json(gap)
    elsewhere = edited(document, ("stages", 3, "ranks"), [1])
    with pytest.raises(PlanError, match="programs: "):
        PipelinePlan.from_json(elsewhere)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_stages": 4}, "num_stages a multiple of the ranks of a pipeline"),
        ({"num_microbatches": 4}, "num_microbatches=4"),
        ({"num_stages": 12}, "no more than the 6 layers"),
        ({"num_replicas": 2}, "no replicas"),
    ],
)
def test_stages_that_cannot_be_interleaved(options, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        find_plan(equal_profile(6), Cluster(3), PlanOptions(12, schedule="interleaved", **options))


def test_links_that_hold_their_sender_round_trip():
    link = Link(1e9, 1e-5, holds_sender=True)
    profile = equal_profile(4, boundary_bytes_per_sample=10**8)
    plan = find_plan(profile, Cluster(2, p2p=link), PlanOptions(8, num_stages=2))
    assert PipelinePlan.from_json(plan.to_json()).timeline == plan.timeline
    by_itself = find_plan(profile, Cluster(2, p2p=Link(1e9, 1e-5)), PlanOptions(8, num_stages=2))
    assert by_itself.planned.iteration_s < plan.planned.iteration_s
    values = {"num_ranks": 2, "p2p": {"latency_s": 1e-5, "holds_sender": True}}
    assert Cluster.from_dict(values).p2p.holds_sender
    values["p2p"]["holds_sender"] = "yes"
    with pytest.raises(ConfigurationError, match="holds_sender: expected true or false"):
        Cluster.from_dict(values)


def test_all_backbones_are_planned_whatever_the_schedule():
    """History: only the first backbone of a cascade was planned, and nobody was told; then they were refused."""
    both = several_backbones(equal_profile(4), equal_profile(6))
    for schedule in ("1f1b", "bidirectional", "auto"):
        plan = find_plan(both, Cluster(2), PlanOptions(8, schedule=schedule))
        assert plan.num_layers == len(plan.layers) == 10
        assert plan.planned.no_bubble_limit_s == pytest.approx(10 * 3 * 8 / 2)


@pytest.mark.parametrize(
    ("sizes", "ranks", "options", "message"),
    [
        ((4,), 2, {}, "runs several backbones in opposite directions, and profile 'equal' has one"),
        ((4, 3), 4, {}, r"have \[4, 3\] layers: .* two ranks or more, and no more than 3"),
        ((4, 4), 2, {"num_stages": 2}, "num_stages=auto or 2 times the ranks .* got num_stages=2"),
        ((4, 4), 4, {"num_replicas": 2}, "no replicas; got .* num_replicas=2"),
        ((4, 4), 1, {}, "needs pipelines of two ranks or more"),
    ],
)
def test_backbones_that_cannot_run_in_opposite_directions(sizes, ranks, options, message):
    profile = several_backbones(*map(equal_profile, sizes))
    if len(sizes) == 1:
        profile = equal_profile(*sizes)
    wishes = PlanOptions(8, schedule="bidirectional", data_parallel=1, **options)
    with pytest.raises(ConfigurationError, match=message):
        find_plan(profile, Cluster(ranks), wishes)


@pytest.mark.parametrize("memory_bytes", [None, 10])
@pytest.mark.parametrize(
    ("num_ranks", "options", "message"),
    [
        (4, {"num_stages": 2, "num_replicas": 2, "partition": "pipedream"}, "and never as num_replicas=2"),
        (4, {"num_stages": 2, "num_replicas": 2, "partition": "diffusionpipe"}, "never as num_replicas"),
        (4, {"num_stages": 2, "num_microbatches": 1}, "cannot be shared among 2 stages: a stage gets no more"),
        (16, {"num_stages": 3, "num_microbatches": 8}, "cannot be shared among 3 stages.*more than 8 ranks"),
    ],
)  # fmt: skip
def test_ranks_that_cannot_be_shared_among_stages(num_ranks, memory_bytes, options, message):
    """History: an AssertionError, or a plan with other replicas than those asked for."""
    cluster = Cluster(num_ranks, memory_bytes=memory_bytes)
    with pytest.raises(PlanError, match=message):
        find_plan(equal_profile(8), cluster, PlanOptions(8, data_parallel=1, **options))


def test_replicas_that_a_rule_chooses_may_be_those_asked_for():
    options = PlanOptions(8, num_replicas=(1, 3), partition="pipedream", data_parallel=1)
    plan = find_plan(equal_profile(8), Cluster(4), options)
    assert plan.options.num_replicas == (1, 3)


@pytest.mark.parametrize("partition", ["diffusionpipe", "pipedream"])
def test_rules_that_choose_replicas_do_not_interleave(partition):
    """History: no cut of theirs was found, and that ended in an AssertionError."""
    with pytest.raises(ConfigurationError, match=f"partition={partition} gives every stage ranks"):
        PlanOptions(8, schedule="interleaved", partition=partition)


def test_a_search_without_time_says_so():
    """History: an AssertionError."""
    with pytest.raises(PlanError, match="no plan was found within 0 s"):
        find_plan(equal_profile(8), Cluster(4), PlanOptions(8), within_s=0)
