"""Tracing: how a transformer can be run in parts, found by following values through it.

Reading order: `layout.py` (all that is found, as plain data), `probe.py` (the runs that find it), `marks.py` (the
NaN that is followed, through equal blocks once), and what the probe asks of single blocks
(`blocks.py`), and of modules and code that need not run for every patch (`glue.py`). `attention.py` lets others
answer attention, whichever kernel computes it, in compiled blocks, too.
"""
