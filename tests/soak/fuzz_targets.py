"""What is fuzzed: every parser, with valid messages to mutate and the errors that it may raise.

A target takes bytes. It returns when it accepts them, raises one of its documented errors when it refuses them, and
anything else is a bug: another exception, or a broken promise (`Broken`).
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import random
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec
import numpy as np
from tests.soak import fuzz_links
from tests.soak.fuzz_grammar import LENGTH, PAYLOAD_LIMIT, Grammar

from phalanx.errors import (
    AuthenticationFailed,
    BackendUnavailable,
    InvalidArgument,
    InvalidMessage,
    ProtocolError,
    UsageError,
)
from phalanx.rpc import payload, signature
from phalanx.types import Address
from phalanx.wire import calls, codec, control, frames, handshake
from phalanx.wire.classic import calls as classic_calls
from phalanx.wire.classic import frames as classic_frames
from phalanx.wire.classic import rendezvous as classic_meeting
from phalanx.wire.classic.calls import CallRequest, CallResponse
from phalanx.wire.packing import ALIGN, Code

__all__ = ["TARGETS", "Broken", "Target", "warm_up"]

WORLD_SIZE = 4


class Broken(Exception):
    """A parser accepted what it must not, or what it accepted does not behave."""


@dataclass(frozen=True)
class Target:
    """One parser."""

    name: str
    parse: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: list[bytes]
    """Valid messages."""
    generate: Callable[[random.Random], bytes] | None = None
    """Makes messages that follow the grammar, more or less."""
    magic: list[bytes] = field(default_factory=list)
    """Byte strings that mean something to this parser."""


def warm_up(target: Target) -> None:
    """Reads what is valid once, so that caches are filled and torch is imported before anything is measured."""
    for data in target.seeds:
        with contextlib.suppress(*target.errors):
            target.parse(data)


# -- the object codec ------------------------------------------------------------------------------------------------

_LIMITS = codec.Limits(max_payload=PAYLOAD_LIMIT, max_head=1 << 20)
_pack = msgspec.msgpack.encode


def parse_object(data: bytes) -> object:
    """A head behind the length of its payload (u64), as the two stand in a frame."""
    if len(data) < LENGTH.size:
        raise ProtocolError("no frame")
    (payload_bytes,) = LENGTH.unpack_from(data)
    head = data[LENGTH.size :]
    plan = codec.decode_head(head, payload_bytes=payload_bytes, limits=_LIMITS)
    target = plan.allocate()
    if len(target) != payload_bytes:
        raise Broken(f"{len(target)} bytes allocated for a payload of {payload_bytes}")
    target[:] = bytes(payload_bytes) if data[-1] % 2 else (data * (payload_bytes // len(data) + 1))[:payload_bytes]
    value = plan.build(target)
    # What was accepted is ordinary data: it can be sent on, and arrives unchanged.
    again = codec.encode(value)
    relayed = codec.encode(codec.decode(again.head, b"".join(again.buffers)))
    # A set has no order, and before an array there is room up to its alignment.
    if abs(relayed.nbytes - again.nbytes) >= ALIGN * max(1, len(again.buffers)):
        raise Broken(f"an object of {again.nbytes} bytes has {relayed.nbytes} when it is sent on")
    return value


_STRUCTURED = np.dtype([("x", "<f4"), ("inner", [("flag", "?"), ("name", "U3")]), ("grid", ">i2", (2, 3))])
_OBJECTS: list[Any] = [
    None,
    [1, -1, 2**63, 2**64, -(10**30), 1.5, "text", b"bytes", True, "\ud800"],
    {"step": 3, "loss": 0.25, "shape": (1, 2, 3), "tags": ["a", "b"]},
    {(1, 2): {3}, frozenset({4}): [(), [[]], ((),)], None: bytearray(b"xyz")},
    OrderedDict(w=np.arange(6, dtype="<f4").reshape(2, 3), b=np.asfortranarray(np.ones((2, 2)))),
    [dt.date(2024, 2, 29), dt.time(1, 2, 3, 4), dt.timedelta(1, 2, 3), decimal.Decimal("1.5"), uuid.UUID(int=7), 1j],
    dt.datetime(2024, 1, 1, fold=1, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")),
    [np.float32(1), np.bool_(True), np.str_("ab"), np.datetime64("2024-01-01"), np.zeros((), _STRUCTURED)[()]],
    [np.zeros(3, _STRUCTURED), np.array([True, False]), np.array(["ab", "c"]), np.array(7), np.zeros((0, 3))],
    [b"x" * 20_000, bytearray(17_000), np.zeros(100, ">i8")],
]


def _object_seeds() -> Iterator[bytes]:
    for value in _OBJECTS:
        encoded = codec.encode(value)
        yield LENGTH.pack(encoded.payload_bytes) + encoded.head
    for name in ("float32", "bfloat16", "bool"):
        itemsize = {"float32": 4, "bfloat16": 2, "bool": 1}[name]
        head = _pack([msgspec.msgpack.Ext(Code.TENSOR, _pack((2 * itemsize, (2, 1), name, False)))])
        yield LENGTH.pack(2 * itemsize) + head
    yield LENGTH.pack(0) + _pack(msgspec.msgpack.Ext(Code.PICKLE, b"\x80\x05N."))


# -- remote calls ----------------------------------------------------------------------------------------------------


def _split_payload(data: bytes) -> tuple[int, bytes]:
    if len(data) < LENGTH.size:
        raise InvalidMessage("no frame")
    return LENGTH.unpack_from(data)[0], data[LENGTH.size :]


def _built(plan: payload.PlannedValue, payload_bytes: int) -> Any:
    target = plan.allocate()
    if len(target) != payload_bytes:
        raise Broken(f"{len(target)} bytes allocated for a payload of {payload_bytes}")
    target[:] = bytes(payload_bytes)
    return plan.build(target)


def _check_quick(quick: Any, plan: Callable[[], Any]) -> Any:
    """What the quick way accepts, the general one reads as the same."""
    if quick is payload.NOT_FAST:
        return plan()
    try:
        general = plan()
    except InvalidMessage as error:
        raise Broken(f"the quick way accepts what the general one refuses: {error}") from error
    if repr(quick) != repr(general):
        raise Broken(f"the quick way reads {quick!r}, the general one {general!r}")
    return general


def parse_call(data: bytes) -> object:
    """The head of a call behind the length of its payload."""
    size, head = _split_payload(data)
    quick = payload.fast_call(head) if not size else payload.NOT_FAST
    name, target, seconds, args, kwargs = _check_quick(
        quick, lambda: _built(payload.plan_call(head, size, _LIMITS), size)
    )
    again = payload.encode_call(name, target, seconds, tuple(args), kwargs, payload.Limits())
    if payload.plan_call(again.head, again.payload, payload.Limits()).payload_bytes != again.payload:
        raise Broken("a call that was accepted cannot be sent on")
    return args


def parse_call_value(data: bytes) -> object:
    """The head of a result or item behind the length of its payload."""
    size, head = _split_payload(data)
    quick = payload.fast_value(head) if not size else payload.NOT_FAST
    return _check_quick(quick, lambda: _built(payload.plan_value(head, size, _LIMITS), size))


def parse_call_error(data: bytes) -> object:
    """An error; cutting it a second time changes nothing."""
    error = payload.decode_error(data)
    if payload.decode_error(payload.encode_error(*error)) != error:
        raise Broken("an error that was accepted arrives changed when it is sent on")
    return error


def parse_call_header(data: bytes) -> object:
    """A header somewhere in a buffer; what is accepted has exactly one spelling."""
    data = _exactly(data, calls.HEADER_SIZE)
    header = calls.parse_header(b"###" + data, 3, max_message=1 << 30)
    if header.head + header.payload > 1 << 30 or calls.pack_header(*header) != data:
        raise Broken(f"{data.hex()} was read as {header}")
    return header


@dataclass
class _Point:
    x: int
    y: float = 0.0


@dataclass
class _Tree:
    value: float | np.ndarray[Any, Any]
    at: _Point | None = None
    children: list[_Tree] = field(default_factory=list)


def _handler(
    point: _Point,
    count: int = 0,
    trees: dict[str, _Tree] | None = None,
    *rest: tuple[int, ...],
    when: dt.date = dt.date.min,
) -> float:
    return float(point.x + point.y + count + sum(len(tree.children) for tree in (trees or {}).values()) + len(rest))


_SIGNATURE = signature.Signature.of(_handler)


def parse_arguments(data: bytes) -> object:
    """A call whose arguments are checked against annotations; what is accepted, the function can work with."""
    size, head = _split_payload(data)
    _, _, _, args, kwargs = _built(payload.plan_call(head, size, _LIMITS), size)
    bound, named = _SIGNATURE.bind("handler", args, kwargs)
    return _handler(*bound, **named)


def _call_seeds(*values: Any) -> Iterator[bytes]:
    for value in values:
        out = payload.encode_call("add", 0, 5.0, (value,), {}, payload.Limits())
        yield LENGTH.pack(out.payload) + out.head
    out = payload.encode_call("module.f", 2**40, 0.5, (1, "two", b"3", None), {"a": [1.5], "é": {"b": ()}}, _LIMITS)
    yield LENGTH.pack(out.payload) + out.head


def _argument_seeds() -> Iterator[bytes]:
    tree = _Tree(np.zeros(2), _Point(1), [_Tree(1.5)])
    for args, kwargs in (
        ((_Point(1, 2.5), 3), {}),
        ((_Point(1), 3, {"a": tree}, (1, 2), (3,)), {"when": dt.date(2024, 2, 29)}),
        ((), {"point": _Point(2), "trees": {"b": _Tree(0.5)}}),
    ):
        out = payload.encode_call("handler", 0, 5.0, args, kwargs, _LIMITS)
        yield LENGTH.pack(out.payload) + out.head


def _generate_call(rng: random.Random) -> bytes:
    """A call with one argument from the codec's grammar."""
    message = Grammar(rng).message()
    argument = msgspec.Raw(message[LENGTH.size :])
    named = rng.random() < 0.3
    fields = ["f", 0, 1.0, [] if named else [argument], {"k": argument} if named else {}]
    if rng.random() < 0.1:
        fields[rng.randrange(5)] = rng.choice([None, -1, 1.5, "", b"", [], {}, 2**63, True, float("nan")])
    return message[: LENGTH.size] + _pack(fields)


def _call_targets() -> Iterator[Target]:
    errors = (InvalidMessage, BackendUnavailable)
    magic = [b"\x95", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 70, b"\xca\x7f\x80\x00\x00"]
    yield Target("call", parse_call, errors, list(_call_seeds(*_OBJECTS)), _generate_call, magic)
    yield Target(
        "call value", parse_call_value, errors, list(_object_seeds()), lambda rng: Grammar(rng).message(), magic
    )
    texts = [("remote", "ValueError", "oops é", "Traceback\n"), ("", "", "", ""), ("k", "T", "x" * 300, "y" * 70_000)]
    yield Target("call error", parse_call_error, (InvalidMessage,), [payload.encode_error(*text) for text in texts])
    yield Target("call arguments", parse_arguments, (*errors, InvalidArgument), list(_argument_seeds()), magic=magic)
    headers = [
        calls.pack_header(
            kind, *((0, 7, 0) if kind in (calls.CallKind.CANCEL, calls.CallKind.GOODBYE) else (100, 7, 0))
        )
        for kind in calls.CallKind
    ]
    headers.append(calls.pack_header(calls.CallKind.REQUEST, 100, 7, 1 << 20))
    yield Target("call header", parse_call_header, (ProtocolError,), headers, magic=[b"PC"])
    for name, parse, seeds, generate in (
        ("call server", fuzz_links.parse_requests, fuzz_links.request_seeds(), fuzz_links.generate_requests),
        ("call caller", fuzz_links.parse_answers, fuzz_links.answer_seeds(), fuzz_links.generate_answers),
    ):
        yield Target(name, parse, (ProtocolError,), list(seeds), generate, fuzz_links.MAGIC)


# -- the classic wire ------------------------------------------------------------------------------------------------

_TABLE = [Address("127.0.0.1", 29500), Address("10.0.0.2", 1), Address("192.168.7.7", 65535), Address("1.2.3.4", 80)]


def _agree(parse: Callable[[bytes], Any], pack: Callable[[Any], bytes]) -> Callable[[bytes], object]:
    """On the classic wire every meaning has exactly one spelling: what is accepted must pack to the same bytes."""

    def check(data: bytes) -> object:
        value = parse(data)
        if pack(value) != data:
            raise Broken(f"{data.hex()} was read as {value!r}, which is written {pack(value).hex()}")
        return value

    return check


def _pack_any_length(parsed: tuple[int, bool]) -> bytes:
    return classic_frames.pack_escaped_length(parsed[0]) if parsed[1] else classic_frames.pack_length(parsed[0])


def _pack_table(addresses: Iterable[Address]) -> bytes:
    return b"".join(map(classic_meeting.pack_advertisement, addresses))


def _classic_targets() -> Iterator[Target]:
    def target(
        name: str,
        parse: Callable[[bytes], Any],
        pack: Callable[[Any], bytes],
        *seeds: bytes,
        error: type[Exception] = ProtocolError,
    ) -> Target:
        return Target(f"classic {name}", _agree(parse, pack), (error,), list(seeds))

    hellos = [classic_meeting.pack_hello(rank) for rank in range(WORLD_SIZE)]
    yield target(
        "star hello",
        lambda d: classic_meeting.parse_peer_hello(d, 0, WORLD_SIZE),
        classic_meeting.pack_hello,
        *hellos,
    )
    yield target(
        "peer hello",
        lambda d: classic_meeting.parse_peer_hello(d, 1, WORLD_SIZE),
        classic_meeting.pack_hello,
        *hellos,
    )
    lengths = [
        pack(n)
        for n in (0, 1, 4096, 1 << 34)
        for pack in (classic_frames.pack_length, classic_frames.pack_escaped_length)
    ]
    yield target("length", lambda d: classic_frames.parse_length(d, 16 << 30), _pack_any_length, *lengths)
    advertisements = map(classic_meeting.pack_advertisement, _TABLE)
    yield target(
        "advertisement", classic_meeting.parse_advertisement, classic_meeting.pack_advertisement, *advertisements
    )
    yield target("table", lambda d: classic_meeting.parse_table(d, WORLD_SIZE), _pack_table, _pack_table(_TABLE))
    requests = [classic_calls.pack_request(CallRequest(i, n, p)) for i, n, p in ((1, "f", b""), (2**60, "aé", b"xy"))]
    yield target("request", classic_calls.parse_request, classic_calls.pack_request, *requests, error=InvalidMessage)
    responses = [CallResponse(1, False, b"abc"), CallResponse(2, True, "oops é".encode()), CallResponse(3, False, b"")]
    packed = map(classic_calls.pack_response, responses)
    yield target("response", classic_calls.parse_response, classic_calls.pack_response, *packed, error=InvalidMessage)
    sizes = [classic_calls.pack_response_length(n) for n in (0, 14, 1 << 30)]
    yield target(
        "response length",
        classic_calls.parse_response_length,
        classic_calls.pack_response_length,
        *sizes,
        error=InvalidMessage,
    )


# -- frames, handshake, control --------------------------------------------------------------------------------------


def parse_frame(data: bytes) -> object:
    """A transport always reads exactly one header."""
    header = frames.parse_header(_exactly(data, frames.HEADER_SIZE), max_message=1 << 34, max_object=1 << 30)
    if header.description > 1 << 30 or header.payload > 1 << 34:
        raise Broken(f"{header} is over the limits")
    return header


def _exactly(data: bytes, size: int) -> bytes:
    return data[:size].ljust(size, b"\0")


_TOKEN = b"the token of the job"
_HELLO = handshake.Hello(handshake.Role.CHANNEL, 1, WORLD_SIZE, target=0, context=bytes(range(16)))


def parse_stranger(data: bytes) -> object:
    """A stranger, who does not know the token, talks to a server."""
    server = handshake.ServerHandshake(_TOKEN, lambda _hello: handshake.HandshakeStatus.OK)
    at = 0
    while server.wants and at < len(data) and server.refused is None:
        piece = _exactly(data[at : at + server.wants], server.wants)
        at += server.wants
        server.feed(piece)
    if server.done:
        raise Broken("a stranger was let in")
    raise AuthenticationFailed(f"refused: {server.refused}" if server.refused is not None else "did not finish")


def _xor(data: bytes, mask: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(data, mask.ljust(len(data), b"\0"), strict=False))


def parse_handshake(mask: bytes) -> object:
    """A client and a server, both genuine; the input is added to what passes between them."""
    client = handshake.ClientHandshake(_HELLO, _TOKEN)
    server = handshake.ServerHandshake(_TOKEN, lambda _hello: handshake.HandshakeStatus.OK)
    changed = False
    message, to_server = client.start(), True
    for _ in range(4):
        part, mask = mask[: len(message)], mask[len(message) :]
        sent = _xor(message, part)
        # Padding after the verdict's status is the only thing that no proof covers: nothing follows from it.
        padding = slice(5, 8) if message[:4] == b"PXVD" else slice(0, 0)
        changed |= any(byte for index, byte in enumerate(part) if index not in range(8)[padding])
        side: handshake.ServerHandshake | handshake.ClientHandshake = server if to_server else client
        message = side.feed(sent)
        if client.done or (to_server and server.refused is not None and not message):
            break
        to_server = not to_server
    if client.done and (changed or not server.done):
        raise Broken("a client accepted a conversation that was changed on the way")
    if not client.done:
        raise AuthenticationFailed("the client did not believe the verdict")
    return client


def _example(kind: msgspec.inspect.Type, full: bool) -> Any:
    """A value of a type of the control messages; `full`: with what is optional, too."""
    inspect = msgspec.inspect
    if isinstance(kind, inspect.UnionType):
        options = [option for option in kind.types if isinstance(option, inspect.NoneType) != full]
        return _example(options[0], full)
    if isinstance(kind, inspect.StructType):
        wanted = [part for part in kind.fields if full or part.required]
        return kind.cls(**{part.name: _example(part.type, full) for part in wanted})
    if isinstance(kind, inspect.ListType):
        return [_example(kind.item_type, full)] * (2 if full else 0)
    if isinstance(kind, inspect.DictType):
        return {_example(kind.key_type, full): _example(kind.value_type, full)} if full else {}
    if isinstance(kind, (inspect.TupleType, inspect.VarTupleType)):
        items = kind.item_types if isinstance(kind, inspect.TupleType) else (kind.item_type,)
        return tuple(_example(item, full) for item in items)
    plain: dict[type, Any] = {
        inspect.LiteralType: getattr(kind, "values", [None])[0],
        inspect.IntType: 3,
        inspect.StrType: "text",
        inspect.BytesType: bytes(16),
        inspect.BoolType: True,
        inspect.FloatType: 1.5,
        inspect.NoneType: None,
    }
    return plain[type(kind)]


def _control_seeds() -> Iterator[bytes]:
    for kind in get_args(control.Message):
        for full in (False, True):
            yield control.pack(_example(msgspec.inspect.type_info(kind), full))


def parse_control(data: bytes) -> object:
    """A stream of control messages; where it is cut must not matter."""
    whole: list[control.Message] = []
    error: ProtocolError | None = None
    try:
        whole.extend(control.ControlReader().feed(data))
    except ProtocolError as problem:
        error = problem
    reader = control.ControlReader()
    pieces: list[control.Message] = []
    middle = len(data) // 2
    try:
        for piece in (data[:middle], data[middle:]):
            pieces.extend(reader.feed(piece))
    except ProtocolError as problem:
        if error is None:
            raise Broken("a message is refused only if it comes in two pieces") from problem
    if error is not None:
        raise error
    if b"".join(map(control.pack, whole)) != b"".join(map(control.pack, pieces)):
        raise Broken("messages differ if they come in two pieces")
    return whole


def _all_targets() -> Iterator[Target]:
    heads = [b"\xc7", b"\xc8\x00\x04", b"\xd6", b"\xdd\xff\xff\xff\xff", b"\x91" * 70, b"<f8", b"|O8", b"|b1"]
    yield Target(
        "codec",
        parse_object,
        (ProtocolError, UsageError, BackendUnavailable),
        list(_object_seeds()),
        lambda rng: Grammar(rng).message(),
        heads,
    )
    kinds = [frames.pack_header(kind, 7, 100, 1 << 20) for kind in frames.FrameKind]
    yield Target("frame header", parse_frame, (ProtocolError,), kinds, magic=[b"PX"])
    hellos = [handshake.Hello(role, 1, WORLD_SIZE).pack(secret=True, nonce=bytes(32)) for role in handshake.Role]
    yield Target(
        "handshake stranger",
        parse_stranger,
        (ProtocolError, AuthenticationFailed),
        [hello + bytes(32) for hello in hellos],
    )
    size = handshake.HELLO_SIZE + 3 * 40
    masks = [bytes(size), *(bytes(at) + b"\x01" for at in range(0, size, 3))]
    refusals = (ProtocolError, AuthenticationFailed, handshake.Rejected)
    yield Target("handshake changed", parse_handshake, refusals, masks)
    yield Target("control", parse_control, (ProtocolError,), list(_control_seeds()))
    yield from _call_targets()
    yield from _classic_targets()


TARGETS: dict[str, Target] = {target.name: target for target in _all_targets()}
