"""The arguments of a remote call against the annotations of the function that is called."""
# ruff: noqa: UP007, UP045 - both spellings of a union are tested: they are objects of different types

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import functools
import timeit
import uuid
from typing import Annotated, Any, Literal, NamedTuple, Optional, Protocol, TypedDict, Union

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import InvalidArgument, RpcError
from phalanx.rpc.payload import Limits, encode_value, plan_value
from phalanx.rpc.signature import Signature, convert_result


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Mixed(enum.Enum):
    """Values that msgspec does not take for an enum."""

    HALF = 0.5
    WORD = "word"


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


@dataclasses.dataclass
class Batch:
    data: np.ndarray
    at: Point
    when: dt.datetime | None = None
    shape: tuple[int, ...] = ()
    color: Color = Color.RED


class Job(msgspec.Struct, tag=True, rename="camel"):
    max_steps: int
    points: list[Point] = []


class Stop(msgspec.Struct, tag=True):
    why: str


@dataclasses.dataclass
class Tree:
    """Names itself, and has a field that msgspec does not take."""

    value: np.ndarray | float
    children: list[Tree] = dataclasses.field(default_factory=list)
    names: dict[str, Tree] = dataclasses.field(default_factory=dict)


class TaggedA(msgspec.Struct, tag="a"):
    v: np.ndarray | int


class TaggedB(msgspec.Struct, tag="b"):
    v: np.ndarray | int


@dataclasses.dataclass
class Odd:
    known: int
    unknown: NoSuchType  # type: ignore[name-defined]  # noqa: F821


@dataclasses.dataclass
class Picky:
    x: int

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x must not be negative")
        if self.x == 13:
            raise KeyError("thirteen")


class Pair(NamedTuple):
    a: int
    b: str


class Table(TypedDict):
    a: int


class HasClose(Protocol):
    def close(self) -> None: ...


def send(value: Any) -> Any:
    """As the other side gets it."""
    out = encode_value(value, Limits())
    plan = plan_value(out.head, out.payload, Limits())
    target = plan.allocate()
    target[:] = b"".join(out.buffers)
    return plan.build(target)


def check(annotation: Any, value: Any) -> Any:
    """The argument of a function with this annotation."""

    def f(x: Any) -> None: ...

    f.__annotations__["x"] = annotation
    signature = Signature.of(f)
    (by_position,), named = signature.bind("f", [value], {})
    assert named == {}
    none, by_name = signature.bind("f", [], {"x": value})
    assert none == []
    assert type(by_name["x"]) is type(by_position)
    return by_position


def refused(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        Signature.of(function).bind(function.__name__, list(args), kwargs)
    assert isinstance(caught.value, RpcError)
    assert isinstance(caught.value, TypeError)
    return str(caught.value)


def add(a: float, b: float) -> float:
    return a + b


def move(point: Point, by: int = 1, *, fast: bool = False) -> Point:
    return point


def free(a, b=2):  # type: ignore[no-untyped-def]
    return a


class TestMessages:
    """The words are what a caller on another machine has to go by."""

    @pytest.mark.parametrize(
        ("args", "kwargs", "message"),
        [
            ((1, "three"), {}, "add() argument 'b': expected float, got str 'three'"),
            ((1,), {"b": "three"}, "add() argument 'b': expected float, got str 'three'"),
            ((True, 1), {}, "add() argument 'a': expected float, got bool True"),
            ((1, None), {}, "add() argument 'b': expected float, got None"),
            ((1, [2]), {}, "add() argument 'b': expected float, got list"),
            ((1, "x" * 1000), {}, "add() argument 'b': expected float, got str '" + "x" * 40 + "'..."),
            ((1, b"\0"), {}, "add() argument 'b': expected float, got bytes b'\\x00'"),
            ((1,), {}, "add() is missing argument 'b'"),
            ((), {}, "add() is missing arguments 'a', 'b'"),
            ((1, 2), {"c": 3}, "add() has no argument 'c' (arguments: a, b)"),
            ((1, 2, 3), {}, "add() takes 2 arguments, got 3"),
            ((1,), {"a": 2}, "add() got argument 'a' twice: by position and by name"),
        ],
    )
    def test_add(self, args: Any, kwargs: Any, message: str) -> None:
        assert refused(add, *args, **kwargs) == message

    @pytest.mark.parametrize(
        ("point", "message"),
        [
            ({"x": "1"}, "move() argument 'point'.x: expected int, got str"),
            ({"x": 1, "y": None}, "move() argument 'point'.y: expected float, got None"),
            ({"x": True}, "move() argument 'point'.x: expected int, got bool"),
            ({}, "move() argument 'point': missing field x"),
            ([1], "move() argument 'point': expected Point, got list"),
            (7, "move() argument 'point': expected Point, got int 7"),
        ],
    )
    def test_inside_a_structure(self, point: Any, message: str) -> None:
        assert refused(move, point) == message

    def test_counts(self) -> None:
        def nothing() -> None: ...
        def one(a: int) -> None: ...
        def some(a: int, b: int = 2) -> None: ...
        def position(a: int, /, b: int) -> None: ...

        assert refused(nothing, 1) == "nothing() takes no arguments, got 1"
        assert refused(one, 1, 2) == "one() takes 1 argument, got 2"
        assert refused(some, 1, 2, 3) == "some() takes 1 to 2 arguments, got 3"
        assert refused(move, 1, 2, 3) == "move() takes 1 to 2 positional arguments, got 3"
        assert refused(nothing, a=1) == "nothing() has no argument 'a' (it takes no arguments by name)"
        assert refused(position, a=1, b=2) == "position() has no argument 'a' (arguments: b; by position only: a)"
        assert refused(position, 1) == "position() is missing argument 'b'"

    def test_names_that_came_from_outside_are_cut(self) -> None:
        assert len(refused(add, **{"k" * 10_000: 1})) < 200

    def test_paths(self) -> None:
        def f(points: dict[str, list[Point]], numbers: dict[int, int] | None = None, *rest: Point) -> None: ...

        assert refused(f, {"a": [{"x": 1}, {"x": "q"}]}) == "f() argument 'points'[...][1].x: expected int, got str"
        assert refused(f, {}, {"a": 1}) == "f() argument 'numbers'.keys(): expected int, got str"
        assert refused(f, {}, {}, {"x": 1}, {"x": ""}) == "f() argument 'rest'[1].x: expected int, got str"

    def test_what_a_class_has_against_its_fields(self) -> None:
        def f(p: Picky) -> None: ...

        assert refused(f, {"x": -1}) == "f() argument 'p': x must not be negative"
        assert refused(f, {"x": 13}) == "f() argument 'p': cannot be made a Picky: KeyError: 'thirteen'"

    def test_limits(self) -> None:
        def f(n: Annotated[int, msgspec.Meta(ge=0)], word: Literal["a", "b"] = "a") -> None: ...

        assert refused(f, -1) == "f() argument 'n': expected int >= 0"
        assert refused(f, 1, "c") == "f() argument 'word': invalid enum value 'c'"
        assert Signature.of(f).bind("f", [3, "b"], {}) == ([3, "b"], {})


class TestConversion:
    @pytest.mark.parametrize(
        ("annotation", "value"),
        [
            (Point, Point(1, 2.5)),
            (Job, Job(3, [Point(1)])),
            (Union[Job, Stop], Stop("done")),
            (Optional[Point], Point(1)),
            (Optional[Point], None),
            (list[Point], [Point(1), Point(2)]),
            (dict[str, Point], {"a": Point(1)}),
            (tuple[int, str], (1, "a")),
            (tuple[float, ...], (1.0, 2.0)),
            (Color, Color.BLUE),
            (dict[Color, int], {Color.RED: 1}),
            (Mixed, Mixed.HALF),
            (list[Mixed], [Mixed.WORD]),
            (Pair, Pair(1, "a")),
            (Table, {"a": 1}),
            (set[int], {1, 2}),
            (frozenset[str], frozenset("ab")),
            (dt.datetime, dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc)),
            (dt.timedelta, dt.timedelta(1)),
            (decimal.Decimal, decimal.Decimal("1.5")),
            (uuid.UUID, uuid.UUID(int=7)),
            (complex, 1j),
            (bytes, b"x" * 20_000),
            (bytearray, bytearray(b"x")),
            (int, 2**70),
            (Any, {"a": (1,)}),
            (object, [1]),
            (None, None),
            (Union[int, str], "a"),
            (HasClose, 3),
            (Tree, Tree(1.5, [Tree(2.5)], {"a": Tree(3.5)})),
            (Union[Point, Picky, None], Point(1)),
            (Union[TaggedA, TaggedB], TaggedB(1)),
        ],
        ids=lambda value: str(value)[:40] if not isinstance(value, (set, frozenset, dict)) else None,
    )
    def test_what_was_sent_arrives(self, annotation: Any, value: Any) -> None:
        got = check(annotation, send(value))
        assert type(got) is type(value)
        assert got == value

    @pytest.mark.parametrize(
        ("annotation", "value"),
        [
            (int, True),
            (int, 1.0),
            (int, "1"),
            (bool, 1),
            (float, "1"),
            (str, b"a"),
            (bytes, "aGk="),
            (dt.datetime, "2024-01-01T00:00:00"),
            (decimal.Decimal, "1"),
            (uuid.UUID, str(uuid.UUID(int=7))),
            (list[int], ["a"]),
            (tuple[int, int], [1]),
            (np.ndarray, [1.0]),
            (Color, 3),
            (Mixed, "nothing"),
            (None, 1),
            (Union[int, str], 1.5),
            (Union[np.ndarray, float], "a"),
            (list[Union[np.ndarray, float]], ["a"]),
            (tuple[Union[np.ndarray, float], int], [1.0]),
            (dict[str, Union[np.ndarray, float]], {1: 1.0}),
            (dict[str, Union[np.ndarray, float]], [1]),
            (Tree, {"value": "x"}),
            (Tree, {}),
            (Tree, [1]),
            (Union[TaggedA, TaggedB], {"type": "c", "v": 1}),
            (Odd, {"known": "x", "unknown": 1}),
        ],
        ids=str,
    )
    def test_refused(self, annotation: Any, value: Any) -> None:
        with pytest.raises(InvalidArgument, match=r"f\(\) argument 'x'"):
            check(annotation, value)

    def test_an_int_becomes_a_float(self) -> None:
        for value in (1, -5, 2**60, 2**70):
            got = check(float, value)
            assert type(got) is float
            assert got == value
        with pytest.raises(InvalidArgument):
            check(float, 10**400)

    def test_arrays(self) -> None:
        array = np.arange(3.0)
        for annotation in (
            np.ndarray,
            npt.NDArray[np.float64],
            Optional[np.ndarray],
            Union[np.ndarray, float],
            Union[float, np.ndarray, None],
        ):
            assert check(annotation, array) is array
        assert check(list[np.ndarray], [array])[0] is array
        assert check(list[Union[np.ndarray, float]], [array, 1])[0] is array
        batch = Batch(array, Point(1), dt.datetime(2024, 1, 1), (1, 2), Color.BLUE)  # noqa: DTZ001
        got = check(Batch, send(batch))
        assert np.array_equal(got.data, array)
        assert dataclasses.replace(got, data=array) == batch

    def test_tensors(self) -> None:
        torch = pytest.importorskip("torch")
        tensor = torch.ones(2)
        for annotation in (torch.Tensor, Optional[torch.Tensor], Union[np.ndarray, torch.Tensor]):
            assert check(annotation, tensor) is tensor
        with pytest.raises(InvalidArgument, match="expected Tensor, got ndarray"):
            check(torch.Tensor, np.ones(2))

    def test_numbers_of_numpy_pass_for_those_of_python(self) -> None:
        assert type(check(float, np.float32(1.5))) is float
        assert type(check(int, np.int64(3))) is int
        assert check(bool, np.bool_(True)) is True
        assert check(Point, {"x": np.int8(1), "y": np.float64(2)}) == Point(1, 2.0)
        assert check(list[float], [np.float64(1), 2.0]) == [1.0, 2.0]
        assert type(check(np.float32, np.float32(1))) is np.float32
        with pytest.raises(InvalidArgument, match="expected int, got float32"):
            check(int, np.float32(1))

    def test_a_field_that_cannot_be_found_counts_as_any(self) -> None:
        assert check(Odd, {"known": 1, "unknown": [1]}) == Odd(1, [1])

    def test_fields_inside_what_msgspec_does_not_take(self) -> None:
        def f(x: Tree) -> None: ...

        value = {"value": 1.0, "children": [{"value": 2.0, "names": {"a": {"value": "x"}}}]}
        path = "f() argument 'x'.children[0].names[...].value"
        assert refused(f, value) == f"{path}: expected ndarray | float, got str 'x'"


class TestSignatures:
    def test_nothing_is_copied_when_nothing_changes(self) -> None:
        args, kwargs = [1.0, 2.0], {}
        bound, named = Signature.of(add).bind("add", args, kwargs)
        assert bound is args
        assert named is kwargs

    def test_the_arguments_given_are_left_alone(self) -> None:
        args, kwargs = [1], {"b": 2}
        assert Signature.of(add).bind("add", args, kwargs) == ([1.0], {"b": 2.0})
        assert (args, kwargs) == ([1], {"b": 2})
        assert type(args[0]) is int

    def test_without_annotations(self) -> None:
        signature = Signature.of(free)
        assert signature.bind("free", ["x", None], {}) == (["x", None], {})
        assert signature.bind("free", [], {"a": 1}) == ([], {"a": 1})
        assert signature.returns is Any
        assert refused(free) == "free() is missing argument 'a'"
        assert refused(free, 1, 2, 3) == "free() takes 1 to 2 arguments, got 3"

    def test_defaults(self) -> None:
        assert Signature.of(move).bind("move", [{"x": 1}], {}) == ([Point(1)], {})
        assert Signature.of(move).bind("move", [{"x": 1}], {"fast": True}) == ([Point(1)], {"fast": True})
        assert refused(move, {"x": 1}, fast=1) == "move() argument 'fast': expected bool, got int 1"

        def implicit(a: int = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013

        assert Signature.of(implicit).bind("f", [None], {}) == ([None], {})

    def test_required_by_name(self) -> None:
        def f(a: int, *, b: int) -> None: ...

        assert refused(f, 1) == "f() is missing argument 'b'"
        assert Signature.of(f).bind("f", [1], {"b": 2}) == ([1], {"b": 2})

    def test_rest(self) -> None:
        def typed(a: int, *rest: float, **named: Point) -> None: ...
        def untyped(a: int, *rest, **named) -> None: ...  # type: ignore[no-untyped-def]

        got = Signature.of(typed).bind("f", [1, 2, 3], {"p": {"x": 1}})
        assert got == ([1, 2.0, 3.0], {"p": Point(1)})
        assert [type(value) for value in got[0]] == [int, float, float]
        assert refused(typed, 1, 2.0, "x") == "typed() argument 'rest'[1]: expected float, got str 'x'"
        assert refused(typed, 1, p=3) == "typed() argument 'p': expected Point, got int 3"
        assert Signature.of(untyped).bind("f", [1, "x", None], {"k": []}) == ([1, "x", None], {"k": []})
        assert refused(untyped, "1", "x") == "untyped() argument 'a': expected int, got str '1'"

    def test_quotes(self) -> None:
        """All annotations in this file are text. One that names nothing counts as Any."""

        def f(a: Nowhere, b: list[Nowhere], c: Point, d: int) -> Nowhere: ...  # type: ignore[name-defined]  # noqa: F821

        signature = Signature.of(f)
        assert signature.returns is Any
        assert signature.bind("f", [1, "x", {"x": 1}, 2], {}) == ([1, "x", Point(1), 2], {})
        with pytest.raises(InvalidArgument, match="argument 'd'"):
            signature.bind("f", [1, "x", {"x": 1}, "2"], {})

    def test_methods_and_classes(self) -> None:
        class Counter:
            def __init__(self, start: int = 0) -> None: ...
            def increment(self, by: int) -> int: ...  # type: ignore[empty-body]
            @classmethod
            def make(cls, start: int) -> None: ...
            @staticmethod
            def twice(x: float) -> float: ...  # type: ignore[empty-body]
            def __call__(self, x: float) -> None: ...

        counter = Counter()
        for function in (Counter, counter.increment, Counter.make):
            signature = Signature.of(function)
            assert signature.bind("f", [3], {}) == ([3], {})
            with pytest.raises(InvalidArgument, match="expected int, got str"):
                signature.bind("f", ["3"], {})
        for function in (Counter.twice, counter, functools.partial(add, 1.0)):
            (value,), _ = Signature.of(function).bind("f", [3], {})
            assert type(value) is float
        assert Signature.of(counter.increment).returns is int
        assert Signature.of(Counter).returns is Any
        assert Signature.of(Point).bind("Point", [1, 2], {}) == ([1, 2.0], {})
        assert Signature.of(Batch).bind("Batch", [np.ones(1), {"x": 1}], {})[0][1] == Point(1)
        assert Signature.of(Job).bind("Job", [1], {"points": [{"x": 1}]}) == ([1], {"points": [Point(1)]})

    def test_wrapped(self) -> None:
        @functools.wraps(add)
        def wrapper(*args: Any) -> Any: ...

        assert refused(wrapper, 1, "x") == "add() argument 'b': expected float, got str 'x'"

    def test_built_in(self) -> None:
        assert Signature.of(dict).bind("dict", [[(1, 2)]], {"a": 1}) == ([[(1, 2)]], {"a": 1})
        assert Signature.of(len).bind("len", ["abc"], {}) == (["abc"], {})
        assert refused(len) == "len() is missing argument 'obj'"

    def test_the_quick_way_is_quick(self) -> None:
        """Half a microsecond where this was written; a machine under load may take its time."""
        signature = Signature.of(add)
        args: list[Any] = [1.0, 2.0]
        best = min(timeit.repeat(lambda: signature.bind("add", args, {}), number=1000, repeat=20)) / 1000
        assert best < 20e-6


class TestResults:
    def test_converted(self) -> None:
        assert convert_result({"x": 1}, Point, "f") == Point(1)
        assert convert_result([{"x": 1}], list[Point], "f") == [Point(1)]
        assert convert_result(3, Any, "f") == 3
        assert convert_result(None, None, "f") is None
        assert convert_result(3, Annotated[int, ["unhashable"]], "f") == 3

    def test_refused(self) -> None:
        with pytest.raises(InvalidArgument) as caught:
            convert_result("x", int, "f")
        assert str(caught.value) == "f() result: expected int, got str 'x'"
        with pytest.raises(InvalidArgument) as caught:
            convert_result([{"x": "1"}], list[Point], "f")
        assert str(caught.value) == "f() result[0].x: expected int, got str"


JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyvalue"), inner, max_size=3),
    max_leaves=8,
)
SIGNATURE = Signature.of(Tree)


@given(st.lists(JUNK, max_size=4), st.dictionaries(st.sampled_from(["value", "children", "names", "z"]), JUNK))
@settings(max_examples=60, deadline=None)
def test_any_arguments(args: list[Any], kwargs: dict[str, Any]) -> None:
    """They are taken, and then the call works, or refused."""
    try:
        bound, named = SIGNATURE.bind("Tree", args, kwargs)
    except InvalidArgument:
        return
    assert type(Tree(*bound, **named).value) in (float, np.ndarray)
