"""The proof by which two sides show each other that they know the job's token. A state machine without I/O.

```
client                                  server
HELLO   who I am, whom I want, nonce →
                                      ← CHALLENGE  nonce
PROOF   HMAC("client", all so far)   →
                                      ← VERDICT    status, HMAC("server", all so far, status)
```

Each proof is an HMAC-SHA256, keyed by the token, over a label and everything said before it. The HELLO holds version,
role, rank, target rank, world size, channel and the port that was dialled, and both sides add 32 fresh random bytes, so
a proof fits one connection, one direction and one purpose: it can be neither replayed nor reflected, nor passed on from
another port. Under TLS the key also covers the server's certificate, so that a server with another one cannot sit in
between. The client proves first: a stranger learns nothing from a server. Every message has a fixed size, so nothing is
read beyond it and nothing is allocated because of it.

A refusal before the proofs (CHALLENGE with a status, VERDICT with PROOF) is only a hint: a stranger can send one, too.

Both machines are driven alike: read exactly `wants` bytes, `feed` them, write what it returns, until `done`.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import AuthenticationFailed, ProtocolError, RendezvousError

__all__ = [
    "ANY_RANK",
    "DIRECTORY",
    "HELLO_SIZE",
    "NO_CHANNEL",
    "VERSION",
    "ClientHandshake",
    "HandshakeStatus",
    "Hello",
    "Rejected",
    "Role",
    "ServerHandshake",
]

VERSION = 1
DIRECTORY = 0xFFFF_FFFF
"""The target of a connection to the directory, which has no rank."""
ANY_RANK = 0xFFFF_FFFE
"""The rank of a process that joins an elastic world without a number: the directory gives it one."""
NO_CHANNEL = bytes(16)
"""The context of a connection that is no channel of a group."""

_MAGIC = b"PHALANX\n"
_HELLO = struct.Struct("<8sHBBIIIBxH16s32s")
_CHALLENGE = struct.Struct("<4sBxH32s")
_VERDICT = struct.Struct("<4sB3x32s")
_PROOF_SIZE = 32
_NONCE_SIZE = 32
HELLO_SIZE = _HELLO.size


class Role(enum.IntEnum):
    """The purpose of a connection."""

    RANK = 1
    """A rank joins the world: the control connection to the directory."""
    LAUNCHER = 2
    """The launcher of one node watches the world."""
    CHANNEL = 3
    """A rank opens a channel of a group to another rank."""
    WATCHER = 4
    """Somebody looks at what the ranks do. It need not know how many there are."""
    LIFELINE = 5
    """A second connection of a rank to the directory, which carries nothing: it ends when the rank begins to die."""


class HandshakeStatus(enum.IntEnum):
    """The answer of a server."""

    OK = 0
    VERSION = 1
    AUTH_MODE = 2
    PROOF = 3
    ROLE = 4
    WORLD_SIZE = 5
    RANK = 6
    TAKEN = 7
    TARGET = 8
    CLOSED = 9
    BROKEN = 10
    CROSSED = 11


_STATUSES = {status.value: status for status in HandshakeStatus}
_EARLY = (HandshakeStatus.OK, HandshakeStatus.VERSION, HandshakeStatus.AUTH_MODE, HandshakeStatus.ROLE)
"""The answers that a challenge may give. All others are given only to a client that has proved itself."""

_WHY = {
    HandshakeStatus.VERSION: f"it speaks another version of the protocol (this side speaks {VERSION})",
    HandshakeStatus.AUTH_MODE: "one side uses a token and the other has auth='none' (both must do the same)",
    HandshakeStatus.PROOF: "the tokens differ (PHALANX_TOKEN must be the same on all ranks)",
    HandshakeStatus.ROLE: "it does not serve this role",
    HandshakeStatus.WORLD_SIZE: "it has another world size",
    HandshakeStatus.RANK: "the rank is not below the world size",
    HandshakeStatus.TAKEN: "the rank is already taken by another process",
    HandshakeStatus.TARGET: "it is not the rank, or does not listen on the port, that was wanted",
    HandshakeStatus.CLOSED: "the world or group has ended",
    HandshakeStatus.BROKEN: "it found the group broken",
    HandshakeStatus.CROSSED: "it opens this connection itself",
}


class Rejected(RendezvousError):
    """The server answered, and said no. `status` says why."""

    def __init__(self, status: HandshakeStatus, message: str | None = None) -> None:
        super().__init__(message or f"refused: {_WHY[status]}")
        self.status = status


@dataclass(frozen=True)
class Hello:
    """The identity of a client, and the purpose of its connection."""

    role: Role
    rank: int
    world_size: int
    target: int = DIRECTORY
    context: bytes = NO_CHANNEL
    lane: int = 0
    port: int = 0
    """The port that the client dialled. A server that listens on another one was reached through somebody else."""

    @property
    def who(self) -> str:
        """The client, for messages."""
        return "a new rank" if self.rank == ANY_RANK else f"rank {self.rank}"

    @property
    def number(self) -> int | None:
        """The rank of the client; None if it has none yet."""
        return None if self.rank == ANY_RANK else self.rank

    def pack(self, *, secret: bool, nonce: bytes) -> bytes:
        """The bytes of a HELLO."""
        who = (self.role, self.rank, self.target, self.world_size, self.lane, self.port, self.context)
        return _HELLO.pack(_MAGIC, VERSION, secret, *who, nonce)


def _key(token: bytes | None, binding: bytes) -> bytes:
    # The token is hashed as a message: as a key, "x" and "x\0" would be the same to HMAC. Without a token the "proof"
    # still covers all that was said, so that both modes take the same path.
    secret = hmac.digest(b"phalanx handshake v1", token or b"", hashlib.sha256)
    return hmac.digest(secret, binding, hashlib.sha256)


def _proof(key: bytes, label: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\0".join((label, *parts)), hashlib.sha256)


def _check_size(data: bytes, wants: int) -> None:
    if not wants or len(data) != wants:
        raise ProtocolError(f"a handshake message has {len(data)} bytes (expected {wants})")


class ClientHandshake:
    """The side that connects.

    Args:
        hello: Who we are and what we want.
        token: The job's token; None for a world without one.
        binding: What both sides know of the connection beneath, such as the server's certificate.
    """

    def __init__(self, hello: Hello, token: bytes | None, binding: bytes = b"") -> None:
        self._key = _key(token, binding)
        self._hello = hello.pack(secret=token is not None, nonce=secrets.token_bytes(_NONCE_SIZE))
        self._challenge = b""
        self.wants = _CHALLENGE.size
        self.done = False

    def start(self) -> bytes:
        """The first bytes to send."""
        return self._hello

    def feed(self, data: bytes) -> bytes:
        """Takes the `wants` bytes that came; returns what to send now.

        Raises:
            Rejected: The server said no.
            AuthenticationFailed: The server does not know the token.
            ProtocolError: The other side does not speak this protocol.
        """
        _check_size(data, self.wants)
        self.wants = 0  # whatever is wrong below, this connection is over
        if not self._challenge:
            magic, status, _version, _nonce = _CHALLENGE.unpack(data)
            if magic != b"PXCH" or status not in _EARLY:
                raise ProtocolError("the other side is not a Phalanx server (its answer is not a challenge)")
            if status != HandshakeStatus.OK:
                raise AuthenticationFailed(f"refused: {_WHY[HandshakeStatus(status)]}")
            self._challenge = data
            self.wants = _VERDICT.size
            return _proof(self._key, b"client", self._hello, self._challenge)
        magic, status, _proof_of_server = _VERDICT.unpack(data)
        if magic != b"PXVD" or status not in _STATUSES:
            raise ProtocolError("the other side is not a Phalanx server (its answer is not a verdict)")
        if status == HandshakeStatus.PROOF:
            raise AuthenticationFailed(f"refused: {_WHY[HandshakeStatus.PROOF]}")
        proof = _proof(self._key, b"server", self._hello, self._challenge, bytes([status]))
        if not hmac.compare_digest(data, _VERDICT.pack(b"PXVD", status, proof)):
            raise AuthenticationFailed("the server could not prove that it knows this job's token")
        if status != HandshakeStatus.OK:
            raise Rejected(HandshakeStatus(status))
        self.done = True
        return b""


class ServerHandshake:
    """The side that listens.

    Args:
        token: The job's token; None for a world without one.
        admit: Asked once the client has proved itself: `HandshakeStatus.OK`, or why it may not come in.
        binding: As for the client.
    """

    def __init__(self, token: bytes | None, admit: Callable[[Hello], HandshakeStatus], binding: bytes = b"") -> None:
        self._secret = token is not None
        self._key = _key(token, binding)
        self._admit = admit
        self._hello = b""
        self._challenge = b""
        self.hello: Hello | None = None
        self.wants = HELLO_SIZE
        self.done = False
        self.refused: HandshakeStatus | None = None
        """Set when the answer that `feed` returned is a refusal: send it and close."""

    def feed(self, data: bytes) -> bytes:
        """Takes the `wants` bytes that came; returns what to send now.

        Raises:
            ProtocolError: The client does not speak this protocol; there is nothing to answer.
        """
        _check_size(data, self.wants)
        self.wants = 0  # whatever is wrong below, this connection is over
        return self._read_hello(data) if self.hello is None else self._read_proof(data, self.hello)

    def _read_hello(self, data: bytes) -> bytes:
        magic, version, secret, role, rank, target, world_size, lane, port, context, _nonce = _HELLO.unpack(data)
        if magic != _MAGIC:
            raise ProtocolError("not a Phalanx handshake")
        if version != VERSION:
            return self._refuse_early(HandshakeStatus.VERSION)
        if secret != self._secret:
            return self._refuse_early(HandshakeStatus.AUTH_MODE)
        if role not in Role._value2member_map_:
            return self._refuse_early(HandshakeStatus.ROLE)
        self._hello = data
        self.hello = Hello(Role(role), rank, world_size, target, context, lane, port)
        self._challenge = _CHALLENGE.pack(b"PXCH", HandshakeStatus.OK, VERSION, secrets.token_bytes(_NONCE_SIZE))
        self.wants = _PROOF_SIZE
        return self._challenge

    def _refuse_early(self, status: HandshakeStatus) -> bytes:
        self.refused = status
        return _CHALLENGE.pack(b"PXCH", status, VERSION, bytes(_NONCE_SIZE))

    def _read_proof(self, data: bytes, hello: Hello) -> bytes:
        if not hmac.compare_digest(data, _proof(self._key, b"client", self._hello, self._challenge)):
            self.refused = HandshakeStatus.PROOF
            return _VERDICT.pack(b"PXVD", HandshakeStatus.PROOF, bytes(_PROOF_SIZE))
        status = self._admit(hello)
        if status != HandshakeStatus.OK:
            self.refused = status
        self.done = status == HandshakeStatus.OK
        proof = _proof(self._key, b"server", self._hello, self._challenge, bytes([status]))
        return _VERDICT.pack(b"PXVD", status, proof)
