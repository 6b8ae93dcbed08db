"""Messages between two ranks."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import PhalanxError
from ..group import Work
from ..types import Received
from .base import GroupBase
from .errors import translated
from .message_rest import go_on, rest_of
from .message_work import MessageWork, SelfMessageWork
from .request import only
from .runner import Runner
from .tensors import in_place, source
from .visible import visible
from .work import FinishedWork

__all__ = ["TorchMessages"]


class TorchMessages(GroupBase):
    """`send`, `recv` and `recv_anysource`, all of them asynchronous, as torch means them.

    Most are waited for at once: then they go the fast path of a synchronous message, in the thread that waits.
    """

    @visible
    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Sends a tensor to a rank of the group, which may be this one.

        Raises:
            UsageError, ConfigError: There is no such rank, or the tensor cannot be sent.
            DistBackendError, DistNetworkError: From here, or from `wait` of the work.
        """
        tensor = only(tensors, "send")
        if not tensor.is_cpu:
            return self._on(tensor, "send")(tensors, dst, tag)
        if dst == self.group.rank:
            return self._noted(self._own.send(tensor, tag))
        self._check(dst, tag)
        array = source(tensor)
        outgoing, incoming = self._lines

        def begin() -> Any:
            return self._send(array, dst, tag)

        if array.nbytes <= self.group._messages.buffered and outgoing.idle:
            work = self._at_once(begin, [tensor], (outgoing, incoming))
        else:
            work = MessageWork((outgoing, incoming), begin, [tensor])
            outgoing.join(work)
        return self._noted(work)

    @visible
    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Receives a tensor from a rank of the group, which may be this one.

        Raises:
            As `send`.
        """
        tensor = only(tensors, "recv")
        if not tensor.is_cpu:
            return self._on(tensor, "recv")(tensors, src, tag)
        if src == self.group.rank:
            return self._noted(self._own.recv(tensor, tag))
        self._check(src, tag)
        return self._noted(self._receive(tensor, src, tag))

    @visible
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receives a tensor from any rank; `_source_rank` of the work says from which.

        Raises:
            As `send`.
        """
        tensor = only(tensors, "recv")
        if not tensor.is_cpu:
            return self._on(tensor, "recv_anysource")(tensors, tag)
        return self._noted(self._receive(tensor, None, tag))

    def shutdown(self) -> None:
        """Begins what is still in line, and ends the threads for messages."""
        for line in self._lines:
            line.stop()

    # ------------------------------------------------------------------------------------------------------------------

    def go_on_with(self, begun: Any) -> Any:
        """Goes on with a message that the core has begun; returns its handle.

        Args:
            begun: The core's `PreparedMessage`, and what `FastMessages` says of it.
        """
        message, answer = begun
        outgoing, incoming = self._lines
        lines, source_ = ((outgoing, incoming), -1) if message.sends else ((incoming, outgoing), message.peer)
        work = MessageWork(lines, lambda: rest_of(message, answer), message.tensors, source=source_)
        work.run()
        return work

    @functools.cached_property
    def _own(self) -> OwnMessages:
        return OwnMessages(self.group.rank)

    def _check(self, rank: int, tag: int) -> None:
        try:
            self.group._check_target(rank, tag)
        except PhalanxError as error:
            shown = translated(error)
            if shown is error:
                raise
            raise shown from None

    def _receive(self, tensor: Any, src: int | None, tag: int) -> Any:
        memory = in_place(tensor)
        outgoing, incoming = self._lines

        def finish(result: Any) -> int:
            memory.restore()
            if src is not None:
                return src
            assert isinstance(result, Received)
            return result.src

        work = MessageWork((incoming, outgoing), lambda: self._recv(memory.array, src, tag), [tensor], finish)
        incoming.join(work)
        return work

    def _at_once(self, begin: Callable[[], Any], tensors: list[Any], lines: tuple[Runner, Runner]) -> Any:
        """Begins a message in the calling thread."""
        try:
            work = begin()
        except PhalanxError as error:
            shown = translated(error)
            if shown is error:
                raise
            raise shown from None
        if work is None:
            return FinishedWork.of(tensors)
        message = MessageWork(lines, lambda: work, tensors)
        message.run()
        return message

    def _send(self, array: Any, dst: int, tag: int) -> Work[Any] | None:
        """Sends an array; None if that is done, else what goes on sending it."""
        group = self.group
        operation = None
        if group._fast_messages is not None:
            try:
                answer = group._fast_messages.send(array, dst, tag, self._seconds)
            except BaseException:
                group._take_back()
                raise
            if answer is True:
                return None
            operation = answer[0] if answer else None
        if operation is None:
            return group.isend(array, dst, tag=tag, timeout=self._seconds)
        return go_on(group, operation, f"send(dst={dst})", dst, self._seconds)

    def _recv(self, array: Any, src: int | None, tag: int) -> Work[Any] | None:
        """Receives an array; None if that is done, else what goes on receiving it."""
        group = self.group
        operation = None
        if group._fast_messages is not None and src is not None:
            try:
                answer = group._fast_messages.recv(array, src, tag, self._seconds)
            except BaseException:
                group._take_back()
                raise
            if answer is True:
                return None
            operation = answer[0] if answer else None
        if operation is None or src is None:
            return group.irecv(array, src, tag=tag, timeout=self._seconds)
        return go_on(group, operation, f"recv(src={src})", src, self._seconds)

    def _noted(self, work: Any) -> Any:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


class OwnMessages:
    """Messages of a rank to itself, which torch allows for `isend` and `irecv`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._sent: dict[int, deque[Any]] = {}
        self._awaited: dict[int, deque[SelfMessageWork]] = {}

    def send(self, tensor: Any, tag: int) -> Any:
        """Keeps a copy for the receive that will come, or gives it to the one that waits."""
        copy = tensor.detach().clone()
        with self._lock:
            waiting = self._awaited.get(tag)
            receive = waiting.popleft() if waiting else None
            if receive is None:
                self._sent.setdefault(tag, deque()).append(copy)
        if receive is not None:
            receive.arrive(copy)
        return FinishedWork.of([tensor])

    def recv(self, tensor: Any, tag: int) -> Any:
        """Takes the oldest message of that tag, now or when it is sent."""
        receive = SelfMessageWork(tensor, self._rank)
        with self._lock:
            sent = self._sent.get(tag)
            copy = sent.popleft() if sent else None
            if copy is None:
                self._awaited.setdefault(tag, deque()).append(receive)
        if copy is not None:
            receive.arrive(copy)
        return receive
