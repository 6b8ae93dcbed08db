"""The part of an MPI world that the collectives of its groups use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..base import LaneBackend

if TYPE_CHECKING:
    from .library import Mpi

__all__ = ["MpiContext", "mpi_context"]


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


def mpi_context(backend: LaneBackend) -> MpiContext | None:
    """The context of a backend on MPI, or of a sub-group of one; None for any other backend."""
    context = backend.engine_context
    return context if isinstance(context, MpiContext) else None
