"""Groups: who is in them, more of them, and what is refused before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import (
    Closed,
    InvalidRank,
    InvalidWorldSize,
    NoConnection,
    SelfSend,
    UnsupportedArray,
    UnsupportedOp,
    UsageError,
)
from ...group import Group
from .check import check
from .common import connected, expect, has_self, is_star, sync


@check(ranks=3)
def who(backend: Any) -> None:
    """A group knows who is in it."""
    with Group(backend) as group:
        assert (group.rank, group.world_size) == (backend.rank, 3)
        assert group.members == getattr(backend, "world_ranks", (0, 1, 2))
        assert len(group.hosts) == 3
        assert 0 <= group.local_rank < group.local_world_size <= 3
        assert str(group.rank) in repr(group)
        group.barrier()


@check(ranks=4)
def subgroups(backend: Any) -> None:
    """Sub-groups of a group."""
    with Group(backend) as group:
        if group.rank != 1:
            with group.subgroup([3, 0, 2]) as some:
                assert some.members == tuple(group.members[rank] for rank in (0, 2, 3))
                assert some.rank == [0, 2, 3].index(group.rank)
                total = some.all_reduce(np.array([group.rank]))
                assert total.tolist() == [5]
        assert group.all_reduce(np.array([1])).tolist() == [4]
        assert expect(InvalidRank, group.subgroup, [group.rank, 4]).value == 4
        assert expect(InvalidWorldSize, group.subgroup, []).value == 0
        others = [rank for rank in range(4) if rank != group.rank]
        assert expect(InvalidRank, group.subgroup, others).value == group.rank
        group.barrier()


@check(ranks=4)
def split(backend: Any) -> None:
    """A group is split by color and key."""
    with Group(backend) as group:
        me = group.rank
        # Rank 0 is in every group that talks, and first there: on a star no other rank is connected with all.
        part = group.split(0 if me != 1 else 7, key=-me if me else -9)
        assert part is not None
        if me == 1:
            assert part.members == (group.members[1],)
        else:
            assert part.members == tuple(group.members[rank] for rank in (0, 3, 2))
            assert part.all_reduce(np.array([me])).tolist() == [5]
        nobody = group.split(None)
        assert nobody is None
        alone = group.split(me)
        assert alone is not None
        assert (alone.rank, alone.world_size) == (0, 1)
        alone.barrier()
        expect(UsageError, group.split, "red")
        expect(UsageError, group.split, 0, key="high")
        group.barrier()
        part.close()
        alone.close()


@check(ranks=2, lanes=True)
def two_groups(backend: Any) -> None:
    """Two groups on one backend do not meet."""
    first, second = Group(backend), Group(backend)
    other = 1 - backend.rank
    first.send(np.array([1]), other)
    second.send(np.array([2]), other)
    backend.send(b"3", other)
    assert second.recv(src=other).tolist() == [2]
    raw = bytearray(1)
    backend.recv(raw, other)
    assert raw == b"3"
    assert first.recv(src=other).tolist() == [1]
    order = (first, second) if backend.rank == 0 else (second, first)
    works = [group.all_reduce(np.array([1]), async_op=True) for group in order]
    assert [work.wait().tolist() for work in works] == [[2], [2]]
    sync(backend)
    first.close()
    second.close()


@check(ranks=2, lanes=True)
def closed_group(backend: Any) -> None:
    """A closed group refuses everything."""
    group = Group(backend)
    group.barrier()
    sync(backend)
    group.close()
    group.close()
    other = 1 - group.rank
    for call in (
        group.barrier,
        lambda: group.send(np.zeros(1), other),
        lambda: group.recv(src=other),
        lambda: group.send_object(1, other),
        lambda: group.recv_object(other),
        lambda: group.all_reduce(np.zeros(1)),
        lambda: group.broadcast(np.zeros(1), 0),
        lambda: group.subgroup([0, 1]),
        lambda: group.split(0),
    ):
        expect(Closed, call)
    sync(backend)  # the backend is not the group's: it goes on
    with Group(backend) as again:
        again.barrier()
        sync(backend)


@check(ranks=3)
def refused(backend: Any) -> None:
    """Impossible arguments are refused before anything is sent."""
    with Group(backend) as group:
        peer = 0 if group.rank else 1
        one = np.zeros(2, np.float32)
        for rank in (-1, 3, 99):
            for call in (
                lambda r=rank: group.send(one, r),
                lambda r=rank: group.recv(one, r),
                lambda r=rank: group.isend(one, r),
                lambda r=rank: group.irecv(one, r),
                lambda r=rank: group.sendrecv(one, r, one.copy(), peer),
                lambda r=rank: group.sendrecv(one, peer, one.copy(), r),
                lambda r=rank: group.send_object(1, r),
                lambda r=rank: group.recv_object(r),
                lambda r=rank: group.broadcast(one, r),
            ):
                error = expect(InvalidRank, call)
                assert error.value == rank
                assert "0, 1, 2" in str(error), "the message should name the ranks of the group"
        for tag in (-1, 1 << 63, "a", 1.5):
            expect(UsageError, group.send, one, peer, tag=tag)
            expect(UsageError, group.recv, one, peer, tag=tag)
            expect(UsageError, group.sendrecv, one, peer, one, peer, tag=tag)
        for bad in (None, 3, "text", [1.0], {"a": 1}, object(), np.array([object()])):
            expect(UnsupportedArray, group.send, bad, peer)
            expect(UnsupportedArray, group.sendrecv, bad, peer, one, peer)
            expect(UnsupportedArray, group.broadcast, bad, 0)
            expect(UnsupportedArray, group.all_reduce, bad)
            if bad is not None:
                expect(UnsupportedArray, group.recv, bad, peer)
        for timeout in (-1, float("nan")):
            expect(UsageError, group.barrier, timeout=timeout)
            expect(UsageError, group.recv, one, peer, timeout=timeout)
            expect(UsageError, group.send, one, peer, timeout=timeout)
        expect(UnsupportedOp, group.all_reduce, one, "median")
        expect(UnsupportedOp, group.all_reduce, one, "band")
        expect(UnsupportedOp, group.all_reduce, np.zeros(2, np.int32), "mean")
        expect(UnsupportedOp, group.all_reduce, np.zeros(2, np.complex64), "max")
        expect(UsageError, group.send_object, lambda: None, peer)
        if not has_self(backend):
            expect(SelfSend, group.send, one, group.rank)
            expect(SelfSend, group.recv, one, group.rank)
        # Nothing of all this was sent, and no receive was left behind to steal what comes now.
        if group.rank:
            group.send(np.full(2, group.rank, np.float32), 0)
            assert group.recv(np.empty(2, np.float32), 0).tolist() == [0, 0]
        else:
            for source in (1, 2):
                assert group.recv(src=source).tolist() == [source, source]
                group.send(one, source)
        assert group.all_reduce(np.ones(1)).tolist() == [3]


@check(ranks=3)
def star_messages(backend: Any) -> None:
    """A group on a star says NoConnection."""
    with Group(backend) as group:
        if is_star(backend):
            for peer in (1, 2):
                if group.rank and peer != group.rank:
                    assert not connected(backend, group.rank, peer)
                    for call in (lambda p=peer: group.send(np.zeros(1), p), lambda p=peer: group.recv(src=p)):
                        error = expect(NoConnection, call)
                        assert error.peer == group.members[peer]
                        assert "mesh" in str(error).lower()
        group.barrier()
