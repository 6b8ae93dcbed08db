"""Whatever a program raises can be put into words: the report of a failure never fails."""

from __future__ import annotations

from typing import Any, cast

import pytest

from phalanx.exception_text import describe, message_of, printable, render_traceback


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class NoStringText(Exception):
    def __str__(self) -> str:
        return cast(Any, 5)  # type: ignore[no-any-return]


class ExitingText(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class OddString(str):
    __slots__ = ()

    def encode(self, *args: Any, **kwargs: Any) -> bytes:
        raise RuntimeError("no bytes")

    def split(self, *args: Any, **kwargs: Any) -> list[Any]:
        raise RuntimeError("no lines")

    def __format__(self, spec: str) -> str:
        raise RuntimeError("no format")


class OddText(Exception):
    def __str__(self) -> str:
        return OddString("a text of its own kind")


class Nameless(type):
    @property
    def __name__(cls) -> str:
        raise RuntimeError("no name")

    def __getattribute__(cls, name: str) -> Any:
        if name == "__qualname__":
            raise RuntimeError("no name")
        return super().__getattribute__(name)


class OddClass(Exception, metaclass=Nameless):
    pass


class OddCause(Exception):
    @property
    def __cause__(self) -> None:  # type: ignore[override]
        raise RuntimeError("no cause")


def with_cause() -> Exception:
    error = ValueError("outer")
    error.__cause__ = NoText()
    return error


CASES = {
    "plain": (ValueError("two\nlines"), "ValueError: two"),
    "empty": (KeyError(), "KeyError"),
    "no text": (NoText(), "NoText: (its text cannot be shown: RuntimeError in __str__)"),
    "no string": (NoStringText(), "NoStringText: (its text cannot be shown: TypeError in __str__)"),
    "text that exits": (ExitingText(), "ExitingText: (its text cannot be shown: SystemExit in __str__)"),
    "odd text": (OddText(), "OddText: a text of its own kind"),
    "odd class": (OddClass("told"), "OddClass: told"),
    "odd cause": (OddCause("told"), "OddCause: told"),
    "cause without text": (with_cause(), "ValueError: outer"),
    "surrogate": (ValueError("file \udce4.txt"), r"ValueError: file \udce4.txt"),
    "not an Exception": (SystemExit(3), "SystemExit: 3"),
    "odd argument": (
        ValueError(NoText()),
        "ValueError: (its text cannot be shown: RuntimeError in __str__)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_exception_has_a_line_and_a_traceback(case: str) -> None:
    error, line = CASES[case]
    try:
        raise error
    except BaseException as raised:
        description, trace = describe(raised), render_traceback(raised)
    assert description == line
    assert "in test_every_exception_has_a_line_and_a_traceback" in trace
    assert type.__dict__["__name__"].__get__(type(error)) in trace
    for text in (description, trace, message_of(error)):
        assert type(text) is str
        text.encode()  # no lone surrogate is left


def test_a_text_that_can_be_printed_is_left_as_it_is() -> None:
    assert printable("für \U0001f600 \\udce4") == "für \U0001f600 \\udce4"
