"""The place in the user's program where a call was made: the innermost frame that is not in a library's file."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Protocol

from ..._native import core

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CallSite", "add_library", "describe_site", "find", "lend"]


class CallSite(Protocol):
    """A place in a program."""

    @property
    def code(self) -> CodeType | None:
        """The function; None where it is unknown."""

    @property
    def line(self) -> int:
        """The line in its file."""


class _Place:
    """A place that Python has found."""

    __slots__ = ("code", "line")

    def __init__(self, code: CodeType | None, line: int) -> None:
        self.code = code
        self.line = line


class _Lent(threading.local):
    site: CallSite | None = None


_lent = _Lent()
_libraries: tuple[str, ...] = ()


def _find() -> CallSite:
    if _lent.site is not None:
        return _lent.site
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_libraries):
        if frame.f_back is None:
            return _Place(None, 0)
        frame = frame.f_back
    return _Place(frame.f_code, frame.f_lineno)


def _lend(site: CallSite | None) -> None:
    _lent.site = site


find: Callable[[], CallSite] = _find if core is None else core.call_site
"""Finds the place that this thread works for: the one lent to it, else its own."""
lend: Callable[[CallSite | None], None] = _lend if core is None else core.lend_call_site
"""Lends a place to this thread, for which it works until None is lent. The caller keeps the place alive."""


@functools.cache
def add_library(path: str) -> None:
    """Files whose names begin so are not the user's."""
    global _libraries  # noqa: PLW0603  # what is a library is the same for everybody in a process
    _libraries = (*_libraries, path)
    if core is not None:
        core.add_library(path)


def describe_site(site: CallSite) -> str:
    """A place in words."""
    code = site.code
    return "an unknown place" if code is None else f"{Path(code.co_filename).name}:{site.line} in {code.co_name}"


add_library(f"{Path(__file__).parents[1]}/")
add_library(contextlib.__file__)  # between a `with` and what it calls
