"""Exceptions as text that can always be made, printed and sent.

An exception is the user's object. Its `__str__` may raise, and its text may hold a lone surrogate, as the name of any
badly named file does: UTF-8 cannot encode that. Whoever reports an exception to another rank, to a log or to a terminal
goes through here, because a report that fails leaves the others waiting.
"""

from __future__ import annotations

import traceback

__all__ = ["describe", "message_of", "printable", "render_traceback", "type_name"]


def describe(error: BaseException) -> str:
    """The exception in one line: `Type: first line of its text`, or the type alone if it has no text. Never raises."""
    text = message_of(error).split("\n", 1)[0].rstrip("\r")
    return f"{type_name(error)}: {text}" if text else type_name(error)


def render_traceback(error: BaseException) -> str:
    """The exception with its traceback and its causes, as Python prints them.

    Never raises: what Python cannot print is left out, down to the line of `describe`.
    """
    try:
        return printable("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    except BaseException:
        pass  # a cause, a note or a class that cannot be shown: the stack still can
    try:
        stack = printable("".join(traceback.format_tb(error.__traceback__)))
    except BaseException:
        stack = ""
    heading = "Traceback (most recent call last):\n" if stack else ""
    return f"{heading}{stack}{describe(error)}\n"


def type_name(error: BaseException) -> str:
    """The name of the exception's class. Never raises, also not if its metaclass has another idea of `__name__`."""
    return printable(type.__dict__["__name__"].__get__(type(error)))


def message_of(error: BaseException) -> str:
    """The text of the exception, or a note that it has none that can be shown. Never raises."""
    try:
        return printable(str(error))
    except BaseException as problem:
        return f"(its text cannot be shown: {type_name(problem)} in __str__)"


def printable(text: str) -> str:
    r"""The text with its lone surrogates escaped, as in `\udce4`: every encoding of Unicode can take it."""
    # The methods of `str` itself: the text may be of a class that overrides them.
    return bytes.decode(str.encode(text, "utf-8", "backslashreplace"), "utf-8")
