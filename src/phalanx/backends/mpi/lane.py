"""A lane whose messages go through MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ...deadline import Deadline
from ...errors import ChannelClosed
from ...transports.channel import Inbound
from ...transports.mailbox import Envelope, PendingTransfer, Receive, Sink
from ...transports.stream import Buffer
from ...wire.frames import FrameKind
from ..lane import Lane
from .inbox import Sending
from .messages import MpiMessages
from .protocol import INLINE

if TYPE_CHECKING:
    from ..._core import MpiMessages as FastMpiMessages
    from ..._core import PreparedMpiMessage, Recorder
    from ..control_plane import ControlPlane

__all__ = ["MpiLane"]


class MpiLane(Lane):
    """A lane on MPI. Its mailbox uses world ranks, because messages may be older than the lane.

    Args:
        name: The lane's, the same on all members.
    """

    buffered = INLINE

    def __init__(
        self, messages: MpiMessages, name: bytes, rank: int, members: Sequence[int], control: ControlPlane
    ) -> None:
        super().__init__(rank, members, control)
        self._messages = messages
        self._name = name
        self._inbox = messages.inbox(name)
        self.mailbox = self._inbox.mailbox
        self.mailbox.sources = frozenset(self.members) - {self.members[rank]}
        self.oversubscribed = messages.oversubscribed
        self._fast_messages: FastMpiMessages | None = None
        self.prepared = self._inbox.prepared

    def source_of(self, envelope: Envelope) -> int:
        return self.members.index(envelope.src)

    def mailbox_source(self, src: int) -> int:
        return self.members[src]

    def post(self, src: int | None, tag: int | None, sink: Sink) -> Receive:
        self.post_prepared()
        return super().post(src, tag, sink)

    def post_prepared(self) -> None:
        if self._inbox.prepared:
            self._messages.post_prepared(self._inbox)

    def start_send(
        self, dst: int, kind: FrameKind, tag: int, description: bytes, payload: Sequence[Buffer], deadline: Deadline
    ) -> PendingTransfer:
        self._messages.progress()  # the news that it has gone may have come
        rank = self.members[dst]
        error: BaseException | None = self.error or self._inbox.gone.get(rank)
        if error is None and self._control.has_left(rank):
            error = ChannelClosed(rank, "it has left the world")
        if error is not None:
            refused = PendingTransfer()
            refused.complete(error)
            return refused
        return self._messages.send(self._name, self._inbox, rank, kind, tag, description, payload)

    def fast_messages(self, recorder: Recorder, timeout: float) -> FastMpiMessages | None:
        self._fast_messages = self._messages.fast_messages(
            self._name, self._inbox, self.rank, self.members, recorder, timeout
        )
        return self._fast_messages

    def inbound(self, src: int | None) -> Iterable[Inbound]:
        return ()

    def take_back_prepared(self, prepared: PreparedMpiMessage) -> None:
        self._messages.take_back_prepared(prepared, self.withdraw)

    def unsent(self) -> list[PendingTransfer]:
        self.post_prepared()
        return list(self._inbox.sending)

    def wait(self, operations: Sequence[PendingTransfer], deadline: Deadline) -> bool:
        return self._messages.wait(operations, deadline)

    def drive(self, operations: Sequence[PendingTransfer]) -> list[tuple[int, int]] | None:
        self._messages.progress()
        return None

    def withdraw(self, operation: PendingTransfer) -> bool:
        if operation.done or operation.withdrawn:
            return False
        if isinstance(operation, Receive):
            return self._messages.withdraw_receive(operation, self.mailbox)
        if isinstance(operation, Sending):
            return self._messages.withdraw_send(operation)
        return super().withdraw(operation)

    def move_in_background(self, operation: PendingTransfer, deadline: Deadline, expire: Callable[[], None]) -> None:
        if not operation.done:
            self._messages.move_in_background(operation, deadline, expire)

    def interrupt(self, on_purpose: bool) -> None:
        if self._fast_messages is not None:  # a forked child must not use it
            self._fast_messages.close()
        super().interrupt(on_purpose)

    def left(self, src: int) -> None:
        rank = self.members[src]
        if self._fast_messages is not None:
            self._fast_messages.close()
        self._messages.departed(self._inbox, rank, ChannelClosed(rank, "it has left the world"))

    def _end_channels(self, error: BaseException, goodbye: bool) -> None:
        self._messages.close_lane(self._name, self._inbox, error, goodbye=goodbye)
