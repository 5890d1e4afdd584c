"""Ranks talk to each other here, in training and in sampling.

Who is there: `rendezvous.py` (where processes meet, and what they must have in common), `mesh.py` (process groups),
`bandwidth.py` (speeds of links), `watcher.py` (who was lost, and in which phase). Tensors:
`transport.py` (training: by stage and microbatch), `links.py` and `loopback.py` (sampling: by position),
`packing.py` (several as one message), `waiting.py` (without blocking). Decisions between steps: `agreement.py`.
"""
