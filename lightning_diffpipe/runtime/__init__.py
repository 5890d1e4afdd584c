"""Doing it: a rank runs its program of instructions, and decides nothing.

Read in this order: `stage` (one microbatch through one stage), `executor` (the loop), `engine` (a batch in,
gradients out), `frozen_work`, `bubbles`, `shares` (frozen layers of coming batches), `reduction`, `results`;
`checkpoint` and `relay` bring what is divided together again.
"""
