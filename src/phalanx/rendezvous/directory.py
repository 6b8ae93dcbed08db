"""The directory: who is where, who is alive, who is lost. Hosted by rank 0 or by the launcher.

It is one thread with one selector. A rank's control connection is its life: when it ends without a goodbye, every other
rank is told. Heartbeats go both ways so that each kernel has something to acknowledge: a machine that vanished is
noticed by `Options.heartbeat_timeout`, while a process that is merely stopped or busy is not taken for dead.
"""

from __future__ import annotations

import enum
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..config.options import Options
from ..errors import InvalidWorldSize
from ..transports.reactor import Reactor
from ..transports.stream import Stream
from ..transports.tcp import check_tls, listen
from ..types import Address
from ..wire import control as say
from ..wire.handshake import Hello, Role, Status
from .acceptor import Acceptor
from .link import Link

__all__ = ["Directory", "EndCause"]

logger = logging.getLogger("phalanx.rendezvous")

STATUS_WAIT = 0.3
"""Seconds the directory waits for all ranks to say what they are doing.

A rank that is alive answers in milliseconds.
"""
WAITING_PAUSE = 0.1
"""Seconds between two words on who is missing."""


@dataclass(frozen=True)
class EndCause:
    """Why a world ended before its ranks did."""

    rank: int
    reason: str
    traceback: str = ""
    aborted: bool = False
    """True if the rank said so itself, False if it was lost without a word."""


class _State(enum.Enum):
    FORMING = "forming"
    FORMED = "formed"


@dataclass
class _Rank:
    link: Link
    member: say.Member | None = None
    seen: float = field(default_factory=time.monotonic)
    status: say.OperationStatus | None = None


@dataclass
class _Query:
    askers: list[tuple[int, int]]
    """Who asked, and under which number of its own."""
    about: tuple[bytes, int]
    waiting: set[int]
    replies: dict[int, say.OperationStatus] = field(default_factory=dict)


class Directory:
    """The control plane's server.

    Args:
        world_size: How many ranks the world has.
        token: What a rank must prove to know; None for a world without authentication.
        bind: Where to listen; port 0 takes any, an empty host all interfaces.
        ports: Ports to try in order instead of the one in `bind`.
        one_world: Whether it ends with its first world, as one that a rank hosts does. Otherwise, when all ranks have
            left on purpose, they may form the next one here.

    Raises:
        ConfigError: The address cannot be listened on.
        InvalidWorldSize: `world_size` is below 1.
    """

    def __init__(
        self,
        world_size: int,
        *,
        token: bytes | None,
        bind: Address,
        options: Options | None = None,
        ports: range | None = None,
        one_world: bool = False,
    ) -> None:
        if world_size < 1:
            raise InvalidWorldSize(world_size)
        self.world_size = world_size
        self.options = options or Options()
        check_tls(self.options.tls)
        listener = listen(bind.host, ports or range(bind.port, bind.port + 1))
        self._state = _State.FORMING
        self._ranks: dict[int, _Rank] = {}
        self._gave_up: set[int] = set()
        self._waiting_is_due = False
        self._launchers: set[Link] = set()
        self._queries: dict[int, _Query] = {}
        self._query_numbers = itertools.count(1)
        self._one_world = one_world
        self._callbacks: list[Callable[[EndCause], None]] = []
        self._formed_callbacks: list[Callable[[], None]] = []
        self._cause: EndCause | None = None
        self._all_gone = threading.Event()
        self._host: int | None = None
        self._closed = False
        self._reactor = Reactor("phalanx-directory")
        self._acceptor = Acceptor(
            self._reactor,
            listener,
            name="directory",
            token=token,
            options=self.options,
            admit=self._admit,
            welcome=self._welcome,
        )
        self.address = self._acceptor.address
        self._reactor.call_soon(self._beat)
        self._reactor.start()

    # -- for its host ------------------------------------------------------------------------------------------------

    def on_formed(self, callback: Callable[[], None]) -> None:
        """Calls back from the directory's thread when all ranks are here, just before they are told."""
        self._formed_callbacks.append(callback)

    def on_end(self, callback: Callable[[EndCause], None]) -> None:
        """Calls back from the directory's thread, once, when a rank aborted the world or was lost."""

        def add() -> None:
            if self._cause is not None:
                callback(self._cause)
            else:
                self._callbacks.append(callback)

        self._reactor.call_soon(add)

    def abort(self, rank: int, reason: str, traceback: str = "") -> None:
        """Ends the world on behalf of a rank that failed without a word, as its launcher sees it."""
        self._reactor.call_soon(lambda: self._end_world(EndCause(rank, reason, traceback, aborted=True)))

    @property
    def launchers(self) -> int:
        """How many launchers of other nodes watch."""
        return len(self._launchers)

    def wait_until_others_left(self, host: int, timeout: float) -> bool:
        """Waits until every rank but `host` has left or is lost; False if the time ran out first."""

        def begin() -> None:
            self._host = host
            self._check_all_gone()

        self._reactor.call_soon(begin)
        return self._all_gone.wait(timeout)

    def close(self) -> None:
        """Says that nobody watches any more, and gives everything back. May be called twice."""
        if not self._closed:
            self._closed = True
            self._reactor.call_soon(self._close)
            self._reactor.stop()

    def abandon(self) -> None:
        """In a forked child: closes the descriptors only."""
        self._closed = True
        self._acceptor.abandon()
        for link in [rank.link for rank in self._ranks.values()] + list(self._launchers):
            link.stream.abandon()
        self._reactor.abandon()

    # -- all below runs in the reactor's thread ------------------------------------------------------------------------

    def _close(self) -> None:
        self._acceptor.close()
        self._tell_all(say.Shutdown())
        for link in [rank.link for rank in self._ranks.values()] + list(self._launchers):
            link.close()

    def _admit(self, hello: Hello) -> Status:
        if hello.world_size != self.world_size:
            return Status.WORLD_SIZE
        if hello.role is Role.LAUNCHER:
            return Status.OK
        if hello.role is not Role.RANK:
            return Status.ROLE
        if hello.rank >= self.world_size:
            return Status.RANK
        if self._cause is not None:
            return Status.CLOSED
        if hello.rank in self._ranks:
            return Status.TAKEN
        # It left this world, and the others have not yet: the next one can begin once they have.
        return Status.OK if self._state is _State.FORMING else Status.CLOSED

    def _welcome(self, stream: Stream, hello: Hello) -> None:
        stream.watch_host(self.options.heartbeat_timeout)
        if hello.role is Role.LAUNCHER:
            self._welcome_launcher(stream)
            return
        rank = hello.rank
        if rank in self._ranks:  # two were admitted at once, and the other was quicker to hear of it
            logger.warning("directory: dropped a connection from %s: rank %d came twice", stream.peer, rank)
            stream.close()
            return
        link = Link(self._reactor, stream, lambda m: self._heard(rank, m), lambda reason: self._ended(rank, reason))
        self._ranks[rank] = _Rank(link)
        self._gave_up.discard(rank)
        link.start()

    def _welcome_launcher(self, stream: Stream) -> None:
        link = Link(self._reactor, stream, self._heard_launcher, lambda _reason: self._launchers.discard(link))
        self._launchers.add(link)
        link.start()
        if self._cause is not None:
            link.send(_describe(self._cause))

    def _heard_launcher(self, message: say.Message) -> None:
        if isinstance(message, say.Abort) and 0 <= message.rank < self.world_size:
            self._end_world(EndCause(message.rank, message.reason, message.traceback, aborted=True))

    def _heard(self, rank: int, message: say.Message) -> None:
        entry = self._ranks[rank]
        entry.seen = time.monotonic()
        if isinstance(message, say.Heartbeat):
            entry.status = message.status
        elif isinstance(message, say.Join):
            # What a rank says of itself counts only for the rank that it proved to be.
            entry.member = message.member if message.member.rank == rank else None
            self._check_complete(rank)
        elif isinstance(message, say.Leave):
            self._farewell(rank)
        elif isinstance(message, say.Abort):
            self._end_world(EndCause(rank, message.reason, message.traceback, aborted=True))
        elif isinstance(message, say.Break):
            self._tell_all(say.Break(message.context, rank, message.cause), but=rank)
        elif isinstance(message, say.StatusQuery):
            self._ask(rank, message)
        elif isinstance(message, say.StatusReply):
            self._answer(rank, message)

    def _missing(self) -> list[int]:
        return [r for r in range(self.world_size) if r not in self._ranks or self._ranks[r].member is None]

    def _check_complete(self, joined: int) -> None:
        if self._state is not _State.FORMING:
            return
        if self._missing():
            self._ranks[joined].link.send(say.Waiting(self._missing(), sorted(self._gave_up)))
            self._tell_who_is_missing()
            return
        self._state = _State.FORMED
        for callback in self._formed_callbacks:
            callback()
        members = [member for r in range(self.world_size) if (member := self._ranks[r].member) is not None]
        self._tell_all(say.Roster(members))

    def _tell_who_is_missing(self) -> None:
        """Tells all, but not at once: the ranks of a large world come in a burst."""

        def tell() -> None:
            self._waiting_is_due = False
            if self._state is _State.FORMING:
                self._tell_all(say.Waiting(self._missing(), sorted(self._gave_up)))

        if not self._waiting_is_due:
            self._waiting_is_due = True
            self._reactor.call_later(WAITING_PAUSE, tell)

    def _farewell(self, rank: int) -> None:
        entry = self._ranks.pop(rank)
        entry.link.close()
        if self._state is _State.FORMING:
            self._gave_up.add(rank)
            self._tell_who_is_missing()
            return
        self._tell_all(say.Left(rank))
        self._check_all_gone()
        if not self._ranks and not self._one_world:
            self._state = _State.FORMING

    def _ended(self, rank: int, reason: str) -> None:
        entry = self._ranks.pop(rank, None)
        if entry is None:
            return
        if self._state is _State.FORMING:
            logger.warning("directory: rank %d went away before the world was complete: %s", rank, reason)
            self._gave_up.add(rank)
            self._tell_who_is_missing()
            return
        self._check_all_gone()
        for query in list(self._queries.values()):
            query.waiting.discard(rank)
            self._conclude_if_done(query)
        if self._cause is not None and self._cause.rank == rank:
            return  # it said why before it went
        member = entry.member
        where = f" (process {member.pid} on {member.hostname})" if member else ""
        self._tell_all(say.Lost(rank, f"{reason}{where}"))
        self._record(EndCause(rank, f"{reason}{where}"))

    def _end_world(self, cause: EndCause) -> None:
        if self._cause is None or self._cause.rank == cause.rank:
            self._tell_all(_describe(cause), but=cause.rank)
        self._record(cause)

    def _record(self, cause: EndCause) -> None:
        if self._cause is None:
            self._cause = cause
            for callback in self._callbacks:
                callback(cause)

    def _tell_all(self, message: say.Message, *, but: int | None = None) -> None:
        for rank, entry in list(self._ranks.items()):
            if rank != but:
                entry.link.send(message)
        for link in list(self._launchers):
            link.send(message)

    def _check_all_gone(self) -> None:
        if self._state is _State.FORMING or not set(self._ranks) - {self._host}:
            self._all_gone.set()

    def _beat(self) -> None:
        self._tell_all(say.Heartbeat())
        self._reactor.call_later(self.options.heartbeat, self._beat)

    # -- what is everybody doing? --------------------------------------------------------------------------------------

    def _ask(self, asker: int, message: say.StatusQuery) -> None:
        about = (message.context, message.sequence)
        if message.sequence:  # all members of a slow collective ask at about the same time: one answer serves them
            for query in self._queries.values():
                if query.about == about:
                    query.askers.append((asker, message.query))
                    return
        number = next(self._query_numbers)
        query = self._queries[number] = _Query([(asker, message.query)], about, set(self._ranks))
        for rank in list(query.waiting):
            if (entry := self._ranks.get(rank)) is not None:
                entry.link.send(say.StatusQuery(number, *about))
        self._conclude_if_done(query)
        self._reactor.call_later(STATUS_WAIT, lambda: self._conclude(number))

    def _answer(self, rank: int, message: say.StatusReply) -> None:
        query = self._queries.get(message.query)
        if query is not None and rank in query.waiting:
            query.waiting.discard(rank)
            query.replies[rank] = message.status
            self._conclude_if_done(query)

    def _conclude_if_done(self, query: _Query) -> None:
        if not query.waiting:
            for number in [n for n, q in self._queries.items() if q is query]:
                self._conclude(number)

    def _conclude(self, number: int) -> None:
        query = self._queries.pop(number, None)
        if query is None:
            return
        now = time.monotonic()
        silent = {r: (now - e.seen, e.status) for r in query.waiting if (e := self._ranks.get(r)) is not None}
        for asker, asked in query.askers:
            if (entry := self._ranks.get(asker)) is not None:
                entry.link.send(say.Statuses(asked, query.replies, silent))


def _describe(cause: EndCause) -> say.Message:
    if cause.aborted:
        return say.Abort(cause.rank, cause.reason, cause.traceback)
    return say.Lost(cause.rank, cause.reason)
