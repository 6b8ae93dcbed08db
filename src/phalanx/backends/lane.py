"""A lane: an ordered stream of tagged messages among the members of one group.

The thread that waits for an operation moves the bytes for it; an operation that nobody waits for is moved by the lane's
own thread, which exists only once it is needed. Ranks here are those of the group, from 0 to `size - 1`.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ..deadline import Deadline
from ..errors import ChannelClosed, PeerLost, PhalanxError, ProtocolError, Timeout
from ..rendezvous.error_codec import from_cause
from ..transports.channel import Inbound, Outbound, Outgoing, Torn
from ..transports.mailbox import Envelope, Mailbox, Operation, Receive, Sink
from ..transports.stream import Buffer, Stream
from ..transports.waker import Waker
from ..wire.control import parse_cause
from ..wire.frames import Kind

if TYPE_CHECKING:
    from .._core import FastMessages, Recorder
    from .control_plane import ControlPlane

__all__ = ["Lane", "sleep"]

SLICE = 0.05
"""Seconds that bytes are moved without a look at the deadline, as long as there are more."""
EAGER = 100e-6
"""Seconds that a waiting thread looks again and again before it sleeps."""
STOP_WAIT = 5.0
"""Seconds that closing waits for the lane's own thread, which may be in a callback of the user's."""
VERDICT_WAIT = 0.25
"""Seconds a broken connection waits for the directory's word, so that a rank's own traceback is raised, not an echo."""
ACCOUNT_WAIT = 1.0
"""Seconds to wait for the whole account of a timeout."""


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
        self._guard = threading.RLock()
        self._sleepers: set[Waker] = set()
        self._turns = itertools.count()
        self._mover: _Mover | None = None
        self.error: BaseException | None = None
        self._interrupters: list[Callable[[bool], None]] = []

    direct = False
    """Whether `outbound` and `inbound` are channels of this lane alone, on which frames can be moved directly."""

    crowded = True
    """Whether ranks may have to share a core: then it is better to sleep at once than to look again."""

    # -- what a transport provides -------------------------------------------------------------------------------------

    @abstractmethod
    def start_send(
        self, dst: int, kind: Kind, tag: int, description: bytes, payload: Sequence[Buffer], deadline: Deadline
    ) -> Operation:
        """Queues a message.

        The memory of `payload` must stay until it is done. May take until `deadline` to connect.
        """

    def outbound(self, dst: int, deadline: Deadline) -> Outbound:
        """The channel to `dst` of a direct lane; may take until `deadline` to connect.

        Raises:
            PhalanxError: There is none.
        """
        raise PhalanxError(f"rank {self.members[dst]} has no channel of this {type(self).__name__} alone")

    @abstractmethod
    def inbound(self, src: int | None) -> Iterable[Inbound]:
        """The channels that may bring something from `src`, or from anyone."""

    @abstractmethod
    def _end_channels(self, error: BaseException, goodbye: bool) -> None:
        """Closes all channels of this lane."""

    def unsent(self) -> list[Operation]:
        """Messages that are queued and not yet sent."""
        return []

    def fast_messages(self, recorder: Recorder, timeout: float) -> FastMessages | None:
        """The fast path of simple messages, where the lane has one. It notes them in `recorder`."""
        return None

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
        waiting = _unfinished(operations)
        eager = min(time.monotonic() + EAGER, deadline.at)
        while waiting and time.monotonic() < eager:
            self.drive(waiting)
            waiting = _unfinished(waiting)
            if waiting and self.crowded:
                os.sched_yield()  # who is to send may need this core
        if not waiting:  # most sends are done at once
            return True
        waker = Waker.take()
        try:
            self.add_sleeper(waker)
            for operation in operations:
                operation.add_waker(waker)
            while True:
                waker.clear()
                waiting = _unfinished(operations)
                polled = self.drive(waiting)
                if not _unfinished(waiting):
                    return True
                if deadline.expired:
                    return False
                if polled is not None:
                    sleep(waker, polled, deadline)
        finally:
            for operation in operations:
                operation.remove_waker(waker)
            self.remove_sleeper(waker)
            waker.give_back()

    def withdraw(self, operation: Operation) -> bool:
        """Takes back an operation whose time is over; False if it was done after all.

        A message of which a part is on the wire cannot be taken back: its channel ends.
        """
        if isinstance(operation, Receive):
            return self.mailbox.withdraw(operation)
        if operation.done or operation.withdrawn:
            return False
        if isinstance(operation, Outgoing):
            cut = ChannelClosed(self.peer_of(operation.channel), "an earlier message to it was cut short")
            return operation.channel.withdraw(operation, cut)
        operation.withdrawn = True
        return True

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
        """Waits until everything that was queued is on its way or has failed, or the deadline has come."""
        unsent = self.unsent()
        while unsent and self.wait(unsent, deadline):
            unsent = [operation for operation in unsent if not operation.done]

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

    def check_members(self) -> None:
        """Refuses to go on if a member has found the group broken, as far as this rank can see without waiting.

        Raises:
            PhalanxError: The member's reason.
        """
        if self.error is not None:
            raise self.error

    def await_error(self, seconds: float) -> BaseException | None:
        """Why the lane has ended, after waiting so long to be told; None if it has not."""
        deadline = Deadline(seconds)
        waker = Waker.take()
        self.add_sleeper(waker)
        try:
            while True:
                waker.clear()
                if self.error is not None or deadline.expired:
                    return self.error
                sleep(waker, (), deadline)
        finally:
            self.remove_sleeper(waker)
            waker.give_back()

    def whole_account(self, error: PhalanxError) -> PhalanxError:
        """The error of a member that gave up, with who was missing.

        It ended its lane before it asked around, so its last word is brief, and the account comes a little later.
        """
        if not isinstance(error, Timeout) or error.missing:
            return error
        known = self.await_error(ACCOUNT_WAIT)
        return known if isinstance(known, PhalanxError) else error

    def interrupt_with(self, interrupt: Callable[[bool], None]) -> None:
        """Has `interrupt(on_purpose)` called when the lane ends.

        It must end waits that are not the lane's own, without waiting itself.
        """
        with self._guard:
            self._interrupters.append(interrupt)
            ended = self.error is not None
        if ended:
            interrupt(False)

    def interrupt(self, on_purpose: bool) -> None:
        """Ends the waits that are not the lane's own. Takes no locks: also for a forked child."""
        interrupters, self._interrupters = self._interrupters, []
        for interrupt in interrupters:
            interrupt(on_purpose)

    def wake_readers(self) -> None:
        """Makes every thread look again that may wait for the same channels."""
        self.wake_all()

    def add_sleeper(self, waker: Waker) -> None:
        """Wakes that thread whenever something happens to the lane."""
        with self._guard:
            self._sleepers.add(waker)

    def remove_sleeper(self, waker: Waker) -> None:
        """Undoes `add_sleeper`."""
        with self._guard:
            self._sleepers.discard(waker)

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
        self.interrupt(goodbye)
        self.mailbox.fail(error)
        self._end_channels(error, goodbye)
        self.wake_all()

    def channel_error(self, peer: int, ended: Exception, goodbye: bool, last_word: bytes = b"") -> PhalanxError:
        """Why the connection to a member ended, in the words of whoever knows best."""
        rank = self.members[peer]
        if goodbye:
            return ChannelClosed(rank, "it has closed this group")
        if isinstance(ended, ProtocolError):
            return ProtocolError(f"rank {rank} sent what is no message, its channel is closed: {ended}", peer=rank)
        if isinstance(ended, Torn):
            return ChannelClosed(rank, f"{ended}, so this channel is closed")
        known = self.error or self._control.verdict(rank, self.members, VERDICT_WAIT) or self.error
        if isinstance(known, PhalanxError):
            return known
        if last_word:  # the directory is silent, but the member was not
            return self.told(rank, last_word)
        if self._control.has_left(rank):
            return ChannelClosed(rank, "it has left the world")
        if self._control.answers(rank):
            return ChannelClosed(rank, f"it is alive, but this channel has ended: {ended}")
        return PeerLost(rank, str(ended))

    def told(self, rank: int, last_word: bytes) -> PhalanxError:
        """What a member said of why it found the group broken."""
        try:
            return from_cause(parse_cause(last_word), rank)
        except ProtocolError as error:
            return ProtocolError(f"the last word of rank {rank} is no message: {error}", peer=rank)

    def inbound_ended(self, channel: Inbound, ended: Exception, goodbye: bool) -> PhalanxError:
        """An inbound channel is over: receives from its source fail, and so will later ones."""
        error = self.channel_error(channel.src, ended, goodbye, channel.last_word)
        self.mailbox.gone(channel.src, error)
        return error

    # -- moving bytes --------------------------------------------------------------------------------------------------

    def drive(self, operations: Sequence[Operation]) -> list[tuple[int, int]] | None:
        """Moves what can be moved for these operations; returns what to poll for the rest, None if there is more."""
        sources = {operation.src for operation in operations if isinstance(operation, Receive)}
        inbound = list({id(channel): channel for src in sources for channel in self.inbound(src)}.values())
        outbound = {id(op.channel): op.channel for op in operations if isinstance(op, Outgoing)}.values()
        for sender in outbound:
            sender.push()
        if not self._read(inbound, operations):
            if any(channel.read_ahead for channel in inbound):  # perhaps another thread's, and no poll will tell it so
                self.wake_readers()
            return None
        polled = [(c.stream.fd, c.stream.read_events) for c in inbound if not c.ended]
        polled += [(c.stream.fd, c.stream.write_events) for c in outbound if not c.idle]
        return polled

    def _read(self, channels: list[Inbound], operations: Sequence[Operation]) -> bool:
        """Reads in turns, so that nobody's flood keeps the others out; False if it stopped before all was read."""
        if len(channels) > 1:  # nor shall the one that was opened first always be the first
            first = next(self._turns) % len(channels)
            channels = channels[first:] + channels[:first]
        ends = time.monotonic() + SLICE
        while channels:
            more = []
            for channel in channels:
                if channel.pump():
                    if all(operation.done for operation in operations):
                        return False
                    more.append(channel)
            channels = more
            if channels and time.monotonic() >= ends:
                return False
        return True


def _unfinished(operations: Sequence[Operation]) -> list[Operation]:
    """What is still to be waited for: nothing once one has failed."""
    waiting = []
    for operation in operations:
        if operation.error is not None:
            return []
        if not operation.done:
            waiting.append(operation)
    return waiting


def sleep(waker: Waker, polled: Iterable[tuple[int, int]], deadline: Deadline) -> None:
    """Sleeps until one of these descriptors has these events, the waker is set, or the deadline has come."""
    poller = select.poll()
    poller.register(waker.fd, select.POLLIN)
    events: dict[int, int] = {}
    for fd, wanted in polled:
        events[fd] = events.get(fd, 0) | wanted  # one descriptor may be both read and written
    for fd, wanted in events.items():
        if fd >= 0:
            poller.register(fd, wanted)
    poller.poll(deadline.poll_ms())


class _Mover:
    """The lane's own thread, for operations that nobody waits for. Made by who holds the lane's guard."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._jobs: list[tuple[Operation, Deadline, Callable[[], None]]] = []
        self._lock = threading.RLock()
        self._stopping = False
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="phalanx-lane", daemon=True)
        self._thread.start()
        lane._sleepers.add(self._waker)

    def add(self, operation: Operation, deadline: Deadline, expire: Callable[[], None]) -> None:
        with self._lock:
            self._jobs.append((operation, deadline, expire))
        operation.add_waker(self._waker)  # another thread may complete it
        self._waker.set()

    def stop(self) -> None:
        self._stopping = True
        self._waker.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_WAIT)

    def _run(self) -> None:
        while not self._stopping:
            self._turn()

    def _turn(self) -> None:
        # A function of its own: what is done must not stay in its variables, which would keep the group alive.
        self._waker.clear()
        if self._stopping:  # said just before: `clear` has forgotten the word
            return
        with self._lock:
            self._jobs = [job for job in self._jobs if not job[0].done]
            jobs = list(self._jobs)
        now = time.monotonic()
        for operation, deadline, expire in jobs:
            if deadline.at <= now and not operation.done:
                try:
                    expire()
                except Exception as error:  # it must not end the others' service
                    operation.complete(error)
        polled = self._lane.drive([operation for operation, _, _ in jobs if not operation.done])
        if polled is not None:
            sleep(self._waker, polled, min((job[1] for job in jobs), key=lambda d: d.at, default=_NEVER))


_NEVER = Deadline(float("inf"))
