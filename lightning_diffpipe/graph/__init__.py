"""What we pipeline: any callable that calls modules, probed into a graph of layers, run as stages.

Read in this order: `layer` (the data), `step` (what a step takes and returns); `calltree`, `provenance`, `trace`,
`discovery`, `probe` (from a callable to a graph), `side_effects` (what else a step does); `cut` (from a graph to
stages); `rng`, `interception`, `layer_run`, `view`, `backward` (running one stage); `frozen` (running encoders, in
pieces), `memo` (not running them again); `placement` (which parameters live here).
"""
