"""The bytes of a connection of remote calls as frames.

Most frames are short, and the pipe hands over their heads as they are. A long head and a payload are read straight into
the memory that they belong to, once the head is known to be valid, and as far as they have come: the next call goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidMessage, ProtocolError
from ..wire.calls import CARRIERS, CallKind, check_lengths
from ..wire.codec import Limits
from .lanes import LANES_FROM, CallerLanes, ServerLanes
from .payload import CallFields, Planned, plan_call, plan_value, read_call, read_value
from .pipe import Found, Pipe

__all__ = ["Frame", "FrameReader", "read_request"]

BATCH = 64
"""Frames that are read from one link before other links have their turn."""
SCRATCH = 256 << 10


class Frame:
    """A frame that was received."""

    plan: Planned | None = None
    target: memoryview | None = None
    error: InvalidMessage | None = None
    """Why the head is not valid, if it is not; then the payload was dropped."""

    def __init__(self, kind: CallKind, call: int, head: bytes, size: int) -> None:
        self.kind = kind
        self.call = call
        self.head = head
        self.size = size
        """Bytes of the head and the payload."""

    def value(self, limits: Limits) -> Any:
        """The value in a result or an item.

        Raises:
            InvalidMessage: It is malformed.
        """
        if self.error is not None:
            raise self.error
        if self.plan is not None:
            return self.plan.build(self.target)
        return read_value(self.head, limits)


def read_request(request: Frame | bytes, limits: Limits) -> CallFields:
    """Name, target, seconds, arguments and keywords of a call, from its frame or its head.

    Raises:
        InvalidMessage: It is malformed.
    """
    if isinstance(request, bytes):
        return read_call(request, limits)
    if request.error is not None:
        raise request.error
    if request.plan is not None:
        return request.plan.build(request.target)  # type: ignore[no-any-return]
    return read_call(request.head, limits)


class FrameReader(ABC):
    """Reads the frames of a link. Only the mover calls it.

    Args:
        pipe: What the bytes come through.
        max_message: The longest head and payload together.
    """

    def __init__(self, pipe: Pipe, max_message: int, limits: Limits) -> None:
        self.pipe = pipe
        self.max_message = max_message
        self.limits = limits
        self.lanes: CallerLanes | ServerLanes | None = None
        """The agreement on further connections for long payloads, where there can be some."""
        self._frame: Frame | None = None
        self._target: memoryview | None = None
        """Where the rest of `_frame` goes."""
        self._left = 0
        """How much of it is to come; without `_target` it is dropped."""
        self._long_head: npt.NDArray[np.uint8] | None = None
        """The head that is on its way to `_target`, if it is that, and not a payload."""
        self._taken = 0
        """The pipe's count of frames and bytes, as far as they are accounted for here."""
        self._plain = 0
        """Frames that `take_plain` has handled in the present move."""
        self._unhandled = False
        """Whether frames were taken from the pipe and are not handled yet."""

    @property
    @abstractmethod
    def writes(self) -> bool:
        """Whether something waits to be sent."""

    @abstractmethod
    def take_plain(self, found: list[Found]) -> int:
        """Handles the frames that are plain, up to the first that is not; returns their number.

        Most frames are: what one of them needs is done here, without a `Frame`. Called by the mover; must not block.
        """

    def read_frames(self, spin: float, wait: float, waker: int) -> list[Frame]:
        """Reads the frames that are there, up to a bound. If there are none, spins and then sleeps.

        Called by the mover.

        Args:
            spin: Seconds to look for bytes again and again.
            wait: Seconds to sleep after that.
            waker: A descriptor that ends the sleep.

        Raises:
            StreamEnded: The connection has ended.
            ProtocolError: The bytes are not a frame.
        """
        frames: list[Frame] = []
        self._plain = 0
        if self._frame is not None:
            if self._fill(self._frame, wait, waker):
                self._unhandled = True
                frames.append(self._frame)
                self._frame = None
            elif wait > 0:
                self.pipe.sleep(wait, waker, self.writes)
                return frames
            else:
                return frames
        if frames:
            spin = wait = 0.0
        found = self.pipe.pull(spin, BATCH, wait, waker, self.writes)
        self._taken += len(found)
        if not found:
            if not frames:
                self.pipe.check()
            return frames
        self._unhandled = True
        self._plain = 0 if frames else self.take_plain(found)
        for kind_value, call, head, payload, size in found[self._plain :] if self._plain else found:
            kind = CARRIERS.get(kind_value)
            if kind is None or size + payload > self.max_message:
                kind = check_lengths(kind_value, size, payload, self.max_message)
            frame = Frame(kind, call, head, size + payload)  # type: ignore[arg-type]  # a long head comes later
            if not payload and head is not None:
                frames.append(frame)
                continue
            self._begin(frame, size, payload)
            if self._fill(frame, wait, waker):
                frames.append(frame)
            else:
                self._frame = frame
        return frames

    def _begin(self, frame: Frame, head_size: int, payload: int) -> None:
        """Prepares to receive a frame that has a payload or a long head."""
        if frame.head is not None:
            self._plan(frame, payload)
            return
        if head_size > self.limits.max_head:
            raise ProtocolError(f"protocol error: a head of {head_size} bytes (the limit is {self.limits.max_head})")
        self._long_head = np.empty(head_size, np.uint8)
        self._target = self._long_head.data
        self._left = head_size

    def _plan(self, frame: Frame, payload: int) -> None:
        """Checks the head and allocates memory for the payload. An invalid message is received and dropped."""
        plan = plan_call if frame.kind in (CallKind.REQUEST, CallKind.NOTIFY) else plan_value
        self._left = payload
        self._target = None
        if payload >= LANES_FROM and self.lanes is not None:
            self.lanes.want()
        try:
            made = frame.plan = plan(frame.head, payload, self.limits)
            frame.target = self._target = made.allocate()
        except InvalidMessage as error:
            frame.error = error
        except MemoryError:
            frame.error = InvalidMessage(f"not enough memory for a message of {payload} bytes")

    def _fill(self, frame: Frame, wait: float, waker: int) -> bool:
        """Reads more of a frame; True once it is complete.

        Args:
            wait, waker: As for `read_frames`. While something waits to be sent, it does not sleep here.
        """
        wait = 0.0 if self.writes else wait
        most = self.pipe.slice
        enough = self._left - most
        while self._left:
            if self._left < enough:
                return False
            room = self._target
            if room is None:  # it is dropped
                room = memoryview(bytearray(min(self._left, SCRATCH)))
            count = self.pipe.fill(room[:most], wait, waker)
            self._taken += count
            if not count:
                self.pipe.check()
                return False
            self._left -= count
            if self._target is not None:
                self._target = room[count:]
        self._target = None
        if self._long_head is None:
            return True
        frame.head, self._long_head = self._long_head.tobytes(), None
        payload = frame.size - len(frame.head)
        if not payload:
            return True
        self._plan(frame, payload)
        return self._fill(frame, wait, waker)
