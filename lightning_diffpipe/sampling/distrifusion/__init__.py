"""DistriFusion: displaced patch parallelism for U-Nets and transformers, on the model's own forward.

Reading order: `sampler.py` (the loop), `band_call.py` (one call on a band), `rules.py` (operators),
`exchange.py` (messages), `moments.py` (group norm), `noise.py` (generators), `facts.py` and `ink.py` (what is
found out about a model).
"""

from lightning_diffpipe.sampling.distrifusion.emulate import emulate
from lightning_diffpipe.sampling.distrifusion.sampler import DistriFusion

__all__ = ["DistriFusion", "emulate"]
