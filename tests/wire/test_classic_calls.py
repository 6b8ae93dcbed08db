"""The bytes of remote calls on the classic wire."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import InvalidMessage
from phalanx.wire.classic import calls as wire

REQUEST = bytes.fromhex("01 0700000000000000 03000000 616464 02000000 0809")
RESULT = bytes.fromhex("02 0700000000000000 00 01000000 ff")
ERROR = bytes.fromhex("02 0700000000000000 01 04000000 6f6f7073")


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
