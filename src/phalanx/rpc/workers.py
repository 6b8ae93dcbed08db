"""The threads of an agent: one moves the bytes and runs what is called itself, as long as that does not take long.

To hand every call to another thread costs more than most calls take. So the mover runs handlers in its own thread. A
watchdog looks once a millisecond, while there are calls at all, whether the mover has been inside one handler all the
time: then it takes the mover's part from it and gives it to another thread. A handler that waits for another rank gives
the part away by itself. So short calls never change threads, and long ones run beside each other, up to `limit`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

__all__ = ["Task", "Workers"]

logger = logging.getLogger("phalanx.rpc")

LONG = 1e-3
"""Seconds inside one handler after which the mover is replaced."""
TURN = 0.5e-3
"""Seconds that queued handlers are run one after another without a look at what has come meanwhile."""
QUIET = 50
"""Looks without anything new after which the watchdog sleeps."""
IDLE = 10.0
"""Seconds without work after which a thread ends; the mover stays."""
MOST = 4096
"""Threads that may exist when handlers wait for calls of their own. More would be a circle of calls without end."""

Task = Callable[[], None]


class Workers:
    """Threads that run tasks, and one of them that finds new ones.

    Args:
        limit: Tasks that run at the same time; those that wait for a call of their own do not count.
        poll: Moves bytes, and adds tasks by `add`. Called by the mover only, with whether it may wait.
        wake_poll: Ends a wait of `poll`, from any thread.
    """

    def __init__(self, name: str, limit: int, poll: Callable[[bool], None], wake_poll: Callable[[], None]) -> None:
        self._name = name
        self._limit = limit
        self._poll = poll
        self._wake_poll = wake_poll
        self.tasks: deque[Task] = deque()
        """Tasks that have not begun."""
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._mover: threading.Thread | None = None
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._running = 0
        self._since = 0.0
        """When the mover began the handler that it is in; 0 if it is in none."""
        self._begun = 0
        """Handlers that movers have begun."""
        self._watchdog_sleeps = True
        self._watchdog_bell = threading.Event()
        self._stopping = False
        self._watchdog = threading.Thread(target=self._watch, name=f"{name}-watch", daemon=True)
        self._watchdog.start()
        with self._lock:
            self._start_thread()

    @property
    def ready(self) -> bool:
        """Whether the mover has something else to do than to move: a task may begin, or all is to end."""
        return self._stopping or (bool(self.tasks) and self._running < self._limit)

    @property
    def running(self) -> int:
        """Tasks that run now."""
        return self._running + (self._since > 0)

    @property
    def is_mover(self) -> bool:
        """Whether the calling thread moves the bytes."""
        return self._mover is threading.current_thread()

    def add(self, task: Task) -> None:
        """Queues a task. From any thread; the mover takes it up itself, or another thread does."""
        self.tasks.append(task)
        if not self.is_mover:
            self._wake()

    def add_as_mover(self, task: Task) -> None:
        """Queues a task that the mover has found: it will look at the queue next."""
        self.tasks.append(task)

    def _wake(self) -> None:
        """A task came from elsewhere: somebody who is free takes it."""
        with self._lock:
            if self._idle and self._running < self._limit - 1:
                self._work.notify()
                return
        self._wake_poll()

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        """Around something that the calling thread waits for, if it is one of these: others go on meanwhile."""
        me = threading.current_thread()
        if me not in self._threads:
            yield
            return
        with self._lock:
            if self._mover is me:
                self._replace_mover()
            elif self.tasks:
                self._wake_or_start_thread()
            self._running -= 1
        try:
            yield
        finally:
            with self._lock:
                self._running += 1

    def stop(self, timeout: float) -> None:
        """Ends the threads once they have finished what they run. Tasks that have not begun are dropped."""
        with self._lock:
            self._stopping = True
            self._work.notify_all()
        self._watchdog_bell.set()
        self._wake_poll()
        ends = time.monotonic() + timeout
        for thread in [self._watchdog, *self._threads]:
            if thread is not threading.current_thread():
                thread.join(max(0.0, ends - time.monotonic()))

    # -- the threads ---------------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        """Starts a thread. Called with the lock held."""
        if len(self._threads) >= MOST or self._stopping:
            return
        thread = threading.Thread(target=self._thread_main, name=self._name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _wake_or_start_thread(self) -> None:
        """Gets somebody for a task or for the mover's part. Called with the lock held."""
        if self._idle:
            self._work.notify()
        else:
            self._start_thread()

    def _replace_mover(self) -> None:
        """Takes the mover's part from the thread that has it. Called with the lock held."""
        self._running += 1  # from now on its task counts like any other's; see `_move`
        self._mover = None
        self._since = 0.0
        self._wake_or_start_thread()

    def _thread_main(self) -> None:
        me = threading.current_thread()
        try:
            while not self._stopping:
                task: Task | None = None
                with self._lock:
                    if self._stopping:  # said just now, when nobody slept here who could be woken
                        return
                    if self._mover is None:
                        self._mover = me
                    elif self.tasks and self._running < self._limit - 1:  # the mover runs one itself
                        task = self.tasks.popleft()
                        self._running += 1
                    else:
                        if self.tasks:
                            self._wake_poll()  # the mover may have a place for one now
                        self._idle += 1
                        woken = self._work.wait(IDLE)
                        self._idle -= 1
                        if not woken and self._mover is not None and not self.tasks:
                            return
                        continue
                if task is None:
                    self._move(me)
                else:
                    self._run(task)
                    with self._lock:
                        self._running -= 1
        finally:
            with self._lock:
                self._threads.discard(me)

    def _move(self, me: threading.Thread) -> None:
        """The mover's life, until another has its part. A task that it runs itself counts only once it is replaced."""
        tasks = self.tasks
        turned = time.monotonic()
        while self._mover is me and not self._stopping:
            if not tasks or self._running >= self._limit:
                self._poll(True)
                turned = time.monotonic()
                continue
            try:
                task = tasks.popleft()
            except IndexError:  # another thread took it
                continue
            now = time.monotonic()
            if not self.run_as_mover(task, me):
                break
            if now - turned > TURN:
                self._poll(False)
                turned = now
        with self._lock:
            if self._mover is not me:
                self._running -= 1

    def run_as_mover(self, task: Task, me: threading.Thread | None = None) -> bool:
        """Runs a task in the mover's thread; False if it took so long that another moves by now."""
        me = me or threading.current_thread()
        self._begun += 1
        self._since = time.monotonic()
        if self._watchdog_sleeps:
            self._watchdog_bell.set()
        self._run(task)
        with self._lock:  # the watchdog may be about to replace this thread
            if self._mover is not me:
                return False
            self._since = 0.0
        return True

    def _run(self, task: Task) -> None:
        try:
            task()
        except BaseException:  # a task answers its own errors: this is one of ours
            logger.exception("a remote call could not be answered")

    def _watch(self) -> None:
        seen = quiet = 0
        while not self._stopping:
            if quiet >= QUIET:
                self._watchdog_sleeps = True
                if self._begun == seen:  # else a handler began just now, and did not ring
                    self._watchdog_bell.wait()
                self._watchdog_bell.clear()
                self._watchdog_sleeps = False
                quiet = 0
            time.sleep(LONG)
            since, begun = self._since, self._begun
            quiet = quiet + 1 if begun == seen and not since else 0
            seen = begun
            if since and time.monotonic() - since >= LONG:
                with self._lock:
                    if self._since == since:
                        self._replace_mover()
