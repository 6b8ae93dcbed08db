"""The interface of all backends, and the base of those that are part of this package."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from ..algorithms.classic import BarrierMessage, star_barrier
from ..arguments import as_rank
from ..background_thread import BackgroundThread
from ..config import Options, Timeouts
from ..deadline import Deadline
from ..errors import Closed, SelfSend, UnsupportedOp
from ..rendezvous.host import hostname
from ..wire.classic.frames import BARRIER
from ..wire.control import Member, Regroup, View
from .contexts import RAW_LANE, derive_context
from .control_plane import ControlPlane
from .lane import Lane
from .lane_ports import LanePort
from .ports import Accept, LinkPort
from .raw_messages import RawMessages, bytes_of

__all__ = ["Backend", "GpuChoice", "LaneBackend"]

GpuChoice = Literal["auto", "nccl", "hybrid", "ucc"]
"""Which ways arrays on a GPU may go: any, NCCL only, NCCL and the host for what NCCL lacks, any."""


class Backend(ABC):
    """A way of moving bytes between ranks.

    A backend of your own implements the abstract methods; `phalanx.Group` adds the collectives.
    """

    _adapter: LaneBackend | None = None
    """Adds lanes to a backend of the user's; made by `plain.as_lane_backend`."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This participant, from 0 to `world_size - 1`."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of participants."""

    @abstractmethod
    def send(self, data: Any, dst: int, *, timeout: float | None = None) -> None:
        """Sends the bytes of a buffer to a rank, as one message.

        Raises:
            InvalidRank: There is no such rank.
            SelfSend: `dst` is this rank, and the backend has no way to itself.
            NoConnection: The backend has no way to that rank.
            Timeout: It could not be sent in time.
            PeerLost: The other rank is gone.
        """

    @abstractmethod
    def recv(self, buffer: Any, src: int, *, timeout: float | None = None) -> None:
        """Receives one message of exactly the buffer's length from a rank.

        Raises:
            SizeMismatch: The next message has another length; it is dropped.
            Timeout: No message came in time. The connection stays usable, and a message that comes later is not lost.
            InvalidRank, SelfSend, NoConnection, PeerLost: As for `send`.
        """

    @abstractmethod
    def barrier(self, *, timeout: float | None = None) -> None:
        """Returns once all ranks have called it.

        Raises:
            Timeout: Not all did in time.
            PeerLost: A rank is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the backend and releases everything. May be called twice; any other use afterwards raises `Closed`."""


class LaneBackend(Backend):
    """A backend that gives each group on it lanes of its own.

    Args:
        world_ranks: The world rank of each of this backend's ranks.
        context: The identity of this set of ranks.
        timeouts: The seconds that operations, and goodbyes, have by default.
    """

    topology: Literal["full", "star"] = "full"
    """Which ranks are connected: all, or each with rank 0 only."""
    peers: Literal["phalanx", "ferrotorch"] = "phalanx"
    """The library that the other ranks use. With ferrotorch, only plain messages of the classic wire are sent."""
    self_send = False
    """True if a rank may send to itself."""
    gpu_choice: GpuChoice = "auto"
    """Which ways arrays on a GPU may go; the same on all ranks."""
    engine_context: object = None
    """Data for a collective engine that is made for this kind of backend; None if collectives go over lanes."""

    def __init__(
        self,
        rank: int,
        world_ranks: Sequence[int],
        control: ControlPlane,
        *,
        context: bytes,
        timeouts: Timeouts,
        options: Options | None = None,
    ) -> None:
        self._rank = rank
        self.world_ranks = tuple(world_ranks)
        """The world rank of each of this backend's ranks."""
        self.control = control
        self.context = context
        self.timeout = timeouts.operation
        """The default of every operation, in seconds."""
        self.meeting_timeout = timeouts.meeting
        """Seconds for the goodbyes at the end."""
        self.options = options or Options()
        self.hosts: tuple[str, ...] = (hostname(),) * len(self.world_ranks)
        """The host name of each rank."""
        self.host_ids: tuple[str, ...] = self.hosts
        """An identity of each rank's machine: two machines may have the same name."""
        self.memory_ids: tuple[str, ...] = ("",) * len(self.world_ranks)
        """Ranks of one host with the same value can map each other's memory; empty for a rank that cannot."""
        self.core_masks: tuple[str, ...] = ("",) * len(self.world_ranks)
        """The cores that each rank may use, as `Member.cores` has them."""
        self.is_one_process = False
        """True if all ranks are threads of this process."""
        self._raw: RawMessages | None = None
        self._barrier_at = 0
        """Messages of the current barrier that are done. After a timeout, the next call continues from here."""
        self._dropped: weakref.finalize[..., Any] | None = None
        self._unusable: str | None = None
        self._is_half_closed = False
        """Whether an exception came in `close`: the next call does what is left."""
        self.forked = False
        """True in a forked child, whose copy cannot be used."""
        self._lock = threading.RLock()
        self._counters: dict[object, int] = {}
        _backends.add(self)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return len(self.world_ranks)

    # -- for groups ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def open_lane(self, context: bytes, number: int, ranks: Sequence[int]) -> Lane:
        """Opens a lane for some of this backend's ranks, in the order given. This rank must be among them."""

    def open_port(self, context: bytes, number: int, ranks: Sequence[int], accept: Accept) -> LinkPort:
        """Opens a port for remote calls among some of this backend's ranks, in the order given.

        Raises:
            UnsupportedOp: Some ranks are ferrotorch's.
        """
        if self.peers == "ferrotorch":
            raise UnsupportedOp("ferrotorch's ranks do not know Agent's messages (use phalanx.rpc.ClassicAgent)")
        return LanePort(self.open_lane(context, number, ranks), self.control, accept)

    epoch = 0
    """The number of the view that this backend is, counted from the group that was there first."""
    owns_world = True
    """True if closing this backend leaves the world."""
    is_world = False
    """True if this is all of the world: who is voted out of it, is out of the world."""

    def take_hosts(self, members: Iterable[Member]) -> None:
        """Notes where the members are, as the directory says."""
        rows = [(member.hostname, member.host_id, member.memory, member.cores) for member in members]
        self.hosts, self.host_ids, self.memory_ids, self.core_masks = (
            tuple(column) for column in zip(*rows, strict=True)
        )

    def next_view(self, request: Regroup) -> tuple[LaneBackend, View]:
        """Asks the directory for the next view of a group of these ranks, and returns a backend for its members.

        Raises:
            UnsupportedOp: This backend has no directory that could decide.
            Evicted: The others went on without this rank.
            Timeout: Not all members that are alive asked in time.
            RendezvousError: The directory is gone.
        """
        raise UnsupportedOp(
            f"a group on {type(self).__name__} cannot shrink: only backend='mesh' has a directory, which decides who "
            "goes on"
        )

    def next_context(self, label: str, key: tuple[int, ...] | None = None) -> bytes:
        """A new identity. The n-th call with the same arguments returns the same one on all ranks."""
        with self._lock:
            number = self._counters[label, key] = self._counters.get((label, key), 0) + 1
        return derive_context(self.context, label, key, number)

    @property
    def is_unusable(self) -> bool:
        """True once this backend is closed, and in a forked child."""
        return self._unusable is not None

    def check_usable(self) -> None:
        """Refuses to go on after the end of this backend.

        Raises:
            Closed: The backend is closed, or this is a forked child.
        """
        if self._unusable is not None:
            raise Closed(self._unusable, rank=self.world_ranks[self._rank])

    def check_peer(self, peer: int) -> int:
        """Returns a rank as a plain int; refuses a rank that cannot be sent to.

        Raises:
            InvalidRank: There is no such rank.
            SelfSend: It is this rank, and the backend has no way to itself.
        """
        rank = as_rank(peer, self.world_size)
        if rank == self._rank and not self.self_send:
            raise SelfSend(rank)
        return rank

    # -- raw messages --------------------------------------------------------------------------------------------------

    def send(self, data: Any, dst: int, *, timeout: float | None = None) -> None:
        self.check_usable()
        dst = self.check_peer(dst)
        view = bytes_of(data, writable=False)
        deadline = Deadline.of(timeout, self.timeout)
        self.raw_messages().send(view, dst, deadline)

    def recv(self, buffer: Any, src: int, *, timeout: float | None = None) -> None:
        self.check_usable()
        src = self.check_peer(src)
        view = bytes_of(buffer, writable=True)
        deadline = Deadline.of(timeout, self.timeout)
        self.raw_messages().recv(view, src, deadline)

    def barrier(self, *, timeout: float | None = None) -> None:
        self.check_usable()
        deadline = Deadline.of(timeout, self.timeout)
        messages = self.barrier_messages()
        while self._barrier_at < len(messages):
            peer, sends = messages[self._barrier_at]
            if sends:
                self.send(BARRIER, peer, timeout=deadline.remaining())
            else:
                self.recv(bytearray(len(BARRIER)), peer, timeout=deadline.remaining())
            self._barrier_at += 1
        self._barrier_at = 0

    def barrier_messages(self) -> Sequence[BarrierMessage]:
        """The messages of this rank in a barrier."""
        return star_barrier(self._rank, self.world_size)

    def raw_messages(self) -> RawMessages:
        """The messages of `send` and `recv`. Their lane is opened when they are first asked for."""
        if self._raw is None:
            with self._lock:
                if self._raw is None:
                    self._raw = RawMessages(self.open_lane(self.context, RAW_LANE, range(self.world_size)))
            self.control.watch(self._raw_context, self._raw)
        return self._raw

    @property
    def _raw_context(self) -> bytes:
        return derive_context(self.context, "raw")

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        try:
            with self._lock:
                first = self._unusable is None
                if first:
                    self._unusable = f"this {type(self).__name__} was closed"
                elif not self._is_half_closed:
                    return
            self.control.unwatch(self._raw_context)
            if self._raw is not None:
                self._raw.lane.close()
            self._close()
            if self._dropped is not None:
                self._dropped.detach()
        except BaseException:
            self._is_half_closed = True
            raise

    def _close(self) -> None:
        """Releases the resources of a subclass. Called again, it does what an exception has left."""

    def _close_when_dropped(self, close: Callable[[], None]) -> None:
        """Has the world closed when the last reference to this backend is gone.

        The world's threads keep it alive, so without this the peers would wait for a rank that has no backend.

        Args:
            close: Closes the world. It must not hold a reference to the backend.
        """
        control = self.control

        def dropped() -> None:
            if not control.forked:
                # In a thread: the garbage collector may run at any point of any thread, and closing waits.
                BackgroundThread(close, "phalanx-close", on_error=_ignore).start()

        self._dropped = weakref.finalize(self, dropped)
        self._dropped.atexit = False  # the peers see the end of the process

    # -- fork ----------------------------------------------------------------------------------------------------------

    def after_fork_in_child(self, parent_pid: int) -> None:
        """Makes the child's copy unusable and closes its copies of the descriptors.

        Takes no locks: threads that held them do not exist in the child.
        """
        self.forked = self.control.forked = True
        self._unusable = (
            f"this process was forked from rank {self.world_ranks[self._rank]} (process {parent_pid}), which still "
            "owns this group; a forked child cannot use it (call phalanx.init in the child to form a world of its own)"
        )


def _ignore(_error: Exception) -> None:
    """Drops the error of closing: no caller is left to raise it to."""


_backends: weakref.WeakSet[LaneBackend] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for backend in list(_backends):
        backend.after_fork_in_child(os.getppid())


os.register_at_fork(after_in_child=_after_fork_in_child)
