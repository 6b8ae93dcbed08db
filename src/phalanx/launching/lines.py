"""The output of the ranks as whole lines with the rank in front. No I/O: bytes in, bytes to a `put` function out.

A line is written in one piece, once it is complete. What stands without a line end for a while (a prompt, some dots)
is shown as far as it is. Should another rank write in between, its line starts a new row and the unfinished line is
written again, whole, when it goes on: nothing is ever torn.

A carriage return starts a line over, as progress bars do. On a terminal the row is redrawn; elsewhere, and while
another rank's line is the last one on the screen, the bar is shown every few seconds only, and when it is complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["LineOutput", "LineStream", "colour_of"]

PARTIAL_AFTER = 0.5
"""Seconds after which an unfinished line is shown."""
REDRAW = 0.1
"""Seconds between two states of a progress bar that owns the last row of a terminal."""
PROGRESS = 5.0
"""Seconds between two states of a progress bar elsewhere."""
MAX_LINE = 64 << 10
"""Bytes of an unfinished line that are kept; a longer one is written in pieces."""

_ERASE = b"\x1b[K"
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


def colour_of(rank: int) -> int:
    """The ANSI colour of a rank's prefix."""
    return _COLOURS[rank % len(_COLOURS)]


class LineOutput:
    """One output: a terminal, a pipe or a file. It knows whose unfinished line stands in the last row.

    Args:
        put: Takes bytes to be written.
        terminal: Whether rows can be redrawn and coloured.
    """

    def __init__(self, put: Callable[[bytes], None], *, terminal: bool, colour: bool) -> None:
        self._put = put
        self.terminal = terminal
        self.colour = colour
        self.owner: LineStream | None = None

    def write(self, data: bytes, owner: LineStream | None = None, *, continues: bool = False) -> None:
        """Writes.

        Args:
            data: Whole lines, or an unfinished one if `owner` is given.
            owner: Whose unfinished line this is.
            continues: The data goes on in the row that the owner's line stands in.
        """
        start = b"" if continues or self.owner is None else b"\n"
        self.owner = owner
        self._put(start + data)

    def say(self, text: str) -> None:
        """Writes lines of the launcher itself."""
        self.write(text.encode("utf-8", "backslashreplace") + b"\n")


def _visible(line: bytes) -> bytes:
    """The visible rest of a line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class LineStream:
    """One output of one rank on its way to a screen."""

    def __init__(self, screen: LineOutput, prefix: bytes) -> None:
        self._screen = screen
        self._prefix = prefix
        self._line = b""
        """The unfinished line. Of a progress bar, its last state."""
        self._shown = b""
        """The part that was shown; it stands in the screen's last row as long as this stream owns that row."""
        self._continues = False
        """The unfinished line is the rest of one that was too long."""
        self._bar = False
        self._began = 0.0
        self._shown_at = 0.0

    def feed(self, data: bytes, now: float) -> None:
        """Takes what the rank wrote."""
        head, newline, rest = data.rpartition(b"\n")
        if newline:
            self._complete(head)
            self._line, self._shown, self._bar, self._continues = b"", b"", False, False
        if not rest:
            return
        if not self._line:
            self._began = now
        self._line += rest
        if b"\r" in self._line:
            self._bar = True
            self._line = _visible(self._line) + (b"\r" if self._line.endswith(b"\r") else b"")
        if len(self._line) > MAX_LINE:
            self._show(self._line)
            self._line, self._shown, self._continues = b"", b"", True

    def due(self) -> float:
        """When `flush` should be called; infinity if nothing is waiting."""
        if not self._line or (self._owns and self._shown == _visible(self._line)):
            return math.inf
        redraws = self._screen.terminal or not self._bar
        if self._owns:
            return self._shown_at + (REDRAW if redraws else PROGRESS)
        if self._shown:
            return self._shown_at + PROGRESS
        first = PROGRESS if not redraws else REDRAW if self._bar else PARTIAL_AFTER
        return self._began + first

    def flush(self, now: float) -> None:
        """Shows an unfinished line."""
        self._shown_at = now
        self._show(_visible(self._line))

    def finish(self) -> None:
        """The rank writes no more: what is left is a line."""
        if self._line:
            self._complete(b"")
        elif self._owns:
            self._screen.write(b"")
        self._line = b""

    @property
    def _owns(self) -> bool:
        return self._screen.owner is self

    def _show(self, text: bytes) -> None:
        """Puts an unfinished line into the last row of the screen."""
        shown = self._shown if self._owns else b""
        if self._owns and text.startswith(shown):
            self._screen.write(text[len(shown) :], self, continues=True)
        elif self._owns and self._screen.terminal:
            self._screen.write(b"\r" + self._prefix + text + _ERASE, self, continues=True)
        else:
            self._screen.write(self._prefix + text, self)
        self._shown = text

    def _complete(self, head: bytes) -> None:
        """Writes whole lines; the first one may have begun before."""
        first, newline, others = head.partition(b"\n")
        text = self._line + first
        visible = _visible(text)
        if self._owns or self._continues:
            # The row is finished in place where that is possible, and written anew otherwise.
            self._show(visible)
            self._screen.write(b"\n", continues=True)
        elif visible or not self._bar:
            self._screen.write(self._prefix + visible + b"\n")
        if newline:
            if b"\r" in others:
                others = b"\n".join(map(_visible, others.split(b"\n")))
            self._screen.write(self._prefix + others.replace(b"\n", b"\n" + self._prefix) + b"\n")
