"""The directory's process: a directory, and the link to its host.

It never outlives the job. When the host ends without a word, it ends at once if no world has formed, else with the last
rank. This module and what it imports is all that the process loads, so that it starts soon and stays small.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

from ...errors import PhalanxError, ProtocolError
from ...exception_text import describe
from ...transports.stream import Stream
from ...wire import hosting as say
from ...wire.control import Abort, Ended, pack
from ..control_link import READ_SIZE, ControlLink
from ..directory import Directory
from ..error_codec import EndCause

__all__ = ["serve"]

LOG_ROOM = 1 << 20
"""Bytes that may wait for the host, which may be busy or stopped, before log lines are dropped."""


def serve(listener: socket.socket, host: socket.socket) -> None:
    """Serves until the end of the job."""
    reader = say.HostReader()
    messages: list[say.HostMessage] = []
    try:
        while not messages:
            data = host.recv(READ_SIZE)
            if not data:
                return  # the host is gone already
            messages += reader.feed(data)
        setup = messages.pop(0)
        if not isinstance(setup, say.Setup):
            raise ProtocolError(f"expected the directory's setup, got {type(setup).__name__}")
        log = _ToHost(setup.log_level)  # before the directory: it serves from the moment when it exists
        directory = Directory(
            setup.world_size,
            token=setup.token,
            bind=listener,
            options=setup.settings,
            one_world=setup.one_world,
            job_file=os.fsdecode(setup.job_file) if setup.job_file else None,
            elastic=setup.elastic,
        )
    except (PhalanxError, OSError) as error:
        host.sendall(pack(say.Failed(describe(error))))
        return
    _Service(directory, Stream(host), reader, log).start(messages)
    directory.join()


class _Service:
    """Does what the host says, and tells it what happens. Everything runs in the directory's thread."""

    def __init__(self, directory: Directory, stream: Stream, reader: say.HostReader, log: _ToHost) -> None:
        self._directory = directory
        self._link = ControlLink(
            directory.reactor, stream, self._heard, lambda _reason: directory.outlive_host(), reader
        )
        self._log = log

    def start(self, messages: list[say.HostMessage]) -> None:
        """Begins, with what the host has said so far."""

        def begin() -> None:
            # The directory serves already: whoever waited for it may be in. The host counts on this word as the first.
            self._link.send(say.Ready(os.getpid()))
            self._log.connect(self._send_log)
            self._directory.on_end(self._ended)
            self._directory.on_change(self._link.send)
            self._directory.on_launchers(lambda count: self._link.send(say.Launchers(count)))
            for message in messages:
                self._heard(message)
            self._link.start()

        self._directory.reactor.call_soon(begin)

    def _heard(self, message: say.HostMessage) -> None:
        if isinstance(message, Abort):
            self._directory.abort(message.rank, message.reason, message.traceback)
        elif isinstance(message, Ended):
            self._directory.rank_exited(message.rank, message.how)
        elif isinstance(message, say.AwaitOthers):
            self._directory.await_others(message.rank, lambda: self._link.send(say.OthersGone()))
        elif isinstance(message, say.Reserve):
            self._directory.reserve(message.rank)
        elif isinstance(message, say.Close):
            self._directory.close()

    def _ended(self, cause: EndCause) -> None:
        self._link.send(say.WorldEnded(*cause))

    def _send_log(self, line: say.Log) -> None:
        if self._link.waiting < LOG_ROOM:
            self._link.send(line)


class _ToHost(logging.Handler):
    """Brings log lines to the host, where the program's own logging shows them.

    Used by the directory's thread only.
    """

    def __init__(self, level: int) -> None:
        super().__init__()
        self._early: list[say.Log] = []
        self._send: Callable[[say.Log], None] = self._early.append
        logger = logging.getLogger("phalanx")
        logger.setLevel(level)
        logger.addHandler(self)

    def connect(self, send: Callable[[say.Log], None]) -> None:
        """Sends the lines from now on, beginning with those that were written before."""
        self._send = send
        for line in self._early:
            send(line)
        self._early.clear()

    def emit(self, record: logging.LogRecord) -> None:
        self._send(say.Log(record.levelno, record.name, self.format(record)))
