"""The thread in which coroutine handlers run. It is started for the first one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from ..background_thread import BackgroundThread
from .context import CallContext

__all__ = ["EventLoop", "soon"]


def soon(loop: asyncio.AbstractEventLoop, action: Callable[[], object]) -> None:
    """Runs `action` in a loop that may belong to another thread, unless the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(action)


class EventLoop:
    """Runs coroutines, any number of them at once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: BackgroundThread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.under_way = 0
        """Coroutines that have not ended."""

    def run(self, coroutine: Coroutine[Any, Any, None], context: CallContext) -> None:
        """Starts a coroutine; it is cancelled if the caller of `context` gives up."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = BackgroundThread(functools.partial(self._run_loop, self._loop), self._name).start()
            self.under_way += 1
            loop = self._loop

        def start() -> None:
            task = loop.create_task(coroutine)
            self._tasks.add(task)
            context.on_cancel(functools.partial(soon, loop, task.cancel))
            task.add_done_callback(self._ended)

        loop.call_soon_threadsafe(start)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        with self._lock:
            self.under_way -= 1

    def cancel(self) -> None:
        """Cancels the coroutines that run."""
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])

    def stop(self, timeout: float) -> None:
        """Ends the thread; coroutines that still run are cancelled."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self.cancel()
        loop.call_soon_threadsafe(loop.call_soon, loop.stop)
        thread.join(timeout)

    @staticmethod
    def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
