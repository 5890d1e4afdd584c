"""Ranks talk to each other here, in training and in sampling.

Who is there: `meeting.py` (where processes meet, and what they must have in common), `mesh.py` (process groups),
`bandwidth.py` (how fast they talk), `liveness.py` and `heartbeat.py` (who was lost, and in which phase). Tensors:
`transport.py` (training: by stage and microbatch), `links.py` and `loopback.py` (sampling: by position),
`packing.py` (several as one message), `waiting.py` (without blocking). Decisions between steps: `agreement.py`.
"""
