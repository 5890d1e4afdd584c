"""Which layers are timed as one."""

import pytest
import torch
from torch import nn

from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.graph.sizes import equal_layers
from lightning_diffpipe.profiling.layer_costs import averaged
from lightning_diffpipe.profiling.measure import LayerTimer, measure_profile
from lightning_diffpipe.profiling.step_run import StepTimes


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
