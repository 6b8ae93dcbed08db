"""Collectives on arrays that lie on a GPU.

`engine.py` is the engine, on top of the group's engine for the memory of the host. `routing.py` says which way an
operation goes: through the memory of the host (`staging.py`), or by one kernel that reads and writes the memory of all
ranks (`executor.py`).
"""
