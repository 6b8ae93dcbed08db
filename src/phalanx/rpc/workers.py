"""The threads of an agent. One of them, the mover, reads the links and runs short handlers itself.

Handing a call to another thread takes longer than most calls do. So the mover runs handlers in its own thread. While
there are calls, a watchdog checks once a millisecond if the mover has been inside one handler all that time: then it
makes another thread the mover. A handler that blocks on another rank gives the mover's part away by itself. So short
calls never change threads, and long ones run side by side, up to `limit`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from ..background_thread import BackgroundThread
from ..exception_text import describe

__all__ = ["ArrivedCall", "Task", "Workers", "current"]

logger = logging.getLogger("phalanx.rpc")

LONG = 1e-3
"""Seconds inside one handler after which the mover is replaced."""
TURN = 0.5e-3
"""Seconds for which queued handlers run one after another before the links are polled again."""
QUIET = 50
"""Checks without a new handler after which the watchdog sleeps."""
IDLE = 10.0
"""Seconds without work after which a thread ends, unless it is the mover."""
MOST = 4096
"""The most threads, which is many because blocked handlers do not count. More would mean calls in an endless circle."""

_MISTAKE = "an unexpected error while a remote call was served"

Task = Callable[[], None]


class _Current(threading.local):
    """The calling thread."""

    is_worker = False
    """Whether it is an agent's: code that waits in it must say so by `Workers.blocking`."""


current = _Current()


class ArrivedCall(Protocol):
    """A task that serves a call."""

    arrived_at: float

    def __call__(self) -> None:
        """Runs it."""


class Workers:
    """Threads that run tasks; one of them, the mover, also finds new ones.

    Args:
        limit: Tasks that run at the same time, not counting those that wait for a call of their own.
        poll: Moves bytes, and adds tasks. Called by the mover only; its argument says whether it may sleep. If it
            raises, another thread is the mover.
        wake_poll: Ends a sleep of `poll`. Called by any thread.
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
        self.mover_number = 0
        """The mover's thread identifier; 0 if there is none."""
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._running = 0
        self._turn: list[float] = []
        """When the mover entered the handler that it runs; empty if it runs none. Whoever takes this out decides: the
        mover that it goes on, once the handler has ended, or another that it is replaced."""
        self._begun = 0
        """Counts the handlers that movers have entered."""
        self._watchdog_sleeps = True
        self._watchdog_bell = threading.Event()
        self._stopping = False
        self._watchdog = BackgroundThread(self._watch, f"{name}-watch")

    def start(self) -> None:
        """Starts the first threads. From now on `poll` is called, which needs this object: it is not called before."""
        self._watchdog.start()
        with self._lock:
            self._start_thread()

    @property
    def ready(self) -> bool:
        """True if the mover has something else to do: a task may begin, or the threads are to end."""
        return self._stopping or (bool(self.tasks) and self._running < self._limit)

    @property
    def may_begin(self) -> bool:
        """True if the mover may run one more task."""
        return self._running < self._limit and not self._stopping

    @property
    def running(self) -> int:
        """Tasks that run now."""
        return self._running + len(self._turn)

    def is_mover(self) -> bool:
        """True in the thread that is the mover."""
        return self.mover_number == threading.get_ident()

    def add(self, task: Task) -> None:
        """Queues a task. May be called by any thread."""
        self.tasks.append(task)
        if not self.is_mover():
            self._wake()

    def add_as_mover(self, task: Task) -> None:
        """Queues a task. Called by the mover, which looks at the queue next and need not be woken."""
        self.tasks.append(task)

    def _wake(self) -> None:
        """Wakes a free thread, or the mover, for a task from another thread."""
        with self._lock:
            if self._idle and self._running < self._limit - 1:
                self._work.notify()
                return
        self._wake_poll()

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        """Surrounds code that may block. If the calling thread is a worker, it does not count meanwhile."""
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
        self._watchdog.join(timeout)
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, ends - time.monotonic()))

    # -- the threads ---------------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        """Starts a thread. Called with the lock held."""
        if len(self._threads) >= MOST or self._stopping:
            return
        thread = threading.Thread(target=self._thread_main, name=self._name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException:
            self._threads.discard(thread)  # else `stop` would wait for it
            raise

    def _wake_or_start_thread(self) -> None:
        """Gets a thread for a task or for the mover's part. Called with the lock held."""
        if self._idle:
            self._work.notify()
            return
        try:
            self._start_thread()
        except (RuntimeError, MemoryError) as error:  # the first of those that run now to be free does it
            logger.error("no more threads for remote calls, which have to wait for those that run: %s", describe(error))

    def _replace_mover(self) -> None:
        """Takes the mover's part from the thread that has it. Called with the lock held."""
        self._running += 1  # from now on its task counts like any other's; see `_move`
        self._mover = None
        self.mover_number = 0
        self._turn.clear()
        self._wake_or_start_thread()

    def _thread_main(self) -> None:
        me = threading.current_thread()
        current.is_worker = True
        try:
            while not self._stopping:
                task: Task | None = None
                with self._lock:
                    if self._stopping:  # set just now, while no thread slept here that could be woken
                        return
                    if self._mover is None:
                        self._mover = me
                        self.mover_number = threading.get_ident()
                    elif self.tasks and self._running < self._limit - 1:  # the mover runs one itself
                        task = self.tasks.popleft()
                        self._running += 1
                    else:
                        if self.tasks:
                            self._wake_poll()  # the mover may be free to run one now
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
                if self._mover is me:  # it was told to stop, or has failed: then nobody would read the links any more
                    self._mover = None
                    self.mover_number = 0
                    self._wake_or_start_thread()

    def _move(self, me: threading.Thread) -> None:
        """Polls and runs tasks until another thread is the mover.

        A task that the mover runs counts as running only once the mover is replaced.
        """
        tasks = self.tasks
        self._poll(False)  # what the mover before left to be sent
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
            if not self.run_as_mover(task, now):
                break
            if now - turned > TURN:
                self._poll(False)
                turned = now
        with self._lock:
            if self._mover is not me:
                self._running -= 1

    def run_as_mover(self, task: Task, now: float) -> bool:
        """Runs a task in the mover's thread; False if it took so long that another thread is the mover now."""
        self._begun += 1
        self._turn = turn = [now]  # a list of its own: by the time that this is over, another mover may have one
        if self._watchdog_sleeps:
            self._ring_watchdog()
        try:
            task()
        except BaseException:  # a task reports its own errors: this one is a mistake of ours
            logger.exception(_MISTAKE)
        try:
            turn.pop()
        except IndexError:  # this thread is being replaced
            with self._lock:
                return False
        return True

    def _ring_watchdog(self) -> None:
        self._watchdog_sleeps = False  # it is rung once, however long the watchdog takes to wake up
        self._watchdog_bell.set()

    def _run(self, task: Task) -> None:
        try:
            task()
        except BaseException:
            logger.exception(_MISTAKE)

    def _watch(self) -> None:
        seen = quiet = 0
        while not self._stopping:
            if quiet >= QUIET:
                self._watchdog_sleeps = True
                if self._begun == seen:  # else a handler was entered just now, and did not ring the bell
                    self._watchdog_bell.wait()
                self._watchdog_bell.clear()
                self._watchdog_sleeps = False
                quiet = 0
            time.sleep(LONG)
            turn, begun = self._turn, self._begun
            since = sum(turn)  # 0 if the handler has ended
            quiet = quiet + 1 if begun == seen and not since else 0
            seen = begun
            if since and time.monotonic() - since >= LONG:
                with self._lock, contextlib.suppress(IndexError):  # it has ended just now
                    turn.pop()
                    self._replace_mover()
