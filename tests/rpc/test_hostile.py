"""A peer that knows the token but not the rules: its link ends or it is told so, and everybody else is served."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.rpc.support import dial, error_of, frame, memory, read_frame, request, until

import phalanx as px
from phalanx._native import core
from phalanx.deadline import Deadline
from phalanx.errors import AuthenticationFailed, InvalidMessage, PhalanxError
from phalanx.rendezvous.join import shake_hands
from phalanx.rpc import Agent
from phalanx.testing import open_world
from phalanx.transports.ring import SIZE
from phalanx.transports.stream import Stream
from phalanx.wire.calls import CallKind, pack_header
from phalanx.wire.handshake import Hello, Rejected, Role
from phalanx.wire.packing import Code

ATTACKER, VICTIM, WITNESS = range(3)
MAX_MESSAGE = 8 << 20


class Scene:
    """Three agents in this process, over real sockets."""

    def __init__(self, agents: list[Agent]) -> None:
        self.attacker, self.victim, self.witness = agents
        self._sockets: list[socket.socket] = []

    def dial(self) -> socket.socket:
        """A connection to the victim."""
        sock = dial(self.attacker, VICTIM)
        self._sockets.append(sock)
        return sock

    def check(self) -> None:
        """The victim still serves, and still calls."""
        assert self.witness.call(VICTIM, "echo", 7, timeout=5) == 7
        assert self.victim.call(WITNESS, "echo", 8, timeout=5) == 8
        assert self.attacker.call(VICTIM, "echo", 9, timeout=5) == 9

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


@pytest.fixture(scope="module")
def world() -> Iterator[list[Any]]:
    with open_world(3, "mesh") as backends:
        yield backends


@pytest.fixture
def scene(world: list[Any]) -> Iterator[Scene]:
    """Three agents in this process, over real sockets and rings."""
    with contextlib.ExitStack() as stack:
        groups = [px.Group(backend) for backend in world]
        agents = [stack.enter_context(Agent(group, max_message=MAX_MESSAGE, timeout=10)) for group in groups]
        for agent in agents:
            agent.register("echo", lambda x: x)
            agent.register("count", lambda n: (number for number in range(n)))
        with contextlib.closing(Scene(agents)) as made:
            made.check()
            yield made


def offer(fd: Any = 999, nonce: Any = b"n" * 16, size: Any = SIZE) -> bytes:
    return msgspec.msgpack.encode([fd, nonce, size])


def ring(words: bytes) -> bytes:
    return frame(CallKind.RING, 0, words)


RUBBISH = {
    "no magic": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "wrong magic": b"PX" + pack_header(1, 0, 1, 0)[2:],
    "no zero": b"PC\x01\x01" + bytes(20),
    "unknown kind": frame(99, 1),
    "kind 0": frame(0, 1),
    "a payload of 2**64 - 1": pack_header(CallKind.REQUEST, 10, 1, 2**64 - 1) + bytes(10),
    "a payload of 2**63": pack_header(CallKind.REQUEST, 10, 1, 2**63) + bytes(10),
    "a payload beyond max_message": pack_header(CallKind.REQUEST, 10, 1, MAX_MESSAGE) + bytes(10),
    "a head of 2**32 - 1": pack_header(CallKind.REQUEST, 2**32 - 1, 1, 0) + bytes(10),
    "a head beyond max_message": pack_header(CallKind.REQUEST, MAX_MESSAGE + 1, 1, 0) + bytes(10),
    "both at their ends": pack_header(CallKind.REQUEST, 2**32 - 1, 2**64 - 1, 2**64 - 1),
    "a payload of CREDIT": pack_header(CallKind.CREDIT, 1, 1, 10) + bytes(11),
    "a head of CANCEL": frame(CallKind.CANCEL, 1, b"\x01"),
    "a head of GOODBYE": frame(CallKind.GOODBYE, 0, b"\x01"),
    "the same call twice": request(1, "sleep") + request(1, "sleep"),
    "call 0 twice": request(0, "echo", 1) + request(0, "echo", 1),
    "a result": frame(CallKind.RESULT, 1, b"\x01"),
    "an error": frame(CallKind.ERROR, 1, msgspec.msgpack.encode(["", "", "", ""])),
    "a stream": frame(CallKind.STREAM, 1, b"\xc0"),
    "an item": frame(CallKind.ITEM, 1, b"\xc0"),
    "CREDIT that is no MessagePack": request(1, "count", 1000) + frame(CallKind.CREDIT, 1, b"\xc1"),
    "CREDIT without a number": request(1, "count", 1000) + frame(CallKind.CREDIT, 1, b""),
    "negative CREDIT": request(1, "count", 1000) + frame(CallKind.CREDIT, 1, b"\xff"),
    "CREDIT of text": request(1, "count", 1000) + frame(CallKind.CREDIT, 1, b"\xa1x"),
    "FREE of a bomb": frame(CallKind.FREE, 0, b"\xdd\xff\xff\xff\xff"),
    "FREE of nothing": frame(CallKind.FREE, 0, b""),
    "a ring that is none": ring(b"\xc1"),
    "a ring of text": ring(offer("3")),
    "a ring with a short nonce": ring(offer(3, b"short")),
    "a ring of a strange size": ring(offer(3, size=SIZE + 1)),
    "a ring of 2**62 bytes": ring(offer(3, size=2**62)),
    "a ring in no descriptor": ring(offer(-1)),
    "a ring of 2 MiB of words": ring(b"\x91" * (2 << 20)),
}
CLOSES_LATER = {
    "a ring that was never offered": ring(b"\x01"),
    "a ring that was refused": ring(offer()) + ring(b"\x01"),
}


@pytest.mark.parametrize("name", [*RUBBISH, *CLOSES_LATER])
def test_rubbish_ends_the_link(scene: Scene, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "phalanx.rpc")
    sock = scene.dial()
    sock.sendall({**RUBBISH, **CLOSES_LATER}[name])
    while (answer := read_frame(sock)) is not None:
        assert answer[0].kind in (CallKind.RING, CallKind.ERROR, CallKind.STREAM, CallKind.ITEM), answer
    scene.check()
    assert f"rank {ATTACKER}" in caplog.text


PICKLED = msgspec.msgpack.encode(["echo", 0, 1.0, [msgspec.msgpack.Ext(Code.PICKLE, b"\x80\x05N.")], {}])
ANSWERED = {
    "no MessagePack": b"\xc1",
    "nothing": b"",
    "cut off": request(1, "echo", [1, 2, 3])[24:-2],
    "more than a value": request(1, "echo", 1)[24:] + b"\x00",
    "no list": b"\x01",
    "a list of four": msgspec.msgpack.encode(["echo", 0, 1.0, []]),
    "a name that is no UTF-8": b"\x95\xa4\xff\xfe\xfd\xfc\x00\xcb" + struct.pack(">d", 1.0) + b"\x90\x80",
    "an empty name": msgspec.msgpack.encode(["", 0, 1.0, [], {}]),
    "a name of 1 MiB": msgspec.msgpack.encode(["x" * (1 << 20), 0, 1.0, [], {}]),
    "a negative target": msgspec.msgpack.encode(["echo", -1, 1.0, [], {}]),
    "seconds that are none": msgspec.msgpack.encode(["echo", 0, float("nan"), [], {}]),
    "for ever": msgspec.msgpack.encode(["echo", 0, float("inf"), [], {}]),
    "keywords without names": msgspec.msgpack.encode(["echo", 0, 1.0, [], {1: 2}]),
    "a list of 2**32 - 1": b"\xdd\xff\xff\xff\xff",
    "a map of 2**32 - 1": b"\xdf\xff\xff\xff\xff",
    "bytes of 2**32 - 1": b"\xc6\xff\xff\xff\xff",
    "lists in lists": b"\x91" * 60_000,
    "lists in lists, long": b"\x91" * (2 << 20),
    "deep arguments": b"\x95\xa4echo\x00\xcb" + struct.pack(">d", 1.0) + b"\x91" * 2000 + b"\x80" * 2000,
    "something pickled": msgspec.msgpack.encode(
        ["echo", 0, 1.0, [msgspec.msgpack.Ext(Code.PICKLE, b"\x80\x05N.")], {}]
    ),
    "unknown extensions": msgspec.msgpack.encode(["echo", 0, 1.0, [msgspec.msgpack.Ext(99, b"abc")], {}]),
    "arrays that are not there": request(1, "echo", np.zeros(30_000))[24:200],
}


@pytest.mark.parametrize("name", ANSWERED)
@pytest.mark.parametrize("payload", [b"", bytes(100_000)], ids=["alone", "with a payload"])
def test_what_cannot_be_read_is_answered(scene: Scene, name: str, payload: bytes) -> None:
    sock = scene.dial()
    sock.sendall(frame(CallKind.REQUEST, 5, ANSWERED[name], payload) + request(6, "echo", 1))
    answers = {answer[0].call: answer for answer in (read_frame(sock), read_frame(sock)) if answer is not None}
    assert set(answers) == {5, 6}  # in any order: to refuse a deep one can take so long that another thread goes on
    assert answers[5][0].kind is CallKind.ERROR
    kind, type_name, _, trace = msgspec.msgpack.decode(answers[5][1])
    assert (kind, type_name, trace) == ("message", "InvalidMessage", "")
    assert answers[6] == ((CallKind.RESULT, 1, 6, 0), b"\x01")  # the link goes on
    scene.check()


@pytest.mark.parametrize("part", [1, 10, 24, 30])
def test_a_part_of_a_frame_keeps_nobody_busy(scene: Scene, part: int) -> None:
    """The rest may never come: the agent sleeps until then."""
    sock = scene.dial()
    sock.sendall(request(1, "echo", 1)[:part])
    scene.check()
    used = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - used < 0.15
    sock.sendall(request(1, "echo", 1)[part:])
    assert read_frame(sock) == ((CallKind.RESULT, 1, 1, 0), b"\x01")


IGNORED = {
    "CREDIT for nobody": frame(CallKind.CREDIT, 77, b"\x05"),
    "FREE of nothing there": frame(CallKind.FREE, 0, b"\xcf" + b"\xff" * 8),
    "CANCEL of nothing there": frame(CallKind.CANCEL, 2**64 - 1),
    "CREDIT for what is no stream": request(5, "echo", 1) + frame(CallKind.CREDIT, 5, b"\x05"),
    "no ring after all": ring(b""),
    "a ring that cannot be opened": ring(offer()) + ring(b""),
    "notifications of nothing": request(0, "nothing", kind=CallKind.NOTIFY) * 3,
}


@pytest.mark.parametrize("name", IGNORED)
def test_what_means_nothing_is_ignored(scene: Scene, name: str) -> None:
    if core is None and "ring" in name:
        pytest.skip("without the core nobody has rings")
    sock = scene.dial()
    sock.sendall(IGNORED[name] + request(6, "echo", 1))
    while True:
        answer = read_frame(sock)
        assert answer is not None, "the link has ended"
        if answer[0].call == 6:
            break
    assert answer[1] == b"\x01"
    scene.check()


def test_unknown_names_and_numbers(scene: Scene) -> None:
    sock = scene.dial()
    for number, (name, target) in enumerate(
        [("nothing", 0), ("echo", 5), ("echo", 2**63 - 1), ("é" * 1000, 2**64 - 1)]
    ):
        sock.sendall(request(number + 1, name, target=target))
        answer = read_frame(sock)
        assert answer is not None
        assert msgspec.msgpack.decode(answer[1])[:2] == ["not found", "FunctionNotFound"]
    scene.check()


@pytest.mark.parametrize("cut", [1, 23, 24, 30, 1000])
def test_truncated_and_gone(scene: Scene, cut: int) -> None:
    whole = request(1, "echo", np.zeros(30_000))
    for _ in range(10):
        sock = scene.dial()
        sock.sendall(whole[:cut])
        sock.close()
    scene.check()
    until(lambda: len(scene.victim._connections.servers) <= 3, "the links of those that are gone")


def test_gone_in_the_middle_of_the_agreement_on_rings(scene: Scene) -> None:
    """Its answers go nowhere: that is no reason for the agent's thread to end."""
    for _ in range(5):
        sock = scene.dial()
        sock.sendall(ring(offer()) * 100)
        sock.close()
    scene.check()


def test_offers_over_and_over_keep_no_memory(scene: Scene) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sock = scene.dial()
    sock.sendall(ring(offer()) * 300)
    for _ in range(300):
        if read_frame(sock) is None:
            break
    scene.check()
    assert len(os.listdir("/proc/self/fd")) < before + 20


def test_announced_and_never_sent(scene: Scene) -> None:
    """Heads and payloads of 8 MiB are announced on many connections, and one byte of each is sent."""
    before = memory()
    for _ in range(20):
        out = request(1, "echo", np.zeros(7 << 20, np.uint8))
        scene.dial().sendall(out[:200])
        scene.dial().sendall(pack_header(CallKind.REQUEST, MAX_MESSAGE - 10, 1, 0) + b"\x95")
    time.sleep(0.3)
    scene.check()
    assert memory() - before < 60


def test_a_caller_that_takes_no_answers(scene: Scene) -> None:
    """It asks and asks, and never reads: it is not read any more either."""
    before = memory()
    sock = scene.dial()
    sock.settimeout(1.0)
    ask = b"".join(request(number, "echo", "x" * 50_000) for number in range(1, 101))
    sent = 0
    with contextlib.suppress(TimeoutError, ConnectionError):
        for _ in range(40):
            # The numbers are free again once their calls are answered; to use one before that ends the link.
            for piece in range(0, len(ask), 1 << 20):
                sent += sock.send(ask[piece : piece + (1 << 20)])
    scene.check()
    assert memory() - before < 120, f"{sent >> 20} MiB were taken"


def test_calls_that_wait_are_bounded(scene: Scene) -> None:
    release = threading.Event()
    scene.victim.register("hold", release.wait)
    sock = scene.dial()
    sock.settimeout(1.0)
    data = b"".join(request(number, "hold", 10.0) for number in range(1, 50_000))
    try:
        with contextlib.suppress(TimeoutError):
            sock.sendall(data)
        assert scene.victim._poller.waiting < 1024 + 200
        assert len(scene.victim._connections.servers) < 10
    finally:
        release.set()
    until(lambda: scene.victim._poller.waiting < 10, "the queue")
    sock.close()
    scene.check()


# -- as the server ---------------------------------------------------------------------------------------------------


class Impostor:
    """Stands where the attacker's agent should be, and answers the victim's calls by hand."""

    def __init__(self, scene: Scene) -> None:
        self.sock, its = socket.socketpair()
        self.sock.settimeout(5.0)
        self._victim = scene.victim
        port: Any = scene.victim._connections.port
        real = port.dial
        port.dial = lambda dst, deadline: real(dst, deadline) if dst != ATTACKER else Stream(its)

    def call(self, name: str) -> tuple[concurrent.futures.Future[Any], int]:
        """Has the victim call; returns what comes of it, and the number of the call. Offers of rings are declined."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def body() -> None:
            try:
                future.set_result(self._victim.call(ATTACKER, name, 1, timeout=5))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=body, daemon=True).start()
        while True:
            found = read_frame(self.sock)
            assert found is not None
            if found[0].kind is CallKind.REQUEST:
                return future, found[0].call
            if found[0].kind is CallKind.RING and found[1]:
                self.sock.sendall(ring(b""))

    def send(self, *frames: bytes) -> None:
        """Says something."""
        self.sock.sendall(b"".join(frames))


@pytest.fixture
def impostor(scene: Scene) -> Iterator[Impostor]:
    """Answers the victim's calls to the attacker by hand."""
    link = scene.victim._connections.callers.get(ATTACKER)
    if link is not None:
        link.end(PhalanxError("make room"))
    made = Impostor(scene)
    yield made
    assert scene.witness.call(VICTIM, "echo", 7, timeout=5) == 7
    assert scene.victim.call(WITNESS, "echo", 7, timeout=5) == 7
    made.sock.close()


ANSWERS = {
    "no magic": b"x" * 24,
    "unknown kind": frame(99, 1),
    "a request": request(1, "echo", 1),
    "a payload of 2**64 - 1": pack_header(CallKind.RESULT, 1, 1, 2**64 - 1) + b"\x01",
    "an item of no stream": frame(CallKind.ITEM, 1, b"\x01"),
    "a stream that begins twice": frame(CallKind.STREAM, 1, b"\xc0") * 2,
    "CREDIT": frame(CallKind.CREDIT, 1, b"\x01"),
    "a ring": ring(b"\x01"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_none_ends_the_link(impostor: Impostor, name: str) -> None:
    future, _ = impostor.call("echo")
    impostor.send(ANSWERS[name])
    result = future.exception(3) or error_of(list, future.result())  # it may have been a stream for a moment
    assert isinstance(result, PhalanxError)
    assert not isinstance(result, TimeoutError)


def test_answers_that_nobody_asked_for(impostor: Impostor) -> None:
    future, number = impostor.call("echo")
    for other in (0, 77, 2**64 - 1):
        impostor.send(
            *(frame(kind, other, b"\x01") for kind in (CallKind.RESULT, CallKind.ERROR, CallKind.STREAM, CallKind.ITEM))
        )
    impostor.send(frame(CallKind.RESULT, number, b"\x2a") * 2)
    assert future.result(3) == 42


@pytest.mark.parametrize(
    "head", [b"\xc1", b"", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000], ids=["junk", "none", "bomb", "deep"]
)
@pytest.mark.parametrize("kind", [CallKind.RESULT, CallKind.ERROR])
def test_answers_that_cannot_be_read(impostor: Impostor, kind: CallKind, head: bytes) -> None:
    for payload in (b"", bytes(1000)) if kind is CallKind.RESULT else (b"",):
        future, number = impostor.call("echo")
        impostor.send(frame(kind, number, head, payload))
        assert isinstance(future.exception(3), InvalidMessage)
    future, number = impostor.call("echo")
    impostor.send(frame(CallKind.RESULT, number, b"\x07"))
    assert future.result(3) == 7


def test_more_items_than_were_asked_for(impostor: Impostor) -> None:
    """A stream's reader says how many it can take: who sends more is not believed."""
    future, number = impostor.call("count")
    impostor.send(frame(CallKind.STREAM, number, b"\xc0"))
    stream = future.result(3)
    impostor.call("echo")  # somebody waits, and reads whatever comes
    before = memory()
    item = frame(CallKind.ITEM, number, msgspec.msgpack.encode("x" * 100_000))
    impostor.sock.settimeout(2.0)
    with contextlib.suppress(OSError):
        for _ in range(1500):
            impostor.send(item)
    time.sleep(0.2)
    assert memory() - before < 50
    assert isinstance(error_of(list, stream), PhalanxError)


# -- without the token -----------------------------------------------------------------------------------------------


def test_without_the_token(scene: Scene) -> None:
    port: Any = scene.attacker._connections.port
    address = port._world.address_of(VICTIM)
    hello = Hello(Role.CHANNEL, ATTACKER, 3, VICTIM, *port._key)
    for token in (b"a guess", None):
        with contextlib.closing(Stream(socket.create_connection((address.host, address.port), 5))) as stream:
            error = error_of(shake_hands, stream, hello, token, Deadline(5.0), lambda: None)
            assert isinstance(error, AuthenticationFailed | Rejected), error
    with socket.create_connection((address.host, address.port), 5) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(request(1, "echo", 1) * 100)
        assert read_frame(sock) is None
    scene.check()
