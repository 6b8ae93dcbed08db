"""Remote calls on the classic wire: the very bytes, both roles at once, and everything that can go wrong."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import logging
import mmap
import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.classic.plain_rank import PlainRank, read, u64
from tests.classic.together import free_place, seats, side_by_side
from tests.lateness import bound

import phalanx as px
from phalanx.errors import Cancelled, InvalidMessage, NoConnection, PeerLost, RemoteError
from phalanx.rpc.classic.agent import ClassicAgent
from phalanx.wire.classic import calls as wire

REQUEST = bytes.fromhex("01 0700000000000000 03000000 616464 02000000 0809")
RESULT = bytes.fromhex("02 0700000000000000 00 01000000 ff")
ERROR = bytes.fromhex("02 0700000000000000 01 04000000 6f6f7073")

patience = 10.0


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_golden_request() -> None:
    assert wire.pack_request(wire.CallRequest(7, "add", b"\x08\x09")) == REQUEST
    assert wire.parse_request(REQUEST) == wire.CallRequest(7, "add", b"\x08\x09")
    smallest = bytes.fromhex("01 0000000000000080 00000000 00000000")
    assert wire.pack_request(wire.CallRequest(1 << 63, "", b"")) == smallest
    assert wire.parse_request(smallest) == wire.CallRequest(1 << 63, "", b"")


def test_golden_responses() -> None:
    assert wire.pack_response(wire.CallResponse(7, False, b"\xff")) == RESULT
    assert wire.parse_response(RESULT) == wire.CallResponse(7, False, b"\xff")
    assert wire.pack_response(wire.CallResponse(7, True, b"oops")) == ERROR
    assert wire.parse_response(ERROR) == wire.CallResponse(7, True, b"oops")
    assert wire.pack_response_length(len(RESULT)) == bytes.fromhex("0f00000000000000")
    assert wire.parse_response_length(bytes.fromhex("0f00000000000000")) == 15
    assert len(wire.pack_response(wire.CallResponse(1, False, b""))) == wire.MIN_RESPONSE


REQUEST_FIELDS = ["first byte"] + ["request id"] * 8 + ["name length"] * 4 + ["name"] * 3
REQUEST_FIELDS += ["payload length"] * 4 + ["payload"] * 2
RESPONSE_FIELDS = ["first byte"] + ["request id"] * 8 + ["flag"] + ["length"] * 4


@pytest.mark.parametrize(
    ("message", "parse", "fields"),
    [
        (REQUEST, wire.parse_request, REQUEST_FIELDS),
        (RESULT, wire.parse_response, [*RESPONSE_FIELDS, "result"]),
        (ERROR, wire.parse_response, [*RESPONSE_FIELDS] + ["error text"] * 4),
    ],
    ids=["request", "result", "error"],
)
def test_every_truncation_names_its_field(message: bytes, parse: Callable[[bytes], Any], fields: list[str]) -> None:
    assert len(fields) == len(message)
    for size, field in enumerate(fields):
        with pytest.raises(InvalidMessage, match=f"cut short in its {field}:"):
            parse(message[:size])
    with pytest.raises(InvalidMessage, match="1 bytes after its end"):
        parse(message + b"\0")


def test_every_truncation_of_a_length() -> None:
    for size in (*range(8), 9):
        with pytest.raises(InvalidMessage, match="length of a response"):
            wire.parse_response_length(bytes(size))


@pytest.mark.parametrize(
    ("parse", "message", "words"),
    [
        (wire.parse_request, RESULT, "first byte of a request is 02"),
        (wire.parse_response, REQUEST, "first byte of a response is 01"),
        (wire.parse_response, RESULT[:9] + b"\x02" + RESULT[10:], "flag of a response is 02"),
        (wire.parse_request, REQUEST.replace(b"add", b"a\xffd"), "name of a request is not UTF-8"),
        (wire.parse_response, ERROR.replace(b"oops", b"oop\xc3"), "error text of a response is not UTF-8"),
        (wire.parse_request, REQUEST[:9] + b"\xff" * 4 + REQUEST[13:], "cut short in its name: 4294967295 bytes"),
        (wire.parse_request, REQUEST[:16] + b"\xff" * 4 + REQUEST[20:], "cut short in its payload: 4294967295 bytes"),
        (wire.parse_response, RESULT[:10] + b"\xff" * 4 + RESULT[14:], "cut short in its result: 4294967295 bytes"),
    ],
)
def test_wrong_fields_are_named(parse: Callable[[bytes], Any], message: bytes, words: str) -> None:
    with pytest.raises(InvalidMessage, match=words):
        parse(message)


def test_what_cannot_be_packed() -> None:
    for bad in (
        lambda: wire.pack_request(wire.CallRequest(1 << 64, "f", b"")),
        lambda: wire.pack_request(wire.CallRequest(1, "\ud800", b"")),
        lambda: wire.pack_response(wire.CallResponse(-1, False, b"")),
        lambda: wire.pack_response(wire.CallResponse(1, True, b"\xff")),
    ):
        with pytest.raises(InvalidMessage):
            bad()


def test_over_one_gib_is_refused_without_a_copy() -> None:
    huge: Any = memoryview(mmap.mmap(-1, (1 << 30) + 1))  # never touched, so it costs address space only
    for bad in (
        lambda: wire.pack_request(wire.CallRequest(1, "f", huge)),
        lambda: wire.pack_response(wire.CallResponse(1, False, huge)),
        lambda: wire.pack_response(wire.CallResponse(1, True, huge)),
        lambda: wire.pack_response_length((1 << 30) + 1),
        lambda: wire.parse_request(huge),
        lambda: wire.parse_response(huge),
        lambda: wire.parse_response_length(((1 << 30) + 1).to_bytes(8, "little")),
    ):
        with pytest.raises(InvalidMessage, match="too large"):
            bad()
    assert wire.parse_response_length(wire.pack_response_length(1 << 30)) == 1 << 30


@given(st.binary(max_size=40))
def test_junk_is_an_invalid_message_and_nothing_else(data: bytes) -> None:
    for first in (b"", b"\x01", b"\x02"):
        for parse in (wire.parse_request, wire.parse_response, wire.parse_response_length):
            with contextlib.suppress(InvalidMessage):
                parse(first + data)
        wire.kind_of(first + data)
        wire.response_id(first + data)


def test_whose_answer_a_broken_response_is() -> None:
    assert [wire.response_id(RESULT[:size]) for size in range(len(RESULT) + 1)] == [None] * 9 + [7] * 7
    assert wire.response_id(REQUEST) is None


# -- worlds ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def simulated(size: int) -> Iterator[list[px.backends.Backend]]:
    backends = px.backends.SimulatedBackend.create_group(size, timeout=patience)
    yield list(backends)
    for backend in backends:
        backend.close()


@contextlib.contextmanager
def classic(topology: str, size: int) -> Iterator[list[px.backends.Backend]]:
    with seats(topology, ["phalanx"] * size) as made:
        yield [seat.phalanx for seat in made]


@contextlib.contextmanager
def phalanx_mesh(size: int) -> Iterator[list[px.backends.Backend]]:
    host, port = free_place()
    backends = side_by_side(
        *(
            functools.partial(px.backends.MeshBackend, rank, size, f"{host}:{port}", token="secret", timeout=patience)
            for rank in range(size)
        )
    )
    yield backends
    side_by_side(*(backend.close for backend in backends))


@contextlib.contextmanager
def sub(size: int, *, share_stream: bool = False) -> Iterator[list[px.backends.Backend]]:
    """The last ranks of a larger world, so that a rank is another one in the parent."""
    with classic("mesh", size + 1) as parents:
        members = range(1, size + 1)
        made = [
            px.backends.SubBackend(parent, members, share_stream=share_stream)  # type: ignore[arg-type]
            for parent in parents[1:]
        ]
        yield list(made)
        for backend in made:
            backend.close()


class PlainBackend(px.backends.Backend):
    """What a user may write: no lanes, only the six methods."""

    def __init__(self, rank: int, queues: dict[tuple[int, int], queue.Queue[bytes]], size: int) -> None:
        self._rank, self._queues, self._size = rank, queues, size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._size

    def send(self, data: Any, dst: int, *, timeout: float | None = None) -> None:
        self._queues[self._rank, dst].put(bytes(data))

    def recv(self, buffer: Any, src: int, *, timeout: float | None = None) -> None:
        try:
            data = self._queues[src, self._rank].get(timeout=timeout)
        except queue.Empty:
            raise px.Timeout("nothing came") from None
        assert len(data) == len(buffer)
        buffer[:] = data

    def barrier(self, *, timeout: float | None = None) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


@contextlib.contextmanager
def own_backend(size: int) -> Iterator[list[px.backends.Backend]]:
    queues: dict[tuple[int, int], queue.Queue[bytes]] = {
        pair: queue.Queue() for pair in itertools.product(range(size), repeat=2)
    }
    yield [PlainBackend(rank, queues, size) for rank in range(size)]


World = Callable[[int], contextlib.AbstractContextManager[list[px.backends.Backend]]]

WORLDS: dict[str, World] = {
    "simulated": simulated,
    "star": functools.partial(classic, "star"),
    "mesh": functools.partial(classic, "mesh"),
    "sub": sub,
    "shared-sub": functools.partial(sub, share_stream=True),
    "phalanx-mesh": phalanx_mesh,
    "own": own_backend,
}


def agent_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("phalanx-agent", "phalanx-calls")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = agent_threads()
    yield
    assert agent_threads() == before


@contextlib.contextmanager
def agents(kind: str, size: int = 2, **options: Any) -> Iterator[list[ClassicAgent]]:
    with WORLDS[kind](size) as backends, contextlib.ExitStack() as stack:
        made = [stack.enter_context(ClassicAgent(backend, **options)) for backend in backends]
        for agent in made:
            register_all(agent)
        yield made


def register_all(agent: ClassicAgent) -> None:
    @agent.register
    def echo(payload: bytes) -> bytes:
        assert type(payload) is bytes
        return payload

    @agent.register("who")
    def _(payload: bytes) -> bytes:
        return str(agent.rank).encode()

    def fail(payload: bytes) -> bytes:
        raise ValueError(f"rank {agent.rank} does not like {payload!r}")

    agent.register("fail", fail)


def echo_after(gate: threading.Event) -> Callable[[bytes], bytes]:
    """A handler that waits first."""

    def wait(payload: bytes) -> bytes:
        assert gate.wait(patience)
        return payload

    return wait


every_world = pytest.mark.parametrize("kind", WORLDS)


# -- exchange ----------------------------------------------------------------------------------------------------------


@every_world
def test_both_roles_at_once(kind: str) -> None:
    """Every connected pair, both ways at the same time, with payloads that could be taken for lengths."""
    payloads = [b"", b"x", u64(0), u64(15), b"\x02" * 8, b"\x01" * 17, os.urandom(1 << 20), memoryview(b"view")]
    with agents(kind, 3) as made:
        pairs = [pair for pair in itertools.permutations(range(3), 2) if kind != "star" or 0 in pair]

        def play(src: int, dst: int) -> None:
            assert made[src].call(dst, "who") == str(dst).encode()
            for payload in payloads:
                assert made[src].call(dst, "echo", payload) == bytes(payload)
            with pytest.raises(RemoteError) as failed:
                made[src].call(dst, "fail", b"this")
            assert str(failed.value) == f"rank {dst} does not like b'this'"

        side_by_side(*(functools.partial(play, *pair) for pair in pairs))
        for rank in range(3):
            assert made[rank].call(rank, "who") == str(rank).encode()


@every_world
def test_many_calls_in_flight(kind: str) -> None:
    with agents(kind) as made:
        sent = [[str(200 * rank + n).encode() * 50 for n in range(200)] for rank in (0, 1)]
        futures = [[made[rank].call_async(1 - rank, "echo", data) for data in sent[rank]] for rank in (0, 1)]
        for rank in (0, 1):
            assert [future.result(patience) for future in futures[rank]] == sent[rank]


@every_world
def test_nested_calls_do_not_wait_for_each_other(kind: str) -> None:
    """More calls than workers go back and forth several times: no place may be held while waiting."""
    with agents(kind, workers=1, timeout=5.0) as made:
        for agent in made:

            def bounce(payload: bytes, agent: ClassicAgent = agent) -> bytes:
                left = int(payload)
                if left == 0:
                    return b"end"
                answer = agent.call(1 - agent.rank, "bounce", str(left - 1).encode())
                return answer + str(agent.rank).encode()

            agent.register("bounce", bounce)
        futures = [made[n % 2].call_async(1 - n % 2, "bounce", b"5") for n in range(8)]
        for n, future in enumerate(futures):
            first = str(1 - n % 2)
            second = str(n % 2)
            assert future.result(patience) == f"end{first}{second}{first}{second}{first}".encode()


@every_world
def test_unknown_name_and_the_rank_of_an_error(kind: str) -> None:
    with agents(kind) as made:
        with pytest.raises(RemoteError) as failed:
            made[0].call(1, "it's")
        assert str(failed.value) == "function 'it's' not registered on rank 1"
        assert failed.value.peer == (2 if "sub" in kind else 1)
        assert "it's" in (failed.value.operation or "")


def test_answers_come_in_any_order() -> None:
    with agents("mesh") as made:
        gate = threading.Event()
        made[1].register("slow", echo_after(gate))
        first = made[0].call_async(1, "slow", b"slow")
        assert made[0].call(1, "echo", b"quick") == b"quick"
        assert not first.done()
        gate.set()
        assert first.result(patience) == b"slow"


class Together:
    """A handler that notes how many of it run at the same time."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, payload: bytes) -> bytes:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.01)
        with self._lock:
            self.now -= 1
        return b""


def test_handlers_run_at_the_same_time_but_not_more_than_allowed() -> None:
    with agents("simulated", workers=3) as made:
        count = Together()
        made[1].register("count", count)
        for future in [made[0].call_async(1, "count") for _ in range(20)]:
            future.result(patience)
        assert count.most == 3
        assert agent_threads().count("phalanx-calls") == 3


def test_a_place_that_was_given_away_is_not_there_twice() -> None:
    """Handlers that come back from a nested call find their place taken, and may only finish."""
    with agents("simulated", workers=1) as made:
        count = Together()
        made[1].register("count", count)
        made[1].register("nested", lambda payload: made[1].call(0, "echo", payload))
        for _ in range(3):
            futures = [made[0].call_async(1, name) for name in ["nested"] * 4 + ["count"] * 8]
            for future in futures:
                future.result(patience)
        assert count.most == 1


def test_more_requests_than_may_wait_are_refused() -> None:
    with agents("mesh", workers=1, max_queue=2) as made:
        gate = threading.Event()
        made[1].register("wait", echo_after(gate))
        futures = [made[0].call_async(1, "wait", b"%d" % n) for n in range(5)]
        for future in futures[3:]:
            with pytest.raises(RemoteError, match=r"rank 1 has too many calls waiting \(max_queue is 2\)"):
                future.result(patience)
        with pytest.raises(RemoteError, match="not registered"):  # needs no worker
            made[0].call(1, "unknown", timeout=patience)
        gate.set()
        assert [future.result(patience) for future in futures[:3]] == [b"0", b"1", b"2"]
        assert made[0].call(1, "wait", b"again") == b"again"


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (7, "function 'odd' returned int (expected bytes)"),
        ("text", "function 'odd' returned str (expected bytes)"),
        (KeyError(), "KeyError"),
        (ValueError("\ud800"), r"\ud800"),
        (SystemExit("no"), "no"),
    ],
    ids=str,
)
def test_what_a_handler_may_do_wrong(result: Any, words: str) -> None:
    with agents("simulated", workers=1) as made:

        def odd(payload: bytes) -> Any:
            if isinstance(result, BaseException):
                raise result
            return result

        made[1].register("odd", odd)
        for _ in range(2):
            with pytest.raises(RemoteError) as failed:
                made[0].call(1, "odd")
            assert str(failed.value) == words


def test_any_buffer_is_a_result() -> None:
    with agents("simulated") as made:
        made[1].register("array", lambda payload: bytearray(payload) * 2)
        assert made[0].call(1, "array", bytearray(b"ab")) == b"abab"


def test_a_result_over_one_gib_is_an_error() -> None:
    with agents("simulated") as made:
        huge: Any = memoryview(mmap.mmap(-1, (1 << 30) + 1))
        with pytest.raises(InvalidMessage, match="too large"):
            made[0].call(1, "echo", huge)
        assert made[0].call(1, "echo", b"next") == b"next"


# -- plain sockets -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def beside_plain(topology: str, own: int) -> Iterator[tuple[ClassicAgent, PlainRank]]:
    kinds = ["plain", "plain"]
    kinds[own] = "phalanx"
    with seats(topology, kinds) as world, ClassicAgent(world[own].phalanx, timeout=patience) as agent:
        register_all(agent)
        yield agent, world[1 - own].plain


def respond(plain: PlainRank, response: bytes, *, announce: int | None = None) -> None:
    peer = 1 - plain.rank
    plain.send(u64(len(response) if announce is None else announce), peer)
    plain.send(response, peer)


def result_of(number: int, data: bytes, flag: int = 0) -> bytes:
    return b"\x02" + u64(number) + bytes([flag]) + struct.pack("<I", len(data)) + data


def request_of(number: int, name: bytes, payload: bytes = b"") -> bytes:
    parts = [b"\x01", u64(number), struct.pack("<I", len(name)), name, struct.pack("<I", len(payload)), payload]
    return b"".join(parts)


both = [pytest.mark.parametrize("topology", ["star", "mesh"]), pytest.mark.parametrize("own", [0, 1])]


def on_both(test: Callable[..., None]) -> Callable[..., None]:
    return both[0](both[1](test))


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


# -- malformed messages ------------------------------------------------------------------------------------------------

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


# -- time and loss -----------------------------------------------------------------------------------------------------


@every_world
def test_a_call_that_takes_too_long(kind: str) -> None:
    with agents(kind) as made:
        gate = threading.Event()
        made[1].register("wait", echo_after(gate))
        begin = time.monotonic()
        future = made[0].call_async(1, "wait", timeout=0.1)
        with pytest.raises(px.Timeout, match=r"call of 'wait' on rank 1: no answer within 0.05 s") as late:
            made[0].call(1, "wait", b"late", timeout=0.05)
        assert late.value.peer == (2 if "sub" in kind else 1)
        with pytest.raises(px.Timeout, match="0.1 s"):
            future.result(patience)
        assert 0.1 <= time.monotonic() - begin < bound(2)
        gate.set()
        for _ in range(3):  # the late answers come between these, and are dropped
            assert made[0].call(1, "echo", b"next") == b"next"


def test_late_answers_are_no_junk(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "phalanx.rpc"), beside_plain("star", 0) as (agent, plain):
        with pytest.raises(px.Timeout):
            agent.call(1, "f", timeout=0.01)
        cancelled = agent.call_async(1, "f")
        assert cancelled.cancel()
        assert cancelled.cancel()
        assert concurrent.futures.wait([cancelled], timeout=1).done
        with pytest.raises(concurrent.futures.CancelledError):
            cancelled.result()
        for number in (1, 2):
            assert plain.recv(0)[1] == number
            respond(plain, result_of(number, b"late"))
        future = agent.call_async(1, "f")
        respond(plain, result_of(3, b"in time"))
        assert future.result(patience) == b"in time"
        assert not future.cancel()
    assert not caplog.records


def test_the_default_time_limit() -> None:
    with agents("simulated", timeout=0.05) as made:
        made[1].register("wait", lambda payload: time.sleep(0.3) or b"")
        with pytest.raises(px.Timeout, match="0.05 s"):
            made[0].call(1, "wait")
        with pytest.raises(px.Timeout, match="0.05 s"):
            made[0].call_async(1, "wait").result(patience)
        assert made[0].call(1, "wait", timeout=patience) == b""


def test_requests_that_never_left_are_taken_back() -> None:
    """A rank that does not read: calls time out one after another, and what was not sent does not pile up."""
    with beside_plain("star", 0) as (agent, plain):
        payload = bytes(8 << 20)
        for _ in range(4):
            with pytest.raises(px.Timeout):
                agent.call(1, "f", payload, timeout=0.05)
        assert len(agent._calls.messages.lane.unsent()) == 1, "the first is on its way and must go on"
        assert plain.recv(0) == request_of(1, b"f", payload)
        plain.send(request_of(1, b"echo"), 0)
        assert plain.recv(0) == u64(14)


@on_both
def test_a_lost_rank(topology: str, own: int) -> None:
    with beside_plain(topology, own) as (agent, plain):
        peer = 1 - own
        futures = [agent.call_async(peer, "f") for _ in range(3)]
        plain.recv(own)
        begin = time.monotonic()
        plain.close()
        for future in futures:
            with pytest.raises(PeerLost) as lost:
                future.result(patience)
            assert lost.value.peer == peer
        with pytest.raises(PeerLost):
            agent.call(peer, "f")
        with pytest.raises(PeerLost):
            agent.call_async(peer, "f").result(0)
        assert time.monotonic() - begin < bound(2)
        assert agent.call(own, "echo", b"alone") == b"alone"


def test_a_lost_rank_fails_its_own_calls_only() -> None:
    with seats("mesh", ["phalanx", "plain", "plain"]) as world, ClassicAgent(world[0].phalanx) as agent:
        lost, kept = agent.call_async(1, "f"), agent.call_async(2, "f")
        world[1].plain.recv(0)
        world[1].plain.send(u64(1000), 0)
        world[1].plain.connections[0].sendall(u64(1000) + b"\x02 in the middle of an answer")
        world[1].plain.close()
        with pytest.raises(PeerLost):
            lost.result(patience)
        assert not kept.done()
        world[2].plain.send(u64(14), 0)
        world[2].plain.send(result_of(2, b""), 0)
        assert kept.result(patience) == b""


@pytest.mark.parametrize("kind", ["simulated", "mesh", "phalanx-mesh", "sub"])
def test_a_rank_that_closes_its_backend(kind: str) -> None:
    with WORLDS[kind](2) as backends, ClassicAgent(backends[0]) as agent:
        other = ClassicAgent(backends[1])
        future = agent.call_async(1, "unknown")
        with pytest.raises(RemoteError):
            future.result(patience)
        backends[1].close()
        with pytest.raises(PeerLost):
            agent.call(1, "echo", timeout=patience)
        other._calls.messages.thread.join(patience)
        assert not other._calls.messages.thread.is_alive, "without its backend the agent has nothing to do"
        with pytest.raises(px.errors.Closed):
            other.call(0, "echo")
        other.close()


@pytest.mark.parametrize("kind", ["simulated", "mesh", "phalanx-mesh", "sub"])
def test_the_own_backend_is_closed_under_a_call(kind: str) -> None:
    with WORLDS[kind](2) as backends, ClassicAgent(backends[0]) as other:
        gate = threading.Event()
        other.register("wait", echo_after(gate))
        agent = ClassicAgent(backends[1])
        agent.register("wait", echo_after(gate))
        futures = [agent.call_async(dst, "wait") for dst in (0, 1)]
        backends[1].close()
        for future in futures:
            with pytest.raises(PeerLost):
                future.result(patience)
        gate.set()
        agent.close()


def test_workers_of_the_star_have_no_connection() -> None:
    with agents("star", 3) as made:
        with pytest.raises(NoConnection, match="rank 1 has no connection to rank 2"):
            made[1].call(2, "echo")
        with pytest.raises(NoConnection):
            made[1].call_async(2, "echo").result(0)
        assert made[1].call(0, "echo", b"x") == b"x"


# -- the end -----------------------------------------------------------------------------------------------------------


@every_world
def test_close_cancels_answers_and_leaves_nothing(kind: str) -> None:
    with WORLDS[kind](2) as backends:
        server, client = ClassicAgent(backends[0], workers=1), ClassicAgent(backends[1])
        begun, gate = threading.Event(), threading.Event()

        @server.register
        def wait(payload: bytes) -> bytes:
            begun.set()
            assert gate.wait(patience)
            return payload

        running, waiting = client.call_async(0, "wait", b"done"), client.call_async(0, "wait")
        assert begun.wait(patience)
        closing = threading.Thread(target=server.close)
        closing.start()
        with pytest.raises(RemoteError, match="rank 0 serves no more calls"):
            waiting.result(patience)
        gate.set()
        assert running.result(patience) == b"done", "a handler that runs may finish"
        closing.join(patience)
        unanswered = client.call_async(0, "wait")
        client.close()
        client.close()
        with pytest.raises(Cancelled):
            unanswered.result(0)
        assert agent_threads() == []
        for agent in (server, client):
            with pytest.raises(px.errors.Closed):
                agent.call(0, "wait")


def test_close_ends_handlers_that_wait_for_calls() -> None:
    with WORLDS["mesh"](2) as backends, ClassicAgent(backends[1]) as other:
        agent = ClassicAgent(backends[0])
        begun, gate = threading.Event(), threading.Event()
        other.register("wait", echo_after(gate))

        @agent.register
        def nested(payload: bytes) -> bytes:
            begun.set()
            return agent.call(1, "wait")

        future = other.call_async(0, "nested")
        assert begun.wait(patience)
        begin = time.monotonic()
        agent.close()
        assert time.monotonic() - begin < bound(2)
        with pytest.raises(RemoteError, match="this agent was closed"):
            future.result(patience)
        gate.set()


def test_the_backend_is_free_again_after_close() -> None:
    with WORLDS["mesh"](2) as backends:
        for _ in range(2):
            with ClassicAgent(backends[0]) as agent, ClassicAgent(backends[1]):
                with pytest.raises(px.errors.UsageError, match="has an agent on this backend already"):
                    ClassicAgent(backends[0])
                with pytest.raises(RemoteError):
                    agent.call(1, "f")
            side_by_side(*(functools.partial(backend.barrier, timeout=patience) for backend in backends))
        backends[0].send(b"plain", 1)
        buffer = bytearray(5)
        backends[1].recv(buffer, 0)
        assert buffer == b"plain"


def test_groups_on_the_same_backend_go_on() -> None:
    """A group has streams of its own, and may be what the agent is made with."""
    with WORLDS["star"](2) as backends:
        groups = [px.Group(backend) for backend in backends]
        with ClassicAgent(groups[0]) as first, ClassicAgent(groups[1]) as second:
            register_all(first)
            register_all(second)

            def play(rank: int) -> None:
                agent = (first, second)[rank]
                for _ in range(20):
                    groups[rank].barrier(timeout=patience)
                    assert agent.call(1 - rank, "who") == b"%d" % (1 - rank)

            side_by_side(*(functools.partial(play, rank) for rank in (0, 1)))
        for group in groups:
            group.close()


# -- use ---------------------------------------------------------------------------------------------------------------


def test_callbacks_cannot_wait_for_other_calls() -> None:
    with agents("mesh") as made:
        seen: queue.Queue[BaseException | None] = queue.Queue()

        def callback(done: concurrent.futures.Future[bytes]) -> None:
            for wait in (lambda: made[0].call(1, "echo"), lambda: made[0].call_async(1, "echo").result()):
                try:
                    wait()
                except px.errors.UsageError as error:
                    seen.put(error)

        gate = threading.Event()
        made[1].register("wait", echo_after(gate))
        future = made[0].call_async(1, "wait")
        future.add_done_callback(callback)
        gate.set()
        for _ in range(2):
            assert "holds up the answers" in str(seen.get(timeout=patience))
        assert made[0].call(1, "echo", b"x") == b"x"


def test_bad_arguments_are_refused_at_once() -> None:
    with agents("simulated") as made:
        agent = made[0]
        for dst in (-1, 2, "1"):
            with pytest.raises(px.errors.InvalidRank):
                agent.call_async(dst, "echo")  # type: ignore[arg-type]
        with pytest.raises(px.errors.UnsupportedArray):
            agent.call_async(1, "echo", "text")
        with pytest.raises(InvalidMessage, match="name of a request cannot be written"):
            agent.call_async(1, "\ud800")
        with pytest.raises(px.errors.UsageError, match="timeout"):
            agent.call(1, "echo", timeout=-1)
        with pytest.raises(px.errors.UsageError, match="cannot be registered"):
            agent.register("x", 3)  # type: ignore[call-overload]
        assert agent.call(1, "echo", b"x") == b"x"
    for options in ({"workers": 0}, {"max_queue": -1}, {"timeout": -1.0}):
        (backend,) = px.backends.SimulatedBackend.create_group(1)
        with pytest.raises(px.errors.UsageError):
            ClassicAgent(backend, **options)  # type: ignore[arg-type]
        backend.close()
        with pytest.raises(px.errors.Closed):
            ClassicAgent(backend)


def test_functions_that_are_there_from_the_start() -> None:
    """A request that came before the agent was made is not answered with `not registered`."""
    backends = px.backends.SimulatedBackend.create_group(2, timeout=patience)
    with ClassicAgent(backends[0]) as early:
        future = early.call_async(1, "double", b"ab")
        with ClassicAgent(backends[1], functions={"double": lambda payload: payload * 2}):
            assert future.result(patience) == b"abab"
    for backend in backends:
        backend.close()
