"""DistriFusion: displaced patch parallelism for U-Nets and transformers, on the model's own forward.

Reading order: `sampler.py` (the loop), `calls.py` (calls of the model, from step to step), `band_call.py` (one call
on a band, and what operators do there), `bands.py` (rows), `exchange.py` (messages), `moments.py` (group norm),
`constants.py` (layers of texts), `analysis.py` (what is found out about a model), `emulate.py` (one process).
"""

from lightning_diffpipe.sampling.distrifusion.emulate import emulate
from lightning_diffpipe.sampling.distrifusion.sampler import DistriFusion

__all__ = ["DistriFusion", "emulate"]
