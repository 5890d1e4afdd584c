"""Plans for sampling: which method on which mesh (`choice.py`), of `candidates.py`, within a rank's memory.

`wish.py` is what was asked for; `pipefusion.py` is what that method takes.
"""
