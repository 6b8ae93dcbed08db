"""Phalanx's own frames in tracebacks: users do not see them, unless `PHALANX_DEBUG=1` asks for them.

An error points at the line of the program that it is about. It leaves Phalanx through a public function, which calls
`hide_frames` and then raises it again by a bare `raise`: Python adds no frame for that, so none of ours is left.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any

from . import config
from .arguments import explain_unexpected
from .errors import ConfigError, PhalanxError
from .exception_text import printable, render_traceback

if TYPE_CHECKING:
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")

__all__ = [
    "chain_of",
    "drop_frames",
    "frames_are_hidden",
    "hide_frames",
    "hides_frames",
    "is_ours",
    "user_stack",
    "user_traceback",
]

_PACKAGE = f"{Path(__file__).parent}/"
_PROGRAMS = (f"{_PACKAGE}cli/", f"{_PACKAGE}testing/conformance/")
"""Programs that use Phalanx as a user's would. Their lines are what their errors are about."""
_LONGEST_CHAIN = 20


def frames_are_hidden() -> bool:
    """False if `PHALANX_DEBUG` asks for everything. `init` says so if its value is not valid."""
    try:
        return not config.debug()
    except ConfigError:
        return False


def is_ours(code: CodeType) -> bool:
    """True for a function of Phalanx, False for one of a program."""
    name = code.co_filename
    return name.startswith(_PACKAGE) and not name.startswith(_PROGRAMS)


def hide_frames(error: BaseException) -> None:
    """Takes Phalanx's frames out of the traceback of an error, and out of those of the errors that led to it.

    A bug in Phalanx keeps its frames: whoever mends it needs them. It is an exception that is not one of `errors` and
    was raised in a function of Phalanx.

    Where Phalanx raised the error `from None`, the program's own error stays with it: in `finally: world.barrier()`
    that is the reason for everything.
    """
    with contextlib.suppress(Exception):  # a class of the user's with ideas of its own
        _keep_programs_error(error)
    if frames_are_hidden():
        drop_frames(error)


def drop_frames(error: BaseException) -> None:
    """As `hide_frames`, whatever `PHALANX_DEBUG` says."""
    for one in chain_of(error):
        with contextlib.suppress(Exception):  # a class of the user's with ideas of its own
            if not _is_bug(one):
                one.__traceback__ = _without_ours(one.__traceback__)


def hides_frames(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a public function: errors that leave it have no frames of Phalanx.

    A function that takes less than some microseconds does the same in a `try` of its own, which costs nothing.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            explain_unexpected(error, function)
            hide_frames(error)
            raise

    return call


def user_traceback(error: BaseException) -> str:
    """The error with its traceback and its causes as text, without Phalanx's frames. Never raises."""
    hide_frames(error)
    return render_traceback(error)


def user_stack(error: BaseException) -> str:
    """As `user_traceback`, for an error that is still on its way: with the frames outside of the one that caught it."""
    frames = [*reversed([*traceback.walk_stack(sys._getframe(1))]), *traceback.walk_tb(error.__traceback__)]
    if frames_are_hidden() and not _is_bug(error):
        frames = [(frame, line) for frame, line in frames if not is_ours(frame.f_code)]
    lines = traceback.StackSummary.extract(iter(frames)).format()
    lines += traceback.format_exception_only(type(error), error)
    return printable(f"Traceback (most recent call last):\n{''.join(lines)}")


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error and those that Python would print before it."""
    found: Any = error
    for _ in range(_LONGEST_CHAIN):
        if not isinstance(found, BaseException):
            return
        yield found
        try:
            found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
        except Exception:  # likewise
            return


def _keep_programs_error(error: BaseException) -> None:
    """Shows what the program was handling when it called Phalanx, which has raised this error `from None`."""
    if not error.__suppress_context__ or error.__cause__ is not None or not _is_one_of_ours(error):
        return
    handling = {frame for frame, _ in traceback.walk_stack(sys._getframe(1)) if not is_ours(frame.f_code)}
    found = error.__context__
    for _ in range(_LONGEST_CHAIN):
        if found is None or found is error:
            return
        if found.__traceback__ is not None and found.__traceback__.tb_frame in handling:
            error.__context__, error.__suppress_context__ = found, False
            return
        found = found.__context__


def _is_one_of_ours(error: BaseException) -> bool:
    return isinstance(error, PhalanxError) or hasattr(error, "phalanx_error")


def _is_bug(error: BaseException) -> bool:
    if not isinstance(error, Exception) or _is_one_of_ours(error):
        return False
    frames = [*_walk(error.__traceback__)]
    return bool(frames) and is_ours(frames[-1].tb_frame.f_code)


def _walk(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    first: TracebackType | None = None
    kept = [one for one in _walk(trace) if not is_ours(one.tb_frame.f_code)]
    for one in reversed(kept):
        if one.tb_next is not first:
            one.tb_next = first
        first = one
    return first
