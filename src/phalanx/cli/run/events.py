"""Events from outside the launcher's loop: signals, and mail from other threads. Both wake it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from .world import WorldEnd

if TYPE_CHECKING:
    from phalanx.wire.control import Note

__all__ = ["LauncherMailbox", "MailHandler", "Signals", "logs_to"]


class LauncherMailbox:
    """Takes messages from any thread; the loop polls `descriptor` and empties it."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._write, False)
        self.ends: deque[WorldEnd] = deque()
        self.changes: deque[Note] = deque()
        self.notes: deque[str] = deque()

    @property
    def alarm(self) -> int:
        """The descriptor that wakes the loop when a byte is written to it."""
        return self._write

    def wake(self) -> None:
        """Wakes the loop."""
        with contextlib.suppress(OSError):  # full: the loop will wake anyway; closed: the loop has ended
            os.write(self._write, b"\0")

    def world_ended(self, end: WorldEnd) -> None:
        """Tells the loop that the world has ended."""
        self.ends.append(end)
        self.wake()

    def world_changed(self, note: Note) -> None:
        """Tells the loop of a change of an elastic world."""
        self.changes.append(note)
        self.wake()

    def note(self, text: str) -> None:
        """Gives the loop a line to print."""
        self.notes.append(text)
        self.wake()

    def clear(self) -> None:
        """Takes the bytes that woke the loop."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.descriptor, 4096):
                pass

    def close(self) -> None:
        """Closes the pipe."""
        writing, self._write = self._write, -1  # a late thread must not write into a descriptor that was opened since
        os.close(writing)
        os.close(self.descriptor)


class MailHandler(logging.Handler):
    """Brings log lines of other threads to the loop, so that they never tear a rank's line."""

    def __init__(self, mailbox: LauncherMailbox) -> None:
        super().__init__()
        self._mailbox = mailbox
        self.setFormatter(logging.Formatter("phalanx: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Posts one line."""
        self._mailbox.note(self.format(record))


@contextlib.contextmanager
def logs_to(mailbox: LauncherMailbox) -> Iterator[None]:
    """Has the loop print what Phalanx logs in this process."""
    logger = logging.getLogger("phalanx")
    handler, propagate = MailHandler(mailbox), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


class Signals:
    """The signals that the launcher acts on, as they arrive."""

    ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)

    def __init__(self) -> None:
        self.arrived: deque[int] = deque()

    @property
    def told_to_end(self) -> bool:
        """True if a signal has arrived that ends the job, and was not taken yet."""
        return any(number in self.ENDING for number in self.arrived)

    @classmethod
    @contextlib.contextmanager
    def caught(cls, mailbox: LauncherMailbox) -> Iterator[Signals]:
        """Catches the signals and wakes the loop; puts the former handlers back at the end."""
        signals = cls()

        def arrive(number: int, frame: FrameType | None) -> None:
            if number != signal.SIGCHLD:
                signals.arrived.append(number)

        wakeup = signal.set_wakeup_fd(mailbox.alarm, warn_on_full_buffer=False)
        former = {}
        for number in (*cls.ENDING, *cls.FORWARDED, signal.SIGCHLD):
            # `nohup phalanx run …` asked that a lost terminal should not matter.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                former[number] = signal.signal(number, arrive)
        try:
            yield signals
        finally:
            for number, handler in former.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(wakeup)
