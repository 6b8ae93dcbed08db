"""The host's side of a directory that runs in a process of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from ... import config
from ...config import Options
from ...deadline import Deadline
from ...transports.reactor import Reactor
from ...transports.stream import Stream, StreamEnded, no_check, wait_ready
from ...types import Address
from ...wire import hosting as say
from ...wire.control import Abort, Ended, Note, pack
from ..control_link import READ_SIZE, ControlLink
from ..directory import FEW_NOTES
from ..error_codec import EndCause, keep_end
from . import bootstrap

__all__ = ["DirectoryProcess", "NotStarted"]

logger = logging.getLogger("phalanx.rendezvous")

CLOSE_LIMIT = 5.0
"""Seconds in which it must have ended once it was told to."""
PYTHONS = ("python", "pypy")
"""The first letters of interpreters' names. A program that embeds one may put its own name into `sys.executable`."""
SECRETS = ("PHALANX_TOKEN", "PHALANX_TOKEN_FILE")


class NotStarted(Exception):
    """No process could be started, or it did not come to serve."""


class DirectoryProcess:
    """A directory in a process of its own. The methods are those of `Directory` for its host.

    Call `ready` first; `close` and `abandon` may be called at any time.

    Args:
        listener: The listening socket; it is this side's, too, until `ready` has returned.
        detached: Whether it is no child of this process. A launcher wants one; a program that is not ours does not.

    Raises:
        NotStarted: There is no interpreter to run, or the system has no process left.
    """

    def __init__(
        self,
        world_size: int,
        *,
        token: bytes | None,
        listener: socket.socket,
        options: Options,
        one_world: bool,
        job_file: Path | None,
        detached: bool,
        elastic: int = 0,
    ) -> None:
        self.address = Address(*listener.getsockname()[:2])
        self.launchers = 0
        self.pid: int | None = None
        self._on_end: list[Callable[[EndCause], None]] = []
        self._notes: deque[Note] = deque(maxlen=FEW_NOTES)
        """Changes that came before the host asked for them."""
        self._on_change: Callable[[Note], None] = self._notes.append
        self._cause: EndCause | None = None
        self._others_gone = threading.Event()
        self._ended = threading.Event()
        self._closing = self._closed = False
        self._reader = say.HostReader()
        self._reactor = Reactor("phalanx-directory")
        ours, theirs = socket.socketpair()
        self._stream = Stream(ours)
        self._link = ControlLink(self._reactor, self._stream, self._heard, self._lost, self._reader)
        try:
            self._process = _start(listener, theirs, detached=detached)
            level = logging.getLogger("phalanx").getEffectiveLevel()
            file = b"" if job_file is None else os.fsencode(job_file)
            ours.send(pack(say.Setup(world_size, token, _settings(options), one_world, file, level, elastic)))
        except OSError as error:
            self.abandon()
            raise NotStarted(f"no process can be started: {error.strerror or error}") from None
        except NotStarted:
            self.abandon()
            raise
        finally:
            theirs.close()
        if not detached:
            self.pid = self._process.pid
        self._detached = detached

    def ready(self, timeout: float) -> None:
        """Waits until it serves.

        Raises:
            NotStarted: It does not come to.
        """
        deadline = Deadline(timeout)
        view = memoryview(bytearray(READ_SIZE))
        messages: list[say.HostMessage] = []
        try:
            while not messages:
                count = self._stream.receive_into(view)
                messages += self._reader.feed(view[:count])
                if not messages and not wait_ready(self._stream.fd, self._stream.read_events, deadline, no_check):
                    raise NotStarted(f"its process did not answer within {timeout:.3g} s")
        except StreamEnded:
            raise NotStarted("its process ended at once") from None
        first = messages.pop(0)
        if not isinstance(first, say.Ready):
            unexpected = f"its process began with an unexpected {type(first).__name__} message"
            raise NotStarted(first.reason if isinstance(first, say.Failed) else unexpected)
        self.pid = first.pid
        if self._detached:
            self._process.wait()  # the one that started it, and has ended

        def begin() -> None:
            for message in messages:
                self._heard(message)
            self._link.start()

        self._reactor.call_soon(begin)
        self._reactor.start()

    def on_end(self, callback: Callable[[EndCause], None]) -> None:
        """Calls back from a thread, once, when a rank aborted the world or was lost."""

        def add() -> None:
            if self._cause is not None:
                callback(self._cause)
            else:
                self._on_end.append(callback)

        self._reactor.call_soon(add)

    def on_change(self, callback: Callable[[Note], None]) -> None:
        """Calls back from a thread for each change of an elastic world."""

        def add() -> None:
            self._on_change = callback
            while self._notes:
                callback(self._notes.popleft())

        self._reactor.call_soon(add)

    @property
    def serves(self) -> bool:
        """False once its process has ended."""
        return not self._ended.is_set()

    def abort(self, rank: int, reason: str, traceback: str = "") -> None:
        """Ends the world on behalf of a rank that failed without a word, as its launcher sees it."""
        self._say(Abort(rank, keep_end(reason), keep_end(traceback)))

    def rank_exited(self, rank: int, how: str) -> None:
        """Says that the process of a rank has ended, without a failure."""
        self._say(Ended(rank, how))

    def reserve(self, rank: int) -> None:
        """Keeps a number for a rank that the host starts."""
        self._say(say.Reserve(rank))

    def wait_until_others_left(self, host: int, timeout: float) -> bool:
        """Waits until every rank but `host` has left or is lost; False if the time ran out first."""
        self._say(say.AwaitOthers(host))
        return self._others_gone.wait(timeout)

    def close(self) -> None:
        """Ends the directory: it tells the ranks that they are not watched any more. May be called twice."""
        if self._closed:
            return
        self._closing = True  # an exception in the wait below, as by Ctrl-C, leaves the rest to the next call
        if not self._reactor.thread.is_started:  # it never came to serve
            self._kill()
            self.abandon()
            return
        self._say(say.Close())
        if not self._ended.wait(CLOSE_LIMIT):
            self._kill()
        self._reactor.call_soon(self._link.close)
        self._reactor.stop()
        if not self._detached:
            self._process.wait()
        self._closed = True

    def abandon(self) -> None:
        """In a forked child, or where nothing runs yet: closes the descriptors only."""
        self._closing = self._closed = True
        self._stream.abandon()
        self._reactor.abandon()

    def _kill(self) -> None:
        """Kills a process that does not answer; it holds the other end of the link, so it is still there."""
        if self.pid is None:
            self._process.kill()
            self._process.wait()
        elif not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _say(self, message: msgspec.Struct) -> None:
        self._reactor.call_soon(lambda: self._link.send(message))

    # -- in the reactor's thread ---------------------------------------------------------------------------------------

    def _heard(self, message: say.HostMessage) -> None:
        if isinstance(message, say.WorldEnded):
            self._cause = EndCause(message.rank, message.reason, message.traceback, message.aborted)
            for callback in self._on_end:
                callback(self._cause)
        elif isinstance(message, say.Launchers):
            self.launchers = message.count
        elif isinstance(message, say.OthersGone):
            self._others_gone.set()
        elif isinstance(message, Note):
            self._on_change(message)
        elif isinstance(message, say.Log):
            logging.getLogger(message.name).log(message.level, "%s", message.text)

    def _lost(self, reason: str) -> None:
        self._ended.set()
        self._others_gone.set()
        self.launchers = 0
        if not self._closing:
            logger.warning("the directory's process %s has ended, and nobody watches the ranks: %s", self.pid, reason)


def _start(listener: socket.socket, link: socket.socket, *, detached: bool) -> subprocess.Popen[bytes]:
    """Starts the process in a session of its own: no terminal can stop it.

    Raises:
        NotStarted: This is no plain interpreter.
        OSError: The system has no process left.
    """
    name = Path(sys.executable or "").name
    if getattr(sys, "frozen", False) or not name.startswith(PYTHONS):
        raise NotStarted(f"sys.executable is {sys.executable!r}, which is not a Python interpreter")
    here = Path(__file__).resolve()
    paths = dict.fromkeys((str(here.parents[3]), str(Path(msgspec.__file__).resolve().parents[1])))
    how = bootstrap.DETACHED if detached else bootstrap.ATTACHED
    descriptors = (listener.fileno(), link.fileno())
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(here.with_name("bootstrap.py")), how, *map(str, descriptors), *paths],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=descriptors,
        env={name: value for name, value in config.inherited().items() if name not in SECRETS},
        start_new_session=True,
    )


def _settings(options: Options) -> say.Settings:
    tls = options.tls
    return say.Settings(
        options.heartbeat,
        options.heartbeat_timeout,
        options.handshake_timeout,
        options.max_pending_handshakes,
        None if tls is None else say.Tls(*map(os.path.abspath, (tls.certificate, tls.key, tls.ca))),
    )
