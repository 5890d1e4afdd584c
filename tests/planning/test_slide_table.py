"""The table of bubbles on DiffusionPipe's slides, from plans without filling.

Upper numbers: bubble ratio with the frozen part before the pipeline, on all ranks. Lower numbers:
bubble time over frozen time. One ratio of frozen to trained time gives all 48: x = 0.8944.

Source: DiffusionPipe, Tian et al. (MLSys 2024), slides; x and the reading of the lower row are ours.
"""

import pytest

from lightning_diffpipe.planning.cluster import Cluster
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.search import find_plan

from .profiles import equal_profile

X = 0.8944
TABLE = {
    (4, 1): (61.3, 335.4),
    (4, 2): (44.2, 167.7),
    (4, 3): (34.5, 111.8),
    (4, 4): (28.4, 83.9),
    (3, 1): (51.4, 223.6),
    (3, 2): (34.5, 111.8),
    (3, 3): (26.0, 74.5),
    (3, 4): (20.9, 55.9),
    (2, 1): (34.5, 111.8),
    (2, 2): (20.9, 55.9),
    (2, 3): (15.0, 37.3),
    (2, 4): (11.7, 28.0),
}


@pytest.mark.parametrize(("S", "M"), TABLE)
@pytest.mark.parametrize(("layers_per_stage", "partition"), [(1, "auto"), (6, "uniform")])
def test_all_numbers_of_the_table(S, M, layers_per_stage, partition):
    options = PlanOptions(
        48, num_stages=S, num_microbatches=M, data_parallel=1, filling="none", partition=partition
    )
    plan = find_plan(equal_profile(S * layers_per_stage, X), Cluster(S), options)
    bubble_s = plan.planned.bubble_ratio * plan.planned.iteration_s
    frozen_s = plan.planned.frozen_s / S
    printed = (round(100 * plan.planned.bubble_ratio, 1), round(100 * bubble_s / frozen_s, 1))
    assert printed == TABLE[S, M]


def test_equal_stages_are_not_the_best_way_to_cut_equal_layers():
    """Later stages wait longer for their first work; with less of it they end earlier."""
    options = PlanOptions(48, num_stages=4, num_microbatches=4, data_parallel=1)
    plan = find_plan(equal_profile(12, X), Cluster(4), options)
    assert [stage.num_layers for stage in plan.stages] == [4, 3, 3, 2]
    assert plan.planned.bubble_ratio < 0.284
