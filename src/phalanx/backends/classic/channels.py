"""The two halves of a connection on the classic wire, which serves all lanes of its pair of ranks."""

from __future__ import annotations

from collections.abc import Callable

from ...config import Options
from ...errors import ChannelClosed
from ...transports.channel import Inbound, Outbound
from ...transports.mailbox import Arrival, Mailbox
from ...transports.stream import Stream
from ...wire.classic import frames as wire
from ...wire.frames import HEADER_SIZE, FrameHeader, FrameKind, parse_header

__all__ = ["LANE_ID_SIZE", "PLAIN_LANE_ID", "ClassicInbound", "ClassicOutbound"]

LANE_ID_SIZE = 16
PLAIN_LANE_ID = bytes(LANE_ID_SIZE)
"""Names the lane of plain messages, which carry no name themselves."""


class ClassicOutbound(Outbound):
    """Shares its stream with the reader, so it neither reads from it nor closes it."""

    def said_goodbye(self) -> bool:
        return False

    def _close_stream(self) -> None:
        self.stream.finish_sending()


class ClassicInbound(Inbound):
    """Reads plain messages and escaped frames, and finds the mailbox of each."""

    def __init__(
        self,
        stream: Stream,
        src: int,
        *,
        plain: Mailbox,
        mailbox_for: Callable[[bytes], Mailbox],
        options: Options,
        on_end: Callable[[Inbound, Exception, bool], BaseException],
    ) -> None:
        super().__init__(
            stream,
            src,
            plain,
            max_message=options.max_message,
            max_object=options.max_object,
            on_end=on_end,
        )
        self._mailbox_for = mailbox_for
        self._escaped = False
        self._target = self._mailbox

    def _first_need(self) -> int:
        return wire.LENGTH_SIZE

    def _parse(self, head: bytes) -> Arrival | None:
        if self._header is not None:  # the description of an escaped frame
            header, self._header, self._escaped = self._header, None, False
            return self._begin(self._target, header, head)
        if self._escaped:
            self._target = self._mailbox_for(head[:LANE_ID_SIZE])
            header = parse_header(head[LANE_ID_SIZE:], max_message=self._max_message, max_object=self._max_object)
            if header.description:
                self._header = header
                self._need = header.description
                return None
            self._escaped = False
            return self._begin(self._target, header, b"")
        length, self._escaped = wire.parse_length(head, self._max_message + self._max_object)
        if self._escaped:
            self._need = LANE_ID_SIZE + HEADER_SIZE
            return None
        return self._begin(self._mailbox, FrameHeader(FrameKind.RAW, 0, 0, length), b"")

    def _begin(self, mailbox: Mailbox, header: FrameHeader, description: bytes) -> Arrival | None:
        if header.kind is FrameKind.GOODBYE:  # of one lane: the connection serves the others
            self._need = self._first_need()
            self._settled += mailbox.mark_gone(self.src, ChannelClosed(self.src, "it has closed this group"))
            return None
        return super()._begin(mailbox, header, description)
