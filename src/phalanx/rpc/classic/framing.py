"""The order of messages on the classic wire: a response comes right after a message with its length."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import InvalidMessage
from ...wire.classic import calls as wire
from ...wire.classic.calls import CallRequest, CallResponse

__all__ = ["ClassicReader"]


class ClassicReader:
    """Reads the messages of one rank, in order."""

    def __init__(self) -> None:
        self._announced: int | None = None
        """Bytes of the response that must come next."""

    def read(
        self, message: memoryview | bytes, complain: Callable[[InvalidMessage], None]
    ) -> CallRequest | CallResponse | None:
        """The request or response in a message; None if it only announces the next one.

        Args:
            complain: Told of a response that was announced and did not come, although this message may be all right.

        Raises:
            InvalidMessage: It cannot be read, or does not belong here.
        """
        announced, self._announced = self._announced, None
        kind = wire.kind_of(message)
        if kind is wire.MessageKind.RESPONSE:
            if announced is None:
                raise InvalidMessage("a response without the message that announces its length")
            if announced != len(message):
                raise InvalidMessage(f"a response of {len(message)} bytes, although {announced} were announced")
            return wire.parse_response(message)
        if announced is not None:
            complain(InvalidMessage(f"a response of {announced} bytes was announced, but another message followed"))
        if kind is not wire.MessageKind.LENGTH:
            return wire.parse_request(message)
        length = wire.parse_response_length(message)
        if length < wire.MIN_RESPONSE:
            raise InvalidMessage(f"the length of a response is {length} (expected at least {wire.MIN_RESPONSE})")
        self._announced = length
        return None
