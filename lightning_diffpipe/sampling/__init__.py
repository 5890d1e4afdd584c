"""Sampling: one latent, all ranks, less time to the picture.

A `Request` says what is sampled; a `Sampler` says how. All samplers return the same full latents on every
rank, and each has an emulator: the same code in one process.

    prompts      predictor · source · skeleton · loras        a model without weights, and those of one rank
       │
    the loop     call · loop · record · dry_run · schedulers  a pipeline's own `__call__`, run step by step
       │
    a request    request · one_process                        what every method is given, and is compared with
       │
    methods      pipefusion/ · distrifusion/                  by `methods.py` on the axes of `mesh.py`; `auto.py`
       │                                                      chooses one
    a model      tracing/                                     how a transformer can be run in parts

Besides: `world.py` (all ranks), `digests.py` (have all the same model?), `memory.py` (what fails for want of it);
`statistics.py`, `freshness.py` and `report.py` are what a request took.
"""
