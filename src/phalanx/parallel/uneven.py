"""Ranks with different numbers of batches: those that are done take part in what the others still do."""

from __future__ import annotations

import enum

import numpy as np

from ..group import Group

__all__ = ["Exchange", "UnevenInputs"]


class Exchange(enum.IntEnum):
    """The next exchange of the ranks that still train."""

    NOTHING = 0
    """No rank trains any more."""
    BUFFERS = 1
    GRADIENTS = 2


class UnevenInputs:
    """Tells ranks that are done which exchange comes next. Off unless the loop is inside `DDP.join`."""

    def __init__(self, group: Group, timeout: float | None) -> None:
        self.on = False
        self._group = group
        self._timeout = timeout

    def announce(self, what: Exchange) -> int:
        """Announces the next exchange of this rank, which still trains.

        Returns:
            The rank whose buffers count: 0, or inside `join` the highest rank that still trains.
        """
        if not self.on:
            return 0
        _, rank = self._exchange(what, self._group.rank)
        return rank

    def announce_later(self, what: Exchange) -> None:
        """As `announce`, without waiting for the others."""
        if self.on:
            words = np.array([what, self._group.rank], np.int64)
            self._group.all_reduce(words, op="max", timeout=self._timeout, async_op=True)

    def listen(self) -> tuple[Exchange, int]:
        """The next exchange of the ranks that still train, and the highest of them. A rank that is done calls this."""
        return self._exchange(Exchange.NOTHING, -1)

    def highest(self, candidate: bool) -> int:
        """The highest rank among the candidates."""
        return self._exchange(Exchange.NOTHING, self._group.rank if candidate else -1)[1]

    def _exchange(self, what: Exchange, rank: int) -> tuple[Exchange, int]:
        words = np.array([what, rank], np.int64)
        self._group.all_reduce(words, op="max", timeout=self._timeout)
        return Exchange(int(words[0])), int(words[1])
