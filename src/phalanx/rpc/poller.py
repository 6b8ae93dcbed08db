"""The agent's own thread: moves the links on which no other thread waits, runs handlers, and rings alarms.

`link` explains what a mover is; `workers` explains how several threads take turns to be the agent's own.
"""

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
from ..errors import ChannelClosed
from ..exception_text import describe
from ..transports.waker import Waker
from .link import CallLink
from .workers import Workers

if TYPE_CHECKING:
    from .._core import Lookout

__all__ = ["LinkPoller"]

logger = logging.getLogger("phalanx.rpc")

LONGEST = 3600.0
"""The longest sleep, in seconds."""


class LinkPoller:
    """Moves the links on which no other thread waits, and runs tasks.

    Args:
        workers: Tasks that run at the same time.
        spin: Seconds to look for bytes again and again before sleeping.
    """

    def __init__(self, name: str, workers: int, spin: float) -> None:
        self._spin = spin
        self._links: dict[CallLink, None] = {}
        self._lock = threading.RLock()
        self._changed = True
        self._polled: list[CallLink] = []
        """The links that are read, in the order of `_lookout`."""
        self._some_paused = False
        """Whether some links are paused, and so not read."""
        self._lookout: Lookout | None = None
        self._waker = Waker()
        self._asleep = False
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.holding: dict[CallLink, None] = {}
        """Links that have answers to send which were held."""
        self._soon: deque[Callable[[], None]] = deque()
        self._workers = Workers(name, workers, self._poll_once, self.wake)
        self.tasks = self._workers.tasks
        self.add = self._workers.add
        self.add_as_mover = self._workers.add_as_mover
        self.blocking = self._workers.blocking
        self._workers.start()

    # -- from any thread -----------------------------------------------------------------------------------------------

    def watch(self, link: CallLink) -> None:
        """Moves `link` from now on."""
        with self._lock:
            if link not in self._links and link.ended is None:
                self._links[link] = None
                self._changed = True
        self.wake()

    def forget(self, link: CallLink) -> None:
        """Moves `link` no longer."""
        with self._lock:
            if self._links.pop(link, self) is None:
                self._changed = True
        self.wake()

    def reload_streams(self) -> None:
        """Notes that a link has another stream."""
        self._changed = True

    def run_soon(self, action: Callable[[], None]) -> None:
        """Runs `action` in the agent's thread. Takes no locks, so finalizers may call it at any point."""
        self._soon.append(action)
        self._waker.set()

    def wake(self) -> None:
        """Ends a sleep of the agent's thread, because something has changed."""
        if self._asleep:
            self._waker.set()

    def call_at(self, moment: float, alarm: Callable[[], None]) -> None:
        """Runs `alarm`, which must be short, in the agent's thread at that moment."""
        with self._lock:
            first = not self._alarms or moment < self._alarms[0][0]
            heapq.heappush(self._alarms, (moment, next(self._order), alarm))
        if first:
            self.wake()

    # -- answers that are sent together --------------------------------------------------------------------------------

    def hold(self, link: CallLink, kind: int, call: int, head: bytes) -> bool:
        """Keeps an answer back, to be sent with the next one; False if it cannot be, or there is no task after this.

        The calling thread sends the answers before it polls, or runs what may take long. If a task takes long all the
        same, the thread that becomes the mover sends them.
        """
        if not self.tasks:
            return False
        workers, me = self._workers, threading.get_ident()
        if workers.mover_number != me or not link.pipe.hold(kind, call, head, link.most_held):
            return False
        self.holding[link] = None
        if workers.mover_number != me:  # any more: the new one may have looked already
            self.send_held()
        return True

    def send_held(self) -> None:
        """Sends the answers that wait."""
        while self.holding:
            try:
                link, _ = self.holding.popitem()
            except KeyError:  # another thread took it
                return
            link.send_held()

    @property
    def running(self) -> int:
        """The number of tasks that run now."""
        return self._workers.running

    @property
    def waiting(self) -> int:
        """The number of tasks that have not begun."""
        return len(self._workers.tasks)

    def stop(self, timeout: float) -> None:
        """Ends the threads. Tasks that have not begun are dropped."""
        self._workers.stop(timeout)

    # -- the agent's thread --------------------------------------------------------------------------------------------

    def _poll_once(self, wait: bool) -> None:
        try:
            self._look(wait)
        except Exception as error:  # a mistake of ours, or no memory: none of these links may wait for what is lost now
            logger.critical("an unexpected error of the agent's thread ends its connections", exc_info=error)
            why = f"an unexpected error of the agent's thread: {describe(error)}"
            for link in list(self._links):
                link.end(ChannelClosed(link.peer, why))

    def _look(self, wait: bool) -> None:
        """Does what there is to do. With `wait`, sleeps until there is something."""
        if self.holding:
            self.send_held()
        while self._soon:
            if not self._workers.run_as_mover(self._soon.popleft(), time.monotonic()):
                return
        if self._changed or self._some_paused:
            self._rebuild()
        if wait:
            if self._waker.is_set:
                self._waker.clear()
            alone = self._polled[0] if len(self._polled) == 1 and not self._some_paused else None
            if alone is not None and alone.only_poller_moves and not self._serve_alone(alone):
                return
            # From here on a thread that changes something sets the waker. So look for changes after this, not before.
            self._asleep = True
            try:
                self._wait()
            finally:
                self._asleep = False
        else:
            for link in self._find_readable(0.0):
                self._move(link)
        if self._alarms and self._alarms[0][0] <= time.monotonic():
            self._run_alarms()

    def _serve_alone(self, link: CallLink) -> bool:
        """Runs the calls of the only link as they come, one by one; False if another thread is the mover now.

        Returns as soon as there is anything else to do.
        """
        workers, tasks, waker, spin, take_call = self._workers, self.tasks, self._waker, self._spin, link.take_call
        while True:
            self._asleep = True  # as in `_look`
            try:
                if self._changed or self._soon or tasks or waker.is_set:
                    return True
                call = take_call(spin, self._longest_sleep() if self._alarms else LONGEST, waker.fd)
            finally:
                self._asleep = False
            if call is None:
                if link.is_paused:  # only ever set here: another thread may do so at the same time
                    self._changed = True
                return True
            if tasks or not workers.may_begin:  # others have come meanwhile, or go on
                self.add_as_mover(call)
                return True
            if not workers.run_as_mover(call, call.arrived_at):
                return False
            if self._alarms and self._alarms[0][0] <= time.monotonic():
                return True

    def _wait(self) -> None:
        """Moves the links that have something to read, or sleeps until one has."""
        if self._changed or self._soon or self._workers.ready:
            return
        if len(self._polled) == 1 and not self._some_paused and self._polled[0].only_poller_moves:
            # The common case: the link spins and sleeps by itself.
            self._move(self._polled[0], self._spin, self._longest_sleep())
            return
        writing = [link for link in list(self._links) if link.queued_bytes]
        for link in writing:
            link.try_write_queued()  # until there is no more room: only then does poll tell when there is some
        found: list[CallLink] = []
        if self._lookout is not None:  # without one, only `_sleep` can tell; and it does not sleep on what is there
            found = self._find_readable(self._spin if self._polled and not writing else 0.0)
        if found:
            for link in found:
                self._move(link)
        else:
            for link in self._sleep(writing):
                self._move(link, polled=True)

    def _move(self, link: CallLink, spin: float = 0.0, seconds: float = 0.0, *, polled: bool = False) -> None:
        if not link.mover_lock.acquire(blocking=False):
            # A thread that waits for an answer moves it, and hands it over when the answer has come.
            link.return_to_poller = True
            self.forget(link)
            if not link.mover_lock.locked():
                self.watch(link)
            return
        try:
            if polled:
                link.pipe.woken()
            link.move(spin, seconds, self._waker.fd)
        except Exception as error:  # a mistake of ours: the other links must still be served
            logger.exception("an unexpected error ended the connection to rank %d", link.peer)
            link.end(error)
        finally:
            link.stop_moving()
        if not _needs(link):
            self.forget(link)
            if _needs(link):  # again, or since then: whoever asked just now found it watched
                self.watch(link)
        elif link.only_poller_moves and link.is_paused:
            self._changed = True

    def _rebuild(self) -> None:
        with self._lock:
            self._changed = False
            links = list(self._links)
        self._polled = [link for link in links if not link.is_paused]
        self._some_paused = len(self._polled) < len(links)
        pipes = [link.pipe.native for link in self._polled]
        self._lookout = None
        if core is not None and None not in pipes:
            self._lookout = core.Lookout(pipes)

    def _find_readable(self, spin: float) -> list[CallLink]:
        """The links that have something to read, or may have; spins for that many seconds."""
        if self._lookout is None:
            return self._polled
        return [self._polled[place] for place in self._lookout.look(spin)]

    def _sleep(self, writing: list[CallLink]) -> list[CallLink]:
        """Sleeps until there is something to read, or room to write; returns those links."""
        seconds = self._longest_sleep()
        if self._lookout is not None:
            writers = [link.stream.fd for link in writing if link.stream.write_events == select.POLLOUT]
            found = [self._polled[place] for place in self._lookout.sleep(seconds, self._waker.fd, writers)]
            return found or writing
        events: dict[int, int] = {}
        by_fd: dict[int, CallLink] = {}
        found = [link for link in self._polled if not link.pipe.may_sleep()]
        for link in self._polled:
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

    def _longest_sleep(self) -> float:
        """Seconds until the next alarm; very few while links are paused."""
        seconds = max(0.0, self._alarms[0][0] - time.monotonic()) if self._alarms else LONGEST
        return min(seconds, 1e-3) if self._some_paused else seconds  # the reason for a pause may end without a sign

    def _run_alarms(self) -> None:
        now = time.monotonic()
        while True:
            with self._lock:
                if not self._alarms or self._alarms[0][0] > now:
                    return
                alarm = heapq.heappop(self._alarms)[2]
            alarm()


def _needs(link: CallLink) -> bool:
    """Whether a link needs the agent's thread: to read, or to write what waits."""
    return link.ended is None and (link.needs_poller or link.queued_bytes > 0)
