"""A rank's side of the control connection: joins the world, hears of losses, and reports what this rank is doing."""

from __future__ import annotations

import itertools
import logging
import time
import zlib
from typing import Protocol

from ..config.options import Options
from ..deadline import Deadline
from ..errors import Evicted, PhalanxError, RendezvousError, Timeout, WorldNotFormed
from ..news import News
from ..one_event import OneEvent
from ..transports.reactor import Reactor
from ..transports.stream import Stream
from ..wire import control as say
from .control_link import ControlLink
from .error_codec import encode_error, keep_end

__all__ = ["ControlClient", "ControlEvents", "KnownStatuses"]

logger = logging.getLogger("phalanx.rendezvous")

DECISION_SLACK = 10.0
"""Seconds that a rank waits for a decision beyond the time at which the directory must have made it."""
FLUSH_WAIT = 1.0
"""Seconds a goodbye or an abort may take to leave this process."""


class ControlEvents(Protocol):
    """The events of a control connection, as its owner gets them. Called in the reactor's thread."""

    def on_lost(self, rank: int, reason: str, traceback: str = "") -> None:
        """A rank died."""

    def on_evicted(self, context: bytes, error: Evicted, is_world: bool) -> None:
        """This rank was voted out of a group, or of the whole world."""

    def on_arrivals(self, count: int) -> None:
        """So many ranks wait to join the world."""

    def on_abort(self, rank: int, reason: str, traceback: str) -> None:
        """A rank ended the world."""

    def on_left(self, rank: int) -> None:
        """A rank closed its world on purpose."""

    def on_break(self, context: bytes, rank: int, cause: say.EncodedError) -> None:
        """A rank found a group broken."""

    def on_directory_lost(self, reason: str) -> None:
        """The directory went away without a word."""

    def on_beat(self) -> None:
        """A heartbeat is due."""

    def status(self, context: bytes | None, sequence: int = 0) -> say.OperationStatus:
        """The status of this rank in a group (None for any), or at its collective of that number."""

    def slate_contents(self) -> bytes | None:
        """The contents of this rank's slate; None if it has none."""


class KnownStatuses:
    """The statuses of the ranks, as far as they are known."""

    def __init__(self, message: say.Statuses | None) -> None:
        self.replies = message.replies if message else {}
        self.silent = message.silent if message else {}
        self.answered = message is not None


class ControlClient:
    """Owns the control connection.

    Messages arrive in the reactor's thread; every method may be called from any other.
    """

    def __init__(self, reactor: Reactor, stream: Stream, rank: int, options: Options, events: ControlEvents) -> None:
        self._reactor = reactor
        self._rank = rank
        self._options = options
        self._events = events
        self._condition = News()
        self._waiting = say.Waiting([])
        self._welcome: say.Welcome | None = None
        self._roster: say.Roster | None = None
        self._abort: say.Abort | None = None
        self._failure: str | None = None
        self._answers: dict[int, say.Statuses | None] = {}
        self._queries = itertools.count(1)
        self._views: dict[bytes, say.View | say.Refused | say.Evict | None] = {}
        """The views that this rank waits for."""
        self._evicted: Evicted | None = None
        self._leaving = False
        stream.watch_host(options.heartbeat_timeout)
        self.link = ControlLink(reactor, stream, self._heard, self._ended)
        reactor.call_soon(self.link.start)
        reactor.call_soon(self._beat)

    def number(self, deadline: Deadline) -> int:
        """The number that the directory gives to this rank, which came without one.

        Raises:
            WorldNotFormed: It did not in time.
        """
        with self._condition:
            while self._welcome is None:
                if self._failure is not None:
                    raise self._not_formed(f"the directory went away ({self._failure})", "")
                if not self._condition.wait(deadline.remaining()) and deadline.expired:
                    raise self._not_formed(f"the directory did not answer within {deadline.seconds:g} s", "")
            self._rank = self._welcome.rank
        return self._rank

    def join(self, member: say.Member, deadline: Deadline, hint: str = "", host: int | None = None) -> say.Roster:
        """Says where this rank is, and waits until all have done so.

        Args:
            hint: What to think of if some never come.
            host: The rank that hosts the directory, if one does: it is the one that is missing if that goes away.

        Raises:
            WorldNotFormed: The deadline passed, the directory gave up, or a rank can never come; names those missing.
        """
        self._send(say.Join(member))
        with self._condition:
            while self._roster is None:
                if self._abort is not None:
                    self._waiting = say.Waiting([self._abort.rank])
                    raise self._not_formed(
                        f"the world cannot form: rank {self._abort.rank}: {self._abort.reason}", hint
                    )
                if self._failure is not None:
                    what = f"the directory went away ({self._failure}) before the world was complete"
                    if host is not None and not self._leaving:  # without a word: it died
                        self._waiting = say.Waiting([host])
                    raise self._not_formed(what, hint)
                if not self._condition.wait(deadline.remaining()) and deadline.expired:
                    what = f"the world did not form within {deadline.seconds:g} s"
                    raise self._not_formed(what, hint, deadline.seconds)
            return self._roster

    def _not_formed(self, what: str, hint: str, seconds: float | None = None) -> WorldNotFormed:
        # A rank whose own time was over a little earlier is not the one to look for.
        gone = self._waiting.gone
        never = [rank for rank in self._waiting.missing if rank not in gone]
        names = f"missing {_ranks(never)}" if never or not gone else ""
        left = f"{_ranks(gone)} came, but gave up or ended" if gone else ""
        return WorldNotFormed(
            f"rank {self._rank}: {what}: {'; '.join(filter(None, (names, left, hint)))}",
            missing=never or gone,
            seconds=seconds,
            rank=self._rank,
            operation="rendezvous",
        )

    def abort(self, reason: str, traceback: str = "", peer: int | None = None, *, on_purpose: bool = False) -> None:
        """Ends the world for all; returns once the word has left this process."""
        self._send(say.Abort(self._rank, keep_end(reason), keep_end(traceback), peer, on_purpose))
        self._flush()

    def break_group(self, context: bytes, error: BaseException) -> None:
        """Tells the other members that a group is broken."""
        self._send(say.Break(context, self._rank, encode_error(error)))

    def statuses(self, context: bytes, timeout: float, sequence: int = 0) -> KnownStatuses:
        """Asks all ranks what they are doing in a group. Never raises: it serves error messages."""
        number = next(self._queries)
        deadline = Deadline(timeout)
        with self._condition:
            self._answers[number] = None
            try:
                self._send(say.StatusQuery(number, context, sequence))
                while self._answers[number] is None and self._failure is None:
                    if not self._condition.wait(deadline.remaining()):
                        break
            finally:
                answer = self._answers.pop(number)
            return KnownStatuses(answer)

    def regroup(self, request: say.Regroup) -> say.View:
        """Asks for the next view of a group, and waits for the decision.

        The directory decides in the time that the request says, so this waits a little longer.

        Raises:
            Evicted: The others went on without this rank.
            Timeout: There is no view: the members that are alive did not all ask in time, or are too few.
            RendezvousError: The directory is gone.
        """
        deadline = Deadline(request.seconds + DECISION_SLACK)
        context = request.context
        with self._condition:
            self._views[context] = None
            try:
                self._send(request)
                while (answer := self._views[context]) is None:
                    if self._evicted is not None:
                        raise Evicted(self._evicted.message, rank=self._rank)
                    if self._failure is not None:
                        raise RendezvousError(
                            f"rank {self._rank}: the directory went away ({self._failure}), and only it can say who "
                            "goes on (save what you need, and start the job again)",
                            rank=self._rank,
                        )
                    if not self._condition.wait(deadline.remaining()) and deadline.expired:
                        raise Timeout(
                            f"rank {self._rank}: the directory did not decide on the next view within "
                            f"{deadline.seconds:g} s",
                            seconds=deadline.seconds,
                            rank=self._rank,
                        )
            finally:
                del self._views[context]
        if isinstance(answer, say.View):
            return answer
        raise self._no_view(answer, request)

    def _no_view(self, answer: say.Refused | say.Evict, request: say.Regroup) -> PhalanxError:
        if isinstance(answer, say.Evict) or answer.over:
            how = "voted out" if isinstance(answer, say.Evict) else "not let in"
            return Evicted(f"rank {self._rank} was {how}: {answer.reason}", rank=self._rank)
        return Timeout(
            f"rank {self._rank}: there is no next view of this group after {request.seconds:g} s: {answer.reason}",
            missing=answer.missing,
            seconds=request.seconds,
            rank=self._rank,
        )

    def note(self, text: str) -> None:
        """Has the launcher show a line."""
        self._send(say.Note(text))

    def announce_leaving(self) -> None:
        """Says that this rank is about to close its channels; returns once the word has left this process."""
        self._send(say.Leaving())
        self._flush()

    def leave(self) -> None:
        """Says goodbye and closes the connection. May be called twice."""
        self._leaving = True

        def go() -> None:
            self.link.send(say.Leave())
            self.link.close()

        self._reactor.call_soon(go)
        self._flush()

    def _send(self, message: say.Message) -> None:
        self._reactor.call_soon(lambda: self.link.send(message))

    def _flush(self) -> None:
        if not self._reactor.thread.is_current:
            done = OneEvent()
            if self._reactor.call_soon(done.set):
                done.wait(FLUSH_WAIT)

    # -- in the reactor's thread ---------------------------------------------------------------------------------------

    def _heard(self, message: say.Message) -> None:
        if isinstance(message, say.Lost):
            logger.debug("rank %d: heard that rank %d is lost: %s", self._rank, message.rank, message.reason)
            self._events.on_lost(message.rank, message.reason, message.traceback)
        elif isinstance(message, say.Abort):
            with self._condition:
                self._abort = message
                self._condition.notify_all()
            self._events.on_abort(message.rank, message.reason, message.traceback)
        elif isinstance(message, say.Left):
            self._events.on_left(message.rank)
        elif isinstance(message, say.Break):
            self._events.on_break(message.context, message.rank, message.cause)
        elif isinstance(message, say.StatusQuery):
            status = self._events.status(message.context, message.sequence)
            self.link.send(say.StatusReply(message.query, status))
        elif isinstance(message, say.Evict):
            self._voted_out(message)
        elif isinstance(message, say.Arrivals):
            self._events.on_arrivals(message.count)
        elif isinstance(message, say.SlateQuery):
            self._show_slate(message.query)
        elif isinstance(message, say.Shutdown):
            self._leaving = True  # the end that follows is no loss
        else:
            self._answered(message)

    def _voted_out(self, message: say.Evict) -> None:
        error = Evicted(f"rank {self._rank} was voted out: {message.reason}", rank=self._rank)
        with self._condition:
            if message.is_world:
                self._evicted = error
                self._leaving = True  # the end that follows is no loss of the directory
            if message.context in self._views:
                self._views[message.context] = message
            self._condition.notify_all()
        self._events.on_evicted(message.context, error, message.is_world)

    def _show_slate(self, query: int) -> None:
        self.link.send(say.SlateReply(query, time.monotonic_ns()))
        contents = self._events.slate_contents()
        if contents is not None:
            self.link.send(say.SlateReply(query, time.monotonic_ns(), zlib.compress(contents, 1)))

    def _answered(self, message: say.Message) -> None:
        with self._condition:
            if isinstance(message, say.Waiting):
                self._waiting = message
            elif isinstance(message, say.Welcome):
                self._welcome = message
            elif isinstance(message, say.Roster):
                self._roster = message
            elif isinstance(message, say.Statuses) and message.query in self._answers:
                self._answers[message.query] = message
            elif isinstance(message, say.View | say.Refused) and message.context in self._views:
                self._views[message.context] = message
                if isinstance(message, say.View):  # here, because a later word on ranks that wait must count
                    self._events.on_arrivals(0)
            else:
                return
            self._condition.notify_all()

    def _ended(self, reason: str) -> None:
        with self._condition:
            self._failure = reason
            formed = self._roster is not None
            self._condition.notify_all()
        if formed and not self._leaving:
            self._events.on_directory_lost(reason)

    def _beat(self) -> None:
        if not self.link.closed:
            self._reactor.call_later(self._options.heartbeat, self._beat)  # first: the heart goes on if the rest fails
            self.link.send(say.Heartbeat(self._events.status(None)))
            self._events.on_beat()


def _ranks(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks)) or 'unknown'}"
