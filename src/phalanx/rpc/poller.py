"""What an agent runs on: the links that its own thread moves, the threads that run handlers, and alarms."""

from __future__ import annotations

import heapq
import itertools
import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from .._native import core
from ..transports.waker import Waker
from .link import Link
from .workers import Workers

if TYPE_CHECKING:
    from .._core import Lookout

__all__ = ["Service"]

logger = logging.getLogger("phalanx.rpc")

LONGEST = 3600.0
"""Seconds that the mover sleeps at most."""


class Service:
    """Moves the links that nobody waits on, and runs tasks.

    Args:
        workers: Tasks that run at the same time.
        look: Seconds that the mover looks for bytes before it sleeps.
        held_back: Whether a link's requests shall wait: then it is not read.
    """

    def __init__(self, name: str, workers: int, look: float, held_back: Callable[[Link], bool]) -> None:
        self._look = look
        self._held_back = held_back
        self._links: dict[Link, None] = {}
        self._lock = threading.RLock()
        self._changed = True
        self._read: list[Link] = []
        """The links that are read, as `_lookout` knows them."""
        self._held = False
        """Whether some are not."""
        self._lookout: Lookout | None = None
        self._waker = Waker()
        self._asleep = False
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._later: deque[Callable[[], None]] = deque()
        self._workers = Workers(name, workers, self._turn, self.interrupt)
        self.add = self._workers.add
        self.add_by_mover = self._workers.add_by_mover
        self.waits = self._workers.waits

    # -- from any thread -----------------------------------------------------------------------------------------------

    def watch(self, link: Link) -> None:
        """Moves this link from now on."""
        with self._lock:
            if link not in self._links and link.ended is None:
                self._links[link] = None
                self._changed = True
        self.interrupt()

    def forget(self, link: Link) -> None:
        """Moves this link no longer."""
        with self._lock:
            if self._links.pop(link, self) is None:
                self._changed = True
        self.interrupt()

    def watch_anew(self) -> None:
        """A link has got another stream."""
        self._changed = True

    def later(self, action: Callable[[], None]) -> None:
        """Runs something in the mover's thread. Takes no locks: for finalizers, which may come at any point."""
        self._later.append(action)
        self._waker.set()

    def interrupt(self) -> None:
        """Has the mover look at what has changed."""
        if self._asleep:
            self._waker.set()

    def call_at(self, moment: float, alarm: Callable[[], None]) -> None:
        """Runs something quick in the mover's thread once that time has come."""
        with self._lock:
            first = not self._alarms or moment < self._alarms[0][0]
            heapq.heappush(self._alarms, (moment, next(self._order), alarm))
        if first:
            self.interrupt()

    @property
    def running(self) -> int:
        """Tasks that run now."""
        return self._workers.running

    @property
    def waiting(self) -> int:
        """Tasks that have not begun."""
        return self._workers.waiting

    def stop(self, timeout: float) -> None:
        """Ends the threads; what waits is dropped."""
        self._workers.stop(timeout)

    # -- the mover -----------------------------------------------------------------------------------------------------

    def _turn(self, wait: bool) -> None:
        while self._later:
            if not self._workers.run_here(self._later.popleft()):
                return
        if self._changed or self._held:
            self._rebuild()
        if wait:
            self._waker.clear()
            # From here on whoever changes something sets the waker. So it is looked at afterwards, and not before.
            self._asleep = True
            try:
                self._wait()
            finally:
                self._asleep = False
        else:
            for link in self._found(0.0):
                self._move(link)
        if self._alarms and self._alarms[0][0] <= time.monotonic():
            self._ring_alarms()

    def _wait(self) -> None:
        """Moves what there is, or waits for something."""
        if self._changed or self._later or self._workers.ready:
            return
        if len(self._read) == 1 and not self._held and self._read[0].exclusive:
            # The common case: it looks and sleeps by itself.
            self._move(self._read[0], self._look, self._seconds())
            return
        writing = [link for link in list(self._links) if link.queued]
        for link in writing:
            link.try_push()  # to the point where there is no room: only then will a poll tell of it
        found = self._found(0.0 if writing else self._look)
        if found:
            for link in found:
                self._move(link)
        else:
            for link in self._sleep(writing):
                self._move(link, polled=True)

    def _move(self, link: Link, look: float = 0.0, seconds: float = 0.0, *, polled: bool = False) -> None:
        if not link.moving.acquire(blocking=False):
            # Somebody who waits for an answer moves it, and gives it back when it has come.
            link.handed_back = True
            self.forget(link)
            if not link.moving.locked():
                self.watch(link)
            return
        try:
            if polled:
                link.pipe.woken()
            link.move(look, seconds, self._waker.fd)
        except Exception as error:  # of ours: the other links still have to be served
            logger.exception("the calls of rank %d cannot be served", link.peer)
            link.over(error)
        finally:
            link.let_go()
        if link.ended is not None or not link.watched:
            self.forget(link)
        elif link.exclusive and self._held_back(link):
            self._changed = True

    def _rebuild(self) -> None:
        with self._lock:
            self._changed = False
            links = list(self._links)
        self._read = [link for link in links if not self._held_back(link)]
        self._held = len(self._read) < len(links)
        pipes = [link.pipe.native for link in self._read]
        self._lookout = None
        if core is not None and None not in pipes:
            self._lookout = core.Lookout(pipes)

    def _found(self, look: float) -> list[Link]:
        """The links that have something to read now; looks for it for so many seconds."""
        if self._lookout is None:
            return self._read if not look else []
        return [self._read[place] for place in self._lookout.look(look)]

    def _sleep(self, writing: list[Link]) -> list[Link]:
        """Waits for something to read, or room to write; returns the links that have it."""
        seconds = self._seconds()
        if self._lookout is not None:
            writers = [link.stream.fd for link in writing if link.stream.write_events == select.POLLOUT]
            found = [self._read[place] for place in self._lookout.sleep(seconds, self._waker.fd, writers)]
            return found or writing
        events: dict[int, int] = {}
        by_fd: dict[int, Link] = {}
        found = [link for link in self._read if not link.pipe.may_sleep()]
        for link in self._read:
            events[link.stream.fd] = link.stream.read_events
            by_fd[link.stream.fd] = link
        for link in writing:
            events[link.stream.fd] = events.get(link.stream.fd, 0) | link.stream.write_events
            by_fd[link.stream.fd] = link
        poller = select.poll()
        poller.register(self._waker.fd, select.POLLIN)
        for fd, wanted in events.items():
            if fd >= 0:
                poller.register(fd, wanted)
        polled = [by_fd[fd] for fd, _ in poller.poll(0 if found else seconds * 1e3) if fd in by_fd]
        return found + [link for link in polled if link not in found]

    def _seconds(self) -> float:
        """How long the mover may sleep."""
        seconds = max(0.0, self._alarms[0][0] - time.monotonic()) if self._alarms else LONGEST
        return min(seconds, 1e-3) if self._held else seconds  # what held links back may end without a word

    def _ring_alarms(self) -> None:
        now = time.monotonic()
        while True:
            with self._lock:
                if not self._alarms or self._alarms[0][0] > now:
                    return
                alarm = heapq.heappop(self._alarms)[2]
            alarm()
