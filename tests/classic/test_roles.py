"""Plain ranks and Phalanx ranks in one classic world, in every role, on the star and on the mesh."""

from __future__ import annotations

import itertools
import os

import pytest
from tests.classic.together import Seat, seats, side_by_side

import phalanx as px

MIXED = [kinds for kinds in itertools.product(("phalanx", "plain"), repeat=3) if len(set(kinds)) == 2]
"""Every way to seat both kinds in a world of three: each of them once as the first, a middle and the last rank."""
SIZES = (0, 1, 7, 8, 9, 1000, 300_000)


def name(kinds: tuple[str, ...]) -> str:
    return "-".join(kinds)


def message(src: int, dst: int, size: int) -> bytes:
    """Bytes that tell who sent them to whom."""
    return bytes((17 * src + 5 * dst + i) % 251 for i in range(min(size, 1000))) * (1 if size <= 1000 else size // 1000)


def exchange(world: list[Seat], pairs: list[tuple[int, int]]) -> None:
    """In each pair, messages of all sizes go both ways; then all meet in a barrier, several times."""

    def play(seat: Seat) -> None:
        for low, high in pairs:
            if seat.rank not in (low, high):
                continue
            peer = high if seat.rank == low else low
            for size in SIZES:
                if seat.rank == low:  # the higher one answers, so that neither waits for room to send
                    seat.send(message(low, high, size), peer)
                expected = message(peer, seat.rank, size)
                assert seat.recv(len(expected), peer) == expected
                if seat.rank == high:
                    seat.send(message(high, low, size), peer)
        for _ in range(3):
            seat.barrier()

    side_by_side(*(lambda seat=seat: play(seat) for seat in world))


@pytest.mark.parametrize("kinds", MIXED, ids=name)
def test_star(kinds: tuple[str, ...]) -> None:
    with seats("star", kinds) as world:
        exchange(world, [(0, 1), (0, 2)])


@pytest.mark.parametrize("kinds", MIXED, ids=name)
def test_mesh(kinds: tuple[str, ...]) -> None:
    with seats("mesh", kinds) as world:
        exchange(world, [(0, 1), (0, 2), (1, 2)])


def test_a_larger_mesh() -> None:
    kinds = ["plain", "phalanx", "plain", "phalanx", "phalanx", "plain"]
    with seats("mesh", kinds) as world:
        exchange(world, list(itertools.combinations(range(len(kinds)), 2)))


@pytest.mark.parametrize("topology", ["star", "mesh"])
@pytest.mark.parametrize("kinds", [("phalanx", "plain"), ("plain", "phalanx")], ids=name)
def test_both_send_much_at_once(topology: str, kinds: tuple[str, ...]) -> None:
    """Sending and receiving on one connection do not block each other."""
    size = 8 << 20
    blobs = [os.urandom(size) for _ in kinds]
    with seats(topology, kinds) as world:
        heard = side_by_side(
            *(lambda rank=rank: world[rank].send(blobs[rank], 1 - rank) for rank in (0, 1)),
            *(lambda rank=rank: world[rank].recv(size, 1 - rank) for rank in (0, 1)),
        )
    assert heard[2:] == [blobs[1], blobs[0]]


# -- sub-groups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("phalanx", "phalanx", "plain"), ("plain", "phalanx", "phalanx")], ids=name)
def test_a_sub_group_shared_with_a_plain_rank(kinds: tuple[str, ...]) -> None:
    """As in ferrotorch, its barrier and messages go on the parent's stream, over the sub-group's first member."""
    members = [0, 2]
    with seats("mesh", kinds) as world:
        phalanx = next(seat for seat in world if kinds[seat.rank] == "phalanx" and seat.rank in members)
        plain = next(seat for seat in world if kinds[seat.rank] == "plain")
        view = px.backends.SubBackend(phalanx.phalanx, members, share_stream=True)
        other = 1 - view.rank
        assert view.to_global(other) == plain.rank

        def ours() -> None:
            view.barrier()
            view.send(b"from Phalanx", other)
            buffer = bytearray(10)
            view.recv(buffer, other)
            assert buffer == b"from plain"
            view.barrier()

        def theirs() -> None:
            plain.plain.barrier(members)
            plain.send(b"from plain", phalanx.rank)
            assert plain.recv(0, phalanx.rank) == b"from Phalanx"
            plain.plain.barrier(members)

        side_by_side(ours, theirs)


def test_groups_of_phalanx_ranks_do_not_disturb_a_plain_one() -> None:
    """Groups talk in frames of their own; a plain rank never sees one."""
    with seats("mesh", ("phalanx", "plain", "phalanx")) as world:

        def ours(seat: Seat) -> None:
            pair = px.Group(px.backends.SubBackend(seat.phalanx, [0, 2]))
            for turn in range(5):
                pair.barrier()
                assert pair.broadcast(bytearray([turn + pair.rank] * 3), src=0) == bytearray([turn] * 3)
                seat.send(bytes([turn]), 1)
                assert seat.recv(1, 1) == bytes([turn + 10])
            pair.close()
            seat.barrier()

        def theirs() -> None:
            for turn in range(5):
                for peer in (0, 2):
                    assert world[1].recv(1, peer) == bytes([turn])
                    world[1].send(bytes([turn + 10]), peer)
            world[1].barrier()

        side_by_side(lambda: ours(world[0]), theirs, lambda: ours(world[2]))
