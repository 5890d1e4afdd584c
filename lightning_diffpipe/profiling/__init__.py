"""Costs of a step: every layer timed on this machine, or modelled for another one.

The door is `profile(module, batch)`. Behind it, in this order: `step_run` (what the time of a layer is: stamps at
the borders of layers), `measure` (many runs at several sample counts), `layer_costs` (their times put to the sizes
of layers: a profile). `modelled` answers without computing anything.
"""

from lightning_diffpipe.profiling.measure import profile

__all__ = ["profile"]
