"""Forming a world on MPI: its communicators, and the address of its control plane."""

from __future__ import annotations

import contextlib
import secrets
import socket
from typing import Any, Literal

import msgspec
import numpy as np

from ...config import Launch, Options
from ...deadline import Deadline
from ...errors import ConfigError, PhalanxError, WorldNotFormed
from ...exception_text import message_of
from ...rendezvous.addresses import interface_address
from ...rendezvous.host import host_id
from ...rendezvous.hosting.start import HostedDirectory
from ...rendezvous.meeting import Meeting
from ...rendezvous.token_file import new_token
from ...transports.tcp import is_loopback
from ...types import Address
from .library import Mpi

__all__ = ["Communicators", "all_host_ids", "communicators", "meet_over_mpi"]

_INVITATION = 4096
"""Bytes of the message in which rank 0 says where it hosts the directory."""
MAX_PROBLEM = 800
"""Characters of an error that rank 0 reports instead: they fit, even if each takes four bytes."""
_HOST_ID = 128
_SETS = 63
"""Worlds that may be open at the same time in one process."""


class Communicators:
    """Three communicators of all ranks: for making groups, for the heads of messages and for their bodies.

    They are never freed. A message that was not received may still be on its way when its world is closed, and MPI may
    deliver it to the next communicator with the same number.
    """

    def __init__(self, world: Any, heads: Any, bodies: Any) -> None:
        self.world, self.heads, self.bodies = world, heads, bodies
        self.in_use = True


def communicators(mpi: Mpi, deadline: Deadline) -> Communicators:
    """A set of communicators that no other world uses: one that all ranks have given back, or a new one.

    Raises:
        WorldNotFormed: Not all ranks of the job take part.
        ConfigError: Too many worlds are open.
    """
    if mpi.base is None:
        mpi.base = _duplicate(mpi, deadline)
    known: list[Communicators] = mpi.communicators
    free = sum(1 << number for number, one in enumerate(known) if not one.in_use)
    mine, common = np.array([free], np.int64), np.zeros(1, np.int64)
    with mpi.lock:
        request = mpi.base.Iallreduce(mine, common, mpi.module.BAND)
    finish(mpi, request, deadline)
    if common[0]:
        chosen = known[(int(common[0]) & -int(common[0])).bit_length() - 1]
        chosen.in_use = True
        return chosen
    if len(known) == _SETS:
        raise ConfigError(f"{_SETS} worlds on MPI are open in this process (close one of them first)")
    known.append(Communicators(*(_duplicate(mpi, deadline) for _ in range(3))))
    return known[-1]


def _duplicate(mpi: Mpi, deadline: Deadline) -> Any:
    with mpi.lock:
        comm, request = mpi.module.COMM_WORLD.Idup()
    finish(mpi, request, deadline)
    comm.Set_errhandler(mpi.module.ERRORS_RETURN)
    return comm


def finish(mpi: Mpi, request: Any, deadline: Deadline) -> None:
    """Waits for a request in which all ranks of the job take part.

    Raises:
        WorldNotFormed: Not all of them took part in time.
    """
    if not mpi.wait(request, deadline):
        mpi.broken = True
        size = mpi.module.COMM_WORLD.size
        raise WorldNotFormed(
            f"the world did not form within {deadline.seconds:g} s: not all {size} processes of this MPI job have "
            "called phalanx.init('mpi') or made an MpiBackend",
            seconds=deadline.seconds,
        )


def all_host_ids(mpi: Mpi, comm: Any, deadline: Deadline) -> list[bytes]:
    """The identity of each rank's host."""
    mine = np.zeros(_HOST_ID, np.uint8)
    name = host_id().encode("utf-8", "surrogateescape")[:_HOST_ID]
    mine[: len(name)] = np.frombuffer(name, np.uint8)
    everyone = np.zeros((comm.size, _HOST_ID), np.uint8)
    with mpi.lock:
        request = comm.Iallgather(mine, everyone)
    finish(mpi, request, deadline)
    return [row.tobytes() for row in everyone]


# -- the control plane -------------------------------------------------------------------------------------------------


class _Invitation(msgspec.Struct):
    """The message of rank 0 to all ranks over MPI."""

    addresses: list[tuple[str, int]]
    token: bytes | None
    context: bytes
    """Different for every world of the same processes."""
    problem: str = ""


_decode = msgspec.msgpack.Decoder(_Invitation).decode


def meet_over_mpi(
    mpi: Mpi,
    comm: Any,
    launch: Launch,
    *,
    master: Address | None,
    token: str | bytes | None,
    auth: Literal["token", "none"],
    options: Options,
    deadline: Deadline,
) -> tuple[Meeting, bytes]:
    """Rank 0 hosts the directory and tells the others over MPI where, and with which token.

    Returns:
        Where the ranks meet, and the context of their world.

    Raises:
        ConfigError: Rank 0 cannot host it.
        WorldNotFormed: Not all ranks of the job take part.
    """
    directory: HostedDirectory | None = None
    invitation = _Invitation([], None, b"")
    slot = np.zeros(_INVITATION, np.uint8)
    if launch.rank == 0:
        given = token.encode() if isinstance(token, str) else token
        invitation = _Invitation([], (given or new_token()) if auth == "token" else None, secrets.token_bytes(16))
        try:
            names = _own_addresses(master, options, all_local=launch.single_host)
            bind = Address(names[0] if len(names) == 1 else "", master.port if master is not None else 0)
            directory = HostedDirectory(
                launch.world_size, token=invitation.token, bind=bind, options=options, rank=launch.rank
            )
            invitation.addresses = [(name, directory.address.port) for name in names]
        except PhalanxError as error:
            invitation.problem = message_of(error)[:MAX_PROBLEM]
        data = msgspec.msgpack.encode(invitation)
        slot[: len(data)] = np.frombuffer(data, np.uint8)
        slot[-2:] = divmod(len(data), 256)
    try:
        with mpi.lock:
            request = comm.Ibcast(slot, 0)
        finish(mpi, request, deadline)
    except BaseException:
        if directory is not None:
            directory.close()
        raise
    length = 256 * int(slot[-2]) + int(slot[-1])
    invitation = _decode(slot[:length].tobytes())
    if invitation.problem:
        raise ConfigError(f"rank 0 cannot host the control plane: {invitation.problem}")
    addresses = [Address(host, port) for host, port in invitation.addresses]
    return Meeting(addresses, invitation.token, launch.single_host, directory=directory), invitation.context


def _own_addresses(master: Address | None, options: Options, *, all_local: bool) -> list[str]:
    """Addresses at which other hosts may reach this one, best first."""
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
