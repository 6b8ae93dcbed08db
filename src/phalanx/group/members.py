"""Ranks that a caller names."""

from __future__ import annotations

from typing import Any

from ..arguments import as_rank

__all__ = ["as_member"]


def as_member(rank: Any, size: int) -> int:
    """A rank of a group of `size` ranks, as a plain int.

    Raises:
        InvalidRank: There is no such rank in the group.
    """
    return as_rank(rank, size, f"rank {{}} is not in this group ({_valid(size)})")


def _valid(size: int) -> str:
    if size == 1:
        return "it has rank 0 only; `phalanx run -n 2 script.py` starts a script on two ranks"
    return f"ranks: {', '.join(map(str, range(size)))}"
