"""What people see: images, reports, traces, differences and explanations."""

import contextlib
import json
import random
from dataclasses import replace
from textwrap import dedent

import pytest

from lightning_diffpipe.errors import ConfigurationError, DiffPipeError, PlanError
from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.instruction import Staged, Wait
from lightning_diffpipe.planning.lowering import lower
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import EncoderProfile, ModelProfile, Seconds
from lightning_diffpipe.planning.schedules.one_f_one_b import one_f_one_b
from lightning_diffpipe.planning.search import find_plan
from lightning_diffpipe.planning.simulator import simulate
from lightning_diffpipe.viewing.plot import chrome_trace
from lightning_diffpipe.viewing.report import _balanced, cost_table, diff, explain, report
from lightning_diffpipe.viewing.text import percent, seconds, side_by_side, size, waiting

from ..planning.profiles import check_golden, equal_profile, random_profile, simulated, twice


def image(text):
    return dedent(text).strip("\n")


def test_where_a_rank_waits():
    schedule = lower(one_f_one_b(3, 3))
    at = schedule.programs[1].index(Wait("gradient", 1, 2, 2))
    assert waiting(schedule, at=at, rank=1) == image("""
        rank 0 | F0 F1 F2  .  .  .  . B0 --  . B1 --  . B2 --
        rank 1 |  . F0 F1  .  . B0 -- F2 B1 --  ?          <-- waits here: 1g2?2
        rank 2 |  .  . F0 B0 -- F1 B1 -- F2 B2 --  .  .  .  .
    """)
    assert waiting(schedule, at=0, rank=1).splitlines()[1] == (
        "rank 1 |  ?          <-- waits here: 1a0<0"
    )


def test_planned_and_measured_on_one_scale():
    planned = simulate(one_f_one_b(2, 2))
    measured = simulated(one_f_one_b(2, 2), backward=3)
    assert side_by_side(planned, measured, max_columns=36) == image("""
        planned   rank 0 | F0 F1  .  . B0 --  . B1 --
        measured  rank 0 | F0 F1  .  .  . B0 -- --  . B1 -- --
        planned   rank 1 |  . F0 B0 -- F1 B1 --  .  .
        measured  rank 1 |  . F0 B0 -- -- F1 B1 -- --  .  .  .
    """)
    assert planned.render(tick_s=1) == str(planned)


def plan_of(num_stages=4, **options):
    profile = equal_profile(
        8, 0.44, forward_s=0.002, backward_s=0.004, parameter_bytes=10**8, gradient_bytes=10**8,
        boundary_bytes_per_sample=10**6, activation_bytes_per_sample=10**7,
    )  # fmt: skip
    cluster = Cluster(4, p2p=Link(25e9, 1e-5), all_reduce=Link(2e10, 1e-4))
    values = {"num_microbatches": 4, "partition": "uniform", **options}
    plan = find_plan(profile, cluster, PlanOptions(32, num_stages=num_stages, **values))
    return profile, cluster, plan


def test_the_report(update_golden):
    _, _, plan = plan_of()
    text = report(plan, max_columns=100).replace(plan.digest, "0123456789abcdef")
    check_golden("report", text, update_golden, folder="viewing")


def test_a_plan_without_costs_can_be_shown():
    _, _, plan = plan_of()
    document = json.loads(plan.to_json())
    del document["costs"], document["digest"]
    text = report(PipelinePlan.from_json(json.dumps(document)))
    assert "0          0     0-1  unet        ?         ?        ?       ?" in text


def self_conditioned():
    """History: arrows were missing from passes without gradients."""
    return find_plan(twice(equal_profile(4)), Cluster(2), PlanOptions(4, 2, 4, 1, 1)).timeline


@pytest.mark.parametrize("timeline", [lambda: simulate(one_f_one_b(3, 4)), self_conditioned])
def test_the_trace_has_every_span_and_an_arrow_for_every_message(timeline):
    planned = timeline()
    trace = json.loads(chrome_trace({"planned": planned, "measured": planned}))
    events = trace["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * len(planned.spans)
    for phase in "sf":
        assert sum(event["ph"] == phase for event in events) == 2 * len(planned.transfers)
    # History: viewers tell arrows apart by number alone, and those of both timelines had the same.
    ends = {phase: {e["id"]: e["pid"] for e in events if e["ph"] == phase} for phase in "sf"}
    assert ends["s"] == ends["f"]
    assert len(ends["s"]) == 2 * len(planned.transfers)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["planned", "measured"]
    first = next(event for event in events if event["ph"] == "X")
    assert {"name", "cat", "pid", "tid", "ts", "dur"} <= first.keys()


def test_what_differs_between_plans():
    _, _, a = plan_of()
    _, _, b = plan_of(num_stages=2, num_microbatches=8)
    assert diff(a, a) == f"the plans are the same ({a.digest})"
    lines = diff(a, b).splitlines()
    assert "num_stages: 2 instead of 4" in lines
    narrow = find_plan(equal_profile(8), Cluster(2), PlanOptions(32, num_stages=2))
    assert diff(a, narrow).splitlines()[0] == "ranks: 2 instead of 4"
    assert "stage 0 takes layers 0-3 instead of 0-1" in lines
    assert "stage 3: layers 6-7 is gone" in lines
    assert any(line.startswith("step: ") and line.endswith("faster") for line in lines)
    assert "stage 3: layers 6-7 is new" in diff(b, a)
    # History: of plans that differ in what nothing is said about, it printed an empty line.
    assert diff(a, replace(a, costs=None)).endswith("other in the files: costs")


def test_an_explanation_names_the_bottleneck_and_what_helps():
    profile, cluster, plan = plan_of()
    explanation = explain(plan, profile, cluster)
    assert explanation.bottleneck == "pipeline warm-up and cooldown"
    assert [part.name for part in explanation.parts][1] == "frozen work before the pipeline"
    descriptions = [change.description for change in explanation.changes]
    assert descriptions[0].startswith("the best of all plans")
    assert "8 microbatches" in descriptions
    assert "no pipeline: plain data parallelism" in descriptions
    assert any(each.startswith("storing encodings (vae), ") for each in descriptions)
    assert "frozen work in the bubbles (filling=auto)" in descriptions
    assert any(d.startswith("several stages on each rank") for d in descriptions)
    steps = [change.iteration_s for change in explanation.changes]
    assert steps == sorted(steps)
    assert max(steps) < plan.planned.iteration_s
    kept = replace(plan, changes=explanation.changes)
    assert kept.digest == plan.digest
    again = PipelinePlan.from_json(kept.to_json())
    assert str(explain(again)) == str(explanation)
    text = str(explanation)
    assert "Bottleneck: pipeline warm-up and cooldown." in text
    assert "The rest, 34.5%, is waiting" in text


def changes_of(group_size, **options):
    """What would help where frozen work is cheap in large groups, by the first words of its description."""
    profile = equal_profile(8, frozen_share=0.1)
    (vae,) = profile.encoders
    layer = replace(vae.layers[0], forward_s=Seconds.of({1: 40.0, 16: 55.0}))
    profile = replace(profile, encoders=(replace(vae, layers=(layer,)),))
    wishes = PlanOptions(32, partition="uniform", frozen_group_size=group_size, **options)
    plan = find_plan(profile, Cluster(4), wishes)
    changes = explain(plan, profile, Cluster(4)).changes
    return {change.description.split(":")[0]: change.iteration_s for change in changes}


def test_what_would_help_chooses_its_own_groups_of_frozen_work():
    """History: it kept those of the plan, so that what pays with larger groups was not told, or as too slow."""
    options = {"num_stages": 4, "num_microbatches": 16}
    # Stages of 6 s a sample; each rank encodes 8 samples, in groups of 4 instead of 2.
    assert changes_of("auto", **options)["8 microbatches"] == 11 * 24 + 2 * 43
    assert "8 microbatches" not in changes_of(1, **options)  # as the user wants it


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_vertical_sync"])
def test_what_would_help_is_found_without_a_flush_too(schedule):
    """History: two microbatches were tried, which PipeDream refuses, and so did the whole explanation."""
    profile = equal_profile(8)
    plan = find_plan(profile, Cluster(2), PlanOptions(16, schedule=schedule))
    advice = [change.description for change in explain(plan, profile, Cluster(2)).changes]
    assert not any(words.startswith("2 microbatches") for words in advice)


def test_another_order_is_promised_with_the_stages_of_the_plan():
    """History: what it gave with other cuts was promised of `schedule=1f1b_deep` alone."""
    backbone = equal_profile(8).backbones[0]
    first = replace(backbone.layers[0], forward_s=Seconds.per_sample(8.0))
    uneven = replace(backbone, layers=(first, *backbone.layers[1:]))
    profile = replace(equal_profile(8), backbones=(uneven,))
    cluster = Cluster(2, p2p=Link(1e-3), all_reduce=Link(1e-3))
    options = PlanOptions(16, 2, 4, 1, 1, partition="uniform")
    plan = find_plan(profile, cluster, options)
    changes = {c.description: c.iteration_s for c in explain(plan, profile, cluster).changes}
    alone = find_plan(profile, cluster, replace(options, schedule="1f1b_deep"))
    assert changes["another order (schedule=1f1b_deep)"] == alone.planned.iteration_s


def test_no_advice_is_to_have_none_of_something():
    """History: "0 microbatches" and "0 stages" were told as what would help."""
    profile = equal_profile(8)
    options = PlanOptions(16, num_stages=1, num_microbatches=2, data_parallel=2)
    plan = find_plan(profile, Cluster(2), options)
    advice = [change.description for change in explain(plan, profile, Cluster(4)).changes]
    assert advice
    assert not any(words.startswith("0 ") for words in advice)


@pytest.mark.slow
def test_another_measurement_is_compared_with_the_same_stages():
    """History: advice by a second, faster measurement was held against the step of the first."""
    profile, cluster, plan = plan_of()
    backbone = profile.backbones[0]
    layers = tuple(
        replace(x, forward_s=x.forward_s.scaled(0.1), backward_s=x.backward_s.scaled(0.1))
        for x in backbone.layers
    )
    faster = replace(profile, backbones=(replace(backbone, layers=layers),))
    why = explain(plan, faster, cluster)
    assert why.plan.stages == plan.stages
    assert why.plan.programs == plan.programs
    step_s = why.plan.planned.iteration_s
    assert step_s == find_plan(faster, cluster, plan.options).planned.iteration_s
    assert 0.1 * plan.planned.iteration_s < step_s < plan.planned.iteration_s
    assert all(change.iteration_s < step_s for change in why.changes)
    assert explain(plan, profile, cluster).plan is plan


@pytest.mark.parametrize(
    ("num_layers", "complaint"), [(5, "8 layers, but profile 'equal' has 5"), (8, "layer 0")]
)
def test_the_profile_of_another_model_gives_no_advice(num_layers, complaint):
    """History: what would help another model was told, such as "12 ms instead of 1.92 s"."""
    _, cluster, plan = plan_of()
    other = equal_profile(num_layers)
    backbone = other.backbones[0]
    layers = tuple(replace(layer, name=f"other.{layer.name}") for layer in backbone.layers)
    with pytest.raises(PlanError, match=complaint):
        explain(plan, replace(other, backbones=(replace(backbone, layers=layers),)), cluster)


def test_data_parallelism_is_advised_next_to_interleaved_stages():
    """History: it was to be interleaved as well, which cannot be, and so it was left out."""
    changes = changes_of("auto", num_stages=8, num_microbatches=4, schedule="interleaved")
    assert changes["no pipeline"] == 8 * 24 + 47


@pytest.mark.slow
def test_layers_that_follow_noise_are_not_said_to_be_stored():
    """History: the locked half of a ControlNet was left out as well, and nothing was paid for reading."""
    profile, cluster, plan = plan_of()
    (vae,) = profile.encoders
    half = tuple(replace(layer, forward_s=layer.forward_s.scaled(0.5)) for layer in vae.layers)
    locked = EncoderProfile("locked", half, ("vae",), (), False)
    both = replace(profile, encoders=(replace(vae, layers=half), locked))
    free, dear = (replace(vae, stored_bytes_per_sample=size) for size in (0, 10**6))
    storing = lambda encoders: next(
        change
        for change in explain(plan, replace(profile, encoders=encoders), cluster).changes
        if change.description.startswith("storing encodings (vae)")
    )
    assert storing(both.encoders).iteration_s > storing((free,)).iteration_s
    # Eight samples a rank, a megabyte each, at 200 MB/s.
    assert storing((dear,)).iteration_s == pytest.approx(storing((free,)).iteration_s + 0.04)


@pytest.mark.slow
def test_what_would_help_reads_at_the_rate_of_the_disk():
    """History: storing was said to help and, a few lines below at the rate that was given, not to."""
    profile, cluster, plan = plan_of()
    (vae,) = profile.encoders
    stored = replace(profile, encoders=(replace(vae, stored_bytes_per_sample=10**6),))
    storing = lambda rate: [
        change.iteration_s
        for change in explain(plan, stored, cluster, disk_bytes_per_s=rate).changes
        if change.description.startswith("storing encodings (vae)")
    ]
    (fast,), (usual,) = storing(400e6), storing(200e6)
    assert usual == pytest.approx(fast + 0.02)  # eight samples a rank, a megabyte each
    assert storing(1e3) == []
    with pytest.raises(ConfigurationError, match="disk_bytes_per_s must be a number > 0; got 0"):
        explain(plan, stored, cluster, disk_bytes_per_s=0)


def test_bubbles_that_are_full_hold_nothing_up():
    """History: with bubbles full of frozen work, their warm-up was named as a tenth of the step."""
    _, _, plan = plan_of(filling="shares", num_microbatches=2)
    explanation = explain(plan)
    winnable_s = plan.planned.iteration_s - plan.planned.no_bubble_limit_s
    warm_up = {part.name: part.saved_s for part in explanation.parts}
    assert warm_up.get("pipeline warm-up and cooldown", 0) <= winnable_s + 1e-9
    assert winnable_s >= 0


@pytest.mark.parametrize(
    ("cluster", "bottleneck"),
    [
        (Cluster(2, p2p=Link(1e7)), "links between stages"),
        (Cluster(4, all_reduce=Link(1e9)), "summing gradients"),
    ],
)
def test_slow_links_are_named(cluster, bottleneck):
    profile, _, _ = plan_of()
    options = PlanOptions(64, num_stages=2, num_microbatches=16, partition="uniform")
    assert explain(find_plan(profile, cluster, options)).bottleneck == bottleneck


def test_an_unbalanced_stage_is_named():
    profile = equal_profile(5)
    options = PlanOptions(64, num_stages=4, num_microbatches=64, partition="uniform")
    explanation = explain(find_plan(profile, Cluster(4), options))
    assert explanation.bottleneck.startswith("imbalance (stage")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble", "v"])
@pytest.mark.parametrize("coin", [0.0, 0.5, 1.0])
def test_imbalance_is_no_more_than_waiting(coin, schedule):
    """History: a backward was also spread over stages that run none, which promised more than is waited for."""
    tried = 0
    for seed in range(12):
        rng = random.Random(seed)
        profile = random_profile(rng, 9)
        profile = twice(profile, coin) if coin else profile
        options = PlanOptions(
            16, num_microbatches=4, num_stages="auto", partition="uniform", schedule=schedule
        )
        with contextlib.suppress(DiffPipeError):  # some schedules cannot be cut so
            plan = find_plan(profile, Cluster(rng.choice((2, 3)), p2p=Link(1e9)), options)
            work_s = [
                sum(costs.compute_s(i) for p in plan.programs for i in p if isinstance(i, Staged))
                for costs in (plan.costs, _balanced(plan, plan.costs))
            ]
            assert work_s[0] == pytest.approx(work_s[1])
            waiting_s = plan.planned.iteration_s - plan.planned.no_bubble_limit_s
            for part in explain(plan).parts:
                if part.name.startswith("imbalance"):
                    assert part.saved_s <= waiting_s * (1 + 1e-9)
            tried += 1
    assert tried > 3 or (coin and schedule in ("interleaved", "zero_bubble", "v"))


def test_frozen_work_that_fits_no_bubble_is_named():
    """Encoding a sample takes 36 s, each rank's bubble 24: all 32 samples come after the pipeline."""
    options = PlanOptions(32, num_stages=2, num_microbatches=8, filling="shares")
    plan = find_plan(equal_profile(4, frozen_share=3.0), Cluster(2), options)
    explanation = explain(plan)
    assert explanation.bottleneck == "frozen work that fits no bubble"
    assert explanation.parts[0].saved_s == pytest.approx(32 / 2 * 36)
    assert plan.planned.iteration_s == pytest.approx((8 + 2 - 1) * 24 + 32 / 2 * 36)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (1.234, "1.23 s"), (123.4, "123 s"), (0.0456, "45.6 ms"), (1e-7, "0.10 us")],
)
def test_seconds(value, text):
    assert seconds(value) == text
    assert size(1.5 * 2**40) == "1.5 TiB"
    assert percent(1) == "100.0%"


def test_a_profile_is_shown_layer_by_layer():
    sizes = {"parameter_bytes": 2**20, "boundary_bytes_per_sample": 2**10}
    profile = equal_profile(2, 0.5, **sizes, activation_bytes_per_sample=3, flops_per_sample=10**9)
    assert cost_table(profile, samples=2) == image("""
        equal: times of 2 samples; boundary, activations and operations (forward) of one

        unet
        layer   forward  backward  parameters  boundary  activations  operations
        layer0   2.00 s    4.00 s     1.0 MiB   1.0 KiB          3 B  1.00 GFLOP
        layer1   2.00 s    4.00 s     1.0 MiB   1.0 KiB          3 B  1.00 GFLOP
        all      4.00 s    8.00 s     2.0 MiB                    6 B  2.00 GFLOP

        vae
        layer  forward  backward  parameters  boundary  activations  operations
        whole   6.00 s                   0 B       0 B                        ?
        all     6.00 s                   0 B                                  ?
    """)
    assert ModelProfile.from_json(profile.to_json()) == profile


def test_the_plot_is_written(tmp_path):
    from lightning_diffpipe.viewing.plot import plot

    planned = simulate(one_f_one_b(2, 4))
    plot({"planned": planned, "measured": planned}, tmp_path / "timeline.png", title="two ranks")
    assert (tmp_path / "timeline.png").stat().st_size > 5000
