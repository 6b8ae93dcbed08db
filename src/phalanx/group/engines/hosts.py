"""Collectives over several hosts: the segment inside each, the network between them.

Every host has as many carriers, its first members. Data is combined or put together inside the host first; carrier k of
each host then deals with the k-th part of it, together with the other hosts' carriers k; and inside the host everybody
gets everything. So each byte crosses a host boundary once per host at most, and all carriers share the network.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...algorithms import chunk_bounds
from ...backends.lane import Lane
from ..data.reduction import Reduction
from ..running_collective import RunningCollective
from . import network, segment_setup
from .base import Engine, EngineSetup, Flat, split
from .network import NetworkEngine
from .segment import SegmentEngine

__all__ = ["HostEngine", "start"]


def start(setup: EngineSetup) -> Engine | None:
    """The engine of a group on several hosts, of which some have several members; None if those cannot share memory.

    Raises:
        DeadlinePassed, FingerprintMismatch, PhalanxError: As `steps.run`.
    """
    lane, hosts = setup.lane, segment_setup.memory_groups(setup.backend)
    mine = next(ranks for ranks in hosts if lane.rank in ranks)
    shared, segment = segment_setup.open_segment(setup, mine, heap=setup.backend.options.segment_heap)
    if not shared:
        return None
    local: SegmentEngine | None = None
    if segment is not None:
        segment_setup.end_with_lane(segment, lane)
        local = SegmentEngine(segment, lane.rank, mine, lane)
    return HostEngine(lane, hosts, local, network.start(setup))


class HostEngine(Engine):
    """A segment in each host, and columns of carriers across hosts.

    Args:
        hosts: The ranks of the group by host.
        local: This host's segment; None if this rank is alone on its host.
        network: All ranks of the group, for what goes straight from rank to rank.
    """

    def __init__(
        self, lane: Lane, hosts: Sequence[Sequence[int]], local: SegmentEngine | None, network: NetworkEngine
    ) -> None:
        super().__init__(lane.rank, lane.size)
        self._hosts = hosts
        self._local = local
        self._network = network
        self.segment = local.segment if local is not None else None
        self._host = next(number for number, ranks in enumerate(hosts) if lane.rank in ranks)
        self._ranks = list(hosts[self._host])
        self._place = self._ranks.index(lane.rank)
        self._carriers = min(len(ranks) for ranks in hosts)
        self._column: NetworkEngine | None = None
        if self._place < self._carriers:
            column = [ranks[self._place] for ranks in hosts]
            self._column = network.among(column)

    def flush(self, seconds: float) -> None:
        if self._local is not None:
            self._local.flush(seconds)

    # -- inside the host -----------------------------------------------------------------------------------------------

    def _parts(self, flat: Flat) -> list[Flat]:
        """The part of each member of the host: one for every carrier, none for the others."""
        parts = [flat[start:stop] for start, stop in chunk_bounds(flat.size, self._carriers)]
        return parts + [flat[:0]] * (len(self._ranks) - self._carriers)

    def _share_parts(self, running: RunningCollective, flat: Flat) -> None:
        """Gives everybody on the host what the carriers have, each its part."""
        if self._local is not None:
            parts = self._parts(flat)
            self._local.all_gather(running, parts[self._place], flat, [part.size for part in parts])

    def _sum_up(self, running: RunningCollective, flat: Flat, reduction: Reduction) -> None:
        if self._local is not None:
            self._local.all_reduce(running, flat, reduction.partial)

    # ------------------------------------------------------------------------------------------------------------------

    def barrier(self, running: RunningCollective) -> None:
        if self._local is not None:
            self._local.barrier(running)
        if self._column is not None and self._place == 0:
            self._column.barrier(running)
        if self._local is not None:
            self._local.barrier(running)

    def broadcast(self, running: RunningCollective, flat: Flat, src: int) -> None:
        home = next(number for number, ranks in enumerate(self._hosts) if src in ranks)
        if self._host == home and self._local is not None:
            self._local.broadcast(running, flat, self._ranks.index(src))
        if self._column is not None:
            self._column.broadcast(running, self._parts(flat)[self._place], home)
        if self._host != home:
            self._share_parts(running, flat)

    def all_reduce(self, running: RunningCollective, flat: Flat, reduction: Reduction) -> None:
        reduction.begin_in_place(flat, self.size)
        self._sum_up(running, flat, reduction)
        if self._column is not None:
            part = self._parts(flat)[self._place]
            self._column.all_reduce(running, part, reduction.partial)
            reduction.finish(part, self.size)
        self._share_parts(running, flat)

    def reduce(self, running: RunningCollective, flat: Flat, dst: int, reduction: Reduction) -> None:
        home = next(number for number, ranks in enumerate(self._hosts) if dst in ranks)
        work = flat if self.rank == dst else flat.copy()  # it is left with partial results
        reduction.begin_in_place(work, self.size)
        self._sum_up(running, work, reduction)
        if self._column is not None:
            part = self._parts(work)[self._place]
            self._column.reduce(running, part, home, reduction.partial)
            if self._host == home:
                reduction.finish(part, self.size)
        if self._host == home:
            self._share_parts(running, work)

    def reduce_scatter(self, running: RunningCollective, source: Flat, target: Flat, reduction: Reduction) -> None:
        blocks = self._in_order_of_hosts(source.reshape(self.size, target.size))
        reduction.begin_in_place(blocks.reshape(-1), self.size)
        self._sum_up(running, blocks.reshape(-1), reduction)
        mine = np.empty((len(self._ranks), target.size), source.dtype)
        if self._column is not None:
            parts = [self._cut(block.reshape(-1))[self._place] for block in self._by_host(blocks)]
            part = self._parts(mine.reshape(-1))[self._place]
            self._column.reduce_scatter_parts(running, parts, part, reduction.partial)
            reduction.finish(part, self.size)
        self._share_parts(running, mine.reshape(-1))
        target[:] = mine[self._place]

    def all_gather(self, running: RunningCollective, source: Flat, target: Flat, counts: Sequence[int]) -> None:
        sizes = [sum(counts[rank] for rank in ranks) for ranks in self._hosts]
        mine = np.empty(sizes[self._host], source.dtype)
        if self._local is not None:
            self._local.all_gather(running, source, mine, [counts[rank] for rank in self._ranks])
        else:
            mine[:] = source
        lengths = [[part.size for part in self._cut(np.empty(size, np.uint8))] for size in sizes]
        shares = [sum(length[k] for length in lengths) for k in range(self._carriers)]
        shares += [0] * (len(self._ranks) - self._carriers)
        everything = np.empty(sum(shares), source.dtype)
        share = split(everything, shares)[self._place]
        if self._column is not None:
            column = [length[self._place] for length in lengths]
            self._column.all_gather(running, self._cut(mine)[self._place], share, column)
        if self._local is not None:
            self._local.all_gather(running, share, everything, shares)
        # Carrier after carrier, in each host after host: put back in the order of ranks.
        columns = [
            split(part, [length[k] for length in lengths])
            for k, part in enumerate(split(everything, shares[: self._carriers]))
        ]
        places = split(target, counts)
        for number, ranks in enumerate(self._hosts):
            block = np.concatenate([column[number] for column in columns])
            for rank, part in zip(ranks, split(block, [counts[rank] for rank in ranks]), strict=True):
                places[rank][:] = part

    # What goes from one rank to another crosses each boundary once anyway.

    def gather(
        self, running: RunningCollective, source: Flat, target: Flat | None, dst: int, counts: Sequence[int]
    ) -> None:
        self._network.gather(running, source, target, dst, counts)

    def scatter(
        self, running: RunningCollective, source: Flat | None, target: Flat, src: int, counts: Sequence[int]
    ) -> None:
        self._network.scatter(running, source, target, src, counts)

    def scan(self, running: RunningCollective, flat: Flat, reduction: Reduction, *, exclusive: bool) -> None:
        self._network.scan(running, flat, reduction, exclusive=exclusive)

    def all_to_all(self, running: RunningCollective, source: Flat, target: Flat, sizes: npt.NDArray[np.int64]) -> None:
        self._network.all_to_all(running, source, target, sizes)

    # -- order ---------------------------------------------------------------------------------------------------------

    def _cut(self, block: Flat) -> list[Flat]:
        return [block[start:stop] for start, stop in chunk_bounds(block.size, self._carriers)]

    def _in_order_of_hosts(self, rows: Flat) -> Flat:
        """A copy of rows by rank, host after host."""
        ordered: Flat = rows[[rank for ranks in self._hosts for rank in ranks]]
        return ordered

    def _by_host(self, rows: Flat) -> list[Flat]:
        return split(rows, [len(ranks) for ranks in self._hosts])
