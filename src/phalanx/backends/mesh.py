"""A full mesh over TCP: every rank can talk to every other, each connection is opened when first used.

A connection carries one direction of one lane, opened by the sender. So two ranks never open it at the same time from
both ends, a flood on one group cannot hold up another, and closing one says goodbye for exactly one lane.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal

from ..config import Launch, Options, detect
from ..deadline import Deadline
from ..errors import ChannelClosed, ConfigError, PhalanxError, Timeout, WorldNotFormed
from ..rendezvous.acceptor import Acceptor
from ..rendezvous.addresses import listen_host, reachable_at
from ..rendezvous.classic import form_mesh
from ..rendezvous.control import ControlClient, Statuses
from ..rendezvous.host import host_id, hostname
from ..rendezvous.join import dial
from ..rendezvous.meeting import arrange
from ..transports.channel import Inbound, Outbound
from ..transports.mailbox import Operation
from ..transports.reactor import Reactor
from ..transports.stream import Buffer, Stream
from ..transports.tcp import check_tls, listen
from ..types import Address
from ..wire.control import Member
from ..wire.frames import Kind, pack_header
from ..wire.handshake import Hello, Rejected, Role, Status
from .base import DEFAULT_TIMEOUT, WORLD_CONTEXT, LaneBackend, payload_size
from .classic import CLASSIC_BIND, ClassicWorld
from .control_plane import ControlPlane
from .lane import Lane

__all__ = ["MeshBackend", "MeshWorld"]

STATUS_TIMEOUT = 0.6
"""Seconds a rank waits for the directory's account of what the others are doing.

The directory itself waits half of it.
"""
REMEMBERED = 1024
"""Closed lanes that are remembered, to tell a late sender that the group is closed."""
PARKED = 4096
"""Connections that may wait for this rank to make their group."""

LaneKey = tuple[bytes, int]


class MeshWorld(ControlPlane):
    """A rank's place in the mesh: its listener, its control connection, and the roster. Shared by all lanes.

    Raises:
        RendezvousError: The world did not form.
    """

    def __init__(self, launch: Launch, *, auth: Literal["token", "none"], timeout: float, options: Options) -> None:
        super().__init__(launch.rank)
        if auth not in ("token", "none"):
            raise ConfigError(f"auth={auth!r} is not valid (expected 'token' or 'none')")
        check_tls(options.tls)
        self.size = launch.world_size
        self.options = options
        self._lanes: weakref.WeakValueDictionary[LaneKey, _MeshLane] = weakref.WeakValueDictionary()
        self._parked: dict[LaneKey, list[tuple[int, Stream]]] = {}
        self._closed_lanes: OrderedDict[LaneKey, None] = OrderedDict()
        self._lock = threading.Lock()
        self._closing = False
        self._hosted_by_rank_0 = launch.directory is None
        deadline = Deadline(timeout)
        self.meeting = arrange(launch, auth=auth, options=options, deadline=deadline)
        self._reactor = Reactor("phalanx-control")
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
            name=f"rank {self.rank}",
            token=meeting.token,
            options=options,
            admit=self._admit,
            welcome=self._welcome,
        )
        self._reactor.start()
        hello = Hello(Role.RANK, self.rank, self.size)
        stream = dial(meeting.addresses, hello, meeting.token, options, deadline, who="the directory", missing=[0])
        self.directory_seen_at = stream.peer_host
        self._client = ControlClient(self._reactor, stream, self.rank, options, self)
        port = self._acceptor.address.port
        member = Member(self.rank, hostname(), host_id(), os.getpid(), advertised, port, launch.local_rank)
        self.roster = self._client.join(member, deadline)
        if meeting.all_local:
            meeting.remove_file()  # everybody has read it

    # -- what groups ask -----------------------------------------------------------------------------------------------

    def address_of(self, rank: int) -> Address:
        """Where this rank connects to reach another."""
        return reachable_at(self.roster[rank], self.roster, self.rank, self.directory_seen_at)

    def abort(self, reason: str, traceback: str) -> None:
        self._client.abort(reason, traceback)
        super().abort(reason, traceback)

    def break_group(self, context: bytes, error: PhalanxError) -> None:
        self._client.break_group(context, error)

    def statuses(self, context: bytes) -> Statuses:
        return self._client.statuses(context, STATUS_TIMEOUT)

    def on_directory_lost(self, reason: str) -> None:
        if self._hosted_by_rank_0:
            self.on_lost(0, f"{reason} (it hosted the directory)")
        else:
            super().on_directory_lost(reason)

    # -- lanes ---------------------------------------------------------------------------------------------------------

    def open_lane(self, context: bytes, number: int, members: tuple[int, ...]) -> Lane:
        """A lane among these world ranks."""
        return _MeshLane(self, context, number, members.index(self.rank), members)

    def add_lane(self, key: LaneKey, lane: _MeshLane) -> None:
        """Makes a lane known; connections that came before it are handed over."""
        with self._lock:
            self._lanes[key] = lane
            parked = self._parked.pop(key, [])
        for world_rank, stream in parked:
            lane.attach(world_rank, stream)

    def remove_lane(self, key: LaneKey) -> None:
        """Forgets a lane that was closed."""
        with self._lock:
            self._lanes.pop(key, None)
            self._closed_lanes[key] = None
            while len(self._closed_lanes) > REMEMBERED:
                self._closed_lanes.popitem(last=False)

    def _admit(self, hello: Hello) -> Status:
        if hello.role is not Role.CHANNEL:
            return Status.ROLE
        if hello.world_size != self.size:
            return Status.WORLD_SIZE
        if hello.rank >= self.size:
            return Status.RANK
        if hello.target != self.rank:
            return Status.TARGET
        if self._closing or (hello.context, hello.lane) in self._closed_lanes:
            return Status.CLOSED
        return Status.OK

    def _welcome(self, stream: Stream, hello: Hello) -> None:
        key = (hello.context, hello.lane)
        with self._lock:
            lane = self._lanes.get(key)
            if lane is None:
                if sum(map(len, self._parked.values())) >= PARKED:
                    stream.close()
                else:
                    self._parked.setdefault(key, []).append((hello.rank, stream))
        if lane is not None:
            lane.attach(hello.rank, stream)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, timeout: float) -> None:
        """Leaves the world.

        The rank that hosts the directory stays until the others have left, for `timeout` at most.
        """
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
        acceptor: Acceptor | None = getattr(self, "_acceptor", None)
        client: ControlClient | None = getattr(self, "_client", None)
        if acceptor is not None:
            self._reactor.call_soon(acceptor.close)
        if client is not None:
            self._reactor.call_soon(client.link.close)
        if self._reactor.thread.ident is None:
            self._reactor.start()
        self._reactor.stop()
        with self._lock:
            parked, self._parked = self._parked, {}
        for streams in parked.values():
            for _, stream in streams:
                stream.close()
        self.meeting.close()

    def abandon(self) -> None:
        """In a forked child: closes the descriptors, and says nothing to anybody."""
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
        self._reactor.abandon()


class _MeshLane(Lane):
    """A lane whose channels are TCP connections."""

    def __init__(self, world: MeshWorld, context: bytes, number: int, rank: int, members: Sequence[int]) -> None:
        super().__init__(rank, members, world)
        self._world = world
        self._key = (context, number)
        self._inbound: dict[int, Inbound] = {}
        self._outbound: dict[int, Outbound] = {}
        self._dialling = [threading.Lock() for _ in self.members]
        world.add_lane(self._key, self)

    def attach(self, world_rank: int, stream: Stream) -> None:
        """A member has opened its channel to this rank. Called in the reactor's thread."""
        if self.error is not None or world_rank not in self.members:
            stream.close()
            return
        src = self.members.index(world_rank)
        options = self._world.options
        channel = Inbound(
            stream,
            src,
            self.mailbox,
            max_message=options.max_message,
            max_object=options.max_object,
            on_end=self.inbound_ended,
        )
        with self._guard:
            taken = src in self._inbound or self.error is not None
            if not taken:
                self._inbound[src] = channel
        if taken:
            stream.close()  # a member opens one channel; a second is a mistake of its side
        else:
            self.wake_all()

    def start_send(
        self, dst: int, kind: Kind, tag: int, description: bytes, payload: Sequence[Buffer], deadline: Deadline
    ) -> Operation:
        channel = self._outbound.get(dst)
        if channel is None:
            try:
                channel = self._open(dst, deadline)
            except PhalanxError as error:
                failed = Operation()
                failed.complete(error)
                return failed
        header = pack_header(kind, tag, len(description), payload_size(payload))
        outgoing = channel.queue([header, description, *payload])
        channel.push()
        return outgoing

    def inbound(self, src: int | None) -> Iterable[Inbound]:
        if src is None:
            return list(self._inbound.values())
        channel = self._inbound.get(src)
        return () if channel is None else (channel,)

    def unsent(self) -> list[Operation]:
        with self._guard:
            channels = list(self._outbound.values())
        return [outgoing for channel in channels for outgoing in channel.unsent()]

    def _open(self, dst: int, deadline: Deadline) -> Outbound:
        lock = self._dialling[dst]
        if not lock.acquire(timeout=deadline.remaining()):
            raise self._no_answer(dst, deadline)
        try:
            channel = self._outbound.get(dst)
            if channel is None:
                stream = self._dial(dst, deadline)
                channel = Outbound(stream, dst, lambda reason, goodbye: self.channel_error(dst, reason, goodbye))
                with self._guard:
                    if self.error is None:
                        self._outbound[dst] = channel
                if self.error is not None:
                    stream.close()
                    raise self.error
            return channel
        finally:
            lock.release()

    def _dial(self, dst: int, deadline: Deadline) -> Stream:
        world, rank = self._world, self.members[dst]

        def check() -> None:
            if self.error is not None:
                raise self.error
            if world.has_left(rank):
                raise ChannelClosed(rank, "it has left the world")

        check()
        context, number = self._key
        hello = Hello(Role.CHANNEL, world.rank, world.size, rank, context, number)
        address = world.address_of(rank)
        try:
            return dial([address], hello, world.meeting.token, world.options, deadline, who=f"rank {rank}", check=check)
        except WorldNotFormed:
            raise self._no_answer(dst, deadline) from None
        except Rejected as error:
            if error.status is Status.CLOSED:
                raise ChannelClosed(rank, "it has closed this group") from None
            raise

    def _no_answer(self, dst: int, deadline: Deadline) -> Timeout:
        rank = self.members[dst]
        return Timeout(
            f"rank {rank} did not answer at {self._world.address_of(rank)} within {deadline.seconds:g} s",
            missing=[rank],
            rank=self._world.rank,
            peer=rank,
        )

    def _end_channels(self, error: BaseException, goodbye: bool) -> None:
        self._world.remove_lane(self._key)
        word = pack_header(Kind.GOODBYE, 0, 0, 0) if goodbye else b""
        with self._guard:
            inbound, outbound = list(self._inbound.values()), list(self._outbound.values())
        for sender in outbound:
            if word:
                sender.queue([word])
                sender.push()
            sender.end(error)
        for channel in inbound:
            channel.end(error, goodbye=word)

    def abandon(self) -> None:
        """In a forked child: closes the descriptors only."""
        for inbound in self._inbound.values():
            inbound.stream.abandon()
        for outbound in self._outbound.values():
            outbound.stream.abandon()


class MeshBackend(LaneBackend):
    """Every rank connected with every other.

    Args:
        rank: This rank.
        world_size: How many there are.
        master: `"host:port"` where rank 0 hosts the directory (Phalanx wire) or the rendezvous (classic wire).
        wire: `"phalanx"`, authenticated and made for failure; or `"classic"`, to share a world with ferrotorch ranks,
            with neither authentication nor a directory.
        token: The job's secret; without one, ranks on one host share one through a private file.
        auth: `"none"` runs without any token.
        bind_addr: Classic wire only: where this rank listens for its peers, as `"host:port"`.
        timeout: For forming the world, and the default of every operation.

    Raises:
        InvalidRank, InvalidWorldSize: As the numbers say.
        RendezvousError: The world did not form.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        master: str | Address | None,
        *,
        wire: Literal["phalanx", "classic"] = "phalanx",
        token: str | bytes | None = None,
        auth: Literal["token", "none"] = "token",
        bind_addr: str | Address | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        options: Options | None = None,
    ) -> None:
        options = options or Options.from_env()
        if wire == "classic":
            if token is not None or options.tls is not None:
                raise ConfigError("the classic wire has neither token nor TLS (use wire='phalanx')")
            connected = form_mesh(rank, world_size, master, bind_addr or CLASSIC_BIND, Deadline(timeout))
            self._start(ClassicWorld(rank, world_size, connected, options), timeout)
        elif wire == "phalanx":
            if bind_addr is not None:
                raise ConfigError(
                    "bind_addr belongs to the classic wire (use options.interface and options.port_range)"
                )
            launch = detect(rank=rank, world_size=world_size, master=master, token=token)
            self._start(MeshWorld(launch, auth=auth, timeout=timeout, options=options), timeout)
        else:
            raise ConfigError(f"wire={wire!r} is not valid (expected 'phalanx' or 'classic')")

    @classmethod
    def from_launch(
        cls, launch: Launch, *, auth: Literal["token", "none"], timeout: float, options: Options
    ) -> MeshBackend:
        """The backend of a rank whose place was found by `phalanx.config.detect`."""
        backend = cls.__new__(cls)
        backend._start(MeshWorld(launch, auth=auth, timeout=timeout, options=options), timeout)
        return backend

    def _start(self, world: MeshWorld | ClassicWorld, timeout: float) -> None:
        self.world = world
        super().__init__(
            world.rank, range(world.size), world, context=WORLD_CONTEXT, timeout=timeout, options=world.options
        )
        self.hosts = tuple(member.hostname for member in world.roster)
        self.host_ids = tuple(member.host_id for member in world.roster)
        self._raw_lane()  # a message may come before the first call

    def open_lane(self, context: bytes, number: int, ranks: Sequence[int]) -> Lane:
        self.check_usable()
        return self.world.open_lane(context, number, tuple(ranks))

    def _close(self) -> None:
        self.world.close(self.timeout)

    def after_fork_in_child(self, parent_pid: int) -> None:
        super().after_fork_in_child(parent_pid)
        self.world.abandon()
