"""What travels in a remote call: every type arrives, both ways agree, and nothing malformed gets through."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import math
import tracemalloc
import uuid
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx._native import core, tensor_reader
from phalanx.errors import InvalidMessage, UnsupportedArray, UsageError
from phalanx.rpc import payload as payload_module
from phalanx.rpc.payload import (
    MAX_NAME,
    NOT_FAST,
    FrameBody,
    Limits,
    PlannedValue,
    decode_error,
    encode_call,
    encode_error,
    encode_value,
    fast_call,
    fast_value,
    plan_call,
    plan_value,
)
from phalanx.wire import codec, dtypes, near_arrays
from phalanx.wire.packing import INLINE, INLINE_IN_SHORT, PLAIN, READ_AT_ONCE, Code

LIMITS = Limits()
pack = msgspec.msgpack.encode
Ext = msgspec.msgpack.Ext


class Color(enum.Enum):
    RED = 1
    BOTH = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Point:
    x: int
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int


class Job(msgspec.Struct, rename="camel"):
    max_steps: int
    at: Any = msgspec.UNSET


class Tagged(msgspec.Struct, tag="job", tag_field="kind"):
    x: int


class Row(msgspec.Struct, array_like=True, tag="row"):
    x: int
    y: int


class Pair(NamedTuple):
    a: int
    b: Any


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype) and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a).__name__ == "Tensor":
        return bool(a.dtype == b.dtype) and same(a.numpy(), b.numpy())
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def receive_value(out: FrameBody) -> Any:
    plan = plan_value(out.head, out.payload, LIMITS)
    target = plan.allocate()
    target[:] = b"".join(out.buffers)
    value = plan.build(target)
    quick = fast_value(out.head) if not out.payload else NOT_FAST
    assert quick is NOT_FAST or same(quick, value)
    return value


def receive_call(out: FrameBody) -> Any:
    plan = plan_call(out.head, out.payload, LIMITS)
    target = plan.allocate()
    target[:] = b"".join(out.buffers)
    call = plan.build(target)
    quick = fast_call(out.head) if not out.payload else NOT_FAST
    assert quick is NOT_FAST or same(quick, call)
    return call


ARRAY = np.arange(6, dtype="<f4").reshape(2, 3)
QUICK: list[Any] = [None, True, 0, -1, 2**64 - 1, -(2**63), 1.5, math.nan, math.inf, "", "snow ☃", b"", b"12345678"]
SLOW: list[Any] = [
    2**64,
    "lone \ud800",
    b"x" * 20_000,
    bytearray(b"x"),
    (1, (2,)),
    {1, 2},
    {(1, 2): 3},
    collections.OrderedDict(a=1),
    1j,
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc),
    dt.timedelta(1),
    decimal.Decimal("1.5"),
    uuid.UUID(int=3),
    ARRAY,
    np.float32(1),
    {"a": [ARRAY, (ARRAY, b"y" * 20_000)]},
]
LISTS: list[Any] = [[], [1, [2.5, ["three", None]]], {}, {"a": {"b": [1]}}, {1: 2, None: 3}]


class TestValues:
    @pytest.mark.parametrize("value", QUICK + SLOW + LISTS, ids=lambda value: type(value).__name__)
    def test_round_trip(self, value: Any) -> None:
        for sent in (value, [value], {"k": value}, (value,)):
            out = encode_value(sent, LIMITS)
            assert type(out) is FrameBody
            assert out.payload == sum(map(len, out.buffers))
            assert same(receive_value(out), sent)

    @pytest.mark.parametrize("value", QUICK + SLOW + LISTS, ids=lambda value: type(value).__name__)
    @pytest.mark.usefixtures("no_array_is_near")
    def test_both_ways_write_the_same_bytes(self, value: Any) -> None:
        assert encode_value(value, LIMITS).head == codec.encode(value).head
        call = encode_call("f", 7, 1.5, (value, 1), {"k": value}, LIMITS)
        expected = codec.encode(["f", 7, 1.5, [value, 1], {"k": value}])
        assert call.head == expected.head
        assert b"".join(call.buffers) == b"".join(expected.buffers)

    def test_what_is_quick(self) -> None:
        for value in QUICK + LISTS:
            assert fast_value(encode_value(value, LIMITS).head) is not NOT_FAST
        for value in (2**64, (1,), [{"k": (1,)}], dt.date(2024, 1, 1), np.float32(1)):
            assert fast_value(encode_value(value, LIMITS).head) is NOT_FAST
        assert repr(NOT_FAST) == "NOT_FAST"

    def test_any_buffer_can_be_read(self) -> None:
        head = encode_value([b"abc"] * 50, LIMITS).head
        buffer = bytearray(head)
        got = fast_value(memoryview(buffer))
        buffer[:] = bytes(len(buffer))
        assert got == [b"abc"] * 50
        assert fast_value(bytearray(head)) == got

    def test_limits(self) -> None:
        small = Limits(max_head=10, max_payload=100)
        for value in ("x" * 20, b"x" * 20, [1] * 20, np.zeros(100)):
            with pytest.raises(UsageError, match="are allowed"):
                encode_value(value, small)
            with pytest.raises(UsageError, match="are allowed"):
                encode_call("f", 0, 1.0, (value,), {}, small)


@pytest.fixture
def no_array_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones go as long ones do."""
    if core is not None:
        without = core.HeadPacker(INLINE, INLINE_IN_SHORT, READ_AT_ONCE)
        monkeypatch.setattr(payload_module, "pack_call", without.call)
        monkeypatch.setattr(payload_module, "pack_value", without.value)


def near(array: np.ndarray[Any, Any]) -> Ext:
    """An array as it is in a head."""
    words = pack((array.nbytes, array.shape, array.dtype.str, False))
    return Ext(Code.NEAR_ARRAY, bytes([len(words)]) + words + array.tobytes())


with_core = pytest.mark.skipif(core is None, reason="only the core writes arrays into a head")
DTYPES = "?bBhHiIqQefdFD"


class TestShortArrays:
    """They are in the head."""

    @pytest.mark.parametrize("shape", [(), (1,), (3, 4, 5), (1,) * 32, (INLINE_IN_SHORT,), (2, 1, 64)], ids=str)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_round_trip(self, shape: tuple[int, ...], dtype: str) -> None:
        array = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
        out = encode_call("f", 3, 2.0, (1, array), {"k": array}, LIMITS)
        found = receive_call(out)
        assert same(found, ("f", 3, 2.0, [1, array], {"k": array}))
        assert found[3][1].flags.writeable
        assert found[3][1].ctypes.data % 64 == 0
        assert same(receive_value(encode_value(array, LIMITS)), array)

    @pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32, np.float64])
    def test_types_have_the_names_that_users_know(self, dtype: Any) -> None:
        for count in (1, 2 * INLINE_IN_SHORT):
            [found] = receive_call(encode_call("f", 0, 1.0, (np.ones(count, dtype),), {}, LIMITS))[3]
            assert found.dtype.type is dtype

    @with_core
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 200, 240, 256, 65_000 // 16])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_bytes(self, dtype: str, size: int) -> None:
        array = np.ones(size, np.dtype(dtype).str)  # a long integer, where two types are the same to a machine
        for value, words in ((array, near(array)), ([{"a": array}, 1], [{"a": near(array)}, 1])):
            expected = pack(words)
            out = encode_value(value, LIMITS)
            assert (out.head, out.payload) == (expected, 0) if len(expected) <= READ_AT_ONCE else out.payload
            assert same(receive_value(out), value)

    @with_core
    @pytest.mark.parametrize(
        "array",
        [
            np.zeros((0, 3)),
            np.ones((4, 4))[:, ::2],
            np.ones(3, ">i4"),
            np.array(["text"]),
            np.ones(3, "M8[s]"),
        ],
        ids=lambda array: f"{array.dtype.str}{array.shape}",
    )
    def test_others_have_a_payload_or_go_the_general_way(self, array: np.ndarray[Any, Any]) -> None:
        out = encode_value(array, LIMITS)
        assert fast_value(out.head) is NOT_FAST
        assert same(receive_value(out), array)

    @with_core
    def test_arguments_and_keywords_count_together(self) -> None:
        half = np.arange(INLINE_IN_SHORT // 2, dtype=np.uint8)
        out = encode_call("f", 0, 1.0, (half, half), {"a": half, "b": half}, LIMITS)
        assert out.payload == 2 * INLINE_IN_SHORT
        assert same(receive_call(out), ("f", 0, 1.0, [half, half], {"a": half, "b": half}))

    @with_core
    def test_bytes_are_in_a_short_head_only(self) -> None:
        long = b"x" * 40_000
        for value, payload in ((long, 0), ([long], 0), ([long] * 2, 80_000), ([long] * 2000, 80_000_000)):
            assert encode_value(value, LIMITS).payload >= payload
            assert (encode_call("f", 0, 1.0, (value,), {}, LIMITS).payload == 0) == (payload == 0)
            assert receive_value(encode_value(value, LIMITS)) == value

    @with_core
    def test_all_are_in_the_head_or_none(self) -> None:
        half = np.arange(INLINE_IN_SHORT // 2, dtype=np.uint8)
        for count, fits in ((1, True), (2, True), (3, False), (7, False)):
            out = encode_call("f", 0, 1.0, (half,) * count, {}, LIMITS)
            assert out.payload == sum(map(len, out.buffers)) == (0 if fits else count * len(half))
            assert (fast_call(out.head) is not NOT_FAST) == fits
            assert same(receive_call(out)[3], [half] * count)

    def test_the_memory_of_the_message_is_not_kept(self) -> None:
        head = bytearray(pack(near(ARRAY)))
        found = fast_value(head)
        head[:] = bytes(len(head))
        assert same(found, ARRAY)

    def test_malformed(self) -> None:
        whole = bytes(near(ARRAY).data)
        words = pack((8, (2,), "<f4", False))
        wrong = [
            *(whole[:end] for end in range(len(whole))),
            whole + b"x",
            bytes([200]) + whole[1:],
            bytes([len(words)]) + words.replace(b"f4", b"O8") + bytes(8),
            bytes([len(words)]) + words.replace(b"\x02", b"\x03") + bytes(8),
            bytes([len(words)]) + words[:-1] + b"\xc3" + bytes(8),
            bytes(near(np.array([True, False])).data)[:-1] + b"\x02",
        ]
        for data in wrong:
            for read in (near_arrays.near_array, near_arrays._read):
                with pytest.raises(ValueError, match="extension|malformed"):
                    read(Code.NEAR_ARRAY, memoryview(data))
            for value in (Ext(Code.NEAR_ARRAY, data), [Ext(Code.NEAR_ARRAY, data)]):
                assert fast_value(pack(value)) is NOT_FAST
                with pytest.raises(InvalidMessage, match="array in the head of an object is malformed|neither 0 nor 1"):
                    plan_value(pack(value), 0, LIMITS)
                call = pack(("f", 0, 1.0, [value], {}))
                assert fast_call(call) is NOT_FAST
                with pytest.raises(InvalidMessage, match="array in the head of an object is malformed|neither 0 nor 1"):
                    plan_call(call, 0, LIMITS)

    def test_anywhere_in_an_object(self) -> None:
        for sent, expected in (([near(ARRAY), (1,)], [ARRAY, [1]]), ({"a": [near(ARRAY)]}, {"a": [ARRAY]})):
            assert same(fast_value(pack(sent)), expected)
            assert same(plan_value(pack(sent), 0, LIMITS).build(), expected)
        with pytest.raises(InvalidMessage):  # it can be no key
            plan_value(pack(Ext(Code.DICT, pack([near(ARRAY), 1]))), 0, LIMITS)


class TestShortTensors:
    """They are in the head, too, if they are no more than their elements."""

    @pytest.fixture
    def torch(self) -> Any:
        torch = pytest.importorskip("torch")
        if tensor_reader() is None:
            pytest.skip("this torch does not tell the core where a tensor lies")
        return torch

    def near(self, array: np.ndarray[Any, Any]) -> Ext:
        return Ext(Code.NEAR_TENSOR, near(array).data)

    @pytest.mark.parametrize(
        "dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
    )
    @pytest.mark.parametrize("shape", [(), (1,), (2, 3), (4000,)], ids=str)
    def test_round_trip(self, torch: Any, dtype: str, shape: tuple[int, ...]) -> None:
        tensor = torch.ones(shape, dtype=getattr(torch, dtype))
        for value in (tensor, [{"a": tensor}, 1]):
            out = encode_value(value, LIMITS)
            words = self.near(tensor.numpy())
            assert (out.head, out.payload) == (pack(words if value is tensor else [{"a": words}, 1]), 0)
            got = receive_value(out)
            assert fast_value(out.head) is not NOT_FAST
            got = got if value is tensor else got[0]["a"]
            assert type(got) is torch.Tensor
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(got, tensor)
            assert got.data_ptr() % 64 == 0
            got.zero_()
            assert tensor.all()

    @pytest.mark.parametrize("change", ["clear", "replace", "grow"])
    @pytest.mark.parametrize("kind", [list, dict])
    def test_containers_that_change_while_they_are_read(self, torch: Any, kind: type, change: str) -> None:
        """To look at a tensor may run Python's code, and lets other threads run."""
        names = [f"{number}" for number in range(8)]
        tensors = [torch.full((100,), float(number)) for number in range(8)]
        values: Any = tensors if kind is list else dict(zip(names, tensors, strict=True))
        del tensors
        others = 0

        class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal others
                others += 1
                if change == "clear":
                    values.clear()
                elif change == "grow":
                    more = [str(number) for number in range(1000)]
                    values.extend(more) if kind is list else values.update(zip(more, more, strict=True))
                else:
                    for key in range(8) if kind is list else names:
                        values[key] = torch.full((200,), float(key))
                return function(*args, **(kwargs or {}))

        encode_value(torch.ones(1), LIMITS)  # the first one of a program imports what looks at it
        with Mode():
            out = encode_value(values, LIMITS)
        assert others > 0
        got = receive_value(out)
        for key, tensor in enumerate(got) if kind is list else got.items():
            if isinstance(tensor, torch.Tensor):
                assert (tensor == float(key)).all()
        assert change != "replace" or len(got) == 8

    def test_others_go_the_general_way(self, torch: Any) -> None:
        leaf = torch.ones(3, requires_grad=True)
        others = [
            leaf,
            leaf * 2,
            torch.ones(4, 4).T[:, 1:],
            torch.tensor([1 + 2j]).conj(),
            torch.tensor([1 + 2j]).conj().imag,  # the negative of what lies there
            torch.ones(3, dtype=torch.bfloat16),
            torch.ones(0, 3),
            torch.zeros(4, 2)[4:, 0],  # empty, and its elements would be apart
        ]
        for tensor in others:
            out = encode_value(tensor, LIMITS)
            assert fast_value(out.head) is NOT_FAST
            got = receive_value(out)
            assert torch.equal(got, tensor)
            assert (got.dtype, got.requires_grad) == (tensor.dtype, tensor.requires_grad)
        for refused in (torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3), requires_grad=False)):
            with pytest.raises(UsageError):
                encode_value(refused, LIMITS)

    def test_the_general_way_reads_them(self, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        [got, _] = plan_value(pack([self.near(ARRAY), (1,)]), 0, LIMITS).build()
        assert torch.equal(got, torch.from_numpy(ARRAY))
        assert torch.equal(near_arrays._read(Code.NEAR_TENSOR, memoryview(self.near(ARRAY).data)), got)
        head = pack(self.near(ARRAY))
        with monkeypatch.context() as patch:
            patch.setattr(dtypes, "loaded_torch", lambda: None)  # as where the program has not imported it
            assert fast_value(head) is NOT_FAST
            assert torch.equal(payload_module.read_value(head, LIMITS), got)

    def test_malformed(self, torch: Any) -> None:
        for data in (b"", near(ARRAY).data[:-1], bytes(near(np.array([True])).data)[:-1] + b"\x02"):
            head = pack(Ext(Code.NEAR_TENSOR, bytes(data)))
            assert fast_value(head) is NOT_FAST
            with pytest.raises(InvalidMessage, match="array in the head of an object is malformed|neither 0 nor 1"):
                plan_value(head, 0, LIMITS)


@pytest.mark.usefixtures("no_array_is_near")
class TestArraysAsArguments:
    """They go a short way of their own, which must not be told from the general one."""

    WHOLE = np.arange(60, dtype="<f8").reshape(3, 4, 5)
    ARRAYS = (
        ARRAY,
        np.arange(7, dtype=np.uint8),
        WHOLE,
        WHOLE[:, ::2],
        np.asfortranarray(WHOLE),
        np.ones(3, ">i4"),
        np.array([True, False]),
        np.array(1.0),
        np.zeros((0, 3), np.float32),
        np.array(["text"]),
    )

    @pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype.str}{array.shape}")
    def test_same_bytes_and_same_arrays(self, array: np.ndarray[Any, Any]) -> None:
        args, kwargs = (1, array, ARRAY, "x", b"y"), {"k": array, "n": None, "last": ARRAY}
        out = encode_call("f", 3, 2.0, args, kwargs, LIMITS)
        expected = codec.encode(["f", 3, 2.0, list(args), kwargs])
        assert (out.head, b"".join(out.buffers)) == (expected.head, b"".join(expected.buffers))
        assert same(receive_call(out), ("f", 3, 2.0, list(args), kwargs))
        out = encode_value(array, LIMITS)
        expected = codec.encode(array)
        assert (out.head, b"".join(out.buffers)) == (expected.head, b"".join(expected.buffers))
        assert same(receive_value(out), array)

    def test_which_go_the_short_way(self) -> None:
        for args, kwargs in [((ARRAY,), {}), ((1, ARRAY, "x"), {"k": ARRAY}), ((), {"k": self.WHOLE})]:
            out = encode_call("f", 0, 1.0, args, kwargs, LIMITS)
            assert not isinstance(plan_call(out.head, out.payload, LIMITS), PlannedValue)
        out = encode_value(ARRAY, LIMITS)
        assert not isinstance(plan_value(out.head, out.payload, LIMITS), PlannedValue)
        for value in ([ARRAY], (ARRAY,), np.array([True])):
            out = encode_value(value, LIMITS)
            assert isinstance(plan_value(out.head, out.payload, LIMITS), PlannedValue)

    def test_arrays_are_writable_and_aligned(self) -> None:
        out = encode_call("f", 0, 1.0, (np.arange(3, dtype=np.uint8), self.WHOLE), {}, LIMITS)
        first, second = receive_call(out)[3]
        assert first.flags.writeable
        assert second.flags.writeable
        assert first.ctypes.data % 64 == second.ctypes.data % 64 == 0

    def test_truth_values_are_checked(self) -> None:
        plan = plan_value(encode_value(np.array([True]), LIMITS).head, 1, LIMITS)
        with pytest.raises(InvalidMessage, match="neither 0 nor 1"):
            plan.build(memoryview(bytearray(b"\x02")))

    def test_limits(self) -> None:
        out = encode_call("f", 0, 1.0, (ARRAY, ARRAY), {}, LIMITS)
        for limits in (Limits(max_arrays=1), Limits(max_payload=80), Limits(max_head=20)):
            with pytest.raises(InvalidMessage):
                plan_call(out.head, out.payload, limits)
            with pytest.raises(UsageError):
                encode_call("f", 0, 1.0, (ARRAY, ARRAY), {}, limits)


class TestStructs:
    @pytest.mark.parametrize(
        ("value", "plain"),
        [
            (Point(1), {"x": 1, "y": None}),
            (Point(1, Point(2, (3, Level.LOW))), {"x": 1, "y": {"x": 2, "y": (3, 1)}}),
            (Job(3), {"maxSteps": 3}),
            (Job(3, [Point(1)]), {"maxSteps": 3, "at": [{"x": 1, "y": None}]}),
            (Tagged(1), {"kind": "job", "x": 1}),
            (Row(1, 2), ["row", 1, 2]),
            (Color.RED, 1),
            (Color.BOTH, (1, 2)),
            (Level.LOW, 1),
            ({Color.RED: [Color.RED]}, {1: [1]}),
            ({Level.LOW}, {1}),
            (Pair(1, Point(2)), (1, {"x": 2, "y": None})),
            (Point(2**70, "\ud800"), {"x": 2**70, "y": "\ud800"}),
            (Point(1, dt.date(2024, 1, 1)), {"x": 1, "y": dt.date(2024, 1, 1)}),
            (Point(1, {"w": ARRAY}), {"x": 1, "y": {"w": ARRAY}}),
        ],
        ids=str,
    )
    def test_arrive_as_plain_data(self, value: Any, plain: Any) -> None:
        assert same(receive_value(encode_value(value, LIMITS)), plain)
        _, _, _, args, kwargs = receive_call(encode_call("f", 0, 1.0, (value,), {"k": [value]}, LIMITS))
        assert same((args, kwargs), ([plain], {"k": [plain]}))

    def test_only_when_asked_for(self) -> None:
        for value in (Point(1), Job(1), Color.RED, Level.LOW, Pair(1, 2)):
            with pytest.raises(UsageError, match="allow_pickle=True"):
                codec.encode([value])

    @pytest.mark.parametrize("value", [{Frozen(1)}, {Frozen(1): 2}, {(1, Frozen(1)): 2}, frozenset({(Frozen(1),)})])
    def test_not_as_a_key(self, value: Any) -> None:
        with pytest.raises(UsageError, match="Frozen at .*: it is a key or in a set"):
            encode_value([1, {"x": value}], LIMITS)
        assert receive_value(encode_value({(1,): Frozen(1)}, LIMITS)) == {(1,): {"x": 1}}

    def test_the_place_is_named(self) -> None:
        with pytest.raises(UsageError) as caught:
            encode_value({"p": [Point(1, Point(2, object()))]}, LIMITS)
        where = "an object of type object at $['p'][0].y.y"
        assert str(caught.value) == f"cannot send {where}: expected {PLAIN} or a dataclass"

    def test_cycles(self) -> None:
        loop = Point(1)
        loop.y = loop
        with pytest.raises(UsageError, match="contains itself"):
            encode_value(loop, LIMITS)

    def test_a_class_is_no_instance(self) -> None:
        for value in (Point, Job, Color):
            with pytest.raises(UsageError, match="or a dataclass"):
                encode_value(value, LIMITS)


class TestCalls:
    def test_round_trip(self) -> None:
        args = (1, "two", b"three", None, (4, ARRAY), Point(5))
        call = receive_call(encode_call("module.f", 9, 2.5, args, {"a": ARRAY, "b": {"c": 2**80}}, LIMITS))
        plain = [1, "two", b"three", None, (4, ARRAY), {"x": 5, "y": None}]
        assert same(call, ("module.f", 9, 2.5, plain, {"a": ARRAY, "b": {"c": 2**80}}))

    def test_quick(self) -> None:
        out = encode_call("add", 0, 5, (2, 3.5), {"k": b"v"}, LIMITS)
        call = fast_call(memoryview(out.head))
        assert same(call, ("add", 0, 5.0, [2, 3.5], {"k": b"v"}))
        assert same(receive_call(out), call)
        out = encode_call("f", 0, 0.0, ([1, [2]], {"a": [3]}, "x" * 100), {}, LIMITS)
        assert fast_call(out.head)[3] == [[1, [2]], {"a": [3]}, "x" * 100]

    @pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, -math.inf, 10**400])
    def test_seconds_that_are_none(self, seconds: Any) -> None:
        with pytest.raises(UsageError, match="not a time to wait"):
            encode_call("f", 0, seconds, (), {}, LIMITS)

    @pytest.mark.parametrize("name", ["", "x" * (MAX_NAME + 1), "f\ud800"])
    def test_names_that_are_none(self, name: str) -> None:
        with pytest.raises(UsageError, match="name"):
            encode_call(name, 0, 1.0, (), {}, LIMITS)

    def test_the_argument_is_named(self) -> None:
        with pytest.raises(UsageError, match=r"argument 2 of f\(\): cannot send an object of type object at \$\[1\]:"):
            encode_call("f", 0, 1.0, (1, [1, object()]), {}, LIMITS)
        with pytest.raises(UnsupportedArray, match=r"argument 'w' of f\(\): cannot send .*Python objects"):
            encode_call("f", 0, 1.0, (1,), {"w": np.array([None])}, LIMITS)

    def test_odd_keywords(self) -> None:
        out = encode_call("f", 0, 1.0, (), {"\ud800": 1}, LIMITS)
        assert receive_call(out)[4] == {"\ud800": 1}


def call_head(*fields: Any) -> bytes:
    good = ["f", 0, 1.0, [], {}]
    return pack([*fields, *good[len(fields) :]])


def nested(levels: int) -> bytes:
    return b"\x91" * levels + b"\x90"


BAD_FIELDS = {
    "name": [
        call_head(""),
        call_head("x" * (MAX_NAME + 1)),
        call_head(5),
        call_head(b"f"),
        call_head(None),
        call_head(Ext(Code.STR, b"\xed\xa0\x80")),
        call_head(Ext(99, b"")),
        b"\x95\xa1\xff\x00\x01\x90\x80",
        b"\x95\xdb\xff\xff\xff\xff",
    ],
    "target": [
        call_head("f", -1),
        call_head("f", 1.0),
        call_head("f", True),
        call_head("f", "1"),
        call_head("f", Ext(Code.INT, b"\xff" * 9 + b"\0")),
    ],
    "seconds": [
        call_head("f", 0, math.nan),
        call_head("f", 0, math.inf),
        call_head("f", 0, -0.1),
        call_head("f", 0, "1"),
        call_head("f", 0, None),
        call_head("f", 0, True),
        call_head("f", 0, Ext(Code.INT, b"\x7f" * 400)),
        pack(["f", 0, 1.0])[:-1].replace(b"\x93", b"\x95"),
    ],
    "arguments": [
        call_head("f", 0, 1.0, {}),
        call_head("f", 0, 1.0, None),
        call_head("f", 0, 1.0, Ext(Code.TUPLE, pack([1]))),
        call_head("f", 0, 1.0, [Ext(99, b"")]),
        call_head("f", 0, 1.0, [Ext(Code.PICKLE, b"\x80\x05N.")]),
        call_head("f", 0, 1.0, [Ext(Code.ARRAY, pack((8, (1,), "|O8", False)))]),
        call_head("f", 0, 1.0, msgspec.Raw(nested(100))),
        call_head("f", 0, 1.0, msgspec.Raw(nested(100_000))),
        call_head("f", 0, 1.0)[:-2] + b"\xdd\xff\xff\xff\xff",
        call_head("f", 0, 1.0)[:-2] + b"\xdf\xff\xff\xff\xff",
        call_head("f", 0, 1.0)[:-2] + b"\xc6\xff\xff\xff\xff",
    ],
    "keywords": [
        call_head("f", 0, 1.0, [], []),
        call_head("f", 0, 1.0, [], None),
        call_head("f", 0, 1.0, [], {1: 2}),
        call_head("f", 0, 1.0, [], {None: 2}),
        call_head("f", 0, 1.0, [], {"a": 1, b"b": 2}),
        call_head("f", 0, 1.0, [], Ext(Code.ORDERED_DICT, pack(["a", 1]))),
        call_head("f", 0, 1.0, [], Ext(Code.DICT, pack(["a"]))),
        call_head("f", 0, 1.0, [])[:-1] + b"\xdf\xff\xff\xff\xff",
        call_head("f", 0, 1.0, [])[:-1] + b"\x81\xa1a" + nested(70),
        call_head("f", 0, 1.0, [])[:-1],
    ],
    "not valid": [
        b"",
        b"\xc1",
        pack(None),
        pack({}),
        pack([]),
        pack(["f", 0, 1.0, []]),
        pack(["f", 0, 1.0, [], {}, 1]),
        pack(["f", 0, 1.0, [], {}]) + b"\x00",
        pack(Ext(Code.TUPLE, pack(["f", 0, 1.0, [], {}]))),
    ],
}


class TestMalformed:
    @pytest.mark.parametrize(
        ("field", "head"), [(field, head) for field, heads in BAD_FIELDS.items() for head in heads], ids=lambda _: ""
    )
    def test_calls(self, field: str, head: bytes) -> None:
        tracemalloc.start()
        try:
            assert fast_call(head) is NOT_FAST
            with pytest.raises(InvalidMessage) as caught:
                plan_call(head, 0, LIMITS)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert f"its {field} " in str(caught.value) or (field == "not valid" and " its " not in str(caught.value))
        assert "allow_pickle" not in str(caught.value)
        assert len(str(caught.value)) < 400
        assert peak < 1_000_000 + 100 * len(head)

    def test_depth(self) -> None:
        """The limit is the same on both ways: a call takes two levels of 64."""
        fits = nested(LIMITS.max_depth - 1)
        deep = nested(LIMITS.max_depth)
        assert fast_value(fits) is not NOT_FAST
        assert plan_value(fits, 0, LIMITS).build() == fast_value(fits)
        assert fast_value(deep) is NOT_FAST
        with pytest.raises(InvalidMessage, match="nested deeper"):
            plan_value(deep, 0, LIMITS)
        prefix = call_head("f", 0, 1.0)[:-2]
        assert fast_call(prefix + nested(61) + b"\x81\xa1k" + nested(61)) is not NOT_FAST
        assert fast_call(prefix + nested(63) + b"\x80") is NOT_FAST
        assert fast_call(prefix + b"\x90\x81\xa1k" + nested(63)) is NOT_FAST

    @pytest.mark.usefixtures("no_array_is_near")
    def test_payload_of_another_size(self) -> None:
        out = encode_call("f", 0, 1.0, (ARRAY,), {}, LIMITS)
        for size in (0, out.payload - 1, out.payload + 1, 2**40, -1):
            with pytest.raises(InvalidMessage, match="bytes"):
                plan_call(out.head, size, LIMITS)
            with pytest.raises(InvalidMessage, match="bytes"):
                plan_value(out.head, size, LIMITS)

    def test_head_beyond_the_limit(self) -> None:
        with pytest.raises(InvalidMessage, match="too large"):
            plan_call(call_head("f"), 0, Limits(max_head=3))

    @pytest.mark.usefixtures("no_array_is_near")
    def test_arrays_that_are_none(self) -> None:
        out = encode_call("f", 0, 1.0, (np.zeros(3, "?"),), {}, LIMITS)
        plan = plan_call(out.head, out.payload, LIMITS)
        with pytest.raises(InvalidMessage, match="neither 0 nor 1"):
            plan.build(bytearray(b"\x02" * 3))

    def test_truncations(self) -> None:
        out = encode_call("f", 0, 1.0, (ARRAY, "text", (1, 2)), {"k": 2**70, "b": b"xyz"}, LIMITS)
        fields = set()
        for size in range(len(out.head)):
            with pytest.raises(InvalidMessage) as caught:
                plan_call(out.head[:size], out.payload, LIMITS)
            fields |= {field for field in BAD_FIELDS if f"its {field} " in str(caught.value)}
            with pytest.raises(InvalidMessage):
                plan_value(out.head[:size], out.payload, LIMITS)
        assert fields == {"name", "target", "seconds", "arguments", "keywords"}


SCALARS: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=40)
SCALARS = SCALARS | st.text(st.characters(codec=None), max_size=10)
OBJECTS = st.recursive(
    SCALARS | st.datetimes() | st.complex_numbers(allow_nan=False) | st.just(ARRAY),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(SCALARS, inner, max_size=3)
    ),
    max_leaves=12,
)
MESSAGES = [
    encode_call("f", 0, 1.0, (), {}, LIMITS),
    encode_call("module.add", 12, 30.0, (2, 3.5, "x", b"y"), {"k": None}, LIMITS),
    encode_call("g", 0, 1.0, (ARRAY, (1, [2])), {"w": {"a": ARRAY}, "d": dt.date(2024, 1, 1)}, LIMITS),
]


class TestHypothesis:
    @given(OBJECTS)
    @settings(max_examples=150, deadline=None)
    def test_any_value(self, value: Any) -> None:
        assert same(receive_value(encode_value(value, LIMITS)), value)

    @given(
        st.text(min_size=1, max_size=20),
        st.integers(0, 2**64 - 1),
        st.floats(0, allow_infinity=False, allow_nan=False),
        st.lists(OBJECTS, max_size=4),
        st.dictionaries(st.text(max_size=5), OBJECTS, max_size=3),
    )
    @settings(max_examples=150, deadline=None)
    def test_any_call(self, name: str, target: int, seconds: float, args: list[Any], kwargs: dict[str, Any]) -> None:
        out = encode_call(name, target, seconds, tuple(args), kwargs, LIMITS)
        assert same(receive_call(out), (name, target, seconds, args, kwargs))

    @given(st.sampled_from(MESSAGES), st.lists(st.tuples(st.integers(0, 100), st.integers(0, 255)), max_size=3))
    @settings(max_examples=150, deadline=None)
    def test_mutations(self, out: FrameBody, edits: list[tuple[int, int]]) -> None:
        head = bytearray(out.head)
        for at, byte in edits:
            head[at % len(head)] = byte
        self.check(bytes(head), out)

    @given(st.binary(max_size=60))
    @settings(max_examples=100, deadline=None)
    def test_junk(self, head: bytes) -> None:
        self.check(head, FrameBody(head, [], 0))

    @staticmethod
    def check(head: bytes, out: FrameBody) -> None:
        for receive in (receive_call, receive_value):
            try:
                receive(FrameBody(head, out.buffers, out.payload))
            except InvalidMessage:
                if receive is receive_call:
                    assert fast_call(head) is NOT_FAST or out.payload
        with contextlib.suppress(InvalidMessage):
            assert len(decode_error(head)) == 4


class TestErrors:
    def test_round_trip(self) -> None:
        parts = ("remote", "ValueError", "snow ☃", "Traceback ...")
        assert decode_error(encode_error(*parts)) == parts
        assert decode_error(memoryview(encode_error("", "", "", ""))) == ("", "", "", "")

    def test_what_is_no_text(self) -> None:
        class Text(str):
            __slots__ = ()

        assert decode_error(encode_error("k", "T", "\ud800", Text("t"))) == ("k", "T", "\\ud800", "t")

    def test_long_ones_are_cut(self) -> None:
        for character in ("x", "\U0001f600", "\ud800"):
            head = encode_error(*(character * 1_000_000 for _ in range(4)))
            kind, type_name, message, traceback = decode_error(head)
            assert (len(kind), len(type_name), len(message), len(traceback)) == (64, 1024, 8 << 10, 64 << 10)
            assert message.endswith("...")
        lines = "begin" + "x" * 100_000 + "end"
        traceback = decode_error(encode_error("k", "T", "m", lines))[3]
        assert traceback.startswith("begin")
        assert traceback.endswith("end")
        assert "(cut)" in traceback
        kind, _, message, _ = decode_error(pack(("k" * 100, "T", "m" * 9000, "")))
        assert (len(kind), len(message)) == (64, 8 << 10)

    @pytest.mark.parametrize(
        "head",
        [
            b"",
            pack(None),
            pack(("a", "b", "c")),
            pack(("a", "b", "c", "d", "e")),
            pack(("a", "b", "c", 4)),
            pack(("a", "b", "c", "d")) + b"\0",
            b"\x94\xa1\xff\xa0\xa0\xa0",
            b"\x94\xa0\xa0\xa0\xdb\xff\xff\xff\xff",
            b"\x94" * 100_000,
            pack(("a", "b", "c", "d" * 1_000_000)),
        ],
        ids=lambda _: "",
    )
    def test_malformed(self, head: bytes) -> None:
        with pytest.raises(InvalidMessage):
            decode_error(head)
