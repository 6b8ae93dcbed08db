"""The classic star: rank 0 is connected with everyone, the others with rank 0 only."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ...arguments import as_rank, as_world_size
from ...config import Options, options_of, timeouts
from ...deadline import Deadline
from ...rendezvous.classic import form_star
from ...types import Address
from ..base import LaneBackend
from ..contexts import WORLD_CONTEXT
from ..lane import Lane
from .lane import open_classic_lane
from .world import ClassicWorld, Peers, as_peers

__all__ = ["TcpBackend"]


class TcpBackend(LaneBackend):
    """The star of the classic wire, which ferrotorch ranks can share. No authentication: for networks you trust.

    Args:
        rank: This rank; rank 0 listens on `master`.
        world_size: At least 2.
        master: `"host:port"`.
        peers: `"ferrotorch"` if some ranks are ferrotorch's: then nothing but its own bytes goes over the wire, and the
            collectives of a group are its own (see docs/classic-wire.md).
        timeout: Seconds for forming the world, and the default of every operation; without it 30 s to form, and what
            `PHALANX_TIMEOUT` says, or ten minutes, for an operation.

    Raises:
        InvalidRank, InvalidWorldSize: Before any socket is opened.
        RendezvousError: The world did not form.
    """

    topology = "star"

    def __init__(
        self,
        rank: int,
        world_size: int,
        master: str | Address,
        *,
        peers: Peers = "phalanx",
        timeout: float | None = None,
        options: Options | None = None,
    ) -> None:
        peers = as_peers(peers)
        options, times = options_of(options), timeouts(timeout)
        world_size = as_world_size(world_size, 2)
        rank = as_rank(rank, world_size)
        streams = form_star(rank, world_size, master, Deadline(times.meeting))
        self.world = ClassicWorld(rank, world_size, streams, options, peers)
        self.peers = peers
        super().__init__(
            rank, range(world_size), self.world, context=WORLD_CONTEXT, timeouts=times, options=self.world.options
        )
        self.raw_messages()  # a message may come before the first call
        self._close_when_dropped(functools.partial(self.world.close, times.meeting))

    def open_lane(self, context: bytes, number: int, ranks: Sequence[int]) -> Lane:
        self.check_usable()
        return open_classic_lane(self.world, context, number, tuple(ranks))

    def _close(self) -> None:
        self.world.close(self.meeting_timeout)

    def after_fork_in_child(self, parent_pid: int) -> None:
        super().after_fork_in_child(parent_pid)
        self.world.abandon()
