"""The last words of a rank that an exception ends: a short text on its standard error, or left for the launcher.

`phalanx run` makes a file for every rank that it starts, named by the process, in the folder `PHALANX_LAST_WORDS`. A
rank that finds its file leaves its traceback there instead of printing it. So the launcher, which knows in the end who
failed first, shows that rank's once, and those of the others, which failed because of it, not at all. A process that a
rank started has no such file, and prints.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable
from typing import NamedTuple

from . import config
from .errors import ConfigError, Desync, PeerLost, PhalanxError, Timeout, UsageError
from .exception_text import printable
from .frames import chain_of

__all__ = ["LastWords", "is_shared", "offer", "read", "say"]

_PLACE = re.compile(r'^  File "(?:.*/)?(.*)", line (\d+), in (.*)$', re.MULTILINE)


class LastWords(NamedTuple):
    """The text of a rank that ended by an exception."""

    text: str
    shared: bool = False
    """The error is one that all ranks of a group raise: it says nothing that the first of them does not."""
    own: bool = False
    """An error of this rank alone had come before, as when a collective follows in a `finally`."""
    lost: int | None = None
    """The rank that it lost, if that is why it failed."""


def say(error: BaseException, show: Callable[[], object]) -> None:
    """Shows the error that ends this program, or leaves its text for the launcher.

    Args:
        error: It has no frames of Phalanx any more.
        show: Prints it to `sys.stderr`: Python's own way, or whatever the program has put in its place.
    """
    line = _in_one_line(error)
    if line is None and not _is_awaited():
        show()
        return
    text = _printed(show)
    if not _leave(LastWords(text, is_shared(error), has_own(error), _lost_by(error))) and sys.stderr is not None:
        sys.stderr.write(text if line is None else line)
        sys.stderr.flush()


def is_shared(error: BaseException) -> bool:
    """True for an error of a whole group (a loss, a deadline that passed, ranks that did different things).

    Also for one that was made of such an error, and for such an error after one of this rank alone.
    """
    return _is_of_group(error) or _is_of_group(_first(error))


def has_own(error: BaseException) -> bool:
    """True if the error is of this rank alone, or one of a whole group that came after such an error."""
    return not _is_of_group(_first(error))


def _lost_by(error: BaseException) -> int | None:
    first = _first(error)
    found = getattr(first, "phalanx_error", first)
    return found.peer if isinstance(found, PeerLost) else None


def _first(error: BaseException) -> BaseException:
    """The first of the errors that led to this one."""
    *_, first = chain_of(error)
    return first


def _is_of_group(error: BaseException) -> bool:
    found = getattr(error, "phalanx_error", error)
    if isinstance(found, (UsageError, ConfigError)):
        return False
    # The bare class stands for an error of another rank.
    return isinstance(found, (PeerLost, Timeout, Desync)) or type(found) is PhalanxError


def _in_one_line(error: BaseException) -> str | None:
    """The error in short, if it says only that another rank raised one, which that rank itself prints; else None."""
    lost = getattr(error, "phalanx_error", error)
    if not isinstance(lost, PeerLost) or not lost.remote_traceback:
        return None
    places = _PLACE.findall(lost.remote_traceback)
    where = " at {}:{} in {}".format(*places[-1]) if places else ""
    who = "this rank" if lost.rank is None else f"rank {lost.rank}"
    during = f" (during {lost.operation})" if lost.operation else ""
    return f"phalanx: {who} ended because of rank {lost.peer}: {lost.reason}{where}{during}\n"


def _printed(show: Callable[[], object]) -> str:
    """The text that a function writes to `sys.stderr`."""
    former, sys.stderr = sys.stderr, io.StringIO()
    try:
        show()
        return sys.stderr.getvalue()
    finally:
        sys.stderr = former


def _is_awaited() -> bool:
    folder = config.last_words_folder()
    return folder is not None and os.path.exists(_path(folder, os.getpid()))


def _leave(words: LastWords) -> bool:
    """Leaves the text for the launcher; False if it does not wait for it."""
    folder = config.last_words_folder()
    if folder is None:
        return False
    try:
        # It is not made here: the launcher makes it for its own ranks only.
        with open(os.open(_path(folder, os.getpid()), os.O_WRONLY | os.O_CLOEXEC), "w", encoding="utf-8") as file:
            json.dump({**words._asdict(), "text": printable(words.text)}, file)
    except OSError:
        return False
    return True


def _path(folder: str, pid: int) -> str:
    return f"{folder}/{pid}"


# -- the launcher's side -----------------------------------------------------------------------------------------------


def offer(folder: str, pid: int) -> None:
    """Makes the file for a rank. Without one, it prints."""
    with contextlib.suppress(OSError), open(_path(folder, pid), "x"):
        pass


def read(folder: str, pid: int) -> LastWords | None:
    """The last words of a rank; None if it has left none."""
    try:
        with open(_path(folder, pid), encoding="utf-8") as file:
            found = json.load(file)
        lost = None if found["lost"] is None else int(found["lost"])
        return LastWords(str(found["text"]), bool(found["shared"]), bool(found["own"]), lost)
    except (OSError, ValueError, KeyError, TypeError):
        return None
