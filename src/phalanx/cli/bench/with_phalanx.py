"""Phalanx, through its public verbs and NumPy arrays."""

from __future__ import annotations

from functools import partial

import phalanx as px

from .library import Call, pingpong, shift
from .operations import ROOT, Arrays

__all__ = ["open_world"]


class _PhalanxLibrary:
    def __init__(self, timeout: float) -> None:
        self._world = px.init(timeout=timeout)
        self.rank = self._world.rank
        self.size = self._world.world_size
        self.version = px.__version__
        self.barrier = self._world.barrier
        self.close = self._world.close
        self.empty = self._world.empty

    def call(self, operation: str, arrays: Arrays) -> Call:
        world, (x, out) = self._world, arrays
        if operation == "pingpong":
            return pingpong(self.rank, world.send, world.recv, x, out)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if operation == "isend_irecv":
            return shift(partial(world.irecv, out, before), partial(world.isend, x, after))
        calls: dict[str, Call] = {
            "all_reduce": partial(world.all_reduce, x),
            "reduce": partial(world.reduce, x, ROOT),
            "broadcast": partial(world.broadcast, x, ROOT),
            "all_gather": partial(world.all_gather, x, out),
            "gather": partial(world.gather, x, ROOT, out),
            "scatter": partial(world.scatter, x if self.rank == ROOT else None, ROOT, out),
            "reduce_scatter": partial(world.reduce_scatter, x, out=out),
            "all_to_all": partial(world.all_to_all, x, out),
            "barrier": world.barrier,
            "sendrecv": partial(world.sendrecv, x, after, out, before),
        }
        return calls[operation]


def open_world(timeout: float) -> _PhalanxLibrary:
    """Joins by the variables of this process."""
    return _PhalanxLibrary(timeout)
