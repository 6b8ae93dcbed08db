"""The frame header: golden bytes, round trips, and bounds that hold before anything is allocated."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ProtocolError
from phalanx.wire.frames import HEADER_SIZE, MAX_DESCRIPTION, FrameHeader, FrameKind, pack_header, parse_header

U64 = st.integers(0, 2**64 - 1)
MAX_MESSAGE = 1 << 20
MAX_OBJECT = 1 << 16


def parse(data: bytes) -> FrameHeader:
    return parse_header(data, max_message=MAX_MESSAGE, max_object=MAX_OBJECT)


def bound(kind: FrameKind) -> int:
    return MAX_OBJECT if kind is FrameKind.OBJECT else MAX_DESCRIPTION


def test_golden_bytes() -> None:
    data = pack_header(FrameKind.ARRAY, 0x0102030405060708, 0x20, 0x1000)
    assert data.hex() == "505802002000000008070605040302010010000000000000"
    assert parse(data) == FrameHeader(FrameKind.ARRAY, 0x0102030405060708, 0x20, 0x1000)
    assert HEADER_SIZE == len(data) == 24


WITHOUT_PAYLOAD = {FrameKind.GOODBYE, FrameKind.BROKEN, FrameKind.RING, FrameKind.LENT, FrameKind.TAKEN}


def test_kinds_keep_their_numbers() -> None:
    assert {kind.name: kind.value for kind in FrameKind} == {
        "RAW": 1,
        "ARRAY": 2,
        "OBJECT": 3,
        "STEP": 4,
        "GOODBYE": 5,
        "BROKEN": 6,
        "RING": 7,
        "LENT": 8,
        "TAKEN": 9,
    }


@given(st.sampled_from(sorted(set(FrameKind) - WITHOUT_PAYLOAD)), U64, st.data())
def test_round_trip(kind: FrameKind, tag: int, data: st.DataObject) -> None:
    description = data.draw(st.integers(0, bound(kind)))
    payload = data.draw(st.integers(0, MAX_MESSAGE))
    packed = pack_header(kind, tag, description, payload)
    assert parse(packed) == FrameHeader(kind, tag, description, payload)
    assert parse_header(memoryview(packed), max_message=MAX_MESSAGE, max_object=MAX_OBJECT).tag == tag


@pytest.mark.parametrize("kind", sorted(set(FrameKind) - WITHOUT_PAYLOAD))
def test_the_bounds_are_exact(kind: FrameKind) -> None:
    assert parse(pack_header(kind, 0, bound(kind), MAX_MESSAGE)).payload == MAX_MESSAGE
    with pytest.raises(ProtocolError, match=f"description of {bound(kind) + 1} bytes .*at most {bound(kind)} "):
        parse(pack_header(kind, 0, bound(kind) + 1, 0))
    with pytest.raises(ProtocolError, match=f"payload of {MAX_MESSAGE + 1} bytes .*at most {MAX_MESSAGE} "):
        parse(pack_header(kind, 0, 0, MAX_MESSAGE + 1))


@pytest.mark.parametrize("lengths", [(1, 0), (0, 1), (MAX_DESCRIPTION, MAX_MESSAGE)])
def test_a_goodbye_carries_nothing(lengths: tuple[int, int]) -> None:
    assert parse(pack_header(FrameKind.GOODBYE, 0, 0, 0)).kind is FrameKind.GOODBYE
    with pytest.raises(ProtocolError, match="goodbye"):
        parse(pack_header(FrameKind.GOODBYE, 0, *lengths))


@pytest.mark.parametrize("description", [0, 1, MAX_DESCRIPTION])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (FrameKind.RING, "the offer of a ring"),
        (FrameKind.LENT, "the offer of an array"),
        (FrameKind.TAKEN, "the answer to an offer"),
    ],
)
def test_offers_and_their_answers_have_no_payload(kind: FrameKind, words: str, description: int) -> None:
    assert parse(pack_header(kind, 0, description, 0)).description == description
    with pytest.raises(ProtocolError, match=f"{words} announces a payload of 1 bytes"):
        parse(pack_header(kind, 0, description, 1))


def test_every_other_beginning_is_refused() -> None:
    good = pack_header(FrameKind.RAW, 7, 0, 5)
    for position in range(4):
        for value in range(256):
            changed = bytearray(good)
            changed[position] = value
            valid = value == good[position] or (position == 2 and value in set(FrameKind) - WITHOUT_PAYLOAD)
            if valid:
                parse(bytes(changed))
            else:
                with pytest.raises(ProtocolError):
                    parse(bytes(changed))


@pytest.mark.parametrize("size", [0, 1, HEADER_SIZE - 1, HEADER_SIZE + 1, 4096])
def test_another_size_is_no_header(size: int) -> None:
    with pytest.raises(ProtocolError, match="not a frame"):
        parse(pack_header(FrameKind.RAW, 0, 0, 0).ljust(size, b"\0")[:size])


@given(st.binary(min_size=HEADER_SIZE, max_size=HEADER_SIZE), st.booleans())
def test_junk_is_refused_or_within_the_bounds(junk: bytes, magic: bool) -> None:
    data = b"PX" + junk[2:3] + b"\0" + junk[4:] if magic else junk
    try:
        header = parse(data)
    except ProtocolError:
        return
    assert header.description <= bound(header.kind)
    assert header.payload <= MAX_MESSAGE
    assert pack_header(header.kind, header.tag, header.description, header.payload) == data


def test_the_largest_lengths_allocate_nothing() -> None:
    data = struct.pack("<2sBBIQQ", b"PX", FrameKind.OBJECT, 0, 2**32 - 1, 0, 2**64 - 1)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            parse(data)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
