"""What it costs: every layer timed on this machine, or modelled for another one.

Read in this order: `glue` (what the time of a layer is), `clock`, `step_run` (stamps at the borders of
layers), `measure` (many runs, medians), `assembly` (into a profile); `cache` keeps profiles on disk,
`profiler` is the public function. `estimate` and `modelled` answer without running anything.
"""

from lightning_diffpipe.profiling.measure import Subject, measure_profile
from lightning_diffpipe.profiling.profiler import profile

__all__ = ["Subject", "measure_profile", "profile"]
