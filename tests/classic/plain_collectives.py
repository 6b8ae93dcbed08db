"""The collectives of ferrotorch's ranks, straight from the specification. They know nothing of Phalanx."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.classic.plain_rank import PlainRank

Array = npt.NDArray[Any]


def _send(rank: PlainRank, array: Array, dst: int) -> None:
    if array.size:
        rank.send(array.tobytes(), dst)


def _recv(rank: PlainRank, like: Array, src: int) -> Array:
    if not like.size:
        return like.copy()
    data = np.frombuffer(rank.recv(src), like.dtype)
    assert data.size == like.size, (data.size, like.size)
    return data.reshape(like.shape)


def all_reduce(rank: PlainRank, x: Array, *, mean: bool = False) -> Array:
    if rank.rank:
        _send(rank, x, 0)
        return _recv(rank, x, 0)
    total = _sum_on_first(rank, x, mean)
    for peer in range(1, rank.world_size):
        _send(rank, total, peer)
    return total


def _sum_on_first(rank: PlainRank, x: Array, mean: bool) -> Array:
    total = x.copy()
    for peer in range(1, rank.world_size):
        total += _recv(rank, x, peer)
    return total / total.dtype.type(rank.world_size) if mean else total


def broadcast(rank: PlainRank, x: Array, root: int) -> Array:
    if rank.rank != root:
        return _recv(rank, x, root)
    for peer in range(rank.world_size):
        if peer != root:
            _send(rank, x, peer)
    return x


def all_gather(rank: PlainRank, x: Array) -> Array:
    whole = np.concatenate([x] * rank.world_size)
    if rank.rank:
        _send(rank, x, 0)
        return _recv(rank, whole, 0)
    whole = np.concatenate([x, *(_recv(rank, x, peer) for peer in range(1, rank.world_size))])
    for peer in range(1, rank.world_size):
        _send(rank, whole, peer)
    return whole


def reduce_scatter(rank: PlainRank, x: Array) -> Array:
    part = np.split(x, rank.world_size)[rank.rank]
    if rank.rank:
        _send(rank, x, 0)
        return _recv(rank, part, 0)
    parts = np.split(_sum_on_first(rank, x, mean=False), rank.world_size)
    for peer in range(1, rank.world_size):
        _send(rank, parts[peer], peer)
    return parts[0]


def all_to_all(rank: PlainRank, parts: list[Array], likes: list[Array]) -> list[Array]:
    found = list(parts)
    for peer in range(rank.world_size):
        if rank.rank < peer:
            _send(rank, parts[peer], peer)
            found[peer] = _recv(rank, likes[peer], peer)
        elif rank.rank > peer:
            found[peer] = _recv(rank, likes[peer], peer)
            _send(rank, parts[peer], peer)
    return found


def ring_allreduce_sum_f32(rank: PlainRank, x: Array) -> Array:
    x = x.copy()
    me, size = rank.rank, rank.world_size
    parts = [x[i * x.size // size : (i + 1) * x.size // size] for i in range(size)]

    def both(sent: Array, received: Array) -> Array:
        sender = threading.Thread(target=rank.send, args=(sent.tobytes(), (me + 1) % size))
        sender.start()
        data = np.frombuffer(rank.recv((me - 1) % size), np.float32)
        sender.join()
        assert data.size == received.size
        return data

    for s in range(size - 1):
        mine = parts[(me - s - 1) % size]
        mine += both(parts[(me - s) % size], mine)
    for s in range(size - 1):
        mine = parts[(me - s) % size]
        mine[:] = both(parts[(me - s + 1) % size], mine)
    return x


def tree_broadcast_f32(rank: PlainRank, x: Array, root: int) -> Array:
    t = (rank.rank - root) % rank.world_size
    if t:
        x = _recv(rank, x, ((t - 1) // 2 + root) % rank.world_size)
    for child in (2 * t + 1, 2 * t + 2):
        if child < rank.world_size:
            _send(rank, x, (child + root) % rank.world_size)
    return x
