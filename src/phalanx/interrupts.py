"""Exceptions of signal handlers: they come between any two lines of the main thread, and are not about these."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any

__all__ = ["insist", "is_of_a_signal"]


def is_of_a_signal(error: BaseException) -> bool:
    """Whether the handler of a signal has raised it: Ctrl-C, or what came through a handler of the program."""
    if threading.current_thread() is not threading.main_thread():
        return False  # they run in the main thread alone
    if not isinstance(error, Exception):
        return True
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__ if codes else None
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def insist(step: Callable[[], object]) -> None:
    """Calls what gives things back. If an exception, as by Ctrl-C, cuts it short, calls it once more, and raises that.

    The second time it has to do what was left, and bear what was done.
    """
    try:
        step()
    except BaseException:
        step()
        raise


def _code_of(handler: Any) -> CodeType | None:
    """Of a function, a method, or an object that can be called, also in a `functools.partial`."""
    handler = getattr(handler, "func", handler)
    handler = getattr(handler, "__func__", handler)
    if not hasattr(handler, "__code__"):
        handler = type(handler).__call__ if callable(handler) else None
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None
