"""The handles of messages: to another rank, and to oneself."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed.distributed_c10d as c10d

from ..background_thread import BackgroundThread
from ..errors import PhalanxError, UsageError
from ..group.tracking import call_site
from ..transports.ring_channel import last_handed_over
from .errors import translated
from .line import Line
from .message_rest import rest_of
from .opened_late import OpenedLate
from .visible import unwatched
from .work import UnfinishedWork

if TYPE_CHECKING:
    from ..group import Work as GroupWork

__all__ = ["MessageWork", "PreparedMessageWork", "SelfMessageWork"]


class MessageWork(UnfinishedWork):
    """A message that waits for its turn, or is under way. A thread that waits for it may begin it.

    Args:
        lines: Its own line, and the one for the other direction.
        begin: Moves the message if that can be done soon, else returns the work that does.
        finish: Called when it has arrived; says who sent it, where that matters.
        source: Who sends it, where that is known.
    """

    __slots__ = ("_begin", "_finish", "_line", "_other_line", "_site", "_source", "_work", "begun")

    def __init__(
        self,
        lines: tuple[Line, Line],
        begin: Callable[[], GroupWork[Any] | None],
        tensors: Any,
        finish: Callable[[Any], int] | None = None,
        source: int = -1,
    ) -> None:
        super().__init__(tensors)
        self._line, self._other_line = lines
        self._begin: Callable[[], GroupWork[Any] | None] | None = begin
        self._finish = finish
        self._work: GroupWork[Any] | None = None
        self._source = source
        self._site = call_site.find()
        self.begun = False

    def wait(self, timeout: Any = None) -> bool:
        """As the base. An interrupt takes back what `dist.recv` waits for, as Phalanx's own `recv` does: nobody has its
        handle, and it must not take the message that the next receive is for. What the program has a handle of goes on,
        and so does a `dist.send`: a part of its message may be on its way.
        """
        try:
            return super().wait(timeout)
        except BaseException as error:
            if error is not self._error and not self._ended and _is_called_by_recv():
                self._take_back(UsageError(f"the receive was taken back after {type(error).__name__}"))
            raise

    def _take_back(self, reason: UsageError) -> None:
        if self._work is None and self._line.leave(self):
            self._end(reason)
        elif self._work is not None and (withdraw := self._work._withdraw) is not None:
            withdraw(reason)

    def source_rank(self) -> int:
        if self._source < 0:
            return super().source_rank()
        return self._source

    def is_completed(self) -> bool:
        if not self.begun:
            self._line.hurry()
        return self._ended

    def get_future(self) -> Any:
        if not self.begun:
            self._line.hurry()
        return super().get_future()

    def run(self) -> None:
        """Begins it. Called once, in its turn; takes some milliseconds at most, whatever the other rank does."""
        begin = self._begin
        assert begin is not None
        try:
            call_site.lend(self._site)
            try:
                self._work = unwatched(begin)
            finally:
                call_site.lend(None)
            if self._work is None:
                self._arrived(None)
            else:
                self._work.add_done_callback(self._heard)
        except BaseException as failure:
            if self._work is None and _is_of_a_signal(failure):
                self._line.hurry()
                raise  # nothing has happened: it goes on without the wait that was interrupted
            self._end(translated(failure))
        self._begin = None
        self.begun = True

    def _heard(self, work: GroupWork[Any]) -> None:
        try:
            self._arrived(work.result())
        except BaseException as failure:
            self._end(translated(failure))
        if self.has_callbacks:  # this thread moves the messages of others, too: it must not wait for one
            BackgroundThread(self.call_back, "phalanx-torch-callback").start()

    def _arrived(self, result: Any) -> None:
        if self._finish is not None:
            self._source = unwatched(self._finish, result)
        self._end(None)

    def _await(self, seconds: float | None) -> None:
        self._other_line.hurry()  # the other rank may wait for what this one sends, or has no room to send more
        if seconds is None:
            self._line.drive(self)
        else:
            self._line.hurry()
            if not self._wait_for_end(seconds):
                raise self._too_long(seconds)
        if self._work is not None and not self._ended:
            with contextlib.suppress(PhalanxError):  # the same is heard below, in torch's words
                self._work.wait()
        self._wait_for_end(None)  # another thread may be about to say so


class PreparedMessageWork(OpenedLate, MessageWork):
    """A message that the core has prepared. As `MessageWork`, and quicker: most are short, and waited for soon."""

    __slots__ = ("_call",)

    @property
    def begun(self) -> bool:  # type: ignore[override]
        """True once the message was begun."""
        begun: bool = self._call.begun
        return begun

    def source_rank(self) -> int:
        self._open()
        return super().source_rank()

    def go_on(self, answer: Any) -> None:
        """Goes on with what the core has begun, or has not been able to begin, and keeps its error.

        Args:
            answer: What `FastMessages` says of it.
        """
        try:
            self._open()
            self._work = rest_of(self._call, answer)
            self._work.add_done_callback(self._heard)
        except BaseException as failure:
            if _is_of_a_signal(failure) and not (self._call.is_open and self._work is not None):
                raise  # the core puts it in line again
            self._end(translated(failure))

    def after(self, error: BaseException) -> Any:
        """Returns what to go on with after an error that the core has met; None if the message has failed by it."""
        if not _is_of_a_signal(error):
            return None
        operation = last_handed_over()
        return False if operation is None else (operation,)

    def _set_up(self, tensors: Any) -> None:
        super()._set_up(tensors)
        self._line, self._other_line = self._call.runner, self._call.other_runner
        self._finish = None
        self._work = None
        self._source = -1 if self._call.sends else self._call.peer


def _is_of_a_signal(error: BaseException) -> bool:
    """Whether the handler of a signal may have raised it: they run in the main thread alone."""
    return not isinstance(error, PhalanxError) and threading.current_thread() is threading.main_thread()


def _is_called_by_recv() -> bool:
    """Whether the function that has called this package is `dist.recv`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__package__") == __package__:
        frame = frame.f_back
    return frame is not None and frame.f_code is getattr(inspect.unwrap(c10d.recv), "__code__", None)


class SelfMessageWork(UnfinishedWork):
    """A receive from oneself."""

    __slots__ = ("_rank",)

    def __init__(self, tensor: Any, rank: int) -> None:
        super().__init__([tensor])
        self._rank = rank

    def source_rank(self) -> int:
        return self._rank

    def arrive(self, values: Any) -> None:
        """The message was sent."""
        error: BaseException | None = None
        try:
            tensor = self._tensors[0].detach()
            tensor.copy_(values.reshape(tensor.shape))
        except Exception as failure:
            error = failure
        self._end(error)
        self.call_back()

    def _await(self, seconds: float | None) -> None:
        if not self._wait_for_end(seconds):
            raise self._too_long(seconds or 0.0)
