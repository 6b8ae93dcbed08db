"""One node seen from the controller: the ssh process, what goes in, and what comes out."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence

from phalanx.errors import ConfigError

from .hostfile import Host
from .messages import MARK, Message, decode, encode

__all__ = ["Connection", "is_local"]

READ_SIZE = 64 << 10
KEPT = 16 << 10
"""Bytes of what came before the first word that are kept: an error of ssh, or of the shell there."""


def is_local(host: Host) -> bool:
    """True for a name of this machine: its node is started without ssh."""
    own = socket.gethostname()
    return host.name in ("localhost", "127.0.0.1", "::1", own, own.partition(".")[0])


class Connection:
    """The process that runs a node, over ssh or beside this one.

    It leads a session of its own: Ctrl-C reaches the controller only, which tells the nodes.

    Args:
        host: Where.
        ssh: The command that takes a host and a command line.
        python: The interpreter there.

    Raises:
        ConfigError: There is no such ssh.
    """

    def __init__(self, host: Host, *, ssh: Sequence[str], python: str) -> None:
        self.host = host
        # From the root: the home folder, which may hold a random.py, is no place to import from.
        node = f"cd /; exec {shlex.quote(python)} -m phalanx.cli.run.hosts.node"
        command = ["/bin/sh", "-c", node] if is_local(host) else [*ssh, host.name, node]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"cannot start {command[0]!r}: {error.strerror} (--ssh names the command that reaches the hosts)"
            ) from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin = self._process.stdin
        self.stdout = self._process.stdout.fileno()
        self.stderr = self._process.stderr.fileno()
        self._open = {self.stdout, self.stderr}
        self._half = b""
        """The beginning of a line of the node itself."""
        self.early = b""
        """Output before the node's first word: of ssh, of a login shell, or an error."""
        self.greeted = False

    # -- to the node -------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Sends the job."""
        self._put(encode(message))

    def send_signal(self, number: int) -> None:
        """Has the node act as if it got this signal."""
        self._put(f"signal {number}\n".encode())

    def _put(self, data: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # it is gone, which its outputs tell
            self._stdin.write(data)

    def hang_up(self) -> None:
        """Ends the node's input: it then ends all that it started."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    # -- from the node -----------------------------------------------------------------------------------------------

    def read(self, descriptor: int, show: Callable[[bytes], None]) -> list[Message]:
        """Reads once from one of the two outputs.

        Args:
            descriptor: `stdout` or `stderr`.
            show: Takes lines of the ranks.

        Returns:
            Messages of the node itself.
        """
        try:
            data = os.read(descriptor, READ_SIZE)
        except BlockingIOError:
            return []
        if not data:
            self._open.discard(descriptor)
        if descriptor == self.stdout:
            self._pass(data, show)
            return []
        found = []
        data, self._half = self._half + data, b""
        while data:
            start = data.find(MARK)
            if start < 0:
                # The mark itself may have arrived in part.
                start = next((len(data) - n for n in range(len(MARK) - 1, 0, -1) if data.endswith(MARK[:n])), len(data))
                self._pass(data[:start], show)
                self._half = data[start:]
                break
            self._pass(data[:start], show)
            line, complete, rest = data[start:].partition(b"\n")
            if not complete:
                self._half = line
                break
            with contextlib.suppress(ValueError):
                found.append(decode(line[len(MARK) :]))
                self.greeted = True
            data = rest
        return found

    def _pass(self, data: bytes, show: Callable[[bytes], None]) -> None:
        if self.greeted:
            if data:
                show(data)
        else:
            self.early = (self.early + data)[-KEPT:]

    @property
    def reading(self) -> set[int]:
        """The outputs that have not ended."""
        return set(self._open)

    # -- its end -----------------------------------------------------------------------------------------------------

    @property
    def code(self) -> int | None:
        """The exit code, once the process has ended; that of a signal is 128 and its number."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def end(self) -> None:
        """Asks the process to end."""
        self.hang_up()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def close(self, patience: float) -> None:
        """Ends the process and waits for it. May be called twice."""
        self.hang_up()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
