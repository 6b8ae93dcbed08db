"""The process of the fork server: it has everything imported, runs no threads, and forks ranks.

A fork of a process with threads can hang in a lock that another thread held at that moment. This process has no
threads, so its children start clean, and in milliseconds, because what they need is already in memory.

It reads one request after another from its socket (see `Request`) and answers with the children's process ids. It ends,
and kills what is left of its children, when the socket does, or when no request has come for a while.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import select
import signal
import socket
import struct
import sys
import warnings
from typing import Any

import msgspec

from ..operating_system import die_with_parent, reap_child
from . import shipping

__all__ = ["ChildEnded", "Signal", "Start", "Started", "main", "read_message", "write_message"]

IDLE = 120.0
"""Seconds without a child and without a request after which the fork server ends by itself."""
_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, tag="start"):
    """Request: fork a rank.

    With it come four descriptors: its standard output and error, its socket, and the file for its stacks.
    """

    rank: int
    modules: list[tuple[str, str | None]]
    """To be imported here, once, so that no child has to."""
    path: list[str]
    arguments: list[str]
    """For `sys.argv`."""
    folder: str
    environment: dict[str, str]


class Signal(msgspec.Struct, tag="signal"):
    """Request: send a signal to these children; SIGKILL also to all processes that they started."""

    pids: list[int]
    number: int


class Started(msgspec.Struct, tag="started"):
    """A rank was forked."""

    pid: int


class ChildEnded(msgspec.Struct, tag="ended"):
    """A child ended."""

    pid: int
    status: int
    """As `os.waitpid` gives it."""


Request = Start | Signal
Answer = Started | ChildEnded
_encode = msgspec.msgpack.Encoder().encode
_decoders = {kind: msgspec.msgpack.Decoder(kind) for kind in (Request, Answer)}


def write_message(sock: socket.socket, message: Request | Answer, fds: list[int] | None = None) -> None:
    """Sends a message; descriptors ride with its first byte."""
    data = _encode(message)
    data = _LENGTH.pack(len(data)) + data
    sent = socket.send_fds(sock, [data], fds) if fds else sock.send(data)
    sock.sendall(data[sent:])


def read_message(sock: socket.socket, kind: Any, max_fds: int = 0) -> tuple[Any, list[int]]:
    """Reads a message and the descriptors that came with it.

    Raises:
        EOFError: The other side is gone.
    """
    head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, max_fds) if max_fds else (sock.recv(_LENGTH.size), [], 0, 0)
    while len(head) < _LENGTH.size:
        more = sock.recv(_LENGTH.size - len(head)) if head else b""
        if not more:
            raise EOFError
        head += more
    size = _LENGTH.unpack(head)[0]
    data = bytearray()
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return _decoders[kind].decode(data), list(fds)


class _ForkServerProcess:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._children: set[int] = set()
        # A child's end has to wake the wait below: a byte on a pipe does.
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client decides what Ctrl-C means for its ranks

    def serve(self) -> None:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        try:
            while True:
                ready = poller.poll(IDLE * 1000)
                if not ready and not self._children:
                    return
                for fd, _ in ready:
                    if fd == self._wake_read:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_read, 4096)
                    elif not self._take_request():
                        return
                self._reap()
        except (EOFError, OSError):
            return  # the client is gone
        finally:
            self._send(list(self._children), signal.SIGKILL)

    def _take_request(self) -> bool:
        request, fds = read_message(self._sock, Request, 4)
        if isinstance(request, Signal):
            self._send([pid for pid in request.pids if pid in self._children], request.number)
            return True
        known = len(sys.modules)
        for where in request.modules:
            sys.path[:] = request.path
            # An import that fails here fails in the child, too, and there it can be reported.
            with contextlib.suppress(Exception, SystemExit):
                shipping.load_module(where)
        if len(sys.modules) > known:
            _keep_all()
        with warnings.catch_warnings():
            # The threads that newer Pythons and JAX warn of are those of a BLAS library, which is made for it.
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            self._become(request, fds)
        self._children.add(pid)
        for fd in fds:
            os.close(fd)
        write_message(self._sock, Started(pid))
        return True

    def _become(self, request: Start, fds: list[int]) -> None:
        """Turns a forked child into a rank; never returns."""
        code = 70
        try:
            self._sock.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setpgid(0, 0)  # so that what a rank starts can be ended with it
            die_with_parent()
            output, errors, sock, stacks = fds
            os.dup2(output, 1)
            os.dup2(errors, 2)
            os.close(output)
            os.close(errors)
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, io.TextIOWrapper):
                    stream.reconfigure(line_buffering=True)
            sys.path[:] = request.path
            sys.argv[:] = request.arguments
            os.chdir(request.folder)
            from . import rank_process

            code = rank_process.main(request.rank, sock, stacks, request.environment)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while self._children:
            try:
                ended = reap_child(self._kill_group)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid, status = ended
            self._children.discard(pid)
            write_message(self._sock, ChildEnded(pid, status))

    @staticmethod
    def _kill_group(pid: int) -> None:
        """Ends what a rank has started and left behind."""
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)

    @staticmethod
    def _send(pids: list[int], number: int) -> None:
        for pid in pids:
            if number == signal.SIGKILL:
                with contextlib.suppress(OSError):  # the group may not exist yet
                    os.killpg(pid, number)
            with contextlib.suppress(OSError):
                os.kill(pid, number)


def _keep_all() -> None:
    """Freezes all objects: else the children's garbage collectors would touch them, and so copy their pages."""
    gc.collect()
    gc.freeze()


def main(fd: int) -> None:
    """Serves requests that come on a socket."""
    # Every rank needs these: it sets a seed, which NumPy imports a package for, and looks up an address.
    import encodings.idna  # noqa: F401

    import numpy.random  # noqa: F401

    from .. import backends, group, world  # noqa: F401
    from . import rank_process  # noqa: F401

    _keep_all()
    _ForkServerProcess(socket.socket(fileno=fd)).serve()
