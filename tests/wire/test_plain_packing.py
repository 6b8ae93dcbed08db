"""Plain objects are packed by the core; the same bytes as those of the codec in Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx._native import core
from phalanx.wire.packing import INLINE, READ_AT_ONCE, SIMPLE, HeadWriter, Limits, pack

pytestmark = pytest.mark.skipif(core is None, reason="there is no core here")

DEPTH = Limits().max_depth
EDGES = [
    0,
    *(sign * (1 << bits) + by for bits in (5, 7, 8, 15, 16, 31, 32, 62) for sign in (1, -1) for by in (-1, 0, 1)),
]
LENGTHS = (0, 1, 15, 16, 31, 32, 255, 256, 65_535, 65_536)

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
    max_leaves=30,
)


def by_python(value: Any) -> bytes:
    return pack(HeadWriter(False, Limits(), SIMPLE).value(value))


def packed(value: Any) -> bytes | None:
    assert core is not None
    return core.HeadPacker(INLINE, INLINE, READ_AT_ONCE).value(value, DEPTH)


@given(PLAIN)
@settings(max_examples=300, deadline=None)
def test_the_bytes_are_those_of_the_codec(value: Any) -> None:
    assert packed(value) == by_python(value)


@pytest.mark.parametrize("number", [*EDGES, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
def test_every_length_of_an_integer(number: int) -> None:
    assert packed(number) == by_python(number)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_form_of_a_length(length: int) -> None:
    values: list[Any] = ["x" * length, [None] * length, {str(number): number for number in range(length)}]
    if length <= INLINE:
        values.append(b"x" * length)
    for value in values:
        assert packed(value) == by_python(value)


def test_numbers_keep_their_bits() -> None:
    for value in (0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324):
        assert packed(value) == by_python(value)


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [2**64, -(2**63) - 1, "\ud800", (1,), {1: 2}, {Text("a"): 1}, Text("a"), bytearray(3), bytes(INLINE + 1), 1j, {1}],
    ids=lambda value: f"{type(value).__name__}",
)
def test_what_is_not_plain_is_left_to_the_codec(value: Any) -> None:
    assert packed(value) is None
    assert packed([0, {"a": value}]) is None


def nested(levels: int) -> Any:
    value: Any = 0
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def test_the_depth_is_bounded() -> None:
    assert packed(nested(DEPTH)) == by_python(nested(DEPTH))
    assert packed(nested(DEPTH + 1)) is None
    circle: list[Any] = []
    circle.append(circle)
    assert packed(circle) is None
