"""Where a message's payload goes: what a receive accepts, and what it says of the rest."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from phalanx import SizeMismatch, UsageError
from phalanx.errors import ProtocolError
from phalanx.group.data.arrays import Description, adapt
from phalanx.group.verbs.sinks import ArraySink, Lent, NewArraySink, ObjectSink
from phalanx.transports.mailbox import Envelope
from phalanx.wire import codec
from phalanx.wire.frames import FrameKind

LIMITS = codec.Limits(max_head=1 << 16, max_payload=1 << 20)


def name(_envelope: Envelope) -> int:
    return 7


def borrow(_envelope: Envelope, lent: Lent, target: Any) -> None:
    """Stands in for an array on a GPU: the offer has the bytes."""
    target.reshape(-1).view(np.uint8)[:] = np.frombuffer(lent.offer, np.uint8)


def array_envelope(array: np.ndarray, tag: int = 0) -> Envelope:  # type: ignore[type-arg]
    sent = adapt(array, write=False)
    return Envelope(1, FrameKind.ARRAY, tag, sent.description.pack(), array.nbytes)


def object_envelope(obj: object, **kwargs: bool) -> tuple[Envelope, bytes]:
    encoded = codec.encode(obj, **kwargs)
    return Envelope(1, FrameKind.OBJECT, 0, encoded.head, encoded.payload_bytes), b"".join(encoded.buffers)


def lent_envelope(array: np.ndarray) -> Envelope:  # type: ignore[type-arg]
    lent = Lent(adapt(array, write=False).description.pack(), 3, array.tobytes())
    return Envelope(1, FrameKind.LENT, 0, lent.pack(), 0)


# -- arrays that are lent ---------------------------------------------------------------------------------------------


def test_an_array_that_is_lent_is_taken_in_the_end() -> None:
    out = np.zeros(6)
    for sink in (ArraySink(adapt(out, write=True), name, borrow), NewArraySink(name, borrow, 48)):
        assert len(sink.open(lent_envelope(np.arange(6.0)))) == 0
        assert sink.result().tolist() == [0, 1, 2, 3, 4, 5]
    assert out[5] == 5


def test_an_array_that_is_lent_must_fit() -> None:
    with pytest.raises(SizeMismatch, match=r"rank 7 sent float64\[6\] \(48 bytes\)"):
        ArraySink(adapt(np.zeros(5), write=True), name, borrow).open(lent_envelope(np.arange(6.0)))
    with pytest.raises(ProtocolError, match=r"from rank 7: float64\[6\] is longer than a message may be"):
        NewArraySink(name, borrow, 47).open(lent_envelope(np.arange(6.0)))
    with pytest.raises(ProtocolError, match="from rank 7: malformed offer of an array on a GPU"):
        NewArraySink(name, borrow, 47).open(Envelope(1, FrameKind.LENT, 0, b"nonsense", 0))


# -- into an array of the receiver's ----------------------------------------------------------------------------------


def test_an_array_of_the_same_dtype_and_size_is_filled() -> None:
    out = np.zeros((2, 3))
    sink = ArraySink(adapt(out, write=True), name, borrow)
    sink.open(array_envelope(np.arange(6.0)))[:] = np.arange(6.0).tobytes()
    assert sink.result() is out
    assert out.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_another_size_is_a_mismatch_that_names_both() -> None:
    sink = ArraySink(adapt(np.zeros(3, np.float32), write=True), name, borrow)
    with pytest.raises(SizeMismatch, match=r"rank 7 sent float32\[4\] \(16 bytes\), but out is float32\[3\]") as caught:
        sink.open(array_envelope(np.zeros(4, np.float32)))
    assert (caught.value.expected, caught.value.got, caught.value.peer) == (12, 16, 7)


def test_another_dtype_of_the_same_size_is_refused() -> None:
    sink = ArraySink(adapt(np.zeros(3, np.int32), write=True), name, borrow)
    with pytest.raises(UsageError, match=r"float32\[3\], but out is int32\[3\] .*same dtype"):
        sink.open(array_envelope(np.zeros(3, np.float32)))


# -- into a new array -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("array", [np.arange(6).reshape(2, 3), np.zeros((0, 4)), np.array(1.5), np.array([True])])
def test_a_new_array_is_as_the_senders(array: np.ndarray) -> None:  # type: ignore[type-arg]
    sink = NewArraySink(name, borrow, 1 << 40)
    sink.open(array_envelope(array))[:] = array.tobytes()
    made = sink.result()
    assert made.dtype == array.dtype
    assert made.shape == array.shape
    assert np.array_equal(made, array)


@pytest.mark.parametrize(
    ("description", "size"),
    [
        (b"\xc1", 8),
        (Description("<f8", [1 << 40], "numpy").pack(), 8),
        (Description("O", [1], "numpy").pack(), 8),
        (Description("<f8", [2], "numpy").pack(), 8),
    ],
)
def test_a_description_that_lies_allocates_nothing(description: bytes, size: int) -> None:
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="from rank 7") as caught:
        NewArraySink(name, borrow, 1 << 40).open(Envelope(1, FrameKind.ARRAY, 0, description, size))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert caught.value.peer == 7


# -- objects ----------------------------------------------------------------------------------------------------------


def test_an_object_with_arrays() -> None:
    envelope, payload = object_envelope({"x": np.arange(5), "y": [1, "two"]})
    sink = ObjectSink(LIMITS, name, allow_pickle=False)
    sink.open(envelope)[:] = payload
    made = sink.result()
    assert made["x"].tolist() == [0, 1, 2, 3, 4]
    assert made["y"] == [1, "two"]


def test_an_object_beyond_the_limits_allocates_nothing() -> None:
    envelope, _ = object_envelope(np.zeros(1 << 18))
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="from rank 7: .*too large"):
        ObjectSink(LIMITS, name, allow_pickle=False).open(envelope)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_a_pickle_needs_consent() -> None:
    envelope, payload = object_envelope({"f": Envelope}, allow_pickle=True)
    with pytest.raises(UsageError, match="allow_pickle=True"):
        ObjectSink(LIMITS, name, allow_pickle=False).open(envelope)
    sink = ObjectSink(LIMITS, name, allow_pickle=True)
    sink.open(envelope)[:] = payload
    assert sink.result() == {"f": Envelope}


def test_a_head_that_is_none_names_its_sender() -> None:
    with pytest.raises(ProtocolError, match="from rank 7") as caught:
        ObjectSink(LIMITS, name, allow_pickle=False).open(Envelope(1, FrameKind.OBJECT, 0, b"\xc1", 0))
    assert caught.value.peer == 7


# -- the wrong verb ---------------------------------------------------------------------------------------------------


def test_an_object_is_no_array_and_an_array_no_object() -> None:
    envelope, _ = object_envelope([1])
    for sink in (NewArraySink(name, borrow, 1 << 40), ArraySink(adapt(np.zeros(1), write=True), name, borrow)):
        with pytest.raises(UsageError, match="rank 7 sent an object with tag 0, but this rank called recv .*dropped"):
            sink.open(envelope)
    with pytest.raises(UsageError, match="sent an array with tag 4, but this rank called recv_object"):
        ObjectSink(LIMITS, name, allow_pickle=False).open(array_envelope(np.zeros(1), tag=4))
