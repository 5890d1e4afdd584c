"""Training under Lightning: hooks become a plan and a pipeline that runs it.

Here in the order in which to read:

    strategy.py         what Lightning calls, with `processes.py` (how ranks start and end), `signals.py` (how they
                        stop together) and `checkpointing.py`
    preparation.py      from module and batch to a pipeline: probed, timed and planned (`plan_source.py`); cut,
                        refused where not exact (`refusals.py`), connected, compared (`verification.py`)
    pipeline.py         one rank's side of it in every step, which checks whether steps change
    loader.py           equal batches and random numbers on all ranks of a pipeline
    metric_sync.py      over which ranks a metric is synchronized
    patching.py         what others decide alone, replaced for a while
    before_training.py  one batch to plan with, and what a probed step may ask its trainer for
"""
