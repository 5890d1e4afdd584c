"""Doing it: a rank runs its program of instructions, and decides nothing.

Read in this order: `stage` (one microbatch through one stage), `executor` (the loop), `engine` (a batch in,
gradients out), `batch_layout`, `partitioned` (a batch to one rank's work), `upcoming`, `bubbles` (frozen layers, of
coming batches too), `reduction`, `results`; `ownership` and `relay` bring together what is divided.
"""
