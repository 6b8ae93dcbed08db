"""Two channels that share one connection: what each side sees of the other's ends."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from phalanx.transports.lingering import MOST, Lingering
from phalanx.transports.reactor import Reactor
from phalanx.transports.stream import Stream, StreamEnded
from phalanx.transports.two_way import ReadingHalf, WritingHalf, two_way

Halves = tuple[ReadingHalf, WritingHalf]


@pytest.fixture
def lingering() -> Iterator[Lingering]:
    reactor = Reactor("test")
    made = Lingering(reactor)
    reactor.start()
    try:
        yield made
    finally:
        reactor.stop()
        made.close()


@pytest.fixture
def ends(lingering: Lingering) -> Iterator[tuple[Halves, Halves]]:
    """The halves of one rank, and those of the other."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    pair = two_way(Stream(one), lingering), two_way(Stream(other), lingering)
    try:
        yield pair
    finally:
        for half in (*pair[0], *pair[1]):
            half.close()


def receive(half: ReadingHalf, most: int = 100) -> bytes:
    """What is there now; b"" is the end."""
    room = bytearray(most)
    try:
        return bytes(room[: half.receive_into(memoryview(room))]) or b"nothing yet"
    except StreamEnded as ended:
        return b"" if ended.clean else b"broken"


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_who_writes_no_more_still_reads(ends: tuple[Halves, Halves]) -> None:
    (reading, writing), (far_reading, far_writing) = ends
    writing.send([b"last"])
    writing.close()
    assert (receive(far_reading), receive(far_reading)) == (b"last", b"")
    far_reading.close()  # it has seen the end: no reason to break the other direction
    far_writing.send([b"answer"])
    assert receive(reading) == b"answer"


def test_who_reads_no_more_breaks_the_connection(ends: tuple[Halves, Halves]) -> None:
    """Else the other side would go on writing until all buffers are full, and then wait."""
    (reading, writing), (far_reading, far_writing) = ends
    reading.close()
    assert receive(far_reading) == b""

    def send_on() -> None:
        for _ in range(1000):
            far_writing.send([bytes(1 << 16)])

    with pytest.raises(StreamEnded):
        send_on()
    writing.keep_in_cache()
    assert writing.link_state is None or not writing.link_state.busy_us
    with pytest.raises(StreamEnded):
        writing.send([b"x"])
    with pytest.raises(StreamEnded):
        reading.receive_into(memoryview(bytearray(1)))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_descriptor_goes_with_the_second_half(ends: tuple[Halves, Halves], order: tuple[int, int]) -> None:
    halves = ends[0]
    fd = halves[0].fd
    assert fd == halves[1].fd
    halves[order[0]].close()
    halves[order[0]].close()
    assert is_open(fd)
    halves[order[1]].close()
    assert not is_open(fd)
    halves[order[1]].close()


def test_what_is_on_its_way_arrives_though_something_was_left_unread(ends: tuple[Halves, Halves]) -> None:
    """A close with bytes to read would be a reset, which throws away what the other side has not read yet."""
    (reading, writing), (far_reading, far_writing) = ends
    far_writing.send([b"nobody reads this"])
    data = os.urandom(1 << 20)
    sent = writing.send([data])
    writing.close()
    reading.close()
    got = bytearray()
    while piece := receive(far_reading, 1 << 16):
        assert piece != b"broken"
        if piece != b"nothing yet":
            got += piece
    assert got == data[:sent]


def fill(half: WritingHalf) -> bytes:
    """Sends until nothing more goes: a part of it stays here until the other side reads. Returns what was sent."""
    sent = bytearray()
    while count := half.send([data := os.urandom(1 << 18)]):
        sent += data[:count]
    return bytes(sent)


def receive_all(half: ReadingHalf) -> bytes:
    """What comes until the end, or what is broken."""
    got = bytearray()
    while piece := receive(half, 1 << 16):
        if piece == b"broken":
            return piece
        if piece != b"nothing yet":
            got += piece
    return bytes(got)


def test_what_the_other_side_writes_takes_nothing_away_of_what_was_sent(
    ends: tuple[Halves, Halves], lingering: Lingering
) -> None:
    (reading, writing), (far_reading, far_writing) = ends
    fd = reading.fd
    sent = fill(writing)
    writing.close()
    reading.close()
    for _ in range(3):
        assert far_writing.send([b"a report that nobody reads"])
        time.sleep(0.01)
    assert is_open(fd)
    assert receive_all(far_reading) == sent
    lingering.finish(5)
    assert not is_open(fd)
    reading.close()
    writing.close()


@pytest.mark.parametrize("end", ["closes", "breaks"])
def test_the_descriptor_goes_if_the_other_side_ends_without_reading(
    ends: tuple[Halves, Halves], lingering: Lingering, end: str
) -> None:
    (reading, writing), (far_reading, far_writing) = ends
    fd = reading.fd
    fill(writing)
    writing.close()
    reading.close()
    assert is_open(fd)
    if end == "closes":
        far_writing.close()
    else:
        far_reading.close()  # it writes on, but nobody reads there any more
    lingering.finish(5)
    assert not is_open(fd)


def test_who_is_told_of_it_again_keeps_it_no_longer(ends: tuple[Halves, Halves], lingering: Lingering) -> None:
    (reading, writing), (far_reading, _) = ends
    sent = fill(writing)
    writing.close()
    for _ in range(3):
        reading.close()
    assert receive_all(far_reading) == sent
    lingering.finish(5)
    kept = writing._socket
    assert kept.fileno() < 0
    lingering.keep(kept)
    began = time.monotonic()
    lingering.finish(5)
    assert kept not in lingering
    assert time.monotonic() - began < 5


def test_of_many_that_linger_the_oldest_go(lingering: Lingering) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        pairs = [(socket.create_connection(server.getsockname()), server.accept()[0]) for _ in range(MOST + 3)]
    fds = []
    for one, _ in pairs:
        reading, writing = two_way(Stream(one), lingering)
        fill(writing)
        fds.append(reading.fd)
        writing.close()
        reading.close()
    deadline = time.monotonic() + 10
    while sum(map(is_open, fds)) > MOST and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum(map(is_open, fds)) == MOST
    assert not any(map(is_open, fds[:3]))
    lingering.finish(0.0)
    lingering.close()
    assert not any(map(is_open, fds))
    for _, other in pairs:
        other.close()


def test_where_the_system_does_not_tell_it_lingers_for_a_moment(
    ends: tuple[Halves, Halves], lingering: Lingering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.transports.lingering.undelivered", lambda _: None)
    (reading, writing), _ = ends
    fd = reading.fd
    writing.close()
    reading.close()
    assert is_open(fd)
    lingering.finish(5)
    assert not is_open(fd)


def test_last_words_are_said_once(ends: tuple[Halves, Halves]) -> None:
    (reading, writing), (far_reading, _) = ends
    reading.say(b"nobody has written: ")
    writing.say(b"bye")
    writing.close()
    reading.say(b"not again")
    assert (receive(far_reading), receive(far_reading)) == (b"nobody has written: bye", b"")


def test_a_forked_child_lets_go_of_it_once(ends: tuple[Halves, Halves]) -> None:
    (reading, writing), (far_reading, _) = ends
    fd = reading.fd
    reading.abandon()
    assert not is_open(fd)
    writing.abandon()
    assert receive(far_reading) == b""
