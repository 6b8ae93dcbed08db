"""What was defined in a script or a function comes whole to another process, or is refused by its name."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests import lateness

from phalanx import UsageError
from phalanx.launching import shipping
from phalanx.launching.code_names import global_names

MAIN = """
import abc, dataclasses, enum, functools, sys, typing
import numpy as np
from phalanx.launching import shipping

T = typing.TypeVar("T")
log = []
LEVEL = 5


def traced(function):
    @functools.wraps(function)
    def call(*args):
        log.append(function.__name__)
        return function(*args)
    return call


class Base(abc.ABC):
    kind = "base"

    @abc.abstractmethod
    def size(self): ...

    @classmethod
    def make(cls, *args):
        return cls(*args)

    @staticmethod
    def double(x):
        return 2 * x


class Box(Base, typing.Generic[T]):
    __slots__ = ("content",)

    def __init__(self, content: T) -> None:
        super().__init__()
        self.content = content

    @traced
    def size(self):
        return len(self.content) + LEVEL

    @functools.cached_property
    def first(self):
        return self.content[0]

    class Inner:
        value = 3


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: int = 2
    tags: list = dataclasses.field(default_factory=list, metadata={"a": 1})


class Colour(enum.IntFlag):
    RED = 1
    BLUE = 2

    def shout(self):
        return self.name + "!"


class Pair(typing.NamedTuple):
    left: int
    right: int = 7


class Trouble(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code


@functools.lru_cache(maxsize=10)
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


def check(given):
    box = Box.make([1, 2, 3])
    assert box.size() == 8 and log == ["size"], log
    assert (box.first, box.first, Base.double(4), Box.kind, Box.Inner.value) == (1, 1, 8, "base", 3)
    try:
        Base()
    except TypeError:
        pass
    else:
        raise AssertionError("an abstract class was made")
    point = dataclasses.replace(Point(1), y=3)
    assert [field.name for field in dataclasses.fields(point)] == ["x", "y", "tags"]
    assert Point.__dataclass_fields__["tags"].metadata["a"] == 1
    assert point == Point(1, 3) and point.tags == [] and Point(5).y == 2
    assert (Colour.RED | Colour.BLUE) == 3 and Colour(2) is Colour.BLUE and Colour.RED.shout() == "RED!"
    assert Pair(1)._asdict() == {"left": 1, "right": 7}
    assert fibonacci(30) == 832040 and fibonacci.cache_info().maxsize == 10
    assert typing.get_type_hints(fibonacci.__wrapped__) == {"n": int, "return": int}
    assert check.__name__ == "check" and check.__module__ == "__main__"
    assert isinstance(given, Point) and given.x == 9
    import pickle
    assert type(pickle.loads(pickle.dumps(point))) is Point
    try:
        raise Trouble(3)
    except Trouble as error:
        assert error.code == 3
    return "well"


sys.stdout.buffer.write(shipping.dumps((check, (Point(9),))).data)
"""


def elsewhere(data: bytes) -> str:
    """The result of a function and its arguments in a process that knows neither."""
    program = """
import sys
from phalanx.launching import shipping
shipping.fresh_main()
function, args = shipping.loads(sys.stdin.buffer.read())
print(function(*args))
"""
    done = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, timeout=60, check=False)
    return done.stdout.decode().strip() or done.stderr.decode()


def test_everything_of_a_script_is_there(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MAIN)
    data = subprocess.run([sys.executable, str(script)], capture_output=True, timeout=60, check=True).stdout
    assert elsewhere(data) == "well"


def test_local_classes_travel_with_what_uses_them() -> None:
    @dataclasses.dataclass
    class Local:
        value: int

        def more(self) -> Local:
            return Local(self.value + 1)

    class Shade(enum.Enum):
        DARK = "d"

    class Row(NamedTuple):
        a: int

    class Shape(abc.ABC):
        @property
        @abc.abstractmethod
        def area(self) -> int: ...

    def use(start: Any) -> tuple[Any, ...]:
        return start.more().more().value, Shade("d").name, Row(4).a, sorted(Shape.__abstractmethods__)

    assert elsewhere(shipping.dumps((use, (Local(1),))).data) == "(3, 'DARK', 4, ['area'])"


def test_a_wrapped_function_keeps_the_globals_of_its_wrapper() -> None:
    wrapped = functools.wraps(Path.exists)(lambda: global_names.__name__)
    assert elsewhere(shipping.dumps((wrapped, ())).data) == "global_names"


def test_modules_by_value_are_not_imported() -> None:
    data = shipping.dumps((_who, ()), by_value=(__name__,)).data
    assert elsewhere(data) == "('not imported', False)"


def _who() -> tuple[str, bool]:
    return _WORD, "pytest" in sys.modules


_WORD = "not imported"


def test_only_installed_modules_are_named_for_an_early_import() -> None:
    def use() -> Any:
        return pytest, lateness, dataclasses

    names = [name for name, _ in shipping.dumps(use, by_value=(__name__,)).modules]
    assert {"pytest", "dataclasses"} <= set(names)
    assert lateness.__name__ not in names


def test_the_value_that_cannot_be_sent_is_named() -> None:
    def inner() -> Any:
        return guard

    guard = threading.Lock()
    with pytest.raises(UsageError, match=r"cannot send 'guard', which .*inner uses, .*lock.* \(do this\)"):
        shipping.dumps(lambda: inner(), hint="do this")


def test_names_of_attributes_are_not_globals() -> None:
    def function(thing: Any) -> Any:
        class Body:
            value = _WORD

        return thing.pytest, threading, [shipping for _ in thing], Body

    assert global_names(function.__code__) == {"threading", "shipping", "_WORD", "__name__"}
