"""The ways in which an engine gives up a collective. The runner turns them into the caller's errors."""

from __future__ import annotations

__all__ = ["DeadlinePassed", "FingerprintMismatch"]


class DeadlinePassed(Exception):
    """The collective was not done in time; `waiting` are the ranks of the group that are still to send."""

    def __init__(self, waiting: list[int]) -> None:
        super().__init__()
        self.waiting = waiting


class FingerprintMismatch(Exception):
    """A member is in another operation; `peer` is its rank in the group."""

    def __init__(self, peer: int) -> None:
        super().__init__()
        self.peer = peer
