"""Groups of ranks: the collectives and messages, validated, ordered, with a deadline."""

from __future__ import annotations

from .group import Group
from .mesh import Mesh
from .work import Work

__all__ = ["Group", "Mesh", "Work"]
