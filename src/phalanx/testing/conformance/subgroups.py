"""Views on a parent: their ranks, and traffic that must never meet the parent's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ...backends import SubBackend
from ...errors import Closed, InvalidRank, InvalidWorldSize, PhalanxError, SizeMismatch, Timeout
from ...group import Group
from .check import check
from .common import SHORT, expect, noise, sync, within
from .threads import together


@check(ranks=4, lanes=True)
def members_are_sorted(backend: Any) -> None:
    """Members are sorted and counted once."""
    me = backend.rank
    if me != 1:
        sub = SubBackend(backend, [3, 0, 2, 3, 0])
        assert sub.members == (0, 2, 3)
        assert sub.parent is backend
        assert sub.world_size == 3
        assert sub.rank == sub.members.index(me)
        assert [sub.to_global(local) for local in range(3)] == [0, 2, 3]
        assert [sub.to_local(rank) for rank in range(4)] == [0, None, 1, 2]
        for bad in (-1, 3):
            assert expect(InvalidRank, sub.to_global, bad).value == bad
        assert sub.to_local(99) is None
        sub.close()
    sync(backend)


@check(ranks=3, lanes=True)
def bad_members(backend: Any) -> None:
    """Members that cannot be are refused."""
    me = backend.rank
    assert expect(InvalidWorldSize, SubBackend, backend, []).value == 0
    assert expect(InvalidRank, SubBackend, backend, [me, 3]).value == 3
    assert expect(InvalidRank, SubBackend, backend, [me, -1]).value == -1
    others = [rank for rank in range(3) if rank != me]
    error = expect(InvalidRank, SubBackend, backend, others)
    assert error.value == me
    assert ", ".join(map(str, others)) in str(error), "the message should name the members"
    sync(backend)


@check(ranks=4, lanes=True)
def subgroup_messages(backend: Any) -> None:
    """Messages of a sub-group carry its ranks."""
    me = backend.rank
    sub = SubBackend(backend, [0, 3]) if me in (0, 3) else None
    if sub is not None:
        other = 1 - sub.rank
        sub.send(noise(70_000, sub.rank), other)
        target = bytearray(70_000)
        sub.recv(target, other)
        assert target == noise(70_000, other)
        expect(InvalidRank, sub.send, b"x", 3)
        error = expect(Timeout, sub.recv, bytearray(1), other, timeout=SHORT)
        # Errors speak of the world, whatever the group: that is what a person can look up.
        assert error.peer == backend.world_ranks[3 if me == 0 else 0]
    sync(backend)
    if sub is not None:
        sub.close()


@check(ranks=3, lanes=True)
def crossing_traffic(backend: Any) -> None:
    """The traffic of a sub-group never meets the parent's."""
    me = backend.rank
    if me == 1:
        sync(backend)
        return
    # The same two ranks, by three ways: the parent, a sub-group, and a second one with the same members.
    first, second = SubBackend(backend, [0, 2]), SubBackend(backend, [2, 0])
    ways = [(backend, 2 - me), (first, 1 - first.rank), (second, 1 - second.rank)]
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)]
    for send_order in orders:
        for receive_order in orders:
            for way in send_order:
                link, peer = ways[way]
                link.send(noise(1000, me, way), peer)
            for way in receive_order:
                link, peer = ways[way]
                target = bytearray(1000)
                link.recv(target, peer)
                assert target == noise(1000, 2 - me, way), f"way {way}, sent {send_order}, received {receive_order}"
    # Not even one of the wrong length disturbs the other streams.
    first.send(b"abc", 1 - first.rank)
    backend.send(b"parent", 2 - me)
    target = bytearray(6)
    backend.recv(target, 2 - me)
    assert target == b"parent"
    expect(SizeMismatch, first.recv, bytearray(9), 1 - first.rank)
    first.close()
    second.close()
    sync(backend)


@check(ranks=3, lanes=True)
def subgroup_barrier(backend: Any) -> None:
    """A sub-group's barrier does not meet the parent's traffic."""
    me, count = backend.rank, 40
    sub = SubBackend(backend, [0, 2]) if me != 1 else None

    def barriers() -> None:
        if sub is not None:
            for _ in range(count):
                sub.barrier()

    def exchange() -> None:
        # One byte, as long as a barrier's message on the classic wire: the easiest to be mistaken for one.
        peer = {0: 2, 2: 0}.get(me)
        if peer is not None:
            target = bytearray(1)
            for number in range(count):
                backend.send(bytes([number]), peer)
                backend.recv(target, peer)
                assert target[0] == number

    together(barriers, exchange)
    if sub is not None:
        sub.close()
    sync(backend)


@check(ranks=2, lanes=True)
def barriers_cross(backend: Any) -> None:
    """Barriers of parent and sub-group in different orders."""
    sub = SubBackend(backend, [0, 1])
    for _ in range(10):
        together(backend.barrier, sub.barrier)
    sub.close()
    sync(backend)


@check(ranks=4, lanes=True)
def nested(backend: Any) -> None:
    """Sub-groups of sub-groups."""
    me = backend.rank
    if me != 1:
        outer = SubBackend(backend, [0, 2, 3])
        if me != 2:
            inner = SubBackend(outer, [0, 2])
            assert inner.members == (0, 2)
            assert inner.parent is outer
            assert inner.to_global(1) == 2
            assert outer.to_global(inner.to_global(1)) == 3
            other = 1 - inner.rank
            outer_other = 2 if outer.rank == 0 else 0
            for link, peer, mark in ((inner, other, 1), (outer, outer_other, 2), (backend, 3 - me, 3)):
                link.send(noise(100, mark, me), peer)
            for link, peer, mark in ((backend, 3 - me, 3), (inner, other, 1), (outer, outer_other, 2)):
                target = bytearray(100)
                link.recv(target, peer)
                assert target == noise(100, mark, 3 - me)
            inner.barrier()
            inner.close()
        outer.barrier()
        outer.close()
    sync(backend)


@check(ranks=4, lanes=True)
def only_members(backend: Any) -> None:
    """Only members take part in making a sub-group."""
    # Every rank makes the sub-groups it is in, in its own order. All contain rank 0, for the star's sake.
    me = backend.rank
    sets = [(0, 1), (0, 2), (0, 1, 2), (0, 3), (0, 2, 3)]
    mine = [members for members in sets if me in members]
    if me % 2:
        mine.reverse()
    subs = {members: SubBackend(backend, members) for members in mine}
    for members in sets:
        if me not in members:
            continue
        sub = subs[members]
        if sub.rank == 0:
            for local in range(1, len(members)):
                sub.send(bytes(members), local)
        else:
            target = bytearray(len(members))
            sub.recv(target, 0)
            assert target == bytes(members)
    for members in sets:
        if me in members:
            subs[members].barrier()
            subs[members].close()
    sync(backend)


@check(ranks=2, lanes=True)
def early_messages(backend: Any) -> None:
    """A message may come before its sub-group is made."""
    if backend.rank == 0:
        sub = SubBackend(backend, [0, 1])
        for number in range(20):
            sub.send(bytes([number]) * 100, 1)
        backend.send(b"g", 1)
    else:
        backend.recv(bytearray(1), 0)
        sub = SubBackend(backend, [0, 1])
        target = bytearray(100)
        for number in range(20):
            sub.recv(target, 0)
            assert target == bytes([number]) * 100
    sync(backend)
    sub.close()
    sync(backend)


@check(ranks=2, lanes=True)
def subgroup_of_one(backend: Any) -> None:
    """A sub-group of one."""
    sub = SubBackend(backend, [backend.rank])
    assert (sub.rank, sub.world_size, sub.members) == (0, 1, (backend.rank,))
    sub.barrier()
    sub.close()
    sync(backend)


@check(ranks=2, lanes=True)
def close_subgroup(backend: Any) -> None:
    """Closing a sub-group leaves the parent alone."""
    other = 1 - backend.rank
    for _ in range(5):
        sub = SubBackend(backend, [0, 1])
        sub.barrier()
        sync(backend)  # else a rank that is ahead may close while the other still waits for the barrier's end
        sub.close()
        sub.close()
        expect(Closed, sub.send, b"x", other)
        expect(Closed, sub.recv, bytearray(1), other)
        expect(Closed, sub.barrier)
    sync(backend)


@check(ranks=2, lanes=True)
def close_parent_while_waiting(backend: Any) -> None:
    """Closing the parent ends what waits in its sub-groups."""
    other = 1 - backend.rank
    group = Group(SubBackend(backend, [0, 1]))
    sub = SubBackend(backend, [0, 1])
    group.barrier()
    waiting = threading.Barrier(3)

    def wait_in(receive: Callable[[], object]) -> None:
        waiting.wait()
        within(5, expect, PhalanxError, receive)

    def close() -> None:
        waiting.wait()
        time.sleep(0.05)  # both wait by now, most likely; both ways must work
        backend.close()

    together(
        lambda: wait_in(lambda: group.recv(src=other)), lambda: wait_in(lambda: sub.recv(bytearray(1), other)), close
    )
    group.close()
    sub.close()


@check(ranks=2, lanes=True)
def close_parent(backend: Any) -> None:
    """Closing the parent ends its sub-groups."""
    other = 1 - backend.rank
    sub = SubBackend(backend, [0, 1])
    sub.barrier()
    sync(backend)
    backend.close()
    expect(Closed, sub.send, b"x", other)
    expect(Closed, sub.recv, bytearray(1), other)
    expect(Closed, SubBackend, backend, [0, 1])
    sub.close()
