"""A lane: an ordered stream of tagged messages among the members of one group.

The thread that waits for an operation moves the bytes for it; an operation that nobody waits for is moved by the lane's
own thread, which exists only once it is needed. Ranks here are those of the group, from 0 to `size - 1`.
"""

from __future__ import annotations

import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ..deadline import Deadline
from ..errors import ChannelClosed, PeerLost, PhalanxError, ProtocolError
from ..transports.channel import Inbound, Outbound, Outgoing
from ..transports.mailbox import Envelope, Mailbox, Operation, Receive, Sink
from ..transports.stream import Buffer, Stream
from ..transports.waker import Waker
from ..wire.frames import Kind

if TYPE_CHECKING:
    from .control_plane import ControlPlane

__all__ = ["Lane"]

VERDICT_WAIT = 0.25
"""Seconds a broken connection waits for the directory's word, so that a rank's own traceback is raised, not an echo."""


class Lane(ABC):
    """What a group sends and receives on.

    Args:
        rank: This rank in the group.
        members: The world rank of each member.
        control: Knows why a member is lost.
    """

    def __init__(self, rank: int, members: Sequence[int], control: ControlPlane) -> None:
        self.rank = rank
        self.members = tuple(members)
        self.size = len(self.members)
        self.mailbox = Mailbox()
        self.mailbox.sources = frozenset(range(self.size)) - {rank}
        self._control = control
        self._guard = threading.Lock()
        self._sleepers: set[Waker] = set()
        self._mover: _Mover | None = None
        self.error: BaseException | None = None

    # -- what a transport provides -------------------------------------------------------------------------------------

    @abstractmethod
    def start_send(
        self, dst: int, kind: Kind, tag: int, description: bytes, payload: Sequence[Buffer], deadline: Deadline
    ) -> Operation:
        """Queues a message.

        The memory of `payload` must stay until it is done. May take until `deadline` to connect.
        """

    @abstractmethod
    def inbound(self, src: int | None) -> Iterable[Inbound]:
        """The channels that may bring something from `src`, or from anyone."""

    @abstractmethod
    def _end_channels(self, error: BaseException, goodbye: bool) -> None:
        """Closes all channels of this lane."""

    def unsent(self) -> list[Operation]:
        """Messages that are queued and not yet sent."""
        return []

    def mailbox_source(self, src: int) -> int:
        """What the mailbox calls a member."""
        return src

    def streams(self) -> list[Stream]:
        """The connections that carry this lane now."""
        return []

    def source_of(self, envelope: Envelope) -> int:
        """The member that a message came from."""
        return envelope.src

    def peer_of(self, channel: Outbound) -> int:
        """The world rank at the other end of a channel."""
        return self.members[channel.dst]

    # -- operations ----------------------------------------------------------------------------------------------------

    def post(self, src: int | None, tag: int | None, sink: Sink) -> Receive:
        """Announces a receive."""
        receive = self.mailbox.post(None if src is None else self.mailbox_source(src), tag, sink)
        if src is not None and not receive.done and self._control.has_left(self.members[src]):
            self.left(src)
        return receive

    def wait(self, operations: Sequence[Operation], deadline: Deadline) -> bool:
        """Moves bytes until all are done or one has failed; False if the deadline came first."""
        waker = Waker.mine()
        with self._guard:
            self._sleepers.add(waker)
        for operation in operations:
            operation.add_waker(waker)
        try:
            while True:
                waker.clear()
                waiting = _unfinished(operations)
                polled = self._drive(waiting)
                if not _unfinished(waiting):
                    return True
                if not _sleep(waker, polled, deadline) and deadline.expired:
                    return not _unfinished(waiting)
        finally:
            for operation in operations:
                operation.remove_waker(waker)
            with self._guard:
                self._sleepers.discard(waker)

    def withdraw(self, operation: Operation) -> bool:
        """Takes back an operation whose time is over; False if it was done after all.

        A message of which a part is on the wire cannot be taken back: its channel ends.
        """
        if isinstance(operation, Receive):
            return self.mailbox.withdraw(operation)
        if isinstance(operation, Outgoing) and not operation.done and not operation.withdrawn:
            cut = ChannelClosed(
                self.peer_of(operation.channel), "an earlier message to it was cut short by a timeout"
            )
            return operation.channel.withdraw(operation, cut)
        return False

    def move_in_background(self, operation: Operation, deadline: Deadline, expire: Callable[[], None]) -> None:
        """Makes sure that somebody moves the bytes of an operation for which nobody waits.

        `expire` is called if the deadline passes first.
        """
        if operation.done:
            return
        with self._guard:
            if self._mover is None:
                self._mover = _Mover(self)
        self._mover.add(operation, deadline, expire)

    def flush(self, deadline: Deadline) -> None:
        """Waits until everything that was queued is on its way, or the deadline has come."""
        self.wait(self.unsent(), deadline)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Ends every operation, now and later, with `error`. From any thread; never waits."""
        self._end(error, goodbye=False)

    def close(self) -> None:
        """Says goodbye and gives everything back."""
        self._end(ChannelClosed(self.members[self.rank], "this group was closed on this rank"), goodbye=True)
        if self._mover is not None:
            self._mover.stop()

    def left(self, src: int) -> None:
        """A member closed its world. What it sent before still arrives; without a channel from it, nothing will."""
        if not any(channel.src == src and not channel.ended for channel in self.inbound(src)):
            self.mailbox.gone(src, ChannelClosed(self.members[src], "it has left the world"))

    def wake_readers(self) -> None:
        """Makes every thread look again that may wait for the same channels."""
        self.wake_all()

    def wake_all(self) -> None:
        """Makes every waiting thread look again."""
        with self._guard:
            sleepers = list(self._sleepers)
        for waker in sleepers:
            waker.set()

    def _end(self, error: BaseException, *, goodbye: bool) -> None:
        with self._guard:
            if self.error is not None:
                error, goodbye = self.error, False
            self.error = error
        self.mailbox.fail(error)
        self._end_channels(error, goodbye)
        self.wake_all()

    def channel_error(self, peer: int, reason: str, goodbye: bool) -> PhalanxError:
        """Why the connection to a member ended, in the words of whoever knows best."""
        rank = self.members[peer]
        if goodbye:
            return ChannelClosed(rank, "it has closed this group")
        if isinstance(self.error, PhalanxError):
            return self.error
        known = self._control.verdict(rank, VERDICT_WAIT)
        if known is not None:
            return known
        if self._control.has_left(rank):
            return ChannelClosed(rank, "it has left the world")
        if self._control.answers(rank):
            return ChannelClosed(rank, f"it is alive, but this channel has ended: {reason}")
        return PeerLost(rank, reason)

    def inbound_ended(self, channel: Inbound, ended: Exception, goodbye: bool) -> PhalanxError:
        """An inbound channel is over: receives from its source fail, and so will later ones."""
        error: PhalanxError
        if isinstance(ended, ProtocolError):
            rank = self.members[channel.src]
            error = ProtocolError(f"rank {rank} sent what is no message, its channel is closed: {ended}", peer=rank)
        else:
            error = self.channel_error(channel.src, str(ended), goodbye)
        self.mailbox.gone(channel.src, error)
        return error

    # -- moving bytes --------------------------------------------------------------------------------------------------

    def _drive(self, operations: Sequence[Operation]) -> list[tuple[int, int]]:
        """Moves what can be moved for these operations; returns what to poll for the rest."""
        inbound: dict[int, Inbound] = {}
        outbound: dict[int, Outbound] = {}
        for operation in operations:
            if isinstance(operation, Receive):
                for channel in self.inbound(operation.src):
                    inbound[id(channel)] = channel
            elif isinstance(operation, Outgoing):
                outbound[id(operation.channel)] = operation.channel
        for sender in outbound.values():
            sender.push()
        for channel in inbound.values():
            while channel.pump():
                if all(operation.done for operation in operations):
                    if channel.read_ahead:  # another thread's message, and no poll will tell it so
                        self.wake_readers()
                    return []
        polled = [(c.stream.fd, c.stream.read_events) for c in inbound.values() if not c.ended]
        polled += [(c.stream.fd, c.stream.write_events) for c in outbound.values() if not c.idle]
        return polled


def _unfinished(operations: Sequence[Operation]) -> list[Operation]:
    """What is still to be waited for: nothing once one has failed."""
    waiting = []
    for operation in operations:
        if operation.error is not None:
            return []
        if not operation.done:
            waiting.append(operation)
    return waiting


def _sleep(waker: Waker, polled: Iterable[tuple[int, int]], deadline: Deadline) -> bool:
    poller = select.poll()
    poller.register(waker.fd, select.POLLIN)
    events: dict[int, int] = {}
    for fd, wanted in polled:
        events[fd] = events.get(fd, 0) | wanted  # one descriptor may be both read and written
    for fd, wanted in events.items():
        if fd >= 0:
            poller.register(fd, wanted)
    return bool(poller.poll(deadline.poll_ms()))


class _Mover:
    """The lane's own thread, for operations that nobody waits for."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._jobs: list[tuple[Operation, Deadline, Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._stopping = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phalanx-lane", daemon=True)
        self._thread.start()
        self._ready.wait()

    def add(self, operation: Operation, deadline: Deadline, expire: Callable[[], None]) -> None:
        with self._lock:
            self._jobs.append((operation, deadline, expire))
        self._waker.set()

    def stop(self) -> None:
        self._stopping = True
        self._waker.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        lane, waker = self._lane, Waker.mine()
        self._waker = waker
        lane._sleepers.add(waker)  # whoever starts this thread holds the lane's guard
        self._ready.set()
        while not self._stopping:
            self._turn(lane, waker)

    def _turn(self, lane: Lane, waker: Waker) -> None:
        # A function of its own: what is done must not stay in its variables, which would keep the group alive.
        waker.clear()
        with self._lock:
            self._jobs = [job for job in self._jobs if not job[0].done]
            jobs = list(self._jobs)
        for operation, deadline, expire in jobs:
            if deadline.expired and not operation.done:
                expire()
        operations = [operation for operation, _, _ in jobs if not operation.done]
        polled = lane._drive(operations)
        for operation in operations:
            operation.add_waker(waker)  # another thread may complete it
        if not any(operation.done for operation in operations):
            _sleep(waker, polled, min((job[1] for job in jobs), key=lambda d: d.at, default=_NEVER))
        for operation in operations:
            operation.remove_waker(waker)


_NEVER = Deadline(float("inf"))
