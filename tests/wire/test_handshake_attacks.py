"""Everything that somebody in between, or a stranger at either end, could try with a handshake."""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.handshake_support import HELLO, REFUSALS, SIZES, TOKEN, Alter, Server, exchange, flip

from phalanx.errors import AuthenticationFailed, ProtocolError
from phalanx.wire.handshake import (
    DIRECTORY,
    HELLO_SIZE,
    NO_CHANNEL,
    VERSION,
    ClientHandshake,
    HandshakeStatus,
    Hello,
    Role,
    ServerHandshake,
)

# -- somebody in between --------------------------------------------------------------------------------------


def flipping(name: str, bit: int) -> Alter:
    return lambda which, data: flip(data, bit) if which == name else data


@pytest.mark.parametrize("name", SIZES)
def test_every_flipped_bit_is_refused(name: str) -> None:
    for bit in range(SIZES[name] * 8):
        client, server = ClientHandshake(HELLO, TOKEN), Server()
        with pytest.raises(REFUSALS):
            exchange(client, server, flipping(name, bit))
        assert not client.done, f"bit {bit} of {name}"
        if name != "verdict":
            assert not server.done, f"bit {bit} of {name}"
            assert server.asked == []


@given(st.data())
def test_any_change_is_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SIZES)))
    mask = data.draw(st.binary(min_size=SIZES[name], max_size=SIZES[name]).filter(any))
    client, server = ClientHandshake(HELLO, TOKEN), Server()
    change = int.from_bytes(mask, "big")

    def alter(which: str, sent: bytes) -> bytes:
        return (int.from_bytes(sent, "big") ^ change).to_bytes(len(sent), "big") if which == name else sent

    with pytest.raises(REFUSALS):
        exchange(client, server, alter)
    assert not client.done
    assert server.asked == [] or name == "verdict"


CHANGES: dict[str, Any] = {
    "role": Role.RANK,
    "rank": 4,
    "world_size": 9,
    "target": DIRECTORY,
    "context": NO_CHANNEL,
    "lane": 3,
    "port": 29501,
}


def test_the_changes_cover_every_field() -> None:
    assert CHANGES.keys() == {field.name for field in fields(Hello)}


@pytest.mark.parametrize("field", CHANGES)
def test_a_field_changed_in_flight_is_refused(field: str) -> None:
    changed = replace(HELLO, **{field: CHANGES[field]})
    client, server = ClientHandshake(HELLO, TOKEN), Server()

    def alter(name: str, data: bytes) -> bytes:
        return changed.pack(secret=True, nonce=data[-32:]) if name == "hello" else data

    with pytest.raises(AuthenticationFailed, match="tokens differ"):
        exchange(client, server, alter)
    assert server.refused is HandshakeStatus.PROOF
    assert server.asked == []


@pytest.mark.parametrize("field", CHANGES)
def test_a_proof_for_one_purpose_does_not_serve_another(field: str) -> None:
    """The same server challenge, answered for one hello, sent with another that the attacker prefers."""
    server = Server()
    wanted = ClientHandshake(replace(HELLO, **{field: CHANGES[field]}), TOKEN)
    honest = ClientHandshake(HELLO, TOKEN)
    challenge = server.feed(wanted.start())
    server.feed(honest.feed(challenge))
    assert server.refused is HandshakeStatus.PROOF


def test_a_recorded_client_is_refused_by_a_new_server() -> None:
    recorded = exchange(ClientHandshake(HELLO, TOKEN), Server())
    server = Server()
    server.feed(recorded["hello"])
    verdict = server.feed(recorded["proof"])
    assert server.refused is HandshakeStatus.PROOF
    assert not server.done
    assert server.asked == []
    assert verdict == b"PXVD" + bytes([HandshakeStatus.PROOF]) + bytes(35)


def test_a_recorded_server_is_refused_by_a_new_client() -> None:
    recorded = exchange(ClientHandshake(HELLO, TOKEN), Server())
    client = ClientHandshake(HELLO, TOKEN)
    client.start()
    client.feed(recorded["challenge"])
    with pytest.raises(AuthenticationFailed, match="could not prove"):
        client.feed(recorded["verdict"])
    assert not client.done


def test_a_verdict_belongs_to_its_challenge() -> None:
    """A server that is asked twice by the same attacker gives nothing that fits another connection."""
    first, second = Server(), Server()
    client = ClientHandshake(HELLO, TOKEN)
    first.feed(client.start())
    challenge = second.feed(client.start())
    proof = client.feed(challenge)
    first.feed(proof)
    assert first.refused is HandshakeStatus.PROOF
    client.feed(second.feed(proof))
    assert client.done


def test_a_client_that_talks_to_itself_is_refused() -> None:
    """Everything it says comes back, cut to the size that it wants."""
    client = ClientHandshake(HELLO, TOKEN)
    hello = client.start()
    with pytest.raises(ProtocolError):
        client.feed(hello[: client.wants])
    assert not client.done


def test_a_client_proof_is_no_server_proof() -> None:
    client, server = ClientHandshake(HELLO, TOKEN), Server()
    proof = client.feed(server.feed(client.start()))
    with pytest.raises(AuthenticationFailed, match="could not prove"):
        client.feed(b"PXVD" + bytes([HandshakeStatus.OK, 0, 0, 0]) + proof)


def test_a_server_proof_is_no_client_proof() -> None:
    client, server = ClientHandshake(HELLO, TOKEN), Server()
    transcript = exchange(client, server)
    second = Server()
    second.feed(transcript["hello"])
    second.feed(transcript["verdict"][8:])
    assert second.refused is HandshakeStatus.PROOF


def test_two_clients_wired_together() -> None:
    one, other = ClientHandshake(HELLO, TOKEN), ClientHandshake(HELLO, TOKEN)
    for receiver, sender in ((one, other), (other, one)):
        with pytest.raises(ProtocolError):
            receiver.feed(sender.start()[: receiver.wants])
        assert not receiver.done


def test_two_servers_wired_together() -> None:
    """A challenge is no hello, whatever the attacker adds to reach its size."""
    one, other = Server(), Server()
    challenge = one.feed(ClientHandshake(HELLO, TOKEN).start())
    with pytest.raises(ProtocolError):
        other.feed(challenge.ljust(HELLO_SIZE, b"\0"))
    # And answering a server with another one's challenge, or its own, is no proof.
    for bounced in (challenge, other_challenge()):
        server = Server()
        server.feed(ClientHandshake(HELLO, TOKEN).start())
        server.feed(bounced[-32:])
        assert server.refused is HandshakeStatus.PROOF


def other_challenge() -> bytes:
    return Server().feed(ClientHandshake(HELLO, TOKEN).start())


def test_somebody_in_between_with_another_certificate_is_refused() -> None:
    """Under TLS the client binds to the certificate that it saw, the server to its own."""
    client = ClientHandshake(HELLO, TOKEN, hashlib.sha256(b"the attacker's").digest())
    server = Server(binding=hashlib.sha256(b"the server's").digest())
    with pytest.raises(AuthenticationFailed):
        exchange(client, server)
    assert server.asked == []


def test_tls_cannot_be_stripped() -> None:
    for mine, theirs in ((b"certificate", b""), (b"", b"certificate")):
        with pytest.raises(AuthenticationFailed):
            exchange(ClientHandshake(HELLO, TOKEN, mine), Server(binding=theirs))


# -- order and size --------------------------------------------------------------------------------------


def test_every_order_of_messages() -> None:
    """To a server and a client at their beginning: any two messages of this conversation or of another one."""
    old = exchange(ClientHandshake(HELLO, TOKEN), Server())
    names = [f"{age} {name}" for age in ("old", "now") for name in SIZES]
    for pair in itertools.product(names, names):
        for machine, now in machines_with_a_future():
            known = {f"now {name}": now[name] for name in SIZES} | {f"old {name}": old[name] for name in SIZES}
            for name in pair:
                try:
                    machine.feed(known[name][: machine.wants])
                except REFUSALS:
                    break
            served = isinstance(machine, ServerHandshake)
            right = ("now hello", "now proof") if served else ("now challenge", "now verdict")
            assert machine.done is (pair == right), (type(machine).__name__, pair)


def machines_with_a_future() -> Iterator[tuple[ClientHandshake | ServerHandshake, dict[str, bytes]]]:
    """A client and a server that have only just begun, each with all that is said if nothing goes wrong."""
    for wanted in (ClientHandshake, ServerHandshake):
        nonces = iter([secrets.token_bytes(32), secrets.token_bytes(32)] * 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(secrets, "token_bytes", lambda _size, nonces=nonces: next(nonces))
            transcript = exchange(ClientHandshake(HELLO, TOKEN), Server())
            machine: ClientHandshake | ServerHandshake
            if wanted is ClientHandshake:
                machine = ClientHandshake(HELLO, TOKEN)
                machine.start()
                yield machine, transcript
            else:
                next(nonces)
                yield Server(), transcript


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("change", [-1, 1, None])
def test_a_message_of_another_size(name: str, change: int | None) -> None:
    def alter(which: str, data: bytes) -> bytes:
        if which != name:
            return data
        return b"" if change is None else data[:change] if change < 0 else data + b"\0"

    client, server = ClientHandshake(HELLO, TOKEN), Server()
    with pytest.raises(ProtocolError, match="a handshake message has"):
        exchange(client, server, alter)
    assert not client.done
    assert server.done is (name == "verdict")


def test_nothing_follows_the_end() -> None:
    client, server = ClientHandshake(HELLO, TOKEN), Server()
    transcript = exchange(client, server)
    for machine in (client, server):
        for data in (b"", *transcript.values()):
            with pytest.raises(ProtocolError):
                machine.feed(data)
        assert machine.done
    assert server.asked == [HELLO]


def test_there_is_one_try_per_connection() -> None:
    """After a wrong proof the right one comes too late: a challenge cannot be guessed at."""
    client, server = ClientHandshake(HELLO, TOKEN), Server()
    proof = client.feed(server.feed(client.start()))
    server.feed(flip(proof, 0))
    with pytest.raises(ProtocolError):
        server.feed(proof)
    assert not server.done
    assert server.asked == []


@given(st.lists(st.binary(min_size=1, max_size=128), min_size=1, max_size=4))
def test_a_server_fed_with_junk(junk: list[bytes]) -> None:
    server = Server()
    for data in junk:
        try:
            answer = server.feed(data[: server.wants].ljust(server.wants, b"\0"))
        except ProtocolError:
            break
        assert len(answer) <= 40
    assert not server.done
    assert server.asked == []


@given(st.binary(min_size=64, max_size=64), st.binary(min_size=32, max_size=32))
def test_a_server_fed_with_junk_that_looks_right(rest: bytes, proof: bytes) -> None:
    server = Server()
    server.feed(b"PHALANX\n" + VERSION.to_bytes(2, "little") + b"\1" + bytes([Role.RANK]) + rest)
    server.feed(proof)
    assert server.refused is HandshakeStatus.PROOF
    assert server.asked == []


@given(st.binary(min_size=40, max_size=40), st.binary(min_size=40, max_size=40), st.booleans(), st.booleans())
def test_a_client_fed_with_junk(first: bytes, second: bytes, challenge: bool, verdict: bool) -> None:
    client = ClientHandshake(HELLO, TOKEN)
    client.start()
    try:
        client.feed(b"PXCH\0" + first[5:] if challenge else first)
    except REFUSALS:
        return
    with pytest.raises(REFUSALS):
        client.feed(b"PXVD\0" + second[5:] if verdict else second)
    assert not client.done
