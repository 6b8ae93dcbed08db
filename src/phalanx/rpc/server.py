"""The server's end of a link: handles the frames of one rank that calls this one."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable

from ..errors import ChannelClosed, PhalanxError, ProtocolError
from ..transports.duplex_ring import RingAgreement
from ..transports.lending import Lending
from ..transports.stream import Stream
from ..wire.calls import CallKind, too_long
from ..wire.codec import Limits
from .backpressure import LONG, ThrottledLink
from .event_loop import EventLoop
from .frame_reader import Frame
from .lanes import ServerLanes
from .link import MAX_QUEUED
from .payload import fast_value
from .pipe import Found
from .poller import LinkPoller
from .registry import Registry
from .served_call import ServedCall

__all__ = ["ServerLink"]

logger = logging.getLogger("phalanx.rpc")

_REQUEST, _NOTIFY = CallKind.REQUEST, CallKind.NOTIFY  # the members of an enum are slow to look up


class ServerLink(ThrottledLink[ServedCall]):
    """Serves the calls of one rank.

    Args:
        pid: The process of the caller, if memory can be shared with it.
        max_queue: Calls of all ranks that may wait here before no more are read.
    """

    only_poller_moves = True

    def __init__(
        self,
        stream: Stream,
        peer: int,
        poller: LinkPoller,
        registry: Registry,
        loop: EventLoop,
        max_message: int,
        limits: Limits,
        *,
        spin: float,
        lending: Lending,
        pid: int | None,
        max_queue: int,
        forget: Callable[[ServerLink], None],
    ) -> None:
        super().__init__(stream, peer, poller, registry, loop, max_message, limits, spin=spin, lending=lending)
        self._forget = forget
        self._max_queue = max_queue
        self._tasks = poller.tasks
        self._agreement = None if pid is None else RingAgreement(stream, pid)
        self._agreed = False

    @property
    def is_paused(self) -> bool:
        """True while the caller does not read its answers, or too much waits here: then no more is read."""
        return (
            len(self._tasks) + self.loop.under_way >= self._max_queue
            or self.queued_bytes > MAX_QUEUED
            or self.waiting_bytes > self.max_message
        )

    # -- what comes ----------------------------------------------------------------------------------------------------

    def take_call(self, spin: float, wait: float, waker: int) -> ServedCall | None:
        if self._unsent or ((self.waiting_bytes or self.loop.under_way) and self.is_paused):
            return None
        found = self.pipe.request(spin, wait, waker)
        if self.ended is not None:  # meanwhile, while the pipe was in use here
            self.dispose()
            return None
        if found is None:
            return None
        number, head = found
        if number not in self.served and len(head) <= self.max_message:
            call = self.served[number] = ServedCall(self, head, number, time.monotonic())
            return call
        if number in self.served:
            self._refuse(number)
        else:
            self.end(too_long(len(head), self.max_message))
        return None

    def _refuse(self, number: int) -> None:
        wrong = "a second request with the number" if number else "a request with the number"
        self.end(ProtocolError(f"protocol error: {wrong} {number}"))

    def take_plain(self, found: list[Found]) -> int:
        served, tasks, longest = self.served, self._tasks, self.max_message
        now = time.monotonic()
        taken = 0
        for kind, number, head, payload, size in found:
            if kind != _REQUEST or payload or head is None or size > longest or not number or number in served:
                break
            taken += 1
            served[number] = call = ServedCall(self, head, number, now)
            tasks.append(call)
        return taken

    def handle(self, frame: Frame) -> None:
        kind = frame.kind
        if kind is _REQUEST or kind is _NOTIFY:
            call = ServedCall(self, frame, frame.call if kind is _REQUEST else 0, time.monotonic())
            if kind is _REQUEST:
                if frame.call in self.served or not frame.call:
                    self._refuse(frame.call)
                    return
                self.served[frame.call] = call
            if frame.size > LONG:
                self.count_waiting(frame.size)
            self.poller.add_as_mover(call)
        elif kind is CallKind.CANCEL:
            given_up = self.served.get(frame.call)
            if given_up is not None:
                given_up.cancel()
            self._free(frame.call)  # a `create` that was given up: its caller never learned the number of the object
        elif kind is CallKind.CREDIT:
            reader = self.served.get(frame.call)
            if reader is not None:
                reader.add_credit(self._number_in(frame))
        elif kind is CallKind.FREE:
            # Queued like a call: earlier calls through the handle must still find the object.
            self.poller.add_as_mover(functools.partial(self._free, self._number_in(frame)))
        elif kind is CallKind.RING and not self._agreed:
            self._agree_on_ring(frame.head)
        elif kind is CallKind.GOODBYE:
            self.end(ChannelClosed(self.peer, "it has closed its agent"))
        elif kind is CallKind.LANES and isinstance(self.lanes, ServerLanes):
            self.lanes.handle(frame.call, frame.head)
        else:
            self.end(ProtocolError(f"protocol error: unexpected {kind.name} frame from a caller"))

    @staticmethod
    def _number_in(frame: Frame) -> int:
        value = fast_value(frame.head)
        if type(value) is not int or value < 0:
            raise ProtocolError(f"protocol error: a {frame.kind.name} frame without a number in it")
        return value

    def _agree_on_ring(self, words: bytes) -> None:
        """Handles the caller's offer of a ring, or its word whether it could open ours."""
        agreement = self._agreement
        if agreement is None:
            raise ProtocolError("protocol error: it offers a ring, although it shares no memory with this rank")
        if words == b"\x01":
            if not agreement.complete:
                raise ProtocolError("protocol error: it switches to a ring that was never agreed on")
            self.use(agreement.stream(self.pipe.ahead))
            self._agreed = True
            self.poller.reload_streams()
        elif words:
            if agreement.complete:
                raise ProtocolError("protocol error: it offers a second ring")
            offer = agreement.offer() if agreement.accept(words) else b""
            with contextlib.suppress(PhalanxError):  # it has gone away meanwhile, as the mover will find
                self.send(CallKind.RING, 0, offer)
        else:
            agreement.close()
            self._agreed = True

    def on_end(self, why: PhalanxError) -> None:
        if isinstance(why, ProtocolError):
            logger.warning("closed the connection on which rank %d calls this rank: %s", self.peer, why)
        self._forget(self)
        for call in list(self.served.values()):
            call.cancel()
        registry = self.registry()
        if registry is not None:
            registry.free_all(self)
        self.on_room()
        if self._agreement is not None:
            self._agreement.close()
        if isinstance(self.lanes, ServerLanes):
            self.lanes.close()

    def _free(self, number: int) -> None:
        registry = self.registry()
        if registry is not None:
            registry.free(self, number)
