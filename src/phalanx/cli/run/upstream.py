"""The controller of a job on several hosts, as the launcher of one of them sees it."""

from __future__ import annotations

from typing import Protocol

from phalanx.launching.lines import LineOutput

from .events import LauncherMailbox, Signals
from .verdict import Verdict
from .writer import OutputWriter

__all__ = ["Upstream"]


class Upstream(Protocol):
    """Whom a launcher tells how its part of the job ends, if not a person, and who may tell it to end."""

    colour: bool
    """The lines end up on a terminal that shows colours."""

    def attach(self, screen: LineOutput, signals: Signals, mailbox: LauncherMailbox, writer: OutputWriter) -> None:
        """Begins: words go to `screen` from now on, pictures to `writer`, and signals from afar to `signals`."""

    @property
    def busy(self) -> bool:
        """True while more waits to be handed over than should."""

    def show(self, what: str, data: bytes) -> None:
        """Hands over what is to be shown there. Called in any thread.

        Args:
            what: `picture`, `page` or `trace`.
            data: The picture or the contents of the page as JSON, or a piece of the trace.
        """

    def ending(self, why: str) -> None:
        """The ranks are being ended."""

    def concluded(self, verdict: Verdict) -> None:
        """All is over."""
