"""The class that runs all threads of Phalanx's own."""

from __future__ import annotations

import functools
import os
import signal
import threading
import weakref
from collections.abc import Iterator

import pytest

from phalanx.background_thread import BackgroundThread, uninterrupted

LIMIT = 10.0


def wait_for(event: threading.Event) -> None:
    event.wait(LIMIT)


def test_it_runs_once_started_and_is_a_daemon() -> None:
    seen: list[threading.Thread] = []
    thread = BackgroundThread(lambda: seen.append(threading.current_thread()), "phalanx-test")
    assert (thread.is_started, thread.is_alive) == (False, False)
    assert thread.start() is thread
    thread.join(LIMIT)
    assert (thread.is_started, thread.is_alive) == (True, False)
    assert (seen[0].name, seen[0].daemon) == ("phalanx-test", True)


def test_join_is_bounded() -> None:
    ready = threading.Event()
    thread = BackgroundThread(functools.partial(wait_for, ready), "phalanx-test").start()
    thread.join(0.01)
    assert thread.is_alive
    ready.set()
    thread.join(LIMIT)
    assert not thread.is_alive


def test_the_thread_itself_does_not_wait_for_its_end() -> None:
    seen: list[bool] = []
    begin = threading.Event()

    def run() -> None:
        begin.wait(LIMIT)
        thread.join()
        seen.append(thread.is_current)

    thread = BackgroundThread(run, "phalanx-test").start()
    assert not thread.is_current
    begin.set()
    thread.join(LIMIT)
    assert seen == [True]


def test_an_error_is_handed_over() -> None:
    errors: list[Exception] = []

    def fail() -> None:
        raise ValueError("no")

    BackgroundThread(fail, "phalanx-test", on_error=errors.append).start().join(LIMIT)
    assert [str(error) for error in errors] == ["no"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_by_default_an_error_goes_to_the_excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: errors.append(arguments.exc_value))

    def fail() -> None:
        raise ValueError("no")

    BackgroundThread(fail, "phalanx-test").start().join(LIMIT)
    assert [str(error) for error in errors] == ["no"]


def test_a_thread_that_has_ended_keeps_nothing_alive() -> None:
    class Owner:
        def run(self) -> None:
            pass

    owner = Owner()
    gone = weakref.ref(owner)
    thread = BackgroundThread(owner.run, "phalanx-test").start()
    thread.join(LIMIT)
    del owner
    assert gone() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    ready = threading.Event()
    thread = BackgroundThread(functools.partial(wait_for, ready), "phalanx-test").start()
    child = os.fork()
    if child == 0:
        thread.join()
        os._exit(1 if thread.is_alive else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert thread.is_alive
    ready.set()
    thread.join(LIMIT)


class Interrupted(Exception):
    """Raised by a signal handler."""


@pytest.fixture
def handler_raises() -> Iterator[None]:
    def handle(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_uninterrupted_job_returns_and_raises_as_if_it_were_called() -> None:
    threads = []

    def job() -> int:
        threads.append(threading.current_thread())
        return 7

    def fail() -> int:
        raise KeyError("words")

    assert uninterrupted(job, "test") == 7
    assert threads[0] is not threading.main_thread()
    with pytest.raises(KeyError, match="words"):
        uninterrupted(fail, "test")


def test_a_handler_that_raises_ends_the_wait_and_not_the_job(handler_raises: None) -> None:
    goes_on, done = threading.Event(), threading.Event()

    def job() -> None:
        signal.raise_signal(signal.SIGALRM)
        assert goes_on.wait(10)
        done.set()

    with pytest.raises(Interrupted):
        uninterrupted(job, "test")
    assert not done.is_set()
    goes_on.set()
    assert done.wait(10)


def test_outside_the_main_thread_and_without_threads_it_is_simply_called(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[threading.Thread] = []
    other = threading.Thread(target=uninterrupted, args=(lambda: seen.append(threading.current_thread()), "test"))
    other.start()
    other.join()
    assert seen == [other]

    def no_thread(_: BackgroundThread) -> BackgroundThread:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(BackgroundThread, "start", no_thread)
    assert uninterrupted(threading.current_thread, "test") is threading.main_thread()
