"""Sampling: one latent, all ranks, less time to the picture.

A `Request` says what is sampled; a `Sampler` says how. All samplers return the same full latents on every
rank, and each has an emulator: the same code in one process.

Reading order: `loop.py`, `record.py`, `outline.py`, `call.py`, `request.py`, `comm/links.py`, `tokens.py`,
`layout.py`, `probe.py`, `patch.py`, `kv_cache.py`, `stages.py`, `pipefusion.py`, `pipefusion_run.py`,
`sequence_parallel.py`.
"""
