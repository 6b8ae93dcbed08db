"""The very bytes that Phalanx puts on a classic socket, recorded by a plain one."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

import pytest
from tests.classic import plain_rank
from tests.classic.plain_rank import Place, accept, connect, listen, read
from tests.classic.together import Classic, free_place, patience, side_by_side

import phalanx as px


def rest(sock: socket.socket) -> bytes:
    """Everything until the other side closes."""
    data = b""
    while chunk := sock.recv(65536):
        data += chunk
    return data


def star(rank: int, size: int, master: Place) -> Classic:
    return px.backends.TcpBackend(rank, size, f"{master[0]}:{master[1]}", timeout=patience)


def mesh(rank: int, size: int, master: Place) -> Classic:
    return px.backends.MeshBackend(rank, size, f"{master[0]}:{master[1]}", wire="classic", timeout=patience)


def say_everything(backend: Classic, peer: int) -> None:
    """One message of each kind; the other side has sent its part of the barrier already."""
    backend.send(b"", peer)
    backend.send(b"phalanx", peer)
    backend.send(bytes(range(256)) * 257, peer)
    backend.barrier()
    backend.close()


GOLDEN_MESSAGES = (
    bytes.fromhex("0000000000000000")
    + bytes.fromhex("07000000000000007068616c616e78")
    + bytes.fromhex("0001010000000000")
    + bytes(range(256)) * 257
)
"""An empty message, a short one, and one of 65,792 bytes."""
BARRIER = bytes.fromhex("010000000000000000")


def test_a_worker_of_the_star() -> None:
    master = free_place()

    def record() -> bytes:
        with listen(master) as listener, accept(listener) as sock:
            sock.sendall(BARRIER)
            return rest(sock)

    recorded, _ = side_by_side(record, lambda: say_everything(star(1, 2, master), 0))
    assert recorded == bytes.fromhex("0100000000000000") + GOLDEN_MESSAGES + BARRIER


def test_a_high_rank_of_the_star() -> None:
    """Every byte of the rank counts."""
    master = free_place()

    def record() -> bytes:
        with listen(master) as listener, accept(listener) as sock:
            return rest(sock)

    recorded, _ = side_by_side(record, lambda: star(0x1234, 0x10000, master).close())
    assert recorded == bytes.fromhex("3412000000000000")


def test_rank_0_of_the_star() -> None:
    """It says nothing until it has something to send; it releases the barrier after all have come."""
    master = free_place()

    def record() -> bytes:
        with connect(master) as sock:
            sock.sendall(bytes.fromhex("0100000000000000") + BARRIER)
            return rest(sock)

    recorded, _ = side_by_side(record, lambda: say_everything(star(0, 2, master), 1))
    assert recorded == GOLDEN_MESSAGES + BARRIER


def test_rank_0_of_the_star_releases_in_order() -> None:
    """Nobody is released before the last one has come."""
    master = free_place()
    one, two = plain_rank.PlainRank(1, 3, {}), plain_rank.PlainRank(2, 3, {})

    def record() -> None:
        for rank in (one, two):
            rank.connections[0] = connect(master)
            rank.connections[0].sendall(struct.pack("<Q", rank.rank))

    def enter(rank: plain_rank.PlainRank) -> None:
        rank.connections[0].sendall(BARRIER)

    backend, _ = side_by_side(lambda: star(0, 3, master), record)
    entered, _ = side_by_side(lambda: _times_out(backend), lambda: enter(one))
    one.connections[0].settimeout(0.05)
    with pytest.raises(TimeoutError):
        one.connections[0].recv(1)
    assert entered
    for rank in (one, two):
        rank.close()
    backend.close()


def _times_out(backend: Classic) -> bool:
    with pytest.raises(px.Timeout) as caught:
        backend.barrier(timeout=0.3)
    return caught.value.peer == 2


def port_bytes(port: int) -> bytes:
    return bytes([port & 0xFF, port >> 8])


def test_rank_0_of_the_mesh() -> None:
    """The whole table to everyone, its own advertisement first."""
    master = free_place()

    def record() -> tuple[bytes, bytes]:
        with listen(("127.0.0.1", 0)) as peers, connect(master) as sock:
            mine = bytes([127, 0, 0, 1]) + port_bytes(peers.getsockname()[1])
            sock.sendall(bytes.fromhex("0100000000000000") + mine)
            table = rest(sock)
        assert table[6:] == mine
        with connect(("127.0.0.1", table[4] | table[5] << 8)) as sock:
            sock.sendall(bytes.fromhex("0100000000000000") + 2 * BARRIER)
            return table, rest(sock)

    (table, recorded), _ = side_by_side(record, lambda: say_everything(mesh(0, 2, master), 1))
    assert len(table) == 12
    assert table[:4] == bytes([127, 0, 0, 1])
    assert recorded == GOLDEN_MESSAGES + 2 * BARRIER, "it begins both waves of the barrier"


def test_the_highest_rank_of_the_mesh() -> None:
    """Its hello and advertisement to the master, then its rank to everybody below, lowest first."""
    master = free_place()

    def record() -> tuple[bytes, list[bytes]]:
        with listen(("127.0.0.1", 0)) as zero, listen(("127.0.0.1", 0)) as one:
            ports = [listener.getsockname()[1] for listener in (zero, one)]
            with listen(master) as listener, accept(listener) as sock:
                hello = read(sock, 14)
                place = (socket.inet_ntoa(hello[8:12]), hello[12] | hello[13] << 8)
                with connect(place):  # it really listens there while it waits, though nobody is above it
                    pass
                lower = b"".join(bytes([127, 0, 0, 1]) + port_bytes(port) for port in ports)
                sock.sendall(lower + hello[8:])
                assert sock.recv(1) == b"", "it has nothing more to say to the master"
            with accept(zero) as to_zero, accept(one) as to_one:
                to_one.sendall(2 * BARRIER)
                return hello, [rest(to_zero), rest(to_one)]

    def play() -> None:
        say_everything(mesh(2, 3, master), 0)

    (hello, recorded), _ = side_by_side(record, play)
    assert hello[:12] == bytes.fromhex("02000000000000007f000001")
    rank = bytes.fromhex("0200000000000000")
    assert recorded == [rank + GOLDEN_MESSAGES + 2 * BARRIER, rank], "the barrier goes on to rank 0"


def test_a_middle_rank_of_the_mesh() -> None:
    """It waits for those above it before it connects to those below it."""
    master = free_place()

    def record() -> tuple[bytes, bytes]:
        with listen(("127.0.0.1", 0)) as zero:
            with listen(master) as listener, accept(listener) as sock:
                hello = read(sock, 14)
                mine = bytes([127, 0, 0, 1]) + port_bytes(zero.getsockname()[1])
                sock.sendall(mine + hello[8:] + bytes([127, 0, 0, 1, 9, 0]))
            zero.settimeout(0.2)
            with pytest.raises(TimeoutError):
                zero.accept()
            zero.settimeout(plain_rank.LIMIT)
            with connect(("127.0.0.1", hello[12] | hello[13] << 8)) as highest:
                highest.sendall(bytes.fromhex("0200000000000000"))
                with accept(zero) as below:
                    below.sendall(2 * BARRIER)
                    return rest(below), rest(highest)

    (below, above), _ = side_by_side(record, lambda: say_everything(mesh(1, 3, master), 0))
    assert below == bytes.fromhex("0100000000000000") + GOLDEN_MESSAGES
    assert above == 2 * BARRIER, "the one above hears nothing but the barrier"


@pytest.mark.parametrize("make", [star, mesh])
def test_a_group_marks_its_frames(make: Callable[[int, int, Place], Classic]) -> None:
    """What only Phalanx ranks say to each other has bit 63 of the length set, which no plain message has."""
    master = free_place()

    def record() -> bytes:
        if make is star:
            with listen(master) as listener, accept(listener) as sock:
                return rest(sock)[8:]
        with listen(("127.0.0.1", 0)) as zero:
            with listen(master) as listener, accept(listener) as sock:
                hello = read(sock, 14)
                sock.sendall(bytes([127, 0, 0, 1]) + port_bytes(zero.getsockname()[1]) + hello[8:])
            with accept(zero) as sock:
                return rest(sock)[8:]

    def play() -> None:
        backend = make(1, 2, master)
        group = px.Group(backend)
        group.send(b"abc", 0)
        backend.send(b"plain", 0)
        group.close()
        backend.close()

    recorded, _ = side_by_side(record, play)
    frames = []
    while recorded:
        (length,) = struct.unpack("<Q", recorded[:8])
        size = length & ~(1 << 63)
        frames.append((length >> 63, recorded[8 : 8 + size]))
        recorded = recorded[8 + size :]
    assert [body for marked, body in frames if not marked] == [b"plain"]
    assert frames[0][0] == 1
    assert frames[0][1].endswith(b"abc")
