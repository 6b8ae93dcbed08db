"""How bytes move between ranks: one class per way of moving."""

from __future__ import annotations

from .base import Backend
from .mesh import MeshBackend
from .simulated import SimulatedBackend
from .star import TcpBackend
from .subgroup import SubBackend

__all__ = ["Backend", "MeshBackend", "SimulatedBackend", "SubBackend", "TcpBackend"]
