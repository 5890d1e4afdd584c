"""A file for each way to order work, with its `ScheduleSpec`s; here they get the names of options and plans.

The turns of sampling are `PipeFusionPlan.turns`.
"""

from lightning_diffpipe.planning.schedule import ScheduleSpec
from lightning_diffpipe.planning.schedules.gpipe import gpipe
from lightning_diffpipe.planning.schedules.interleaved import interleaved
from lightning_diffpipe.planning.schedules.list_scheduling import bidirectional, v, zero_bubble_v
from lightning_diffpipe.planning.schedules.one_f_one_b import (
    deep_one_f_one_b,
    one_f_one_b,
    zero_bubble,
)
from lightning_diffpipe.planning.schedules.pipedream import (
    pipedream,
    pipedream_2bw,
    pipedream_vertical_sync,
)

_SPECS = (
    one_f_one_b, deep_one_f_one_b, gpipe, zero_bubble, interleaved, v, zero_bubble_v, bidirectional,
    pipedream, pipedream_vertical_sync, pipedream_2bw,
)  # fmt: skip

SCHEDULES: dict[str, ScheduleSpec] = {spec.name: spec for spec in _SPECS}
"""By the name that options and plans use; the first is the default."""

DEFAULT_SCHEDULE = _SPECS[0].name
