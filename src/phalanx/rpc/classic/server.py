"""The calls that a rank serves on the classic wire: handlers on a bounded pool, and their answers."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

from ...backends.base import LaneBackend
from ...backends.raw_messages import bytes_of
from ...deadline import Deadline
from ...errors import InvalidMessage, UnsupportedArray
from ...exception_text import message_of, type_name
from ...wire.classic import calls as wire
from ...wire.classic.calls import CallRequest, CallResponse
from .messages import ClassicMessages, ClassicPeer
from .pool import HandlerPool

__all__ = ["ClassicServer", "Functions", "Handler"]

logger = logging.getLogger("phalanx.rpc")

Handler = Callable[[bytes], bytes]


class Functions(dict[str, Handler]):
    """The registered functions by name. Only the agent holds them, because handlers refer to their agent."""


class ClassicServer:
    """Runs the functions that other ranks call, and sends the answers.

    Args:
        workers: Handlers that run at the same time; those that wait for a call of their own do not count.
        max_queue: Requests beyond these that may wait; more are refused.
    """

    def __init__(
        self, backend: LaneBackend, messages: ClassicMessages, functions: Functions, workers: int, max_queue: int
    ) -> None:
        self._backend = backend
        self._messages = messages
        self._functions = weakref.ref(functions)
        self._max_queue = max_queue
        self._closed = False
        self._handlers: HandlerPool[tuple[ClassicPeer, CallRequest, Handler]] = HandlerPool(
            self._serve, workers, workers + max_queue
        )
        self._short_answers: HandlerPool[tuple[ClassicPeer, CallResponse]] = HandlerPool(
            lambda item: self._answer(*item), 1, None
        )

    def waiting(self) -> AbstractContextManager[None]:
        """Around a wait in a handler: it gives its place away meanwhile."""
        return self._handlers.waiting()

    def serve(self, peer: ClassicPeer, request: CallRequest) -> None:
        """Queues a request to be run, or refuses it."""
        functions = self._functions()
        function = None if functions is None else functions.get(request.name)
        if functions is None:
            self._refuse(peer, request, self._busy())
        elif function is None:
            self._refuse(peer, request, wire.not_registered(request.name, self._backend.rank))
        elif not self._handlers.submit((peer, request, function)):
            self._refuse(peer, request, self._busy())

    def _busy(self) -> str:
        if self._closed or self._functions() is None:
            return f"rank {self._backend.rank} serves no more calls"
        return f"rank {self._backend.rank} has too many calls waiting (max_queue is {self._max_queue})"

    def _refuse(self, peer: ClassicPeer, request: CallRequest, text: str) -> None:
        self._short_answers.submit((peer, CallResponse(request.id, True, text.encode())))

    def _serve(self, job: tuple[ClassicPeer, CallRequest, Handler]) -> None:
        """Runs a handler and sends its answer; in a thread of the pool."""
        peer, request, function = job
        try:
            result = function(bytes(request.payload))
            try:
                response = CallResponse(request.id, False, bytes(bytes_of(result, writable=False)))
            except UnsupportedArray:
                raise TypeError(
                    f"function '{request.name}' returned {type(result).__name__} (expected bytes)"
                ) from None
        except BaseException as error:  # also SystemExit: a call must not end the thread
            logger.debug("rank %d: function %r failed", self._backend.rank, request.name, exc_info=True)
            text = message_of(error) or type_name(error)
            response = CallResponse(request.id, True, text.encode())
        self._answer(peer, response)

    def _answer(self, peer: ClassicPeer, response: CallResponse) -> None:
        try:
            try:
                message = wire.pack_response(response)
            except InvalidMessage as error:  # the result is too large
                message = wire.pack_response(CallResponse(response.id, True, str(error).encode()))
            deadline = Deadline(self._backend.timeout)
            if peer.error is None and peer.sending.acquire(timeout=deadline.remaining()):
                try:
                    length = self._messages.send(peer, wire.pack_response_length(len(message)), deadline)
                    if length is None or length.error is None:
                        self._messages.send(peer, message, deadline)
                finally:
                    peer.sending.release()
        except Exception as error:  # the caller is gone; others may call
            logger.debug("rank %d: no answer to rank %d: %s", self._backend.rank, peer.rank, error)

    def close(self, deadline: Deadline) -> None:
        """Refuses what waits, and lets the handlers that run finish and answer until then."""
        self._closed = True
        for peer, request, _ in self._handlers.close():
            self._refuse(peer, request, self._busy())
        self._handlers.join(deadline)
        for item in self._short_answers.close():
            self._answer(*item)
        self._short_answers.join(deadline)

    def release(self) -> None:
        """Lets the threads end."""
        self._handlers.close()
        self._short_answers.close()
