"""Halving and doubling: in every step a rank talks to the one whose number differs in one bit, so log2 n steps do.

Cost for n ranks, a power of two, and a buffer of N bytes:

| | messages one after another | steps of a rank | a rank sends | a rank receives |
| --- | --- | --- | --- | --- |
| short_all_reduce | log2 n | log2 n | log2 n·N | as much |
| all_reduce | 2·log2 n | 2·log2 n | 2·(n - 1)/n·N | as much |
| reduce_scatter | log2 n | log2 n | (n - 1)/n·N | as much |
| all_gather | log2 n | log2 n | (n - 1)/n·N | as much |

(The chunks that one step sends to one rank count as one message. Where n does not divide the number of elements, the
bytes differ by a few elements.)

Of any other n, p ranks take part, the largest power of two below it. The first 2·(n - p) ranks are pairs: the odd one
gives its data to the even one first, and gets its result from it at last. So there are two messages more, of N bytes at
most, and the ring needs fewer bytes.

`short_all_reduce` wins for short messages, where the latencies are all there is: both ends of an exchange reduce the
whole buffer, in the order of ranks, so that all have the same bits. The others win between short and long messages:
as few bytes as the ring and fewer steps, but each with another rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from .schedule import Recv, Schedule, Send, Step, check_ranks

__all__ = ["all_gather", "all_reduce", "reduce_scatter", "short_all_reduce"]


@lru_cache
def short_all_reduce(rank: int, size: int) -> Schedule:
    """The reduction of all buffers on everyone, with the same bits; every message has the whole buffer.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    fold = _Fold(rank, size)

    def exchange(distance: int) -> Step:
        peer = fold.rank_at(fold.place ^ distance)
        return Step((Send(peer, 0),), (Recv(peer, 0, reduce=True, before=peer < rank, late=True),))

    steps = [exchange(distance) for distance in fold.distances()]
    return Schedule.of([fold.collect((0,), reduce=True), *steps, fold.hand_out((0,))])


@lru_cache
def all_reduce(rank: int, size: int) -> Schedule:
    """The reduction of all buffers on everyone, with the same bits.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    fold = _Fold(rank, size)
    everything = range(size)
    collect, hand_out = fold.collect(everything, reduce=True), fold.hand_out(everything)
    return Schedule.of([collect, *_halve(fold), *_double(fold), hand_out], parts=size)


@lru_cache
def reduce_scatter(rank: int, size: int) -> Schedule:
    """The reduction of everyone's chunk r on rank r; the other chunks are left with partial results.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    fold = _Fold(rank, size)
    own = (rank,) if fold.speaker is not None else () if fold.silent is None else (fold.silent,)
    return Schedule.of([fold.collect(range(size), reduce=True), *_halve(fold), fold.hand_out(own)], parts=size)


@lru_cache
def all_gather(rank: int, size: int) -> Schedule:
    """Chunk r of rank r to everyone.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    fold = _Fold(rank, size)
    silent = rank if fold.speaker is not None else fold.silent
    if silent is None:
        return Schedule.of(_double(fold), parts=size)
    rest = [chunk for chunk in range(size) if chunk != silent]
    return Schedule.of([fold.collect((silent,), reduce=False), *_double(fold), fold.hand_out(rest)], parts=size)


class _Fold:
    """The participants in a group of any size: all ranks, or one of each pair for both.

    Args:
        rank: The rank whose schedule is made.
    """

    def __init__(self, rank: int, size: int) -> None:
        check_ranks(size, rank)
        self.places = 1 << (size.bit_length() - 1)
        self._pairs = size - self.places
        paired = rank < 2 * self._pairs
        self.speaker = rank - 1 if paired and rank % 2 else None
        """The rank that takes part for this one, if it does not itself."""
        self.silent = rank + 1 if paired and not rank % 2 else None
        """The rank that this one takes part for as well, if any."""
        self.place = rank // 2 if paired else rank - self._pairs
        """The number among those that take part."""

    def rank_at(self, place: int) -> int:
        """The rank that takes part at a place."""
        return 2 * place if place < self._pairs else place + self._pairs

    def chunks(self, start: int, stop: int) -> range:
        """The chunks of the ranks from one place up to another, and of those that they take part for."""
        return range(self._first(start), self._first(stop))

    def distances(self) -> Iterator[int]:
        """1, 2, 4, … for those that take part; nothing for the others."""
        distance = 1
        while distance < self.places and self.speaker is None:
            yield distance
            distance *= 2

    def collect(self, chunks: Iterable[int], *, reduce: bool) -> Step:
        """The silent rank of a pair sends its data to the one that takes part."""
        if self.speaker is not None:
            return Step(sends=_sends(self.speaker, chunks))
        return Step(recvs=_recvs(self.silent, chunks, reduce)) if self.silent is not None else Step()

    def hand_out(self, chunks: Iterable[int]) -> Step:
        """The result back to the silent rank of a pair."""
        if self.speaker is not None:
            return Step(recvs=_recvs(self.speaker, chunks, False))
        return Step(sends=_sends(self.silent, chunks)) if self.silent is not None else Step()

    def _first(self, place: int) -> int:
        return 2 * place if place < self._pairs else place + self._pairs


def _halve(fold: _Fold) -> Iterator[Step]:
    """The chunks that a rank is still responsible for are halved: one half is given away, one is reduced."""
    for distance in reversed(list(fold.distances())):
        peer = fold.place ^ distance
        mine, theirs = (fold.chunks(p & -distance, (p & -distance) + distance) for p in (fold.place, peer))
        yield Step(_sends(fold.rank_at(peer), theirs), _recvs(fold.rank_at(peer), mine, True))


def _double(fold: _Fold) -> Iterator[Step]:
    """The chunks that a rank has are exchanged for as many others."""
    for distance in fold.distances():
        peer = fold.place ^ distance
        mine, theirs = (fold.chunks(p & -distance, (p & -distance) + distance) for p in (fold.place, peer))
        yield Step(_sends(fold.rank_at(peer), mine), _recvs(fold.rank_at(peer), theirs, False))


def _sends(peer: int, chunks: Iterable[int]) -> tuple[Send, ...]:
    return tuple(Send(peer, chunk) for chunk in chunks)


def _recvs(peer: int, chunks: Iterable[int], reduce: bool) -> tuple[Recv, ...]:
    return tuple(Recv(peer, chunk, reduce) for chunk in chunks)
