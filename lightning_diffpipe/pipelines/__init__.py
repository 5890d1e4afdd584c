"""Any diffusers pipeline, understood from its own `__call__` instead of from a class per model.

`one_step.py` runs it for training, after `trial.py` has tried it. `stand_ins.py` has what takes the place of
its parts meanwhile.
"""
