"""The calls of an agent in both directions, and the thread that moves them."""

from __future__ import annotations

import logging

from ...backends.base import LaneBackend
from ...background_thread import BackgroundThread
from ...deadline import Deadline
from ...errors import Closed, InvalidMessage
from ...wire.classic.calls import CallResponse
from .client import ClassicClient
from .messages import ClassicMessages, ClassicPeer, Received
from .server import ClassicServer, Functions

__all__ = ["ClassicCalls"]

logger = logging.getLogger("phalanx.rpc")

STOP_WAIT = 5.0
"""Seconds that closing waits for handlers that run, and for answers that are not sent yet."""


class ClassicCalls:
    """A client, a server, and the thread that gives each message to one of them.

    The thread holds this, and not the agent, which may be dropped.
    """

    def __init__(
        self, backend: LaneBackend, functions: Functions, workers: int, max_queue: int, timeout: float
    ) -> None:
        self._backend = backend
        self.messages = ClassicMessages(backend)
        self._server = ClassicServer(backend, self.messages, functions, workers, max_queue)
        self.client = ClassicClient(backend, self.messages, timeout, self._server.waiting)
        self._stopping = False
        self._dropped = False
        self.messages.thread = BackgroundThread(self._run, "phalanx-agent")
        self.messages.listen()
        self.messages.thread.start()

    def drop(self) -> None:
        """Has the agent's thread close this, because the agent was collected without having been closed.

        Runs in any thread, which may hold a lock that `close` needs: so it takes none.
        """
        self._dropped = True
        self.messages.waker.set()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Runs in the agent's thread until the agent or its lane ends."""
        error: BaseException | None = None
        try:
            while not self._has_ended():
                self._turn()
            error = self.messages.lane.error
        except BaseException as failure:
            logger.exception("rank %d: an unexpected error ended the agent", self._backend.rank)
            error = failure
        if not self._stopping:  # the backend was closed, or the world is broken
            self.client.fail_everything(error or Closed("this agent has ended"))
            self._release()

    def _has_ended(self) -> bool:
        return self._stopping or self.messages.lane.error is not None

    def _turn(self) -> None:
        self.messages.waker.clear()
        if self._dropped:
            self.close()
        if self._has_ended():  # just before `clear`, which has cleared that signal, too
            return
        inbox = self.messages.inbox
        for _ in range(len(inbox)):
            self._handle(*inbox.popleft())
        self.messages.report_failures()
        self.messages.drive(self.client.expire_calls())

    def _handle(self, peer: ClassicPeer, received: Received) -> None:
        if isinstance(received, InvalidMessage):
            self._complain(peer, received)
        elif isinstance(received, BaseException):
            self.client.fail_calls_to(peer, received)
        else:
            try:
                self._handle_message(peer, received)
            except InvalidMessage as error:
                self._complain(peer, error)
                self.client.settle_unreadable(peer, received, error)
            except Exception:  # such as no more threads: the next message may succeed
                logger.exception("rank %d: an error lost a message from rank %d", self._backend.rank, peer.rank)

    def _handle_message(self, peer: ClassicPeer, message: memoryview | bytes) -> None:
        read = peer.reader.read(message, lambda error: self._complain(peer, error))
        if isinstance(read, CallResponse):
            self.client.settle(peer, read)
        elif read is not None:
            self._server.serve(peer, read)

    def _complain(self, peer: ClassicPeer, error: InvalidMessage) -> None:
        level = logging.DEBUG if peer.warned else logging.WARNING
        peer.warned = True
        text = "rank %d: dropped a message of rank %d that is not a remote call (more of them are logged as debug): %s"
        logger.log(level, text, self._backend.rank, peer.rank, error)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends what the agent does. May be called twice."""
        if self._backend.forked:
            return  # the locks may be held by threads that exist only in the parent
        if not self.client.close():
            return
        deadline = Deadline(STOP_WAIT)
        try:
            self.client.cancel_all()
            self._server.close(deadline)
            self.messages.flush(deadline)
        finally:  # also after Ctrl-C: there will be no second try
            self._stop()

    def _stop(self) -> None:
        self._stopping = True
        self.messages.stop_listening()
        self.messages.waker.set()
        if self.messages.thread is not None:
            self.messages.thread.join(STOP_WAIT)
        self.messages.withdraw_receives()
        self._release()

    def _release(self) -> None:
        """Gives the lane back and lets the threads of the pools end."""
        self._server.release()
        self.messages.release()
