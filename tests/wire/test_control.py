"""Control messages: round trips in any cut, and junk that is refused without being believed."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ProtocolError
from phalanx.wire import control
from phalanx.wire.control import (
    MAX_CONTROL,
    Abort,
    Arrivals,
    Break,
    ControlReader,
    EncodedError,
    Ended,
    Evict,
    Heartbeat,
    Join,
    Leave,
    Leaving,
    Left,
    Lost,
    Member,
    Message,
    Note,
    OperationStatus,
    Refused,
    Regroup,
    Roster,
    Shutdown,
    SlateQuery,
    SlateRanks,
    SlateReply,
    Statuses,
    StatusQuery,
    StatusReply,
    View,
    Waiting,
    Welcome,
    pack,
    pack_error,
    parse_error,
)

INT = st.integers(-(2**63), 2**63 - 1)
MARK = st.integers(0, 2**64 - 1)
TEXT = st.text(max_size=30)
CONTEXT = st.binary(min_size=16, max_size=16)
RANKS = st.lists(INT, max_size=5)
SECONDS = st.floats(allow_nan=False)
MEMBERS = st.builds(Member, INT, TEXT, TEXT, INT, TEXT, INT, INT)
CAUSES = st.builds(EncodedError, TEXT, TEXT, INT, TEXT, TEXT, TEXT)
STATUSES = st.builds(OperationStatus, TEXT, INT, MARK, TEXT, st.booleans(), SECONDS)
BY_TYPE: dict[type, st.SearchStrategy[Any]] = {
    Join: st.builds(Join, MEMBERS),
    Waiting: st.builds(Waiting, st.lists(INT, max_size=5)),
    Roster: st.builds(Roster, st.lists(MEMBERS, max_size=4)),
    Heartbeat: st.builds(Heartbeat, st.none() | STATUSES),
    Leave: st.just(Leave()),
    Leaving: st.just(Leaving()),
    Left: st.builds(Left, INT),
    Lost: st.builds(Lost, INT, TEXT, TEXT),
    Abort: st.builds(Abort, INT, TEXT, TEXT, st.none() | INT, st.booleans()),
    Ended: st.builds(Ended, INT, TEXT),
    Break: st.builds(Break, CONTEXT, INT, CAUSES),
    StatusQuery: st.builds(StatusQuery, INT, CONTEXT),
    StatusReply: st.builds(StatusReply, INT, STATUSES),
    Statuses: st.builds(
        Statuses,
        INT,
        st.dictionaries(INT, STATUSES, max_size=3),
        st.dictionaries(INT, st.tuples(SECONDS, st.none() | STATUSES), max_size=3),
    ),
    Regroup: st.builds(Regroup, CONTEXT, INT, st.lists(INT, max_size=5), SECONDS, INT, st.booleans(), st.booleans()),
    View: st.builds(View, CONTEXT, CONTEXT, INT, RANKS, RANKS, RANKS, st.lists(MEMBERS, max_size=3)),
    Refused: st.builds(Refused, CONTEXT, TEXT, RANKS, st.booleans()),
    Evict: st.builds(Evict, CONTEXT, TEXT, st.booleans()),
    Arrivals: st.builds(Arrivals, INT),
    Note: st.builds(Note, TEXT),
    Welcome: st.builds(Welcome, INT),
    SlateQuery: st.builds(SlateQuery, INT),
    SlateRanks: st.builds(SlateRanks, INT, INT, st.lists(INT, max_size=4)),
    SlateReply: st.builds(SlateReply, INT, INT, st.binary(max_size=20), INT),
    Shutdown: st.just(Shutdown()),
}
MESSAGES = st.one_of(*BY_TYPE.values())


def read(data: bytes, *, limit: int = MAX_CONTROL) -> list[Message]:
    return list(ControlReader(limit).feed(data))


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def test_every_message_is_tried() -> None:
    assert set(BY_TYPE) == set(get_args(Message))


def test_golden_bytes() -> None:
    assert pack(Left(7)).hex() == "0700000092a4" + b"Left".hex() + "07"
    assert pack(Shutdown()).hex() == "0a00000091a8" + b"Shutdown".hex()


@given(st.lists(MESSAGES, max_size=6), st.data())
def test_any_cut_gives_the_same_messages(messages: list[Message], data: st.DataObject) -> None:
    stream = b"".join(map(pack, messages))
    reader = ControlReader()
    got: list[Message] = []
    position = 0
    while position < len(stream):
        size = data.draw(st.integers(1, len(stream) - position))
        got += reader.feed(stream[position : position + size])
        position += size
    assert got == messages


@given(MESSAGES)
def test_one_byte_at_a_time(message: Message) -> None:
    reader = ControlReader()
    stream = pack(message)
    assert [m for byte in stream[:-1] for m in reader.feed(bytes([byte]))] == []
    assert list(reader.feed(stream[-1:])) == [message]


def test_text_that_utf8_cannot_take_still_goes_out() -> None:
    """The name of a badly named file in a traceback, in a call site, in a host's name: escaped, wherever it is."""
    bad, shown = "caf\udce9.py:3", "caf\\udce9.py:3"
    status, escaped = (OperationStatus("barrier", 1, 2, site, True, 0.5) for site in (bad, shown))
    cause, told = (EncodedError("Desync", text, 3, text, text, text) for text in (bad, shown))
    member, known = (Member(0, name, name, 1, name, 2, 3, name) for name in (bad, shown))
    for message, arrives in [
        (Abort(1, bad, bad), Abort(1, shown, shown)),
        (Heartbeat(status), Heartbeat(escaped)),
        (Break(b"\xff" * 16, 1, cause), Break(b"\xff" * 16, 1, told)),
        (Join(member), Join(known)),
        (
            Statuses(1, {2: status}, {3: (0.5, status), 4: (0.5, None)}),
            Statuses(1, {2: escaped}, {3: (0.5, escaped), 4: (0.5, None)}),
        ),
    ]:
        assert read(pack(message)) == [arrives]
    assert parse_error(pack_error(cause)) == told


def test_a_length_above_the_limit_is_refused_at_once() -> None:
    assert read(struct.pack("<I", 100), limit=100) == []
    with pytest.raises(ProtocolError, match="101 bytes .*at most 100 "):
        read(struct.pack("<I", 101), limit=100)
    with pytest.raises(ProtocolError, match="4294967295 bytes"):
        read(b"\xff\xff\xff\xff")


def test_what_comes_before_junk_is_still_read() -> None:
    feed = ControlReader().feed(pack(Left(1)) + framed(b"\xc1"))
    assert next(feed) == Left(1)
    with pytest.raises(ProtocolError, match="not a control message"):
        next(feed)


def encode(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\xc1",
        encode(5),
        encode("Left"),
        encode([]),
        encode({"type": "Left", "rank": 1}),
        encode(["Nobody", 1]),
        encode(["Left"]),
        encode(["Left", "1"]),
        encode(["Left", 1.5]),
        encode(["Left", 2**64 - 1, 0])[:-1],
        encode(["Left", 1]) + b"\0",
        encode(["Lost", 1, b"bytes"]),
        encode(["Roster", [1, 2]]),
        encode(["Waiting", {"0": 1}]),
        encode(["Break", "text", 1, []]),
        encode(["Lost", 1, "x"]).replace(b"x", b"\xff"),
        b"\x91" * 10_000,
        b"\x81" * 10_000,
        b"\xd6\xff\x00\x00\x00\x00",
    ],
    ids=lambda body: body[:12].hex(),
)
def test_junk_with_a_right_length(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a control message"):
        read(framed(body))


@pytest.mark.parametrize(
    "body",
    [
        b"\x92\xa7Waiting\xdd\xff\xff\xff\xff",
        b"\x92\xa6Roster\xdd\xff\xff\xff\xff\x97",
        b"\xdd\xff\xff\xff\xff\xa4Left\x01",
        b"\xdf\xff\xff\xff\xff",
        b"\x94\xa8Statuses\x01\xdf\xff\xff\xff\xff",
        b"\x93\xa4Lost\x01\xdb\xff\xff\xff\xff",
        b"\x93\xabStatusQuery\x01\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
    ],
    ids=lambda body: body.hex()[:24],
)
def test_huge_counts_allocate_nothing(body: bytes) -> None:
    """Four bytes that announce four billion elements, characters or bytes."""
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            read(framed(body))
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200))
def test_random_bodies(body: bytes) -> None:
    try:
        (message,) = read(framed(body))
    except ProtocolError:
        return
    assert isinstance(message, get_args(Message))


@given(st.lists(st.binary(max_size=100), max_size=10))
def test_random_streams(chunks: list[bytes]) -> None:
    """Whatever comes, the reader holds no more than came."""
    reader = ControlReader(limit=1 << 20)
    for chunk in chunks:
        try:
            for message in reader.feed(chunk):
                assert isinstance(message, get_args(Message))
        except ProtocolError:
            return
        assert len(reader._buffer) <= sum(map(len, chunks))


@given(MESSAGES, st.data())
def test_changed_messages(message: Message, data: st.DataObject) -> None:
    stream = bytearray(pack(message))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(4, len(stream) - 1))] = data.draw(st.integers(0, 255))
    try:
        (read_back,) = read(bytes(stream))
    except ProtocolError:
        return
    assert isinstance(read_back, get_args(Message))


def test_the_roster_of_a_large_world_fits() -> None:
    members = [
        Member(r, "node-with-a-long-name.cluster.example", "x" * 60, r, "f" * 45, 65535, 7) for r in range(50_000)
    ]
    stream = pack(Roster(members))
    assert len(stream) < MAX_CONTROL
    assert read(stream) == [Roster(members)]
    assert control.MAX_CONTROL == MAX_CONTROL
