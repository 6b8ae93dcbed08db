"""Runs the ranks of a classic world side by side, each in a thread, some of them plain, some of them Phalanx."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.classic import plain_rank
from tests.classic.plain_rank import LIMIT, Place, PlainRank
from tests.ports import free_port

import phalanx as px

__all__ = ["Classic", "Seat", "free_place", "patience", "seats", "side_by_side"]

Classic = px.backends.TcpBackend | px.backends.MeshBackend
patience = 15.0
"""Seconds for Phalanx's side; less than the plain ranks have, so that its errors show first."""


def free_place() -> Place:
    """A free port of loopback."""
    return "127.0.0.1", free_port()


def side_by_side(*calls: Callable[[], Any]) -> list[Any]:
    """Runs all at once; returns what each returned, or raises what the first that failed raised."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


class Seat:
    """One rank of a world, of either kind: the same three verbs."""

    def __init__(self, inner: PlainRank | Classic) -> None:
        self.inner = inner
        self.rank = inner.rank

    @property
    def plain(self) -> PlainRank:
        assert isinstance(self.inner, PlainRank)
        return self.inner

    @property
    def phalanx(self) -> Classic:
        assert not isinstance(self.inner, PlainRank)
        return self.inner

    def send(self, data: bytes, dst: int) -> None:
        self.inner.send(data, dst)

    def recv(self, size: int, src: int) -> bytes:
        if isinstance(self.inner, PlainRank):
            return self.inner.recv(src)
        buffer = bytearray(size)
        self.inner.recv(buffer, src)
        return bytes(buffer)

    def barrier(self) -> None:
        self.inner.barrier()


def _make(
    kind: str, topology: str, rank: int, world_size: int, master: Place, more: dict[str, Any]
) -> PlainRank | Classic:
    if kind == "plain":
        return (plain_rank.star if topology == "star" else plain_rank.mesh)(rank, world_size, master)
    where = f"{master[0]}:{master[1]}"
    if topology == "star":
        return px.backends.TcpBackend(rank, world_size, where, timeout=patience, **more)
    return px.backends.MeshBackend(rank, world_size, where, wire="classic", timeout=patience, **more)


@contextlib.contextmanager
def seats(topology: str, kinds: Sequence[str], **more: Any) -> Iterator[list[Seat]]:
    """A world with one rank of each of these kinds (`"plain"` or `"phalanx"`), in this order.

    Args:
        more: What else the backends of Phalanx get.
    """
    master = free_place()

    def seat(rank: int, kind: str) -> Callable[[], Seat]:
        return lambda: Seat(_make(kind, topology, rank, len(kinds), master, more))

    made = side_by_side(*(seat(rank, kind) for rank, kind in enumerate(kinds)))
    try:
        yield made
    finally:
        for one in made:
            one.inner.close()
