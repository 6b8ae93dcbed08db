"""The links of an agent: opens those to ranks that it calls, accepts those of ranks that call it, closes them all."""

from __future__ import annotations

import functools
import socket
import threading
import time
import weakref
from collections.abc import Callable

from .._native import core
from ..backends.base import LaneBackend
from ..backends.control_plane import ControlPlane
from ..deadline import Deadline
from ..errors import (
    Cancelled,
    ChannelClosed,
    Closed,
    PeerLost,
    PhalanxError,
    ProtocolError,
    RpcTimeout,
    Timeout,
    copy_for_raise,
)
from ..system_limits import naming_limits
from ..transports.duplex_ring import RingAgreement
from ..transports.lending import lending_with
from ..transports.stream import Stream, StreamEnded, read_exactly, write_all
from ..wire.calls import HEADER_SIZE, CallKind, pack_header, parse_header
from ..wire.codec import Limits
from ..wire.control import OperationStatus
from .caller import CallerLink
from .event_loop import EventLoop
from .lanes import CallerLanes, ServerLanes, lanes_with
from .link import SPIN, CallLink
from .poller import LinkPoller
from .registry import Registry
from .server import ServerLink
from .stream import RemoteStream

__all__ = ["Connections"]

LANE = 3
"""The number of the agent's connections in a group; 1 and 2 are the group's own lanes."""
LONGEST_OFFER = 4096
VERDICT_WAIT = 0.25
"""Seconds to wait for the directory to say why a connection broke."""
LONGEST_TURN = 0.1
"""Seconds after which a thread checks again if it may connect: the thread that should wake it may be interrupted."""
SHORTEST_STOP, STOP_WAIT = 0.1, 5.0
"""Seconds that closing waits for the threads, which may be inside a handler: at least and at most."""
_IDLE = OperationStatus("", 0, 0, "", False, float("inf"))


class Connections:
    """Opens, accepts, finds and closes the links of one agent, and owns the threads that move them.

    Never holds the agent or its registry: an agent that its program has dropped must be collected, although its threads
    still run and hold this.

    Args:
        rank: This rank of the group.
        world_ranks: The world rank of each rank of the group.
        name: The name of the threads.
        workers: Handlers that run at the same time.
    """

    def __init__(
        self,
        backend: LaneBackend,
        rank: int,
        world_ranks: tuple[int, ...],
        registry: Registry,
        name: str,
        limits: Limits,
        *,
        workers: int,
        max_message: int,
        max_in_flight: int,
        max_queue: int,
    ) -> None:
        self._backend = backend
        self._rank = rank
        self._world_ranks = world_ranks
        self._registry = weakref.ref(registry)
        self._limits = limits
        self._max_message = max_message
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        self.callers: dict[int, CallerLink] = {}
        """The links over which this rank calls others, by rank."""
        self.servers: set[ServerLink] = set()
        """The links over which others call this rank."""
        self.closed = self._stopping = False
        self._dialling: dict[int, _DialTurn] = {}
        """For each rank, the turn of the thread that connects to it, or did so last."""
        self._found_lost: dict[int, tuple[float, PeerLost]] = {}
        """Ranks that were found to be gone while connecting: when, and the error."""
        self._lock = threading.RLock()
        self.loop = EventLoop(f"{name}-async")
        self._context = backend.next_context("rpc")
        self._control = backend.control
        everyone = range(backend.world_size)
        self.port = backend.open_port(self._context, LANE, everyone, functools.partial(_accept, weakref.ref(self)))
        self._spin = 0.0 if self.port.oversubscribed else SPIN
        self._lending = lending_with(self.port.spare_cores, self.port.crew)
        self._lanes = lanes_with(self.port.spare_cores, self.port.oversubscribed)
        try:
            self.poller = LinkPoller(name, workers, self._spin)
        except BaseException:
            self.port.close()  # ranks that call this one are told so
            raise
        self._losses = _LossWatcher(self._control, world_ranks, self.callers, self.servers)

    def start(self, on_close: Callable[[], None]) -> None:
        """Accepts links from now on.

        Args:
            on_close: Called when the world is closed before the agent.
        """
        self.port.on_close = on_close
        self.port.on_abandon = functools.partial(_abandon, self.callers, self.servers)
        self._control.watch(self._context, self._losses)
        self.port.start()

    def refuse_more(self) -> bool:
        """Opens and accepts no more links; False if that was said before."""
        with self._lock:
            first, self.closed = not self.closed, True
        return first

    # -- links that this rank opens ------------------------------------------------------------------------------------

    def link_to(self, dst: int | CallerLink, deadline: Deadline) -> CallerLink:
        """The link to a rank; opens it if there is none. A link that is given is only checked.

        Raises:
            RpcTimeout: There was no connection in time.
            NoConnection: This backend has no way to that rank.
            PeerLost: The rank is gone.
            Closed: This agent is closed.
            OutOfResources: This process has no descriptor left.
        """
        link = self.callers.get(dst)  # type: ignore[arg-type]  # a link is none of its keys
        if link is not None and type(dst) is not bool and not self.closed and not self._backend.forked:
            return link
        if isinstance(dst, CallerLink):
            if self._backend.forked:
                self._backend.check_usable()
            if dst.ended is not None:
                raise dst.why_ended()
            return dst
        self._backend.check_usable()
        if self.closed:
            raise Closed("this agent was closed", rank=self._world_ranks[self._rank])
        if dst != self._rank or type(dst) is bool:
            self._backend.check_peer(dst)
        turn = _DialTurn()
        came = time.monotonic()
        with self.poller.blocking():
            try:
                while not self._take_turn(dst, turn):
                    if deadline.expired:
                        raise self._not_connected(dst, deadline, "another thread is still waiting for it")
                    self._dialling[dst].wait(deadline)
                link = self.callers.get(dst)
                if link is not None:
                    return link
                # If another thread found the rank gone while this one waited, this one need not try again: several
                # threads would hear of a loss one after another, each after a timeout of its own.
                found, lost = self._found_lost.get(dst, (0.0, None))
                if lost is not None and found >= came:
                    raise copy_for_raise(lost, "", self._world_ranks[self._rank])
                with naming_limits():
                    return self._connect(dst, deadline)
            except PeerLost as lost:
                self._found_lost[dst] = (time.monotonic(), lost.during(lost.operation or "", lost.rank))
                raise
            finally:
                turn.over = True
                turn.bell.release()

    def _take_turn(self, dst: int, turn: _DialTurn) -> bool:
        """Gives this turn the right to connect to a rank; False if another thread has it."""
        with self._lock:
            first = self._dialling.get(dst)
            if first is None or first.over:
                first = self._dialling[dst] = turn
            return first is turn

    def _connect(self, dst: int, deadline: Deadline) -> CallerLink:
        if dst == self._rank:
            mine, other = socket.socketpair()
            self.accept(dst, Stream(other))
            stream = Stream(mine)
        else:
            try:
                stream = self.port.dial(dst, deadline)
            except Timeout as late:
                raise self._not_connected(dst, deadline, str(late)) from None
            if not self.port.oversubscribed:
                stream.keep_in_cache()
            try:
                stream = self._agree_on_ring(dst, stream, deadline)
            except BaseException:
                stream.close()
                raise
        link = CallerLink(
            stream,
            dst,
            self.poller,
            self._max_message,
            self._limits,
            spin=self._spin,
            lending=self._lending,
            rank=self._world_ranks[self._rank],
            world_rank=self._world_ranks[dst],
            max_in_flight=self._max_in_flight,
            why_ended=functools.partial(self.port.why_ended, dst, wait=VERDICT_WAIT),
            why_closed=functools.partial(self.port.why_closed, dst),
            forget=functools.partial(_forget_caller, self.callers),
            open_stream=RemoteStream,
        )
        if self._lanes and dst != self._rank and link.pipe.native is not None and type(stream) is Stream:
            link.lanes = CallerLanes(link, self._lanes, functools.partial(self.port.dial, dst))
        self.callers[dst] = link
        known = self._control.verdict(self._world_ranks[dst], (), 0.0) if dst != self._rank else None
        if known is not None:  # the rank was lost just now, before the link could be told
            link.end(known)
            raise known
        if self.closed:
            link.end(Closed("this agent was closed", rank=self._world_ranks[self._rank]))
        return link

    def _agree_on_ring(self, dst: int, stream: Stream, deadline: Deadline) -> Stream:
        """Switches to rings in shared memory, where that is possible."""
        pid = self.port.memory_of(dst) if core is not None else None
        if pid is None:
            return stream
        agreement = RingAgreement(stream, pid)
        try:
            offer = agreement.offer()
            if not offer:
                return stream
            what = f"the agent of rank {self._world_ranks[dst]}"
            check = functools.partial(self._check_alive, dst)
            write_all(stream, pack_header(CallKind.RING, len(offer), 0, 0) + offer, deadline, what, check)
            header = parse_header(read_exactly(stream, HEADER_SIZE, deadline, what, check), 0, LONGEST_OFFER)
            if header.kind is CallKind.GOODBYE:  # it closes just now
                raise self.port.why_closed(dst)
            if header.kind is not CallKind.RING:
                raise ProtocolError(f"protocol error: a {header.kind.name} frame before the agreement on shared memory")
            accepted = agreement.accept(read_exactly(stream, header.head, deadline, what, check))
            answer = b"\x01" if accepted else b""
            write_all(stream, pack_header(CallKind.RING, len(answer), 0, 0) + answer, deadline, what, check)
            return agreement.stream() if accepted else stream
        except Timeout:
            raise self._not_connected(dst, deadline, "its agent has not answered (does it have one?)") from None
        except (StreamEnded, ProtocolError) as ended:
            raise self.port.why_ended(dst, ended, VERDICT_WAIT) from None
        finally:
            agreement.close()

    def _check_alive(self, dst: int) -> None:
        known = self._control.verdict(self._world_ranks[dst], (), 0.0)
        if known is not None:
            raise known
        if self.closed:
            raise Closed("this agent was closed", rank=self._world_ranks[self._rank])

    def _not_connected(self, dst: int, deadline: Deadline, why: str) -> RpcTimeout:
        """The error for a call whose time was over before it could be sent."""
        rank = self._world_ranks[dst]
        return RpcTimeout(
            f"no connection to the agent of rank {rank} within {deadline.seconds:g} s, so nothing was sent: {why}",
            missing=[rank],
            seconds=deadline.seconds,
            rank=self._world_ranks[self._rank],
            peer=rank,
        )

    # -- links that others open ---------------------------------------------------------------------------------------

    def accept(self, src: int, stream: Stream) -> None:
        """Serves the calls of a rank that has opened a link."""
        registry = self._registry()
        if registry is None:  # the agent is gone
            stream.close()
            return
        if src != self._rank and not self.port.oversubscribed and not self._lanes:  # it may become a lane
            stream.keep_in_cache()
        link = ServerLink(
            stream,
            src,
            self.poller,
            registry,
            self.loop,
            self._max_message,
            self._limits,
            spin=self._spin,
            lending=self._lending,
            pid=None if src == self._rank else self.port.memory_of(src),
            max_queue=self._max_queue,
            forget=self.servers.discard,
        )
        if src != self._rank:
            link.lanes = ServerLanes(link, self._lanes, self.servers)
        with self._lock:
            if not self.closed:
                self.servers.add(link)
        if self.closed:
            link.end(Closed("this agent was closed"))
        else:
            self.poller.watch(link)

    # -- the end -------------------------------------------------------------------------------------------------------

    def shut_down(self, wait: float = STOP_WAIT) -> None:
        """Ends the links and the threads. Called again, it does what an exception, as by Ctrl-C, has left.

        Args:
            wait: Seconds for handlers that were cancelled to end. They have a moment in any case.
        """
        if self._stopping:
            wait = 0.0
        self._stopping = True
        self.port.on_close = None
        self.port.close()
        self.closed = True
        for server in list(self.servers):
            server.closing = True
        for link in [*self.callers.values(), *self.servers]:
            if self._control.ended is None:  # else the others will hear why, and that is the reason
                link.say_goodbye()
            if isinstance(link, CallerLink):
                link.end(Cancelled("this agent was closed"))
            else:
                link.end(ChannelClosed(link.peer, "this agent was closed"))
        self._control.unwatch(self._context)
        ends = Deadline(max(SHORTEST_STOP, min(wait, STOP_WAIT)))
        self.poller.stop(ends.remaining())
        self.loop.stop(ends.remaining())


class _LossWatcher:
    """Hears of lost ranks for an agent; see `backends.control_plane.Watcher`."""

    def __init__(
        self,
        control: ControlPlane,
        world_ranks: tuple[int, ...],
        callers: dict[int, CallerLink],
        servers: set[ServerLink],
    ) -> None:
        self._control = control
        self.world_ranks = world_ranks
        self._callers = callers
        self._servers = servers

    def fail(self, error: PhalanxError) -> None:
        """Ends the links to a lost rank, or all if the world has ended. Called by any thread; never blocks."""
        everyone = self._control.ended is not None
        links: list[CallLink] = [*self._callers.values(), *self._servers]
        for link in links:
            if everyone or self.world_ranks[link.peer] == error.peer:
                link.end(error)

    def left(self, rank: int) -> None:
        """Does nothing: the connections of a rank that has left end by themselves."""

    def status(self, sequence: int = 0) -> OperationStatus:
        """Remote calls are not collectives: there is never one to report."""
        return _IDLE

    def look_for_long_waits(self) -> None:
        """Does nothing: a call may wait for an answer as long as its caller likes."""


class _DialTurn:
    """One thread's right to connect to a rank, from when it is given until `over` is set.

    Not a lock: Ctrl-C may come right after a thread has taken one, and then the lock would never be released. Here the
    thread enters the block that ends its turn before it gets the turn.
    """

    __slots__ = ("bell", "over")

    def __init__(self) -> None:
        self.over = False
        self.bell = threading.Lock()
        """Held until the turn is over."""
        self.bell.acquire()

    def wait(self, deadline: Deadline) -> None:
        """Waits for the end of this turn, but not for long."""
        if self.bell.acquire(timeout=min(deadline.remaining(), LONGEST_TURN)):
            self.bell.release()  # for the next thread that waits


def _accept(connections: weakref.ref[Connections], src: int, stream: Stream) -> None:
    found = connections()
    if found is None:
        stream.close()
    else:
        found.accept(src, stream)


def _abandon(callers: dict[int, CallerLink], servers: set[ServerLink]) -> None:
    """Leaves the links alone in a forked child: they are the parent's."""
    for link in [*callers.values(), *servers]:
        link.is_parents = True
        link.stream.abandon()
        link.pipe.close_lanes(forked=True)


def _forget_caller(callers: dict[int, CallerLink], link: CallerLink) -> None:
    if callers.get(link.peer) is link:
        del callers[link.peer]
