"""Remote calls beside plain sockets: the very bytes, and messages that are none."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.classic.plain_rank import read, u64
from tests.classic.together import seats
from tests.rpc.classic.worlds import (
    beside_plain,
    on_both,
    patience,
    register_all,
    request_of,
    respond,
    result_of,
)

import phalanx as px
from phalanx.errors import InvalidMessage, RemoteError
from phalanx.rpc.classic.agent import ClassicAgent


@on_both
def test_the_very_bytes_of_a_caller(topology: str, own: int) -> None:
    with beside_plain(topology, own) as (agent, plain):
        sock = plain.connections[own]
        future = agent.call_async(1 - own, "add", b"\x08\x09")
        recorded = read(sock, 8 + 22)
        assert recorded.hex() == "1600000000000000" + "01" + "0100000000000000" + "03000000616464" + "020000000809"
        sock.sendall(bytes.fromhex("0800000000000000 0f00000000000000"))
        sock.sendall(bytes.fromhex("0f00000000000000 02 0100000000000000 00 01000000 ff"))
        assert future.result(patience) == b"\xff"

        future = agent.call_async(1 - own, "")  # an empty name is a name; ids grow
        assert read(sock, 8 + 17).hex() == "1100000000000000" + "01" + "0200000000000000" + "00000000" + "00000000"
        sock.sendall(bytes.fromhex("0800000000000000 1200000000000000"))
        sock.sendall(bytes.fromhex("1200000000000000 02 0200000000000000 01 04000000 6f6f7073"))
        with pytest.raises(RemoteError, match="^oops$"):
            future.result(patience)


@on_both
def test_the_very_bytes_of_a_server(topology: str, own: int) -> None:
    with beside_plain(topology, own) as (_, plain):
        sock = plain.connections[own]
        sock.sendall(bytes.fromhex("1600000000000000 01 2a00000000000000 04000000 6563686f 01000000 ff"))
        recorded = read(sock, 8 + 8 + 8 + 15)
        assert recorded == bytes.fromhex(
            "0800000000000000 0f00000000000000 0f00000000000000 02 2a00000000000000 00 01000000 ff"
        )
        sock.sendall(bytes.fromhex("1200000000000000 01 ffffffffffffffff 01000000 66 00000000"))
        text = f"function 'f' not registered on rank {own}".encode()
        recorded = read(sock, 8 + 8 + 8 + 14 + len(text))
        length = bytes([14 + len(text), 0, 0, 0, 0, 0, 0, 0])
        head = bytes.fromhex("02 ffffffffffffffff 01") + bytes([len(text), 0, 0, 0])
        assert recorded == bytes.fromhex("0800000000000000") + length + length + head + text


@on_both
def test_both_roles_with_a_plain_rank(topology: str, own: int) -> None:
    """Requests, lengths and responses of both sides mixed, with payloads of 8 bytes and of a mebibyte."""
    with beside_plain(topology, own) as (agent, plain):
        big = os.urandom(1 << 20)
        futures = [agent.call_async(1 - own, "f", payload) for payload in (u64(3), b"", big)]
        assert [plain.recv(own) for _ in range(3)] == [
            request_of(1, b"f", u64(3)),
            request_of(2, b"f"),
            request_of(3, b"f", big),
        ]
        plain.send(request_of(1, b"echo", u64(14)), own)  # the same id as that of a call of the other side
        respond(plain, result_of(3, big))
        plain.send(request_of(2, b"echo", big), own)
        respond(plain, result_of(1, u64(22)))
        respond(plain, result_of(2, b""))
        assert [future.result(patience) for future in futures] == [u64(22), b"", big]
        answers = {}
        for _ in range(2):
            (length,) = struct.unpack("<Q", plain.recv(own))
            answer = plain.recv(own)
            assert len(answer) == length
            answers[answer[1]] = answer
        assert answers == {1: result_of(1, u64(14)), 2: result_of(2, big)}


def test_a_shared_sub_group_with_a_plain_rank() -> None:
    """As ferrotorch's: the requests of the sub-group go on the parent's own stream, and name its ranks."""
    with seats("mesh", ["phalanx", "phalanx", "plain"]) as world:
        group = px.backends.SubBackend(world[1].phalanx, [1, 2], share_stream=True)
        with ClassicAgent(group, timeout=patience) as agent:
            future = agent.call_async(1, "f")
            assert world[2].plain.recv(1) == request_of(1, b"f")
            world[2].plain.send(u64(15), 1)
            world[2].plain.send(result_of(1, b"!"), 1)
            assert future.result(patience) == b"!"
            world[2].plain.send(request_of(1, b"g"), 1)
            text = b"function 'g' not registered on rank 0"
            assert world[2].plain.recv(1) == u64(14 + len(text))
            assert world[2].plain.recv(1) == result_of(1, text, flag=1)


JUNK = {
    "empty": [b""],
    "barrier": [b"\0"],
    "text": [b"hello, this is no remote call"],
    "short request": [b"\x01"],
    "cut request": [request_of(1, b"echo", b"1234")[:-1]],
    "long request": [request_of(1, b"echo", b"1234") + b"!"],
    "bad name": [request_of(1, b"\xff")],
    "huge name": [b"\x01" + u64(1) + b"\xff" * 4 + bytes(4)],
    "stray response": [result_of(900, b"never asked")],
    "answer to nothing": [u64(14), result_of(900, b"")],
    "huge length": [u64((1 << 30) + 1)],
    "tiny length": [u64(8)],
    "short response": [u64(14), b"\x02"],
    "length without a response": [u64(100)],
}


@pytest.mark.parametrize("name", JUNK)
def test_junk_does_not_disturb_the_others(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "phalanx.rpc"), beside_plain("star", 0) as (agent, plain):
        future = agent.call_async(1, "f")
        assert plain.recv(0) == request_of(1, b"f")
        for message in JUNK[name]:
            plain.send(message, 0)
        plain.send(request_of(5, b"echo", b"served"), 0)
        assert plain.recv(0) == u64(20)
        assert plain.recv(0) == result_of(5, b"served")
        respond(plain, result_of(1, b"answered"))
        assert future.result(patience) == b"answered"
    assert len(caplog.records) == 1, caplog.text
    assert "rank 0: dropped a message of rank 1" in caplog.text


def test_junk_is_warned_of_once_per_rank(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "phalanx.rpc"), beside_plain("star", 0) as (_, plain):
        for _ in range(5):
            plain.send(b"junk", 0)
        plain.send(request_of(5, b"echo"), 0)
        plain.recv(0)
    dropped = [record.levelname for record in caplog.records if "dropped" in record.message]
    assert dropped == ["WARNING", *["DEBUG"] * 4]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([result_of(1, b"x")], "without the message that announces its length"),
        ([u64(16), result_of(1, b"x")], "15 bytes, although 16 were announced"),
        ([u64(15), result_of(1, b"x", flag=2)], "flag of a response is 02"),
        ([u64(15), result_of(1, b"\xff", flag=1)], "error text of a response is not UTF-8"),
        ([u64(14), result_of(1, b"x")[:-1]], "cut short in its result"),
        ([u64(16), result_of(1, b"x") + b"!"], "1 bytes after its end"),
        ([u64(9), result_of(1, b"x")[:9]], "without the message that announces its length"),
    ],
)
def test_a_broken_answer_fails_its_call_alone(messages: list[bytes], words: str) -> None:
    with beside_plain("mesh", 1) as (agent, plain):
        first, second = agent.call_async(0, "f"), agent.call_async(0, "g")
        for _ in range(2):
            plain.recv(1)
        for message in messages:
            plain.send(message, 1)
        with pytest.raises(InvalidMessage, match=words) as failed:
            first.result(patience)
        assert failed.value.peer == 0
        assert not second.done()
        respond(plain, result_of(2, b"fine"))
        assert second.result(patience) == b"fine"


def test_a_message_over_one_gib_is_dropped_and_takes_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    """On the simulated world, where the bytes are never touched on the way."""
    backends = px.backends.SimulatedBackend.create_group(2, timeout=patience)
    huge = memoryview(mmap.mmap(-1, (1 << 30) + 1))
    with ClassicAgent(backends[0]) as agent, caplog.at_level(logging.WARNING, "phalanx.rpc"):
        register_all(agent)
        backends[1].send(huge, 0)
        backends[1].send(request_of(1, b"echo"), 0)
        for expected in (u64(14), result_of(1, b"")):
            buffer = bytearray(len(expected))
            backends[1].recv(buffer, 0)
            assert buffer == expected
        assert f"a message of {len(huge)} bytes is too large" in caplog.text
    for backend in backends:
        backend.close()


def test_every_truncation_on_a_socket() -> None:
    """Cut at any place, a request or a response leaves the agent serving."""
    with beside_plain("star", 0) as (agent, plain):
        request, response = request_of(7, b"echo", b"12"), result_of(7, b"12")
        for size in range(len(request)):
            plain.send(request[:size], 0)
        for size in range(len(response)):
            respond(plain, response[:size])
        plain.send(request, 0)
        assert plain.recv(0) == u64(16)
        assert plain.recv(0) == result_of(7, b"12")
        future = agent.call_async(1, "f")
        plain.recv(0)
        respond(plain, result_of(1, b"12"))
        assert future.result(patience) == b"12"


@given(st.lists(st.binary(max_size=30), max_size=10))
def test_random_messages(messages: list[bytes]) -> None:
    backends = px.backends.SimulatedBackend.create_group(2, timeout=patience)
    with ClassicAgent(backends[0]) as agent:
        register_all(agent)
        for message in messages:
            backends[1].send(message, 0)
        backends[1].send(request_of(1 << 40, b"echo"), 0)
        wanted = result_of(1 << 40, b"")
        heard = bytearray(len(wanted))
        while heard != wanted:  # some of the junk may be a request and be answered
            with contextlib.suppress(px.errors.SizeMismatch):
                backends[1].recv(heard, 0)
    for backend in backends:
        backend.close()
