"""The threads of an agent begin and end when they are told, at whatever point they are."""

from __future__ import annotations

import threading
import time

from tests.lateness import bound

from phalanx.rpc.workers import IDLE, Workers


class ToldInBetween(Workers):
    """Is told to stop just after a thread has seen that it is not, and before that thread sleeps."""

    _told = False
    late: threading.Thread | None = None

    @property
    def _stopping(self) -> bool:
        if threading.current_thread() is self.late:
            self.late = None
            with self._lock:
                self._told = True
                self._work.notify_all()
            return False
        return self._told

    @_stopping.setter
    def _stopping(self, value: bool) -> None:
        self._told = value


def test_a_thread_that_is_told_to_end_just_before_it_sleeps() -> None:
    moved = threading.Event()
    workers = ToldInBetween("test-workers", 4, lambda _may_sleep: moved.set() or time.sleep(1e-3), lambda: None)
    workers.start()
    assert moved.wait(10), "the first thread is the mover"
    late = workers.late = threading.Thread(target=workers._thread_main, daemon=True)
    began = time.monotonic()
    late.start()
    late.join(IDLE / 2)
    took = time.monotonic() - began
    workers.stop(5)
    assert not late.is_alive()
    assert took < bound(1)


def test_no_thread_moves_before_its_owner_is_complete() -> None:
    moved = threading.Event()
    workers = Workers("test-not-yet", 4, lambda _may_sleep: moved.set() or time.sleep(1e-3), lambda: None)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-not-yet")]
    workers.start()
    assert moved.wait(10)
    workers.stop(5)
