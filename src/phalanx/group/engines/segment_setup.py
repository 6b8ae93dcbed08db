"""Sets up the memory that members of a group share, in its first collective.

The first of the members on a host makes memory (see `transports.shared_memory`) and tells the others its process and
descriptor over the group's own channels, which are authenticated. They open and map it. Then all tell all whether they
could; if one could not, the whole group goes on without.

Long arrays need not be copied into that memory: their readers may be able to read them where they lie, in the memory of
the process that they belong to. Each rank tries that on random bytes of every neighbour. If one cannot (another user,
Yama's ptrace_scope, a seccomp filter, an old kernel), the whole segment does without.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import TYPE_CHECKING

import numpy as np

from ..._native import core
from ...algorithms import Recv, Schedule, Send, Step
from ...backends.base import LaneBackend
from ...backends.lane import Lane
from ...rendezvous.cores import cores_between
from ...transports.shared_memory import make_memory, open_memory
from ...tuning import MOST_HELPERS, Tuning, current
from ..running_collective import RunningCollective
from ..tracking.fingerprint import fingerprint_of
from .base import EngineSetup
from .network import NetworkEngine
from .steps.run import run

if TYPE_CHECKING:
    from ..._core import Segment

__all__ = ["end_with_lane", "memory_groups", "open_segment"]

logger = logging.getLogger("phalanx.group")

SLOT = 1 << 20
"""Bytes of a slot: long enough that keeping step costs little, short enough that all slots stay in the caches."""
SHORT_SLOT = 256 << 10
"""The same for many ranks, whose slots would be too much together."""
PROOF_BYTES = 16
"""Random bytes by which a rank knows that the memory that it reads is another's."""
LARGEST_HEAP = 1 << 40
"""The largest heap that is accepted, in bytes: far from where the sizes of all ranks together could overflow."""
FEW = 8
"""The most ranks that use long slots."""
YIELDS = 1000
"""Yields of the core before a rank sleeps, after its looks at the other ranks."""
LITTLE_PATIENCE = (0, 32)
"""Looks and yields where there are fewer cores than ranks. So many yields of a few ranks last until the many on another
core have come: to be woken takes longer, and the kernel moves who is woken."""
LONG_YIELD, LONG_YIELD_CROWDED = 50_000, 500_000
"""Nanoseconds of a yield after which a rank sleeps: others want the core. Ranks that share it are no others."""
_OFFER = struct.Struct("<?QQQQQQQQQ?BB16s")
_VOTE = struct.Struct("<?QQ16s")
"""Whether a rank has mapped the memory; its process, and the address of its random bytes and what they are."""


def memory_groups(backend: LaneBackend) -> list[list[int]]:
    """The ranks of a backend by the memory that they can share, the same for all; a rank that cannot share is alone."""
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, (host, memory) in enumerate(zip(backend.host_ids, backend.memory_ids, strict=True)):
        found[(host, memory) if memory else (rank,)].append(rank)
    return list(found.values())


def open_segment(setup: EngineSetup, neighbours: Sequence[int], *, heap: int) -> tuple[bool, Segment | None]:
    """Maps the memory that this rank shares with its neighbours. All members of the group call it.

    Args:
        neighbours: Ranks of the group, this one among them. Without others in a larger group it maps
            nothing, but takes part in the vote.
        heap: Bytes for the arrays of `Group.empty`.

    Returns:
        True if all members could map what they should; and this rank's segment, if it was to map one.

    Raises:
        DeadlinePassed, FingerprintMismatch, PhalanxError: As `steps.run`.
    """
    lane = setup.lane
    maps = len(neighbours) > 1 or lane.size == 1
    sharing = setup.running.with_fingerprint(fingerprint_of("share memory", 0, "", (lane.size,), "", 0))
    opened: Segment | None = None
    problem = ""
    with contextlib.ExitStack() as until_mapped:
        offer = b""
        if maps and lane.rank == neighbours[0]:
            try:
                masks = [setup.backend.core_masks[rank] for rank in neighbours]
                cores, helpers = cores_between(masks), min(lane.spare_cores, MOST_HELPERS)
                # Where ranks share the same cores, a root that reads alone has those of all.
                crews = helpers, int(len(masks) > cores > 1 and len(set(masks)) == 1)
                fd, offer = _make(len(neighbours), cores, crews, heap, current(sharing.deadline.remaining()))
                until_mapped.callback(os.close, fd)
            except OSError as error:
                problem = f"no shared memory could be made: {error}"
        offer = _tell(sharing, lane, neighbours, offer)
        if maps:
            try:
                opened = _open(offer, neighbours.index(lane.rank), len(neighbours))
            except OSError as error:
                problem = (
                    problem or f"the shared memory of rank {lane.members[neighbours[0]]} cannot be opened: {error}"
                )
        proof = secrets.token_bytes(PROOF_BYTES)
        address = opened.show_proof(proof) if opened is not None else 0
        try:
            votes = _tell_all(sharing, lane, _VOTE.pack(not problem, os.getpid(), address, proof))
            shared = all(_VOTE.unpack(vote)[0] for vote in votes)
            if shared:
                peers = [_VOTE.unpack(votes[rank])[1:] for rank in neighbours]
                can_read = _tell_all(sharing, lane, bytes([opened is None or opened.try_peers(peers)]))
                if opened is not None:
                    opened.reads_peers = all(can_read[rank] == b"\1" for rank in neighbours)
        except BaseException:
            opened = None  # a broken group keeps the error, whose traceback would keep the memory
            raise
    if problem:
        logger.warning("rank %d: %s; its groups use TCP, which is slower", lane.members[lane.rank], problem)
    return (True, opened) if shared else (False, None)


def _tell_all(sharing: RunningCollective, lane: Lane, word: bytes) -> list[bytes]:
    """The word of every member of the group, which are all as long."""
    words = np.zeros(lane.size * len(word), np.uint8)
    mine = np.frombuffer(word, np.uint8)
    NetworkEngine(lane, is_star=False).all_gather(sharing, mine, words, [len(word)] * lane.size)
    return [words[start : start + len(word)].tobytes() for start in range(0, words.size, len(word))]


def end_with_lane(segment: Segment, lane: Lane) -> None:
    """Ends every wait in the segment when the lane ends."""
    lane.interrupt_with(lambda on_purpose: segment.leave() if on_purpose else segment.abort())


def _make(ranks: int, cores: int, crews: tuple[int, int], heap: int, tuning: Tuning) -> tuple[int, bytes]:
    """The descriptor of new memory, and what the others need to find it and to use it in the same way.

    Whether the ranks share cores, or have some to spare for threads that help, is decided here, too: they cut and show
    arrays accordingly, and each may know of other cores.

    Args:
        crews: How many threads help a rank, and a root that reads while all others rest.
    """
    assert core is not None
    slot = SLOT if ranks <= FEW else SHORT_SLOT
    fd, nonce = make_memory("phalanx-segment", core.segment_bytes(ranks, slot, heap))
    agreed = astuple(replace(tuning, reduced_by_all=tuning.reduced_by_all_of(ranks, cores)))
    return fd, _OFFER.pack(True, os.getpid(), fd, slot, heap, *agreed, ranks > cores, *crews, nonce)


def _open(offer: bytes, rank: int, ranks: int) -> Segment:
    """Maps what was offered.

    Raises:
        OSError: It cannot be opened, or is not what was meant.
    """
    assert core is not None
    made, pid, number, slot, heap, *agreed, crowded, helpers, root_helpers, nonce = _OFFER.unpack(offer)
    if not made:
        raise OSError("that rank could not make any")
    if slot not in (SLOT, SHORT_SLOT) or heap > LARGEST_HEAP:
        raise OSError(f"invalid sizes: slots of {slot} bytes, heaps of {heap} bytes")
    try:
        tuning = Tuning.in_order(agreed)
    except ValueError as error:
        raise OSError(f"invalid tuning: {error}") from error
    fd = open_memory(pid, number, core.segment_bytes(ranks, slot, heap), nonce)
    try:
        patience = (*LITTLE_PATIENCE, LONG_YIELD_CROWDED) if crowded else (tuning.spins, YIELDS, LONG_YIELD)
        thresholds = tuning.reduced_by_all, tuning.copy_once_from, tuning.ahead_from, tuning.past_from
        crews = 0 if crowded else helpers, root_helpers
        segment: Segment = core.Segment(fd, rank, ranks, slot, heap, *patience, *thresholds, *crews)
        return segment
    finally:
        os.close(fd)


def _tell(sharing: RunningCollective, lane: Lane, neighbours: Sequence[int], offer: bytes) -> bytes:
    """The first neighbour's offer, on all of them; zeros if it has none."""
    leader, *others = neighbours
    slot = np.zeros(_OFFER.size, np.uint8)
    if offer:
        slot[:] = np.frombuffer(offer, np.uint8)
    if lane.rank == leader:
        step = Step(sends=tuple(Send(peer, 0) for peer in others))
    else:
        step = Step(recvs=(Recv(leader, 0),))
    run(Schedule.of([step]), lane, [slot], sharing.fingerprint, sharing.deadline, check_peers=sharing.check_peers)
    return slot.tobytes()
