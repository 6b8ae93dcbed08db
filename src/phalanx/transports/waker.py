"""Wakes a thread that sleeps in `poll`. Each wait has a descriptor, which its thread keeps for its next wait."""

from __future__ import annotations

import contextlib
import os
import threading

from ..operating_system import wake_pipe

__all__ = ["Waker"]

_local = threading.local()


def _spare() -> list[Waker]:
    """The calling thread's wakers that are free."""
    spare: list[Waker] | None = getattr(_local, "spare", None)
    if spare is None:
        spare = _local.spare = []
    return spare


class Waker:
    """Belongs to one wait. `set` from anywhere makes `fd` readable until its owner calls `clear`."""

    __slots__ = ("_pid", "_write", "fd", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._pid = os.getpid()
        self.fd, self._write = wake_pipe()

    @classmethod
    def take(cls) -> Waker:
        """A waker that is free. A callback may wait in the middle of another wait of its thread, and needs its own."""
        spare = _spare()
        while spare:
            waker = spare.pop()
            if waker._pid == os.getpid():  # a forked child shares the parent's descriptors
                return waker
        return cls()

    def give_back(self) -> None:
        """The wait is over; the calling thread may use it for the next. All are closed when the thread ends."""
        _spare().append(self)

    def set(self) -> None:
        """Wakes the owner, now or at its next wait.

        Does nothing in a forked child: its descriptor is the parent's, which would not know where the byte came from.
        """
        if self._pid != os.getpid():
            return
        # Before the byte: the owner may be awake and look for it before this thread runs again.
        self.is_set = True
        # A full counter or pipe is set already; a closed one belongs to a thread that has ended.
        with contextlib.suppress(OSError):
            os.write(self._write, b"\1\0\0\0\0\0\0\0")
        # And after it: a `clear` in between has forgotten the flag but not the byte, and the owner could sleep no more.
        self.is_set = True

    def clear(self) -> None:
        """Undoes every `set` so far."""
        if self.is_set:
            self.is_set = False
            with contextlib.suppress(BlockingIOError):
                os.read(self.fd, 4096)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.fd)
            if self._write != self.fd:
                os.close(self._write)
