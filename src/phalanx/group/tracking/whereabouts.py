"""The line of the program that this rank is at, for the others that wait for it."""

from __future__ import annotations

import threading
from pathlib import Path

from ...thread_frames import thread_stack
from .call_site import is_users

__all__ = ["whereabouts"]


def whereabouts() -> str:
    """Where the main thread is: the innermost line of the user's own files, else of any library; "" if unknown.

    Called in another thread. What the main thread does in C has no line of its own: it is the call's.
    """
    stack = thread_stack(threading.main_thread().ident or 0)
    if not stack:
        return ""
    found = next((frame for frame in stack if is_users(frame.f_code.co_filename)), stack[0])
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno} in {found.f_code.co_name}"
