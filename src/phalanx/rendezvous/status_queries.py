"""Questions about all ranks: the directory asks what each is doing, when one of them wants to know."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection

from ..transports.reactor import Reactor
from ..wire import control as say

__all__ = ["StatusQueries"]

WAIT = 0.3
"""Seconds for all ranks to answer. One that is alive does so in milliseconds."""
SLOW, SLOW_WAIT = 0.05, 1.2
"""If an answer took so long, the machine has other work: then all have this many seconds."""


class _Query:
    """A question that is being asked.

    Args:
        asker: Who asked first, and under which number of its own.
        about: The group and the collective.
        waiting: The ranks that have not answered.
    """

    def __init__(self, asker: tuple[int, int], about: tuple[bytes, int], waiting: set[int]) -> None:
        self.askers = [asker]
        self.about = about
        self.waiting = waiting
        self.replies: dict[int, say.OperationStatus] = {}
        self.began = time.monotonic()
        self.slowest = 0.0
        """Seconds that the last answer took."""


class StatusQueries:
    """The questions that are being asked. Everything runs in the directory's thread.

    Args:
        reactor: That thread.
        ranks: Gives the ranks that are there.
        tell: Sends a message to a rank, if it is still there.
        silence: For a rank that does not answer: seconds since it was heard, and what it said then; None if it is gone.
    """

    def __init__(
        self,
        reactor: Reactor,
        ranks: Callable[[], Collection[int]],
        tell: Callable[[int, say.Message], None],
        silence: Callable[[int], tuple[float, say.OperationStatus | None] | None],
    ) -> None:
        self._reactor = reactor
        self._ranks = ranks
        self._tell = tell
        self._silence = silence
        self._queries: dict[int, _Query] = {}
        self._numbers = itertools.count(1)

    def ask(self, asker: int, message: say.StatusQuery) -> None:
        """A rank wants to know what all are doing."""
        about = (message.context, message.sequence)
        if message.sequence:  # all members of a slow collective ask at about the same time: one answer serves them
            for query in self._queries.values():
                if query.about == about:
                    query.askers.append((asker, message.query))
                    return
        number = next(self._numbers)
        query = self._queries[number] = _Query((asker, message.query), about, set(self._ranks()))
        for rank in list(query.waiting):
            self._tell(rank, say.StatusQuery(number, *about))
        self._conclude_if_done(number)
        self._reactor.call_later(WAIT, lambda: self._out_of_time(number))

    def answer(self, rank: int, message: say.StatusReply) -> None:
        """A rank says what it is doing."""
        query = self._queries.get(message.query)
        if query is not None and rank in query.waiting:
            query.waiting.discard(rank)
            query.replies[rank] = message.status
            query.slowest = time.monotonic() - query.began
            self._conclude_if_done(message.query)

    def gone(self, rank: int) -> None:
        """No answer will come from a rank."""
        for number, query in list(self._queries.items()):
            query.waiting.discard(rank)
            self._conclude_if_done(number)

    def _conclude_if_done(self, number: int) -> None:
        if not self._queries[number].waiting:
            self._conclude(number)

    def _out_of_time(self, number: int) -> None:
        query = self._queries.get(number)
        if query is not None and query.slowest >= SLOW:
            self._reactor.call_later(SLOW_WAIT - WAIT, lambda: self._conclude(number))
        else:
            self._conclude(number)

    def _conclude(self, number: int) -> None:
        query = self._queries.pop(number, None)
        if query is None:
            return
        silent = {rank: said for rank in query.waiting if (said := self._silence(rank)) is not None}
        for asker, asked in query.askers:
            self._tell(asker, say.Statuses(asked, query.replies, silent))
