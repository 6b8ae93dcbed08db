"""Streams of frames for both ends of a link of remote calls, as fuzz targets: in this process, without any thread.

Whatever comes, a link goes on or ends with a `ProtocolError`; what it says itself is well formed; a call comes to a
result or to an error of Phalanx; and where the bytes are cut does not matter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from tests.soak.fuzz_grammar import LENGTH, PAYLOAD_LIMIT, Grammar

from phalanx.deadline import Deadline
from phalanx.errors import ChannelClosed, PhalanxError, ProtocolError
from phalanx.rpc import payload
from phalanx.rpc.caller import CallerLink
from phalanx.rpc.event_loop import EventLoop
from phalanx.rpc.link import CallLink
from phalanx.rpc.pending_call import PendingCall
from phalanx.rpc.registry import CREATE, Registry
from phalanx.rpc.server import ServerLink
from phalanx.rpc.stream import RemoteStream
from phalanx.transports.lending import NOTHING
from phalanx.transports.stream import Stream
from phalanx.wire.calls import HEADER_SIZE, CallKind, pack_header, parse_header

__all__ = ["MAGIC", "Misbehaved", "answer_seeds", "generate_answers", "generate_requests", "request_seeds"]
__all__ += ["parse_answers", "parse_requests"]

LONGEST = 80 << 10
"""Bytes of one message: more than what is read ahead at once."""
LIMITS = payload.Limits(max_payload=LONGEST, max_head=LONGEST)
CALLS = 4
"""Calls that wait for an answer when the bytes come."""
MAGIC = [b"PC", b"PC\x01\x00", b"PC\x13\x00", *(pack_header(kind, 1, 1, 0) for kind in CallKind)]


class Misbehaved(Exception):
    """A link did what it must not do."""


class _AtOnce(deque[Callable[[], object]]):
    """Tasks that do not wait."""

    def append(self, task: Callable[[], object], /) -> None:
        task()


class _Poller:
    """What an agent's threads would do.

    Args:
        at_once: As if there were always a thread that is free; otherwise everything waits for `run`.
    """

    def __init__(self, at_once: bool) -> None:
        self.tasks: deque[Callable[[], object]] = _AtOnce() if at_once else deque()
        self.add = self.add_as_mover = self.run_soon = self.tasks.append

    def watch(self, _link: CallLink) -> None:
        """All links are moved by hand."""

    def reload_streams(self) -> None:
        """As `watch`."""

    def call_at(self, _moment: float, _alarm: Callable[[], None]) -> None:
        """Nothing takes so long."""

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        yield

    def run(self) -> None:
        while self.tasks:
            self.tasks.popleft()()


class Thing:
    """Can be made and used by anybody."""

    def echo(self, x: Any) -> Any:
        return x


def _echo(x: Any) -> Any:
    return x


def _fail(x: Any) -> None:
    raise ValueError(str(x)[:1000])


def _count(n: int) -> Iterator[int]:
    yield from range(min(n, 100))


_logger = logging.getLogger("phalanx.rpc")
_registry = Registry(1)
for _name, _target in (("echo", _echo), ("fail", _fail), ("count", _count), ("Thing", Thing)):
    _registry.add(_name, _target)
_loop = EventLoop("fuzz")  # no coroutine is registered, so its thread is never started


class _Talk:
    """A link, and the other end of its connection."""

    def __init__(self, make: Callable[[Stream, Any], CallLink], at_once: bool = False) -> None:
        self.mine, its = socket.socketpair()
        self.mine.setblocking(False)
        self.service = _Poller(at_once)
        self.link = make(Stream(its), self.service)
        self.heard = b""

    def say(self, data: bytes) -> None:
        """Gives the link some bytes, and has it do what it can."""
        view = memoryview(data)
        while view and self.link.ended is None:
            try:
                view = view[self.mine.send(view) :]
            except BlockingIOError:
                pass
            except (BrokenPipeError, ConnectionResetError):
                break
            self._move()
        self._move()

    def _move(self) -> None:
        for _ in range(10_000):
            moved = False
            if self.link.ended is None:
                self.link.mover_lock.acquire()
                try:
                    moved = self.link.move()
                finally:
                    self.link.hand_over()
            self.service.run()
            moved |= self._listen()
            if not moved or self.link.ended is not None:
                return
        raise Misbehaved("a link never comes to rest")

    def _listen(self) -> bool:
        before = len(self.heard)
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while piece := self.mine.recv(1 << 16):
                self.heard += piece
        return len(self.heard) > before

    def close(self) -> None:
        self.mine.close()
        self.link.end(ChannelClosed(0, "the test is over"))
        self.service.run()

    def frames(self) -> list[tuple[Any, bytes]]:
        """What the link has said."""
        found = []
        at = 0
        while at < len(self.heard):
            try:
                header = parse_header(self.heard[at : at + HEADER_SIZE], 0, 8 * LONGEST)
            except (ProtocolError, ValueError) as error:
                raise Misbehaved(f"a link said what is no frame: {error}") from None
            size = HEADER_SIZE + header.head + header.payload
            found.append((header, self.heard[at + HEADER_SIZE : at + size]))
            at += size
        if at != len(self.heard) and self.link.ended is None:
            raise Misbehaved("a link said a part of a frame only")
        return found


# -- the server's end ------------------------------------------------------------------------------------------------


def _server(stream: Stream, service: Any) -> CallLink:
    return ServerLink(
        stream,
        0,
        service,
        _registry,
        _loop,
        LONGEST,
        LIMITS,
        spin=0.0,
        pid=os.getpid(),
        max_queue=1024,
        forget=lambda _link: None,
        lending=NOTHING,
    )


def _serve(*pieces: bytes, at_once: bool) -> tuple[list[tuple[Any, bytes]], PhalanxError | None]:
    talk = _Talk(_server, at_once)
    link = talk.link
    assert isinstance(link, ServerLink)
    _logger.disabled = True  # it would tell of every link that ends
    try:
        for piece in pieces:
            talk.say(piece)
        ended = link.ended
        if ended is None and link.waiting_bytes:
            raise Misbehaved(f"{link.waiting_bytes} bytes seem to wait")
        frames = talk.frames()
    finally:
        talk.close()
        _logger.disabled = False
    registry = link.registry()
    if link.served or (registry is not None and any(owner is link for owner, _ in registry.objects)):
        raise Misbehaved("a link that has ended keeps requests or objects")
    return frames, ended


def parse_requests(data: bytes) -> object:
    """Bytes that come to the serving side."""
    later, _ = _serve(data, at_once=False)
    frames, ended = _serve(data, at_once=True)
    middle = len(data) // 2
    again, ended_again = _serve(data[:middle], data[middle:], at_once=True)
    for header, _ in [*later, *frames, *again]:
        if header.kind not in (CallKind.RESULT, CallKind.ERROR, CallKind.STREAM, CallKind.ITEM, CallKind.RING):
            raise Misbehaved(f"a server said {header.kind.name}")
    if (ended is None) != (ended_again is None):
        raise Misbehaved("where the bytes are cut decides whether the link ends")
    if ended is None and _plain(frames) != _plain(again):
        raise Misbehaved("where the bytes are cut decides what is answered")
    if isinstance(ended, ProtocolError):
        raise ended
    return frames


def _plain(frames: list[tuple[Any, bytes]]) -> list[Any]:
    """What was said, without what is never the same: offers of rings have a nonce, and sets have an order by chance."""
    return sorted(header for header, _ in frames if header.kind is not CallKind.RING)


def _request(number: int, name: str, *args: Any, kind: int = CallKind.REQUEST, target: int = 0) -> bytes:
    out = payload.encode_call(name, target, 60.0, args, {}, LIMITS)
    return pack_header(kind, len(out.head), number, out.payload) + out.head + b"".join(map(bytes, out.buffers))


def _frame(kind: int, number: int, head: bytes = b"", body: bytes = b"") -> bytes:
    return pack_header(kind, len(head), number, len(body)) + head + body


def request_seeds() -> Iterator[bytes]:
    """Valid conversations of a caller."""
    number = msgspec.msgpack.encode
    yield _request(1, "echo", 1)
    yield _request(1, "echo", [1, {"a": np.arange(5)}]) + _request(2, "fail", "oops") + _request(3, "nothing")
    yield _request(1, "count", 50) + _frame(CallKind.CREDIT, 1, number(8)) + _frame(CallKind.CANCEL, 1)
    yield _request(0, "echo", np.zeros(3000), kind=CallKind.NOTIFY) + _request(7, "echo", "x" * 3000)
    made = _request(1, "Thing", target=CREATE) + _request(2, "echo", 5, target=1)
    yield made + _frame(CallKind.FREE, 0, number(1)) + _request(3, "echo", 5, target=1)
    yield (
        _frame(CallKind.RING, 0, number([999, b"n" * 16, 512 << 10]))
        + _frame(CallKind.RING, 0)
        + _request(1, "echo", 1)
    )
    yield _request(1, "echo", "y" * 66_000)


def generate_requests(rng: random.Random) -> bytes:
    """Frames of a caller, more or less."""
    return b"".join(_any_frame(rng, serving=True) for _ in range(rng.randint(1, 8)))


# -- the caller's end ------------------------------------------------------------------------------------------------


def _caller(stream: Stream, service: Any) -> CallLink:
    return CallerLink(
        stream,
        1,
        service,
        LONGEST,
        LIMITS,
        spin=0.0,
        rank=0,
        world_rank=1,
        max_in_flight=CALLS,
        why_ended=lambda error: error if isinstance(error, PhalanxError) else ChannelClosed(1, str(error)),
        why_closed=lambda: ChannelClosed(1, "it has closed its agent"),
        forget=lambda _link: None,
        open_stream=RemoteStream,
        lending=NOTHING,
    )


def parse_answers(data: bytes) -> object:
    """Bytes that come to the calling side, where some calls wait."""
    talk = _Talk(_caller)
    link = talk.link
    assert isinstance(link, CallerLink)
    try:
        waiting = [PendingCall("echo", Deadline(60.0), None) for _ in range(CALLS)]
        for pending in waiting:
            link.start(pending, payload.encode_call("echo", 0, 60.0, (1,), {}, LIMITS))
        middle = len(data) // 2
        talk.say(data[:middle])
        talk.say(data[middle:])
        ended = link.ended
        talk.frames()
    finally:
        talk.close()
    if link.calls:
        raise Misbehaved("a link that has ended keeps calls")
    for pending in waiting:
        if not pending.done:
            raise Misbehaved("a call on a link that has ended is not told")
        with contextlib.suppress(PhalanxError):
            result = link.result(pending)
            if pending.stream is not None:
                list(result)
    if isinstance(ended, ProtocolError):
        raise ended
    return waiting


def answer_seeds() -> Iterator[bytes]:
    """Valid conversations of a server."""
    value = payload.encode_value(np.arange(100), LIMITS)
    array = pack_header(CallKind.RESULT, len(value.head), 2, value.payload) + value.head
    array += b"".join(map(bytes, value.buffers))
    error = _frame(CallKind.ERROR, 3, payload.encode_error("raised", "ValueError", "oops", "Traceback"))
    items = b"".join(_frame(CallKind.ITEM, 4, bytes([item])) for item in range(10))
    yield _frame(CallKind.RESULT, 1, b"\x01")
    yield array + error
    yield _frame(CallKind.STREAM, 4, b"\xc0") + items + _frame(CallKind.RESULT, 4, b"\xc0")
    yield _frame(CallKind.STREAM, 4, b"\xc0") + items + _frame(CallKind.ERROR, 4, error[HEADER_SIZE:])
    yield _frame(CallKind.RESULT, 1, b"\x01") + array + error + _frame(CallKind.GOODBYE, 0)
    yield _frame(CallKind.RESULT, 1, msgspec.msgpack.encode("y" * 66_000))


def generate_answers(rng: random.Random) -> bytes:
    """Frames of a server, more or less."""
    return b"".join(_any_frame(rng, serving=False) for _ in range(rng.randint(1, 8)))


def _any_frame(rng: random.Random, *, serving: bool) -> bytes:
    """A frame with a head from the codec's grammar, or one that is right."""
    if rng.random() < 0.4:
        return rng.choice(list(request_seeds() if serving else answer_seeds())[:-1])  # the last is long
    asked = (CallKind.REQUEST, CallKind.NOTIFY, CallKind.CANCEL, CallKind.CREDIT, CallKind.FREE)
    answered = (CallKind.RESULT, CallKind.ERROR, CallKind.STREAM, CallKind.ITEM)
    kind = rng.choice(asked if serving else answered) if rng.random() < 0.95 else rng.choice(list(CallKind))
    number = rng.choice([0, 1, 2, 3, 4, 5, 2**64 - 1])
    message = Grammar(rng).message()
    (size,) = LENGTH.unpack_from(message)
    head = message[LENGTH.size :]
    if kind in (CallKind.REQUEST, CallKind.NOTIFY):
        head = msgspec.msgpack.encode(["echo", 0, 60.0, [msgspec.Raw(head)], {}])
    elif kind in (CallKind.CANCEL, CallKind.GOODBYE):
        head, size = b"", 0
    elif kind in (CallKind.CREDIT, CallKind.FREE, CallKind.ERROR, CallKind.STREAM, CallKind.RING):
        size = 0
    return pack_header(kind, len(head), number, size) + head + bytes(min(size, PAYLOAD_LIMIT))
