"""Sampling: one latent, all ranks, less time to the image.

A `Request` says what is sampled; a `Sampler` says how. All samplers return the same full latents on every rank, and
each has an emulator: the same code in one process.

    prompts      predictor · source · skeleton                a model without weights, and those of one rank,
                 adapters                                     with what is added to it
       │
    the loop     dry_run · call · loop · record · schedulers  a pipeline's own `__call__`, run step by step
       │
    a request    request                                      what every method is given, and is compared with
       │
    methods      pipefusion/ · distrifusion/                  by `methods.py`, which may choose one, on the axes
       │                                                      of `world.py`
    a model      tracing/                                     how a transformer can be run in parts

Besides: `world.py` (all ranks), `digests.py` (have all the same model?), `rehearsal.py` (do parts compute the
same?), `decoding.py` (tiles and images, on all ranks), `report.py` (what did a request take?).
"""
