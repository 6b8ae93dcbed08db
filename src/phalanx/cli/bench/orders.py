"""Messages between the driver and the ranks of a contender, one line of JSON each."""

from __future__ import annotations

import msgspec

from .memory import Usage

__all__ = ["Answer", "CheckOrder", "DropOrder", "EndOrder", "MemoryOrder", "Order", "PrepareOrder", "RunOrder"]


class PrepareOrder(msgspec.Struct, tag="prepare", frozen=True):
    """Make the arrays for an operation, and keep them under a name."""

    slot: str
    operation: str
    count: int
    dtype: str
    in_segment: bool


class CheckOrder(msgspec.Struct, tag="check", frozen=True):
    """Call it once, and see whether the result is right."""

    slot: str


class RunOrder(msgspec.Struct, tag="run", frozen=True):
    """Call it so many times, and say how long that took."""

    slot: str
    iterations: int


class MemoryOrder(msgspec.Struct, tag="memory", frozen=True):
    """Call it so many times, and say how much memory that took."""

    slot: str
    iterations: int


class DropOrder(msgspec.Struct, tag="drop", frozen=True):
    """Forget all arrays."""


class EndOrder(msgspec.Struct, tag="end", frozen=True):
    """Leave the world and end."""


Order = PrepareOrder | CheckOrder | RunOrder | MemoryOrder | DropOrder | EndOrder


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of a rank to every order, and once before the first."""

    rank: int = -1
    size: int = 0
    version: str = ""
    seconds: float = 0.0
    lacks: str = ""
    """The feature that the library lacks; nothing was called."""
    error: str = ""
    memory: Usage | None = None
