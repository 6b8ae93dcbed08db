"""Operations of a process group stand in line. This is what the line and an operation know of each other."""

from __future__ import annotations

from typing import Protocol

__all__ = ["InLine", "Line"]


class InLine(Protocol):
    """An operation that stands in line."""

    @property
    def begun(self) -> bool:
        """True once the operation has started."""

    @property
    def has_callbacks(self) -> bool:
        """Whether `call_back` has something to do."""

    def run(self) -> None:
        """Does the operation, or begins it, and keeps its error. The line calls this once, in the operation's turn.

        Raises only what a signal handler has raised, of an operation that has not begun: then it is called again.
        """

    def call_back(self) -> None:
        """Runs callbacks that wait for the operation's end. They may issue operations, so its turn is over by then."""


class Line(Protocol):
    """A line of operations, which run in the order in which they joined it."""

    def hurry(self) -> None:
        """Wakes the line's thread if there is work for it. For callers that cannot run operations themselves."""

    def drive(self, operation: InLine) -> None:
        """Runs the operations in line up to this one, in the caller's thread."""

    def leave(self, operation: InLine) -> bool:
        """Takes an operation out of the line; False if it has begun."""
