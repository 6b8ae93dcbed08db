"""The ways in which a message of an array begins: by the core's fast path, lent, or the general way."""

from __future__ import annotations

from typing import Any

from ...deadline import Deadline
from ...errors import ProtocolError
from ...transports.mailbox import PendingTransfer
from ...transports.ring_channel import all_handed_over, last_handed_over
from ...wire.frames import FrameKind
from ..data.arrays import Adapted, Description, adapt, adapt_out, empty, make, to_host
from ..work import Work
from .message_runner import receiving, sending
from .prepared import PreparedMessages
from .sinks import ArraySink

__all__ = ["ArrayMessages"]


class ArrayMessages(PreparedMessages):
    """Begins messages of arrays."""

    def _send_array(self, x: Any, dst: int, tag: int, deadline: Deadline, async_op: bool) -> Work[None] | None:
        adapted = adapt(x, write=False)
        self._check_size(adapted.array.nbytes)
        loan = self._lend(adapted, dst, deadline)
        if loan is not None:
            return self._send_lent(adapted, loan, dst, tag, deadline, async_op)
        host = to_host(adapted, write=False)
        if host.is_copy and not async_op:
            started = self._start_fast(host, dst, tag, deadline)
            if started is True:
                return None
            if not isinstance(started, bool):
                self._complete(self._journal.begin(sending("send", dst, tag), dst), [started], deadline, [dst])
                last_handed_over()
                return None
        description, payload = host.description.pack(), [host.bytes]
        return self._send(
            sending("send", dst, tag), dst, FrameKind.ARRAY, tag, description, payload, deadline, async_op
        )

    def _send_later(self, x: Any, dst: int, tag: int, timeout: float | None) -> Work[None]:
        dst, tag = self._check_target(dst, tag)
        work = self._send_array(x, dst, tag, self._deadline(timeout), True)
        assert work is not None
        return work

    def _receive_array(self, out: Any, src: int | None, tag: int, deadline: Deadline, async_op: bool) -> Any:
        what = receiving("recv", src, tag)
        if out is None:
            made = None if async_op or src is None else self._receive_new(src, tag, deadline)
            return made if made is not None else self._receive(what, src, tag, self._new_sink(), deadline, async_op)
        sink = self._sink_for(adapt_out(out))
        if async_op:
            return self._receive(what, src, tag, sink, deadline, True)
        return self._receive_to(what, sink, src, tag, deadline)

    def _receive_new(self, src: int, tag: int, deadline: Deadline) -> Any:
        """Receives to a new array by the fast path; None if nothing has been received."""
        fast: Any = self._fast_messages
        coming = fast.next_array(src, tag, deadline.remaining()) if hasattr(fast, "next_array") else None
        if coming is None:
            return None
        try:
            description = Description.parse(*coming)
        except ProtocolError:
            return None  # the general way says what is wrong
        if description.library not in ("numpy", "torch") or description.dtype != description.numpy_dtype().str:
            return None
        array = empty(description.shape, description.numpy_dtype())
        received = self._receive_at_once(receiving("recv", src, tag), array, description.library, src, tag, deadline)
        return make(description, array) if received else None

    def _receive_at_once(self, what: str, array: Any, library: str, src: int, tag: int, deadline: Deadline) -> bool:
        """Receives to an array of NumPy by the fast path; False if nothing has been received."""
        fast: Any = self._fast_messages
        try:
            answer = fast.recv(array, src, tag, deadline.remaining(), library)
            if answer and answer is not True and answer[0] is not None:
                self._complete(self._journal.begin(what, src), [answer[0]], deadline, [src])
                last_handed_over()
                return True
        except BaseException:
            self._take_back()
            raise
        return answer is True

    def _receive_to(self, what: str, sink: ArraySink, src: int | None, tag: int, deadline: Deadline) -> Any:
        """Receives to an array. For one on a GPU that has memory of the host, the fast path is tried first."""
        host = sink.on_host
        if host is None or not host.is_copy or src is None or self._fast_for(host) is None:
            return self._receive(what, src, tag, sink, deadline, False)
        if self._receive_at_once(what, host.array, host.library, src, tag, deadline):
            return host.finish()
        return self._receive(what, src, tag, sink, deadline, False)

    def _start_fast(self, host: Adapted, dst: int, tag: int, deadline: Deadline) -> PendingTransfer | bool:
        """Sends the copy of an array on a GPU by the fast path: True if it is sent, False if nothing is."""
        fast = self._fast_for(host)
        if fast is None:
            return False
        try:
            answer = fast.send(host.array, dst, tag, deadline.remaining(), host.library)
        except BaseException:
            self._take_back()
            raise
        return answer if isinstance(answer, bool) else answer[0] or False

    def _exchange_fast(
        self, x: Any, dst: int, out: Any, src: int | None, tag: int, timeout: float | None
    ) -> tuple[PendingTransfer | bool, PendingTransfer | bool]:
        """Sends an array, and takes the one that comes for it, by the fast path that there is."""
        fast: Any = self._fast_messages
        if hasattr(fast, "exchange"):
            return self._exchange_by_channels(x, dst, out, src, tag, timeout)
        if hasattr(fast, "prepare_send"):
            return self._exchange_prepared(x, dst, out, src, tag, timeout)
        return False, False

    def _fast_for(self, host: Adapted) -> Any:
        """The fast path, if it takes such an array: it knows no dtypes that NumPy lacks."""
        return self._fast_messages if host.dtype == host.array.dtype.str else None

    # -- what the fast path could not finish in time (see `_core.FastMessages`) ---------------------------------------

    def _go_on_sending(
        self, x: Any, dst: int, tag: int, timeout: float | None, operation: PendingTransfer | None, waited: float
    ) -> None:
        deadline = self._deadline(timeout)
        deadline.at -= waited
        if operation is None:
            dst, tag = self._check_target(dst, tag)
            self._send_array(x, dst, tag, deadline, False)
        else:
            self._complete(self._journal.begin(sending("send", dst, tag), dst), [operation], deadline, [dst])
            last_handed_over()

    def _go_on_sending_later(
        self, x: Any, dst: int, tag: int, timeout: float | None, operation: PendingTransfer | None, waited: float
    ) -> Work[None]:
        """The work of a short message that was to be sent at once, and is not sent yet."""
        if operation is None:
            return self._send_later(x, dst, tag, timeout)
        try:
            deadline = self._deadline(timeout)
            deadline.at -= waited
            entry = self._journal.begin(sending("send", dst, tag), dst, posted=True)
            work = self._in_background(entry, operation, deadline, [dst], lambda: None)
            last_handed_over()
            return work
        except BaseException:  # Ctrl-C
            self._take_back()
            raise

    def _go_on_receiving(
        self, out: Any, src: int, tag: int, timeout: float | None, operation: PendingTransfer | None, waited: float
    ) -> Any:
        deadline = self._deadline(timeout)
        deadline.at -= waited
        if operation is None:
            source, tag = self._check_source(src, tag)
            return self._receive_array(out, source, tag, deadline, False)
        self._complete(self._journal.begin(receiving("recv", src, tag), src), [operation], deadline, [src])
        last_handed_over()
        return out

    def _take_back(self) -> None:
        """Takes back what was handed over just before an interrupt: its caller will never wait for it."""
        for operation in all_handed_over():
            self._messages.withdraw(operation)
