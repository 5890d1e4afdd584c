"""Calls of equal blocks run once for the same marks, and only for these."""

import functools

import pytest
import torch
from torch import nn

from lightning_diffpipe.sampling.tracing.marks import BlockKinds, RepeatedCalls

NAN = float("nan")


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor, self.weight = factor, nn.Parameter(torch.randn(2))

    def forward(self, x, shift=0.0):
        return x * self.weight * self.factor + shift


def sources(calls, factors=(1, 1, 1), **options):
    """Which call ran in place of each: a call is the number of a block, and what it is given."""
    blocks = nn.ModuleList(map(Scaled, factors))
    repeats = RepeatedCalls(BlockKinds(blocks), **options)
    for number, x in calls:
        out = repeats.answer(str(number), (x,), {}, lambda n=number, x=x: blocks[n](x))
        assert torch.equal(out.isnan(), blocks[number](x).isnan())
    return repeats.sources


def test_a_call_is_answered_like_one_of_an_equal_block_on_equal_marks():
    first, second = torch.tensor([NAN, 1.0]), torch.tensor([1.0, NAN])
    assert sources([(0, first), (1, first + 1), (2, second), (0, second), (1, first)]) == [
        0,
        0,
        2,
        2,
        0,
    ]


def test_other_settings_shapes_types_and_numbers_make_calls_differ():
    x = torch.ones(2)
    assert sources([(0, x), (1, x)], factors=(1, 2)) == [0, 1]
    assert sources([(0, x), (1, x[None]), (2, x.double())]) == [0, 1, 2]
    assert sources(
        [(0, torch.tensor([1, 2])), (1, torch.tensor([1, 2])), (2, torch.tensor([2, 1]))]
    ) == [0, 0, 2]


class Setting:
    """An object of a user's, such as an attention processor."""

    def __init__(self, value):
        self.value = value


def scaled_by(factor):
    return lambda x: x * factor


def prepared(change, value):
    block = Scaled(1)
    change(block, value)
    return block


@pytest.mark.parametrize(
    "change",
    [
        lambda block, value: setattr(block, "processor", Setting(value)),
        lambda block, value: setattr(block, "processor", {"scale": [value]}),
        lambda block, value: setattr(block, "act", functools.partial(torch.mul, value)),
        lambda block, value: setattr(block, "forward", functools.partial(torch.mul, value)),
        lambda block, value: block.register_forward_hook(functools.partial(max, value)),
        lambda block, value: block.register_buffer("index", torch.tensor([value, 0])),
        lambda block, value: block.to([torch.float16, torch.float32, torch.float64][value]),
    ],
)  # fmt: skip
def test_blocks_differ_by_objects_functions_hooks_buffers_and_types(change):
    """History: a time embedding's projection was kept for all steps, as that of another block was constant."""
    kinds = BlockKinds(nn.ModuleList(prepared(change, value) for value in (1, 1, 2)))
    first, second, third = (kinds.of(str(number), (torch.ones(2),), {}) for number in range(3))
    assert first == second != third


def test_calls_on_objects_are_equal_if_all_that_is_in_these_is():
    x, kinds = torch.ones(2), BlockKinds(nn.ModuleList(map(Scaled, (1, 1))))
    assert kinds.of("0", (x, x.shape), {}) == kinds.of("1", (x, x.shape), {})
    assert kinds.of("0", (x, Setting(1)), {}) == kinds.of("1", (x, Setting(1)), {})
    assert kinds.of("0", (x, Setting(1)), {}) != kinds.of("1", (x, Setting(2)), {})
    assert kinds.of("0", (x, Setting(x)), {}) != kinds.of("1", (x, Setting(x)), {})
    blocks = nn.ModuleList(map(Scaled, (1, 1)))
    for block in blocks:
        block.act = scaled_by(block.factor)
    kinds = BlockKinds(blocks)
    assert kinds.of("0", (x,), {}) != kinds.of("1", (x,), {}), "nobody looks into closures"


def test_where_numbers_matter_only_results_of_blocks_may_be_other_tensors():
    x = torch.ones(2)
    assert sources([(0, x), (1, x), (2, x.clone())], by_value=True) == [0, 0, 2]
    blocks = nn.ModuleList(map(Scaled, (1, 1, 1)))
    repeats = RepeatedCalls(BlockKinds(blocks), by_value=True)
    for number in range(3):
        x = repeats.answer(str(number), (x,), {}, lambda n=number, x=x: blocks[n](x))
    assert repeats.sources == [0, 1, 1]


def test_a_call_that_writes_into_what_it_is_given_is_not_remembered():
    repeats = RepeatedCalls(BlockKinds(nn.ModuleList(map(Scaled, (1, 1)))))
    for number in range(2):
        given = torch.ones(2)
        repeats.answer(str(number), (given,), {}, lambda x=given: x.fill_(NAN))
    assert repeats.sources == [0, 1]


def test_what_is_written_into_an_answer_changes_no_later_one():
    x, blocks = torch.ones(2), nn.ModuleList(map(Scaled, (1, 1, 1)))
    repeats = RepeatedCalls(BlockKinds(blocks))
    for number in range(3):
        out = repeats.answer(str(number), (x,), {}, lambda n=number: blocks[n](x))
        assert out.isfinite().all()
        out.data.fill_(NAN)
    assert repeats.sources == [0, 0, 0]
