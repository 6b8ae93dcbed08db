"""The mesh: every rank can talk to every other, over TCP."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ...algorithms.classic import BarrierMessage, ring_barrier
from ...arguments import as_rank, as_world_size, shown
from ...config import Launch, Options, Timeouts, detect, four_variables, options_of, timeouts
from ...deadline import Deadline
from ...errors import ConfigError
from ...types import Address
from ...wire.control import Regroup, View
from ..base import LaneBackend
from ..classic.lane import open_classic_lane
from ..classic.world import CLASSIC_BIND, ClassicWorld, Peers, as_peers
from ..contexts import WORLD_CONTEXT, derive_context
from ..lane import Lane
from ..ports import Accept, LinkPort
from .lane import MeshLane
from .ports import MeshPort
from .view import ViewBackend
from .world import MeshWorld

if TYPE_CHECKING:
    from ...rendezvous.meeting import Meeting

__all__ = ["MeshBackend"]


class MeshBackend(LaneBackend):
    """A rank that can reach every other directly.

    Args:
        rank: This rank.
        world_size: How many there are.
        master: `"host:port"` where rank 0 hosts the directory (Phalanx wire) or the rendezvous (classic wire).
        wire: `"phalanx"`, authenticated and made for failure; or `"classic"`, to share a world with ferrotorch ranks,
            with neither authentication nor a directory.
        token: The job's secret; without one, ranks on one host share one through a private file.
        auth: `"none"` runs without any token.
        bind_addr: Classic wire only: where this rank listens for its peers, as `"host:port"`.
        peers: Classic wire only: `"ferrotorch"` if some ranks are ferrotorch's. Then nothing but its own bytes goes
            over the wire, and the collectives of a group are its own (see docs/classic-wire.md).
        timeout: Seconds for forming the world, and the default of every operation; without it 30 s to form, and what
            `PHALANX_TIMEOUT` says, or ten minutes, for an operation.

    Raises:
        InvalidRank, InvalidWorldSize: `rank` or `world_size` is not valid.
        RendezvousError: The world did not form.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        master: str | Address | None,
        *,
        wire: Literal["phalanx", "classic"] = "phalanx",
        token: str | bytes | None = None,
        auth: Literal["token", "none"] = "token",
        bind_addr: str | Address | None = None,
        peers: Peers = "phalanx",
        timeout: float | None = None,
        options: Options | None = None,
    ) -> None:
        options, times = options_of(options), timeouts(timeout)
        if not isinstance(wire, str):
            raise ConfigError(f"wire={shown(wire)} is not valid (expected 'phalanx' or 'classic')")
        peers = as_peers(peers)
        if wire == "classic":
            from ...rendezvous.classic import form_mesh  # most worlds never need it

            if token is not None or options.tls is not None:
                raise ConfigError("the classic wire has neither token nor TLS (use wire='phalanx')")
            world_size = as_world_size(world_size, 2)
            rank = as_rank(rank, world_size)
            connected = form_mesh(rank, world_size, master, bind_addr or CLASSIC_BIND, Deadline(times.meeting))
            self._start(ClassicWorld(rank, world_size, connected, options, peers), times)
        elif wire == "phalanx":
            if peers != "phalanx":
                raise ConfigError(f"peers={peers!r} belongs to the classic wire (use wire='classic')")
            if bind_addr is not None:
                raise ConfigError(
                    "bind_addr belongs to the classic wire (use options.interface and options.port_range)"
                )
            launch = detect(rank=rank, world_size=world_size, master=master, token=token)
            self._start(MeshWorld(launch, auth=auth, timeout=times.meeting, options=options), times)
        else:
            raise ConfigError(f"wire={shown(wire)} is not valid (expected 'phalanx' or 'classic')")

    @classmethod
    def from_env(
        cls,
        *,
        wire: Literal["phalanx", "classic"] = "phalanx",
        token: str | bytes | None = None,
        auth: Literal["token", "none"] = "token",
        bind_addr: str | Address | None = None,
        peers: Peers = "phalanx",
        timeout: float | None = None,
        options: Options | None = None,
    ) -> MeshBackend:
        """The backend of the rank that `MASTER_ADDR`, `MASTER_PORT`, `RANK` and `WORLD_SIZE` describe.

        Raises:
            MissingVariable: One of the four is not set; the error names it.
            ConfigError: One of them cannot be read.
            As the constructor.
        """
        rank, world_size, master = four_variables()
        return cls(
            rank,
            world_size,
            master,
            wire=wire,
            token=token,
            auth=auth,
            bind_addr=bind_addr,
            peers=peers,
            timeout=timeout,
            options=options,
        )

    @classmethod
    def from_launch(
        cls,
        launch: Launch,
        *,
        auth: Literal["token", "none"],
        timeout: float | None,
        options: Options,
        meeting: Meeting | None = None,
    ) -> MeshBackend:
        """The backend of a rank whose place was found by `phalanx.config.detect`.

        Args:
            meeting: Where the ranks meet, if that was arranged by other means; the backend closes it.
        """
        times = timeouts(timeout)
        backend = cls.__new__(cls)
        backend._start(MeshWorld(launch, auth=auth, timeout=times.meeting, options=options, meeting=meeting), times)
        return backend

    def _start(self, world: MeshWorld | ClassicWorld, times: Timeouts) -> None:
        self.world = world
        self.peers = world.peers if isinstance(world, ClassicWorld) else "phalanx"
        # A rank that joins a world is alone until the others take it in.
        is_first = world.rank < world.size
        members = range(world.size) if is_first else (world.rank,)
        context = WORLD_CONTEXT if is_first else derive_context(WORLD_CONTEXT, "alone", world.rank)
        super().__init__(
            members.index(world.rank), members, world, context=context, timeouts=times, options=world.options
        )
        self.is_world = True
        self.take_hosts([world.roster[member] for member in members])
        self.raw_messages()  # a message may come before the first call
        self._close_when_dropped(functools.partial(self.world.close, times.meeting))

    @property
    def is_alone(self) -> bool:
        """True for a rank that came to a world later, and is not yet among the others."""
        return self.world_ranks != tuple(range(self.world.size))

    def barrier_messages(self) -> Sequence[BarrierMessage]:
        if isinstance(self.world, ClassicWorld):  # as ferrotorch's mesh does it
            return ring_barrier(self.rank, self.world_size)
        return super().barrier_messages()

    def open_lane(self, context: bytes, number: int, ranks: Sequence[int]) -> Lane:
        self.check_usable()
        if isinstance(self.world, ClassicWorld):
            return open_classic_lane(self.world, context, number, tuple(ranks))
        return MeshLane(self.world, context, number, [self.world_ranks[rank] for rank in ranks])

    def open_port(self, context: bytes, number: int, ranks: Sequence[int], accept: Accept) -> LinkPort:
        if isinstance(self.world, MeshWorld):
            self.check_usable()
            return MeshPort(self.world, (context, number), [self.world_ranks[rank] for rank in ranks], accept)
        return super().open_port(context, number, ranks, accept)

    def next_view(self, request: Regroup) -> tuple[LaneBackend, View]:
        if isinstance(self.world, ClassicWorld):
            return super().next_view(request)
        self.check_usable()
        view = self.world.regroup(request)
        return ViewBackend(self, self.world, view, is_world=request.is_world), view

    def _close(self) -> None:
        self.world.close(self.meeting_timeout)

    def after_fork_in_child(self, parent_pid: int) -> None:
        super().after_fork_in_child(parent_pid)
        self.world.abandon()
