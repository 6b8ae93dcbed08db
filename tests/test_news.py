"""Locks with word of what changed: also where signal handlers raise in the middle."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from tests.lateness import bound

from phalanx.news import News


def test_a_wait_ends_with_the_news_or_the_time() -> None:
    news, ready = News(), False

    def tell() -> None:
        nonlocal ready
        with news:
            ready = True
            news.notify_all()

    thread = threading.Timer(0.05, tell)
    with news, news:  # the lock is given up whole
        assert not news.wait(0.0)
        assert not news.wait(0.01)
        thread.start()
        while not ready:
            assert news.wait(30)
    thread.join()


def test_who_is_told() -> None:
    news, waiting, told = News(), 0, 0

    def wait() -> None:
        nonlocal waiting, told
        with news:
            waiting += 1
            assert news.wait(bound(10))
            told += 1

    def until(number: int) -> None:
        end = time.monotonic() + bound(10)
        while told < number and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.05)
        assert told == number

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(5)]
    for thread in threads:
        thread.start()
    while waiting < 5:
        time.sleep(0.001)
    for number in (1, 2):
        with news:
            news.notify()
        until(number)
    with news:
        news.notify_all()
        news.notify()  # nobody is left
    until(5)


def test_only_who_has_the_lock_gives_it_up() -> None:
    with pytest.raises(RuntimeError):
        News().wait(0.0)


class Interrupt(Exception):
    """What the handler of these tests raises."""


@pytest.fixture
def interrupts() -> Iterator[random.Random]:
    """A handler that raises; the times of the next one."""

    def stop(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, stop)
    yield random.Random(7)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_handlers_that_raise_leave_no_lock_taken(interrupts: random.Random) -> None:
    news, stopped, inside, seen = News(), False, 0, 0

    def other() -> None:
        nonlocal inside
        while not stopped:
            with news:
                inside += 1
                assert inside == 1
                news.notify_all()
                inside -= 1

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    end = time.monotonic() + 2
    while time.monotonic() < end:
        try:
            signal.setitimer(signal.ITIMER_REAL, interrupts.uniform(5e-6, 300e-6))
            while True:
                with news:
                    news.wait(0.0001)
                    assert not inside
                    news.notify()
        except Interrupt:
            seen += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert thread.is_alive()
    stopped = True
    thread.join(bound(10))
    assert not thread.is_alive(), "the lock is taken for ever"
    assert seen > 100
    assert not news._bells
