"""The place in the user's program where a call was made: the innermost frame that is neither Phalanx's nor a library's.

Files are of three kinds. Those of Phalanx and of what it works under, as torch, are never the place. Those of installed
libraries and of the standard library are the place only where there is nothing else: a program that was installed as
a library, or a thread that a library has started.
"""

from __future__ import annotations

import contextlib
import functools
import site
import sys
import sysconfig
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Protocol

from ..._native import core

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CallSite", "add_installed", "add_library", "describe_site", "find", "is_users", "lend"]


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
_never: tuple[str, ...] = ()
_installed: tuple[str, ...] = ()
_NEVER, _INSTALLED, _USERS = 0, 1, 2


@functools.lru_cache(1024)
def _kind_of(filename: str) -> int:
    return _NEVER if filename.startswith(_never) else _INSTALLED if filename.startswith(_installed) else _USERS


def _find() -> CallSite:
    if _lent.site is not None:
        return _lent.site
    frame: FrameType | None = sys._getframe(1)
    found: _Place | None = None
    while frame is not None:
        kind = _kind_of(frame.f_code.co_filename)
        if kind != _NEVER and (found is None or kind == _USERS):
            found = _Place(frame.f_code, frame.f_lineno)
        if kind == _USERS:
            break
        frame = frame.f_back
    return found or _Place(None, 0)


def _lend(site: CallSite | None) -> None:
    _lent.site = site


find: Callable[[], CallSite] = _find if core is None else core.call_site
"""Finds the place that this thread works for: the one lent to it, else its own."""
lend: Callable[[CallSite | None], None] = _lend if core is None else core.lend_call_site
"""Lends a place to this thread, for which it works until None is lent. The caller keeps the place alive."""


@functools.cache
def add_library(path: str) -> None:
    """Files whose names begin so are never the place."""
    global _never  # noqa: PLW0603  # what is a library is the same for everybody in a process
    _never = (*_never, path)
    _kind_of.cache_clear()
    if core is not None:
        core.add_library(path, False)


@functools.cache
def add_installed(path: str) -> None:
    """Files whose names begin so are the place only where there is no other."""
    global _installed  # noqa: PLW0603  # likewise
    _installed = (*_installed, path)
    _kind_of.cache_clear()
    if core is not None:
        core.add_library(path, True)


def is_users(filename: str) -> bool:
    """True for a file of the user's own, False for one of Phalanx or of a library, the standard one included."""
    return _kind_of(filename) == _USERS


def describe_site(site: CallSite) -> str:
    """A place in words."""
    code = site.code
    return "an unknown place" if code is None else f"{Path(code.co_filename).name}:{site.line} in {code.co_name}"


def _installed_files() -> set[str]:
    """How the names of files begin that belong to no project of the user's."""
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    # Of a virtual environment that sees the packages of the system, and of PYTHONPATH.
    folders |= {entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")}
    resolved = {str(Path(folder).resolve()) for folder in folders}
    return {f"{folder}/" for folder in folders | resolved} | {"<frozen "}


_PACKAGE = Path(__file__).parents[2]
add_library(f"{_PACKAGE}/group/")
add_library(f"{_PACKAGE}/frames.py")  # between a public function and what it decorates
add_library(f"{_PACKAGE}/world.py")
add_library(contextlib.__file__)  # between a `with` and what it calls
add_installed(f"{_PACKAGE}/")
for _path in sorted(_installed_files()):
    add_installed(_path)
