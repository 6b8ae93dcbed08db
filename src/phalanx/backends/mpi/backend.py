"""MPI: the data goes through the MPI that started this job, the control plane through Phalanx's own connections."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Literal

from ...config import Launch, Options, options_of, started_as, timeouts
from ...deadline import Deadline
from ...errors import ConfigError
from ...types import Address
from ..base import LaneBackend
from ..contexts import WORLD_CONTEXT, derive_context
from ..control_plane import ControlPlane
from ..lane import Lane
from ..mesh.ports import MeshPort
from ..mesh.world import MeshWorld
from ..ports import Accept, LinkPort
from .context import MpiContext
from .forming import all_host_ids, communicators, meet_over_mpi
from .lane import MpiLane
from .library import Mpi, load_mpi
from .messages import MpiMessages

__all__ = ["MpiBackend"]


class MpiBackend(LaneBackend):
    """All ranks of the MPI job that this process belongs to (`mpirun`, `mpiexec`, `srun`).

    Rank and world size are MPI's. The control plane, which knows the state of each rank, uses Phalanx's own,
    authenticated connections. Rank 0 sends their address and token over MPI: nothing has to be configured.

    Args:
        timeout: Seconds for forming the world, and the default of every operation; without it 30 s to form, and what
            `PHALANX_TIMEOUT` says, or ten minutes, for an operation.
        options: As for `phalanx.init`.
        master: Where on rank 0 the control plane listens, as `"host:port"`. None: where it is found by itself.
        token: Of the control plane; a fresh one if it is not given.
        auth: `"none"` runs the control plane without a token.

    Raises:
        BackendUnavailable: There is no mpi4py, or no MPI; names what to install.
        ConfigError: The launcher is another MPI's, or an option cannot be used with MPI.
        RendezvousError: The world did not form.
    """

    def __init__(
        self,
        *,
        timeout: float | None = None,
        options: Options | None = None,
        master: str | Address | None = None,
        token: str | bytes | None = None,
        auth: Literal["token", "none"] = "token",
    ) -> None:
        options, times = options_of(options), timeouts(timeout)
        if auth not in ("token", "none"):
            raise ConfigError(f"auth={auth!r} is not valid (expected 'token' or 'none')")
        if auth == "none" and token is not None:
            raise ConfigError("auth='none' does not go with a token (leave one of them out)")
        if options.tls is not None:
            raise ConfigError("Phalanx cannot encrypt the traffic of MPI (leave tls out, or use backend='mesh')")
        if options.algorithm is not None:
            raise ConfigError("on MPI the algorithms are MPI's own (leave algorithm out, or use backend='mesh')")
        self.mpi = load_mpi()
        _check_launcher(self.mpi)
        deadline = Deadline(times.meeting)
        self._comms = communicators(self.mpi, deadline)
        world = self._comms.world
        rank, size = world.rank, world.size
        hosts = all_host_ids(self.mpi, world, deadline)
        neighbours = [other for other in range(size) if hosts[other] == hosts[rank]]
        self.world: MeshWorld | None = None
        control, context = ControlPlane(0), WORLD_CONTEXT
        if size > 1:
            launch = Launch(
                rank=rank,
                world_size=size,
                local_rank=neighbours.index(rank),
                local_world_size=len(neighbours),
                single_host=len(neighbours) == size,
                master=None,
                directory=None,
                master_port_taken=False,
                token=None,
                launcher="mpi",
                job="",
            )
            meeting, context = meet_over_mpi(
                self.mpi,
                world,
                launch,
                master=Address.parse(master) if isinstance(master, str) else master,
                token=token,
                auth=auth,
                options=options,
                deadline=deadline,
            )
            control = self.world = MeshWorld(
                launch, auth=auth, timeout=deadline.remaining(), options=options, meeting=meeting
            )
        super().__init__(rank, range(size), control, context=context, timeouts=times, options=options)
        self._lanes: weakref.WeakSet[MpiLane] = weakref.WeakSet()
        oversubscribed = self.world is not None and self.world.oversubscribed
        self.messages = MpiMessages(self.mpi, self._comms, context, options, oversubscribed=oversubscribed)
        self.engine_context = MpiContext(self.mpi, world, oversubscribed=oversubscribed)
        if self.world is not None:
            self.take_hosts(self.world.roster.values())
        self.raw_messages()  # a message may come before the first call

    def open_lane(self, context: bytes, number: int, ranks: Sequence[int]) -> Lane:
        self.check_usable()
        ranks = list(ranks)
        name = derive_context(context, "lane", number)
        lane = MpiLane(self.messages, name, ranks.index(self._rank), ranks, self.control)
        self._lanes.add(lane)
        return lane

    def open_port(self, context: bytes, number: int, ranks: Sequence[int], accept: Accept) -> LinkPort:
        if self.world is None:
            return super().open_port(context, number, ranks, accept)
        self.check_usable()
        return MeshPort(self.world, (context, number), ranks, accept)

    def _close(self) -> None:
        world = self.world
        lost = self.control.ended is not None or self.control.has_lost_ranks
        self.mpi.broken |= lost
        for lane in list(self._lanes):  # of groups that outlive their backend
            lane.close()
        if world is not None:
            with self.messages.kept_moving():
                world.close(self.meeting_timeout)
        self.messages.close()
        self._comms.in_use = lost

    def after_fork_in_child(self, parent_pid: int) -> None:
        super().after_fork_in_child(parent_pid)
        self.mpi.broken = True  # the child must not finalize the parent's MPI
        for lane in list(self._lanes):  # and the child must not use the fast paths of the parent's groups
            lane.interrupt(False)
        if self.world is not None:
            self.world.abandon()


def _check_launcher(mpi: Mpi) -> None:
    """Refuses a world of another size than the launcher started. Several worlds of one rank would look like success.

    Raises:
        ConfigError: The launcher is not an MPI's, or that of another MPI than mpi4py uses.
    """
    size = mpi.module.COMM_WORLD.size
    started = started_as()
    if started is None or started[1].value == size:
        return
    launcher, expected = started
    sees = "takes this process for the only one" if size == 1 else f"has {size} processes"
    world = f"{launcher.title} started a world of {expected.value} ({expected})"
    words = f"{world}, but {mpi.version}, which mpi4py uses, {sees}"
    if launcher.sets_master:
        raise ConfigError(
            f"{words}: backend='mpi' needs MPI's own launcher (as in `mpirun -n {expected.value} python …`), or use "
            "backend='mesh'"
        )
    raise ConfigError(
        f"{words}: the launcher belongs to another MPI (use the mpirun of this one, or set MPI4PY_LIBMPI to the "
        "libmpi.so of the other)"
    )
