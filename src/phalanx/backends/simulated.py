"""Ranks that are threads of one process: messages are copied from one mailbox to another."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..arguments import as_world_size
from ..config import Options, timeouts
from ..deadline import Deadline
from ..errors import ChannelClosed, PeerLost, PhalanxError
from ..rendezvous.control import KnownStatuses
from ..rendezvous.error_codec import decode_error, encode_error
from ..transports.channel import Inbound
from ..transports.mailbox import Envelope, PendingTransfer
from ..transports.stream import Buffer
from ..wire.control import Statuses as StatusesMessage
from ..wire.frames import FrameKind
from .base import LaneBackend
from .contexts import WORLD_CONTEXT
from .control_plane import ControlPlane
from .lane import Lane, payload_size

__all__ = ["SimulatedBackend"]


class _SimulatedWorld:
    """The state that all ranks of a simulated world share."""

    def __init__(self, size: int) -> None:
        self.lock = threading.RLock()
        self.planes = [_SimulatedControlPlane(rank, self) for rank in range(size)]
        self.lanes: dict[tuple[bytes, int, int], _SimulatedLane] = {}
        """By context, lane and world rank."""
        self.early: dict[tuple[bytes, int, int], list[tuple[Envelope, bytes]]] = {}
        """Messages for a rank that has not made the group yet."""
        self.closed: dict[tuple[bytes, int, int], BaseException | None] = {}
        """Lanes that have ended; with the error if they did not end on purpose."""


class _SimulatedControlPlane(ControlPlane):
    """Tells the other threads directly what a directory would tell processes."""

    def __init__(self, rank: int, world: _SimulatedWorld) -> None:
        super().__init__(rank)
        self._world = world

    def abort(self, reason: str, traceback: str, peer: int | None = None, *, on_purpose: bool = False) -> None:
        for plane in self._world.planes:  # what one of them closes must not be taken for the reason by another
            plane._note_end(PeerLost(self.rank, reason, remote_traceback=traceback or None))
        for plane in self._world.planes:
            plane.on_abort(self.rank, reason, traceback)

    def break_group(self, context: bytes, error: PhalanxError) -> None:
        for plane in self._world.planes:
            if plane is not self:
                plane.on_break(context, self.rank, encode_error(error))

    def statuses(self, context: bytes, sequence: int = 0) -> KnownStatuses:
        replies = {plane.rank: plane.status(context, sequence) for plane in self._world.planes if plane is not self}
        return KnownStatuses(StatusesMessage(0, replies, {}))

    def leave(self) -> None:
        for plane in self._world.planes:
            if plane is not self:
                plane.on_left(self.rank)


class _SimulatedLane(Lane):
    def __init__(self, world: _SimulatedWorld, context: bytes, number: int, rank: int, members: Sequence[int]) -> None:
        super().__init__(rank, members, world.planes[members[rank]])
        self.mailbox.sources = None  # a rank may still send to itself when all others are gone
        self._world = world
        self._name = (context, number)
        key = (context, number, members[rank])
        self._key = key
        with world.lock:
            world.lanes[key] = self
            # Still under the lock: a message that is sent now must not overtake those that came early.
            for envelope, payload in world.early.pop(key, []):
                self.mailbox.deliver(envelope, memoryview(payload))
            gone = [src for src, member in enumerate(members) if (context, number, member) in world.closed]
        for src in gone:
            self.mailbox.gone(src, self._why_closed(src))

    def start_send(
        self, dst: int, kind: FrameKind, tag: int, description: bytes, payload: Sequence[Buffer], deadline: Deadline
    ) -> PendingTransfer:
        operation = PendingTransfer()
        if self.error is not None:
            operation.complete(self.error)
            return operation
        envelope = Envelope(self.rank, kind, tag, bytes(description), payload_size(payload))
        data = payload[0] if len(payload) == 1 else b"".join(payload)
        key = (*self._name, self.members[dst])
        with self._world.lock:
            lane = self._world.lanes.get(key)
            closed = lane is None and (key in self._world.closed or self._control.has_left(self.members[dst]))
            if lane is None and not closed:
                self._world.early.setdefault(key, []).append((envelope, bytes(data)))
        if closed:
            operation.complete(self._why_closed(dst))
            return operation
        if lane is not None:
            lane.mailbox.deliver(envelope, memoryview(data))
        operation.complete()
        return operation

    def inbound(self, src: int | None) -> Iterable[Inbound]:
        return ()

    def check_members(self) -> None:
        super().check_members()
        with self._world.lock:
            broken = [m for m, rank in enumerate(self.members) if self._world.closed.get((*self._name, rank))]
        if broken:
            raise self._why_closed(broken[0])

    def _why_closed(self, member: int) -> PhalanxError:
        """The error for a member whose lane has ended: it has closed its group, or found it broken."""
        rank = self.members[member]
        broken = self._world.closed.get((*self._name, rank))
        if isinstance(broken, PhalanxError):
            return self.whole_account(decode_error(encode_error(broken), rank))
        return ChannelClosed(rank, "it has closed this group")

    def _end_channels(self, error: BaseException, goodbye: bool) -> None:
        keys = [(*self._name, member) for member in self.members]
        with self._world.lock:
            self._world.early.pop(self._key, None)
            if self._world.lanes.pop(self._key, None) is not None:
                self._world.closed[self._key] = None if goodbye else error
                if all(key in self._world.closed for key in keys):  # the last one: no rank can send there any more
                    for key in keys:
                        del self._world.closed[key]
            others = [self._world.lanes.get(key) for key in keys]
        if goodbye:
            for lane in others:
                if lane is not None:
                    closed = ChannelClosed(self.members[self.rank], "it has closed this group")
                    lane.mailbox.gone(self.rank, closed)


class SimulatedBackend(LaneBackend):
    """One rank of a world inside this process. Made by `create_group`; each rank is used by a thread of its own."""

    self_send = True

    def __init__(
        self, rank: int, world: _SimulatedWorld, *, timeout: float | None, options: Options | None = None
    ) -> None:
        self._world = world
        ranks = range(len(world.planes))
        control = world.planes[rank]
        super().__init__(rank, ranks, control, context=WORLD_CONTEXT, timeouts=timeouts(timeout), options=options)
        self.is_one_process = True
        # A message may come before the receiver's first call, so the lane must be there.
        self.raw_messages()

    @classmethod
    def create_group(
        cls, world_size: int, *, timeout: float | None = None, options: Options | None = None
    ) -> list[SimulatedBackend]:
        """All ranks of a new world, in order.

        Args:
            options: Those that have to do with how bytes are moved between processes have no meaning here.

        Raises:
            InvalidWorldSize: `world_size` is below 1.
        """
        world_size = as_world_size(world_size)
        world = _SimulatedWorld(world_size)
        if options is not None:
            options = replace(options, transport="auto", tls=None)
        return [cls(rank, world, timeout=timeout, options=options) for rank in range(world_size)]

    def open_lane(self, context: bytes, number: int, ranks: Sequence[int]) -> Lane:
        self.check_usable()
        return _SimulatedLane(self._world, context, number, list(ranks).index(self._rank), tuple(ranks))

    def _close(self) -> None:
        with self._world.lock:
            lanes = [lane for key, lane in self._world.lanes.items() if key[2] == self._rank]
        for lane in lanes:  # of groups that outlive their backend
            lane.close()
        self._world.planes[self._rank].leave()

    def after_fork_in_child(self, parent_pid: int) -> None:
        super().after_fork_in_child(parent_pid)
        for (_, _, rank), lane in list(self._world.lanes.items()):
            if rank == self._rank:
                lane.interrupt(False)  # else the fast path of a world of one, which waits for nobody, would go on
