"""Messages between two ranks of a group."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import msgspec

from ...arguments import as_index, in_units
from ...backends.lane import payload_size
from ...deadline import Deadline
from ...errors import ChannelClosed, PeerLost, PhalanxError, ProtocolError, Timeout, UsageError, copy_for_raise
from ...frames import hide_frames, hides_frames
from ...system_limits import naming_limits
from ...transports.channel import OutgoingFrame
from ...transports.mailbox import BufferSink, Envelope, PendingTransfer, Receive
from ...transports.ring_channel import last_handed_over
from ...types import AnyArray, OutT, Received
from ...wire import codec
from ...wire.frames import MAX_TAG, FrameKind
from ..core import GroupCore
from ..data.arrays import Adapted, Description, adapt, adapt_out, empty, make, share_memory, to_host
from ..data.overlap import exchanged
from ..data.typed import ObjectType
from ..members import as_member
from ..tracking.journal import Entry
from ..work import Work
from .sinks import ArraySink, Lent, NewArraySink, ObjectSink

if TYPE_CHECKING:
    from ...cuda.lending import Loan

__all__ = ["PointToPoint"]

LENT_FROM = 512 << 10
"""Bytes above which an array on a GPU is lent to a receiver that shares the GPU, and does not go through the host. Two
ranks of an H200 exchange arrays in 600 to 700 µs so, whatever their length; through the host they need 150 to 180 for
64 KiB and 1,130 for 1 MiB."""
BUFFERED = 64 << 10
"""Bytes of an array that two ranks can send each other before they receive: rings hold several of them."""
AGREED_WAIT = 0.001
"""Seconds between two looks whether this rank, too, has agreed on how the group shares a GPU."""
CAUSE_WAIT = 2.0
"""Seconds to wait for the reason why the memory of another rank is gone, or why it gave up: it may have to ask around
first."""
LOOK = 1.0
"""Seconds after which a wait looks whether it can ever end."""
T = TypeVar("T")
AnySink = ArraySink | NewArraySink | ObjectSink


class PointToPoint(GroupCore):
    """`send`, `recv` and their kin. Ranks are those of the group."""

    # -- arrays --------------------------------------------------------------------------------------------------------

    @overload
    def send(
        self, x: AnyArray, dst: int, *, tag: int = ..., timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> None: ...
    @overload
    def send(
        self, x: AnyArray, dst: int, *, tag: int = ..., timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[None]: ...
    @overload
    def send(
        self, x: AnyArray, dst: int, *, tag: int = ..., timeout: float | None = ..., async_op: bool
    ) -> Work[None] | None: ...

    def send(self, x: Any, dst: int, *, tag: int = 0, timeout: float | None = None, async_op: bool = False) -> Any:
        """Sends an array; returns once its memory may be changed again.

        Args:
            x: NumPy, torch, JAX, CuPy, bytes, bytearray or memoryview. On a GPU it goes by the memory of the host,
                unless it is long and the ranks share that GPU.
            dst: The receiver.
            tag: The receiver gets messages of one tag in the order in which they were sent.
            async_op: Return a `Work` at once; leave `x` alone until it is done.

        Raises:
            InvalidRank, UsageError: Before anything is sent.
            Timeout: The receiver did not take it in time. If a part was on its way, no more can be sent to that rank.
            PeerLost: The receiver is gone.
        """
        try:
            sent = self._send_at_once(x, dst, tag, timeout) if async_op else None
            if sent is not None:
                return sent
            dst, tag = self._check_target(dst, tag)
            return self._send_array(x, dst, tag, self._deadline(timeout), async_op)
        except BaseException as error:
            hide_frames(error)
            raise

    @overload
    def recv(
        self, out: OutT, src: int, *, tag: int = ..., timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> OutT: ...
    @overload
    def recv(
        self, out: OutT, src: int, *, tag: int = ..., timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[OutT]: ...
    @overload
    def recv(
        self,
        out: AnyArray | None = ...,
        src: None = ...,
        *,
        tag: int = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Received: ...
    @overload
    def recv(
        self,
        out: AnyArray | None = ...,
        src: None = ...,
        *,
        tag: int = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Received]: ...
    @overload
    def recv(
        self,
        out: AnyArray | None = ...,
        src: int | None = ...,
        *,
        tag: int = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Any]: ...
    @overload
    def recv(
        self,
        out: AnyArray | None = ...,
        src: int | None = ...,
        *,
        tag: int = ...,
        timeout: float | None = ...,
        async_op: bool = ...,
    ) -> Any: ...

    def recv(
        self,
        out: Any = None,
        src: int | None = None,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Receives an array.

        Args:
            out: Is filled and returned; must have the sender's dtype and size. Without it, a new array is made as the
                sender's was.
            src: The sender; None takes a message from anyone.
            async_op: Return a `Work` at once.

        Returns:
            The array; with `src=None` a `Received(data, src, tag)`.

        Raises:
            InvalidRank, UsageError: Before anything is received.
            SizeMismatch: The message has another size than `out`; it is dropped.
            Timeout: Nothing came in time. The group stays usable, and a message that comes later is not lost.
            PeerLost: The sender is gone.
        """
        try:
            src, tag = self._check_source(src, tag)
            return self._receive_array(out, src, tag, self._deadline(timeout), async_op)
        except BaseException as error:
            hide_frames(error)
            raise

    @hides_frames
    def isend(self, x: AnyArray, dst: int, *, tag: int = 0, timeout: float | None = None) -> Work[None]:
        """`send` with `async_op=True`."""
        return self.send(x, dst, tag=tag, timeout=timeout, async_op=True)

    @overload
    def irecv(self, out: OutT, src: int, *, tag: int = ..., timeout: float | None = ...) -> Work[OutT]: ...
    @overload
    def irecv(
        self, out: AnyArray | None = ..., src: None = ..., *, tag: int = ..., timeout: float | None = ...
    ) -> Work[Received]: ...
    @overload
    def irecv(
        self, out: AnyArray | None = ..., src: int | None = ..., *, tag: int = ..., timeout: float | None = ...
    ) -> Work[Any]: ...

    @hides_frames
    def irecv(self, out: Any = None, src: int | None = None, *, tag: int = 0, timeout: float | None = None) -> Any:
        """`recv` with `async_op=True`."""
        return self.recv(out, src, tag=tag, timeout=timeout, async_op=True)

    @overload
    def sendrecv(
        self, x: AnyArray, dst: int, out: OutT, src: int, *, tag: int = ..., timeout: float | None = ...
    ) -> OutT: ...
    @overload
    def sendrecv(
        self,
        x: AnyArray,
        dst: int,
        out: AnyArray | None = ...,
        src: None = ...,
        *,
        tag: int = ...,
        timeout: float | None = ...,
    ) -> Received: ...
    @overload
    def sendrecv(
        self,
        x: AnyArray,
        dst: int,
        out: AnyArray | None = ...,
        src: int | None = ...,
        *,
        tag: int = ...,
        timeout: float | None = ...,
    ) -> Any: ...

    @hides_frames
    def sendrecv(
        self,
        x: Any,
        dst: int,
        out: Any = None,
        src: int | None = None,
        *,
        tag: int = 0,
        timeout: float | None = None,
    ) -> Any:
        """Sends and receives at the same time, so that two ranks can exchange arrays of any size.

        Args:
            x: As of `send`.
            out: As of `recv`. It may be exactly `x`.

        Returns:
            The same as `recv(out, src, tag=tag)`.

        Raises:
            As `send` and `recv`.
        """
        dst, tag = self._check_target(dst, tag)
        src, tag = self._check_source(src, tag)
        adapted = adapt(x, write=False)
        self._check_size(adapted.array.nbytes)
        sink: NewArraySink | ArraySink = self._new_sink()
        started: PendingTransfer | bool = False
        may_lend = True
        if out is not None:
            target = adapt_out(out)
            may_lend = not share_memory(adapted.array, target.array)  # else what is read would change meanwhile
            adapted = exchanged("sendrecv", adapted, target.array) if adapted.empty is None else adapted
            sink = self._sink_for(target)
        deadline = self._deadline(timeout)
        source = "any" if src is None else src
        what = f"sendrecv(dst={dst}, src={source}{f', tag={tag}' if tag else ''})"
        if adapted.empty is not None and adapted.array.nbytes <= BUFFERED and isinstance(sink, ArraySink):
            adapted = to_host(adapted, write=False)
            started = self._start_fast(adapted, dst, tag, deadline)
            if started is True:
                return self._receive_to(what, sink, src, tag, deadline)
        loan = self._lend(adapted, dst, deadline) if may_lend else None
        entry = self._journal.begin(what, src)
        try:
            receive = self._messages.post(src, tag, sink)
            if loan is not None:
                return self._exchange_lent(entry, adapted, loan, dst, tag, receive, sink, src, deadline)
            host = to_host(adapted, write=False)
            description, payload = host.description.pack(), [host.bytes]
            if isinstance(started, bool):
                with naming_limits():
                    outgoing = self._messages.start_send(dst, FrameKind.ARRAY, tag, description, payload, deadline)
            else:
                outgoing = started
                last_handed_over()
            self._complete(entry, [outgoing, receive], deadline, self._sources(src))
            return self._received(entry, receive, sink, src)
        except BaseException:
            if started:
                self._take_back()
            self._forget(sink)
            entry.end(failed=True)
            raise

    # -- objects -------------------------------------------------------------------------------------------------------

    @overload
    def send_object(
        self,
        obj: Any,
        dst: int,
        *,
        tag: int = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> None: ...
    @overload
    def send_object(
        self,
        obj: Any,
        dst: int,
        *,
        tag: int = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[None]: ...
    @overload
    def send_object(
        self,
        obj: Any,
        dst: int,
        *,
        tag: int = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: bool,
    ) -> Work[None] | None: ...

    @hides_frames
    def send_object(
        self,
        obj: Any,
        dst: int,
        *,
        tag: int = 0,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Sends data: None, numbers, text, bytes, lists, tuples, dicts, sets, dates and arrays, nested as you like.

        Dataclasses, `msgspec.Struct`s, named tuples and members of an enum can be sent, too, if the receiver names the
        type.

        Args:
            allow_pickle: Pickle everything else. The receiver must allow it, too, and runs the sender's code by it.

        Raises:
            UsageError: There is something else in the object; the message says what and where.
            As `send`.
        """
        dst, tag = self._check_target(dst, tag)
        encoded = codec.encode(obj, allow_pickle=allow_pickle, limits=self._limits, structs="typed")
        what = _to("send_object", dst, tag)
        deadline = self._deadline(timeout)
        return self._send(what, dst, FrameKind.OBJECT, tag, encoded.head, encoded.buffers, deadline, async_op)

    @overload
    def recv_object(
        self,
        src: int,
        *,
        tag: int = ...,
        type: type[T],
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> T: ...
    @overload
    def recv_object(
        self,
        src: int,
        *,
        tag: int = ...,
        type: type[T],
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[T]: ...
    @overload
    def recv_object(
        self,
        src: None = ...,
        *,
        tag: int = ...,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Received: ...
    @overload
    def recv_object(
        self,
        src: None = ...,
        *,
        tag: int = ...,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Received]: ...
    @overload
    def recv_object(
        self,
        src: int | None = ...,
        *,
        tag: int = ...,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Any]: ...
    @overload
    def recv_object(
        self,
        src: int | None = ...,
        *,
        tag: int = ...,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: bool = ...,
    ) -> Any: ...

    @hides_frames
    def recv_object(
        self,
        src: int | None = None,
        *,
        tag: int = 0,
        type: Any = None,  # noqa: A002 - the caller knows it as the type
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Receives what `send_object` sent.

        Args:
            type: The type of the object, if it is more than plain data: a class such as `Config`, or `list[Config]`.
                Only what is named here is made, whatever the sender has. A field that is missing or of another type is
                an error; one that the type does not have is left out, unless it is a Struct that forbids it.

        Returns:
            The object; with `src=None` a `Received(data, src, tag)`.

        Raises:
            UsageError: The object holds something pickled, and `allow_pickle` is not set here; or it does not fit
                `type`, or needs one.
            As `recv`.
        """
        src, tag = self._check_source(src, tag)
        expected = ObjectType(type, allow_pickle=allow_pickle)
        sink = ObjectSink(self._limits, self._naming, expected, allow_pickle=allow_pickle)
        deadline = self._deadline(timeout)
        return self._receive(_describe("recv_object", src, tag), src, tag, sink, deadline, async_op)

    # -- what the fast path could not finish in time (see `_core.FastMessages`) ---------------------------------------

    def _go_on_sending(
        self, x: Any, dst: int, tag: int, timeout: float | None, operation: PendingTransfer | None, waited: float
    ) -> None:
        deadline = self._deadline(timeout)
        deadline.at -= waited
        if operation is None:
            self._send_array(x, dst, tag, deadline, False)
        else:
            self._complete(self._journal.begin(_to("send", dst, tag), dst), [operation], deadline, [dst])
            last_handed_over()

    def _send_at_once(self, x: Any, dst: int, tag: int, timeout: float | None) -> Work[None] | None:
        """Sends what needs no receiver yet, where the fast path can; None if it was not sent."""
        send = getattr(self._fast_messages, "send_at_once", None)
        answer = False if send is None else send(x, dst, tag, timeout)
        if answer is True:
            return Work.of_ended("send")
        if answer is False or answer[0] is None:
            return None
        entry = self._journal.begin(_to("send", dst, tag), dst, posted=True)
        return self._in_background(entry, answer[0], self._deadline(timeout), [dst], lambda: None)

    def _go_on_receiving(
        self, out: Any, src: int, tag: int, timeout: float | None, operation: PendingTransfer | None, waited: float
    ) -> Any:
        deadline = self._deadline(timeout)
        deadline.at -= waited
        if operation is None:
            return self._receive_array(out, src, tag, deadline, False)
        self._complete(self._journal.begin(_describe("recv", src, tag), src), [operation], deadline, [src])
        last_handed_over()
        return out

    def _take_back(self) -> None:
        """Takes back what was handed over just before an interrupt: its caller will never wait for it."""
        operation = last_handed_over()
        if operation is not None:
            self._messages.withdraw(operation)

    # ------------------------------------------------------------------------------------------------------------------

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
                self._complete(self._journal.begin(_to("send", dst, tag), dst), [started], deadline, [dst])
                last_handed_over()
                return None
        description, payload = host.description.pack(), [host.bytes]
        return self._send(_to("send", dst, tag), dst, FrameKind.ARRAY, tag, description, payload, deadline, async_op)

    def _receive_array(self, out: Any, src: int | None, tag: int, deadline: Deadline, async_op: bool) -> Any:
        what = _describe("recv", src, tag)
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
        try:
            answer = fast.recv(array, src, tag, deadline.remaining(), description.library)
            if answer and answer is not True and answer[0] is not None:
                self._complete(self._journal.begin(_describe("recv", src, tag), src), [answer[0]], deadline, [src])
                last_handed_over()
                answer = True
        except BaseException:
            self._take_back()
            raise
        return make(description, array) if answer is True else None

    def _receive_to(self, what: str, sink: ArraySink, src: int | None, tag: int, deadline: Deadline) -> Any:
        """Receives to an array. For one on a GPU that has memory of the host, the fast path is tried first."""
        host = sink.on_host
        fast = None if host is None or not host.is_copy or src is None else self._fast_for(host)
        if fast is not None and host is not None and src is not None:
            try:
                answer = fast.recv(host.array, src, tag, deadline.remaining(), host.library)
                if answer and answer is not True and answer[0] is not None:
                    self._complete(self._journal.begin(what, src), [answer[0]], deadline, [src])
                    last_handed_over()
                    answer = True
            except BaseException:
                self._take_back()
                raise
            if answer is True:
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

    def _fast_for(self, host: Adapted) -> Any:
        """The fast path, if it takes such an array: it knows no dtypes that NumPy lacks."""
        return self._fast_messages if host.dtype == host.array.dtype.str else None

    def _new_sink(self) -> NewArraySink:
        return NewArraySink(self._naming, self._borrow, self._backend.options.max_message)

    def _sink_for(self, target: Adapted) -> ArraySink:
        """The sink of an array that is filled. A short one on a GPU has memory of the host from the beginning."""
        if target.array.nbytes <= LENT_FROM:
            target = to_host(target, write=True, read=False)
        return ArraySink(target, self._naming, self._borrow)

    # -- arrays on a GPU that the receiver shares ----------------------------------------------------------------------

    def _lend(self, adapted: Adapted, dst: int, deadline: Deadline) -> Loan | None:
        """Offers an array to the rank that it is sent to; None if it has to go through the host."""
        loans = self._loans
        if adapted.empty is None or loans is None or dst == self.rank or adapted.array.nbytes <= LENT_FROM:
            return None
        return loans.offer(adapted.array) if adapted.array.ready.wait(deadline) else None

    def _start_lending(
        self, adapted: Adapted, loan: Loan, dst: int, tag: int, deadline: Deadline
    ) -> tuple[PendingTransfer, Receive]:
        """Sends the offer. Returns that, and the receive of the answer."""
        number = loan.offer.word
        description = Lent(adapted.description.pack(), number, msgspec.msgpack.encode(loan.offer)).pack()
        taken = self._messages.post(dst, MAX_TAG + 1 + number, BufferSink(memoryview(bytearray())))
        try:
            with naming_limits():
                outgoing = self._messages.start_send(dst, FrameKind.LENT, tag, description, [], deadline)
        except BaseException:
            self._messages.withdraw(taken)
            raise
        return outgoing, taken

    def _send_lent(
        self, adapted: Adapted, loan: Loan, dst: int, tag: int, deadline: Deadline, async_op: bool
    ) -> Work[None] | None:
        entry = self._journal.begin(_to("send", dst, tag), dst, adapted.array.nbytes, posted=async_op)
        try:
            outgoing, taken = self._start_lending(adapted, loan, dst, tag, deadline)
            if async_op:
                revoke = functools.partial(self._revoke, loan)
                return self._in_background(entry, taken, deadline, [dst], loan.end, revoke, first=outgoing)
            self._complete(entry, [outgoing, taken], deadline, [dst])
        except BaseException:
            self._revoke(loan)
            entry.end(failed=True)
            raise
        loan.end()
        return None

    def _exchange_lent(
        self,
        entry: Entry,
        adapted: Adapted,
        loan: Loan,
        dst: int,
        tag: int,
        receive: Receive,
        sink: AnySink,
        src: int | None,
        deadline: Deadline,
    ) -> Any:
        """`sendrecv` of an array that is lent: what comes is taken before the answer is waited for, as others do."""
        lane, taken = self._messages, None
        try:
            outgoing, taken = self._start_lending(adapted, loan, dst, tag, deadline)
            self._complete(entry, [outgoing, receive], deadline, self._sources(src), ends=False)
            result = self._received(entry, receive, sink, src)
            self._complete(entry, [taken], deadline, [dst])
        except BaseException as error:
            # What came does not fit, which is no reason to cut short what is sent.
            if taken is not None and isinstance(error, UsageError):
                lane.wait([taken], deadline)
            if taken is None or lane.withdraw(taken) or taken.error is not None:
                self._revoke(loan)
            raise
        loan.end()
        return result

    def _revoke(self, loan: Loan) -> None:
        loan.revoke(broken=self._health.cause is not None)

    def _borrow(self, envelope: Envelope, lent: Lent, target: Any) -> None:
        """Takes an array that was lent. The sender hears of it, however it ends.

        Raises:
            ChannelClosed: The sender has given it up.
            PeerLost: It has ended, and its memory with it.
            PhalanxError: It has given up because the group has broken: the group's reason.
            CudaError: Its memory cannot be opened.
        """
        from ...cuda.driver import CudaError  # most programs have no GPU
        from ...cuda.lending import ArrayOffer, Revoked

        try:
            loans = self._loans
            while loans is None:  # the sender's collective, in which all agreed, has ended before this rank's
                self._check()
                time.sleep(AGREED_WAIT)
                loans = self._loans
            loans.take(msgspec.msgpack.decode(lent.offer, type=ArrayOffer), target, target.nbytes)
        except Revoked as revoked:
            cause = self._messages.await_error(CAUSE_WAIT if revoked.broken else 0.0)
            words = "it gave up sending this array before it was taken"
            raise cause or ChannelClosed(self._naming(envelope), words) from None
        except CudaError as error:  # it may have ended, and its memory with it
            raise self._messages.await_error(CAUSE_WAIT) or error from None
        finally:
            self._say_taken(envelope, lent)

    def _say_taken(self, envelope: Envelope, lent: Lent) -> None:
        lane = self._messages
        with contextlib.suppress(PhalanxError):  # the sender is gone, and waits for no answer
            src = lane.source_of(envelope)
            lane.answer(src, FrameKind.TAKEN, MAX_TAG + 1 + lent.number, Deadline(self._timeout))

    def _dismiss(self, operation: PendingTransfer) -> None:
        """Answers the sender of an array that was lent to a receive that does not take it."""
        envelope = operation.envelope if isinstance(operation, Receive) and operation.error is not None else None
        if envelope is not None and envelope.kind is FrameKind.LENT:
            with contextlib.suppress(ProtocolError):
                self._say_taken(envelope, Lent.parse(envelope.description))

    # ------------------------------------------------------------------------------------------------------------------

    def _check_target(self, dst: int, tag: int) -> tuple[int, int]:
        self._check()
        rank = as_member(dst, self.world_size)
        self._backend.check_peer(rank)
        expected = f"a whole number from 0 to {MAX_TAG}"
        number = as_index(tag, "tag", expected)
        if not 0 <= number <= MAX_TAG:
            raise UsageError(f"tag={tag!r} is not valid (expected {expected})")
        return rank, number

    def _check_source(self, src: int | None, tag: int) -> tuple[int | None, int]:
        rank, number = self._check_target(self._some_peer if src is None else src, tag)
        return (None if src is None else rank), number

    @property
    def _some_peer(self) -> int:
        return self.rank if self.world_size == 1 or self._backend.self_send else (self.rank + 1) % self.world_size

    def _check_size(self, size: int) -> None:
        limit = self._backend.options.max_message
        if size > limit:
            raise UsageError(
                f"a message of {in_units(size)} is too long (max_message is {in_units(limit)}; Options.max_message or "
                "PHALANX_MAX_MESSAGE raises it)"
            )

    def _send(
        self,
        what: str,
        dst: int,
        kind: FrameKind,
        tag: int,
        description: bytes,
        payload: list[memoryview],
        deadline: Deadline,
        async_op: bool,
    ) -> Work[None] | None:
        entry = self._journal.begin(what, dst, payload_size(payload), posted=async_op)
        try:
            with naming_limits():
                operation = self._messages.start_send(dst, kind, tag, description, payload, deadline)
        except BaseException:
            entry.end(failed=True)
            raise
        if async_op:
            return self._in_background(entry, operation, deadline, [dst], lambda: None)
        self._complete(entry, [operation], deadline, [dst])
        return None

    def _receive(self, what: str, src: int | None, tag: int, sink: AnySink, deadline: Deadline, async_op: bool) -> Any:
        entry = self._journal.begin(what, src, posted=async_op)
        try:
            receive = self._messages.post(src, tag, sink)
            if async_op:
                return self._in_background(
                    entry, receive, deadline, self._sources(src), lambda: self._received(entry, receive, sink, src)
                )
            self._complete(entry, [receive], deadline, self._sources(src))
            return self._received(entry, receive, sink, src)
        except BaseException:
            self._forget(sink)
            entry.end(failed=True)
            raise

    def _forget(self, sink: AnySink) -> None:
        """Takes back the receive of a call that raises: an interrupt may have come before the call knew of it."""
        receive = None if sink.receive is None else sink.receive()
        if receive is not None:
            self._messages.withdraw(receive)

    def _naming(self, envelope: Envelope) -> int:
        """The world rank that a message came from, by which errors name it."""
        return self.members[self._messages.source_of(envelope)]

    def _sources(self, src: int | None) -> list[int]:
        return [src] if src is not None else [rank for rank in range(self.world_size) if rank != self.rank]

    def _received(self, entry: Entry, receive: Receive, sink: AnySink, src: int | None) -> Any:
        """The result of a receive for its caller."""
        try:
            data = sink.result()
        except PhalanxError as error:
            if error is not self._messages.error:
                raise
            raise self._failure(error, entry) from None  # the group has broken while an array was taken
        if src is not None:
            return data
        assert receive.envelope is not None
        return Received(data, self._messages.source_of(receive.envelope), receive.envelope.tag)

    def _complete(
        self,
        entry: Entry,
        operations: list[PendingTransfer],
        deadline: Deadline,
        waiting: list[int],
        *,
        ends: bool = True,
    ) -> None:
        """Waits in the caller's thread. Whatever is not done at the end is taken back.

        Args:
            ends: False if the call goes on if all goes well.
        """
        lane = self._messages
        done = False
        try:
            try:
                with naming_limits():
                    self._wait(operations, deadline, waiting)
                    if any(isinstance(operation.error, UsageError) for operation in operations):
                        # What came does not fit, which is no reason to cut short what is sent.
                        rest = [operation for operation in operations if operation.error is None]
                        self._wait(rest, deadline, waiting)
            finally:  # also after Ctrl-C: nothing may be written to the caller's memory later
                expired = [operation for operation in operations if lane.withdraw(operation)]
            for operation in operations:
                self._dismiss(operation)
            failed = next((operation.error for operation in operations if operation.error is not None), None)
            if failed is not None:
                raise self._failure(failed, entry)
            if expired:
                raise self._message_timed_out(entry, expired[0], deadline, waiting)
            done = True
        finally:
            if ends or not done:
                entry.end(failed=not done)

    def _wait(self, operations: list[PendingTransfer], deadline: Deadline, waiting: list[int]) -> None:
        """Waits until all are done, one has failed, or the deadline has passed.

        Raises:
            OutOfResources: A sender has not connected yet, and this rank has no descriptor left for it.
        """
        lane = self._messages
        while not lane.wait(operations, deadline.sooner(LOOK)) and not deadline.expired:
            trouble = self._control.trouble
            if trouble is not None and not all(lane.inbound(rank) for rank in waiting):
                raise trouble

    def _in_background(
        self,
        entry: Entry,
        operation: PendingTransfer,
        deadline: Deadline,
        waiting: list[int],
        result: Callable[[], Any],
        on_failure: Callable[[], None] = lambda: None,
        first: PendingTransfer | None = None,
    ) -> Work[Any]:
        """Returns at once; the lane's own thread goes on unless the caller waits.

        Args:
            on_failure: Called before the program hears of a failure.
            first: What has to be done before the operation can be.
        """
        lane = self._messages
        operations = [operation] if first is None else [first, operation]

        def wait(until: Deadline) -> None:
            entry.show_message()
            lane.wait(operations, until)

        work: Work[Any] = Work(entry.name, deadline, drive=wait)

        def finished() -> None:
            entry.end(failed=operation.error is not None)
            if operation.error is not None:
                self._dismiss(operation)
                on_failure()
                work._finish(error=self._failure(operation.error, entry))
                return
            try:
                work._finish(result())
            except Exception as error:
                work._finish(error=error)

        def expire() -> None:
            if lane.withdraw(operation):
                operation.complete(self._message_timed_out(entry, operation, deadline, waiting))

        def first_done() -> None:
            if first is not None and first.error is not None and lane.withdraw(operation):
                operation.complete(first.error)

        operation.on_done(finished)
        try:
            with naming_limits():
                if first is not None:
                    first.on_done(first_done)
                    lane.move_in_background(first, deadline, lambda: None)
                lane.move_in_background(operation, deadline, expire)
        except BaseException:  # Ctrl-C, or no more threads: no caller will ever wait for this operation
            for one in operations:
                lane.withdraw(one)
            raise
        return work

    def _failure(self, error: BaseException, entry: Entry) -> BaseException:
        """The error for an operation that failed. A rank that is lost breaks the group; one that left does not."""
        if isinstance(error, PeerLost) and not isinstance(error, ChannelClosed) and self._health.cause is None:
            self._health.fail(error)
            self._control.break_group(self._context, error)
        self._told = self._told or self._health.cause is not None
        return copy_for_raise(error, f"{entry.name} at {entry.site}", self._world_rank)

    def _message_timed_out(
        self, entry: Entry, operation: PendingTransfer, deadline: Deadline, waiting: list[int]
    ) -> Timeout:
        error = self._timed_out(entry.name, entry.site, deadline, waiting, None)
        if isinstance(operation, OutgoingFrame) and operation.begun:
            error.message += (
                "\n  a part of the message was on its way, so no more can be sent to that rank in this group"
            )
        return error


def _to(verb: str, dst: int, tag: int) -> str:
    return f"{verb}(dst={dst}, tag={tag})" if tag else f"{verb}(dst={dst})"


def _describe(verb: str, src: int | None, tag: int) -> str:
    source = "any" if src is None else str(src)
    return f"{verb}(src={source}, tag={tag})" if tag else f"{verb}(src={source})"
