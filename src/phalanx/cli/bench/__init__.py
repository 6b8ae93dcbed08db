"""`phalanx bench`: measures the collectives, beside those of Gloo, Open MPI and MPICH if they are there.

Every contender is a set of processes (`workers`, whose ranks run `worker`), started once for each number of ranks. The
driver (`measure`) walks from cell to cell, and in each the contenders take turns. `contenders` knows how each is
started, `with_phalanx`, `with_torch` and `with_mpi` how each is called, `operations` what is measured and whether the
result is right; `results` holds what came out, `summary` what it means, `show` and `plot` how it looks.
"""

from __future__ import annotations

from .arguments import command

__all__ = ["command"]
