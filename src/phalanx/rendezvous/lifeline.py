"""A rank's second connection to the directory, by which its death is known at once.

A process that is killed gives back its memory, and what it has on a GPU, before its connections are closed: with many
gigabytes, seconds before. This one is held by a thread that has nothing else open; cpp/phalanx/lifeline.hpp says why it
or the control connection then ends at once. Without the core, or where the kernel does not give a thread descriptors of
its own, a rank does without: the end of its control connection says the same, later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from .._native import core
from ..background_thread import BackgroundThread
from ..errors import PhalanxError
from ..transports.stream import Stream

if TYPE_CHECKING:
    from .._core import Lifeline as HeldConnection

__all__ = ["Lifeline"]

logger = logging.getLogger("phalanx.rendezvous")

AFTER = 0.25
"""Seconds after which a world is worth one. A rank that is soon done has little memory to give back."""


PATIENCE = 1.0
"""Seconds that a connection may still take when the world is closed: the directory would wonder why it broke."""


class _Stopped(Exception):
    """The connection is not wanted any more."""


class Lifeline:
    """Makes the connection in a thread of its own, a little later, and holds it until it is closed.

    Args:
        connect: Makes it; calls its argument meanwhile, which may raise.
    """

    def __init__(self, connect: Callable[[Callable[[], None]], Stream]) -> None:
        self._connect = connect
        self._closing = threading.Event()
        self._stop = threading.Event()
        self._held: HeldConnection | None = None
        self._thread = BackgroundThread(self._run, "phalanx-lifeline")

    def start(self) -> Lifeline:
        """Begins; returns this object."""
        if core is not None:
            self._thread.start()
        return self

    def close(self) -> None:
        """Says that this rank ends its connections on purpose. May be called twice, and in a forked child."""
        self._closing.set()
        if self._thread.is_started:
            self._thread.join(PATIENCE)
            self._stop.set()
            self._thread.join()
        if self._held is not None:
            self._held.let_go()

    def _run(self) -> None:
        if self._closing.wait(AFTER):
            return
        try:
            stream = self._connect(self._check)
        except _Stopped:
            return
        except (PhalanxError, OSError) as error:  # a connection that ends is the latter, too
            logger.debug("no lifeline to the directory: %s", error)
            return
        assert core is not None
        try:
            self._held = core.Lifeline(stream.fd)
        except OSError as error:
            logger.debug("no thread has a lifeline of its own: %s", error)
        finally:
            stream.abandon()  # only the thread that holds it may have it open

    def _check(self) -> None:
        if self._stop.is_set():
            raise _Stopped
