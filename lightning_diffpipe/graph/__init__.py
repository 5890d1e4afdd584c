"""The step as a graph: any callable that calls modules, probed into layers, run as stages.

The door is `probe`: a step and a batch to a `LayerGraph`. Behind it, in this order: `layer` (the data), `step`
(what a step takes, returns and leaves), `calltree` (which calls become layers), `provenance` (what each of them
reads), `repeats` (equal ones traced once), `discovery` (layers that hold), `side_effects` (what else a step does);
`cut` (from a graph to stages), `chains` and `call_sequences` (steps with several of them), `probed_step` (all of
that, for planning), `sizes` (bytes of layers); `interception`, `rng`, `view`, `backward` (running one stage);
`frozen` (running encoders, in pieces), `memo` (not running them again), `versions` (whether they changed);
`placement` (parameters of other ranks), `fakes` (copies of modules to probe).
"""
