"""A rank's membership in a mesh: joining, news of the other ranks, leaving."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

from ..._native import core
from ...config import Launch, Options
from ...deadline import Deadline
from ...errors import ConfigError, PeerLost, PhalanxError, Timeout, WorldNotFormed
from ...operating_system import usable_cores
from ...rendezvous.acceptor import Acceptor
from ...rendezvous.addresses import listen_host, reachable_at
from ...rendezvous.control import ControlClient, KnownStatuses
from ...rendezvous.cores import cores_between, own_cores
from ...rendezvous.host import host_id, hostname, memory_id
from ...rendezvous.join import dial
from ...rendezvous.lifeline import Lifeline
from ...rendezvous.meeting import Meeting, arrange
from ...rendezvous.status_queries import SLOW_WAIT
from ...slate.files import job_of
from ...slate.slate import open_slate
from ...transports.lingering import Lingering
from ...transports.reactor import Reactor
from ...transports.stream import ConnectionRefused, LinkState, Stream
from ...transports.tcp import check_tls, listen
from ...tuning import MOST_HELPERS
from ...types import Address
from ...wire.control import Member, Regroup, View
from ...wire.handshake import ANY_RANK, HandshakeStatus, Hello, Role
from ..bounded_set import BoundedSet
from ..control_plane import ControlPlane

__all__ = ["Endpoint", "LaneKey", "MeshWorld"]

LaneKey = tuple[bytes, int]
"""A lane's name: the context of its group, and its number in it."""

STATUS_TIMEOUT = SLOW_WAIT + 0.3
"""Seconds a rank waits for the directory to collect the statuses of the others: longer than the directory ever does."""
GONE_AFTER = 0.5
"""Seconds without a listener at a rank's address after which it is taken for lost."""
DELIVERED_WITHIN = 5.0
"""Seconds that a rank which leaves waits for others to have what it sent: what they write could take that away."""
PARKED = 256
"""Connections of one rank that may wait for this rank to make their groups."""

logger = logging.getLogger("phalanx.backends")


class Endpoint(Protocol):
    """A lane, or a port of remote calls: takes the connections that other ranks open under its key."""

    def attach(self, world_rank: int, stream: Stream) -> None:
        """Takes a connection that a rank has opened. Called in the reactor's thread; must not wait."""

    def connects_to(self, world_rank: int) -> bool:
        """True if it opens a connection to that rank, or has, which both are to use."""

    def close(self) -> None:
        """Closes it with its world."""

    def abandon(self) -> None:
        """In a forked child: closes the descriptors only."""


class MeshWorld(ControlPlane):
    """A rank's membership in a mesh: its listener, its control connection, and the roster. Shared by all lanes.

    Args:
        meeting: Where the ranks meet, if that is known already; it is closed with the world. Else it is arranged.

    Raises:
        RendezvousError: The world did not form.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        auth: Literal["token", "none"],
        timeout: float,
        options: Options,
        meeting: Meeting | None = None,
    ) -> None:
        super().__init__(launch.rank if launch.joins is None else launch.joins)
        if auth not in ("token", "none"):
            raise ConfigError(f"auth={auth!r} is not valid (expected 'token' or 'none')")
        check_tls(options.tls)
        self.size = launch.world_size
        self.options = options
        self._lanes: weakref.WeakValueDictionary[LaneKey, Endpoint] = weakref.WeakValueDictionary()
        self._parked: dict[LaneKey, list[tuple[int, Stream]]] = {}
        self._closed_lanes: BoundedSet[LaneKey] = BoundedSet()
        """Lanes that were closed: a rank that connects to one is told so."""
        self._broken_lanes: BoundedSet[LaneKey] = BoundedSet()
        """Closed lanes that were broken, not closed on purpose."""
        self._lock = threading.RLock()
        self._leaving = self._closing = False
        self.roster: dict[int, Member] = {}
        """Every rank that this one has heard of. Those that were lost stay: no number is used twice."""
        self.elastic = False
        self.crew = core.Crew(MOST_HELPERS) if core is not None else None
        """Helps all threads of this rank that copy much. It has no threads before it is needed."""
        self._streams: weakref.WeakKeyDictionary[Stream, int] = weakref.WeakKeyDictionary()
        """The rank at the other end of each channel."""
        self.directory_host = 0 if launch.directory is None else None
        deadline = Deadline(timeout)
        self.meeting = meeting or arrange(launch, auth=auth, options=options, deadline=deadline)
        self._reactor = Reactor("phalanx-control")
        self.lingering = Lingering(self._reactor)
        try:
            self._join(launch, deadline)
        except BaseException:
            self._shut_down()
            raise

    def _join(self, launch: Launch, deadline: Deadline) -> None:
        options, meeting = self.options, self.meeting
        bind, advertised = listen_host(meeting.addresses[0], options, all_local=meeting.all_local)
        low, high = options.port_range or (0, 0)
        self._acceptor = Acceptor(
            self._reactor,
            listen(bind, range(low, high + 1)),
            name="a new rank" if launch.joins == ANY_RANK else f"rank {self.rank}",
            token=meeting.token,
            options=options,
            admit=self._admit,
            welcome=self._welcome,
        )
        self._reactor.start()
        if meeting.directory is not None:
            # Half of the time: if the process is not up by then, a thread serves, and the ranks still have to meet.
            meeting.directory.ready(deadline.remaining() / 2)
        hello = Hello(Role.RANK, self.rank, self.size)
        host = self.directory_host
        who, missing = ("the directory", []) if host is None else (f"the directory of rank {host}", [host])
        stream = dial(meeting.addresses, hello, meeting.token, options, deadline, who=who, missing=missing)
        self.directory_seen_at = stream.peer_host
        self._client = ControlClient(self._reactor, stream, self.rank, options, self)
        if launch.joins == ANY_RANK:
            self.rank = self._client.number(deadline)
        port = self._acceptor.address.port
        # With TLS everything goes through TLS: no memory is shared, neither by collectives nor by messages.
        shares = core is not None and options.transport != "tcp" and options.tls is None
        memory = memory_id(core.ABI) if core is not None and shares else ""
        process = os.getpid()
        member = Member(
            self.rank, hostname(), host_id(), process, advertised, port, launch.local_rank, memory, own_cores()
        )
        roster = self._client.join(member, deadline, meeting.hint, self.directory_host)
        self.roster = {member.rank: member for member in roster.members}
        self.directory_host, self.elastic = roster.host, roster.elastic
        self.size = roster.size or self.size
        meeting.formed()
        self._lifeline = Lifeline(self._connect_lifeline).start()
        directory = str(Address(stream.peer_host, meeting.addresses[0].port)) if len(meeting.addresses) == 1 else ""
        job = job_of(meeting.token, str(meeting.addresses[0]))
        self.slate = open_slate(job, self.rank, self.size, hostname(), host_id(), directory, self._links)

    def _connect_lifeline(self, check: Callable[[], None]) -> Stream:
        hello = Hello(Role.LIFELINE, self.rank, self.size)
        deadline = Deadline(self.options.handshake_timeout)
        addresses, token = self.meeting.addresses, self.meeting.token
        return dial(
            addresses, hello, token, self.options, deadline, who="the directory", check=check, gone_after=GONE_AFTER
        )

    def _links(self) -> Iterator[tuple[int, LinkState]]:
        """The state of the channels over the network."""
        for stream, rank in list(self._streams.items()):
            state = stream.link_state
            if state is not None:
                yield rank, state

    @property
    def trouble(self) -> PhalanxError | None:
        return self._acceptor.trouble

    # -- for groups -------------------------------------------------------------------------------------------------

    def address_of(self, rank: int) -> Address:
        """The address at which this rank reaches another."""
        return reachable_at(self.roster[rank], self.roster[self.rank], self.directory_seen_at)

    @property
    def oversubscribed(self) -> bool:
        """True if the ranks of this host have to share its cores."""
        here = self._cores_here()
        return len(here) > cores_between(here)

    @property
    def spare_cores(self) -> int:
        """Cores of this host for each of its ranks, besides the one that the rank runs on."""
        here = self._cores_here()
        return max(min(usable_cores(), cores_between(here) // len(here)) - 1, 0)

    def _cores_here(self) -> list[str]:
        """The cores of each rank of this host, this one among them."""
        return [member.cores for member in self._living() if member.host_id == self.roster[self.rank].host_id]

    def _living(self) -> list[Member]:
        return [member for member in self.roster.values() if member.rank not in self._lost]

    def shares_memory_with(self, rank: int) -> bool:
        """True if that rank and this one can map each other's memory."""
        mine, other = self.roster[self.rank], self.roster[rank]
        return mine.memory != "" and (mine.host_id, mine.memory) == (other.host_id, other.memory)

    def dial_channel(self, key: LaneKey, rank: int, deadline: Deadline, check: Callable[[], None]) -> Stream:
        """Connects to the lane or port of a rank. `check` is called meanwhile, and may raise to end it.

        Raises:
            Timeout: It did not answer in time.
            PeerLost: It does not listen any more.
            Rejected: It refuses the connection.
        """
        hello = Hello(Role.CHANNEL, self.rank, self.size, rank, *key)
        address = self.address_of(rank)
        try:
            stream = dial(
                [address],
                hello,
                self.meeting.token,
                self.options,
                deadline,
                who=f"rank {rank}",
                check=check,
                rest=lambda seconds: self.verdict(rank, (), seconds),
                gone_after=GONE_AFTER,
            )
            self._streams[stream] = rank
            return stream
        except (
            ConnectionRefused
        ):  # it listened there before; the directory is gone, too, or it would have reported the loss
            raise PeerLost(rank, f"nobody listens at {address} any more") from None
        except WorldNotFormed:
            raise self.no_answer(rank, deadline) from None

    def no_answer(self, rank: int, deadline: Deadline) -> Timeout:
        """The error for a rank that does not accept a connection in time."""
        return Timeout(
            f"rank {rank} did not answer at {self.address_of(rank)} within {deadline.seconds:g} s",
            missing=[rank],
            seconds=deadline.seconds,
            rank=self.rank,
            peer=rank,
        )

    def abort(self, reason: str, traceback: str, peer: int | None = None, *, on_purpose: bool = False) -> None:
        # Before the others hear of it: what they close then must not be taken for the reason here.
        self._note_end(PeerLost(self.rank, reason, remote_traceback=traceback or None))
        self._client.abort(reason, traceback, peer, on_purpose=on_purpose)
        super().abort(reason, traceback)

    def announce_leaving(self) -> None:
        self._client.announce_leaving()

    def break_group(self, context: bytes, error: PhalanxError) -> None:
        self._client.break_group(context, error)

    def statuses(self, context: bytes, sequence: int = 0) -> KnownStatuses:
        return self._client.statuses(context, STATUS_TIMEOUT, sequence)

    def regroup(self, request: Regroup) -> View:
        """Asks the directory for the next view of a group. `ControlClient.regroup` says what is raised."""
        view = self._client.regroup(request)
        self.roster.update({member.rank: member for member in view.roster})
        return view

    def note(self, text: str) -> None:
        """Has the launcher show a line."""
        self._client.note(text)

    def on_directory_lost(self, reason: str) -> None:
        first = self.roster.get(0)
        if self.directory_host is not None:
            self.on_lost(self.directory_host, f"{reason} (it hosted the directory)")
        elif first is not None and not self.elastic and first.host_id != self.roster[self.rank].host_id:
            # It runs beside rank 0, under the same launcher if there is one: most likely that whole machine is gone.
            for member in list(self.roster.values()):
                if member.host_id == first.host_id:
                    self.on_lost(member.rank, f"{reason} (the directory ran on its host)")
        else:
            super().on_directory_lost(reason)

    # -- lanes ---------------------------------------------------------------------------------------------------------

    def add_lane(self, key: LaneKey, lane: Endpoint) -> None:
        """Makes a lane or a port known, and hands it the connections that came before it."""
        with self._lock:
            self._lanes[key] = lane
            parked = self._parked.pop(key, [])
        for world_rank, stream in parked:
            lane.attach(world_rank, stream)

    def remove_lane(self, key: LaneKey, *, broken: bool) -> None:
        """Forgets a lane that was closed, on purpose or because it broke."""
        with self._lock:
            self._lanes.pop(key, None)
            if broken and key not in self._closed_lanes:
                self._broken_lanes.add(key)
            self._closed_lanes.add(key)

    def _admit(self, hello: Hello) -> HandshakeStatus:
        if hello.role is not Role.CHANNEL:
            return HandshakeStatus.ROLE
        if hello.world_size != self.size:
            return HandshakeStatus.WORLD_SIZE
        if hello.rank >= self.size and not self.elastic:  # one that joins may be here before its view is
            return HandshakeStatus.RANK
        if hello.target != self.rank:
            return HandshakeStatus.TARGET
        key = (hello.context, hello.lane)
        if key in self._broken_lanes or (self._closing and (self._ended is not None or self._lost)):
            return HandshakeStatus.BROKEN
        if self._closing or key in self._closed_lanes:
            return HandshakeStatus.CLOSED
        # Of two that open one to each other at the same time, that of the lower rank stays.
        lane = self._lanes.get(key)
        if self.rank < hello.rank and lane is not None and lane.connects_to(hello.rank):
            return HandshakeStatus.CROSSED
        return HandshakeStatus.OK

    def _welcome(self, stream: Stream, hello: Hello) -> None:
        key = (hello.context, hello.lane)
        self._streams[stream] = hello.rank
        with self._lock:
            lane = self._lanes.get(key)
            waiting = sum(rank == hello.rank for streams in self._parked.values() for rank, _ in streams)
            closed = key in self._closed_lanes  # just now, after it was admitted
            if lane is None and not closed and waiting < PARKED:
                self._parked.setdefault(key, []).append((hello.rank, stream))
                return
        if lane is not None:
            lane.attach(hello.rank, stream)
        elif closed:
            stream.close()
        else:
            logger.warning(
                "rank %d: dropped a channel of rank %d: %d others wait for groups that are not made here",
                self.rank,
                hello.rank,
                waiting,
            )
            stream.close()

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, timeout: float) -> None:
        """Leaves the world.

        The rank that hosts the directory stays until the others have left, for `timeout` at most, but not if this is
        called once more because an exception, as by Ctrl-C, has cut it short.
        """
        if self._leaving:
            timeout = 0.0
        self._leaving = True
        for lane in list(self._lanes.values()):  # of groups that outlive their backend
            lane.close()
        self.lingering.finish(min(timeout, DELIVERED_WITHIN if self._ended is None and not self._lost else 1.0))
        self._lifeline.close()  # before the directory has forgotten this rank
        self._client.leave()
        if self.meeting.directory is not None:
            if self._ended is None and not self._lost:
                self.meeting.directory.wait_until_others_left(self.rank, timeout)
            else:
                # The others are ending as well; give them a moment to hear why.
                self.meeting.directory.wait_until_others_left(self.rank, min(timeout, 1.0))
        self._shut_down()

    def _shut_down(self) -> None:
        self._closing = True
        if self.crew is not None:
            self.crew.dismiss()
        if self.slate is not None:
            self.slate.close()
        lifeline: Lifeline | None = getattr(self, "_lifeline", None)
        if lifeline is not None:
            lifeline.close()
        acceptor: Acceptor | None = getattr(self, "_acceptor", None)
        client: ControlClient | None = getattr(self, "_client", None)
        if acceptor is not None:
            self._reactor.call_soon(acceptor.close)
        if client is not None:
            self._reactor.call_soon(client.link.close)
        if not self._reactor.thread.is_started:
            self._reactor.start()
        self._reactor.stop()
        self.lingering.close()
        with self._lock:
            parked, self._parked = self._parked, {}
        for streams in parked.values():
            for _, stream in streams:
                stream.close()
        self.meeting.close()

    def abandon(self) -> None:
        """In a forked child: closes the descriptors only. The other ranks notice nothing."""
        if self.slate is not None:
            self.slate.abandon()
        self._acceptor.abandon()
        self._client.link.stream.abandon()
        for lane in list(self._lanes.values()):
            lane.abandon()
        for streams in self._parked.values():
            for _, stream in streams:
                stream.abandon()
        if self.meeting.directory is not None:
            self.meeting.directory.abandon()
        self.meeting.job_file = None
        self.lingering.abandon()
        self._reactor.abandon()
