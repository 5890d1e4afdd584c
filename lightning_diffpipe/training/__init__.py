"""Training under Lightning: hooks become a plan and a pipeline that runs it.

`strategy.py` is what Lightning calls. From a module and a batch to placed stages: `preparation.py`,
`plan_source.py`, `assembly.py`, `pipeline.py`. Batches: `loader.py`, `example_batch.py`, `transfer.py`.
What Lightning asks while a step's results are still under way: `lockstep.py`, `metric_sync.py`, `early_answers.py`.
"""
