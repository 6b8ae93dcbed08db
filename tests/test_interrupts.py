"""Which exceptions are those of signal handlers."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import phalanx as px
from phalanx.interrupts import is_of_a_signal


def raises(error: BaseException, *_: Any) -> None:
    raise error


class Handler:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, *_: Any) -> None:
        raise self.error

    def method(self, *_: Any) -> None:
        raises(self.error)


@pytest.fixture(autouse=True)
def _former() -> Iterator[None]:
    former = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, former)


def caught(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


ERROR = ValueError("of the program")
HANDLERS = [
    lambda *_: raises(ERROR),
    functools.partial(raises, ERROR),
    Handler(ERROR),
    Handler(ERROR).method,
    functools.partial(Handler(ERROR).method, 1),
]


@pytest.mark.parametrize("handler", HANDLERS, ids=["function", "partial", "object", "method", "partial method"])
def test_what_a_handler_raises(handler: Callable[..., None]) -> None:
    signal.signal(signal.SIGUSR1, handler)
    assert is_of_a_signal(caught(lambda: os.kill(os.getpid(), signal.SIGUSR1)))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    ERROR.__traceback__ = None
    assert not is_of_a_signal(caught(lambda: raises(ERROR)))


def test_an_error_of_the_library_that_a_handler_raises() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: raises(px.UsageError("no")))
    assert is_of_a_signal(caught(lambda: os.kill(os.getpid(), signal.SIGUSR1)))
    assert not is_of_a_signal(caught(lambda: raises(px.UsageError("no"))))


def test_what_ends_the_program() -> None:
    assert is_of_a_signal(caught(lambda: raises(KeyboardInterrupt())))
    assert is_of_a_signal(caught(lambda: raises(SystemExit())))


def test_other_threads_have_none() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(is_of_a_signal(KeyboardInterrupt())))
    thread.start()
    thread.join()
    assert found == [False]
