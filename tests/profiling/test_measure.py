"""Which layers are timed as one.

Attribution of glue, on paper.
"""

import copy
import gc
import random
import statistics
import time
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch import nn

from lightning_diffpipe.errors import ConfigurationError, GraphError, ProfileError
from lightning_diffpipe.graph.backward import NestedExits
from lightning_diffpipe.graph.layer import ContainerCall
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.graph.sizes import boundary_bytes, equal_layers
from lightning_diffpipe.graph.step import take_samples
from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.cost import CostModel, LayerRun
from lightning_diffpipe.planning.profile import BackboneProfile, LayerProfile, ModelProfile, Seconds
from lightning_diffpipe.profiling import measure, step_run
from lightning_diffpipe.profiling.layer_costs import averaged, backward_s, forward_s, repeated_s
from lightning_diffpipe.profiling.measure import LayerTimer, in_precision, measure_profile
from lightning_diffpipe.profiling.step_run import StepTimes
from tests.profiling.toys import CpuClock, Toy, batch_of, toy


@pytest.fixture(autouse=True)
def cpu_clock(monkeypatch):
    monkeypatch.setattr(measure, "clock_for", lambda device: CpuClock())


def measured(*timer, **options):
    return measure_profile(LayerTimer(*timer, **options))


def everything(module):
    """All there is to know about a module and the generators it draws from."""
    gradients = {
        name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()
    }
    numpy_state = np.random.get_state()
    return {
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "gradients": gradients,
        "training": [m.training for m in module.modules()],
        "num_steps": module.num_steps,
        "wrappers": [sorted(m.__dict__) for m in module.modules()],
        "random": (torch.get_rng_state(), repr(random.getstate()), repr(numpy_state[1].tolist())),
    }


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("fits", [True, False])
def test_leaves_the_module_bit_identical(fits, monkeypatch):
    """As a whole, or layer by layer where nothing else fits on the device."""
    monkeypatch.setattr(measure.LayerTimer, "fits", fits)
    module, step, batch, graph = toy()
    module.blocks[1].eval()
    module.head.weight.grad = torch.ones_like(module.head.weight)
    gradient, buffers = module.head.weight.grad, dict(module.named_buffers())
    before = everything(module)
    measured(module, step, batch, graph, sample_counts=(2, 4), repeats=1)
    assert equal(before, everything(module))
    assert module.head.weight.grad is gradient
    assert all(value is buffers[name] for name, value in module.named_buffers())


def test_leaves_it_bit_identical_also_when_the_step_fails():
    module, step, batch, graph = toy()
    before = everything(module)

    def fails(module, batch):
        step(module, batch)
        raise KeyError("text")

    with pytest.raises(KeyError):
        measured(module, fails, batch, graph, sample_counts=(2,), repeats=1)
    assert equal(before, everything(module))


def test_has_every_layer_once_with_its_bytes():
    module, step, batch, graph = toy()
    profile = measured(module, step, batch, graph, sample_counts=(2, 4), repeats=1)
    layers = profile.backbones[0].layers
    assert [layer.name for layer in layers] == [graph.layers[i].name for i in graph.path]
    assert [encoder.name for encoder in profile.encoders] == ["frozen encoder"]
    trained = sum(p.numel() * 4 for p in module.parameters() if p.requires_grad)
    frozen = sum(p.numel() * 4 for p in module.encoder.parameters())
    assert sum(layer.parameter_bytes for layer in layers) == trained
    assert sum(layer.gradient_bytes for layer in layers) == trained
    encoder = profile.encoders[0].layers
    assert sum(layer.parameter_bytes for layer in encoder) == frozen
    assert {samples for samples, _ in layers[0].forward_s.points} == {2, 4}
    assert ModelProfile.from_json(profile.to_json()) == profile


@pytest.mark.slow
@pytest.mark.parametrize("splits", [True, False])
def test_leaves_no_activations_behind(splits, monkeypatch):
    """History: a forward without backward, and one that could not be split, stayed for all of training."""
    module, step, batch, graph = toy()
    outputs = weakref.WeakSet()
    for block in module.blocks:
        block.register_forward_hook(lambda _module, _args, out: outputs.add(out))
    if not splits:
        monkeypatch.setattr(step_run, "input_gradients", unsplittable)
    measured(module, step, batch, graph)
    gc.collect()
    assert not len(outputs)


def unsplittable(*_arguments):
    raise NestedExits


def test_counts_what_autograd_keeps_once():
    """Inputs of both matrix products and the mask of the relu, which is its output."""
    module, step, batch, graph = toy(width=64)
    profile = measured(module, step, batch, graph, sample_counts=(4,), repeats=1)
    saved = sum(layer.activation_bytes_per_sample for layer in profile.backbones[0].layers)
    per_block = 64 + 4 * 64  # its input, and the activation that relu and `outer` share
    head = 64 + 64  # its input, and the difference of which the square is taken
    assert saved == 4 * (len(module.blocks) * per_block + head)


@pytest.mark.slow
def test_layers_add_up_to_the_step():
    """Whole steps are timed between the runs of the profile, as a busy machine slows both alike.

    Layers are wide enough that what stamps between them cost (a tenth at half the width) is little.
    """
    module, step, batch, graph = toy(num_samples=64, width=256)
    other, clock, steps = copy.deepcopy(module), CpuClock(), []

    def between(what, share):
        start = clock.stamp()
        step(other, batch).backward()
        steps.append(clock.seconds(start, clock.stamp()))

    profile = measured(
        module, step, batch, graph, sample_counts=(64,), repeats=15, progress=between
    )
    layers = profile.backbones[0].layers
    planned_s = sum(layer.forward_s.at(64) + layer.backward_s.at(64) for layer in layers)
    planned_s += sum(x.forward_s.at(64) for encoder in profile.encoders for x in encoder.layers)
    measured_s = statistics.median(steps)
    assert planned_s == pytest.approx(measured_s, rel=0.35)


def test_finds_dear_layers_and_their_weight_gradients():
    module = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 8), nn.Linear(8, 8)).train()
    batch, step = torch.randn(512, 512), lambda module, batch: module(batch).mean()
    graph = probe(module, step, batch[:2], max_share=0.01)
    profile = measured(module, step, batch, graph, sample_counts=(512,), repeats=9)
    dear, middle, cheap = profile.backbones[0].layers
    assert dear.forward_s.at(512) > 4 * cheap.forward_s.at(512)
    # Nothing before the first layer wants a gradient: its backward is weight gradients only.
    assert dear.weight_gradient_s.at(512) > 0.8 * dear.backward_s.at(512)
    # The middle one passes a gradient on as well.
    assert middle.weight_gradient_s.at(512) < 0.9 * middle.backward_s.at(512)


@pytest.mark.slow
def test_times_what_halves_of_a_backward_add():
    module, step, batch, graph = toy(num_samples=64, width=128)
    profile = measured(module, step, batch, graph, sample_counts=(2, 64), repeats=3)
    split_s = profile.backbones[0].split_s
    assert [count for count, _ in split_s.points] == [2, 64]
    assert all(seconds >= 0 for _, seconds in split_s.points)


def test_checkpointed_steps_are_not_split():
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)).train()

    def step(module, batch):
        for layer in module:
            batch = torch.utils.checkpoint.checkpoint(layer, batch, use_reentrant=False)
        return batch.square().mean()

    batch = torch.randn(4, 8, requires_grad=True)
    graph = probe(module, step, batch[:2], max_share=0.01)
    profile = measured(module, step, batch, graph, sample_counts=(4,), repeats=1)
    assert profile.backbones[0].split_s is None


def test_frozen_layers_within_the_gradient_path_have_no_weight_gradient():
    module, step, batch, _ = toy()
    module.head.requires_grad_(False)
    graph = probe(module, step, take_samples(batch, 8, 2), max_share=0.1)
    profile = measured(module, step, batch, graph, sample_counts=(4,), repeats=2)
    head = profile.backbones[0].layers[-1]
    assert head.name == "head"
    assert head.gradient_bytes == 0
    assert head.parameter_bytes > 0
    assert head.weight_gradient_s.at(4) == 0
    assert head.backward_s.at(4) > 0


class Slow(nn.Linear):
    """A layer whose forward takes 5 ms of a processor, and whose own backward next to nothing."""

    def forward(self, x):
        until_s = time.thread_time() + 0.005
        while time.thread_time() < until_s:
            pass
        return super().forward(x)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True, None])
def test_recomputation_counts_as_backward_of_its_layer(reentrant):
    """History: matrix products told it, which took 1.79 times as long as the forward on a busy machine."""
    module = nn.Sequential(*[Slow(8, 8) for _ in range(3)], nn.Linear(8, 4)).train()

    def step(module, batch):
        x = batch.clone().requires_grad_()
        for block in module[:3]:
            if reentrant is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
        return module[3](x).square().mean()

    batch = torch.randn(4, 8)
    graph = probe(module, step, batch[:2], max_share=0.5)
    profile = measured(module, step, batch, graph, sample_counts=(4,), repeats=3)
    blocks = profile.backbones[0].layers[:3]
    assert [block.name for block in blocks] == ["0", "1", "2"]
    for block in blocks:
        assert block.forward_s.at(4) > 0.0049
        assert (block.backward_s.at(4) > 0.0049) == (reentrant is not None)


def test_stops_at_counts_that_would_take_too_long():
    module, step, batch, graph = toy(num_samples=64)
    profile = measured(module, step, batch, graph, budget_s=1e-6)
    assert [n for n, _ in profile.backbones[0].layers[0].forward_s.points] == [2]


def test_leaves_out_counts_the_step_cannot_run(caplog):
    module, step, batch, graph = toy()  # batch norm needs two samples
    profile = measured(module, step, batch, graph, sample_counts=(1, 2), repeats=1)
    assert [n for n, _ in profile.backbones[0].layers[0].forward_s.points] == [2]
    assert "cannot time 1 samples" in caplog.text
    with pytest.raises(ProfileError, match=r"none of \[1\] samples"):
        measured(module, step, batch, graph, sample_counts=(1,), repeats=1)


def test_refuses_more_samples_than_there_are():
    module, step, batch, graph = toy(num_samples=4)
    with pytest.raises(ProfileError, match="cannot time 8 samples with a batch of 4"):
        measured(module, step, batch, graph, sample_counts=(8,))


@pytest.mark.parametrize(
    "option", [{"budget_s": 0}, {"repeats": -1}, {"sample_counts": (2, 0)}], ids=str
)
def test_refuses_effort_that_is_not_positive(option):
    """History: no time ended in a division by zero, runs less than none in a median of nothing."""
    with pytest.raises(
        ConfigurationError, match=f"{next(iter(option))} must be a number > 0; got "
    ):
        measure.profile(nn.Linear(2, 1), torch.ones(4, 2), step=lambda m, x: m(x).mean(), **option)


@pytest.mark.parametrize("fits", [True, False])
def test_refuses_a_step_that_changed_since_its_probe(fits, monkeypatch):
    monkeypatch.setattr(measure.LayerTimer, "fits", fits)
    module, _, batch, graph = toy()
    other = lambda module, batch: module.head(module.encoder(batch["x"])).mean()
    with pytest.raises(GraphError, match=r"call 1 is head, expected blocks\.0"):
        measured(module, other, batch, graph, sample_counts=(4,), repeats=1)


def test_reports_progress():
    module, step, batch, graph = toy()
    seen = []
    measured(
        module, step, batch, graph, sample_counts=(2,), repeats=3,
        progress=lambda what, share: seen.append(share),
    )  # fmt: skip
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_a_batch_on_the_host_follows_its_module(monkeypatch):
    """History: the probe of a module on a GPU met a batch on the host and failed; `meta` is the device here."""
    module = Toy().to("meta")
    monkeypatch.setattr(measure, "measure_profile", lambda timer: timer)
    monkeypatch.setattr(measure, "separated", lambda found, starts: found)
    timer = measure.profile(module, batch_of(8))
    assert {timer.place, timer.batch["x"].device} == {torch.device("meta")}
    assert timer.graph.path_names == toy()[3].path_names


def test_take_samples_cuts_what_counts_samples():
    batch = {
        "x": torch.arange(6).view(3, 2),
        "table": torch.zeros(5),
        "text": ["a", "b", "c"],
        "k": 2,
    }
    small = take_samples(batch, 3, 2)
    assert small["x"].tolist() == [[0, 1], [2, 3]]
    assert small["table"].shape == (5,)
    assert (small["text"], small["k"]) == (["a", "b"], 2)
    assert pytree.tree_structure(small["x"]) == pytree.tree_structure(batch["x"])


class InPlace(nn.Module):
    """Layers that write into what they are given, and one that is given a tensor twice."""

    def __init__(self):
        super().__init__()
        self.first, self.act = nn.Linear(8, 8), nn.ReLU(inplace=True)
        self.twice, self.last = nn.Bilinear(8, 8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.act(self.first(x))
        return self.last(self.twice(h, h))


def test_layer_by_layer_runs_layers_that_begin_in_place(monkeypatch):
    """History: such a layer was given a leaf, which torch lets nobody write into, and training did not start."""
    module = InPlace()
    step = lambda module, batch: module(batch).square().mean()
    batch = torch.randn(4, 8)
    graph = probe(module, step, batch)
    kept = {}
    for whole in (True, False):
        monkeypatch.setattr(measure.LayerTimer, "fits", whole)
        found = measured(module, step, batch, graph, sample_counts=(4,), repeats=1)
        layers = found.backbones[0].layers
        kept[whole] = {x.name: x.activation_bytes_per_sample for x in layers}
    assert kept[False]["twice"] <= 2 * kept[True]["last"]


@pytest.mark.slow
def test_layer_by_layer_finds_the_same_bytes_and_similar_times(monkeypatch):
    """Short measurements of both kinds take turns, as a busy machine slows both alike."""
    module, step, batch, graph = toy(num_samples=64, width=256)
    options = {"sample_counts": (64,), "repeats": 3, "finds_results": False}
    seconds = {True: [], False: []}
    for _ in range(5):
        layers = {}
        for whole in (True, False):
            monkeypatch.setattr(measure.LayerTimer, "fits", whole)
            layers[whole] = measured(module, step, batch, graph, **options).backbones[0].layers
            total_s = sum(x.forward_s.at(64) + x.backward_s.at(64) for x in layers[whole])
            seconds[whole].append(total_s)
    assert [layer.name for layer in layers[False]] == [layer.name for layer in layers[True]]
    for a, b in zip(layers[False], layers[True], strict=True):
        assert a.gradient_bytes == b.gradient_bytes
        assert a.boundary_bytes_per_sample == b.boundary_bytes_per_sample
    medians = {whole: statistics.median(found) for whole, found in seconds.items()}
    assert medians[False] == pytest.approx(medians[True], rel=0.5)


def test_a_step_that_runs_out_of_memory_is_timed_layer_by_layer(monkeypatch, caplog):
    module, step, batch, graph = toy()

    def full(*args):
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")

    monkeypatch.setattr(measure.StepRun, "measure", full)
    profile = measured(module, step, batch, graph, sample_counts=(2,), repeats=2)
    assert len(profile.backbones[0].layers) == len(graph.path)
    assert "tried to allocate" in caplog.text


class FakeGpu:
    """The memory of a GPU as torch and the driver tell it; the allocator keeps all that was ever used."""

    def __init__(self, monkeypatch, free_bytes, cached_bytes, used_bytes=0):
        self.free_bytes, self.cached_bytes, self.used_bytes = free_bytes, cached_bytes, used_bytes
        self.log = []
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free_bytes, 2**40))
        reserved = lambda device: self.cached_bytes + self.used_bytes
        monkeypatch.setattr(torch.cuda, "memory_reserved", reserved)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.used_bytes)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def empty_cache(self):
        self.log.append(self.cached_bytes)
        self.free_bytes, self.cached_bytes = self.free_bytes + self.cached_bytes, 0

    def run(self, num_bytes):
        """Tensors of that size come and go."""
        taken = max(num_bytes - self.cached_bytes, 0)
        self.free_bytes, self.cached_bytes = self.free_bytes - taken, self.cached_bytes + taken


@pytest.mark.parametrize("on_device", [False, True])
def test_what_fits_is_counted_with_what_is_there(on_device, monkeypatch):
    """Half of the memory that is free; what earlier steps have left in torch's cache counts as free."""
    module, step, batch, graph = toy()
    sizes = {name: 4 * p.numel() for name, p in module.named_parameters()}
    gradients = sum(size for name, size in sizes.items() if name in graph.trained)
    if on_device:
        gpu = torch.device("cuda", 0)
        monkeypatch.setattr(nn.Parameter, "device", gpu, raising=False)
    need = gradients + (0 if on_device else sum(sizes.values()))
    for spare, fits in ((4, True), (0, False)):
        FakeGpu(monkeypatch, free_bytes=need, cached_bytes=need + spare)
        timer = LayerTimer(module, step, batch, graph, device="cuda:0")
        assert timer.fits == fits


@pytest.mark.parametrize("shared_bytes", [2**28, 4 * 40])
def test_gradients_of_a_timed_step_share_memory(shared_bytes, monkeypatch):
    """History: ranks timed a model with gradients of all of it, of which each trains a part."""
    monkeypatch.setattr(step_run, "_SHARED_BYTES", shared_bytes)
    module = nn.Sequential(nn.Linear(7, 5), nn.Conv2d(2, 2, 3), nn.Linear(4, 5, bias=False))
    module[1].to(memory_format=torch.channels_last)
    module[2].double()
    named = dict(module.named_parameters())
    del named["1.bias"]
    numbers = 36 + 8 + 36, 20  # in float32, in float64, each in whole words of 16 bytes
    expected = 4 * min(numbers[0], shared_bytes // 4), 8 * min(numbers[1], shared_bytes // 8)
    with step_run.scratch_gradients(module, frozenset(named)):
        memory = [p.grad.untyped_storage() for p in named.values()]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in memory}
        assert sorted(sizes.values()) == sorted(expected)
        assert sum(expected) == step_run.scratch_bytes(named.values())
        for parameter in named.values():
            assert parameter.grad.stride() == parameter.stride()
            assert torch.equal(parameter.grad, torch.zeros_like(parameter))
        for value, parameter in enumerate(named.values()):
            parameter.grad.fill_(value)
        kept = [p.grad.eq(value).all().item() for value, p in enumerate(named.values())]
        assert all(kept) == (4 * sum(numbers) <= shared_bytes)
        assert module[1].bias.grad is None
    assert all(parameter.grad is None for parameter in named.values())


def test_measuring_gives_a_gpus_memory_back(monkeypatch):
    """History: torch kept it, so the same module no longer fitted once its layers had been timed."""
    module, step, batch, graph = toy()
    module.encoder.eval()
    gpu = FakeGpu(monkeypatch, free_bytes=2**30, cached_bytes=0)
    here = lambda tree, device: tree
    monkeypatch.setattr(measure, "placed", lambda module, device: nullcontext())
    monkeypatch.setattr(measure, "tree_to", here)
    places = []
    reprobe = lambda module, step, batch, graph: places.append("reprobed") or graph
    monkeypatch.setattr(measure, "reprobe", reprobe)

    def uses_all(module, batch):
        gpu.run(2**30)
        return step(module, batch)

    timer = LayerTimer(
        module, uses_all, batch, graph, device="cuda:0", sample_counts=(2,), repeats=1
    )
    profile = measure_profile(timer)
    assert profile.encoders[0].splittable is not None
    assert places == ["reprobed"]
    assert gpu.log[-1] == 2**30
    assert (gpu.free_bytes, gpu.cached_bytes) == (2**30, 0)


def test_random_numbers_of_the_gpu_are_put_back(monkeypatch):
    """Generators of the host stand for those of two GPUs, of which torch knows nothing until it is initialised."""
    module, step, batch, graph = toy()
    FakeGpu(monkeypatch, free_bytes=2**30, cached_bytes=0)
    now, generators = {"device": 0, "ready": False}, (torch.Generator(), torch.Generator())

    @contextmanager
    def device(chosen):
        before, now["device"] = now["device"], chosen.index
        yield
        now["device"] = before

    monkeypatch.setattr(torch.cuda, "init", lambda: now.update(ready=True))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: now["ready"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now["device"])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(measure, "placed", lambda module, device: nullcontext())
    monkeypatch.setattr(measure, "tree_to", lambda tree, device: tree)
    before = [generator.get_state() for generator in generators]

    def draws(module, batch):
        now["ready"] = True
        torch.rand(3, generator=generators[1])
        return step(module, batch)

    measured(
        module, draws, batch, graph, device="cuda:1", sample_counts=(2,), repeats=1,
        finds_results=False,
    )  # fmt: skip
    assert all(map(torch.equal, before, [generator.get_state() for generator in generators]))
    assert now["device"] == 0


def out_of_memory_at(count, step, log):
    """The step, out of memory for that many samples; the log has what is alive whenever it starts."""
    alive = weakref.WeakSet()

    def limited(module, batch):
        log.append((len(batch["x"]), len(alive)))
        hooks = [
            block.register_forward_hook(lambda _module, _args, out: alive.add(out))
            for block in module.blocks
        ]
        loss = step(module, batch)
        for hook in hooks:
            hook.remove()
        if len(batch["x"]) == count:
            raise torch.OutOfMemoryError("tried to allocate 1 TiB")
        return loss

    return limited


def test_a_step_out_of_memory_leaves_no_activations_behind(caplog):
    """History: its error kept all of them while smaller counts were timed, on a card that was full with them."""
    module, step, batch, graph = toy(num_samples=8)
    log = []
    gc.disable()  # a collection by chance would hide it
    try:
        profile = measured(
            module, out_of_memory_at(8, step, log), batch, graph, sample_counts=(2, 8, 4),
            repeats=1, finds_results=False,
        )  # fmt: skip
    finally:
        gc.enable()
    assert [n for n, _ in profile.backbones[0].layers[0].forward_s.points] == [2, 4]
    assert "cannot time 8 samples" in caplog.text
    failed = [count for count, _ in log].index(8)
    assert {alive for _, alive in log[failed + 1 :]} == {0}


def test_a_count_that_runs_out_of_memory_later_is_left_out(monkeypatch, caplog):
    """History: what had passed warm-up made all layers be timed one by one when it ran out of memory after."""
    module, step, batch, graph = toy()
    measure_step, runs = measure.StepRun.measure, []

    def full(run, call, interception, backward, *saving):
        runs.append(len(call.batch["x"]))
        if runs.count(4) == 3 and runs[-1] == 4:
            raise torch.OutOfMemoryError("tried to allocate 1 TiB")
        return measure_step(run, call, interception, backward, *saving)

    monkeypatch.setattr(measure.StepRun, "measure", full)
    monkeypatch.setattr(measure.LayerTimer, "_one_by_one", None)
    profile = measured(module, step, batch, graph, sample_counts=(2, 4), repeats=3)
    assert [n for n, _ in profile.backbones[0].layers[0].forward_s.points] == [2]
    assert "cannot time 4 samples" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("fits", [True, False])
def test_a_module_on_the_host_is_timed_on_a_gpu(fits, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(measure.LayerTimer, "fits", fits)
    module, step, batch, graph = toy(num_samples=64, width=512)
    before = everything(module)
    profile = measured(module, step, batch, graph, device="cuda", sample_counts=(8, 64), repeats=3)
    assert equal(before, everything(module))
    assert all(p.device.type == "cpu" for p in module.parameters())
    assert all(layer.forward_s.at(64) > 0 for layer in profile.backbones[0].layers)


def test_bytes_are_those_of_the_types_of_the_device(monkeypatch):
    """ "On the device" is where the step chooses half precision, as autocast does on a GPU only."""
    module, batch = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), torch.randn(2, 8)
    places = []

    @contextmanager
    def placed(module, device):
        places.append(device)
        yield
        places.pop()

    def step(module, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(places)):
            return module(x).float().square().mean()

    monkeypatch.setattr(measure, "placed", placed)
    monkeypatch.setattr(measure, "tree_to", lambda tree, device: tree)
    graph = probe(module, step, batch, max_share=0.1)
    found = measure.graph_of_device(LayerTimer(module, step, batch, graph, device="meta"))
    assert boundary_bytes(graph)[1:3] == (2 * 8 * 4,) * 2
    assert boundary_bytes(found)[1:3] == (2 * 8 * 2,) * 2
    assert measure.graph_of_device(LayerTimer(module, step, batch, graph)) is graph


def test_casts_of_weights_count_for_each_microbatch():
    """History: autocast's casts of the weights were divided by the largest number of samples timed."""
    width = 32
    module = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    step = in_precision(lambda module, batch: module(batch).sum(), "bf16-mixed", "cpu")
    batch = torch.ones(8, width)
    graph = probe(module, step, batch[:2])
    profile = measured(module, step, batch, graph, sample_counts=(1, 4), repeats=1)
    first, second = profile.backbones[0].layers
    assert first.activation_bytes_per_microbatch == 0  # no gradient goes on to the batch
    assert second.activation_bytes_per_microbatch == 2 * width * width
    assert first.activation_bytes_per_sample == second.activation_bytes_per_sample == 2 * width


def chain(*blocks):
    module = nn.Sequential(*blocks).train()
    batch, step = torch.randn(8, 16), lambda module, batch: module(batch).square().mean()
    return module, step, batch, probe(module, step, batch[:2], max_share=0.01)


def test_equal_blocks_are_alike_the_first_and_other_shapes_are_not():
    module, _, _, graph = chain(*(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 8))
    assert equal_layers(module, graph) == [[0], [1, 2, 3], [4]]  # nothing before 0 wants a gradient


def test_a_frozen_block_is_not_like_a_trained_one():
    blocks = [nn.Linear(16, 16) for _ in range(4)]
    blocks[2].requires_grad_(False)
    module, _, _, graph = chain(*blocks)
    assert equal_layers(module, graph) == [[0], [1, 3], [2]]


def test_a_disturbed_block_does_not_stand_out():
    """History: medians over blocks made the backward of a step with disturbances 6 to 8 % too short."""
    disturbed = StepTimes((9.0, 0, 0, 0), (1.0, 1.5, 7.0, 2.0), 0, (2.0, 9.0, 2.5, 4.0), 0)
    times = averaged(disturbed, [[0, 1, 2], [3]])
    assert times.inside == pytest.approx((9.5 / 3, 9.5 / 3, 9.5 / 3, 2.0))
    assert times.backward == (4.5, 4.5, 4.5, 4.0)
    assert times.before == disturbed.before
    assert times.total_s == pytest.approx(disturbed.total_s)


def test_a_profile_gives_alike_layers_one_time():
    """Profiles of three runs differed by half from block to block, and stages were cut accordingly."""
    module, step, batch, graph = chain(*(nn.Linear(16, 16) for _ in range(6)))
    profile = measure_profile(
        LayerTimer(module, step, batch, graph, sample_counts=(4,), repeats=3, finds_results=False)
    )
    middle = profile.backbones[0].layers[1:-1]
    assert len({layer.backward_s for layer in middle}) == 1


@dataclass
class Entry:
    index: int
    frozen: bool


class Graph:
    """As much of a `LayerGraph` as attribution reads; "f" is a frozen layer, "t" one of the path."""

    def __init__(self, kinds, calls=()):
        self.layers = tuple(Entry(i, kind == "f") for i, kind in enumerate(kinds))
        self.frozen = tuple(i for i, kind in enumerate(kinds) if kind == "f")
        self.path = tuple(i for i, kind in enumerate(kinds) if kind == "t")
        self.calls = tuple(ContainerCall("container", *span, draws_random=False) for span in calls)


def times(before, inside, tail=0.0, backward=None, backward_tail=0.0):
    return StepTimes(
        tuple(before), tuple(inside), tail, tuple(backward or [0.0] * len(inside)), backward_tail
    )


@pytest.mark.parametrize(
    ("graph", "tail", "expected_s"),
    [
        # Glue counts for the layer that it feeds, and the loss for the last one.
        (Graph("tt"), 16, [11, 20 + 2 + 16]),
        # In front of a frozen layer it counts for the path, too; not inside a frozen container, but in a mixed one.
        (Graph("ftft"), 16, [11, 20 + 2 + 1, 34, 40 + 8 + 4 + 16]),
        (Graph("fft", calls=[(0, 2)]), 0, [11, 22, 30 + 4 + 1]),
        (Graph("fft", calls=[(0, 3)]), 0, [11, 22, 30 + 4 + 1 + 2]),
        # A frozen layer behind the path keeps its own.
        (Graph("tf"), 16, [11 + 16, 22]),
    ],
)
def test_what_glue_counts_for(graph, tail, expected_s):
    count = len(graph.layers)
    glue_s, layers_s = [1, 2, 4, 8][:count], [10, 20, 30, 40][:count]
    assert forward_s(graph, times(glue_s, layers_s, tail=tail)) == expected_s


def test_the_backward_of_the_loss_counts_for_the_last_layer():
    graph = Graph("ftt")
    whole = times([0] * 3, [0] * 3, backward=[0, 5, 6], backward_tail=2)
    assert backward_s(graph, whole) == [0, 5, 6 + 2]


def test_total_is_the_whole_step():
    whole = times([1, 2], [10, 20], tail=4, backward=[5, 6], backward_tail=2)
    assert whole.total_s == pytest.approx(50)


def test_glue_at_the_top_is_repeated_by_every_stage():
    graph = Graph("ffttft", calls=[(0, 2)])
    whole = times([1, 2, 4, 8, 16, 32], [0] * 6)
    assert repeated_s(graph, whole) == 1 + 4  # not what lies between the frozen layers 0 and 1


def test_a_later_stage_pays_for_it_again():
    layers = tuple(
        LayerProfile(name, Seconds.per_sample(1.0), Seconds.per_sample(2.0)) for name in "ab"
    )
    backbone = BackboneProfile("backbone", layers, Seconds.per_sample(0.25))
    profile = ModelProfile("two layers", (backbone,))
    model = CostModel(profile, Cluster(2))
    assert model.forward_s(LayerRun(0, 2), 4) == 8
    assert model.forward_s(LayerRun(0, 1), 4) == 4
    assert model.forward_s(LayerRun(1, 2), 4) == 4 + 1
    assert ModelProfile.from_json(profile.to_json()) == profile
