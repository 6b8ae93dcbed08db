"""A client, a server, and somebody in between, without any I/O."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.errors import ProtocolError, RendezvousError
from phalanx.wire.handshake import ClientHandshake, HandshakeStatus, Hello, Role, ServerHandshake

TOKEN = b"0123456789abcdef0123456789abcdef"
OTHER_TOKEN = b"0123456789abcdef0123456789abcdeF"
HELLO = Hello(Role.CHANNEL, 3, 8, target=5, context=bytes(range(16)), lane=2, port=29500)
SIZES = {"hello": 76, "challenge": 40, "proof": 32, "verdict": 40}
REFUSALS = (ProtocolError, RendezvousError)
Alter = Callable[[str, bytes], bytes]


class Server(ServerHandshake):
    """A server that notes whom it was asked to admit."""

    def __init__(
        self, token: bytes | None = TOKEN, status: HandshakeStatus = HandshakeStatus.OK, binding: bytes = b""
    ) -> None:
        self.asked: list[Hello] = []

        def admit(hello: Hello) -> HandshakeStatus:
            self.asked.append(hello)
            return status

        super().__init__(token, admit, binding)


def unchanged(_name: str, data: bytes) -> bytes:
    """Nobody sits in between."""
    return data


def exchange(client: ClientHandshake, server: ServerHandshake, alter: Alter = unchanged) -> dict[str, bytes]:
    """Connects the two; `alter` is whoever sits in between. Returns what arrived, by name."""
    seen = {"hello": alter("hello", client.start())}
    seen["challenge"] = alter("challenge", server.feed(seen["hello"]))
    seen["proof"] = alter("proof", client.feed(seen["challenge"]))
    seen["verdict"] = alter("verdict", server.feed(seen["proof"]))
    assert client.feed(seen["verdict"]) == b""
    return seen


def flip(data: bytes, bit: int) -> bytes:
    """The same bytes with one bit turned."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
