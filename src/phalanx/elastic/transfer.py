"""How ranks that join get the state: every rank that has it sends a share, and CRCs say whether all had the same."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import numpy as np

from ..deadline import Deadline
from ..errors import PhalanxError
from ..group import Group
from .state import Snapshot

__all__ = ["receive", "send"]

TAG = 0x5354
"""The tag of a state's messages: "ST"."""


def send(
    group: Group, snapshot: Snapshot, place: tuple[int, int], holders: Sequence[int], joined: Sequence[int]
) -> int:
    """Sends this rank's share of the state to each rank that joins; returns the bytes of the whole state.

    Args:
        place: Steps that were committed, and those of them before this loop.
        holders: Ranks of the group that have the state, this one among them.
        joined: Ranks of the group that have not.
    """
    total = snapshot.nbytes
    ranges = _ranges(total, len(holders))
    mine = holders.index(group.rank)
    share = snapshot.share(*ranges[mine])
    if mine == 0:
        # The CRCs of all shares, by one rank: so a rank whose state is another is found, too.
        crcs = [zlib.crc32(snapshot.share(*each).data) for each in ranges]
        for rank in joined:
            group.send_object((*place, snapshot.head(), total, crcs), rank, tag=TAG)
    for rank in joined:
        group.send(share, rank, tag=TAG)
    return total


def receive(group: Group, holders: Sequence[int], deadline: Deadline) -> tuple[Snapshot, int, int]:
    """The state, the steps that were committed, and those of them before this loop.

    Raises:
        PhalanxError: A share is not what the first rank has.
    """
    committed, begin, head, total, crcs = group.recv_object(holders[0], tag=TAG, timeout=deadline.remaining())
    snapshot = Snapshot.empty(head)
    pending = []
    for place, rank in zip(_ranges(total, len(holders)), holders, strict=True):
        share = np.empty(place[1] - place[0], np.uint8)
        pending.append((place, share, group.irecv(share, rank, tag=TAG, timeout=deadline.remaining())))
    for number, ((first, _), share, work) in enumerate(pending):
        work.wait()
        if zlib.crc32(share.data) != crcs[number]:
            names = group.members[holders[number]], group.members[holders[0]]
            raise PhalanxError(
                f"the state of rank {names[0]} is not that of rank {names[1]}: they differ in bytes {first} to "
                f"{first + share.size} of {total} (the state of an elastic job must be the same on all ranks)",
                peer=names[0],
            )
        snapshot.fill(first, share)
    return snapshot, committed, begin


def _ranges(total: int, parts: int) -> list[tuple[int, int]]:
    edges = [total * number // parts for number in range(parts + 1)]
    return list(itertools.pairwise(edges))
