"""What we pipeline: any callable that calls modules, probed into a graph of layers, run as stages.

Read in this order: `layer` (the data); `calltree`, `provenance`, `trace`, `discovery`, `probe` (from a
callable to a graph); `cut`, `fold` (from a graph to stages); `rng`, `interception`, `layer_run`, `view`
(running one stage); `frozen`, `paused` (running encoders, in pieces); `relay` (running everything in lock
step); `placement` (which parameters live here).
"""
