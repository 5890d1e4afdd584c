"""What is found out about a transformer by following values through it: how it can be run in parts.

Reading order: `tokens.py` (who owns which token), `layout.py` (all that is found, as plain data), `probe.py` (the
runs that find it), `marks.py` (the NaN that is followed), and what the probe asks of single blocks (`blocks.py`),
of modules that give the same for every patch (`invariants.py`) and of code between blocks (`glue.py`).
"""
