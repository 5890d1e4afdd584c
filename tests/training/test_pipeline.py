"""A plan is followed only by the model it was made for; how a pipeline begins and ends."""

import contextlib
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed.distributed_c10d as c10d
from torch import nn

from lightning_diffpipe import DiffPipeStrategy, find_plan
from lightning_diffpipe.callbacks.ema import EMA
from lightning_diffpipe.comm import bandwidth
from lightning_diffpipe.comm.mesh import Mesh, RankLayout
from lightning_diffpipe.errors import ConfigurationError, GraphError, PlanError
from lightning_diffpipe.graph.call_sequences import CallSequences
from lightning_diffpipe.graph.interception import Interception
from lightning_diffpipe.graph.placement import is_placeholder, leave_on_host, place_parameters
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.graph.probed_step import ProbedStep
from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.schedule import Placement
from lightning_diffpipe.profiling.layer_costs import estimate_profile
from lightning_diffpipe.training import pipeline, plan_source, preparation, verification
from lightning_diffpipe.training.pipeline import Pipeline
from lightning_diffpipe.training.plan_source import (
    PipelineOptions,
    _cluster,
    _given_plan,
    _make_plan,
    _profile,
    planned_layers,
)
from lightning_diffpipe.training.preparation import cut_positions
from lightning_diffpipe.training.refusals import (
    refuse_changing_step,
    refuse_written_weights,
    warn_of_whole_compiled,
)
from lightning_diffpipe.training.verification import WholeRun, compare
from tests.planning.profiles import equal_profile


def graph_of(module):
    return probe(module, lambda module, batch: module(batch).mean(), torch.ones(2, 4))


MODULE = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
GRAPH = graph_of(MODULE)
PLAN = find_plan(estimate_profile(MODULE, GRAPH), Cluster(2), PlanOptions(8, num_stages=2))


def test_a_plan_names_the_layers_it_cuts():
    assert PLAN.layers == tuple(layer.name for layer in GRAPH.layers)
    assert cut_positions(PLAN, GRAPH) == (PLAN.stages[1].first_layer,)


def test_a_plan_for_another_model_of_as_many_layers_is_refused():
    """History: only the number of layers was compared, and any other model was cut as planned."""
    names = ("0", "1", "inner", "3")
    other = graph_of(nn.Sequential(OrderedDict(zip(names, MODULE, strict=True))))
    with pytest.raises(
        PlanError,
        match=r"layer 2 of its 4 is 2, but that of this module is inner; make a plan for this",
    ):
        cut_positions(PLAN, other)
    assert cut_positions(replace(PLAN, layers=()), other) == cut_positions(PLAN, GRAPH)


def test_a_run_may_begin_with_the_last_batch_of_an_epoch():
    with pytest.warns(
        UserWarning, match=r"for 8 samples .* first batch of this run has 3: its times"
    ):
        assert _given_plan(PLAN, world_size=2, batch_size=3) is PLAN


def make_plan(plan, world_size=2, **options):
    process = pipeline.Process(0, world_size, torch.device("cpu"), "gloo", 1.0)
    return _make_plan(
        SimpleNamespace(num_samples=8), None, PipelineOptions(plan=plan, **options), process
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 1}, "the plan has num_stages=2, but num_stages=1 is asked for as well"),
        ({"num_microbatches": 3, "schedule": "gpipe"},
         "has num_microbatches=8, schedule=1f1b, but num_microbatches=3, schedule=gpipe is asked for"),
        ({"data_parallel": 2}, "has data_parallel=1, but data_parallel=2"),
        ({"num_replicas": 2}, r"has num_replicas=\(1, 1\), but num_replicas=2 "),
        ({"filling": "none"}, "has filling=shares, but filling=none"),
        ({"frozen_group_size": 8}, "has frozen_group_size=1, but .* or plan again with frozen_group_size=8"),
    ],
)  # fmt: skip
def test_options_that_a_given_plan_does_not_follow_are_refused(options, message, caplog):
    """History: they were ignored without a word, even where an error had told to set them."""
    plan = find_plan(
        equal_profile(4, frozen_share=0.5),
        Cluster(2, p2p=Link(latency_s=0.01)),
        PlanOptions(8, num_stages=2, num_microbatches=8, filling="shares", frozen_group_size=1),
    )
    with pytest.raises(PlanError, match=message):
        make_plan(plan, **options)
    same = {"num_stages": 2, "num_replicas": [1, 1], "num_microbatches": 8, "filling": "shares"}
    assert make_plan(plan, **same, frozen_group_size=1) is plan
    assert make_plan(plan, world_size=4, data_parallel=2) is plan
    assert not caplog.messages
    assert make_plan(plan, cluster={"rank_speeds": [1, 0.5]}) is plan
    assert "cluster is not read" in caplog.text


@pytest.mark.parametrize(
    "cluster", [Cluster(3), {"num_ranks": 3}, {"rank_memory_bytes": [9e9, 9e9, 9e9]}]
)
def test_a_cluster_of_another_number_of_ranks_is_refused_before_processes_start(cluster):
    """History: plans were made for a rank that was not there."""
    options = PipelineOptions(cluster=cluster)
    options.refuse_for(3)
    with pytest.raises(ConfigurationError, match=r"cluster has 3 ranks .*there are 2"):
        options.refuse_for(2)


def test_after_a_failure_nothing_waits_for_messages_of_nccl(monkeypatch):
    """History: moving the module to the host waited for the device, and that for a rank that had stopped."""
    done, root = [], nn.Sequential(nn.Linear(4, 4))
    monkeypatch.setattr(c10d, "_abort_process_group", lambda: done.append("abort"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(pipeline, "leave_on_host", lambda module: done.append("leave_on_host"))
    for backend in ("nccl", "gloo"):
        layout = RankLayout(1, Placement(((0,),)))
        ended = SimpleNamespace(
            engine=SimpleNamespace(
                close=lambda: done.append("close"),
                drop_prepared=lambda: done.append("drop"),
                layout=SimpleNamespace(steps=SimpleNamespace(stream=None)),
            ),
            offloaded={},
            later={},
            resident=frozenset(),
            graph=SimpleNamespace(trained=frozenset()),
            _moving=contextlib.nullcontext,
            _interception=Interception(root).install(),
            mesh=Mesh(layout, 0, torch.device("cpu"), backend, 1.0),
            module=root,
        )
        Pipeline.dismantle(ended, connected=False)
    assert done == ["drop", "close", "abort", "leave_on_host", "drop", "close", "leave_on_host"]


def test_placeholders_take_no_memory_when_a_module_is_left():
    root = nn.Sequential(nn.Linear(4, 4))
    place_parameters(root, set(), "cpu")
    leave_on_host(root)
    assert is_placeholder(root[0].weight)
    assert root.cpu()[0].weight.untyped_storage().nbytes() == 4


def test_a_module_is_verified_where_it_is_trained(monkeypatch):
    """History: the whole module ran on the host, with other random numbers and types than a GPU's."""
    places = []

    @contextmanager
    def placed(module, device):
        places.append(device)
        yield
        places.append("back")

    def run_whole(*arguments):
        places.append("run")
        raise StopIteration

    monkeypatch.setattr(preparation, "placed", placed)
    monkeypatch.setattr(preparation, "run_whole", run_whole)
    mesh = SimpleNamespace(
        local_rank=0,
        pipeline=0,
        layout=RankLayout(2, PLAN.schedule.placement),
        device=torch.device("meta"),
        connect=lambda edges: None,
        connect_reductions=lambda holders: None,
    )
    monkeypatch.setattr(preparation, "Mesh", lambda *arguments: mesh)
    monkeypatch.setattr(preparation, "holders_of", lambda *arguments: {})
    process = pipeline.Process(0, 2, torch.device("meta"), "gloo", 1.0)
    batch, step = torch.ones(2, 4), lambda module, batch: module(batch).mean()
    probed = ProbedStep(MODULE, step, batch, batch, GRAPH, CallSequences())
    with pytest.raises(StopIteration):
        preparation.assemble(probed, PLAN, process, PipelineOptions(verify=True), seed=0)
    assert places == [torch.device("meta"), "run"]
    # History: a run that failed here left its wrappers in torch for the next one.
    assert torch.utils.checkpoint.CheckpointFunction.__module__ == "torch.utils.checkpoint"


def test_what_is_verified_may_differ_by_the_rounding_of_autocast_and_tf32(monkeypatch):
    """History: in bf16-mixed only the rounding of float32 weights was allowed."""
    layer = nn.Linear(2, 1)
    gradients = {name: torch.ones_like(p) for name, p in layer.named_parameters()}

    def run_step(batch, batch_index, reduce_gradients):
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, 1.02)
        return SimpleNamespace(loss=torch.tensor(1.0))

    def check(*dtypes):
        whole = WholeRun(1.0, gradients, frozenset(dtypes))
        engine = SimpleNamespace(run_step=run_step, num_pipelines=1)
        compare(layer, engine, None, dict(layer.named_parameters()), whole)

    check(torch.float32, torch.bfloat16, torch.int64)
    with pytest.raises(GraphError, match=r"the gradient of weight by 2.0e-02 .* below 1e-03"):
        check(torch.float32, torch.int64)
    # Convolutions of a GPU round float32 to TF32 by default.
    monkeypatch.setattr(verification, "rounding_of", lambda dtype, device: 2.0**-10)
    check(torch.float32, torch.int64)


@pytest.mark.parametrize("got", [torch.nan, torch.inf, None])
@pytest.mark.parametrize("broken", ["weight", "bias"])
def test_verification_sees_gradients_that_are_missing_or_not_finite(broken, got):
    """History: the gradient after a NaN took its place as the worst, and those that were missing were left out."""
    layer = nn.Linear(2, 1)
    gradients = {name: torch.ones_like(p) for name, p in layer.named_parameters()}

    def run_step(batch, batch_index, reduce_gradients):
        for name, parameter in layer.named_parameters():
            value = got if name == broken else 1.0
            parameter.grad = None if value is None else torch.full_like(parameter, value)
        return SimpleNamespace(loss=torch.tensor(1.0))

    engine = SimpleNamespace(run_step=run_step, num_pipelines=1)
    whole = WholeRun(1.0, gradients, frozenset({torch.float32}))
    by = "1.0e" if got is None else "inf"
    with pytest.raises(GraphError, match=f"the gradient of {broken} by {by}"):
        compare(layer, engine, None, dict(layer.named_parameters()), whole)


class Normalizing(nn.Linear):
    """As EDM2's layers do, in a way that dispatch sees, or through `.data`."""

    through_data = False

    def forward(self, x):
        normal = self.weight.detach() / self.weight.detach().norm()
        if self.through_data:
            self.weight.data = normal
        else:
            with torch.no_grad():
                self.weight.copy_(normal)
        return super().forward(x)


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("mode", ["fake", "real"])
def test_layers_that_change_their_own_weights_are_refused(mode, through_data):
    """History: with a second microbatch under way PyTorch told of "an inplace operation", and of no layer."""
    module = nn.Sequential(nn.Linear(4, 4), Normalizing(4, 4), nn.Linear(4, 4))
    module[1].through_data = through_data
    graph = probe(module, lambda module, batch: module(batch).mean(), torch.ones(2, 4), mode=mode)
    alone = SimpleNamespace(num_microbatches=1, ranks_per_pipeline=1)
    refuse_written_weights(graph, alone)
    for plan in (PLAN, SimpleNamespace(num_microbatches=2, ranks_per_pipeline=1)):
        with pytest.raises(
            ConfigurationError, match=r"forward of 1 changes .* '1.weight', but other microb"
        ):
            refuse_written_weights(graph, plan)


def test_embeddings_may_shorten_their_rows():
    """Each row by itself: it does not matter which microbatch does it."""
    module = nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Linear(4, 4))
    step = lambda module, batch: module(batch).mean()
    refuse_written_weights(probe(module, step, torch.ones(2, 3, dtype=torch.long)), PLAN)


def test_a_step_may_bring_a_module_to_where_it_is():
    """`.to()` sets the `.data` of each parameter, to what it is."""
    step = lambda module, batch: module.to(batch.device)(batch).mean()
    refuse_changing_step(probe(MODULE, step, torch.ones(2, 4), mode="real"))


@pytest.mark.parametrize("mode", ["fake", "real"])
@pytest.mark.parametrize("update", ["in place", "through data", "all at once"])
def test_steps_that_change_weights_are_refused(mode, update):
    """History: a momentum teacher followed M times in a step of M microbatches."""

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def step(module, batch):
        pairs = list(zip(module.teacher.parameters(), module.student.parameters(), strict=True))
        with torch.no_grad():
            if update == "all at once":
                torch._foreach_lerp_([p for p, _ in pairs], [q for _, q in pairs], 0.1)
            for p, q in pairs:
                if update == "in place":
                    p.mul_(0.9).add_(q, alpha=0.1)
                if update == "through data":
                    p.data = 0.9 * p.data + 0.1 * q.data
        return (module.student(batch) - module.teacher(batch)).square().mean()

    graph = probe(Student(), step, torch.ones(2, 4), mode=mode)
    with pytest.raises(
        ConfigurationError, match=r"changes 2 parameters itself, e.g. teacher\.bias, but"
    ):
        refuse_changing_step(graph)


def test_averages_of_the_weights_and_the_optimizer_count_as_memory():
    """History: an EMA, and any optimizer other than Adam, were unknown to plans in training."""
    wishes = PipelineOptions(optimizer_bytes_factor=0, averages_bytes_factor=1.0).plan_options(8, 1)
    assert (wishes.optimizer_bytes_factor, wishes.averages_bytes_factor) == (0, 1.0)
    assert PipelineOptions().plan_options(8, 1).optimizer_bytes_factor == 2.0
    with pytest.raises(ConfigurationError, match="such as 2 for Adam; got 'adam'"):
        PipelineOptions(optimizer_bytes_factor="adam")


def test_the_strategy_counts_the_averages_of_its_callbacks():
    strategy = DiffPipeStrategy()
    strategy._lightning_module = nn.Linear(2, 2).bfloat16()
    trainer = SimpleNamespace(callbacks=[EMA(), object()])
    assert strategy._told_by_callbacks(trainer)["averages_bytes_factor"] == 2.0
    strategy._lightning_module.float()
    assert strategy._told_by_callbacks(trainer)["averages_bytes_factor"] == 1.0


@pytest.mark.parametrize(("profile", "num_ranks"), [("flops", 4), ("measure", 1)])
def test_a_device_without_measured_links_has_a_memory(monkeypatch, profile, num_ranks):
    """History: with profile=flops, and on one rank, plans knew no limit and ran out of memory."""
    card = SimpleNamespace(total_memory=100 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(bandwidth, "host_bytes_per_s", lambda device: 5e9)
    process = pipeline.Process(0, num_ranks, torch.device("cuda"), "nccl", 1.0)
    cluster = _cluster(PipelineOptions(profile=profile), process, None)
    expected = Cluster(num_ranks, memory_bytes=round(0.92 * (100 << 30)))
    copied = {"host_bytes_per_s": 5e9} if profile == "measure" else {}
    assert cluster == replace(expected, **copied)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(*MODULE[:2]), "has 4 layers, but .* has 2, and they differ: from layer 2 on"),
        (nn.Sequential(OrderedDict(zip("01x3", MODULE, strict=True))), "layer 2 is 2 there and x here"),
    ],
)  # fmt: skip
def test_a_profile_of_another_module_is_refused_by_its_own_name(module, message):
    """History: the plan made from it was refused instead, and `strategy.plan` blamed, which nobody had set."""
    timer = SimpleNamespace(module=module, graph=graph_of(module))
    profile = estimate_profile(MODULE, GRAPH)
    with pytest.raises(ConfigurationError, match=f"the profile 'Sequential' .*{message}"):
        _profile(timer, profile, None)
    assert _profile(SimpleNamespace(module=MODULE, graph=GRAPH), profile, None) == (profile, ())


def test_layers_are_those_of_the_plan_before_those_of_the_profile(tmp_path):
    profile = estimate_profile(MODULE, GRAPH)
    assert planned_layers(PipelineOptions(plan=PLAN, profile="nowhere")) == PLAN.layers
    assert planned_layers(PipelineOptions(profile=profile)) == GRAPH.path_names
    (tmp_path / "bad.json").write_text("{")
    for source in (
        None,
        "measure",
        "flops",
        "nowhere",
        str(tmp_path / "bad.json"),
        str(tmp_path),
        5,
    ):
        assert planned_layers(PipelineOptions(profile=source)) == ()
        assert planned_layers(PipelineOptions(plan=source)) == ()


@pytest.mark.parametrize("source", [None, "measure"])
def test_without_a_profile_layers_are_timed(monkeypatch, source):
    """History: profile=None ended in a TypeError of the path it was taken for."""
    monkeypatch.setattr(plan_source, "measure_profile", lambda timer: "timed")
    assert _profile(mock.MagicMock(), source, None) == ("timed", ())


def blocks():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [torch.compile, lambda net: net.compile() or net])
def test_a_network_compiled_as_a_whole_is_named(compiled):
    """History: a single layer was left, and only "cannot cut 1 layers into 2 stages" was said."""
    module = nn.ModuleDict({"net": compiled(blocks())})
    graph = probe(module, lambda module, batch: module["net"](batch).mean(), torch.ones(2, 4))
    with pytest.warns(UserWarning, match="^net is compiled as a whole.*block.compile()"):
        warn_of_whole_compiled(module, graph)


@pytest.mark.slow
def test_compiled_blocks_are_layers(recwarn):
    net = blocks()
    for block in net:
        block.compile()
    graph = probe(net, lambda module, batch: module(batch).mean(), torch.ones(2, 4))
    warn_of_whole_compiled(net, graph)
    assert len(graph.layers) == 4
    assert not [
        warning for warning in recwarn.list if "compiled as a whole" in str(warning.message)
    ]
