"""Where the threads of this process are."""

from __future__ import annotations

import gc
import sys
from types import FrameType

from ._native import core

__all__ = ["thread_frames", "thread_stack"]


def thread_frames() -> dict[int, FrameType]:
    """The current frame of each thread, by its identifier. Safe at any time, also while threads begin and end.

    Before Python 3.12 `sys._current_frames` holds a lock of the interpreter while it makes objects, which may collect
    garbage. If a finalizer then lets another thread run, and that one begins or ends a thread, both wait for ever, and
    so does everything else in the process. So nothing is collected meanwhile.
    """
    if core is not None:
        found: dict[int, FrameType] = core.thread_frames()
        return found
    if sys.version_info >= (3, 12) or not gc.isenabled():
        return sys._current_frames()
    # Another thread that looks just now finds the collector off, or turns it off in vain: only the core can do better.
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        gc.enable()


def thread_stack(thread: int) -> list[FrameType]:
    """The frames of a thread, the innermost first; none if there is no such thread.

    All are taken at once: in Python 3.11 the `f_back` of a generator that is suspended meanwhile is no frame any more.
    """
    if core is not None:
        stack: list[FrameType] = core.thread_stack(thread)
        return stack
    frame = thread_frames().get(thread)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found
