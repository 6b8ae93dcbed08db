"""Several threads of a rank at once."""

from __future__ import annotations

import functools
import random
import threading
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from .check import check
from .common import connected, noise


def together(*bodies: Callable[[], None]) -> None:
    """Runs functions in threads, waits for all, and raises the first error."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@check(ranks=4)
def all_pairs_at_once(backend: Any) -> None:
    """All pairs talk at once, from many threads."""
    me = backend.rank
    peers = [peer for peer in range(backend.world_size) if peer != me and connected(backend, me, peer)]

    def sizes(a: int, b: int) -> list[int]:
        chooser = random.Random(a * 100 + b)  # noqa: S311 - the same on both sides
        return [chooser.choice((0, 1, 13, 500, 5_000, 70_000, 300_000)) for _ in range(40)]

    def send(peer: int) -> None:
        for number, size in enumerate(sizes(me, peer)):
            backend.send(noise(size, me, peer, number), peer)

    def receive(peer: int) -> None:
        for number, size in enumerate(sizes(peer, me)):
            target = bytearray(size)
            backend.recv(target, peer)
            assert target == noise(size, peer, me, number), f"message {number} ({size} bytes) from rank {peer}"

    together(*(functools.partial(body, peer) for peer in peers for body in (send, receive)))


@check(ranks=2)
def both_directions(backend: Any) -> None:
    """Both directions at once do not block each other."""
    other = 1 - backend.rank
    size, count = 8 << 20, 4
    data = noise(size, backend.rank)

    def send() -> None:
        for _ in range(count):
            backend.send(data, other)

    def receive() -> None:
        target = bytearray(size)
        for _ in range(count):
            backend.recv(target, other)
            assert target == noise(size, other)

    together(send, receive)


@check(ranks=2)
def shared_connection(backend: Any) -> None:
    """Threads share a connection without mixing messages."""
    # No tags here: which of the receiving threads gets which message is open. Each must come, and be whole.
    senders, count, size = 4, 40, 20_000

    def message(thread: int, number: int) -> bytes:
        body = bytes([thread]) + number.to_bytes(2, "little") + noise(size, thread, number)
        return body + zlib.crc32(body).to_bytes(4, "little")

    def send(thread: int) -> None:
        for number in range(count):
            backend.send(message(thread, number), 1)

    if backend.rank == 0:
        together(*(functools.partial(send, thread) for thread in range(senders)))
        backend.recv(bytearray(1), 1)
        return
    found: list[tuple[int, int]] = []
    per_thread: list[list[tuple[int, int]]] = [[] for _ in range(senders)]

    def receive(slot: int) -> None:
        target = bytearray(len(message(0, 0)))
        for _ in range(count):
            backend.recv(target, 0)
            assert zlib.crc32(target[:-4]) == int.from_bytes(target[-4:], "little"), "a message is not whole"
            per_thread[slot].append((target[0], int.from_bytes(target[1:3], "little")))

    together(*(functools.partial(receive, slot) for slot in range(senders)))
    for got in per_thread:
        found += got
        for thread in range(senders):  # what one thread received of one sender came in order
            numbers = [number for sender, number in got if sender == thread]
            assert numbers == sorted(numbers)
    assert sorted(found) == [(t, k) for t in range(senders) for k in range(count)]
    backend.send(b"k", 0)


@check(ranks=4)
def ring(backend: Any) -> None:
    """A ring of ranks turns in both directions."""
    if not connected(backend, 1, 2):
        return  # there is no ring on a star
    me, size = backend.rank, backend.world_size
    right, left = (me + 1) % size, (me - 1) % size
    value = np.full(100_000, me, np.int32)
    seen = []
    for turn in range(2 * size):
        ahead, behind = (right, left) if turn < size else (left, right)
        incoming = np.empty_like(value)
        together(functools.partial(backend.send, value, ahead), functools.partial(backend.recv, incoming, behind))
        value = incoming
        seen.append(int(value[0]))
        assert (value == value[0]).all()
    once = [(me - 1 - turn) % size for turn in range(size)]
    assert seen == once + [(me + 1 + turn) % size for turn in range(size)]
