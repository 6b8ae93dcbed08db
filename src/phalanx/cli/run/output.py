"""Output of the ranks: read from their pipes, kept as a tail for the report, copied to log files, shown as lines."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.launching.lines import LineOutput, LineStream, colour_of

from .writer import OutputWriter

__all__ = ["Console", "RankOutput"]

READ_SIZE = 64 << 10
TAIL = 64 << 10
"""Bytes of each output that are kept for the report."""
DRAIN_LIMIT = 4 << 20
"""Bytes that are read from a pipe after the end. It holds less: only a process that escaped could write more."""


class RankOutput:
    """One output of one rank: the reading end of its pipe.

    Args:
        descriptor: The pipe, non-blocking.
        stream: Where the lines go.
        log: A descriptor that gets a copy of every byte, or None.
    """

    def __init__(self, descriptor: int, stream: LineStream, writer: OutputWriter, log: int | None) -> None:
        self.descriptor = descriptor
        self.stream = stream
        self.closed = False
        self._writer = writer
        self._log = log
        self._tail = bytearray()

    def read(self, now: float) -> int:
        """Reads once; returns how many bytes, 0 if there is nothing or the pipe has ended."""
        try:
            data = os.read(self.descriptor, READ_SIZE)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            data = b""
        if not data:
            self.close()
            return 0
        self._tail += data
        if len(self._tail) > 2 * TAIL:
            del self._tail[:-TAIL]
        if self._log is not None:
            self._writer.put(self._log, data)
        self.stream.feed(data, now)
        return len(data)

    def add(self, text: str, now: float, *, show: bool) -> None:
        """Takes text that the rank has left elsewhere: for its log file, and if `show` for the screen, too."""
        data = text.encode("utf-8", "backslashreplace")
        if self._log is not None:
            self._writer.put(self._log, data)
        if show:
            self.stream.feed(data, now)
            self.stream.finish()

    def drain(self, now: float) -> Iterator[None]:
        """Reads what is left, a piece at a time, and closes."""
        budget = DRAIN_LIMIT
        while not self.closed and budget > 0:
            count = self.read(now)
            if not count:
                break
            budget -= count
            yield
        self.close()

    def close(self) -> None:
        """Ends the last line and closes the pipe. May be called twice."""
        if not self.closed:
            self.closed = True
            self.stream.finish()
            os.close(self.descriptor)

    @property
    def tail(self) -> bytes:
        """The last bytes that came."""
        return bytes(self._tail[-TAIL:])


class Console:
    """The launcher's own standard output and error, and the log files.

    Args:
        prefix: Whether lines carry the rank.
        colour: Whether colour is allowed at all (it is used on terminals only).
        log_dir: Where each rank's outputs are copied to, or None.
        far_terminal: Whether what is written here ends up on a terminal elsewhere, which shows colours.

    Raises:
        ConfigError: The folder cannot be made.
    """

    def __init__(
        self, writer: OutputWriter, *, prefix: bool, colour: bool, log_dir: Path | None, far_terminal: bool = False
    ) -> None:
        self._writer = writer
        self._far_terminal = far_terminal
        self._prefix = prefix
        self._log_dir = log_dir
        self._logs: dict[int, Path] = {}
        self.out = self._screen(1, colour)
        # Where both go to the same place, one screen must know whose line stands in the last row.
        self.err = self.out if _same_file(1, 2) else self._screen(2, colour)
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"log folder {str(log_dir)!r} cannot be made: {error.strerror}") from None

    def _screen(self, descriptor: int, colour: bool) -> LineOutput:
        terminal = os.isatty(descriptor)
        return LineOutput(
            lambda data: self._writer.put(descriptor, data),
            terminal=terminal,
            colour=colour and (terminal or self._far_terminal),
        )

    def connect(self, rank: int, descriptor: int, name: str) -> RankOutput:
        """Takes over one pipe of a rank.

        Args:
            rank: Whose it is.
            descriptor: The reading end; it is closed with the output.
            name: "stdout" or "stderr".

        Raises:
            ConfigError: The log file cannot be opened.
        """
        screen = self.out if name == "stdout" else self.err
        prefix = b""
        if self._prefix:
            prefix = f"\x1b[{colour_of(rank)}m[{rank}]\x1b[0m ".encode() if screen.colour else f"[{rank}] ".encode()
        os.set_blocking(descriptor, False)
        return RankOutput(descriptor, LineStream(screen, prefix), self._writer, self._open_log(rank, name))

    def log_path(self, rank: int, name: str) -> Path | None:
        """The log file of one output of a rank."""
        return None if self._log_dir is None else self._log_dir / f"rank-{rank}.{name}.log"

    def is_log(self, descriptor: int) -> Path | None:
        """The log file behind a descriptor; None if it is the launcher's own output."""
        return self._logs.get(descriptor)

    def _open_log(self, rank: int, name: str) -> int | None:
        path = self.log_path(rank, name)
        if path is None:
            return None
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"log file {str(path)!r} cannot be opened: {error.strerror}") from None
        self._logs[descriptor] = path
        return descriptor

    def close(self) -> None:
        """Closes the log files."""
        for descriptor in self._logs:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._logs.clear()


def _same_file(one: int, other: int) -> bool:
    a, b = os.fstat(one), os.fstat(other)
    return (a.st_dev, a.st_ino, a.st_rdev) == (b.st_dev, b.st_ino, b.st_rdev)
