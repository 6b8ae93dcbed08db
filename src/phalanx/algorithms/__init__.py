"""Collective algorithms as data: `(rank, size[, root]) -> Schedule`. Pure: no I/O, no arrays, no state but a cache."""

from __future__ import annotations

from . import bruck, chain, halving_doubling, linear, pairwise, ring, scan, select, star, telling, tree
from .schedule import Recv, Schedule, Send, Step, chunk_bounds

__all__ = [
    "Recv",
    "Schedule",
    "Send",
    "Step",
    "bruck",
    "chain",
    "chunk_bounds",
    "halving_doubling",
    "linear",
    "pairwise",
    "ring",
    "scan",
    "select",
    "star",
    "telling",
    "tree",
]
