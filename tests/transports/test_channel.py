"""Frames on real sockets: in pieces of any size, malformed, too long, cut short."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from phalanx.errors import PeerLost, ProtocolError, SizeMismatch
from phalanx.transports.channel import SLICE, Inbound, Outbound
from phalanx.transports.mailbox import BufferSink, Mailbox, Receive
from phalanx.transports.stream import Buffer, Stream, StreamEnded
from phalanx.wire.frames import HEADER_SIZE, FrameKind, pack_header

LIMIT = 1 << 20


class Ends:
    """What a channel says at its end."""

    def __init__(self) -> None:
        self.seen: list[tuple[Exception, bool]] = []
        self.error = PeerLost(7, "the test's end")

    def __call__(self, _channel: Inbound, reason: Exception, goodbye: bool) -> BaseException:
        self.seen.append((reason, goodbye))
        return self.error

    @property
    def last(self) -> Exception:
        return self.seen[-1][0]


class Pipe:
    """A channel's reading half, and the socket that feeds it."""

    def __init__(self, far: socket.socket, channel: Inbound, mailbox: Mailbox, ends: Ends) -> None:
        self.far = far
        self.channel = channel
        self.mailbox = mailbox
        self.ends = ends

    def feed(self, data: bytes) -> None:
        self.far.sendall(data)
        self.pump()

    def pump(self) -> None:
        while self.channel.pump():
            pass

    def post(self, size: int, tag: int | None = None) -> tuple[Receive, bytearray]:
        target = bytearray(size)
        return self.mailbox.post(0, tag, BufferSink(memoryview(target))), target


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    near, far = socket.socketpair()
    with near, far:
        mailbox, ends = Mailbox(), Ends()
        yield Pipe(
            far,
            Inbound(Stream(near), 0, mailbox, max_message=LIMIT, max_object=LIMIT, on_end=ends),
            mailbox,
            ends,
        )


def frame(payload: bytes, *, kind: FrameKind = FrameKind.RAW, tag: int = 0, description: bytes = b"") -> bytes:
    return pack_header(kind, tag, len(description), len(payload)) + description + payload


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("posted", [True, False])
def test_byte_by_byte(pipe: Pipe, posted: bool) -> None:
    receives = [pipe.post(5), pipe.post(0), pipe.post(3)] if posted else []
    data = frame(b"first") + frame(b"", description=b"words") + frame(b"end", kind=FrameKind.ARRAY, description=b"d")
    for number in range(len(data)):
        pipe.feed(data[number : number + 1])
        assert not pipe.ends.seen
    receives = receives or [pipe.post(5), pipe.post(0), pipe.post(3)]
    assert [bytes(target) for _, target in receives] == [b"first", b"", b"end"]
    envelopes = [receive.envelope for receive, _ in receives]
    assert all(envelope is not None for envelope in envelopes)
    assert [e.description for e in envelopes if e] == [b"", b"words", b"d"]
    assert [e.kind for e in envelopes if e] == [FrameKind.RAW, FrameKind.RAW, FrameKind.ARRAY]


@pytest.mark.parametrize("seed", range(8))
def test_pieces_of_any_size(pipe: Pipe, seed: int) -> None:
    chooser = random.Random(seed)
    messages = [chooser.randbytes(chooser.choice((0, 1, 24, 100, 5_000, 70_000, 200_000))) for _ in range(30)]
    stream = b"".join(frame(message, tag=number % 3) for number, message in enumerate(messages))
    early = {number: pipe.post(len(m), number % 3) for number, m in enumerate(messages) if number < 10}
    position = 0
    while position < len(stream):
        size = chooser.choice((1, 10, 23, 24, 25, 1_000, 65_536, 150_000))
        pipe.feed(stream[position : position + size])
        position += size
    late = {number: pipe.post(len(m), number % 3) for number, m in enumerate(messages) if number >= 10}
    for number, (receive, target) in (early | late).items():
        assert receive.done
        assert receive.error is None
        assert target == messages[number]


def test_a_payload_is_read_straight_into_the_receivers_memory(pipe: Pipe) -> None:
    _, target = pipe.post(200_000)
    data = frame(b"x" * 200_000)
    pipe.feed(data[:100_000])
    assert target[:50_000] == b"x" * 50_000
    tracemalloc.start()
    for start in range(100_000, len(data), 50_000):
        pipe.feed(data[start : start + 50_000])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert target == b"x" * 200_000
    assert peak < 120_000, f"{peak} bytes were allocated for a payload that had a place to go"


def test_several_messages_in_one_read_say_that_there_is_more(pipe: Pipe) -> None:
    pipe.far.sendall(frame(b"one") + frame(b"two"))
    assert pipe.channel.pump()
    assert pipe.channel.read_ahead, "the second is in memory, where no poll can see it"
    assert pipe.channel.pump()
    assert not pipe.channel.read_ahead
    assert not pipe.channel.pump()


def test_nothing_is_read_for_what_is_done(pipe: Pipe) -> None:
    receive, target = pipe.post(3)
    pipe.far.sendall(frame(b"one"))
    pipe.pump()
    assert receive.done
    pipe.far.sendall(frame(b"two"))
    assert not pipe.channel.pump([receive])
    assert target == b"one"
    assert not pipe.mailbox.ahead, "the second message may be for the fast path"
    pipe.pump()
    assert pipe.mailbox.ahead


def test_a_message_of_another_length_is_read_away(pipe: Pipe) -> None:
    receive, _ = pipe.post(3)
    after, target = pipe.post(5)
    pipe.feed(frame(b"x" * 300_000)[:150_000])
    assert isinstance(receive.error, SizeMismatch)
    pipe.feed(frame(b"x" * 300_000)[150_000:] + frame(b"after"))
    assert after.done
    assert target == b"after"
    assert not pipe.ends.seen


# -- what is no frame -------------------------------------------------------------------------------------------------

_HEADER = struct.Struct("<2sBBIQQ")
BAD_HEADERS = {
    "magic": _HEADER.pack(b"XP", 1, 0, 0, 0, 0),
    "zeros": bytes(HEADER_SIZE),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[:HEADER_SIZE],
    "kind 0": _HEADER.pack(b"PX", 0, 0, 0, 0, 0),
    "kind 99": _HEADER.pack(b"PX", 99, 0, 0, 0, 0),
    "reserved": _HEADER.pack(b"PX", 1, 1, 0, 0, 0),
    "payload too long": _HEADER.pack(b"PX", 1, 0, 0, 0, LIMIT + 1),
    "payload enormous": _HEADER.pack(b"PX", 2, 0, 0, 0, (1 << 64) - 1),
    "description too long": _HEADER.pack(b"PX", 2, 0, 5000, 0, 0),
    "description enormous": _HEADER.pack(b"PX", 3, 0, (1 << 32) - 1, 0, 0),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
@pytest.mark.parametrize("posted", [True, False])
def test_a_header_that_is_none_ends_the_connection_and_allocates_nothing(pipe: Pipe, name: str, posted: bool) -> None:
    receive = pipe.post(4)[0] if posted else None
    pipe.feed(frame(b"good"))
    if receive is None:
        receive = pipe.post(4)[0]
    assert receive.error is None
    tracemalloc.start()
    pipe.feed(BAD_HEADERS[name] + b"what follows")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert isinstance(pipe.ends.last, ProtocolError)
    assert len(pipe.ends.seen) == 1
    assert pipe.channel.ended
    with contextlib.suppress(OSError):
        assert pipe.far.recv(100) == b"", "the connection is still open"
    assert not pipe.channel.pump()
    assert len(pipe.ends.seen) == 1, "an end is told once"


def test_half_a_header_is_no_end_and_no_message(pipe: Pipe) -> None:
    receive, _ = pipe.post(1)
    pipe.feed(frame(b"x")[: HEADER_SIZE - 1])
    assert not receive.done
    assert not pipe.ends.seen


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 5, HEADER_SIZE, HEADER_SIZE + 2])
def test_a_connection_that_ends_in_the_middle(pipe: Pipe, cut: int) -> None:
    receive, _ = pipe.post(5)
    pipe.far.sendall(frame(b"whole")[:cut])
    pipe.pump()
    pipe.far.close()
    pipe.pump()
    assert isinstance(pipe.ends.last, StreamEnded)
    assert pipe.ends.seen[0][1] is False
    if cut >= HEADER_SIZE:
        assert receive.error is pipe.ends.error
    else:
        assert not receive.done, "the lane fails it, when it hears of the end"


def test_a_goodbye_tells_a_close_from_a_crash(pipe: Pipe) -> None:
    receive, target = pipe.post(4)
    pipe.far.sendall(frame(b"last") + pack_header(FrameKind.GOODBYE, 0, 0, 0))
    pipe.far.close()
    pipe.pump()
    assert receive.done
    assert target == b"last"
    assert [goodbye for _, goodbye in pipe.ends.seen] == [True]


def test_ending_it_here_fails_the_message_that_is_half_here(pipe: Pipe) -> None:
    receive, _ = pipe.post(5)
    pipe.feed(frame(b"whole")[:-2])
    closed = PeerLost(1, "closed here")
    pipe.channel.end(closed, goodbye=pack_header(FrameKind.GOODBYE, 0, 0, 0))
    pipe.channel.end(closed)
    assert receive.error is closed
    assert pipe.far.recv(100) == pack_header(FrameKind.GOODBYE, 0, 0, 0)
    assert not pipe.channel.pump()


# -- writing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def writer() -> Iterator[tuple[Outbound, socket.socket, list[Exception]]]:
    near, far = socket.socketpair()
    with near, far:
        ends: list[Exception] = []

        def on_end(reason: Exception, _goodbye: bool) -> BaseException:
            ends.append(reason)
            return PeerLost(5, str(reason))

        yield Outbound(Stream(near), 5, on_end), far, ends


Writer = tuple[Outbound, socket.socket, list[Exception]]
BIG = b"b" * (4 << 20)
CUT = PeerLost(5, "cut short")


def test_frames_go_out_whole_and_in_order(writer: Writer) -> None:
    channel, far, _ = writer
    first = channel.send([b"head", b"", b"body"])
    assert first.done
    big = channel.send([BIG])
    last = channel.send([b"last"])
    assert not big.done
    assert not last.done
    assert not channel.idle
    assert channel.unsent() == [big, last]
    got = bytearray()
    while not last.done:
        got += far.recv(1 << 20)
        channel.push()
    far.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            got += far.recv(1 << 20)
    assert got == b"headbody" + BIG + b"last"
    assert channel.idle


def test_many_parts_in_one_frame(writer: Writer) -> None:
    channel, far, _ = writer
    parts: list[Buffer] = [bytes([n % 256]) * (n % 5) for n in range(1000)]
    assert channel.send(parts).done
    got = far.recv(1 << 16)
    assert got == b"".join(parts)


def test_a_frame_that_has_not_begun_can_be_taken_back(writer: Writer) -> None:
    channel, far, _ = writer
    big, second, third = channel.send([BIG]), channel.send([b"second"]), channel.send([b"third"])
    assert channel.withdraw(second, CUT)
    got = bytearray()
    while not third.done:
        got += far.recv(1 << 20)
        channel.push()
    assert big.done
    assert not second.done
    assert second.withdrawn


def test_a_frame_that_has_begun_takes_the_channel_with_it(writer: Writer) -> None:
    channel, _, _ = writer
    big, second = channel.send([BIG]), channel.send([b"second"])
    assert channel.withdraw(big, CUT)
    assert not big.done, "whoever took it back says why"
    assert second.error is CUT
    assert channel.send([b"later"]).error is CUT


def test_a_frame_that_was_sent_cannot_be_taken_back(writer: Writer) -> None:
    channel, _, ends = writer
    sent = channel.send([b"x"])
    assert not channel.withdraw(sent, CUT)
    assert channel.send([b"y"]).error is None
    assert not ends


def test_a_stream_that_must_repeat_a_write_has_begun_with_the_first_try(writer: Writer) -> None:
    """Of a write that did not go through, TLS may have sent a part: another frame in its place would be garbage."""
    channel, _, _ = writer
    while channel.stream.send([BIG]):
        pass  # until nothing more fits
    other = Outbound(channel.stream, 5, lambda _reason, _goodbye: CUT)
    plain = other.send([b"plain"])
    assert not plain.begun
    channel.stream.must_repeat = True
    assert other.withdraw(plain, CUT)
    tried = other.send([b"tried"])
    assert tried.begun
    assert other.withdraw(tried, CUT)
    assert other.send([b"later"]).error is CUT


def test_the_end_of_the_stream_fails_the_queue(writer: Writer) -> None:
    channel, far, ends = writer
    big = channel.send([BIG])
    second = channel.send([b"second"])
    far.close()
    channel.push()
    assert isinstance(big.error, PeerLost)
    assert isinstance(second.error, PeerLost)
    assert len(ends) == 1
    assert isinstance(ends[0], StreamEnded)
    assert isinstance(channel.send([b"later"]).error, PeerLost)


class Taker(Stream):
    """A stream that takes whatever it is given, as a ring does whose reader keeps up with its writer."""

    def send(self, views: Sequence[Buffer]) -> int:
        return sum(map(len, views[:1]))


def test_a_push_that_stops_before_the_stream_does_says_so() -> None:
    near, far = socket.socketpair()
    with near, far:
        channel = Outbound(Taker(near), 5, lambda _reason, _found: CUT)
        piece = bytes(SLICE // 4)
        outgoing = channel.send([piece] * 6)
        assert not outgoing.done, "whoever ends a channel must not wait for gigabytes"
        assert not channel.push()
        assert outgoing.done
        outgoing = channel.send([piece] * 9)
        assert channel.push(), "no poll would wake a thread that sleeps now"
        assert not channel.push()
        assert outgoing.done


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_goodbye_is_found_when_a_write_fails(goodbye: bool) -> None:
    near, far = socket.socketpair()
    said: list[bool] = []

    def on_end(_reason: Exception, found: bool) -> BaseException:
        said.append(found)
        return CUT

    with near:
        channel = Outbound(Stream(near), 5, on_end)
        if goodbye:
            far.sendall(pack_header(FrameKind.GOODBYE, 0, 0, 0))
        far.close()
        assert channel.send([b"x"]).error is CUT
    assert said == [goodbye]


# -- interrupts -------------------------------------------------------------------------------------------------------


class Interrupt(BaseException):
    """What a signal handler raises."""


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a signal interrupts just before it runs, the first time."""
    calls = []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise Interrupt
        return function(*arguments)

    return interrupted


def test_an_interrupt_after_the_last_byte_loses_no_message(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may wait for the message that this one has read: nobody else will tell it."""
    receive, target = pipe.post(5)
    monkeypatch.setattr(pipe.mailbox, "finish", once(pipe.mailbox.finish))
    with pytest.raises(Interrupt):
        pipe.feed(frame(b"first") + frame(b"later"))
    assert (receive.done, receive.error, bytes(target)) == (True, None, b"first")
    pipe.pump()
    receive, target = pipe.post(5)
    assert (receive.done, bytes(target)) == (True, b"later")
    assert not pipe.ends.seen


def test_an_interrupt_while_a_message_is_refused_tells_the_receive(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    receive, _ = pipe.post(3)
    told: list[Receive] = []
    receive.on_done(lambda: told.append(receive))
    monkeypatch.setattr(Receive, "announce", once(Receive.announce))
    with pytest.raises(Interrupt):
        pipe.feed(frame(b"first"))
    assert told == [receive]
    assert isinstance(receive.error, SizeMismatch)


def test_an_interrupt_at_the_end_of_a_stream_tells_the_end(pipe: Pipe) -> None:
    """Else a receive would wait for what can never come."""
    pipe.channel._on_end = once(pipe.ends)
    pipe.far.sendall(frame(b"first")[:-1])
    pipe.far.close()
    receive, _ = pipe.post(5)
    with pytest.raises(Interrupt):
        pipe.pump()
    assert isinstance(pipe.ends.last, StreamEnded)
    assert (receive.done, receive.error) == (True, pipe.ends.error)
