"""The directory: who is where, who is alive, who is lost. `hosting` runs it for rank 0 or for the launcher.

It is one thread with one selector. A rank's control connection is its life: when it ends without a goodbye, every other
rank is told. Heartbeats go both ways so that each kernel has something to acknowledge: a machine that vanished is
noticed by `Options.heartbeat_timeout`, while a process that is merely stopped or busy is not taken for dead.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import InvalidWorldSize
from ..transports.reactor import Reactor
from ..transports.stream import Stream
from ..transports.tcp import check_tls, listen
from ..types import Address
from ..wire import control as say
from ..wire.handshake import HandshakeStatus, Hello, Role
from .acceptor import Acceptor
from .control_link import ControlLink
from .error_codec import EndCause

if TYPE_CHECKING:
    from ..config.options import Options
    from ..wire.hosting import Settings

__all__ = ["Directory"]

logger = logging.getLogger("phalanx.rendezvous")

STATUS_WAIT = 0.3
"""Seconds the directory waits for all ranks to say what they are doing.

A rank that is alive answers in milliseconds.
"""
FAREWELL_WAIT = 0.1
"""Seconds in which a rank's goodbye may come after the abort of one that missed it."""
MOST_WATCHERS, MOST_LOOKS, WATCHER_ROOM = 16, 64, 1 << 20
"""Those who look on, their questions that are kept, and the bytes that may wait for one of them."""
WAITING_PAUSE = 0.1
"""Seconds between two words on who is missing."""


class _State(enum.Enum):
    FORMING = "forming"
    FORMED = "formed"


class _Rank:
    def __init__(self, link: ControlLink) -> None:
        self.link = link
        self.member: say.Member | None = None
        self.seen = time.monotonic()
        self.status: say.OperationStatus | None = None


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


class Directory:
    """The control plane's server.

    Args:
        world_size: How many ranks the world has.
        token: What a rank must prove to know; None for a world without authentication.
        bind: Where to listen (port 0 takes any, an empty host all interfaces), or a socket that does.
        one_world: Whether it ends with its first world, as one that a rank hosts does. Otherwise, when all ranks have
            left on purpose, they may form the next one here.
        job_file: The file by which the ranks found it: removed once all have, before they are told. A rank that is soon
            done and forms the next world must not find it again.
        host: The rank whose process this is a part of, and ends with.

    Raises:
        ConfigError: The address cannot be listened on.
        InvalidWorldSize: `world_size` is below 1.
    """

    def __init__(
        self,
        world_size: int,
        *,
        token: bytes | None,
        bind: Address | socket.socket,
        options: Options | Settings | None = None,
        one_world: bool = False,
        job_file: str | os.PathLike[str] | None = None,
        host: int | None = None,
    ) -> None:
        if world_size < 1:
            raise InvalidWorldSize(world_size)
        if options is None:
            from ..config.options import Options  # its own process has settings, and does without `config`

            options = Options()
        self.world_size = world_size
        self.options = options
        check_tls(self.options.tls)
        listener = listen(bind.host, range(bind.port, bind.port + 1)) if isinstance(bind, Address) else bind
        self._state = _State.FORMING
        self._ranks: dict[int, _Rank] = {}
        self._gave_up: set[int] = set()
        self._leaving: set[int] = set()
        """The ranks that are closing the world on purpose, and those that have left."""
        self._exited: dict[int, str] = {}
        """The ends of ranks' processes, as their launchers saw them."""
        self._waiting_is_due = False
        self._launchers: set[ControlLink] = set()
        self._watchers: set[ControlLink] = set()
        """Those who look at what the ranks do."""
        self._looks: dict[int, tuple[ControlLink, int]] = {}
        """For each question about the slates the link of the watcher, and the watcher's own number for it."""
        self._queries: dict[int, _Query] = {}
        self._query_numbers = itertools.count(1)
        self._one_world = one_world
        self._job_file = job_file
        self._host_rank = host
        self._callbacks: list[Callable[[EndCause], None]] = []
        self._on_launchers: Callable[[int], None] = lambda _count: None
        self._cause: EndCause | None = None
        self._blaming: tuple[EndCause, int] | None = None
        """An abort, and the rank that it may be the fault of, until it is clear whether that one has left."""
        self._all_gone = threading.Event()
        self._on_all_gone: Callable[[], None] = lambda: None
        self._awaiting: int | None = None
        """The rank that waits for all others to be gone."""
        self._orphaned = False
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

    @property
    def reactor(self) -> Reactor:
        """The thread that serves."""
        return self._reactor

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

    def rank_exited(self, rank: int, how: str) -> None:
        """Takes the word of a rank's launcher that its process has ended, without a failure.

        A world that needs that rank and has not formed never will: all who wait for it are told at once.
        """
        self._reactor.call_soon(lambda: self._exit_seen(rank, how))

    @property
    def launchers(self) -> int:
        """The number of launchers of other nodes that watch."""
        return len(self._launchers)

    def on_launchers(self, callback: Callable[[int], None]) -> None:
        """Calls back now and when another number of launchers watches. In the directory's thread."""
        self._on_launchers = callback
        callback(len(self._launchers))

    def wait_until_others_left(self, host: int, timeout: float) -> bool:
        """Waits until every rank but `host` has left or is lost; False if the time ran out first."""
        self._reactor.call_soon(lambda: self.await_others(host, self._all_gone.set))
        return self._all_gone.wait(timeout)

    def outlive_host(self) -> None:
        """The host is gone: ends now if no world has formed, else with the last rank. In the directory's thread."""
        self._orphaned = True
        self._check_over()

    def await_others(self, host: int, callback: Callable[[], None]) -> None:
        """Calls back once every rank but `host` has left or is lost. In the directory's thread."""
        self._awaiting = host
        self._on_all_gone = callback
        self._check_all_gone()

    def join(self) -> None:
        """Waits until it has ended."""
        self._reactor.thread.join()

    def close(self) -> None:
        """Tells the ranks that they are not watched any more, and gives everything back. May be called twice."""
        if not self._closed:
            self._closed = True
            self._reactor.call_soon(self._close)
            self._reactor.stop()

    def abandon(self) -> None:
        """In a forked child: closes the descriptors only."""
        self._closed = True
        self._acceptor.abandon()
        for link in self._links():
            link.stream.abandon()
        self._reactor.abandon()

    # -- all below runs in the reactor's thread ------------------------------------------------------------------------

    def _close(self) -> None:
        self._acceptor.close()
        self._tell_all(say.Shutdown())
        for link in self._links():
            link.close()

    def _admit(self, hello: Hello) -> HandshakeStatus:
        if hello.role is Role.WATCHER:
            return HandshakeStatus.OK if len(self._watchers) < MOST_WATCHERS else HandshakeStatus.TAKEN
        if hello.world_size != self.world_size:
            return HandshakeStatus.WORLD_SIZE
        if hello.role is Role.LAUNCHER:
            return HandshakeStatus.OK
        if hello.role is not Role.RANK:
            return HandshakeStatus.ROLE
        if hello.rank >= self.world_size:
            return HandshakeStatus.RANK
        if hello.rank in self._ranks:
            return HandshakeStatus.TAKEN
        # It left this world, and the others have not yet: the next one can begin once they have.
        return HandshakeStatus.OK if self._state is _State.FORMING else HandshakeStatus.CLOSED

    def _welcome(self, stream: Stream, hello: Hello) -> None:
        stream.watch_host(self.options.heartbeat_timeout)
        if hello.role is Role.LAUNCHER:
            self._welcome_launcher(stream)
            return
        if hello.role is Role.WATCHER:
            self._welcome_watcher(stream)
            return
        rank = hello.rank
        if rank in self._ranks:  # two were admitted at once, and the other was quicker to hear of it
            logger.warning("directory: dropped a connection from %s: rank %d came twice", stream.peer, rank)
            stream.close()
            return
        link = ControlLink(
            self._reactor, stream, lambda m: self._heard(rank, m), lambda reason: self._ended(rank, reason)
        )
        self._ranks[rank] = _Rank(link)
        self._gave_up.discard(rank)
        if self._cause is not None:  # it can only hear why there will be no world
            link.send(_describe(self._cause))
        link.start()

    def _welcome_launcher(self, stream: Stream) -> None:
        def ended(_reason: str) -> None:
            self._launchers.discard(link)
            self._on_launchers(len(self._launchers))

        link = ControlLink(self._reactor, stream, self._heard_launcher, ended)
        self._launchers.add(link)
        self._on_launchers(len(self._launchers))
        link.start()
        if self._cause is not None:
            link.send(_describe(self._cause))

    def _welcome_watcher(self, stream: Stream) -> None:
        link = ControlLink(
            self._reactor, stream, lambda m: self._heard_watcher(link, m), lambda _reason: self._watchers.discard(link)
        )
        self._watchers.add(link)
        link.start()

    def _heard_watcher(self, link: ControlLink, message: say.Message) -> None:
        if not isinstance(message, say.SlateQuery) or link.waiting > WATCHER_ROOM:
            return  # one that does not read what it asked for gets no more
        number = next(self._query_numbers)
        self._looks[number] = (link, message.query)
        while len(self._looks) > MOST_LOOKS:
            del self._looks[next(iter(self._looks))]
        link.send(say.SlateRanks(message.query, self.world_size, sorted(self._ranks)))
        for entry in list(self._ranks.values()):
            entry.link.send(say.SlateQuery(number))

    def _show(self, rank: int, message: say.SlateReply) -> None:
        link, number = self._looks.get(message.query, (None, 0))
        if link is not None and not link.closed:
            link.send(say.SlateReply(number, message.clock_ns, message.data, rank))

    def _heard_launcher(self, message: say.Message) -> None:
        if isinstance(message, say.Abort) and 0 <= message.rank < self.world_size:
            self._end_world(EndCause(message.rank, message.reason, message.traceback, aborted=True))
        elif isinstance(message, say.Ended) and 0 <= message.rank < self.world_size:
            self._exit_seen(message.rank, message.how)

    def _exit_seen(self, rank: int, how: str) -> None:
        self._exited[rank] = how
        self._check_hopeless()

    def _check_hopeless(self) -> None:
        """Ends the forming of a world that waits for a rank whose process has ended."""
        if self._state is not _State.FORMING or self._cause is not None or not self._ranks:
            return
        for rank, how in self._exited.items():
            if rank not in self._ranks:
                self._end_world(EndCause(rank, f"its process ended before it joined the world ({how})", aborted=True))
                return

    def _heard(self, rank: int, message: say.Message) -> None:
        entry = self._ranks[rank]
        entry.seen = time.monotonic()
        if isinstance(message, say.Heartbeat):
            entry.status = message.status
        elif isinstance(message, say.Join):
            # What a rank says of itself counts only for the rank that it proved to be.
            entry.member = message.member if message.member.rank == rank else None
            self._check_complete(rank)
        elif isinstance(message, say.Leaving):
            self._note_leaving(rank)
        elif isinstance(message, say.Leave):
            self._farewell(rank)
        elif isinstance(message, say.Abort):
            self._abort(rank, message)
        elif isinstance(message, say.Break):
            self._tell_all(say.Break(message.context, rank, message.cause), but=rank)
        elif isinstance(message, say.StatusQuery):
            self._ask(rank, message)
        elif isinstance(message, say.StatusReply):
            self._answer(rank, message)
        elif isinstance(message, say.SlateReply):
            self._show(rank, message)

    def _missing(self) -> list[int]:
        return [r for r in range(self.world_size) if r not in self._ranks or self._ranks[r].member is None]

    def _check_complete(self, joined: int) -> None:
        if self._state is not _State.FORMING or self._cause is not None:
            return
        if self._missing():
            self._check_hopeless()
            self._ranks[joined].link.send(say.Waiting(self._missing(), sorted(self._gave_up)))
            self._tell_who_is_missing()
            return
        self._state = _State.FORMED
        self._leaving.clear()
        if self._job_file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._job_file)
        members = [member for r in range(self.world_size) if (member := self._ranks[r].member) is not None]
        self._tell_all(say.Roster(members, self._host_rank))

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
            self._give_up(rank)
            return
        self._note_leaving(rank)
        self._tell_all(say.Left(rank))
        self._check_all_gone()
        self._check_over()
        if not self._ranks and not self._one_world:
            self._state = _State.FORMING

    def _note_leaving(self, rank: int) -> None:
        self._leaving.add(rank)
        if self._blaming is not None and self._blaming[1] == rank:
            self._blame()

    def _give_up(self, rank: int) -> None:
        self._gave_up.add(rank)
        self._check_hopeless()
        self._tell_who_is_missing()

    def _ended(self, rank: int, reason: str) -> None:
        entry = self._ranks.pop(rank, None)
        if entry is None:
            return
        if self._state is _State.FORMING:
            if self._cause is None:
                logger.warning("directory: rank %d went away before the world was complete: %s", rank, reason)
            self._give_up(rank)
            return
        self._check_all_gone()
        self._check_over()
        for query in list(self._queries.values()):
            query.waiting.discard(rank)
            self._conclude_if_done(query)
        known = self._blaming[0] if self._blaming is not None else self._cause
        if known is not None and known.rank == rank:
            return  # it said why before it went
        member = entry.member
        where = f" (process {member.pid} on {member.hostname})" if member else ""
        self._tell_all(say.Lost(rank, f"{reason}{where}"))
        self._record(EndCause(rank, f"{reason}{where}"))

    def _abort(self, rank: int, message: say.Abort) -> None:
        """A rank ends the world. All are told at once, but the rank to blame may be one that was done too soon."""
        cause = EndCause(rank, message.reason, message.traceback, aborted=True)
        peer = message.peer
        is_known = peer in self._leaving or peer in self._ranks
        if peer is None or not is_known or self._cause is not None or self._blaming is not None:
            self._end_world(cause)
            return
        self._tell_all(_describe(cause), but=rank)
        self._blaming = (cause, peer)
        if peer in self._leaving:
            self._blame()
        else:  # its goodbye may be on its way: it closed its channels first
            self._reactor.call_later(FAREWELL_WAIT, self._blame)

    def _blame(self) -> None:
        """Decides whether an abort is the fault of the rank that it names."""
        if self._blaming is None:
            return
        (cause, peer), self._blaming = self._blaming, None
        if peer in self._leaving:
            cause = EndCause(peer, f"it left before the others were done: rank {cause.rank}: {cause.reason}")
        self._record(cause)

    def _end_world(self, cause: EndCause) -> None:
        known = self._blaming[0] if self._blaming is not None else self._cause
        if known is None or known.rank == cause.rank:
            self._tell_all(_describe(cause), but=cause.rank)
        self._record(cause)

    def _record(self, cause: EndCause) -> None:
        if self._blaming is not None and cause.rank != self._blaming[1]:
            return  # a consequence
        self._blaming = None
        if self._cause is None:
            self._cause = cause
            for callback in self._callbacks:
                callback(cause)

    def _links(self) -> list[ControlLink]:
        return [*(rank.link for rank in self._ranks.values()), *self._launchers, *self._watchers]

    def _tell_all(self, message: say.Message, *, but: int | None = None) -> None:
        for rank, entry in list(self._ranks.items()):
            if rank != but:
                entry.link.send(message)
        for link in list(self._launchers):
            link.send(message)

    def _check_all_gone(self) -> None:
        if self._awaiting is not None and (self._state is _State.FORMING or not set(self._ranks) - {self._awaiting}):
            self._on_all_gone()

    def _check_over(self) -> None:
        """Ends a directory whose host is gone, silently: no rank is left to serve, or to make a world."""
        if self._orphaned and not self._closed and (self._state is _State.FORMING or not self._ranks):
            self._closed = True
            self._acceptor.close()
            for link in self._links():
                link.close()
            self._reactor.stop()

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
        query = self._queries[number] = _Query((asker, message.query), about, set(self._ranks))
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
