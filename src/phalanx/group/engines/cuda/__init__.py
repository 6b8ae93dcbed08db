"""Collectives on arrays that lie on a GPU.

`engine.py` is the engine, on top of the group's engine for the memory of the host. `placement.py` finds out how the
ranks lie, and `routing.py` has the table of ways. Ranks with a GPU each use NCCL (`nccl.py`, `communicator.py`). Where
the ranks share memory of the host, `agreement.py` finds out whether they also share a GPU, and the core does the rest
(cpp/phalanx/cuda); long messages are lent (`phalanx.cuda.lending`). Elsewhere arrays go through the memory of the host
(`staging.py`).
"""
