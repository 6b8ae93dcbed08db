"""What every backend can do, and the part that all backends of this package share."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..algorithms.classic import BarrierMessage, star_barrier
from ..arguments import as_rank, as_seconds
from ..config import Options
from ..deadline import DEFAULT_TIMEOUT, Deadline
from ..errors import Closed, PeerLost, PhalanxError, SelfSend, Timeout, UnsupportedArray, UnsupportedOp
from ..rendezvous.host import hostname
from ..system_limits import naming_limits
from ..transports.mailbox import BufferSink, PendingTransfer
from ..transports.stream import Buffer
from ..wire.classic.frames import BARRIER
from ..wire.control import OperationStatus
from ..wire.frames import FrameKind
from .control_plane import ControlPlane
from .lane import Lane
from .lane_ports import LanePort
from .ports import Accept, LinkPort

if TYPE_CHECKING:
    from .mpi.backend import Messenger

__all__ = ["DEFAULT_TIMEOUT", "Backend", "LaneBackend", "bytes_of", "close_when_dropped", "derive_context"]

WORLD_CONTEXT = b"phalanx-world\0\0\0"
"""The context of a whole world; those of all groups are derived from it."""
RAW_LANE = 0
"""The lane of `Backend.send` and `recv`; a group on the backend has lanes of its own."""


def derive_context(parent: bytes, *parts: str | int | tuple[int, ...] | None) -> bytes:
    """The identity of a group made from another: the same on all members, different for every group.

    Plain ints only: `repr` of NumPy's is another text.
    """
    text = repr(parts).encode()
    return hashlib.blake2b(parent + text, digest_size=16, person=b"phalanx-context").digest()


def bytes_of(data: Any, *, writable: bool) -> memoryview:
    """The bytes of anything with a contiguous buffer, without a copy.

    Raises:
        UnsupportedArray: There is no such buffer, or it cannot be written to.
    """
    try:
        view = memoryview(data)
    except TypeError:
        raise UnsupportedArray(
            f"{type(data).__name__} has no buffer (expected bytes, bytearray, memoryview or a NumPy array)"
        ) from None
    if not view.c_contiguous:
        raise UnsupportedArray("the buffer is not contiguous (make a copy first, or use a Group, which does)")
    if writable and view.readonly:
        raise UnsupportedArray(f"a read-only {type(data).__name__} cannot be received into")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


class Backend(ABC):
    """How bytes move between ranks. The base of all backends.

    A backend of your own needs only what is abstract here; `phalanx.Group` puts the collectives on it.
    """

    _adapter: LaneBackend | None = None
    """What gives lanes to a backend that has none; see `plain`."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This participant, from 0 to `world_size - 1`."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """How many participants there are."""

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
        """Gives everything back. May be called twice; any other use afterwards raises `Closed`."""


class LaneBackend(Backend):
    """A backend made of lanes, which lets groups on it have channels of their own.

    Args:
        world_ranks: The world rank of each of this backend's ranks.
        context: The identity of this set of ranks.
        timeout: The default for every operation, in seconds.
    """

    topology: Literal["full", "star"] = "full"
    """Which ranks are connected: all, or each with rank 0 only."""
    peers: Literal["phalanx", "ferrotorch"] = "phalanx"
    """What the other ranks are. Among ferrotorch's, everything travels as the classic wire's plain messages."""
    self_send = False
    """Whether a rank may send to itself."""
    messenger: Messenger | None = None
    """What collectives go through where that is MPI."""

    def __init__(
        self,
        rank: int,
        world_ranks: Sequence[int],
        control: ControlPlane,
        *,
        context: bytes,
        timeout: float,
        options: Options | None = None,
    ) -> None:
        self._rank = rank
        self.world_ranks = tuple(world_ranks)
        """The world rank of each of this backend's ranks."""
        self.control = control
        self.context = context
        self.timeout = as_seconds(timeout)
        self.options = options or Options()
        self.hosts: tuple[str, ...] = (hostname(),) * len(self.world_ranks)
        """The host name of each rank."""
        self.host_ids: tuple[str, ...] = self.hosts
        """Tells the machines apart, whatever their names are."""
        self.memory_ids: tuple[str, ...] = ("",) * len(self.world_ranks)
        """The same for ranks of one host that can map each other's memory; empty for one that cannot."""
        self._raw: Lane | None = None
        self._barrier_at = 0
        """How many messages of a barrier have been sent and received. One that timed out goes on in the next call."""
        self._dropped: weakref.finalize[..., Any] | None = None
        self._unusable: str | None = None
        self.forked = False
        """Whether this is a forked child's copy."""
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
        """A lane of its own for some of this backend's ranks, in the order given; this rank must be among them."""

    def open_port(self, context: bytes, number: int, ranks: Sequence[int], accept: Accept) -> LinkPort:
        """A port for remote calls among some of this backend's ranks, in the order given.

        Raises:
            UnsupportedOp: Some ranks are ferrotorch's.
        """
        if self.peers == "ferrotorch":
            raise UnsupportedOp("ferrotorch's ranks do not know Agent's messages (use phalanx.rpc.ClassicAgent)")
        return LanePort(self.open_lane(context, number, ranks), self.control, accept)

    def next_context(self, label: str, key: tuple[int, ...] | None = None) -> bytes:
        """A fresh identity, the same on all ranks that ask for their n-th one of this kind."""
        with self._lock:
            number = self._counters[label, key] = self._counters.get((label, key), 0) + 1
        return derive_context(self.context, label, key, number)

    @property
    def is_unusable(self) -> bool:
        """Whether this backend is closed, or was the parent process's."""
        return self._unusable is not None

    def check_usable(self) -> None:
        """Refuses what comes after the end.

        Raises:
            Closed: The backend is closed, or this is a forked child.
        """
        if self._unusable is not None:
            raise Closed(self._unusable, rank=self.world_ranks[self._rank])

    def check_peer(self, peer: int) -> int:
        """A rank as a plain int; refuses one that cannot be talked to.

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
        lane = self._raw_lane()
        with naming_limits():
            operation = lane.start_send(dst, FrameKind.RAW, 0, b"", [view], deadline)
        self._finish(lane, operation, deadline, f"send of {len(view)} bytes to rank {dst}", dst)

    def recv(self, buffer: Any, src: int, *, timeout: float | None = None) -> None:
        self.check_usable()
        src = self.check_peer(src)
        view = bytes_of(buffer, writable=True)
        deadline = Deadline.of(timeout, self.timeout)
        lane = self._raw_lane()
        operation = lane.post(src, 0, BufferSink(view))
        self._finish(lane, operation, deadline, f"recv of {len(view)} bytes from rank {src}", src)

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

    def close(self) -> None:
        with self._lock:
            if self._unusable is not None:
                return
            self._unusable = f"this {type(self).__name__} was closed"
            if self._dropped is not None:
                self._dropped.detach()
        self.control.unwatch(self._raw_context)
        if self._raw is not None:
            self._raw.close()
        self._close()

    def _close(self) -> None:
        """Gives back what a subclass holds."""

    @property
    def _raw_context(self) -> bytes:
        return derive_context(self.context, "raw")

    def _raw_lane(self) -> Lane:
        if self._raw is None:
            with self._lock:
                if self._raw is None:
                    self._raw = self.open_lane(self.context, RAW_LANE, range(self.world_size))
            self.control.watch(self._raw_context, self)
        return self._raw

    def _finish(self, lane: Lane, operation: PendingTransfer, deadline: Deadline, what: str, peer: int) -> None:
        try:
            with naming_limits():
                lane.wait([operation], deadline)
        finally:  # also after Ctrl-C: nothing may be written to the caller's memory later
            expired = lane.withdraw(operation)
        if expired:
            world_rank = self.world_ranks[peer]
            raise Timeout(
                f"{what}: not done within {deadline.seconds:g} s",
                missing=[world_rank],
                seconds=deadline.seconds,
                rank=self.world_ranks[self._rank],
                peer=world_rank,
                operation=what.split(" ", 1)[0],
            )
        if operation.error is not None:
            raise fresh(operation.error, what, self.world_ranks[self._rank])

    # -- the raw lane as something that breaks (see control_plane.Watcher) ---------------------------------------------

    def fail(self, error: PhalanxError) -> None:
        """Ends every raw operation with `error`."""
        if self._raw is not None:
            self._raw.fail(error)

    def left(self, rank: int) -> None:
        """A member closed its world on purpose."""
        if self._raw is not None:
            self._raw.left(self.world_ranks.index(rank))

    def status(self, sequence: int = 0) -> OperationStatus:
        """Raw messages keep no journal."""
        return OperationStatus("", 0, 0, "", False, float("inf"))

    # -- fork ----------------------------------------------------------------------------------------------------------

    def after_fork_in_child(self, parent_pid: int) -> None:
        """Makes the child's copy unusable and lets go of the parent's descriptors.

        Takes no locks: their owners are gone.
        """
        self.forked = self.control.forked = True
        self._unusable = (
            f"this process was forked from rank {self._rank} (process {parent_pid}), which still owns this group; "
            "a forked child cannot use it (call phalanx.init in the child to form a world of its own)"
        )


def fresh(error: BaseException, operation: str, rank: int | None) -> BaseException:
    """An exception to raise for an error that may be shared by several threads.

    The same words, a traceback of its own.
    """
    if isinstance(error, PeerLost):
        return error.during(operation, rank)
    if isinstance(error, PhalanxError):
        copy = error.__class__.__new__(error.__class__)
        copy.__dict__.update(error.__dict__)
        copy.args = error.args
        copy.operation = error.operation or operation
        copy.rank = error.rank if error.rank is not None else rank
        return copy
    return error


def payload_size(payload: Sequence[Buffer]) -> int:
    """Bytes in all parts of a payload."""
    return sum(len(part) for part in payload)


def close_when_dropped(backend: LaneBackend, close: Callable[[], None]) -> None:
    """Closes the world of a backend that nobody holds any more: its threads hold each other, and the peers wait.

    Args:
        close: Gives back what the backend holds. It must not hold the backend itself.
    """
    control = backend.control

    def run() -> None:
        with contextlib.suppress(Exception):
            close()

    def dropped() -> None:
        if not control.forked:
            # A thread of its own: the garbage collector comes at any point of any thread, and to close is to wait.
            threading.Thread(target=run, name="phalanx-close", daemon=True).start()

    backend._dropped = weakref.finalize(backend, dropped)
    backend._dropped.atexit = False  # the end of the process says it all


_backends: weakref.WeakSet[LaneBackend] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for backend in list(_backends):
        backend.after_fork_in_child(os.getppid())


os.register_at_fork(after_in_child=_after_fork_in_child)
