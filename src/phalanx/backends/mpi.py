"""MPI: the data goes through the MPI that started this job, the control plane through Phalanx's own connections."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from ..config import Launch, Options
from ..deadline import Deadline
from ..errors import ConfigError, PhalanxError, WorldNotFormed
from ..rendezvous.addresses import interface_address
from ..rendezvous.directory import Directory
from ..rendezvous.host import host_id
from ..rendezvous.meeting import Meeting
from ..rendezvous.token_file import new_token
from ..transports.tcp import is_loopback
from ..types import Address
from .base import DEFAULT_TIMEOUT, WORLD_CONTEXT, LaneBackend, derive_context
from .control_plane import ControlPlane
from .lane import Lane
from .links import Accept, LinkPort
from .mesh_world import MeshWorld
from .mpi_lane import MpiLane
from .mpi_library import Mpi, load_mpi
from .mpi_post import Post

__all__ = ["Messenger", "MpiBackend"]

_PLACES = 4096
"""Bytes in which rank 0 says where it hosts the directory."""


class _Invitation(msgspec.Struct):
    """What rank 0 tells everybody over MPI."""

    addresses: list[tuple[str, int]]
    token: bytes | None
    context: bytes
    """Of its own for every world of the same processes."""
    problem: str = ""


class Messenger:
    """What the groups of a world need to use MPI themselves.

    Args:
        world: A communicator of all ranks that nobody else uses.
    """

    def __init__(self, mpi: Mpi, world: Any, post: Post) -> None:
        self.mpi = mpi
        self.world = world
        self.post = post
        self.crowded = post.crowded


class MpiBackend(LaneBackend):
    """All ranks of the MPI job that this process belongs to (`mpirun`, `mpiexec`, `srun`).

    Rank and world size are MPI's. Who is alive, who is lost and what everybody does is told over Phalanx's own,
    authenticated connections, whose address and token rank 0 gives out over MPI: nothing has to be configured.

    Args:
        timeout: For forming the world, and the default of every operation.
        options: As for `phalanx.init`.
        master: Where on rank 0 the control plane listens, as `"host:port"`. None: where it is found by itself.
        token: Of the control plane; a fresh one if it is not given.
        auth: `"none"` runs the control plane without a token.

    Raises:
        BackendUnavailable: There is no mpi4py, or no MPI; names what to install.
        RendezvousError: The world did not form.
    """

    def __init__(
        self,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        options: Options | None = None,
        master: str | Address | None = None,
        token: str | bytes | None = None,
        auth: Literal["token", "none"] = "token",
    ) -> None:
        options = options or Options.from_env()
        if auth not in ("token", "none"):
            raise ConfigError(f"auth={auth!r} is not valid (expected 'token' or 'none')")
        if auth == "none" and token is not None:
            raise ConfigError("auth='none' does not go with a token (leave one of them out)")
        self.mpi = load_mpi()
        deadline = Deadline(timeout)
        self._comms = [_duplicate(self.mpi, deadline) for _ in range(3)]
        rank, size = self._comms[0].rank, self._comms[0].size
        hosts = _all_host_ids(self.mpi, self._comms[0], deadline)
        neighbours = [other for other in range(size) if hosts[other] == hosts[rank]]
        crowded = len(neighbours) > (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
        self.post = Post(self.mpi, self._comms[1], self._comms[2], options, crowded=crowded)
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
            meeting, context = self._meet(
                launch, Address.parse(master) if isinstance(master, str) else master, token, auth, options, deadline
            )
            control = self.world = MeshWorld(
                launch, auth=auth, timeout=deadline.remaining(), options=options, meeting=meeting
            )
        super().__init__(rank, range(size), control, context=context, timeout=timeout, options=options)
        self._lanes: weakref.WeakSet[MpiLane] = weakref.WeakSet()
        self.messenger = Messenger(self.mpi, self._comms[0], self.post)
        if self.world is not None:
            self.hosts = tuple(member.hostname for member in self.world.roster)
            self.host_ids = tuple(member.host_id for member in self.world.roster)
            self.memory_ids = tuple(member.memory for member in self.world.roster)
        self._raw_lane()  # a message may come before the first call

    def _meet(
        self,
        launch: Launch,
        master: Address | None,
        token: str | bytes | None,
        auth: Literal["token", "none"],
        options: Options,
        deadline: Deadline,
    ) -> tuple[Meeting, bytes]:
        """Rank 0 hosts the directory and tells the others over MPI where, and with which token."""
        directory: Directory | None = None
        invitation = _Invitation([], None, WORLD_CONTEXT)
        if launch.rank == 0:
            invitation.context = secrets.token_bytes(16)
            if auth == "token":
                given = token.encode() if isinstance(token, str) else token
                invitation.token = given or new_token()
            try:
                names = _own_addresses(master, options, all_local=launch.single_host)
                bind = Address(names[0] if len(names) == 1 else "", master.port if master is not None else 0)
                directory = Directory(
                    launch.world_size, token=invitation.token, bind=bind, options=options, one_world=True
                )
                invitation.addresses = [(name, directory.address.port) for name in names]
            except PhalanxError as error:
                invitation.problem = str(error)
        slot = np.zeros(_PLACES, np.uint8)
        if launch.rank == 0:
            data = msgspec.msgpack.encode(invitation)
            slot[: len(data)] = np.frombuffer(data, np.uint8)
            slot[-2:] = divmod(len(data), 256)
        _finish(self.mpi, self._comms[0].Ibcast(slot, 0), deadline, self._comms[0].size)
        length = 256 * int(slot[-2]) + int(slot[-1])
        invitation = msgspec.msgpack.decode(slot[:length].tobytes(), type=_Invitation)
        if invitation.problem:
            raise ConfigError(f"rank 0 cannot host the control plane: {invitation.problem}")
        addresses = [Address(host, port) for host, port in invitation.addresses]
        return Meeting(addresses, invitation.token, launch.single_host, directory=directory), invitation.context

    def open_lane(self, context: bytes, number: int, ranks: Sequence[int]) -> Lane:
        self.check_usable()
        ranks = list(ranks)
        name = derive_context(context, "lane", number)
        lane = MpiLane(self.post, name, ranks.index(self._rank), ranks, self.control)
        self._lanes.add(lane)
        return lane

    def open_port(self, context: bytes, number: int, ranks: Sequence[int], accept: Accept) -> LinkPort:
        if self.world is None:
            return super().open_port(context, number, ranks, accept)
        self.check_usable()
        return self.world.open_port(context, number, tuple(ranks), accept)

    def _close(self) -> None:
        world = self.world
        lost = self.control.ended is not None or self.control.has_lost_ranks
        self.mpi.broken |= lost
        for lane in list(self._lanes):  # of groups that outlive their backend
            lane.close()
        if world is not None:
            with self.post.kept_moving():
                world.close(self.timeout)
        self.post.close()
        if not lost and not self.mpi.left_under_way:
            for comm in self._comms:
                with contextlib.suppress(self.mpi.module.Exception), self.mpi.lock:
                    comm.Free()

    def after_fork_in_child(self, parent_pid: int) -> None:
        super().after_fork_in_child(parent_pid)
        self.mpi.broken = True  # the parent's MPI is not the child's to end
        if self.world is not None:
            self.world.abandon()


def _finish(mpi: Mpi, request: Any, deadline: Deadline, size: int) -> None:
    """Waits for something in which all ranks of the job take part.

    Raises:
        WorldNotFormed: Not all did.
    """
    if not mpi.wait(request, deadline):
        mpi.broken = True
        raise WorldNotFormed(
            f"the world did not form within {deadline.seconds:g} s: not all {size} processes of this MPI job have "
            "called phalanx.init('mpi') or made an MpiBackend"
        )


def _duplicate(mpi: Mpi, deadline: Deadline) -> Any:
    with mpi.lock:
        comm, request = mpi.module.COMM_WORLD.Idup()
    _finish(mpi, request, deadline, mpi.module.COMM_WORLD.size)
    comm.Set_errhandler(mpi.module.ERRORS_RETURN)
    return comm


def _all_host_ids(mpi: Mpi, comm: Any, deadline: Deadline) -> list[bytes]:
    mine = np.zeros(128, np.uint8)
    name = host_id().encode()[:128]
    mine[: len(name)] = np.frombuffer(name, np.uint8)
    everyone = np.zeros((comm.size, 128), np.uint8)
    with mpi.lock:
        request = comm.Iallgather(mine, everyone)
    _finish(mpi, request, deadline, comm.size)
    return [row.tobytes() for row in everyone]


def _own_addresses(master: Address | None, options: Options, *, all_local: bool) -> list[str]:
    """Where the others may find this host, best first."""
    if master is not None:
        return [master.host]
    if options.interface is not None:
        return [interface_address(options.interface)]
    if all_local:
        return ["127.0.0.1"]
    found: list[str] = []
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ConfigError):
            found.append(interface_address(name))
    usable = list(dict.fromkeys(address for address in found if not is_loopback(address) and "%" not in address))
    if not usable:
        raise ConfigError("this host has no address that other hosts could reach (PHALANX_INTERFACE names one)")
    return usable
