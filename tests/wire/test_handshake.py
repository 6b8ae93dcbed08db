"""The handshake as a state machine: what it accepts, and whom it refuses with which word."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.handshake_support import HELLO, OTHER_TOKEN, SIZES, TOKEN, Server, exchange

from phalanx.errors import AuthenticationFailed, ProtocolError
from phalanx.wire import handshake
from phalanx.wire.handshake import VERSION, ClientHandshake, HandshakeStatus, Hello, Rejected, Role

U32 = st.integers(0, 2**32 - 1)
HELLOS = st.builds(
    Hello,
    st.sampled_from(Role),
    U32,
    U32,
    U32,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 255),
    st.integers(0, 65535),
)
TOKENS = st.none() | st.binary(min_size=1, max_size=100)


@given(HELLOS, TOKENS, st.binary(max_size=64))
def test_both_sides_agree(hello: Hello, token: bytes | None, binding: bytes) -> None:
    client, server = ClientHandshake(hello, token, binding), Server(token, binding=binding)
    transcript = exchange(client, server)
    assert client.done
    assert server.done
    assert server.refused is None
    assert server.hello == hello
    assert server.asked == [hello]
    assert client.wants == server.wants == 0
    assert {name: len(data) for name, data in transcript.items()} == SIZES


@pytest.mark.parametrize("token", [TOKEN, None])
@pytest.mark.parametrize("binding", [b"", hashlib.sha256(b"a certificate").digest()])
def test_golden_bytes(token: bytes | None, binding: bytes) -> None:
    """The protocol once more, written from its description and not from its code."""
    transcript = exchange(ClientHandshake(HELLO, token, binding), Server(token, binding=binding))
    hello, challenge = transcript["hello"], transcript["challenge"]
    secret = bytes([token is not None])
    assert hello[:12] == b"PHALANX\n" + VERSION.to_bytes(2, "little") + secret + bytes([Role.CHANNEL])
    assert hello[12:28] == struct.pack("<IIIBBH", 3, 5, 8, 2, 0, 29500)
    assert hello[28:44] == bytes(range(16))
    assert challenge[:8] == b"PXCH" + bytes([HandshakeStatus.OK, 0]) + VERSION.to_bytes(2, "little")

    def mac(key: bytes, text: bytes) -> bytes:
        return hmac.new(key, text, "sha256").digest()

    key = mac(mac(b"phalanx handshake v1", token or b""), binding)
    assert transcript["proof"] == mac(key, b"client\0" + hello + b"\0" + challenge)
    assert transcript["verdict"][:8] == b"PXVD" + bytes([HandshakeStatus.OK, 0, 0, 0])
    assert transcript["verdict"][8:] == mac(
        key, b"server\0" + hello + b"\0" + challenge + b"\0" + bytes([HandshakeStatus.OK])
    )


def test_nonces_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[bytes] = []
    original = secrets.token_bytes

    def recording(size: int) -> bytes:
        drawn.append(original(size))
        return drawn[-1]

    monkeypatch.setattr(secrets, "token_bytes", recording)
    for _ in range(100):
        transcript = exchange(ClientHandshake(HELLO, TOKEN), Server())
        assert transcript["hello"][-32:] == drawn[-2]
        assert transcript["challenge"][-32:] == drawn[-1]
    assert len(set(drawn)) == 200
    assert {len(nonce) for nonce in drawn} == {32}


def test_proofs_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    original = hmac.compare_digest

    def recording(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return original(one, other)

    monkeypatch.setattr(hmac, "compare_digest", recording)
    exchange(ClientHandshake(HELLO, TOKEN), Server())
    assert compared == [(32, 32), (40, 40)]  # the server's look at the proof, the client's at the verdict
    # With a comparison that always fails nothing gets through, so there is no second one beside it.
    monkeypatch.setattr(hmac, "compare_digest", lambda _one, _other: False)
    server = Server()
    with pytest.raises(AuthenticationFailed):
        exchange(ClientHandshake(HELLO, TOKEN), server)
    assert server.refused is HandshakeStatus.PROOF


def test_the_token_is_shown_nowhere() -> None:
    client, server = ClientHandshake(HELLO, TOKEN), Server()
    transcript = exchange(client, server)
    assert TOKEN not in b"".join(transcript.values())
    text = f"{client!r} {server!r} {vars(client)} {vars(server)}"
    assert TOKEN.decode() not in text
    with pytest.raises(AuthenticationFailed) as caught:
        exchange(ClientHandshake(HELLO, TOKEN), Server(OTHER_TOKEN))
    assert TOKEN.decode() not in str(caught.value)
    assert OTHER_TOKEN.decode() not in str(caught.value)


# -- tokens, versions, roles --------------------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=100), st.binary(min_size=1, max_size=100))
def test_different_tokens_never_meet(mine: bytes, theirs: bytes) -> None:
    client, server = ClientHandshake(HELLO, mine), Server(theirs)
    if mine == theirs:
        exchange(client, server)
        return
    with pytest.raises(AuthenticationFailed, match="tokens differ"):
        exchange(client, server)
    assert server.refused is HandshakeStatus.PROOF
    assert server.asked == []


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (b"secret", b"secret\0"),  # HMAC fills a short key with zeros
        (b"x" * 65, hashlib.sha256(b"x" * 65).digest()),  # and hashes a long one
        (b"secret", b"secret\n"),
        (b"secret", b"Secret"),
    ],
)
def test_tokens_that_are_almost_the_same(mine: bytes, theirs: bytes) -> None:
    with pytest.raises(AuthenticationFailed):
        exchange(ClientHandshake(HELLO, mine), Server(theirs))


def test_a_server_without_the_token_cannot_say_yes() -> None:
    for known in (None, b"", OTHER_TOKEN):
        client = ClientHandshake(HELLO, TOKEN)
        impostor = Server(known)
        hello = bytearray(client.start())
        hello[10] = known is not None  # what it would have liked to hear
        client.feed(impostor.feed(bytes(hello)))
        verdict = handshake._VERDICT.pack(
            b"PXVD",
            HandshakeStatus.OK,
            handshake._proof(handshake._key(known, b""), b"server", bytes(hello), b"", b"\0"),
        )
        with pytest.raises(AuthenticationFailed, match="could not prove"):
            client.feed(verdict)
        assert not client.done


def test_a_stranger_learns_nothing_of_the_token() -> None:
    """Whatever the token is, the answers to a stranger are random or constant."""
    for token in (TOKEN, OTHER_TOKEN):
        server = Server(token)
        challenge = server.feed(HELLO.pack(secret=True, nonce=bytes(32)))
        assert challenge[:8] == b"PXCH" + bytes([HandshakeStatus.OK, 0]) + VERSION.to_bytes(2, "little")
        assert server.feed(bytes(32)) == b"PXVD" + bytes([HandshakeStatus.PROOF]) + bytes(35)


@pytest.mark.parametrize(("mine", "theirs"), [(TOKEN, None), (None, TOKEN)])
def test_a_token_on_one_side_only(mine: bytes | None, theirs: bytes | None) -> None:
    server = Server(theirs)
    with pytest.raises(AuthenticationFailed, match="auth='none'"):
        exchange(ClientHandshake(HELLO, mine), server)
    assert server.refused is HandshakeStatus.AUTH_MODE
    assert server.asked == []


@pytest.mark.parametrize(("mine", "theirs"), [(TOKEN, None), (None, TOKEN)])
def test_a_token_cannot_be_talked_away(mine: bytes | None, theirs: bytes | None) -> None:
    """Somebody in between turns the flag to what each side wants to see."""
    client, server = ClientHandshake(HELLO, mine), Server(theirs)

    def alter(name: str, data: bytes) -> bytes:
        return data[:10] + bytes([theirs is not None]) + data[11:] if name == "hello" else data

    with pytest.raises(AuthenticationFailed):
        exchange(client, server, alter)
    assert not client.done
    assert server.asked == []


@pytest.mark.parametrize("token", [TOKEN, None])
def test_the_flag_of_the_token_has_two_values(token: bytes | None) -> None:
    for flag in range(2, 256):
        server = Server(token)
        hello = bytearray(ClientHandshake(HELLO, token).start())
        hello[10] = flag
        server.feed(bytes(hello))
        assert server.refused is HandshakeStatus.AUTH_MODE


@given(st.integers(0, 65535).filter(lambda version: version != VERSION))
def test_another_version(version: int) -> None:
    server = Server()
    with pytest.raises(AuthenticationFailed, match="another version"):
        exchange(
            ClientHandshake(HELLO, TOKEN),
            server,
            lambda name, data: data[:8] + version.to_bytes(2, "little") + data[10:] if name == "hello" else data,
        )
    assert server.refused is HandshakeStatus.VERSION
    assert server.asked == []


def test_an_unknown_role() -> None:
    for role in set(range(256)) - set(Role):
        server = Server()
        answer = server.feed(ClientHandshake(HELLO, TOKEN).start()[:11] + bytes([role]) + bytes(64))
        assert server.refused is HandshakeStatus.ROLE
        assert answer[4] == HandshakeStatus.ROLE
        assert server.asked == []


# -- statuses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", sorted(set(HandshakeStatus) - {HandshakeStatus.OK, HandshakeStatus.PROOF}))
def test_a_refusal_reaches_the_client_with_its_reason(status: HandshakeStatus) -> None:
    client, server = ClientHandshake(HELLO, TOKEN), Server(status=status)
    with pytest.raises(Rejected) as caught:
        exchange(client, server)
    assert caught.value.status is status
    assert server.refused is status
    assert server.asked == [HELLO]
    assert not client.done
    assert not server.done


def test_a_challenge_with_a_status_is_only_a_hint() -> None:
    """Nobody has proved anything yet: what ends a search for good must not be sayable here."""
    for status in range(1, 256):
        client = ClientHandshake(HELLO, TOKEN)
        client.start()
        early = status in {HandshakeStatus.VERSION, HandshakeStatus.AUTH_MODE, HandshakeStatus.ROLE}
        with pytest.raises(AuthenticationFailed if early else ProtocolError):
            client.feed(b"PXCH" + bytes([status, 0, 1, 0]) + bytes(32))
        assert not client.done
        with pytest.raises(ProtocolError):
            client.feed(bytes(40))


@pytest.mark.parametrize("said", HandshakeStatus)
def test_a_status_cannot_be_exchanged(said: HandshakeStatus) -> None:
    for meant in set(HandshakeStatus) - {said, HandshakeStatus.PROOF}:
        client, server = ClientHandshake(HELLO, TOKEN), Server(status=meant)

        def alter(name: str, data: bytes) -> bytes:
            return data[:4] + bytes([said]) + data[5:] if name == "verdict" else data

        with pytest.raises(AuthenticationFailed):
            exchange(client, server, alter)
        assert not client.done


def test_every_status_says_why() -> None:
    for status in set(HandshakeStatus) - {HandshakeStatus.OK}:
        assert re.fullmatch(r"refused: \S.*", str(Rejected(status)))
