"""The part of an MPI world that the collectives of its groups use."""

from __future__ import annotations

from typing import Any

from .library import Mpi

__all__ = ["MpiContext"]


class MpiContext:
    """MPI's library and a communicator of the whole world, from which groups make their own.

    Args:
        mpi: The MPI library of this process.
        world: A communicator of all ranks that only groups use.
        oversubscribed: True if the ranks of this host share its cores.
    """

    def __init__(self, mpi: Mpi, world: Any, *, oversubscribed: bool) -> None:
        self.mpi = mpi
        self.world = world
        self.oversubscribed = oversubscribed
