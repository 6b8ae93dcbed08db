"""The threads of an agent begin and end when they are told, at whatever point they are."""

from __future__ import annotations

import logging
import threading
import time

import pytest
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


def test_a_mover_that_fails_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    movers: list[int] = []
    done = threading.Event()

    def poll(_may_sleep: bool) -> None:
        movers.append(threading.get_ident())
        if len(movers) == 1:
            raise MemoryError("none left")
        time.sleep(1e-3)

    workers = Workers("test-failing", 4, poll, lambda: None)
    workers.start()
    workers.add(done.set)
    served = done.wait(10)
    workers.stop(5)
    assert served, "another thread runs what the first cannot run any more"
    assert [failure.exc_type for failure in failures] == [MemoryError]


def test_where_no_thread_can_be_started_the_tasks_wait_and_are_not_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, none_left = threading.Thread.start, threading.Event()

    def start_if_any_is_left(thread: threading.Thread) -> None:
        if none_left.is_set():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_if_any_is_left)
    workers = Workers("test-no-threads", 4, lambda _may_sleep: time.sleep(1e-3), lambda: None)
    workers.start()
    told, done = threading.Event(), threading.Event()
    monkeypatch.setattr(logging.getLogger("phalanx.rpc"), "error", lambda *words: told.set())

    def take_long() -> None:
        assert told.wait(10), "the watchdog finds no other mover"

    for turn in range(2):  # the second time, too: the watchdog lives on
        none_left.set()
        told.clear()
        done.clear()
        workers.add(take_long)
        workers.add(done.set)
        assert done.wait(10), turn
    none_left.clear()
    workers.stop(5)
    assert not workers._threads
    assert not caplog.records
