"""Some ranks of another backend, as a backend of their own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ..arguments import as_rank, as_ranks
from ..config import Timeouts
from ..errors import InvalidRank, InvalidWorldSize
from ..wire.control import Regroup, View
from .base import Backend, LaneBackend
from .lane import Lane
from .plain import as_lane_backend
from .ports import Accept, LinkPort

__all__ = ["SubBackend"]


class SubBackend(LaneBackend):
    """A view of a parent backend, with lanes of its own: its messages never mix with the parent's.

    Only the members make it; the other ranks do not take part. `rank` is the index among the members.

    Args:
        parent: Any backend, also another `SubBackend`, or one of your own.
        members: Ranks of the parent. They are sorted, and each counts once, unless `keep_order`.
        keep_order: Number the members in the order given.
        share_stream: Send on the parent's own stream, as ferrotorch does, to share a sub-group with its ranks on a
            classic wire. Then the two kinds of traffic must not cross. Always so where the parent has such peers.
        label: Tells groups of the same members apart that ranks may make in different orders.

    Raises:
        InvalidWorldSize: There are no members.
        InvalidRank: A member is not a rank of the parent, or this rank is not a member.
    """

    owns_world = False

    def __init__(
        self,
        parent: Backend,
        members: Iterable[int],
        *,
        keep_order: bool = False,
        share_stream: bool = False,
        label: str = "sub",
    ) -> None:
        lanes = as_lane_backend(parent)
        lanes.check_usable()
        given = as_ranks(members, parent.world_size, "members")
        chosen = list(dict.fromkeys(given)) if keep_order else sorted(set(given))
        if not chosen:
            raise InvalidWorldSize(0, "a sub-group needs at least one member")
        if parent.rank not in chosen:
            names = ", ".join(map(str, chosen))
            raise InvalidRank(parent.rank, len(chosen), f"rank {parent.rank} is not in this group (members: {names})")
        self.parent = parent
        self._lanes_of = lanes
        """The parent, or the adapter that adds lanes to it."""
        self.topology = lanes.topology
        self.self_send = lanes.self_send
        self.engine_context = lanes.engine_context
        self.gpu_choice = lanes.gpu_choice
        self.members = tuple(chosen)
        """The parent's rank of each member."""
        self.peers = lanes.peers
        self._share_stream = share_stream or lanes.peers == "ferrotorch"
        self._lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
        super().__init__(
            chosen.index(parent.rank),
            [lanes.world_ranks[member] for member in chosen],
            lanes.control,
            context=lanes.next_context(label, tuple(chosen)),
            timeouts=Timeouts(lanes.timeout, lanes.meeting_timeout),
            options=lanes.options,
        )
        self.hosts = tuple(lanes.hosts[member] for member in chosen)
        self.host_ids = tuple(lanes.host_ids[member] for member in chosen)
        self.is_one_process = lanes.is_one_process
        self.memory_ids = tuple(lanes.memory_ids[member] for member in chosen)
        self.core_masks = tuple(lanes.core_masks[member] for member in chosen)

    def to_global(self, local: int) -> int:
        """The parent's rank of a member.

        Raises:
            InvalidRank: There is no such member.
        """
        return self.members[as_rank(local, self.world_size)]

    def to_local(self, rank: int) -> int | None:
        """The member that is the parent's `rank`; None if it is not a member."""
        return self.members.index(rank) if rank in self.members else None

    def send(self, data: Any, dst: int, *, timeout: float | None = None) -> None:
        if self._share_stream:
            self.parent.send(data, self.to_global(dst), timeout=timeout)
        else:
            super().send(data, dst, timeout=timeout)

    def recv(self, buffer: Any, src: int, *, timeout: float | None = None) -> None:
        if self._share_stream:
            self.parent.recv(buffer, self.to_global(src), timeout=timeout)
        else:
            super().recv(buffer, src, timeout=timeout)

    def check_usable(self) -> None:
        super().check_usable()
        self._lanes_of.check_usable()

    def open_lane(self, context: bytes, number: int, ranks: Sequence[int]) -> Lane:
        self.check_usable()
        lane = self._lanes_of.open_lane(context, number, [self.members[rank] for rank in ranks])
        self._lanes.add(lane)
        return lane

    def open_port(self, context: bytes, number: int, ranks: Sequence[int], accept: Accept) -> LinkPort:
        self.check_usable()
        return self._lanes_of.open_port(context, number, [self.members[rank] for rank in ranks], accept)

    def next_view(self, request: Regroup) -> tuple[LaneBackend, View]:
        self.check_usable()
        return self._lanes_of.next_view(request)

    def _close(self) -> None:
        for lane in list(self._lanes):  # of groups that outlive their backend
            lane.close()
