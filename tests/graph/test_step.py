"""What a run of the step leaves as it was.

Sizes of layers, to which profiling adds times and saved bytes.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassPrecision, MulticlassRecall

from lightning_diffpipe.graph.sizes import layer_sizes
from lightning_diffpipe.graph.step import logged_values
from lightning_diffpipe.graph.trial import untouched
from lightning_diffpipe.planning.profile import Seconds
from lightning_diffpipe.profiling.measure import LayerTimer, measure_profile
from tests.profiling.toys import toy


class Keeps(nn.Module):
    """Keeps what steps keep: lists, counts and averages, named for others or not."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.losses, self._seen, self.latest = [0.5], [], deque([1, 2], maxlen=2)
        self.words, self.by_class = Counter("aab"), defaultdict(list, {0: [1.0]})
        self.names, self.order = {"a"}, OrderedDict(b=1, a=2)
        self.nested = {"train": {"loss": [0.5]}}
        self.register_buffer("seen", torch.zeros(()))

    def step(self):
        self.losses.append(0.25)
        self._seen.append("x")
        self.latest.append(3)
        self.words["z"] += 1
        self.by_class[0].append(2.0)
        self.by_class[1].append(3.0)
        self.names.add("b")
        self.order["c"] = 3
        self.order.move_to_end("b")
        self.nested["train"]["loss"].append(0.25)
        self.nested["val"] = {}
        self.register_buffer("late", torch.zeros(()))
        self.seen += 1


KEPT = ("losses", "_seen", "latest", "words", "by_class", "names", "order", "nested")


def test_containers_and_buffers_are_what_they_were():
    """History: what a dict held, and private lists, had entries of runs before training."""
    module, fresh = Keeps(), Keeps()
    held = {name: getattr(module, name) for name in KEPT}
    with untouched(module):
        module.step()
        assert all(getattr(module, name) != getattr(fresh, name) for name in KEPT)
    for name in KEPT:
        assert getattr(module, name) is held[name]
        assert getattr(module, name) == getattr(fresh, name), name
    assert module.latest.maxlen == 2
    assert module.by_class.default_factory is list
    assert list(module.order) == ["b", "a"]
    assert dict(module.named_buffers()).keys() == {"seen"}
    assert module.seen == 0


def test_containers_of_a_root_are_restored_in_any_case():
    module = Keeps()
    with untouched(module, []):
        module.losses.append(1.0)
        module.nested["train"]["loss"].append(1.0)
    assert module.losses == module.nested["train"]["loss"] == [0.5]


def test_what_a_large_container_holds_is_not_searched():
    """History: each step walked all captions of a data set, element by element, for half a second and more."""
    module = nn.Module()
    module.captions = {index: ["a", "b"] for index in range(1001)}
    with untouched(module):
        module.captions[0].append("c")
        module.captions[1001] = []
    assert len(module.captions) == 1001
    assert module.captions[0] == ["a", "b", "c"]


class Averages(nn.Module):
    def __init__(self, size=2):
        super().__init__()
        self.average, self.inner = torch.zeros(size), nn.Module()
        self.inner.average = torch.zeros(size)


def rebound(module):
    module.average = module.average + 1


def added(module):
    module.average += 1


def added_with_graph(module):
    module.average += torch.ones((), requires_grad=True)


def multiplied(module):
    module.average.add_(1).mul_(0.5)


def through_data(module):
    module.average.data.fill_(1)


WRITES = (rebound, added, added_with_graph, multiplied, through_data)


@pytest.mark.parametrize("write", WRITES)
def test_tensors_that_are_attributes_are_what_they_were(write):
    """History: one that was written in place kept what runs before training had added to it."""
    module = Averages()
    tensors = module.average, module.inner.average
    with untouched(module):
        write(module)
        write(module.inner)
        assert module.average.any()
    assert (module.average, module.inner.average) == tensors  # the same objects
    for tensor in tensors:
        assert not tensor.any()
        assert tensor.is_leaf
        assert not tensor.requires_grad


def test_large_tensors_are_not_copied():
    module = Averages(2**18 + 1)
    with untouched(module):
        rebound(module)
        added(module.inner)
    assert not module.average.any()
    assert module.inner.average.all(), "docstring of untouched"


def test_tensors_that_nothing_can_be_written_into_stay_alone(tmp_path):
    np.save(tmp_path / "table.npy", np.ones(3))
    module = nn.Module()
    with torch.inference_mode():
        module.prompt = torch.ones(2)
    module.scale = torch.full((1,), torch.nan).expand(4)
    module.column = torch.ones(2, 2, requires_grad=True).exp()
    with pytest.warns(UserWarning, match="not writable"):
        module.table = torch.from_numpy(np.load(tmp_path / "table.npy", mmap_mode="r"))
    versions = module.column._version, module.table._version
    with untouched(module):
        pass
    assert versions == (module.column._version, module.table._version)
    with untouched(module), torch.inference_mode():
        module.prompt += 1
    assert torch.equal(module.prompt, torch.ones(2))


def test_metrics_of_a_group_share_their_state_when_they_are_logged():
    """History: each was given a copy of it, as Lightning's own test of compute groups found."""
    root = nn.Module()
    root.metrics = MetricCollection([MulticlassPrecision(3), MulticlassRecall(3)], prefix="train/")
    for _ in range(2):  # groups are found by the first
        root.metrics.update(torch.eye(3), torch.arange(3))
    logged = logged_values(root, ((root.metrics,), {}))[0][0]
    assert {name: value.attribute for name, value in logged.items()} == {
        f"train/{name}": f"metrics.{name}" for name in ("MulticlassPrecision", "MulticlassRecall")
    }
    one, other = dict.values(root.metrics._modules)
    assert one.tp is other.tp


NOTHING = Seconds.per_sample(0.0)


def without_times(profile):
    """What does not depend on a run."""
    (backbone,) = profile.backbones
    layers = (
        replace(
            layer, forward_s=NOTHING, backward_s=NOTHING, weight_gradient_s=None,
            activation_bytes_per_sample=0, activation_bytes_per_microbatch=0,
        )
        for layer in backbone.layers
    )  # fmt: skip
    backbone = replace(backbone, layers=tuple(layers), repeated_s=None, split_s=None)
    encoders = (
        replace(e, layers=tuple(replace(layer, forward_s=NOTHING) for layer in e.layers))
        for e in profile.encoders
    )
    return replace(profile, backbones=(backbone,), encoders=tuple(encoders))


def test_profiling_adds_times_to_sizes_and_changes_none():
    module, step, batch, graph = toy()
    sizes = layer_sizes(module, graph)
    timer = LayerTimer(
        module, step, batch, graph, sample_counts=(2,), repeats=3, finds_results=False
    )
    profile = measure_profile(timer)
    assert without_times(profile) == sizes
    assert sum(x.parameter_bytes for x in (*sizes.layers, *sizes.frozen_layers)) == sum(
        p.nbytes for p in module.parameters()
    )
    assert all(x.forward_s.at(2) > 0 for x in (*profile.layers, *profile.frozen_layers))
