"""A lane: an ordered stream of tagged messages among the members of one group.

The thread that waits for an operation moves the bytes for it. If no thread waits, the lane's background thread does; it
is started when it is first needed. Ranks here are those of the group, from 0 to `size - 1`.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..background_thread import BackgroundThread
from ..deadline import Deadline
from ..errors import ChannelClosed, PeerLost, PhalanxError, ProtocolError, Timeout
from ..exception_text import describe
from ..rendezvous.error_codec import decode_error
from ..transports.channel import Inbound, Outbound, OutgoingFrame, Torn
from ..transports.mailbox import Envelope, Mailbox, PendingTransfer, Receive, Sink
from ..transports.stream import Buffer, Stream
from ..transports.waker import Waker
from ..wire.control import parse_error
from ..wire.frames import FrameKind
from .lane_thread import LaneThread
from .polling import sleep

if TYPE_CHECKING:
    from .._core import (
        Crew,
        FastMessages,
        MpiMessages,
        Recorder,
        StreamMessages,
        WaitPolicy,
    )
    from .control_plane import ControlPlane

__all__ = ["Lane", "Unposted", "payload_size"]

SLICE = 0.05
"""Seconds that bytes are moved without a look at the deadline."""
EAGER = 100e-6
"""Seconds that a waiting thread polls before it sleeps."""
VERDICT_WAIT = 0.25
"""Seconds to wait for the directory after a connection broke: it may know the traceback of the rank at fault."""
ACCOUNT_WAIT = 1.0
"""Seconds to wait for the names of the ranks that were missing at another rank's timeout."""
ANSWER_WAIT = 1.0
"""Seconds that closing waits for connections that answers need. Most take milliseconds; a stopped rank accepts none."""
_NEVER = Deadline(float("inf"))

logger = logging.getLogger("phalanx.backends")


class Unposted(Protocol):
    """A message that the fast path has prepared."""

    def post(self) -> None:
        """Has its lane go on with it, unless it has ended."""


class Lane(ABC):
    """Sends and receives messages among the members of a group.

    Args:
        rank: This rank in the group.
        members: The world rank of each member.
        control: Asked why a member is lost.
    """

    def __init__(self, rank: int, members: Sequence[int], control: ControlPlane) -> None:
        self.rank = rank
        self.members = tuple(members)
        self.size = len(self.members)
        self._use_mailbox(Mailbox(), frozenset(range(self.size)) - {rank})
        self._control = control
        self._guard = threading.RLock()
        self._sleepers: set[Waker] = set()
        self._turns = itertools.count()
        self._thread: LaneThread | None = None
        self.error: BaseException | None = None
        self._says_goodbye = False
        """Whether `error` is that this rank has closed the lane on purpose."""
        self._interrupters: list[Callable[[bool], None]] = []
        self._connecting: set[PendingTransfer] = set()
        """Of answers that wait for a connection."""

    direct = False
    """True if `outbound` and `inbound` are channels of this lane alone, so that frames can be moved directly."""

    oversubscribed = True
    """True if ranks may have to share a core: then it is better to sleep at once than to look again."""

    spare_cores = 0
    """Cores of this host for each of its ranks, besides the one that the rank runs on."""

    crew: Crew | None = None
    """The threads that may use them."""

    buffered = 16 << 10
    """Bytes up to which a message is sent even if no receiver waits for it."""

    # -- what a transport provides -------------------------------------------------------------------------------------

    @abstractmethod
    def start_send(
        self, dst: int, kind: FrameKind, tag: int, description: bytes, payload: Sequence[Buffer], deadline: Deadline
    ) -> PendingTransfer:
        """Queues a message.

        The memory of `payload` must stay until it is done. May take until `deadline` to connect.
        """

    def outbound(self, dst: int, deadline: Deadline) -> Outbound:
        """The channel to `dst` of a direct lane; may take until `deadline` to connect.

        Raises:
            PhalanxError: There is none.
        """
        raise PhalanxError(f"this {type(self).__name__} has no channel of its own to rank {self.members[dst]}")

    @abstractmethod
    def inbound(self, src: int | None) -> Iterable[Inbound]:
        """The channels on which messages from `src` may come; with None, from any member."""

    @abstractmethod
    def _end_channels(self, error: BaseException, goodbye: bool) -> None:
        """Closes all channels of this lane."""

    def unsent(self) -> list[PendingTransfer]:
        """Messages that are queued and not yet sent."""
        return []

    wait_policy: WaitPolicy | None = None
    """How the core waits for the other members, where it moves the frames of this lane."""

    def plain_channels(
        self, writes: Sequence[int], reads: Sequence[int]
    ) -> tuple[list[Outbound], list[Inbound]] | None:
        """The channels to and from these members, which the core may use by their descriptors.

        None unless all are there, and are plain TCP as long as they last.
        """
        return None

    def fast_messages(self, recorder: Recorder, timeout: float) -> FastMessages | MpiMessages | StreamMessages | None:
        """The fast path of simple messages, where the lane has one. It notes them in `recorder`."""
        return None

    prepared: deque[Unposted] | None = None
    """Messages that the fast path has prepared and that the lane does not know; see `UnpostedWork`."""

    def post_prepared(self) -> None:
        """Goes on with them, in the order of the calls."""
        return  # most lanes have none

    def take_back_prepared(self, prepared: Any) -> None:
        """Ends one of them whose caller was interrupted."""
        return

    def mailbox_source(self, src: int) -> int:
        """The number by which the mailbox knows a member."""
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

    def wait(self, operations: Sequence[PendingTransfer], deadline: Deadline) -> bool:
        """Moves bytes until all are done or one has failed; False if the deadline came first."""
        waiting = _unfinished(operations)
        eager = min(time.monotonic() + EAGER, deadline.at)
        while waiting and time.monotonic() < eager:
            self.drive(waiting)
            waiting = _unfinished(waiting)
            if waiting and self.oversubscribed:
                os.sched_yield()  # the sender may need this core
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

    def withdraw(self, operation: PendingTransfer) -> bool:
        """Takes back an operation whose time is over; False if it was done after all.

        A message of which a part is on the wire cannot be taken back: its channel ends.
        """
        if isinstance(operation, Receive):
            return self.mailbox.withdraw(operation)
        if operation.done or operation.withdrawn:
            return False
        if isinstance(operation, OutgoingFrame):
            cut = ChannelClosed(self.peer_of(operation.channel), "an earlier message to it was cut short")
            return operation.channel.withdraw(operation, cut)
        operation.withdrawn = True
        return True

    def move_in_background(self, operation: PendingTransfer, deadline: Deadline, expire: Callable[[], None]) -> None:
        """Has the background thread move the bytes of an operation while its caller does not wait.

        `expire` is called if the deadline passes first.
        """
        if operation.done:
            return
        with self._guard:
            if self._thread is None:
                self._thread = LaneThread(self.drive, self._thread_failed)
                self._sleepers.add(self._thread.waker)
        self._thread.add(operation, deadline, expire)

    def hurry(self) -> None:
        """Has the background thread begin with what it is to move: nobody waits for it."""
        if self._thread is not None:
            self._thread.hurry()

    def _thread_failed(self, error: Exception) -> None:
        """Ends the lane: nobody would move what it still has to move, and the others would wait for that."""
        logger.critical("the thread that moves messages has failed", exc_info=error)
        self.fail(PhalanxError(f"the thread that moves this group's messages has failed: {describe(error)}"))

    def _use_mailbox(self, mailbox: Mailbox, sources: frozenset[int]) -> None:
        itself = weakref.ref(self)  # the mailbox must not hold the lane, which holds it

        def take_off_the_wire(rest: Receive) -> None:
            lane = itself()
            if lane is not None:
                lane.move_in_background(rest, _NEVER, lambda: None)

        self.mailbox = mailbox
        mailbox.sources = sources
        mailbox.on_refusal = take_off_the_wire

    def is_open_to(self, dst: int) -> bool:
        """True if a message to that member needs no connection first."""
        return True

    def answer(self, dst: int, kind: FrameKind, tag: int, deadline: Deadline) -> None:
        """Sends a message without contents. Never waits: a member that is stopped accepts no connection."""

        def send() -> None:
            outgoing = self.start_send(dst, kind, tag, b"", [], deadline)
            self.move_in_background(outgoing, deadline, lambda: None)

        if self.is_open_to(dst):
            send()
            return
        connecting = PendingTransfer()
        connecting.on_done(lambda: self._connecting.discard(connecting))
        self._connecting.add(connecting)

        def connect() -> None:
            try:
                send()
            finally:
                connecting.complete()

        BackgroundThread(connect, "phalanx-answer").start()

    def flush(self, deadline: Deadline) -> None:
        """Waits until every queued message is sent or has failed, or the deadline has come."""
        self.wait(list(self._connecting), deadline.sooner(ANSWER_WAIT))
        unsent = self.unsent()
        while unsent and self.wait(unsent, deadline):
            unsent = [operation for operation in unsent if not operation.done]

    # -- ends ----------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Ends every operation, now and later, with `error`. From any thread; never waits."""
        self._end(error, goodbye=False)

    def close(self) -> None:
        """Tells the members that this rank has closed the lane, and releases everything."""
        self._end(ChannelClosed(self.members[self.rank], "this group was closed on this rank"), goodbye=True)
        if self._thread is not None:
            self._thread.stop()

    def left(self, src: int) -> None:
        """Handles that a member has closed its world. Its channel still delivers; without one, receives fail."""
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
        """Waits for the lane to end, up to `seconds`, and returns its error; None if it has not ended."""
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
        """A member's `Timeout`, completed with the ranks that were missing; any other error unchanged.

        The member ends its lane before it asks which ranks are missing, so its first error does not name them. The
        complete one follows through the control plane.
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
        """Ends the waits that are not the lane's own. Takes no locks, so that a forked child may call it."""
        for interrupt in tuple(self._interrupters):
            interrupt(on_purpose)
        self._interrupters.clear()

    def wake_readers(self) -> None:
        """Wakes every thread that may wait for the same channels."""
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
        """Wakes every thread that waits on this lane."""
        with self._guard:
            sleepers = list(self._sleepers)
        for waker in sleepers:
            waker.set()

    def _end(self, error: BaseException, *, goodbye: bool) -> None:
        with self._guard:
            if self.error is None:
                self.error, self._says_goodbye = error, goodbye
            error, goodbye = self.error, self._says_goodbye  # also if Ctrl-C cut it short, and it is closed once more
        self.interrupt(goodbye)
        self.mailbox.fail(error)
        self._end_channels(error, goodbye)
        self.wake_all()

    def channel_error(self, peer: int, ended: Exception, goodbye: bool, last_word: bytes = b"") -> PhalanxError:
        """The error for a connection to a member that ended: the member's own reason if it is known."""
        rank = self.members[peer]
        if goodbye:
            return ChannelClosed(rank, "it has closed this group")
        if isinstance(ended, ProtocolError):
            return ProtocolError(f"rank {rank} sent a malformed message; closing the channel to it: {ended}", peer=rank)
        if isinstance(ended, Torn):
            return ChannelClosed(rank, f"{ended}, so this channel is closed")
        known = self.error or self._control.verdict(rank, self.members, VERDICT_WAIT) or self.error
        if isinstance(known, PhalanxError):
            return known
        if last_word:  # the directory said nothing, but the member did
            return self.told(rank, last_word)
        if self._control.has_left(rank):
            return ChannelClosed(rank, "it has left the world")
        if self._control.answers(rank):
            return ChannelClosed(rank, f"it is alive, but this channel has ended: {ended}")
        return PeerLost(rank, str(ended))

    def told(self, rank: int, last_word: bytes) -> PhalanxError:
        """The error that a member gave as its reason for breaking the group."""
        try:
            return decode_error(parse_error(last_word), rank)
        except ProtocolError as error:
            return ProtocolError(f"rank {rank} ended its channel with a malformed reason: {error}", peer=rank)

    def inbound_ended(self, channel: Inbound, ended: Exception, goodbye: bool) -> PhalanxError:
        """Fails all receives from the source of an inbound channel that has ended, now and later."""
        error = self.channel_error(channel.src, ended, goodbye, channel.last_word)
        self.mailbox.gone(channel.src, error)
        return error

    # -- moving bytes --------------------------------------------------------------------------------------------------

    def drive(self, operations: Sequence[PendingTransfer]) -> list[tuple[int, int]] | None:
        """Moves bytes for these operations without waiting.

        Returns:
            The descriptors and events to poll for the rest; None if more can be moved at once.
        """
        sources = {operation.src for operation in operations if isinstance(operation, Receive)}
        inbound = list({id(channel): channel for src in sources for channel in self.inbound(src)}.values())
        outbound = {id(op.channel): op.channel for op in operations if isinstance(op, OutgoingFrame)}.values()
        paused = [sender.push() for sender in outbound]
        if not self._read(inbound, operations):
            # Bytes that were read ahead may be for another thread, whose poll does not see them.
            if any(channel.read_ahead for channel in inbound):
                self.wake_readers()
            return None
        if any(paused):
            return None
        polled = [(c.stream.fd, c.stream.read_events) for c in inbound if not c.ended]
        polled += [(c.stream.fd, c.stream.write_events) for c in outbound if not c.idle]
        return polled

    def _read(self, channels: list[Inbound], operations: Sequence[PendingTransfer]) -> bool:
        """Reads from the channels in turns, so that none is starved by another; False if it stopped before the end."""
        if len(channels) > 1:  # begin with another one each time
            first = next(self._turns) % len(channels)
            channels = channels[first:] + channels[:first]
        ends = time.monotonic() + SLICE
        while channels:
            more = []
            for channel in channels:
                if channel.pump(operations):
                    if all(operation.done for operation in operations):
                        return False
                    more.append(channel)
            channels = more
            if channels and time.monotonic() >= ends:
                return False
        return True


def payload_size(payload: Sequence[Buffer]) -> int:
    """Bytes in all parts of a payload."""
    return sum(len(part) for part in payload)


def _unfinished(operations: Sequence[PendingTransfer]) -> list[PendingTransfer]:
    """The operations that are not done; none if one has failed, because then the wait is over."""
    waiting = []
    for operation in operations:
        if operation.error is not None:
            return []
        if not operation.done:
            waiting.append(operation)
    return waiting
