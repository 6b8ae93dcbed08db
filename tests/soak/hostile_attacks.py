"""What hostile connections do: one function for each kind of attack, on a connection that was just made.

Strangers do not know the token, or use it for a place that is taken: the world drops each of them with one log line.
Insiders have the token and finish a handshake: what they send then must stay a clear error of that one connection.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from phalanx.backends.contexts import WORLD_CONTEXT, derive_context
from phalanx.errors import AuthenticationFailed, ProtocolError
from phalanx.wire import control
from phalanx.wire.frames import FrameKind, pack_header
from phalanx.wire.handshake import HELLO_SIZE, ClientHandshake, Hello, Rejected, Role

SACRIFICES = 200
"""Groups that the ranks make one after another, for insiders to open channels to."""
PATIENCE = 30.0
"""Seconds that a connection waits for an answer: a world under fire may be slow, but it must answer or hang up."""


@dataclass(frozen=True)
class Target:
    """A port of the world."""

    port: int
    rank: int
    """Who listens there."""
    directory: bool


@dataclass
class Situation:
    """What attackers know."""

    size: int
    token: bytes
    joined: set[int] = field(default_factory=set)
    """Ranks whose place in the directory is taken."""
    recorded: dict[int, bytes] = field(default_factory=dict)
    """By port: what the client said in a real handshake there."""

    def hello(self, target: Target, role: Role | None = None) -> Hello:
        """What an honest client would say there."""
        if target.directory:
            return Hello(role or Role.RANK, min(self.joined, default=0), self.size, port=target.port)
        context = derive_context(WORLD_CONTEXT, "sub", tuple(range(self.size)), random.randint(1, SACRIFICES))
        src = (target.rank + 1) % self.size
        return Hello(role or Role.CHANNEL, src, self.size, target.rank, context, 0, target.port)


Attack = Callable[[socket.socket, Target, Situation], object]


def receive(sock: socket.socket, size: int) -> bytes:
    """Up to `size` bytes; fewer if the other side closed."""
    data = b""
    while len(data) < size and (chunk := sock.recv(size - len(data))):
        data += chunk
    return data


def shake(sock: socket.socket, hello: Hello, token: bytes) -> bytes:
    """The client's side of a handshake; returns what it said."""
    machine = ClientHandshake(hello, token)
    said = machine.start()
    sock.sendall(said)
    while not machine.done:
        answer = machine.feed(receive(sock, machine.wants))
        sock.sendall(answer)
        said += answer
    return said


def drain(sock: socket.socket) -> None:
    """Waits until the other side hangs up."""
    while sock.recv(4096):
        pass


# -- strangers ---------------------------------------------------------------------------------------------------------


def junk(sock: socket.socket, _target: Target, _situation: Situation) -> None:
    sock.sendall(secrets.token_bytes(random.randint(HELLO_SIZE, 4000)))
    drain(sock)


def empty(sock: socket.socket, _target: Target, _situation: Situation) -> None:
    """Says nothing and goes."""


def reset(sock: socket.socket, _target: Target, _situation: Situation) -> None:
    sock.sendall(b"PHALANX\n")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def half(sock: socket.socket, target: Target, situation: Situation) -> None:
    data = situation.hello(target).pack(secret=True, nonce=secrets.token_bytes(32))
    sock.sendall(data[: random.randint(1, len(data))])


def huge_lengths(sock: socket.socket, _target: Target, _situation: Situation) -> None:
    head = random.choice(
        [b"\xff" * 80, b"\x16\x03\x01\xff\xff".ljust(80, b"\xff"), b"POST / HTTP/1.1\r\nContent-Length: 9" * 4]
    )
    sock.sendall(head + bytes(16_000))
    drain(sock)


def wrong_token(sock: socket.socket, target: Target, situation: Situation) -> None:
    with contextlib.suppress(AuthenticationFailed):
        shake(sock, situation.hello(target), situation.token + b"?")
    drain(sock)


def wrong_version(sock: socket.socket, target: Target, situation: Situation) -> None:
    data = bytearray(situation.hello(target).pack(secret=True, nonce=bytes(32)))
    data[8:10] = random.randbytes(2) if data[8:10] != b"\1\0" else b"\2\0"
    data[8] |= 2
    sock.sendall(data)
    drain(sock)


def no_token(sock: socket.socket, target: Target, situation: Situation) -> None:
    sock.sendall(situation.hello(target).pack(secret=False, nonce=bytes(32)))
    drain(sock)


def replayed(sock: socket.socket, target: Target, situation: Situation) -> None:
    sock.sendall(situation.recorded[target.port])
    drain(sock)


def reflected(sock: socket.socket, target: Target, situation: Situation) -> None:
    """Sends the server's own words back as a proof."""
    sock.sendall(situation.hello(target).pack(secret=True, nonce=secrets.token_bytes(32)))
    sock.sendall(receive(sock, 40)[-32:].ljust(32, b"\0"))
    drain(sock)


def passed_on(sock: socket.socket, target: Target, situation: Situation) -> None:
    """A right proof, made for another port."""
    hello = replace(situation.hello(target), port=target.port ^ 1)
    with contextlib.suppress(Rejected):
        shake(sock, hello, situation.token)
    drain(sock)


def duplicate(sock: socket.socket, target: Target, situation: Situation) -> None:
    """The right token, for a rank that is there already, or one that cannot be."""
    rank = random.choice([*situation.joined, situation.size, 2**32 - 1])
    hello = replace(situation.hello(target), rank=rank) if target.directory else situation.hello(target, Role.RANK)
    with contextlib.suppress(Rejected):
        shake(sock, hello, situation.token)
    drain(sock)


STRANGERS: dict[str, Attack] = {
    "junk": junk,
    "nothing": empty,
    "reset": reset,
    "half a handshake": half,
    "huge lengths": huge_lengths,
    "wrong token": wrong_token,
    "wrong version": wrong_version,
    "no token": no_token,
    "replayed handshake": replayed,
    "reflected handshake": reflected,
    "handshake passed on": passed_on,
    "duplicate rank": duplicate,
}


INSIDERS = "valid handshake, then junk"


# -- insiders ----------------------------------------------------------------------------------------------------------

NONSENSE = [
    b"\xff" * 64,
    struct.pack("<I", 2**32 - 1) * 8,
    b"\5\0\0\0" + b"\xc1" * 5,
    struct.pack("<I", len(control.pack(control.Left(0))) - 4) + b"\xdd" * 60,
]
FRAMES = [
    b"\xff" * 64,
    pack_header(FrameKind.RAW, 0, 0, 2**64 - 1) + bytes(64),
    pack_header(FrameKind.ARRAY, 0, 2**32 - 1, 0) + bytes(64),
    pack_header(FrameKind.OBJECT, 0, 2**32 - 1, 2**40) + bytes(64),
]


def insider(sock: socket.socket, target: Target, situation: Situation) -> None:
    """A whole handshake, then junk: on a control connection, or on a channel of a group."""
    with contextlib.suppress(Rejected):
        shake(sock, situation.hello(target, Role.LAUNCHER if target.directory else None), situation.token)
        sock.sendall(random.choice(NONSENSE if target.directory else FRAMES))


# -- slow ones ---------------------------------------------------------------------------------------------------------


class SlowOnes:
    """Connections that say nothing, or a byte a second, until the world hangs up."""

    def __init__(self) -> None:
        self.waiting: list[tuple[socket.socket, bytes]] = []
        self.dropped = 0
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="slow ones")
        self._thread.start()

    def add(self, sock: socket.socket, target: Target, situation: Situation) -> None:
        sock.setblocking(False)
        words = situation.hello(target).pack(secret=True, nonce=bytes(32)) if random.random() < 0.6 else b""
        with self._lock:
            self.waiting.append((sock, words))

    def close(self) -> None:
        """Waits until the world has hung up on all of them, then ends."""
        self._stopping = True
        self._thread.join()

    def _run(self) -> None:
        end = float("inf")
        while not (self._stopping and (not self.waiting or time.monotonic() > end)):
            if self._stopping and end == float("inf"):
                end = time.monotonic() + PATIENCE
            with self._lock:
                now, self.waiting = self.waiting, []
            kept = [(sock, words[1:]) for sock, words in now if self._alive(sock, words[:1])]
            with self._lock:
                self.waiting += kept
            time.sleep(1.0 if not self._stopping else 0.5)
        for sock, _ in self.waiting:
            sock.close()

    def _alive(self, sock: socket.socket, byte: bytes) -> bool:
        try:
            if byte:
                sock.send(byte)
            if sock.recv(100):
                return True
        except BlockingIOError:
            return True
        except OSError:
            pass
        sock.close()
        self.dropped += 1
        return False


# -- all together ------------------------------------------------------------------------------------------------------


class Fire:
    """Attackers that take turns on the targets, as many as `workers` at once.

    Attributes:
        count: Connections by target's port and kind.
        strangers: Own addresses of the strangers, by rank attacked: each must be in that rank's log exactly once.
        faults: What should not have happened.
    """

    def __init__(self, situation: Situation, *, workers: int, slow_share: float = 0.08) -> None:
        self.situation = situation
        self.targets: list[Target] = []
        self.count: dict[int, Counter[str]] = {}
        self.strangers: dict[int, Counter[str]] = {}
        self.faults: list[str] = []
        self.insiders = False
        """Whether insiders take part: they need a world that has formed."""
        self._slow = SlowOnes()
        self._slow_share = slow_share
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, name="attacker") for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def aim(self, target: Target) -> None:
        """Takes one more port under fire; records a real handshake there first."""
        with socket.create_connection(("127.0.0.1", target.port), PATIENCE) as sock:
            role = Role.LAUNCHER if target.directory else None
            self.situation.recorded[target.port] = shake(sock, self.situation.hello(target, role), self.situation.token)
        with self._lock:
            self.count[target.port] = Counter()
            self.strangers.setdefault(target.rank, Counter())
            self.targets = [*self.targets, target]

    def fewest(self) -> int:
        """Connections to the port that had the fewest."""
        return min((sum(kinds.values()) for kinds in self.count.values()), default=0)

    def from_inside(self) -> int:
        """Connections of insiders to the port that had the fewest of them."""
        return min(kinds[INSIDERS] for kinds in self.count.values())

    def stop(self) -> None:
        """Ends the attack; returns once the world has hung up on everybody."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._slow.close()
        if self._slow.waiting:
            self.faults.append(f"{len(self._slow.waiting)} slow connections were never dropped")

    def _choose(self) -> Target:
        """Any port, but more often the one that had the fewest so far: a new one is hit at once."""
        if random.random() < 0.5:
            return random.choice(self.targets)
        return min(self.targets, key=lambda target: sum(self.count[target.port].values()))

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self.targets:
                time.sleep(0.01)
                continue
            try:
                self._attack(self._choose())
            except TimeoutError:
                self.faults.append("a connection was neither answered nor dropped")
            except (AuthenticationFailed, ProtocolError, OSError):
                pass  # it was hung up on, or the answer was cut: what strangers deserve
            except Exception as error:
                self.faults.append(f"{type(error).__name__}: {error}")

    def _attack(self, target: Target) -> None:
        sock = socket.create_connection(("127.0.0.1", target.port), PATIENCE)
        name = "{}:{}".format(*sock.getsockname())
        draw = random.random()
        if draw < self._slow_share:
            self._note(target, "a byte a second", name)
            self._slow.add(sock, target, self.situation)
            return
        with sock:
            if self.insiders and draw > 0.9:
                self._note(target, INSIDERS, None)
                insider(sock, target, self.situation)
                return
            kind = random.choice(list(STRANGERS))
            self._note(target, kind, name)
            STRANGERS[kind](sock, target, self.situation)

    def _note(self, target: Target, kind: str, name: str | None) -> None:
        with self._lock:
            self.count[target.port][kind] += 1
            if name is not None:
                self.strangers[target.rank][name] += 1
