"""Any MPI, through mpi4py's calls on buffers. The mpirun that started this process decides which MPI it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .library import Call, LibraryLacks, pingpong, shift
from .operations import ROOT, Arrays

__all__ = ["open_world"]


class _MpiLibrary:
    def __init__(self, mpi: Any) -> None:
        self._mpi, self._comm = mpi, mpi.COMM_WORLD
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        name, number = mpi.get_vendor()
        self.version = f"{name} {'.'.join(map(str, number))}"
        self.barrier: Call = self._comm.Barrier
        self.close = mpi.Finalize

    def call(self, operation: str, arrays: Arrays) -> Call:
        x, out = arrays
        self._check(x.dtype)
        comm, root, in_place = self._comm, self.rank == ROOT, self._mpi.IN_PLACE
        if operation == "pingpong":
            return pingpong(self.rank, comm.Send, comm.Recv, x, out)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if operation == "isend_irecv":
            return shift(
                partial(comm.Irecv, out, before), partial(comm.Isend, x, after), lambda request: request.Wait()
            )
        calls: dict[str, Call] = {
            "all_reduce": partial(comm.Allreduce, in_place, x),
            "reduce": partial(comm.Reduce, in_place if root else x, x if root else None, root=ROOT),
            "broadcast": partial(comm.Bcast, x, ROOT),
            "all_gather": partial(comm.Allgather, x, out),
            "gather": partial(comm.Gather, x, out, ROOT),
            "scatter": partial(comm.Scatter, x if root else None, out, ROOT),
            "reduce_scatter": partial(comm.Reduce_scatter_block, x, out),
            "all_to_all": partial(comm.Alltoall, x, out),
            "barrier": comm.Barrier,
            "sendrecv": partial(comm.Sendrecv, x, after, 0, out, before),
        }
        return calls[operation]

    def _check(self, dtype: np.dtype[Any]) -> None:
        from mpi4py.util import dtlib

        try:
            known = dtlib.from_numpy_dtype(dtype)
        except ValueError:
            known = self._mpi.DATATYPE_NULL
        if known == self._mpi.DATATYPE_NULL:
            raise LibraryLacks(f"this MPI has no datatype for {dtype}")


def open_world(timeout: float) -> _MpiLibrary:
    """Joins the world of the mpirun that started this process. MPI has no time-outs: the driver ends it if need be."""
    from mpi4py import MPI

    return _MpiLibrary(MPI)
