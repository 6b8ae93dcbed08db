"""Worlds whose ranks are threads with real sockets, and strangers that knock at their ports."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from phalanx.backends import MeshBackend
from phalanx.config import Launch, Options
from phalanx.launching import fork_server
from phalanx.rendezvous.directory import Directory
from phalanx.types import Address
from phalanx.wire.handshake import ClientHandshake, Hello, Role

TOKEN = b"a token that the tests of the rendezvous share"
LIMIT = 60.0
"""Seconds that nothing here needs: a test that waits so long has failed."""
FAST = Options(handshake_timeout=0.6, heartbeat=0.2, heartbeat_timeout=2.0)
LOOPBACK = "127.0.0.1"


# -- worlds ------------------------------------------------------------------------------------------------------------


class Job:
    """What the launcher of one job tells its ranks: the directory's address, the master's, or neither."""

    def __init__(
        self,
        size: int,
        *,
        token: bytes | None = TOKEN,
        master: Address | None = None,
        directory: Address | None = None,
        single_host: bool = True,
        master_port_taken: bool = False,
    ) -> None:
        self.size = size
        self.token = token
        self.master = master
        self.directory = directory
        self.single_host = single_host
        self.master_port_taken = master_port_taken
        self.name = secrets.token_hex(8)

    def launch(self, rank: int, **changes: Any) -> Launch:
        """What one rank finds in its environment."""
        values: dict[str, Any] = {
            "rank": rank,
            "world_size": self.size,
            "local_rank": rank,
            "local_world_size": self.size,
            "single_host": self.single_host,
            "master": self.master,
            "directory": self.directory,
            "master_port_taken": self.master_port_taken,
            "token": self.token,
            "launcher": "arguments",
            "job": self.name,
        }
        return Launch(**(values | changes))


Outcome = MeshBackend | BaseException


class Ranks:
    """The ranks of one world, each in a thread of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(64)
        self._started: dict[int, Any] = {}

    def start(
        self,
        launch: Launch,
        *,
        timeout: float = 30.0,
        options: Options = FAST,
        auth: Literal["token", "none"] = "token",
    ) -> None:
        """Lets one rank join."""
        self._started[launch.rank] = self._pool.submit(
            MeshBackend.from_launch, launch, auth=auth, timeout=timeout, options=options
        )

    def joined(self, rank: int) -> bool:
        """Whether a rank is through, one way or the other."""
        return bool(self._started[rank].done())

    def outcome(self, rank: int) -> Outcome:
        """The backend of a rank, or what it raised."""
        error: BaseException | None = self._started[rank].exception(LIMIT)
        if error is not None:
            return error
        backend: MeshBackend = self._started[rank].result()
        return backend

    def error(self, rank: int) -> BaseException:
        """What a rank raised."""
        outcome = self.outcome(rank)
        assert isinstance(outcome, BaseException), f"rank {rank} joined a world"
        return outcome

    def world(self) -> list[MeshBackend]:
        """All backends; the first error is raised."""
        outcomes = [self.outcome(rank) for rank in sorted(self._started)]
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, MeshBackend)]

    def every(self, act: Callable[[MeshBackend], Any]) -> list[Any]:
        """Lets all ranks do something at the same time."""
        return [future.result(LIMIT) for future in [self._pool.submit(act, backend) for backend in self.world()]]

    def close(self) -> None:
        """Closes what has formed."""
        backends = [f.result() for f in self._started.values() if f.exception(LIMIT) is None]
        for future in [self._pool.submit(backend.close) for backend in backends]:
            future.result(LIMIT)
        self._pool.shutdown()


@contextlib.contextmanager
def ranks() -> Iterator[Ranks]:
    """Ranks that are closed at the end."""
    group = Ranks()
    try:
        yield group
    finally:
        group.close()


def ring(backend: MeshBackend) -> bytes:
    """Each rank sends to the next one; returns what came from the one before."""
    size, rank = backend.world_size, backend.rank
    buffer = bytearray(8)
    sender = threading.Thread(target=backend.send, args=(rank.to_bytes(8, "little"), (rank + 1) % size))
    sender.start()
    backend.recv(buffer, (rank - 1) % size)
    sender.join(LIMIT)
    backend.barrier()
    return bytes(buffer)


def check(group: Ranks) -> None:
    """The world works."""
    size = len(group.world())
    assert group.every(ring) == [((rank - 1) % size).to_bytes(8, "little") for rank in range(size)]


@contextlib.contextmanager
def directory(size: int, *, token: bytes | None = TOKEN, options: Options = FAST) -> Iterator[Directory]:
    """A directory as `phalanx run` hosts it."""
    hosted = Directory(size, token=token, bind=Address(LOOPBACK, 0), options=options)
    try:
        yield hosted
    finally:
        hosted.close()


# -- strangers ---------------------------------------------------------------------------------------------------------


class Stranger(contextlib.AbstractContextManager["Stranger"]):
    """A plain socket to somebody's port."""

    def __init__(self, address: Address) -> None:
        self.socket = socket.create_connection(address, timeout=LIMIT)
        self.port = address.port
        self.name = "{}:{}".format(*self.socket.getsockname()[:2])

    def send(self, data: bytes) -> None:
        """Sends, also to somebody who has hung up."""
        with contextlib.suppress(OSError):
            self.socket.sendall(data)

    def receive(self, size: int) -> bytes:
        """Receives up to `size` bytes; fewer if the other side closes."""
        data = b""
        with contextlib.suppress(ConnectionError):
            while len(data) < size and (chunk := self.socket.recv(size - len(data))):
                data += chunk
        return data

    def dropped(self) -> bytes:
        """Waits until the other side has closed; returns what it still said."""
        return self.receive(1 << 20)

    def shake(self, hello: Hello, token: bytes | None, *, port: int | None = None) -> dict[str, bytes]:
        """The client's side of a handshake, as an honest rank does it.

        Raises:
            Rejected, AuthenticationFailed: As the server answers.
        """
        machine = ClientHandshake(replace(hello, port=self.port if port is None else port), token)
        said = {"hello": machine.start()}
        self.send(said["hello"])
        said["challenge"] = self.receive(machine.wants)
        said["proof"] = machine.feed(said["challenge"])
        self.send(said["proof"])
        said["verdict"] = self.receive(machine.wants)
        machine.feed(said["verdict"])
        return said

    def close(self) -> None:
        self.socket.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class Silent:
    """Something else that listens on a port, as torchrun's store does; it says nothing."""

    def __init__(self, port: int = 0, host: str = LOOPBACK) -> None:
        self.socket = socket.create_server((host, port))
        self.port: int = self.socket.getsockname()[1]
        self._stop = threading.Event()
        self.visits: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self.socket.settimeout(0.05)
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                self.visits.append(self.socket.accept()[0])

    def __enter__(self) -> Silent:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(LIMIT)
        for visit in self.visits:
            visit.close()
        self.socket.close()


def rank_hello(rank: int, size: int, role: Role = Role.RANK) -> Hello:
    """What a rank says to a directory."""
    return Hello(role, rank, size)


def lines_about(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    """The log lines that speak of a connection, given by its own address."""
    whole = re.compile(re.escape(name) + r"(?!\d)")
    return [record.getMessage() for record in caplog.records if whole.search(record.getMessage())]


def eventually(condition: Callable[[], object], what: str, limit: float = LIMIT) -> None:
    """Waits until something holds."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {limit:g} s for {what}")
        time.sleep(0.005)


def open_sockets() -> set[str]:
    """The sockets of this process, without those to the processes that `run_ranks` keeps for its next call."""
    kept = {str(one.fileno()) for _, one in fork_server._free}
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if entry.name not in kept:
                found.add(os.readlink(entry))
    return {name for name in found if name.startswith("socket:")}
