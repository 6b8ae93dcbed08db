"""Worlds in which remote calls on the classic wire are tried, and ranks of plain sockets beside them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.classic.plain_rank import PlainRank, u64
from tests.classic.together import free_place, seats, side_by_side

import phalanx as px
from phalanx.rpc.classic.agent import ClassicAgent

patience = 10.0


@contextlib.contextmanager
def simulated(size: int) -> Iterator[list[px.backends.Backend]]:
    backends = px.backends.SimulatedBackend.create_group(size, timeout=patience)
    yield list(backends)
    for backend in backends:
        backend.close()


@contextlib.contextmanager
def classic(topology: str, size: int) -> Iterator[list[px.backends.Backend]]:
    with seats(topology, ["phalanx"] * size) as made:
        yield [seat.phalanx for seat in made]


@contextlib.contextmanager
def phalanx_mesh(size: int) -> Iterator[list[px.backends.Backend]]:
    host, port = free_place()
    backends = side_by_side(
        *(
            functools.partial(px.backends.MeshBackend, rank, size, f"{host}:{port}", token="secret", timeout=patience)
            for rank in range(size)
        )
    )
    yield backends
    side_by_side(*(backend.close for backend in backends))


@contextlib.contextmanager
def sub(size: int, *, share_stream: bool = False) -> Iterator[list[px.backends.Backend]]:
    """The last ranks of a larger world, so that a rank is another one in the parent."""
    with classic("mesh", size + 1) as parents:
        members = range(1, size + 1)
        made = [
            px.backends.SubBackend(parent, members, share_stream=share_stream)  # type: ignore[arg-type]
            for parent in parents[1:]
        ]
        yield list(made)
        for backend in made:
            backend.close()


class PlainBackend(px.backends.Backend):
    """What a user may write: no lanes, only the six methods."""

    def __init__(self, rank: int, queues: dict[tuple[int, int], queue.Queue[bytes]], size: int) -> None:
        self._rank, self._queues, self._size = rank, queues, size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._size

    def send(self, data: Any, dst: int, *, timeout: float | None = None) -> None:
        self._queues[self._rank, dst].put(bytes(data))

    def recv(self, buffer: Any, src: int, *, timeout: float | None = None) -> None:
        try:
            data = self._queues[src, self._rank].get(timeout=timeout)
        except queue.Empty:
            raise px.Timeout("nothing came") from None
        assert len(data) == len(buffer)
        buffer[:] = data

    def barrier(self, *, timeout: float | None = None) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


@contextlib.contextmanager
def own_backend(size: int) -> Iterator[list[px.backends.Backend]]:
    queues: dict[tuple[int, int], queue.Queue[bytes]] = {
        pair: queue.Queue() for pair in itertools.product(range(size), repeat=2)
    }
    yield [PlainBackend(rank, queues, size) for rank in range(size)]


World = Callable[[int], contextlib.AbstractContextManager[list[px.backends.Backend]]]

WORLDS: dict[str, World] = {
    "simulated": simulated,
    "star": functools.partial(classic, "star"),
    "mesh": functools.partial(classic, "mesh"),
    "sub": sub,
    "shared-sub": functools.partial(sub, share_stream=True),
    "phalanx-mesh": phalanx_mesh,
    "own": own_backend,
}


def agent_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("phalanx-agent", "phalanx-calls")]


@contextlib.contextmanager
def agents(kind: str, size: int = 2, **options: Any) -> Iterator[list[ClassicAgent]]:
    with WORLDS[kind](size) as backends, contextlib.ExitStack() as stack:
        made = [stack.enter_context(ClassicAgent(backend, **options)) for backend in backends]
        for agent in made:
            register_all(agent)
        yield made


def register_all(agent: ClassicAgent) -> None:
    @agent.register
    def echo(payload: bytes) -> bytes:
        assert type(payload) is bytes
        return payload

    @agent.register("who")
    def _(payload: bytes) -> bytes:
        return str(agent.rank).encode()

    def fail(payload: bytes) -> bytes:
        raise ValueError(f"rank {agent.rank} does not like {payload!r}")

    agent.register("fail", fail)


def echo_after(gate: threading.Event) -> Callable[[bytes], bytes]:
    """A handler that waits first."""

    def wait(payload: bytes) -> bytes:
        assert gate.wait(patience)
        return payload

    return wait


every_world = pytest.mark.parametrize("kind", WORLDS)


@contextlib.contextmanager
def beside_plain(topology: str, own: int) -> Iterator[tuple[ClassicAgent, PlainRank]]:
    kinds = ["plain", "plain"]
    kinds[own] = "phalanx"
    with seats(topology, kinds) as world, ClassicAgent(world[own].phalanx, timeout=patience) as agent:
        register_all(agent)
        yield agent, world[1 - own].plain


def respond(plain: PlainRank, response: bytes, *, announce: int | None = None) -> None:
    peer = 1 - plain.rank
    plain.send(u64(len(response) if announce is None else announce), peer)
    plain.send(response, peer)


def result_of(number: int, data: bytes, flag: int = 0) -> bytes:
    return b"\x02" + u64(number) + bytes([flag]) + struct.pack("<I", len(data)) + data


def request_of(number: int, name: bytes, payload: bytes = b"") -> bytes:
    parts = [b"\x01", u64(number), struct.pack("<I", len(name)), name, struct.pack("<I", len(payload)), payload]
    return b"".join(parts)


both = [pytest.mark.parametrize("topology", ["star", "mesh"]), pytest.mark.parametrize("own", [0, 1])]


def on_both(test: Callable[..., None]) -> Callable[..., None]:
    return both[0](both[1](test))
