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
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from ..errors import InvalidWorldSize
from ..transports.reactor import Reactor
from ..transports.stream import Stream
from ..transports.tcp import check_tls, listen
from ..types import Address
from ..wire import control as say
from ..wire.handshake import ANY_RANK, HandshakeStatus, Hello, Role
from .acceptor import Acceptor
from .control_link import ControlLink
from .error_codec import EndCause
from .lifeline_watch import LifelineWatch
from .status_queries import StatusQueries
from .views import Decided, Outcome, Refusal, Views

if TYPE_CHECKING:
    from ..config.options import Options
    from ..wire.hosting import Settings

__all__ = ["Directory"]

logger = logging.getLogger("phalanx.rendezvous")

FAREWELL_WAIT = 0.1
"""Seconds in which a rank's goodbye may come after the abort of one that missed it."""
FEW_NOTES = 64
"""Lines on changes of the world that are kept for a host that has not asked for them."""
MOST_WATCHERS, MOST_LOOKS, WATCHER_ROOM = 16, 64, 1 << 20
"""Those who look on, their questions that are kept, and the bytes that may wait for one of them."""
WAITING_PAUSE = 0.1
"""Seconds between two words on who is missing."""


class _State(enum.Enum):
    FORMING = "forming"
    FORMED = "formed"


class _Rank:
    def __init__(self, link: ControlLink, *, outside: bool = False) -> None:
        self.link = link
        self.outside = outside
        """True for a rank that came later, as long as it is in no view of the world."""
        self.member: say.Member | None = None
        self.seen = time.monotonic()
        self.status: say.OperationStatus | None = None


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
        elastic: The most ranks of a world that outlives them: the loss of one is not its end, and others may join. 0
            for a world that does not.

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
        elastic: int = 0,
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
        self._used: set[int] = set()
        """All ranks that ever came to this world: a rank that joins has a number that none had before."""
        self._reserved: set[int] = set()
        """Numbers under which the launcher has started ranks that may not have come yet."""
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
        self._look_numbers = itertools.count(1)
        self._one_world = one_world
        self._job_file = job_file
        self._host_rank = host
        self._elastic = elastic
        self._views = Views(self._is_alive)
        self._told_arrivals = 0
        self._is_over = False
        """True once all ranks of an elastic world are lost."""
        self._view_timer: float | None = None
        """When the views that are being asked for are looked at next."""
        self._loss_at: float | None = None
        """When the first rank was lost that the next view of the world will be without."""
        self._notes: deque[say.Note] = deque(maxlen=FEW_NOTES)
        """Changes that came before the host asked for them."""
        self._on_change: Callable[[say.Note], None] = self._notes.append
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
        self._lifelines = LifelineWatch(self._reactor)
        self._status_queries = StatusQueries(self._reactor, lambda: self._ranks, self._tell, self._silence)
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

    def reserve(self, rank: int) -> None:
        """Keeps a number for a rank that the launcher starts, so that no other one that joins gets it."""
        self._reactor.call_soon(lambda: self._reserved.add(rank))

    def on_change(self, callback: Callable[[say.Note], None]) -> None:
        """Calls back with a line for each change of the world, in the directory's thread."""

        def add() -> None:
            self._on_change = callback
            while self._notes:
                callback(self._notes.popleft())

        self._reactor.call_soon(add)

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
        """The host is gone: ends now if no world has formed, else with the last rank. In the directory's thread.

        That of an elastic world ends at once: without its launcher there is nobody to start other ranks. The ranks hear
        that it is gone, and have the time that the launcher's guardian leaves them.
        """
        self._orphaned = True
        if self._elastic:
            for entry in self._ranks.values():
                entry.link.close()
            self._ranks.clear()
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
        self._lifelines.abandon()
        self._reactor.abandon()

    # -- all below runs in the reactor's thread ------------------------------------------------------------------------

    def _close(self) -> None:
        self._acceptor.close()
        self._tell_all(say.Shutdown())
        for link in self._links():
            link.close()
        self._lifelines.close()

    def _admit(self, hello: Hello) -> HandshakeStatus:
        if hello.role is Role.WATCHER:
            return HandshakeStatus.OK if len(self._watchers) < MOST_WATCHERS else HandshakeStatus.TAKEN
        comes_later = self._elastic and hello.role is Role.RANK and hello.rank >= self.world_size
        if hello.world_size != self.world_size and not comes_later:
            return HandshakeStatus.WORLD_SIZE
        if hello.role is Role.LAUNCHER:
            return HandshakeStatus.OK
        if hello.role is Role.LIFELINE:
            return HandshakeStatus.OK if hello.rank in self._ranks else HandshakeStatus.CLOSED
        if hello.role is not Role.RANK:
            return HandshakeStatus.ROLE
        if hello.rank >= self.world_size:
            if not self._elastic:
                return HandshakeStatus.RANK
            if hello.rank in self._used:
                return HandshakeStatus.TAKEN
            return HandshakeStatus.OK if self._state is _State.FORMED else HandshakeStatus.CLOSED
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
        if hello.role is Role.LIFELINE:
            self._welcome_lifeline(stream, hello.rank)
            return
        rank = hello.rank if hello.rank != ANY_RANK else max(self.world_size - 1, *self._used, *self._reserved) + 1
        if rank in self._ranks:  # two were admitted at once, and the other was quicker to hear of it
            logger.warning("directory: dropped a connection from %s: rank %d came twice", stream.peer, rank)
            stream.close()
            return
        link = ControlLink(
            self._reactor, stream, lambda m: self._heard(rank, m), lambda reason: self._ended(rank, reason)
        )
        self._ranks[rank] = _Rank(link, outside=rank >= self.world_size)
        self._used.add(rank)
        self._gave_up.discard(rank)
        if hello.rank == ANY_RANK:
            link.send(say.Welcome(rank))
        if self._cause is not None:  # it can only hear why there will be no world
            link.send(_describe(self._cause))
        link.start()

    def _welcome_lifeline(self, stream: Stream, rank: int) -> None:
        entry = self._ranks.get(rank)
        if entry is None:  # it went while its handshake was under way
            stream.close()
            return

        def died() -> None:
            if self._ranks.get(rank) is entry:  # not another process in the next world
                entry.link.close()
                self._ended(rank, "its process has ended")

        self._lifelines.add(stream, died)

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
        number = next(self._look_numbers)
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
            if rank < self.world_size:
                self._check_complete(rank)
            else:
                entry.link.send(self._roster())
                where = f"process {message.member.pid} on {message.member.hostname}"
                self._on_change(say.Note(f"rank {rank} has come ({where})", "arrived", rank))
        elif isinstance(message, say.Leaving):
            self._note_leaving(rank)
        elif isinstance(message, say.Leave):
            self._farewell(rank)
        elif isinstance(message, say.Abort):
            self._abort(rank, message)
        elif isinstance(message, say.Break):
            self._tell_all(say.Break(message.context, rank, message.cause), but=rank)
        elif isinstance(message, say.StatusQuery):
            self._status_queries.ask(rank, message)
        elif isinstance(message, say.StatusReply):
            self._status_queries.answer(rank, message)
        elif isinstance(message, say.Regroup) and not message.context and self._is_full():
            reason = f"the job has as many ranks as it may have ({self._elastic})"
            self._turn_away(rank, say.Refused(b"", reason, [], over=True))
        elif isinstance(message, say.Regroup):
            self._carry_out(self._views.ask(rank, message, time.monotonic()))
            self._check_joinable()
            short = self._views.short_of(message.context)
            if short is not None:
                self._on_change(say.Note(f"{short}; waiting up to {round(message.seconds, 1):g} s for others to join"))
        elif isinstance(message, say.Note):
            self._on_change(message)
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
        self._tell_all(self._roster())
        self._on_change(say.Note(f"the world has formed: {self.world_size} ranks", "formed"))

    def _roster(self) -> say.Roster:
        members = [entry.member for _, entry in sorted(self._ranks.items()) if entry.member is not None]
        return say.Roster(members, self._host_rank, bool(self._elastic), self.world_size if self._elastic else 0)

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
        self._gone(rank)
        self._check_all_gone()
        self._check_over()
        if not self._ranks and not self._one_world and not self._elastic:
            self._begin_again()

    def _begin_again(self) -> None:
        """All ranks have left: they may form the next world here."""
        self._state = _State.FORMING
        self._used.clear()
        self._views = Views(self._is_alive)

    def _note_leaving(self, rank: int) -> None:
        self._leaving.add(rank)
        self._gone(rank)
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
        self._loss_at = self._loss_at or time.monotonic()
        self._status_queries.gone(rank)
        known = self._blaming[0] if self._blaming is not None else self._cause
        if known is not None and known.rank == rank:
            self._gone(rank)
            return  # it said why before it went
        member = entry.member
        where = f" (process {member.pid} on {member.hostname})" if member else ""
        self._lose(EndCause(rank, f"{reason}{where}"))
        self._gone(rank)

    def _lose(self, cause: EndCause, kind: Literal["lost", "voted out"] = "lost") -> None:
        """Tells all of a rank that is lost. An elastic world goes on without it."""
        logger.debug("directory: rank %d is lost: %s", cause.rank, cause.reason)
        self._tell_all(say.Lost(cause.rank, cause.reason, cause.traceback))
        if self._elastic:
            self._on_change(say.Note(f"rank {cause.rank} was lost: {cause.reason}", kind, cause.rank))
        else:
            self._record(cause)

    # -- views ---------------------------------------------------------------------------------------------------------

    def _is_alive(self, rank: int) -> bool:
        return rank in self._ranks and rank not in self._leaving

    def _gone(self, rank: int) -> None:
        """Takes a rank out of the views that are being asked for."""
        self._carry_out(self._views.gone(rank))
        self._check_joinable()

    def _is_full(self) -> bool:
        """True if no other rank may join."""
        inside = sum(self._is_alive(rank) and not entry.outside for rank, entry in self._ranks.items())
        return inside + self._views.arrivals >= self._elastic

    def _check_joinable(self) -> None:
        """Turns those away that wait to join, once all others are done or lost."""
        if any(self._is_alive(rank) and not entry.outside for rank, entry in self._ranks.items()):
            return
        self._carry_out(self._views.end("the others are done or lost, and nobody is left to join"))
        if self._elastic and self._state is _State.FORMED and not self._leaving and not self._is_over:
            self._is_over = True
            self._on_change(say.Note("all ranks are lost, and the state of the job with them", "over"))

    def _carry_out(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Decided):
                self._install(outcome)
            elif isinstance(outcome, Refusal):
                refused = say.Refused(outcome.context, outcome.reason, outcome.missing, outcome.over)
                for rank in outcome.asked:
                    (self._turn_away if refused.over else self._tell)(rank, refused)
            else:
                self._evict(outcome.rank, outcome.context, outcome.is_world)
        if self._views.arrivals != self._told_arrivals:
            self._told_arrivals = self._views.arrivals
            self._tell_all(say.Arrivals(self._told_arrivals))
        self._watch_the_time()

    def _turn_away(self, rank: int, refused: say.Refused) -> None:
        """Tells a rank that it cannot join any more."""
        self._on_change(say.Note(f"rank {rank} was not let in: {refused.reason}", "turned away", rank))
        self._tell(rank, refused)

    def _install(self, view: Decided) -> None:
        known = {rank: entry.member for rank, entry in self._ranks.items() if entry.member is not None}
        added = [known[rank] for rank in view.joined if rank in known]
        for rank in view.members:
            if view.is_world and rank in self._ranks:
                self._ranks[rank].outside = False
            if rank in view.joined:
                everyone = [known[member] for member in view.members if member in known]
                answer = say.View(b"", view.base, view.epoch, view.members, view.joined, view.out, everyone)
            else:
                answer = say.View(view.base, view.base, view.epoch, view.members, view.joined, view.out, added)
            self._tell(rank, answer)
        for rank in view.out:
            self._evict(rank, view.base, view.is_world)
        if view.is_world:
            self._cause = None  # the world goes on: what ends it now is news
            self._blaming = None
            self._loss_at = None

    def _evict(self, rank: int, context: bytes, is_world: bool) -> None:
        reason = "the others went on without it, because it did not answer in time"
        self._tell(rank, say.Evict(context, reason, is_world))
        entry = self._ranks.pop(rank, None) if is_world else None
        if entry is not None:
            entry.link.close()
            self._check_all_gone()
            self._check_over()
            self._lose(EndCause(rank, "it was voted out: it did not answer in time"), "voted out")
            self._gone(rank)

    def _watch_the_time(self) -> None:
        """Looks at the views again when the next deadline of one that asked has passed."""
        at = self._views.next_deadline()
        if at is None or (self._view_timer is not None and self._view_timer <= at):
            return
        self._view_timer = at

        def look() -> None:
            self._view_timer = None
            self._carry_out(self._views.expire(time.monotonic()))

        self._reactor.call_later(max(0.0, at - time.monotonic()), look)

    def _tell(self, rank: int, message: say.Message) -> None:
        entry = self._ranks.get(rank)
        if entry is not None:
            entry.link.send(message)

    # -- the end of the world ------------------------------------------------------------------------------------------

    def _abort(self, rank: int, message: say.Abort) -> None:
        """A rank ends the world. All are told at once, but the rank to blame may be one that was done too soon."""
        cause = EndCause(rank, message.reason, message.traceback, aborted=True)
        if self._elastic and not message.on_purpose and self._state is _State.FORMED:
            entry = self._ranks.pop(rank)
            entry.link.close()
            self._loss_at = self._loss_at or time.monotonic()
            self._lose(cause)
            self._gone(rank)
            self._check_all_gone()
            self._check_over()
            return
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

    def _silence(self, rank: int) -> tuple[float, say.OperationStatus | None] | None:
        """How long nothing was heard of a rank, and what it did then."""
        entry = self._ranks.get(rank)
        return None if entry is None else (time.monotonic() - entry.seen, entry.status)


def _describe(cause: EndCause) -> say.Message:
    if cause.aborted:
        return say.Abort(cause.rank, cause.reason, cause.traceback)
    return say.Lost(cause.rank, cause.reason)
