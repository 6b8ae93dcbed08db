"""The mesh: every rank can talk to every other, over TCP."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ..config import Launch, Options, detect
from ..deadline import Deadline
from ..errors import ConfigError
from ..types import Address
from .base import DEFAULT_TIMEOUT, WORLD_CONTEXT, LaneBackend, close_when_dropped
from .lane import Lane
from .links import Accept, LinkPort
from .mesh_world import MeshWorld

if TYPE_CHECKING:
    from ..rendezvous.meeting import Meeting
    from .classic import ClassicWorld

__all__ = ["MeshBackend"]


class MeshBackend(LaneBackend):
    """Every rank connected with every other.

    Args:
        rank: This rank.
        world_size: How many there are.
        master: `"host:port"` where rank 0 hosts the directory (Phalanx wire) or the rendezvous (classic wire).
        wire: `"phalanx"`, authenticated and made for failure; or `"classic"`, to share a world with ferrotorch ranks,
            with neither authentication nor a directory.
        token: The job's secret; without one, ranks on one host share one through a private file.
        auth: `"none"` runs without any token.
        bind_addr: Classic wire only: where this rank listens for its peers, as `"host:port"`.
        timeout: For forming the world, and the default of every operation.

    Raises:
        InvalidRank, InvalidWorldSize: As the numbers say.
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
        timeout: float = DEFAULT_TIMEOUT,
        options: Options | None = None,
    ) -> None:
        options = options or Options.from_env()
        if wire == "classic":
            from ..rendezvous.classic import form_mesh  # most worlds never need it
            from .classic import CLASSIC_BIND, ClassicWorld

            if token is not None or options.tls is not None:
                raise ConfigError("the classic wire has neither token nor TLS (use wire='phalanx')")
            connected = form_mesh(rank, world_size, master, bind_addr or CLASSIC_BIND, Deadline(timeout))
            self._start(ClassicWorld(rank, world_size, connected, options), timeout)
        elif wire == "phalanx":
            if bind_addr is not None:
                raise ConfigError(
                    "bind_addr belongs to the classic wire (use options.interface and options.port_range)"
                )
            launch = detect(rank=rank, world_size=world_size, master=master, token=token)
            self._start(MeshWorld(launch, auth=auth, timeout=timeout, options=options), timeout)
        else:
            raise ConfigError(f"wire={wire!r} is not valid (expected 'phalanx' or 'classic')")

    @classmethod
    def from_launch(
        cls,
        launch: Launch,
        *,
        auth: Literal["token", "none"],
        timeout: float,
        options: Options,
        meeting: Meeting | None = None,
    ) -> MeshBackend:
        """The backend of a rank whose place was found by `phalanx.config.detect`.

        Args:
            meeting: Where the ranks meet, if that was arranged by other means; the backend closes it.
        """
        backend = cls.__new__(cls)
        backend._start(MeshWorld(launch, auth=auth, timeout=timeout, options=options, meeting=meeting), timeout)
        return backend

    def _start(self, world: MeshWorld | ClassicWorld, timeout: float) -> None:
        self.world = world
        super().__init__(
            world.rank, range(world.size), world, context=WORLD_CONTEXT, timeout=timeout, options=world.options
        )
        self.hosts = tuple(member.hostname for member in world.roster)
        self.host_ids = tuple(member.host_id for member in world.roster)
        self.memory_ids = tuple(member.memory for member in world.roster)
        self._raw_lane()  # a message may come before the first call
        close_when_dropped(self, functools.partial(self.world.close, timeout))

    def open_lane(self, context: bytes, number: int, ranks: Sequence[int]) -> Lane:
        self.check_usable()
        return self.world.open_lane(context, number, tuple(ranks))

    def open_port(self, context: bytes, number: int, ranks: Sequence[int], accept: Accept) -> LinkPort:
        if isinstance(self.world, MeshWorld):
            self.check_usable()
            return self.world.open_port(context, number, tuple(ranks), accept)
        return super().open_port(context, number, ranks, accept)

    def _close(self) -> None:
        self.world.close(self.timeout)

    def after_fork_in_child(self, parent_pid: int) -> None:
        super().after_fork_in_child(parent_pid)
        self.world.abandon()
