"""How two sides prove to each other that they know the job's token. A state machine without I/O.

```
client                                  server
HELLO   who I am, whom I want, nonce →
                                      ← CHALLENGE  nonce
PROOF   HMAC("client", all so far)   →
                                      ← VERDICT    status, HMAC("server", all so far, status)
```

Each proof is an HMAC-SHA256, keyed by the token, over a label and everything said before it. The HELLO holds version,
role, rank, target rank, world size and channel, and both sides add 32 fresh random bytes, so a proof fits one
connection, one direction and one purpose: it can be neither replayed nor reflected. The client proves first: a stranger
learns nothing from a server. Every message has a fixed size, so nothing is read beyond it and nothing is allocated by
what it says.

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
    "DIRECTORY",
    "HELLO_SIZE",
    "NO_CHANNEL",
    "VERSION",
    "ClientHandshake",
    "Hello",
    "Rejected",
    "Role",
    "ServerHandshake",
    "Status",
]

VERSION = 1
DIRECTORY = 0xFFFF_FFFF
"""The target of a connection to the directory, which has no rank."""
NO_CHANNEL = bytes(16)
"""The context of a connection that is no channel of a group."""

_MAGIC = b"PHALANX\n"
_HELLO = struct.Struct("<8sHBBIIIB3x16s32s")
_CHALLENGE = struct.Struct("<4sBxH32s")
_VERDICT = struct.Struct("<4sB3x32s")
_PROOF_SIZE = 32
_NONCE_SIZE = 32
HELLO_SIZE = _HELLO.size


class Role(enum.IntEnum):
    """What a connection is for."""

    RANK = 1
    """A rank joins the world: the control connection to the directory."""
    LAUNCHER = 2
    """The launcher of one node watches the world."""
    CHANNEL = 3
    """A rank opens a channel of a group to another rank."""


class Status(enum.IntEnum):
    """How a server answers."""

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


_STATUSES = {status.value: status for status in Status}

_WHY = {
    Status.VERSION: f"it speaks another version of the protocol (this side speaks {VERSION})",
    Status.AUTH_MODE: "one side uses a token and the other has auth='none' (both must do the same)",
    Status.PROOF: "the tokens differ (PHALANX_TOKEN must be the same on all ranks)",
    Status.ROLE: "it does not serve this role",
    Status.WORLD_SIZE: "it has another world size",
    Status.RANK: "the rank is not below the world size",
    Status.TAKEN: "the rank is already taken by another process",
    Status.TARGET: "it is not the rank that was wanted",
    Status.CLOSED: "the world or group has ended",
}


class Rejected(RendezvousError):
    """The server answered, and said no. `status` says why."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"refused: {_WHY[status]}")
        self.status = status


@dataclass(frozen=True)
class Hello:
    """Who a client is and what the connection is for."""

    role: Role
    rank: int
    world_size: int
    target: int = DIRECTORY
    context: bytes = NO_CHANNEL
    lane: int = 0

    def pack(self, *, secret: bool, nonce: bytes) -> bytes:
        """The bytes of a HELLO."""
        return _HELLO.pack(
            _MAGIC, VERSION, secret, self.role, self.rank, self.target, self.world_size, self.lane, self.context, nonce
        )


def _proof(token: bytes | None, label: bytes, *parts: bytes) -> bytes:
    # Without a token the "proof" still covers the transcript, so that both modes take the same path.
    key = hmac.digest(token or b"", b"phalanx handshake v1", hashlib.sha256)
    return hmac.digest(key, b"\0".join((label, *parts)), hashlib.sha256)


class ClientHandshake:
    """The side that connects.

    Args:
        hello: Who we are and what we want.
        token: The job's token; None for a world without one.
    """

    def __init__(self, hello: Hello, token: bytes | None) -> None:
        self._token = token
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
        if not self._challenge:
            magic, status, _version, _nonce = _CHALLENGE.unpack(data)
            if magic != b"PXCH" or status not in _STATUSES:
                raise ProtocolError("the other side is no Phalanx server (its answer is not a challenge)")
            if status != Status.OK:
                raise _rejection(Status(status))
            self._challenge = data
            self.wants = _VERDICT.size
            return _proof(self._token, b"client", self._hello, self._challenge)
        magic, status, proof = _VERDICT.unpack(data)
        if magic != b"PXVD" or status not in _STATUSES:
            raise ProtocolError("the other side is no Phalanx server (its answer is not a verdict)")
        if status == Status.PROOF:
            raise _rejection(Status.PROOF)
        expected = _proof(self._token, b"server", self._hello, self._challenge, bytes([status]))
        if not hmac.compare_digest(proof, expected):
            raise AuthenticationFailed("the server could not prove that it knows this job's token")
        if status != Status.OK:
            raise _rejection(Status(status))
        self.wants = 0
        self.done = True
        return b""


def _rejection(status: Status) -> RendezvousError:
    if status in (Status.PROOF, Status.AUTH_MODE, Status.VERSION):
        return AuthenticationFailed(f"refused: {_WHY[status]}")
    return Rejected(status)


class ServerHandshake:
    """The side that listens.

    Args:
        token: The job's token; None for a world without one.
        admit: Asked once the client has proved itself: `Status.OK`, or why it may not come in.
    """

    def __init__(self, token: bytes | None, admit: Callable[[Hello], Status]) -> None:
        self._token = token
        self._admit = admit
        self._hello = b""
        self._challenge = b""
        self.hello: Hello | None = None
        self.wants = HELLO_SIZE
        self.done = False
        self.refused: Status | None = None
        """Set when the answer that `feed` returned is a refusal: send it and close."""

    def feed(self, data: bytes) -> bytes:
        """Takes the `wants` bytes that came; returns what to send now.

        Raises:
            ProtocolError: The client does not speak this protocol; there is nothing to answer.
        """
        return self._read_hello(data) if self.hello is None else self._read_proof(data, self.hello)

    def _read_hello(self, data: bytes) -> bytes:
        magic, version, secret, role, rank, target, world_size, lane, context, _nonce = _HELLO.unpack(data)
        if magic != _MAGIC:
            raise ProtocolError("no Phalanx handshake")
        if version != VERSION:
            return self._refuse_early(Status.VERSION)
        if bool(secret) != (self._token is not None):
            return self._refuse_early(Status.AUTH_MODE)
        if role not in Role._value2member_map_:
            return self._refuse_early(Status.ROLE)
        self._hello = data
        self.hello = Hello(Role(role), rank, world_size, target, context, lane)
        self._challenge = _CHALLENGE.pack(b"PXCH", Status.OK, VERSION, secrets.token_bytes(_NONCE_SIZE))
        self.wants = _PROOF_SIZE
        return self._challenge

    def _refuse_early(self, status: Status) -> bytes:
        self.refused = status
        self.wants = 0
        return _CHALLENGE.pack(b"PXCH", status, VERSION, bytes(_NONCE_SIZE))

    def _read_proof(self, data: bytes, hello: Hello) -> bytes:
        self.wants = 0
        if not hmac.compare_digest(data, _proof(self._token, b"client", self._hello, self._challenge)):
            self.refused = Status.PROOF
            return _VERDICT.pack(b"PXVD", Status.PROOF, bytes(_PROOF_SIZE))
        status = self._admit(hello)
        if status != Status.OK:
            self.refused = status
        self.done = status == Status.OK
        proof = _proof(self._token, b"server", self._hello, self._challenge, bytes([status]))
        return _VERDICT.pack(b"PXVD", status, proof)
