"""Messages that the fast path has begun, and leaves to the general way (see cpp/bindings/mpi_messages.hpp)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ...errors import PhalanxError
from ...transports.mailbox import BufferSink, Envelope, Receive, Sink
from ...transports.ring_channel import bytes_of, note_handed_over
from ...wire.frames import FrameKind
from .inbox import Inbox, Sending

if TYPE_CHECKING:
    from ..._core import MpiRequest

__all__ = ["Handover"]


class GeneralWay(Protocol):
    """The part of `MpiMessages` that goes on with messages."""

    version: str
    """Of MPI."""

    def go_on_offering(self, sending: Sending) -> None:
        """With one that was offered, and not answered yet."""

    def go_on_sending(self, sending: Sending, request: MpiRequest) -> Sending:
        """With one that MPI has, and has not sent yet."""

    def go_on_receiving(
        self, inbox: Inbox, envelope: Envelope, sink: Sink, number: int, request: MpiRequest
    ) -> Receive:
        """With one whose sender was told to send the body, which has not come yet."""

    def give_back(self, src: int, head: bytes) -> None:
        """With a head that the fast path cannot use."""

    def keep(self, request: MpiRequest) -> None:
        """With a head that MPI has not sent yet."""


class _OneMessage(BufferSink):
    """The memory for a message whose type the fast path has compared: no other may come in its place."""

    takes_another = False


class Handover:
    """Goes on with the messages of one lane. All but `fail` is called with the lock of `messages` held."""

    def __init__(self, messages: GeneralWay, lane: bytes, inbox: Inbox) -> None:
        self._messages = messages
        self._lane = lane
        self._inbox = inbox

    def go_on_with_head(self, dst: int, request: MpiRequest) -> Sending:
        """A short message that MPI has, and has not sent yet. It is a copy."""
        return self._messages.go_on_sending(Sending(self._lane, self._inbox, dst, []), request)

    def go_on_offering(self, dst: int, number: int, x: Any) -> Sending:
        """A message that was offered and not answered yet."""
        sending = Sending(self._lane, self._inbox, dst, [bytes_of(x)])
        sending.number = number
        self._messages.go_on_offering(sending)
        note_handed_over(sending)
        return sending

    def go_on_sending(self, dst: int, x: Any, request: MpiRequest) -> Sending:
        """A message whose body MPI has, and has not sent yet."""
        sending = self._messages.go_on_sending(Sending(self._lane, self._inbox, dst, [bytes_of(x)]), request)
        note_handed_over(sending)
        return sending

    def go_on_receiving(
        self, src: int, number: int, out: Any, tag: int, description: bytes, request: MpiRequest, sink: Sink | None
    ) -> Receive:
        """A message whose sender was told to send the body, which has not come yet.

        Args:
            sink: Of `out`, if the receive may take another message after all.
        """
        view = bytes_of(out)
        envelope = Envelope(src, FrameKind.ARRAY, tag, description, len(view))
        receive = self._messages.go_on_receiving(self._inbox, envelope, sink or _OneMessage(view), number, request)
        note_handed_over(receive)
        return receive

    def give_back(self, src: int, head: bytes) -> None:
        """A head that is not what the fast path waits for."""
        self._messages.give_back(src, head)

    def keep(self, request: MpiRequest) -> None:
        """A head that MPI has not sent yet, and that nobody waits for."""
        self._messages.keep(request)

    def fail(self, what: str) -> None:
        """MPI has refused a call.

        Raises:
            PhalanxError: Always.
        """
        raise PhalanxError(f"{self._messages.version} failed in {what}", operation=what)
