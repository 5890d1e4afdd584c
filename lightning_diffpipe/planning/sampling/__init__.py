"""Plans for sampling: which method on which mesh (`choice.py`), of `candidates.py`, within a rank's memory.

`wish.py` is what was asked for; `pipefusion.py` and `sequence.py` are what these methods take and send.
"""
