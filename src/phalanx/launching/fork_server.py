"""Clients of the fork server (`fork_server_process`): they have it start ranks, and hear when these end."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping

from ..deadline import Deadline
from ..errors import PhalanxError
from .fork_server_process import Answer, ChildEnded, Signal, Start, Started, read_message, write_message

__all__ = ["ForkServer", "borrow_fork_server"]

START_TIME = 60.0
"""Seconds for a fork server to start, or to answer. It takes a fraction of one."""
MANY = 2
"""Fork servers kept at once: one for each set of variables that counts at import."""
READ_AT_IMPORT = frozenset({"PHALANX_AS_GLOO", "PHALANX_PORTABLE", "PHALANX_PURE"})
"""Variables that Phalanx reads while it, or torch, is imported. A rank has its own of all others when they are read."""


class ForkServer:
    """One process that forks ranks. Used by one thread at a time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        mine, its = socket.socketpair()
        with its:
            program = (
                f"import sys; sys.path[:] = {sys.path!r}; from phalanx.launching.fork_server_process import main; "
                f"main({its.fileno()})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[its.fileno()],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._sock = mine
        self._ended: list[ChildEnded] = []
        self.modules: dict[str, float] = {}
        """When the files of the modules that it has imported were last changed."""

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None

    def fileno(self) -> int:
        """Readable when a child has ended."""
        return self._sock.fileno()

    def start(self, request: Start, fds: list[int]) -> int:
        """Forks a rank; returns its process id.

        Raises:
            PhalanxError: The fork server does not answer.
        """
        try:
            write_message(self._sock, request, fds)
            while True:
                answer = self._read()
                if isinstance(answer, Started):
                    return answer.pid
                self._ended.append(answer)
        except (EOFError, OSError) as error:
            self.close()
            raise PhalanxError(f"the fork server, which starts the ranks, is gone: {error!r}") from None
        except BaseException:
            self.close()  # Ctrl-C: its answer would be taken for that to the next request
            raise

    def ended(self) -> list[ChildEnded]:
        """The children that have ended since this was asked last.

        Raises:
            PhalanxError: The fork server itself is gone, and all ranks with it.
        """
        found, self._ended = self._ended, []
        try:
            while select.select([self._sock], [], [], 0)[0]:
                answer = self._read()
                if isinstance(answer, ChildEnded):
                    found.append(answer)
        except (EOFError, OSError) as error:
            self.close()
            raise PhalanxError(f"the fork server, which starts the ranks, is gone: {error!r}") from None
        return found

    def send_signal(self, pids: list[int], number: int) -> None:
        """Sends a signal to children; SIGKILL also to what they have started."""
        if pids:
            with contextlib.suppress(OSError):
                write_message(self._sock, Signal(pids, number))

    def close(self) -> None:
        """Ends it and all its children."""
        self._sock.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> Started | ChildEnded:
        deadline = Deadline(START_TIME)
        if not select.select([self._sock], [], [], deadline.remaining())[0]:
            raise EOFError("no answer")
        answer: Started | ChildEnded = read_message(self._sock, Answer)[0]
        return answer


_lock = threading.Lock()
_free: list[tuple[dict[str, str], ForkServer]] = []


def _forget() -> None:
    """In a forked child: they belong to its parent."""
    for _, one in _free:
        one._sock.close()
        one._process.returncode = 0  # so that this process does not wait for it
    _free.clear()
    _lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def borrow_fork_server(environment: Mapping[str, str], modules: list[tuple[str, str | None]]) -> Iterator[ForkServer]:
    """Lends a fork server that imported the same files under the same variables. No other caller has it meanwhile."""
    key = {name: value for name, value in environment.items() if _counts_at_import(name)}
    found = _borrow(key, modules) or ForkServer(environment)
    for name, file in modules:
        found.modules[name] = _changed(file)
    try:
        yield found
    finally:
        _give_back(key, found)


def _counts_at_import(name: str) -> bool:
    return name in READ_AT_IMPORT or name.startswith(("PYTHON", "LD_")) or name.endswith("_NUM_THREADS")


def _changed(file: str | None) -> float:
    try:
        return os.stat(file).st_mtime if file is not None else 0.0
    except OSError:
        return 0.0


def _borrow(key: dict[str, str], modules: list[tuple[str, str | None]]) -> ForkServer | None:
    with _lock:
        for entry in list(_free):
            their_key, one = entry
            stale = any(one.modules.get(name, _changed(file)) != _changed(file) for name, file in modules)
            if not one.alive or stale:
                _free.remove(entry)
                one.close()
            elif their_key == key:
                _free.remove(entry)
                return one
    return None


def _give_back(key: dict[str, str], one: ForkServer) -> None:
    with _lock:
        if one.alive:
            _free.append((key, one))
        old = _free[:-MANY] if len(_free) > MANY else []
        del _free[: len(old)]
    for _, extra in old:
        extra.close()


@atexit.register
def _close_all() -> None:
    with _lock:
        for _, one in _free:
            one.close()
        _free.clear()
