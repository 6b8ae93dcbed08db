"""The reader of a generator that runs on another rank."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from ..deadline import Deadline
from ..errors import copy_for_raise, of_call
from ..frames import hide_frames
from ..system_limits import raise_limit
from ..wire.calls import CallKind
from .caller import CallerLink
from .frame_reader import Frame
from .link import WINDOW
from .pending_call import ItemReader, PendingCall
from .waiter import Waiter

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RemoteStream"]


def _close_stream(link: weakref.ref[CallerLink], number: int) -> None:
    known = link()
    if known is not None:
        known.cancel_stream(number)


class RemoteStream(ItemReader):
    """The items that a generator on another rank yields, as they come.

    An iterator, also an asynchronous one. The generator runs ahead of its reader by a few items at most. Each item has
    the call's timeout for itself. `close` (or leaving a `with` block, or dropping the stream) ends the generator.
    """

    def __init__(self, link: CallerLink, pending: PendingCall) -> None:
        self._link = link
        self._number = pending.number
        self._name = pending.name
        self._seconds = pending.deadline.seconds
        self._items: deque[Frame] = deque()
        self._taken = 0
        self._last: Frame | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._waiter: Waiter | None = None
        self._future: concurrent.futures.Future[None] | None = None
        # Weakly: the link may hold this stream as an answer that was never taken, and would keep itself alive.
        dropped = functools.partial(_close_stream, weakref.ref(link), pending.number)
        weakref.finalize(self, link.poller.run_soon, dropped).atexit = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            deadline = Deadline(self._seconds)
            while not self._ready():
                waiter = self._waiter = PendingCall(self._name, deadline, None)
                if self._ready():
                    break
                with self._link.poller.blocking():
                    if not self._link.wait(waiter, deadline):
                        self.close()
                        raise self._link.timed_out(waiter)
            return self._next(StopIteration)
        except BaseException as error:
            hide_frames(error)
            raise_limit(error)
            raise

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            while not self._ready():
                self._future = concurrent.futures.Future()
                self._link.begin_unattended()
                if self._ready():
                    break
                try:
                    await asyncio.wait_for(asyncio.wrap_future(self._future), self._seconds)
                except asyncio.TimeoutError:
                    self.close()
                    raise self._link.timed_out(PendingCall(self._name, Deadline(self._seconds), None)) from None
            return self._next(StopAsyncIteration)
        except BaseException as error:
            hide_frames(error)
            raise

    def close(self) -> None:
        """Ends the generator. Wakes another thread that waits for an item."""
        self._closed = True
        self._link.cancel_stream(self._number)
        self._wake_reader()
        self._link.wake_mover()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ready(self) -> bool:
        return bool(self._items) or self._last is not None or self._error is not None or self._closed

    def _next(self, stop: type[Exception]) -> Any:
        if self._closed:
            raise stop
        if self._items:
            frame = self._items.popleft()
            self._taken += 1
            if self._taken >= WINDOW // 2 and self._last is None and self._error is None:
                self._link.grant(self._number, self._taken)
                self._taken = 0
            return frame.value(self._link.limits)
        if self._error is not None:
            raise of_call(copy_for_raise(self._error, self._name, self._link.rank))
        last = self._last
        assert last is not None
        if last.kind is CallKind.ERROR:
            raise self._link.error_of(last, PendingCall(self._name, Deadline(self._seconds), None))
        raise stop

    # -- called by the link's mover ------------------------------------------------------------------------------------

    def _put(self, frame: Frame) -> bool:
        """Adds an item; False if there are more than were asked for."""
        if len(self._items) >= 2 * WINDOW:  # a taken item is granted again before this side accounts for it
            return False
        self._items.append(frame)
        self._wake_reader()
        return True

    def _end(self, frame: Frame) -> None:
        """Ends the stream with its last frame: a result or an error."""
        self._last = frame
        self._wake_reader()

    def _fail(self, error: BaseException) -> None:
        """Ends the stream, because the connection has."""
        self._error = error
        self._wake_reader()

    def _wake_reader(self) -> None:
        waiter, future = self._waiter, self._future
        if waiter is not None:
            waiter.done = True
            waiter.wake()
        if future is not None:
            self._future = None
            self._link.end_unattended()
            if not future.done():
                future.set_result(None)
