"""DistriFusion: displaced patch parallelism for U-Nets and transformers, on the model's own forward.

Reading order: `sampler.py` (the loop, and calls of the model from step to step), `band_call.py` (one call on a
band, and what operators do there, group norm among them), `bands.py` (rows), `exchange.py` (what is remembered from
step to step), `analysis.py` (what is found out about a model).
"""

from lightning_diffpipe.sampling.distrifusion.sampler import DistriFusion, emulate

__all__ = ["DistriFusion", "emulate"]
