"""The classic wire: golden bytes for every format of the spec, round trips, and everything that must be refused."""

from __future__ import annotations

import contextlib
import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigError, InvalidMessage, ProtocolError
from phalanx.types import Address
from phalanx.wire.classic import calls, frames, rendezvous
from phalanx.wire.classic.calls import CallRequest, CallResponse

U64 = st.integers(0, 2**64 - 1)
ADDRESSES = st.builds(Address, st.ip_addresses(v=4).map(str), st.integers(1, 65535))


class TestGolden:
    """Bytes written down by hand from the spec, never by the code under test."""

    def test_star_hello(self) -> None:
        assert rendezvous.pack_hello(3).hex() == "0300000000000000"
        assert rendezvous.parse_peer_hello(bytes.fromhex("0300000000000000"), 0, 4) == 3

    def test_message_header(self) -> None:
        assert frames.pack_length(0).hex() == "0000000000000000"
        assert frames.pack_length(0x0102030405).hex() == "0504030201000000"
        assert frames.parse_length(bytes.fromhex("0504030201000000"), 2**40) == (0x0102030405, False)

    def test_escaped_header(self) -> None:
        assert frames.ESCAPE_BIT == 0x8000000000000000
        assert frames.pack_escaped_length(0x28).hex() == "2800000000000080"
        assert frames.parse_length(bytes.fromhex("2800000000000080"), 100) == (0x28, True)

    def test_barrier(self) -> None:
        assert (frames.pack_length(len(frames.BARRIER)) + frames.BARRIER).hex() == "010000000000000000"

    def test_advertisement(self) -> None:
        assert rendezvous.pack_advertisement(Address("127.0.0.1", 29500)).hex() == "7f0000013c73"
        assert rendezvous.parse_advertisement(bytes.fromhex("c0a801020100")) == Address("192.168.1.2", 1)

    def test_mesh_hello(self) -> None:
        data = bytes.fromhex("0200000000000000 0a000007 ffff")
        assert rendezvous.pack_hello(2) + rendezvous.pack_advertisement(Address("10.0.0.7", 65535)) == data
        assert rendezvous.parse_advertisement(data[rendezvous.HELLO_SIZE :]) == Address("10.0.0.7", 65535)
        assert len(data) == rendezvous.HELLO_SIZE + rendezvous.ADVERTISEMENT_SIZE

    def test_table(self) -> None:
        addresses = [Address("127.0.0.1", 256), Address("10.1.2.3", 513)]
        data = bytes.fromhex("7f000001 0001 0a010203 0102")
        assert b"".join(map(rendezvous.pack_advertisement, addresses)) == data
        assert rendezvous.parse_table(data, 2) == addresses

    def test_peer_hello(self) -> None:
        assert rendezvous.parse_peer_hello(bytes.fromhex("0500000000000000"), 4, 6) == 5

    def test_request(self) -> None:
        data = bytes.fromhex("01 0700000000000000 03000000 616464 02000000 0809")
        assert calls.pack_request(CallRequest(7, "add", b"\x08\x09")) == data
        assert calls.parse_request(data) == CallRequest(7, "add", b"\x08\x09")

    def test_request_name_is_utf8(self) -> None:
        data = bytes.fromhex("01 0100000000000000 02000000 c3a9 00000000")
        assert calls.pack_request(CallRequest(1, "é", b"")) == data
        assert calls.parse_request(data).name == "é"

    def test_result(self) -> None:
        data = bytes.fromhex("02 0700000000000000 00 01000000 ff")
        assert calls.pack_response(CallResponse(7, False, b"\xff")) == data
        assert calls.parse_response(data) == CallResponse(7, False, b"\xff")

    def test_error(self) -> None:
        data = bytes.fromhex("02 0800000000000000 01 04000000 6f6f7073")
        assert calls.pack_response(CallResponse(8, True, b"oops")) == data
        assert calls.parse_response(data) == CallResponse(8, True, b"oops")

    def test_response_length(self) -> None:
        assert calls.pack_response_length(14).hex() == "0e00000000000000"
        assert calls.parse_response_length(bytes.fromhex("0e00000000000000")) == 14

    def test_unknown_function(self) -> None:
        assert calls.not_registered("it's", 2) == "function 'it's' not registered on rank 2"


class TestRoundTrips:
    @given(st.integers(0, 2**63 - 1), st.booleans())
    def test_lengths(self, length: int, escaped: bool) -> None:
        data = frames.pack_escaped_length(length) if escaped else frames.pack_length(length)
        assert frames.parse_length(data, length) == (length, escaped)

    @given(st.lists(ADDRESSES, max_size=20))
    def test_tables(self, addresses: list[Address]) -> None:
        table = b"".join(map(rendezvous.pack_advertisement, addresses))
        assert rendezvous.parse_table(table, len(addresses)) == addresses

    @given(U64, st.text(), st.binary())
    def test_requests(self, request_id: int, name: str, payload: bytes) -> None:
        request = CallRequest(request_id, name, payload)
        assert calls.parse_request(bytearray(calls.pack_request(request))) == request

    @given(U64, st.one_of(st.tuples(st.just(True), st.text().map(str.encode)), st.tuples(st.just(False), st.binary())))
    def test_responses(self, response_id: int, body: tuple[bool, bytes]) -> None:
        response = CallResponse(response_id, *body)
        assert calls.parse_response(memoryview(calls.pack_response(response))) == response

    def test_a_payload_is_counted_in_bytes_and_not_copied_when_parsed(self) -> None:
        words = memoryview(bytearray(16)).cast("I")
        data = bytearray(calls.pack_request(CallRequest(1, "f", words)))
        payload = calls.parse_request(data).payload
        assert len(payload) == 16
        data[-1] = 7
        assert payload[-1] == 7


class TestRefused:
    @pytest.mark.parametrize("rank", [0, 4, 2**64 - 1])
    def test_star_rank(self, rank: int) -> None:
        with pytest.raises(ProtocolError, match=rf"claims rank {rank}, .*\(expected 1 to 3\)"):
            rendezvous.parse_peer_hello(rendezvous.pack_hello(rank), 0, 4)

    @pytest.mark.parametrize("rank", [0, 1, 2, 4])
    def test_peer_rank(self, rank: int) -> None:
        with pytest.raises(ProtocolError, match="expected 3 to 3"):
            rendezvous.parse_peer_hello(rendezvous.pack_hello(rank), 2, 4)

    def test_the_highest_rank_expects_nobody(self) -> None:
        with pytest.raises(ProtocolError, match="none is expected"):
            rendezvous.parse_peer_hello(rendezvous.pack_hello(3), 3, 4)

    def test_port_0(self) -> None:
        with pytest.raises(ProtocolError, match="port 0"):
            rendezvous.parse_advertisement(bytes(6))

    @pytest.mark.parametrize("size", [0, 7, 9])
    def test_sizes(self, size: int) -> None:
        data = bytes(size)
        for parse in (
            lambda: rendezvous.parse_peer_hello(data, 0, 4),
            lambda: frames.parse_length(data, 10),
            lambda: rendezvous.parse_advertisement(data),
            lambda: rendezvous.parse_table(data, 3),
        ):
            with pytest.raises(ProtocolError, match=f"has {size} bytes"):
                parse()
        with pytest.raises(InvalidMessage, match=f"has {size} bytes"):
            calls.parse_response_length(data)

    @pytest.mark.parametrize("pack", [frames.pack_length, frames.pack_escaped_length])
    def test_lengths(self, pack: object) -> None:
        with pytest.raises(ProtocolError, match="announces 11 bytes .at most 10"):
            frames.parse_length(pack(11), 10)  # type: ignore[operator]
        for length in (-1, 2**63):
            with pytest.raises(ProtocolError, match=f"a message of {length} bytes"):
                pack(length)  # type: ignore[operator]

    @pytest.mark.parametrize("host", ["::1", "fe80::1", "localhost", "", "1.2.3"])
    def test_hosts_that_do_not_fit(self, host: str) -> None:
        with pytest.raises(ConfigError, match="IPv4 address only"):
            rendezvous.pack_advertisement(Address(host, 1))

    @pytest.mark.parametrize("port", [0, -1, 65536])
    def test_ports_that_do_not_fit(self, port: int) -> None:
        with pytest.raises(ConfigError, match="port from 1 to 65535"):
            rendezvous.pack_advertisement(Address("127.0.0.1", port))


REQUEST = calls.pack_request(CallRequest(7, "add", b"1234"))
REQUEST_FIELDS = [
    (0, "first byte"),
    (1, "request id"),
    (8, "request id"),
    (9, "name length"),
    (12, "name length"),
    (13, "name"),
    (15, "name"),
    (16, "payload length"),
    (19, "payload length"),
    (20, "payload"),
    (23, "payload"),
]
RESULT = calls.pack_response(CallResponse(7, False, b"1234"))
ERROR = calls.pack_response(CallResponse(7, True, b"oops"))
RESPONSE_FIELDS = [(0, "first byte"), (1, "request id"), (8, "request id"), (9, "flag"), (10, "length"), (13, "length")]


class TestRemoteCallsRefused:
    @pytest.mark.parametrize(("size", "field"), REQUEST_FIELDS)
    def test_request_cut_short(self, size: int, field: str) -> None:
        with pytest.raises(InvalidMessage, match=f"a request is cut short in its {field}: "):
            calls.parse_request(REQUEST[:size])

    @pytest.mark.parametrize(("size", "field"), [*RESPONSE_FIELDS, (14, "result"), (17, "result")])
    def test_result_cut_short(self, size: int, field: str) -> None:
        with pytest.raises(InvalidMessage, match=f"a response is cut short in its {field}: "):
            calls.parse_response(RESULT[:size])

    @pytest.mark.parametrize(("size", "field"), [*RESPONSE_FIELDS, (14, "error text"), (17, "error text")])
    def test_error_cut_short(self, size: int, field: str) -> None:
        with pytest.raises(InvalidMessage, match=f"a response is cut short in its {field}: "):
            calls.parse_response(ERROR[:size])

    def test_first_byte(self) -> None:
        with pytest.raises(InvalidMessage, match=r"first byte of a request is 02 \(expected 01\)"):
            calls.parse_request(RESULT)
        with pytest.raises(InvalidMessage, match=r"first byte of a response is 01 \(expected 02\)"):
            calls.parse_response(REQUEST)

    def test_flag(self) -> None:
        with pytest.raises(InvalidMessage, match="flag of a response is 02"):
            calls.parse_response(RESULT[:9] + b"\x02" + RESULT[10:])

    def test_text(self) -> None:
        with pytest.raises(InvalidMessage, match="the name of a request is not UTF-8"):
            calls.parse_request(REQUEST.replace(b"add", b"a\xffd"))
        with pytest.raises(InvalidMessage, match="the error text of a response is not UTF-8"):
            calls.parse_response(ERROR.replace(b"oops", b"\xc3ops"))
        with pytest.raises(InvalidMessage, match="the name of a request cannot be written"):
            calls.pack_request(CallRequest(1, "\ud800", b""))
        with pytest.raises(InvalidMessage, match="the error text of a response is not UTF-8"):
            calls.pack_response(CallResponse(1, True, b"\xc3ops"))

    def test_trailing_bytes(self) -> None:
        with pytest.raises(InvalidMessage, match="a request has 1 bytes after its end"):
            calls.parse_request(REQUEST + b"x")
        with pytest.raises(InvalidMessage, match="a response has 2 bytes after its end"):
            calls.parse_response(ERROR + b"xx")

    @pytest.mark.parametrize("request_id", [-1, 2**64])
    def test_ids(self, request_id: int) -> None:
        with pytest.raises(InvalidMessage, match="request id"):
            calls.pack_request(CallRequest(request_id, "f", b""))
        with pytest.raises(InvalidMessage, match="request id"):
            calls.pack_response(CallResponse(request_id, False, b""))

    def test_over_one_gib_by_either_side(self) -> None:
        assert calls.parse_response_length(calls.pack_response_length(1 << 30)) == 1 << 30
        over = ((1 << 30) + 1).to_bytes(8, "little")
        with pytest.raises(InvalidMessage, match="too large"):
            calls.parse_response_length(over)
        with pytest.raises(InvalidMessage, match="too large"):
            calls.pack_response_length((1 << 30) + 1)

    def test_a_large_message_is_refused_without_a_copy(self, one_gib: memoryview) -> None:
        for refuse in (
            lambda: calls.pack_request(CallRequest(1, "f", one_gib)),
            lambda: calls.pack_response(CallResponse(1, False, one_gib)),
            lambda: calls.parse_request(one_gib),
            lambda: calls.parse_response(one_gib),
        ):
            with pytest.raises(InvalidMessage, match="too large"):
                refuse()

    @pytest.fixture
    def one_gib(self) -> memoryview:
        # Never touched, so it costs address space only.
        return memoryview(mmap.mmap(-1, (1 << 30) + 1))

    @given(st.binary(max_size=60))
    def test_junk(self, data: bytes) -> None:
        for first, parse in ((b"\x01", calls.parse_request), (b"\x02", calls.parse_response)):
            for candidate in (data, first + data):
                with contextlib.suppress(InvalidMessage):
                    parse(candidate)
