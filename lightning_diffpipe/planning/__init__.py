"""The planner, from a profile to the programs of all ranks: pure functions and frozen data, standard library only.

Read the files in the order in which a plan comes about:

    profile -> cluster -> cost, memory -> partition -> instruction -> schedule (laws) -> schedules/ -> lowering
    -> timeline -> simulator -> filling -> proposals, bounds -> evaluation -> search -> plan
"""

from lightning_diffpipe.planning.cluster import Cluster, Link
from lightning_diffpipe.planning.options import PlanOptions
from lightning_diffpipe.planning.plan import PipelinePlan
from lightning_diffpipe.planning.profile import ModelProfile
from lightning_diffpipe.planning.search import find_plan
from lightning_diffpipe.planning.simulator import simulate

__all__ = (
    "Cluster", "Link", "ModelProfile", "PipelinePlan", "PlanOptions", "find_plan", "simulate",
)  # fmt: skip
