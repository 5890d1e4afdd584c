"""Families of diffusers pipelines that can be sampled by several ranks.

family         the table: formulas of one step, per kind of pipeline
call           one request as plain values; made into a `Request` on every rank
interception   the pipeline's own code around the sampler
skeleton       a denoiser without weights, and the weights of some of its parameters
"""

from lightning_diffpipe.sampling.families.call import Call
from lightning_diffpipe.sampling.families.family import Family, family_named, family_of, register
from lightning_diffpipe.sampling.families.interception import intercepted

__all__ = ["Call", "Family", "family_named", "family_of", "intercepted", "register"]
