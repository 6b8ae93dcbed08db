"""Groups of ranks: the collectives and messages, validated, ordered, with a deadline."""

from __future__ import annotations

from .group import Group
from .work import Work

__all__ = ["Group", "Work"]
