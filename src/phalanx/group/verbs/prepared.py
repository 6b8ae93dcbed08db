"""Receives that the core has prepared: the thread that waits for one takes its message, as a synchronous receive does.

One that no thread waits for within a moment is posted by the lane's background thread. So is one that lasts, and one
that another receive of the group must not overtake.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...backends.lane import Unposted
from ...deadline import Deadline
from ...frames import hide_frames
from ...transports.mailbox import PendingTransfer
from ..data.arrays import adapt_out
from ..work import NEVER_HELD_LONG, Work
from .lending import LentMessages
from .message_runner import receiving

if TYPE_CHECKING:
    from ..._core import MpiMessages, PreparedReceive

__all__ = ["PreparedMessages", "PreparedReceiveWork", "SentWork"]


class SentWork(Work[None]):
    """A message that was sent at once. Nothing of it changes any more."""

    _operation = "send"
    _done = True
    _lock = NEVER_HELD_LONG
    __init__ = object.__init__


class PreparedReceiveWork(Work[Any]):
    """A receive on the fast path, which is not posted yet.

    Args:
        group: Lives on until the receive is posted, or has ended.
        out: The array that is filled.
        line: Of the lane; has this work until it is posted, or has ended.
    """

    _operation = "recv"
    _lock = NEVER_HELD_LONG
    """Until it is posted: no thread sleeps on it before, and no callback waits for it."""

    def __init__(self, group: PreparedMessages, prepared: PreparedReceive, out: Any, line: deque[Unposted]) -> None:
        # Without the base's, which takes as long as the message.
        self._group: PreparedMessages | None = group
        self._prepared: PreparedReceive | None = prepared
        self._result = out
        self._line = line

    def wait(self, timeout: float | None = None) -> Any:
        group, prepared = self._group, self._prepared
        if group is not None and prepared is not None and timeout is None and not group._backend.forked:
            try:
                if prepared.run():
                    self._end()
                    return self._result
            except BaseException as error:
                group._messages.post_prepared()  # the receive goes on
                hide_frames(error)
                raise
        return super().wait(timeout)

    def add_done_callback(self, callback: Callable[[Work[Any]], object]) -> None:
        self._help(None)
        super().add_done_callback(callback)

    def post(self) -> None:
        """Posts it on the lane, unless its message has come. Called by the lane, with its lock held."""
        group, prepared = self._group, self._prepared
        if group is None or prepared is None:
            return
        if prepared.ended:  # in another thread, which is about to note it
            self._done = True
        elif not self._done:  # else an interrupt has come after it was posted
            self._lock = threading.Lock()
            try:
                group._post_prepared(self, prepared)
            except Exception as error:
                self._finish(error=error)
        prepared.leave()
        self._group = self._prepared = None

    def _end(self) -> None:
        """Its message is in the array."""
        self._done = True
        self._group = self._prepared = None
        line = self._line
        if line and line[0] is self:
            line.popleft()
        else:  # posting it again does nothing
            with contextlib.suppress(ValueError):
                line.remove(self)

    def _on_told(self) -> None:
        """A message that failed breaks no group."""

    def _help(self, timeout: float | None) -> None:
        group = self._group
        if group is not None:
            if group._backend.forked:
                group._backend.check_usable()  # raises: the receive is the parent's
            group._messages.post_prepared()


class PreparedMessages(LentMessages):
    """Prepares receives, and goes on with those that the core cannot finish."""

    _sent = staticmethod(SentWork)
    """The work of a message that the core has sent at once."""

    def _prepared(self, prepared: PreparedReceive, out: Any) -> PreparedReceiveWork:
        """The work of a receive that the core has prepared."""
        line = self._messages.prepared
        assert line is not None
        work = PreparedReceiveWork(self, prepared, out, line)
        try:
            line.append(work)
            return work
        except BaseException:  # Ctrl-C: no caller will ever wait for it
            if work in line:
                line.remove(work)
            prepared.leave()
            raise

    def _exchange_at_once(
        self, x: Any, dst: int, out: Any, src: int | None, tag: int, timeout: float | None
    ) -> tuple[PendingTransfer | bool, bool]:
        """Sends a short array by the fast path, and takes the one that comes for it.

        Returns:
            Whether it is sent, or what goes on sending it; and whether the other has come.
        """
        plain = type(x) is np.ndarray and type(out) is np.ndarray and self._messages.prepared is not None
        if not plain or self._fast_messages is None or np.may_share_memory(x, out):
            return False, False
        fast = cast("MpiMessages", self._fast_messages)
        prepared = fast.prepare(out, src, tag, timeout)
        if prepared is None:
            return False, False
        try:
            sent = fast.send_at_once(x, dst, tag, timeout)
            if isinstance(sent, bool):
                return sent, sent and prepared.run()
            return sent[0] or False, False
        finally:
            prepared.leave()

    def _post_prepared(self, work: PreparedReceiveWork, prepared: PreparedReceive) -> None:
        src, tag = prepared.src, prepared.tag
        sink = self._sink_for(adapt_out(work._result))
        deadline = Deadline(prepared.seconds)
        deadline.at = prepared.began + prepared.seconds
        entry = self._journal.begin(receiving("recv", src, tag), src, posted=True)
        entry.caller, entry.began = prepared.site, prepared.began
        try:
            receive = self._messages.post(src, tag, sink)
            self._in_background(
                entry, receive, deadline, [src], lambda: self._received(entry, receive, sink, src), work=work
            )
        except BaseException:
            self._forget(sink)
            entry.end(failed=True)
            raise
