"""A call that was made and has no answer yet, and the reader of the items that it may yield."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ..deadline import Deadline
from .frame_reader import Frame
from .waiter import Waiter

__all__ = ["ItemReader", "PendingCall"]


class ItemReader(ABC):
    """The reader of a stream, as its link knows it. The link's mover calls all of these.

    They are private because a user holds the reader: it is a `RemoteStream`.
    """

    @abstractmethod
    def _put(self, frame: Frame) -> bool:
        """Adds an item; False if there are more than were asked for."""

    @abstractmethod
    def _end(self, frame: Frame) -> None:
        """Ends the stream with its last frame: a result or an error."""

    @abstractmethod
    def _fail(self, error: BaseException) -> None:
        """Ends the stream, because the connection has."""


class PendingCall(Waiter):
    """A call that has no answer yet."""

    # Defaults of the class, not set for each call: a call is made more often than most of them change.
    number = 0
    head: bytes | None = None
    """The answer, if it is a result without a payload: most are, and need no `Frame`."""
    frame: Frame | None = None
    """Any other answer."""
    error: BaseException | None = None
    unattended = False
    """Whether its link counts it among those for which no thread need be waiting."""
    on_finish: Callable[[], None] | None = None
    """Called once the call is finished. Whoever sets it looks at `done` after that: it may have been too late."""
    stream: weakref.ref[ItemReader] | None = None
    """The reader of the items, if it still exists."""
    opened: ItemReader | None = None
    """Keeps the reader alive until the caller has it."""
    future: weakref.ref[Any] | None = None
    """The future that gets the answer, if there is one. If it is gone, nobody will ever take the reader of a stream."""

    def __init__(self, name: str, deadline: Deadline, returns: Any) -> None:
        self.name = name
        self.deadline = deadline
        self.returns = returns

    def finish(self, error: BaseException | None = None) -> None:
        """Finishes the call: its answer is in `head` or `frame`, or `error` says why there is none."""
        self.error = error
        self.done = True
        self.tell()

    def tell(self) -> None:
        """Tells those who want to know that the call is finished."""
        on_finish, self.on_finish = self.on_finish, None
        if on_finish is not None:
            on_finish()
        if self._sleep is not None:
            self.wake()
