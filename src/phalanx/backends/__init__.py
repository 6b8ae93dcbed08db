"""Backends: ways of moving bytes between ranks. One class for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import Backend
from .mesh.backend import MeshBackend
from .simulated import SimulatedBackend
from .subgroup import SubBackend

if TYPE_CHECKING:
    from .classic.star import TcpBackend
    from .mpi.backend import MpiBackend
    from .routed import HybridBackend, NcclBackend, UccBackend

__all__ = [
    "Backend",
    "HybridBackend",
    "MeshBackend",
    "MpiBackend",
    "NcclBackend",
    "SimulatedBackend",
    "SubBackend",
    "TcpBackend",
    "UccBackend",
]


def __getattr__(name: str) -> Any:
    if name == "TcpBackend":  # with all of the classic wire: imported when first used
        from .classic.star import TcpBackend

        return TcpBackend
    if name == "MpiBackend":  # most worlds are not MPI's
        from .mpi.backend import MpiBackend

        return MpiBackend
    if name in ("HybridBackend", "NcclBackend", "UccBackend"):  # most programs let `init` choose
        from . import routed

        return getattr(routed, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
