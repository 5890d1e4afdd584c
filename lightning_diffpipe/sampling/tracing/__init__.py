"""Tracing: how a transformer can be run in parts, found by following values through it.

Reading order: `layout.py` (all that is found, as plain data), `probe.py` (the runs that find it), `marks.py` (the
NaN that is followed, through equal blocks once), what the probe asks of single blocks (`blocks.py`), which modules
make the same for every patch and which results are only passed on (`glue.py`). `attention.py` lets others answer
attention, whichever kernel computes it, in compiled blocks, too.
"""
