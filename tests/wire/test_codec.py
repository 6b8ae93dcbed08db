"""The object codec: every type arrives as it was, and nothing malformed gets through."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import importlib.util
import math
import pickle
import subprocess
import sys
import tracemalloc
import uuid
import zoneinfo
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import BackendUnavailable, ProtocolError, UnsupportedArray, UsageError
from phalanx.wire.codec import Encoded, Limits, decode, decode_head, encode
from phalanx.wire.packing import Blob, Code

pack = msgspec.msgpack.encode
Ext = msgspec.msgpack.Ext


def stable_id(value: object) -> str | None:
    """The same in every process: text that shows sets or addresses would not be, and xdist compares the names."""
    return None if isinstance(value, (set, frozenset, dict, list, tuple)) else repr(value)[:60]


def round_trip(obj: Any, **options: Any) -> Any:
    encoded = encode(obj, **options)
    return decode(encoded.head, b"".join(encoded.buffers), **options)


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):  # in the same order, too
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, (set, frozenset)):
        return same(sorted(a, key=repr), sorted(b, key=repr))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype) and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


UTC = dt.timezone.utc
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**63,
    -(2**63),
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    10**400,
    -(10**400),
    0.0,
    math.inf,
    math.nan,
    1.5e-300,
    "",
    "snow ☃",
    "lone \ud800 surrogate",
    b"",
    b"bytes",
    b"x" * 100_000,
    bytearray(b"mutable"),
    bytearray(100_000),
    [],
    [1, [2.5, ["three", None]], True],
    (),
    (1, (2, [3, (4,)])),
    [(), ((),)],
    {},
    {"a": 1, "b": [1, 2], "c": {"d": (1, 2)}},
    {1: "int", 2.5: "float", None: "none", False: "bool", b"b": "bytes", "s": "str"},
    {(1, (2, "x")): [3], frozenset({1}): {4}, 2**70: "big", 1j: "complex", "\ud800": 1},
    collections.OrderedDict([("b", 1), ("a", (2,)), ((3,), 4)]),
    set(),
    {1, "two", (3,)},
    frozenset(),
    frozenset({frozenset({1}), 2}),
    1 + 2j,
    complex(-0.0, math.inf),
    dt.date(2024, 2, 29),
    dt.date.max,
    dt.time(1, 2, 3, 4, fold=1),
    dt.time(1, tzinfo=dt.timezone(dt.timedelta(hours=-5), "EST")),
    dt.datetime(2024, 2, 29, 1, 2, 3, 4),  # noqa: DTZ001
    dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=UTC),
    dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=23, microseconds=7))),
    dt.timedelta(-3, 4, 5),
    dt.timedelta.max,
    decimal.Decimal("-1.500"),
    decimal.Decimal("Infinity"),
    decimal.Decimal("1E+1000"),
    uuid.UUID(int=12345),
]


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Word(str, enum.Enum):
    YES = "yes"


class Point(NamedTuple):
    x: int


class MyInt(int):
    pass


class MyDict(dict):  # type: ignore[type-arg]
    pass


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


SCALARS: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=40)
SCALARS = SCALARS | st.text(st.characters(codec=None))
KEYS = SCALARS | st.tuples(st.integers(), st.text(max_size=3)) | st.dates() | st.uuids()
LEAVES = SCALARS | st.complex_numbers(allow_nan=False) | st.datetimes() | st.timedeltas() | st.decimals(allow_nan=False)
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(KEYS, max_size=4)
    ),
    max_leaves=20,
)


class TestPlainData:
    @pytest.mark.parametrize("value", VALUES, ids=stable_id)
    def test_round_trip(self, value: Any) -> None:
        assert same(round_trip(value), value)
        nested = {"list": [value], "tuple": (value, 1), "deep": [[(value,)]]}
        assert same(round_trip(nested), nested)

    def test_everything_at_once(self) -> None:
        assert same(round_trip(VALUES), VALUES)

    def test_time_zones_keep_their_name_and_fold(self) -> None:
        value = dt.datetime(2024, 1, 1, fold=1, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET"))
        got = round_trip(value)
        assert (got.tzname(), got.fold, got.utcoffset()) == ("CET", 1, dt.timedelta(hours=1))
        assert round_trip(dt.datetime.now(UTC)).tzinfo is UTC

    @pytest.mark.parametrize(
        "value", [Level.LOW, Word.YES, Color.RED, Point(1), MyInt(1), MyDict(), range(3), object()]
    )
    def test_other_types_are_refused_rather_than_flattened(self, value: Any) -> None:
        for obj in (value, [value], {"k": value}, (1, value)):
            with pytest.raises(UsageError, match=f"cannot send an object of type .*{type(value).__name__} at "):
                encode(obj)

    @given(OBJECTS)
    @settings(max_examples=100, deadline=None)
    def test_any_object(self, value: Any) -> None:
        assert same(round_trip(value), value)

    @pytest.mark.parametrize(
        ("value", "head"),
        [
            ({"a": 1, "b": [True, None]}, "82 a161 01 a162 92 c3 c0"),
            ((1, "x"), "d6 01 92 01 a178"),
            ({1}, "d5 02 91 01"),
            ({(): 2}, "c7 05 04 92 d4 01 90 02"),
            (2**64, "c7 09 06 000000000000000001"),
            (bytearray(b"ab"), "d5 08 6162"),
            (dt.date(2024, 2, 29), "c7 06 0a 93 cd07e8 02 1d"),
            (np.float32(1), "c7 0b 10 92 a33c6634 c404 0000803f"),
            (np.array([[1, 2]], "<i2"), "c7 0a 11 94 04 920102 a33c6932 c2"),
            (b"x" * 60_000, "c7 05 13 92 cdea60 00"),
        ],
    )
    def test_golden_bytes(self, value: Any, head: str) -> None:
        """The wire must not change without a new version of the protocol."""
        assert encode(value).head == bytes.fromhex(head)


SIMPLE_DTYPES = [
    "?",
    "b",
    "B",
    "<i2",
    ">i4",
    "<u8",
    "<f2",
    "<f4",
    ">f8",
    "<c8",
    "<c16",
    "<M8[ns]",
    "<M8[25s]",
    "<m8[D]",
    "<M8",
]
STRUCTURED = np.dtype([("x", "<f4"), ("inner", [("flag", "?"), ("name", "S3")]), ("grid", ">i2", (2, 3))])
PADDED = np.dtype({"names": ["a", "b"], "formats": ["u1", "<f8"], "offsets": [0, 8], "itemsize": 24})


class TestArrays:
    @pytest.mark.parametrize("dtype", [*SIMPLE_DTYPES, "S5", "<U7", "V6", STRUCTURED, PADDED], ids=stable_id)
    @pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)], ids=stable_id)
    def test_dtypes_and_shapes(self, dtype: Any, shape: tuple[int, ...]) -> None:
        array = np.zeros(shape, dtype)
        array.reshape(-1).view(np.uint8)[::2] = 1
        got = round_trip({"x": [array]})["x"][0]
        assert same(got, array)
        assert got.flags.writeable
        assert got.flags.aligned

    def test_memory_is_not_copied(self) -> None:
        array = np.arange(1000.0)
        encoded = encode([array])
        assert np.shares_memory(np.frombuffer(encoded.buffers[0], np.uint8), array)
        plan = decode_head(encoded.head, payload_bytes=encoded.payload_bytes)
        target = plan.allocate()
        target[:] = encoded.buffers[0]
        (got,) = plan.build(target)
        assert np.shares_memory(got, np.frombuffer(target, np.uint8))
        got += 1
        assert got[999] == 1000

    def test_orders(self) -> None:
        base = np.arange(24.0).reshape(2, 3, 4)
        fortran = np.asfortranarray(base)
        got = round_trip(fortran)
        assert same(got, base)
        assert got.flags.f_contiguous
        assert np.shares_memory(np.frombuffer(encode(fortran).buffers[0], np.uint8), fortran)
        for view in (base[:, ::2], base[::-1], base.transpose(1, 0, 2), np.broadcast_to(base[0, 0, :1], (5,))):
            assert same(round_trip(view), view)

    def test_read_only_arrays_arrive_writable(self) -> None:
        array = np.arange(3)
        array.flags.writeable = False
        assert round_trip(array).flags.writeable

    def test_many_arrays_lie_aligned_in_one_payload(self) -> None:
        arrays = [np.full(size, size, np.uint8) for size in (1, 0, 63, 64, 65, 128, 3)]
        encoded = encode({"arrays": arrays, "blob": b"y" * 20_000, "t": (np.ones(3),)})
        assert encoded.nbytes == len(encoded.head) + sum(map(len, encoded.buffers))
        plan = decode_head(bytearray(encoded.head), payload_bytes=encoded.payload_bytes)
        target = plan.allocate()
        target[:] = b"".join(encoded.buffers)
        got = plan.build(target)
        assert same(got, {"arrays": arrays, "blob": b"y" * 20_000, "t": (np.ones(3),)})
        addresses = [array.__array_interface__["data"][0] for array in [*got["arrays"], got["t"][0]] if array.size]
        assert [address % 64 for address in addresses] == [0] * len(addresses)

    @pytest.mark.parametrize(
        "value",
        [
            np.bool_(True),
            np.int8(-3),
            np.uint64(2**64 - 1),
            np.float16(1.5),
            np.float64(math.inf),
            np.complex64(1j),
            np.str_("snow ☃"),
            np.str_(""),
            np.bytes_(b"abc"),
            np.datetime64("2024-02-29T01:02:03", "ns"),
            np.timedelta64(3, "h"),
            np.zeros((), STRUCTURED)[()],
        ],
        ids=stable_id,
    )
    def test_scalars(self, value: Any) -> None:
        assert same(round_trip(value), value)
        assert round_trip(value).dtype == value.dtype
        if not isinstance(value, np.void):
            assert same(round_trip({value: 1}), {value: 1})

    @pytest.mark.parametrize(
        ("array", "why"),
        [
            (np.array([object()]), "Python objects"),
            (np.zeros(1, [("o", "O")]), "Python objects"),
            (np.zeros(1, np.longdouble), "differs between machines"),
            (np.zeros(1, np.clongdouble), "differs between machines"),
            (np.zeros(3, "V0"), "no bytes"),
            (np.zeros(1, [(("title", "name"), "f4")]), "title"),
        ],
        ids=lambda value: str(value.dtype) if isinstance(value, np.ndarray) else None,
    )
    def test_refused_dtypes(self, array: npt.NDArray[Any], why: str) -> None:
        with pytest.raises(UnsupportedArray, match=rf"at \$\['w'\]: .*{why}.*allow_pickle=True"):
            encode({"w": array})

    @pytest.mark.parametrize("array", [np.ma.array([1]), np.zeros(2).view(np.recarray)], ids=lambda x: type(x).__name__)
    def test_subclasses_are_refused(self, array: Any) -> None:
        with pytest.raises(UsageError, match=r"send np\.asarray\(x\)"):
            encode(array)


class TestRefused:
    @pytest.mark.parametrize(
        ("value", "path"),
        [
            (object(), "$"),
            ({"model": {"layers": [1, 2, 3, object()]}}, "$['model']['layers'][3]"),
            ([(1, {(2, 3): object()})], "$[0][1][(2, 3)]"),
            ({(1, object()): 2}, "$.keys()[1]"),
            ([{1, (2, Point(3))}], "$[0]{...}[1]"),
            (collections.OrderedDict(a=object()), "$['a']"),
            ({"k" * 100: object()}, "$['" + "k" * 36 + "...]"),
        ],
    )
    def test_the_place_is_named(self, value: Any, path: str) -> None:
        with pytest.raises(UsageError) as caught:
            encode(value)
        assert f" at {path}: " in str(caught.value)
        assert "allow_pickle=True" in str(caught.value)

    def test_cycles(self) -> None:
        loop: list[Any] = []
        loop.append(loop)
        table: dict[str, Any] = {}
        table["t"] = (table,)
        for value in (loop, table):
            with pytest.raises(UsageError, match="contains itself"):
                encode(value)

    def test_time_zone(self) -> None:
        with pytest.raises(UsageError, match=r"ZoneInfo.*astimezone"):
            encode(dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")))

    def test_limits(self) -> None:
        with pytest.raises(UsageError, match="its structure takes 12 bytes, and 10 bytes are allowed"):
            encode("x" * 11, limits=Limits(max_head=10))
        with pytest.raises(UsageError, match="its arrays take 80 bytes, and 79 bytes are allowed"):
            encode(np.zeros(10), limits=Limits(max_payload=79))
        with pytest.raises(UsageError, match="has 2 arrays"):
            encode([np.zeros(1)] * 2, limits=Limits(max_arrays=1))

    @pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: {(1,): x}])
    def test_depth_is_the_same_on_both_sides(self, wrap: Any) -> None:
        value: Any = 1
        for _ in range(10):
            value = wrap(value)
        limits = Limits(max_depth=10)
        deeper = encode(wrap(value)).head
        if wrap(1) == {(1,): 1}:
            limits = Limits(max_depth=11)  # the key is one level deeper
            deeper = encode(wrap(wrap(value))).head
        assert round_trip(value, limits=limits) == value
        with pytest.raises(ProtocolError, match="nested deeper"):
            decode(deeper, limits=limits)
        with pytest.raises(UsageError, match="nested deeper"):
            encode(wrap(wrap(value)), limits=limits)


class TestPickle:
    def test_both_sides_must_allow_it(self) -> None:
        value = {
            "p": Point(1),
            "r": [range(3), Color.RED],
            "zone": dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
        }
        encoded = encode(value, allow_pickle=True)
        assert same(round_trip(value, allow_pickle=True), value)
        with pytest.raises(UsageError, match="allow_pickle=True"):
            decode_head(encoded.head, payload_bytes=0)

    def test_nothing_is_unpickled_before_everything_is_checked(self) -> None:
        class Bomb:
            def __reduce__(self) -> Any:
                return (pytest.fail, ("unpickled",))

        small, large = pickle.dumps(Bomb()), pickle.dumps([Bomb(), bytes(20_000)])
        for head, size in (
            (pack([Ext(Code.PICKLE, small)]), 0),
            (pack([Ext(Code.BLOB, pack((len(large), Blob.PICKLE)))]), len(large)),
        ):
            with pytest.raises(UsageError, match="allow_pickle=True"):
                decode_head(head, payload_bytes=size)
            decode_head(head, payload_bytes=size, allow_pickle=True)
        with pytest.raises(ProtocolError):
            decode(pack([Ext(Code.PICKLE, small), Ext(99, b"")]), allow_pickle=True)

    def test_arrays_of_objects_and_keys(self) -> None:
        value = {Color.RED: np.array([None, "x"], object), "big": [range(3), np.ma.array([1] * 9000)]}
        got = round_trip(value, allow_pickle=True)
        assert list(got) == [Color.RED, "big"]
        assert got[Color.RED].tolist() == [None, "x"]
        assert got["big"][1].tolist() == [1] * 9000

    def test_failures_are_usage_errors(self) -> None:
        with pytest.raises(UsageError, match=r"at \$\[1\]: it cannot be pickled: RuntimeError: not me"):
            encode([1, Unpicklable()], allow_pickle=True)
        with pytest.raises(UsageError, match="cannot be loaded here: UnpicklingError"):
            decode(pack(Ext(Code.PICKLE, b"junk")), allow_pickle=True)


def array_head(nbytes: Any, shape: Any, dtype: Any, fortran: Any = False) -> bytes:
    return pack(Ext(Code.ARRAY, pack((nbytes, shape, dtype, fortran))))


def nested_structured(levels: int) -> Any:
    description: Any = "|u1"
    for _ in range(levels):
        description = [1, [["x", 0, description, []]]]
    return description


MALFORMED = {
    "empty": b"",
    "truncated": pack([1, 2])[:-1],
    "trailing": pack(1) + b"\x00",
    "bad opcode": b"\xc1",
    "bad utf-8": b"\xa1\xff",
    "unknown extension": pack(Ext(21, b"")),
    "negative extension": pack(Ext(-2, b"")),
    "unhashable key": b"\x81" + pack(Ext(Code.BYTEARRAY, b"")) + b"\x01",
    "array as key": b"\x81" + array_head(0, (0,), "|u1") + b"\x01",
    "unhashable in set": pack(Ext(Code.SET, pack([[]]))),
    "set of nothing": pack(Ext(Code.SET, b"")),
    "tuple of a map": pack(Ext(Code.TUPLE, pack({}))),
    "odd dict": pack(Ext(Code.DICT, pack([1]))),
    "complex": pack(Ext(Code.COMPLEX, bytes(15))),
    "uuid": pack(Ext(Code.UUID, bytes(15))),
    "decimal": pack(Ext(Code.DECIMAL, b"1.2.3")),
    "decimal bytes": pack(Ext(Code.DECIMAL, b"\xff")),
    "date": pack(Ext(Code.DATE, pack((2023, 2, 29)))),
    "date of floats": pack(Ext(Code.DATE, pack((2023.5, 2, 1)))),
    "huge year": pack(Ext(Code.DATE, pack((2**63, 2, 1)))),
    "time of seven": pack(Ext(Code.TIME, pack(((1,) * 7, None, 0)))),
    "fold": pack(Ext(Code.TIME, pack(((1,) * 4, None, 2)))),
    "zone": pack(Ext(Code.TIME, pack(((1,) * 4, (10**12,), 0)))),
    "zone of text": pack(Ext(Code.TIME, pack(((1,) * 4, ("x",), 0)))),
    "zone of nothing": pack(Ext(Code.TIME, pack(((1,) * 4, 7, 0)))),
    "timedelta": pack(Ext(Code.TIMEDELTA, pack((2**62, 0, 0)))),
    "surrogate junk": pack(Ext(Code.STR, b"\xff")),
    "scalar too short": pack(Ext(Code.SCALAR, pack(("<f8", bytes(7))))),
    "scalar of objects": pack(Ext(Code.SCALAR, pack(("|O8", bytes(8))))),
    "scalar no character": pack(Ext(Code.SCALAR, pack(("<U1", b"\xff" * 4)))),
    "scalar bool": pack(Ext(Code.SCALAR, pack(("|b1", b"\x02")))),
    "dtype object": array_head(8, (1,), "|O8"),
    "dtype words": array_head(4, (1,), "float32"),
    "dtype list": array_head(8, (1,), "f4,f4"),
    "dtype long double": array_head(16, (1,), "<f16"),
    "dtype huge": array_head(0, (0,), "<U999999999"),
    "dtype number": array_head(8, (1,), 7),
    "dtype none": array_head(8, (1,), None),
    "dtype without bytes": array_head(0, (10**15,), "|V0"),
    "shape of text": array_head(4, ("4",), "|u1"),
    "shape negative": array_head(1, (-1, -1), "|u1"),
    "shape overflow": array_head(0, (2**62, 4), "|u1"),
    "shape overflow at zero": array_head(0, (0, 2**62, 4), "|u1"),
    "too many dimensions": array_head(1, (1,) * 65, "|u1"),
    "wrong length": array_head(5, (1,), "<f4"),
    "negative length": array_head(-1, (1,), "|u1"),
    "structured recursion": array_head(1, (1,), nested_structured(100)),
    "structured overlong field": array_head(4, (1,), [4, [["x", 2, "<f4", []]]]),
    "structured negative offset": array_head(4, (1,), [4, [["x", -1, "|u1", []]]]),
    "structured twice the name": array_head(4, (1,), [4, [["x", 0, "|u1", []], ["x", 1, "|u1", []]]]),
    "structured no names": array_head(4, (1,), [4, [[3, 0, "|u1", []]]]),
    "structured size": array_head(4, (1,), ["4", []]),
    "structured huge": array_head(2**40, (1,), [2**40, []]),
    "structured big grid": array_head(4, (1,), [4, [["x", 0, "|u1", [2**40, 2**40]]]]),
    "tensor dtype": pack(Ext(Code.TENSOR, pack((8, (1,), "Tensor", False)))),
    "tensor gradient": pack(Ext(Code.TENSOR, pack((8, (1,), "int64", True)))),
    "tensor length": pack(Ext(Code.TENSOR, pack((8, (1,), "float32", False)))),
    "blob kind": pack(Ext(Code.BLOB, pack((0, 7)))),
    "blob negative": pack(Ext(Code.BLOB, pack((-1, 0)))),
    "blob overlong": pack(Ext(Code.BLOB, pack((2**62, 0)))),
    "nested lists": b"\x91" * 100_000 + b"\x90",
    "nested maps": b"\x81\x01" * 100_000 + b"\x90",
    "long list": b"\xdd\xff\xff\xff\xff" + b"\xc0" * 10,
    "long map": b"\xdf\xff\xff\xff\xff",
    "long str": b"\xdb\xff\xff\xff\xff",
    "long bytes": b"\xc6\xff\xff\xff\xff",
    "long extension": b"\xc9\xff\xff\xff\xff\x01",
    "bad timestamp": b"\xc7\x0c\xff" + b"\xff" * 12,
}


class TestMalformed:
    @pytest.mark.parametrize("head", MALFORMED.values(), ids=MALFORMED.keys())
    def test_heads(self, head: bytes) -> None:
        tracemalloc.start()
        try:
            for payload_bytes in (0, 1, 4, 8):
                with pytest.raises(ProtocolError):
                    decode_head(head, payload_bytes=payload_bytes, allow_pickle=True)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 1_000_000 + 100 * len(head)

    def test_nested_tuples(self) -> None:
        head = pack(1)
        for _ in range(300):
            head = pack(Ext(Code.TUPLE, pack([msgspec.Raw(head)])))
        with pytest.raises(ProtocolError, match="nested deeper than 64 levels"):
            decode_head(head, payload_bytes=0)

    def test_payload_of_another_size(self) -> None:
        encoded = encode([np.zeros(3), np.zeros(2)])
        for size in (0, encoded.payload_bytes - 1, encoded.payload_bytes + 1, 2**40, -1):
            with pytest.raises(ProtocolError):
                decode_head(encoded.head, payload_bytes=size)
        plan = decode_head(encoded.head, payload_bytes=encoded.payload_bytes)
        with pytest.raises(UsageError, match="the target has 0 bytes .expected 80"):
            plan.build()

    def test_limits(self) -> None:
        encoded = encode({"a": [np.zeros(3), np.zeros(2)]})
        for limits in (Limits(max_head=3), Limits(max_payload=79), Limits(max_arrays=1), Limits(max_depth=1)):
            with pytest.raises(ProtocolError):
                decode_head(encoded.head, payload_bytes=encoded.payload_bytes, limits=limits)

    def test_bools_that_are_no_bools(self) -> None:
        for array in (np.zeros(3, "?"), np.zeros(2, STRUCTURED)):
            encoded = encode(array)
            payload = bytearray(encoded.buffers[0])
            payload[:] = b"\x02" * len(payload)
            with pytest.raises(ProtocolError, match="neither 0 nor 1"):
                decode(encoded.head, payload)

    @given(st.binary(max_size=80))
    @settings(max_examples=100, deadline=None)
    def test_junk(self, data: bytes) -> None:
        self.check(Encoded(data, []))

    @given(st.sampled_from([encode(value) for value in VALUES if len(encode(value).head) < 300]), st.data())
    @settings(max_examples=100, deadline=None)
    def test_mutations(self, encoded: Encoded, data: st.DataObject) -> None:
        head = bytearray(encoded.head)
        head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
        self.check(Encoded(bytes(head), encoded.buffers))

    @staticmethod
    def check(encoded: Encoded) -> None:
        try:
            value = decode(encoded.head, b"".join(encoded.buffers))
        except ProtocolError:
            return
        except UsageError as error:
            if "allow_pickle" not in str(error):  # it says that it was pickled
                raise
            return
        assert same(round_trip(value), value) or value != value


class TestTensorsWithoutTorch:
    @pytest.fixture(autouse=True)
    def _no_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)  # import raises ImportError

    @staticmethod
    def decode_tensor(name: str, nbytes: int, shape: tuple[int, ...], payload: bytes) -> Any:
        return decode(pack(Ext(Code.TENSOR, pack((nbytes, shape, name, False)))), payload)

    def test_arrive_as_numpy(self) -> None:
        got = self.decode_tensor("float32", 8, (2, 1), np.array([1, 2], "<f4").tobytes())
        assert same(got, np.array([[1], [2]], "<f4"))

    def test_what_numpy_lacks(self) -> None:
        with pytest.raises(BackendUnavailable, match="bfloat16 .* pip install torch"):
            self.decode_tensor("bfloat16", 4, (2,), bytes(4))

    def test_bools(self) -> None:
        with pytest.raises(ProtocolError, match="neither 0 nor 1"):
            self.decode_tensor("bool", 2, (2,), b"\x01\x02")


class TestTensors:
    @pytest.fixture
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    def test_dtypes(self, torch: Any) -> None:
        from phalanx.wire.dtypes import TENSOR_ITEMSIZES

        for name, itemsize in TENSOR_ITEMSIZES.items():
            dtype = getattr(torch, name)
            for shape in ((), (0,), (3, 2), (2, 0, 1)):
                tensor = torch.ones(shape).to(dtype)
                assert tensor.itemsize == itemsize
                got = round_trip({"w": tensor})["w"]
                assert type(got) is torch.Tensor
                assert (got.dtype, got.shape) == (dtype, tensor.shape)
                assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))

    def test_memory_is_not_copied(self, torch: Any) -> None:
        tensor = torch.arange(1000, dtype=torch.float32)
        (buffer,) = encode(tensor).buffers
        assert np.frombuffer(buffer, np.uint8).__array_interface__["data"][0] == tensor.data_ptr()
        got = round_trip(tensor)
        got += 1
        assert got[999] == 1000
        assert got.data_ptr() % 64 == 0

    def test_views(self, torch: Any) -> None:
        base = torch.arange(24.0).reshape(2, 3, 4)
        for tensor in (base[:, ::2], base.T if base.ndim == 2 else base.permute(2, 0, 1), base[1:].expand(4, 3, 4)):
            assert torch.equal(round_trip(tensor), tensor)
        for tensor in (base[:1, 0, :1], base[1, 1, 1:2].as_strided((1,), (7,))):  # contiguous, whatever the strides
            assert torch.equal(round_trip(tensor), tensor)
        conjugate = torch.tensor([1 + 2j]).conj()
        assert round_trip(conjugate).tolist() == [1 - 2j]

    def test_gradients(self, torch: Any) -> None:
        leaf = torch.ones(3, requires_grad=True)
        for tensor in (leaf, leaf * 2):
            got = round_trip(tensor)
            assert got.requires_grad
            assert got.is_leaf
            assert torch.equal(got.detach(), tensor.detach())
        assert not round_trip(leaf.detach()).requires_grad

    def test_a_model(self, torch: Any) -> None:
        state = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).state_dict()
        got = round_trip(state)
        assert type(got) is collections.OrderedDict
        assert list(got) == list(state)
        assert all(torch.equal(got[key], state[key]) for key in state)

    def test_refused(self, torch: Any) -> None:
        with pytest.raises(UnsupportedArray, match="layout torch.sparse"):
            encode([torch.ones(2).to_sparse()])
        with pytest.raises(UnsupportedArray, match=r"tensor on meta .*\.cpu\(\)"):
            encode([torch.ones(2, device="meta")])
        with pytest.raises(UsageError, match=r"Parameter at \$: .*send x\.detach\(\)"):
            encode(torch.nn.Parameter(torch.ones(2)))


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Inner:
    x: Any


@dataclasses.dataclass
class Outer:
    inner: Inner
    color: Color = Color.RED


class TestTypes:
    """Objects of the sender's types: with their names, for a receiver that knows them."""

    def test_they_come_as_plain_data(self) -> None:
        encoded = encode([Outer(Inner(np.arange(3))), (Color.RED, Point(1))], structs="typed")
        payload = b"".join(encoded.buffers)
        (outer, rest) = decode(encoded.head, payload, typed=True)
        assert outer["inner"]["x"].tolist() == [0, 1, 2]
        assert outer["color"] == "red"
        assert rest == ("red", (1,))

    @pytest.mark.parametrize(
        ("value", "name"), [(Outer(Inner(1)), "Outer"), ([Inner(1)], "Inner"), ({1: Color.RED}, "Color")]
    )
    def test_a_receiver_that_does_not_know_them_is_told(self, value: Any, name: str) -> None:
        encoded = encode(value, structs="typed")
        with pytest.raises(UsageError, match=f"holds a {name} of the sender's.*type={name}"):
            decode(encoded.head, b"".join(encoded.buffers))

    def test_pickle_goes_first(self) -> None:
        encoded = encode(Inner(1), structs="typed", allow_pickle=True)
        assert decode(encoded.head, b"".join(encoded.buffers), allow_pickle=True) == Inner(1)

    def test_plain_data_needs_no_type(self) -> None:
        for value in VALUES:
            encoded, same_bytes = encode(value), encode(value, structs="typed")
            assert encoded.head == same_bytes.head

    def test_nesting_is_limited_alike_on_both_sides(self) -> None:
        value: Any = Color.RED
        sent = 0
        for depth in range(1, 70):
            value = Inner(value) if depth % 2 else (value,)
            with contextlib.suppress(UsageError):
                encoded = encode(value, structs="typed")
                decode(encoded.head, typed=True)  # what can be sent can be read
                sent = depth
        assert 30 < sent < 69

    @pytest.mark.parametrize("content", [[], ["A"], [1, 2], ["A", 1, 2], {"A": 1}, "A"])
    def test_malformed(self, content: Any) -> None:
        head = pack(Ext(Code.TYPED, pack(content)))
        with pytest.raises(ProtocolError):
            decode(head, typed=True)

    def test_a_name_is_cut_short(self) -> None:
        head = pack(Ext(Code.TYPED, pack(["A" * 10_000, 1])))
        with pytest.raises(UsageError) as found:
            decode(head)
        assert len(str(found.value)) < 1000

    @pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
    def test_jax_arrays_have_a_hint(self) -> None:
        script = "import jax.numpy as jnp; from phalanx.wire.codec import encode; encode({'x': jnp.ones(2)})"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100)
        assert "an array of JAX is not sent inside an object (send np.asarray(x)" in done.stderr
