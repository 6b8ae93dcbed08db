"""Strangers, wrong lengths, silence and loss on the classic wire: each is told apart, and the world goes on."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest
from tests.classic import plain_rank
from tests.classic.plain_rank import Place, PlainRank, advertise, connect, read, u64
from tests.classic.together import Classic, free_place, patience, seats, side_by_side

import phalanx as px

HUGE = (1 << 64) - 1


def star(rank: int, size: int, master: Place, timeout: float = patience) -> Classic:
    return px.backends.TcpBackend(rank, size, f"{master[0]}:{master[1]}", timeout=timeout)


def mesh(rank: int, size: int, master: Place, timeout: float = patience) -> Classic:
    return px.backends.MeshBackend(rank, size, f"{master[0]}:{master[1]}", wire="classic", timeout=timeout)


# -- strangers while the world forms -----------------------------------------------------------------------------------


def closed_by_the_other_side(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def strangers(master: Place, rest: bytes) -> list[socket.socket]:
    """Connections that claim what they cannot be. The first five are refused; the last says too little to tell."""
    hellos = [u64(0) + rest, u64(3) + rest, u64(HUGE) + rest, b"GET / HTTP/1.1\r\n\r\n", u64(1 << 32) + rest, b"\1\0\0"]
    made = []
    for hello in hellos:
        made.append(connect(master))
        made[-1].sendall(hello)
    return made


@pytest.mark.parametrize("make", [star, mesh])
def test_strangers_do_not_keep_the_world_from_forming(
    make: Callable[[int, int, Place], Classic], caplog: pytest.LogCaptureFixture
) -> None:
    master = free_place()
    plain = plain_rank.star if make is star else plain_rank.mesh
    rest = b"" if make is star else advertise(("127.0.0.1", 9))

    def late() -> list[PlainRank]:
        others = strangers(master, rest)
        for sock in others[:5]:
            assert closed_by_the_other_side(sock)
        joined: list[PlainRank] = side_by_side(*(lambda rank=rank: plain(rank, 3, master) for rank in (1, 2)))
        assert closed_by_the_other_side(others[5]), "one that says nothing is let go when the world is complete"
        for sock in others:
            sock.close()
        return joined

    with caplog.at_level(logging.WARNING, "phalanx"):
        backend, joined = side_by_side(lambda: make(0, 3, master), late)
    assert caplog.text.count("dropped a connection") >= 5
    assert "claims rank 0" in caplog.text
    assert "claims rank 3" in caplog.text
    side_by_side(backend.barrier, joined[0].barrier, joined[1].barrier)
    for rank in (*joined, backend):
        rank.close()


def test_a_rank_that_comes_twice_on_the_star(caplog: pytest.LogCaptureFixture) -> None:
    master = free_place()

    def others() -> list[PlainRank]:
        first = plain_rank.star(1, 3, master)
        again = connect(master)
        again.sendall(u64(1))
        assert closed_by_the_other_side(again)
        again.close()
        return [first, plain_rank.star(2, 3, master)]

    backend, joined = side_by_side(lambda: star(0, 3, master), others)
    assert "rank 1 is here already" in caplog.text
    side_by_side(backend.barrier, joined[0].barrier, joined[1].barrier)
    for rank in (*joined, backend):
        rank.close()


def test_a_rank_that_comes_twice_on_the_mesh(caplog: pytest.LogCaptureFixture) -> None:
    """The first one is kept: the table tells where that one listens."""
    master = free_place()

    def again(_: Place) -> None:
        with connect(master) as sock:
            sock.sendall(u64(1) + advertise(("127.0.0.1", 9)))
            assert closed_by_the_other_side(sock)

    def others() -> list[PlainRank]:
        last_may_come = threading.Event()

        def then(_: Place) -> None:
            again(_)
            last_may_come.set()

        def last() -> PlainRank:
            assert last_may_come.wait(plain_rank.LIMIT)
            return plain_rank.mesh(2, 3, master)

        return side_by_side(lambda: plain_rank.mesh(1, 3, master, meanwhile=then), last)

    backend, joined = side_by_side(lambda: mesh(0, 3, master), others)
    assert "rank 1 is here already" in caplog.text
    side_by_side(backend.barrier, joined[0].barrier, joined[1].barrier)
    for rank in (*joined, backend):
        rank.close()


@pytest.mark.parametrize("topology", ["star", "mesh"])
def test_a_rank_that_died_while_the_world_formed_may_come_again(topology: str) -> None:
    master = free_place()
    make, plain = (star, plain_rank.star) if topology == "star" else (mesh, plain_rank.mesh)
    rest = b"" if topology == "star" else advertise(("127.0.0.1", 9))

    def others() -> list[PlainRank]:
        with connect(master) as died:
            died.sendall(u64(1) + rest)
        return side_by_side(*(lambda rank=rank: plain(rank, 3, master) for rank in (1, 2)))

    backend, joined = side_by_side(lambda: make(0, 3, master), others)
    side_by_side(backend.barrier, joined[0].barrier, joined[1].barrier)
    for rank in (*joined, backend):
        rank.close()


def test_an_advertisement_that_nobody_can_connect_to(caplog: pytest.LogCaptureFixture) -> None:
    """Port 0 in the table would end the rendezvous for all."""
    master = free_place()

    def others() -> PlainRank:
        with connect(master) as stranger:
            stranger.sendall(u64(1) + bytes([127, 0, 0, 1, 0, 0]))
            assert closed_by_the_other_side(stranger)
        return plain_rank.mesh(1, 2, master)

    backend, joined = side_by_side(lambda: mesh(0, 2, master), others)
    assert "has port 0" in caplog.text
    side_by_side(backend.barrier, joined.barrier)
    joined.close()
    backend.close()


def test_strangers_at_the_listener_for_peers(caplog: pytest.LogCaptureFixture) -> None:
    """The lower side refuses a rank that is not above it and below the world size."""
    master = free_place()

    def plain_master() -> PlainRank:
        """Rank 0: hears of rank 1's listener, sends it strangers, then goes on as the specification says."""
        with plain_rank.listen(("127.0.0.1", 0)) as peers:
            with plain_rank.listen(master) as listener, plain_rank.accept(listener) as one:
                assert read(one, 8) == u64(1)
                theirs = read(one, 6)
                place = (socket.inet_ntoa(theirs[:4]), struct.unpack("<H", theirs[4:])[0])
                table = advertise(peers.getsockname()) + theirs + advertise(("127.0.0.1", 9))
                one.sendall(table)
            for claim in (0, 1, 3, HUGE):
                with connect(place) as stranger:
                    stranger.sendall(u64(claim))
                    assert closed_by_the_other_side(stranger)
            highest = connect(place)
            highest.sendall(u64(2))
            one = plain_rank.accept(peers)
            assert read(one, 8) == u64(1)
            highest.sendall(u64(2) + b"hi")
            return PlainRank(0, 3, {1: one, 2: highest})

    backend, plain = side_by_side(lambda: mesh(1, 3, master), plain_master)
    for claim in (0, 1, 3):
        assert f"claims rank {claim}, which is not valid here (expected 2 to 2)" in caplog.text
    buffer = bytearray(2)
    backend.recv(buffer, 2)
    assert buffer == b"hi"
    backend.send(b"x", 0)
    assert plain.recv(1) == b"x"
    plain.close()
    backend.close()


# -- order and time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["star", "mesh"])
@pytest.mark.parametrize("master_is", ["plain", "phalanx"])
def test_workers_before_their_master(topology: str, master_is: str) -> None:
    master = free_place()
    make, plain = (star, plain_rank.star) if topology == "star" else (mesh, plain_rank.mesh)
    first, worker = (plain, make) if master_is == "plain" else (make, plain)

    def late() -> object:
        time.sleep(0.5)
        return first(0, 2, master)

    zero, one = side_by_side(late, lambda: worker(1, 2, master))
    side_by_side(zero.barrier, one.barrier)
    zero.close()
    one.close()


@pytest.mark.parametrize("make", [star, mesh])
def test_a_world_that_does_not_form_says_who_is_missing(make: Callable[..., Classic]) -> None:
    master = free_place()
    rest = b"" if make is star else advertise(("127.0.0.1", 9))

    def one_comes() -> None:
        with connect(master) as sock:
            sock.sendall(u64(2) + rest)
            assert closed_by_the_other_side(sock)

    def fails() -> px.WorldNotFormed:
        with pytest.raises(px.WorldNotFormed) as caught:
            make(0, 4, master, timeout=0.7)
        return caught.value

    error, _ = side_by_side(fails, one_comes)
    assert error.missing == (1, 3)
    assert "missing ranks 1, 3" in str(error)


@pytest.mark.parametrize("make", [star, mesh])
def test_a_master_that_never_comes(make: Callable[..., Classic]) -> None:
    with pytest.raises(
        px.WorldNotFormed, match=r"rank 1 could not reach rank 0 at 127\.0\.0\.1:\d+ within 0\.3 s"
    ) as error:
        make(1, 2, free_place(), timeout=0.3)
    assert error.value.missing == (0,)


def test_a_master_that_never_sends_the_table() -> None:
    master = free_place()

    def fails() -> None:
        with pytest.raises(px.WorldNotFormed, match="the master did not send the table"):
            mesh(1, 2, master, timeout=0.7)

    def silent() -> None:
        with plain_rank.listen(master) as listener, plain_rank.accept(listener) as sock:
            assert len(read(sock, 14)) == 14
            assert closed_by_the_other_side(sock)

    side_by_side(fails, silent)


# -- before any socket is opened ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [star, mesh])
def test_numbers_that_cannot_be(make: Callable[..., Classic], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", no_socket)
    with pytest.raises(px.InvalidWorldSize, match="world size 1 is not valid .expected at least 2"):
        make(0, 1, ("127.0.0.1", 1))
    with pytest.raises(px.InvalidRank, match="rank 2 is not in a world of 2"):
        make(2, 2, ("127.0.0.1", 1))


def test_what_cannot_be_advertised() -> None:
    master = "127.0.0.1:1"
    with pytest.raises(px.ConfigError, match=r"\[::1\]:\d+ cannot be advertised.*IPv4.*wire='phalanx'"):
        px.backends.MeshBackend(0, 2, master, wire="classic", bind_addr="[::1]:0", timeout=1)
    with pytest.raises(px.ConfigError, match=r"0\.0\.0\.0 cannot be advertised"):
        px.backends.MeshBackend(0, 2, master, wire="classic", bind_addr="0.0.0.0:0", timeout=1)
    with pytest.raises(px.ConfigError, match="neither token nor TLS"):
        px.backends.MeshBackend(0, 2, master, wire="classic", token="t", timeout=1)


def test_a_master_on_ipv6_is_fine_if_the_peers_are_not() -> None:
    """The master's address is never advertised; only where peers listen has to be IPv4."""
    port = free_place()[1]
    first, second = side_by_side(
        *(lambda rank=rank: mesh(rank, 2, ("[::1]", port)) for rank in (0, 1)),
    )
    side_by_side(first.barrier, second.barrier)
    first.close()
    second.close()


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["star", "mesh"])
def topology(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_message_of_another_length(topology: str) -> None:
    with seats(topology, ("phalanx", "plain")) as (ours, theirs):
        for said, expected in ((b"12345", 4), (b"123", 4), (b"", 4), (b"1", 0)):
            theirs.send(said, 0)
            with pytest.raises(px.SizeMismatch) as caught:
                ours.recv(expected, 1)
            assert (caught.value.expected, caught.value.got, caught.value.peer) == (expected, len(said), 1)
        theirs.send(b"good", 0)
        assert ours.recv(4, 1) == b"good", "a message of another length is dropped whole"


def test_a_receive_that_timed_out_can_be_tried_again(topology: str) -> None:
    with seats(topology, ("plain", "phalanx")) as (theirs, ours):
        buffer = bytearray(6)
        with pytest.raises(px.Timeout) as caught:
            ours.phalanx.recv(buffer, 0, timeout=0.05)
        assert caught.value.peer == 0
        wire = theirs.plain.connections[1]
        # The message comes in pieces, and time runs out between them.
        wire.sendall(u64(6)[:3])
        with pytest.raises(px.Timeout):
            ours.phalanx.recv(buffer, 0, timeout=0.05)
        wire.sendall(u64(6)[3:] + b"abc")
        with pytest.raises(px.Timeout):
            ours.phalanx.recv(buffer, 0, timeout=0.05)
        wire.sendall(b"def" + u64(2) + b"ok")
        ours.phalanx.recv(buffer, 0)
        assert buffer == b"abcdef"
        assert ours.recv(2, 0) == b"ok"
        ours.send(b"and back", 0)
        assert theirs.recv(8, 1) == b"and back"


def test_a_length_that_nobody_can_mean(topology: str) -> None:
    with seats(topology, ("phalanx", "plain")) as (ours, theirs):
        theirs.plain.connections[0].sendall(u64(1 << 62))
        with pytest.raises(px.PeerLost, match=f"announces {1 << 62} bytes"):
            ours.recv(4, 1)
        assert closed_by_the_other_side(theirs.plain.connections[0])


def test_a_plain_rank_that_ends(topology: str) -> None:
    with seats(topology, ("phalanx", "plain", "plain")) as (ours, ends, stays):
        ends.send(b"last words", 0)
        ends.plain.close()
        assert ours.recv(10, 1) == b"last words", "what was sent before the end still arrives"
        with pytest.raises(px.PeerLost) as caught:
            ours.recv(1, 1)
        assert caught.value.peer == 1
        stays.send(b"still here", 0)
        assert ours.recv(10, 2) == b"still here"


def test_a_plain_rank_that_ends_while_somebody_waits(topology: str) -> None:
    with seats(topology, ("plain", "phalanx")) as (ends, waits):

        def wait() -> None:
            with pytest.raises(px.PeerLost, match="rank 0"):
                waits.phalanx.barrier()

        def end() -> None:
            if topology == "mesh":  # the first of two waves begins at rank 0
                ends.send(b"\0", 1)
            assert ends.recv(1, 1) == b"\0"
            ends.plain.close()

        side_by_side(wait, end)


def test_nobody_to_talk_to() -> None:
    with seats("star", ("plain", "phalanx", "plain")) as world:
        ours = world[1].phalanx
        with pytest.raises(px.NoConnection, match="no connection to rank 2 .*MeshBackend"):
            ours.send(b"x", 2)
        with pytest.raises(px.NoConnection, match="no connection to rank 2 .*MeshBackend"):
            ours.recv(bytearray(1), 2)
        with pytest.raises(px.SelfSend):
            ours.send(b"x", 1)
        with pytest.raises(px.SelfSend):
            ours.recv(bytearray(1), 1)
        with pytest.raises(px.InvalidRank, match="rank 3 is not in a world of 3"):
            ours.send(b"x", 3)
        ours.close()
        with pytest.raises(px.Closed):
            ours.send(b"x", 0)
