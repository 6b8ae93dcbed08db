"""The output of ranks, shown where the calling process prints: a terminal, a cell of a notebook, a test's capture."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

from .lines import LineOutput, LineStream, colour_of

__all__ = ["RankPipe", "ShownOutput"]

READ_SIZE = 64 << 10
DRAIN_LIMIT = 4 << 20
"""Bytes that are read from a pipe after the end of its rank. It holds less: only a process that escaped writes more."""


class RankPipe:
    """One output of one rank: the reading end of a pipe.

    Args:
        stream: Where its lines go.
    """

    def __init__(self, stream: LineStream) -> None:
        self.stream = stream
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)

    def fileno(self) -> int:
        return self._reading

    def read(self) -> int:
        """Reads once; returns how many bytes, 0 if there is nothing."""
        try:
            data = os.read(self._reading, READ_SIZE)
        except BlockingIOError:
            return 0
        if data:
            self.stream.feed(data, time.monotonic())
        return len(data)

    def drain(self) -> None:
        """Reads what is left, and ends the last line."""
        left = DRAIN_LIMIT
        while left > 0 and (count := self.read()):
            left -= count
        self.stream.finish()

    def close(self) -> None:
        for end in (self._reading, self.writing):
            with contextlib.suppress(OSError):
                os.close(end)


class ShownOutput:
    """The outputs of all ranks of one run.

    It writes to `sys.stdout` and `sys.stderr` as they are now, from the thread that calls it.

    Args:
        prefix: Lines have the rank in front.
        colour: Colour is allowed on a terminal.
    """

    def __init__(self, ranks: int, *, prefix: bool, colour: bool) -> None:
        out = _Screen(sys.stdout, colour)
        # A terminal that shows both must know whose line stands in its last row.
        err = out if _is_terminal(sys.stdout) and _is_terminal(sys.stderr) else _Screen(sys.stderr, colour)
        self._screens = (out, err)
        self._pipes: list[tuple[RankPipe, RankPipe]] = []
        for rank in range(ranks):
            pair = [RankPipe(LineStream(screen, _prefix(screen, rank) if prefix else b"")) for screen in (out, err)]
            self._pipes.append((pair[0], pair[1]))

    def descriptors(self, rank: int) -> list[int]:
        """The standard output and error of a rank."""
        return [pipe.writing for pipe in self._pipes[rank]]

    def pipes(self) -> Iterable[RankPipe]:
        """All of them."""
        return [pipe for pair in self._pipes for pipe in pair]

    def started(self, rank: int) -> None:
        """The rank has its ends of the pipes."""
        for pipe in self._pipes[rank]:
            os.close(pipe.writing)
            pipe.writing = -1

    def show_unfinished(self) -> None:
        """Shows lines that have stood without an end for a while."""
        now = time.monotonic()
        for pipe in self.pipes():
            if pipe.stream.due() <= now:
                pipe.stream.flush(now)

    def close(self) -> None:
        """Shows what is left."""
        try:
            for pipe in self.pipes():
                pipe.drain()
        finally:
            for pipe in self.pipes():
                pipe.close()


class _Screen(LineOutput):
    def __init__(self, stream: TextIO | None, colour: bool) -> None:
        terminal = _is_terminal(stream)
        super().__init__(self._write, terminal=terminal, colour=colour and terminal)
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode

    def _write(self, data: bytes) -> None:
        if self._stream is None:  # pythonw, a daemon
            return
        text = self._decode(data)
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self._stream.flush()


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def _prefix(screen: LineOutput, rank: int) -> bytes:
    return f"\x1b[{colour_of(rank)}m[{rank}]\x1b[0m ".encode() if screen.colour else f"[{rank}] ".encode()
