"""Microbatches: what is cut, what stays whole, and what is refused.

Seeds that ranks share.
"""

import random
from collections import UserDict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from lightning_diffpipe.errors import ConfigurationError
from lightning_diffpipe.graph import rng
from lightning_diffpipe.graph.rng import isolated_random_numbers
from lightning_diffpipe.graph.step import BatchSpec, add_sample, count_samples, take_samples
from lightning_diffpipe.runtime.batch_layout import (
    BatchLayout,
    microbatch_sizes,
    num_samples,
    split,
)


def test_sizes_are_even_and_complete():
    for samples in range(1, 40):
        for count in range(1, samples + 1):
            sizes = microbatch_sizes(samples, count)
            assert len(sizes) == count
            assert sum(sizes) == samples
            assert max(sizes) - min(sizes) <= 1


def test_a_batch_smaller_than_its_microbatches_is_cut_into_fewer():
    assert microbatch_sizes(3, 4) == (1, 1, 1)


def test_tensors_and_lists_are_cut_and_containers_kept():
    batch = {
        "x": torch.arange(5),
        "text": list("abcde"),
        "pair": (torch.arange(10).view(5, 2), 7),
        "t": torch.tensor(3),
    }
    first, second = split(batch, [3, 2])
    assert first["text"] == ["a", "b", "c"]
    assert second["x"].tolist() == [3, 4]
    assert second["pair"][0].tolist() == [[6, 7], [8, 9]]
    assert second["pair"][1] == 7
    assert second["t"] is batch["t"]


def test_a_list_of_tensors_is_a_container():
    """DataLoader turns (x, y) samples into a list [x, y], which must not be cut in two."""
    x, y = split([torch.arange(4), torch.arange(4, 8)], [2, 2])[1]
    assert x.tolist() == [2, 3]
    assert y.tolist() == [6, 7]


SizeAndName = namedtuple("SizeAndName", "size name")
PER_SAMPLE = {
    "tuple of captions": ("a", "b", None),
    "captions, one missing": ["a", None, "c"],
    "sizes": [(8, 8), (8, 9), (9, 9)],
    "numpy numbers": [np.int64(1), np.int64(2), np.int64(3)],
    "array": np.arange(6).reshape(3, 2),
    "images": [Image.new("L", (2, 2), value) for value in (1, 2, 3)],
    "several captions each": [["a", "b"], ["c"], ["d", "e", "f"]],
    "scores": [torch.tensor(value) for value in (1.0, 2.0, 3.0)],
}


@pytest.mark.parametrize("part", PER_SAMPLE.values(), ids=PER_SAMPLE)
def test_whatever_has_one_entry_per_sample_is_cut(part):
    """History: only lists of plain values were; every microbatch got all entries of anything else."""
    batch = {"x": torch.zeros(3), "part": part}
    assert num_samples(batch) == count_samples(batch) == 3
    first, second = (piece["part"] for piece in split(batch, [2, 1]))
    assert type(first) is type(part)
    for piece, expected in ((first, part[:2]), (second, part[2:])):
        assert piece is not part
        assert all(a is b or np.array_equal(a, b) for a, b in zip(piece, expected, strict=True))
    assert len(take_samples(batch, 3, 2)["part"]) == 2
    more = add_sample(batch, 3)["part"]
    assert len(more) == 4
    assert more[3] is part[0] or np.array_equal(more[3], part[0])


@pytest.mark.parametrize(
    "part",
    [
        (64, 64),
        [torch.zeros(2), torch.ones(2)],
        [{"x": torch.zeros(2)}, [(torch.ones(2), 1)]],
        [{"names": ("a", "b")}, 1],
        (None, None),
        SizeAndName("a", "b"),
    ],
)
def test_as_many_values_as_there_are_samples_may_still_be_shared(part):
    batch = {"x": torch.zeros(2), "part": part}
    assert num_samples(batch) == 2
    for changed in (split(batch, [1, 1])[1], take_samples(batch, 2, 1), add_sample(batch, 2)):
        assert len(changed["part"]) == 2
        assert type(changed["part"]) is type(part)


def test_captions_that_a_collate_function_turned_by_place_are_cut_by_sample():
    """As many captions for each sample as there are samples: default_collate gives tuples over samples."""
    batch = [torch.zeros(2), [("a", "b"), ("c", "d")]]
    assert split(batch, [1, 1])[1][1] == [("b",), ("d",)]


PAIRS = {
    "two captions each": ("short", "long"),
    "sizes": torch.tensor([512, 512]),
    "two sizes each": [torch.zeros(2), torch.ones(2)],
}


@pytest.mark.parametrize("entry", PAIRS.values(), ids=PAIRS)
def test_two_pairs_are_distinguished_from_two_parts_by_a_larger_batch(entry):
    """History: of a probe on two samples, and of a last batch of two, every microbatch got halves of both."""
    large, small = ({"x": torch.zeros(n), "part": [entry] * n} for n in (8, 2))
    batch_spec = BatchSpec.of(large, 8)
    first, second = split(small, [1, 1], batch_spec)
    assert len(first["part"]) == len(second["part"]) == 1
    assert second["part"][0] is entry
    assert len(add_sample(small, 2, batch_spec)["part"]) == 3
    assert add_sample(small, 2, batch_spec)["part"][2] is entry


def test_two_parts_are_distinguished_from_two_pairs_by_a_larger_batch():
    large, small = ([torch.zeros(n), [("a",) * n, ("b",) * n]] for n in (8, 2))
    assert split(small, [1, 1], BatchSpec.of(large, 8))[1][1] == [("a",), ("b",)]


def test_a_batch_of_another_structure_is_decided_by_itself():
    batch_spec = BatchSpec.of({"x": torch.zeros(8, 2), "caption": None, "scale": 2.0}, 8)
    for other in (
        {"x": torch.zeros(2, 2), "caption": ["a", "b"], "scale": 2.0},
        {"x": torch.zeros(2, 2), "caption": None, "scale": torch.ones(2)},
        {"x": torch.zeros(2, 2), "caption": None, "scale": (torch.ones(2), 1.0)},
        {"x": torch.zeros(2, 2)},
        [torch.zeros(2, 2)],
    ):
        got, expected = split(other, [1, 1], batch_spec), split(other, [1, 1])
        assert repr(got) == repr(expected)


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        ({"a": 1}, "no tensor and no list"),
        ({"x": torch.zeros(4), "y": torch.zeros(3)},
         r"\['x'\]: 4, \['y'\]: 3.*loaders of one batch size do; .*split_batch"),
        ((torch.zeros(2), ("a", "b", "c")), r"\[0\]: 2, \[1\]: 3"),
        # History: they went to every microbatch whole.
        ({"x": torch.zeros(2), "tokens": UserDict(ids=torch.zeros(2, 3))},
         r"\['tokens'\] is a UserDict, whose tensors"),
        # History: "Internal error: NestedTensorImpl doesn't support sizes. Please file an issue.".
        ({"x": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])},
         r"\['x'\] is a nested tensor.*to_padded_tensor"),
    ],
)  # fmt: skip
def test_batches_of_which_nobody_knows_the_samples_are_refused_by_name(batch, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        num_samples(batch)


class AskedForNothing:
    """The place of a rank that sums nothing over pipelines."""

    backend = "gloo"

    def summed_over_pipelines(self, number):
        raise AssertionError("a step that returns weights needs no sum over pipelines")


def test_losses_with_weights_of_their_own_ask_no_other_pipeline():
    """History: every such batch waited for the sum of all samples, which nothing reads."""
    layout = BatchLayout(nn.Module(), None, None, None, AskedForNothing(), 0)
    weighted = SimpleNamespace(graph=SimpleNamespace(weighted=True))
    works = [SimpleNamespace(num_samples=n, partitioned=weighted) for n in (3, 2)]
    layout.weigh(works, accumulate=2)
    assert [work.loss_scale for work in works] == [0.5, 0.5]


def test_all_generators_are_seeded_and_put_back(monkeypatch):
    """History: that of a GPU was not, and ranks validated with noise of their own."""
    gpu = torch.Generator()  # stands for that of a GPU
    monkeypatch.setattr(rng, "_cuda_generator", lambda: gpu)

    def draw():
        return [
            random.random(), np.random.rand(), float(torch.rand(())),
            float(torch.rand((), generator=gpu)),
        ]  # fmt: skip

    drawn = []
    for _ in range(2):
        before = rng.capture(host=True)
        with isolated_random_numbers(7):
            drawn.append(draw())
        after = rng.capture(host=True)
        assert torch.equal(before.cpu, after.cpu)
        assert torch.equal(before.cuda, after.cuda)
        assert before.host[0] == after.host[0]
        draw()
    assert drawn[0] == drawn[1]
