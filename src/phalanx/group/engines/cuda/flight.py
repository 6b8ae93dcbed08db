"""The right to write to the memory of all ranks: held by the executor while its kernel may run, and taken away for good
by a rank that gives an operation up.

After a call has raised on a rank, nobody may write to that rank's memory any more. But a kernel cannot be called back.
So a rank that gives up waits until no kernel runs, and sees to it that none begins. Both sides meet in a lock on a file
that all ranks have open: the operating system releases it when its holder dies, and only after the GPU's driver has
taken down what the dead process had running.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time

from ....errors import PhalanxError
from ....transports.shared_memory import NONCE_BYTES, make_memory, open_memory

__all__ = ["Flight"]

logger = logging.getLogger("phalanx.group")

SIZE = 4096
PATIENCE = 1.0
"""Seconds that a rank waits for a kernel to end. It takes some milliseconds at most, unless its process is stopped."""
PAUSE = 200e-6
_WORD = NONCE_BYTES
"""Where the byte is that says whether a rank has given up."""


class Flight:
    """One rank's hold on the file. The descriptor is open as long as the object is used.

    Args:
        fd: Of this process's own; `close` closes it.
    """

    def __init__(self, fd: int, nonce: bytes = b"") -> None:
        self.fd = fd
        self.nonce = nonce

    @classmethod
    def make(cls) -> Flight:
        """The file, for the rank that executes.

        Raises:
            OSError: The system gives none.
        """
        return cls(*make_memory("phalanx-flight", SIZE))

    @classmethod
    def open(cls, pid: int, number: int, nonce: bytes) -> Flight:
        """The same file, for the others.

        Raises:
            OSError: It cannot be opened.
        """
        return cls(open_memory(pid, number, SIZE, nonce))

    def begin(self) -> None:
        """Takes the right, before a kernel is launched.

        Raises:
            PhalanxError: A rank has given up an operation.
        """
        fcntl.lockf(self.fd, fcntl.LOCK_EX)
        if os.pread(self.fd, 1, _WORD) != b"\0":
            self.end()
            raise PhalanxError("another rank has given up a collective of this group")

    def end(self) -> None:
        """Leaves it, when the kernel has ended."""
        fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def give_up(self) -> None:
        """Returns once no kernel can write to this rank's memory any more, now or later."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > end:
                    logger.warning(
                        "the rank that executes collectives on this GPU is stopped in the middle of one: if it goes "
                        "on, it may write to arrays of collectives that have failed here"
                    )
                    break
            time.sleep(PAUSE)
        os.pwrite(self.fd, b"\1", _WORD)
        with contextlib.suppress(OSError):
            fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Closes the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
