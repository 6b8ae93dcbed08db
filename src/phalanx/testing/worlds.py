"""Small worlds on this machine, by name: where their ranks meet, and how one of them joins."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..arguments import shown
from ..backends import MeshBackend, SimulatedBackend, TcpBackend
from ..backends.base import LaneBackend
from ..config import Launch, Options, options_of
from ..errors import ConfigError
from ..launching.failures import check_count
from ..operating_system import hold_port
from ..rendezvous.directory import Directory
from ..types import Address

__all__ = ["KINDS", "Factory", "MeetingPlace", "join", "meeting_place", "open_world"]

KINDS = ("simulated", "mesh", "mesh-ipv6", "mesh-classic", "tcp")
"""`simulated`: threads. `mesh`: over IPv4 on loopback, `mesh-ipv6` over IPv6. `mesh-classic`: the mesh of the classic
wire. `tcp`: the classic star."""

Factory = Callable[[int, int, Address], LaneBackend]
"""Makes the backend of one rank: `(rank, world_size, master)`. The master's port is free and reserved."""


@dataclass(frozen=True)
class MeetingPlace:
    """Where the ranks of one world meet. Can be pickled, unless the factory cannot."""

    kind: str
    world_size: int
    address: Address
    token: bytes | None = None
    options: Options | None = None
    factory: Factory | None = None


@contextlib.contextmanager
def meeting_place(backend: str | Factory, world_size: int, options: Options | None) -> Iterator[MeetingPlace]:
    """Prepares a world: hosts its directory, or reserves its master's port. No port is fixed, so worlds never meet.

    Raises:
        ConfigError: There is no such kind of world.
    """
    options = None if options is None else options_of(options)
    if callable(backend):
        with _reserved_port("127.0.0.1") as master:
            yield MeetingPlace("factory", world_size, master, None, options, backend)
    elif not isinstance(backend, str) or backend not in KINDS:
        names = ", ".join(map(repr, KINDS))
        raise ConfigError(
            f"backend={shown(backend)} is not valid (expected one of {names}, or a function that makes one)"
        )
    elif backend in ("mesh", "mesh-ipv6"):
        token = secrets.token_hex(16).encode()
        host = "::1" if backend == "mesh-ipv6" else "127.0.0.1"
        # In a thread: this process only waits for the ranks, and a thread starts sooner than a process.
        directory = Directory(world_size, token=token, bind=Address(host, 0), options=options)
        try:
            yield MeetingPlace(backend, world_size, directory.address, token, options)
        finally:
            directory.close()
    else:
        with _reserved_port("127.0.0.1") as master:
            yield MeetingPlace(backend, world_size, master, None, options)


@contextlib.contextmanager
def _reserved_port(host: str) -> Iterator[Address]:
    # Bound but not listening: the kernel hands this port out to no one, but a socket with SO_REUSEADDR may bind it.
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        address = Address(*holder.getsockname())
        if not hold_port():
            holder.close()
        yield address


def join(place: MeetingPlace, rank: int, timeout: float) -> LaneBackend:
    """The backend of one rank; returns once the world has formed.

    Raises:
        RendezvousError: It did not form.
    """
    size, options = place.world_size, place.options
    if place.factory is not None:
        return place.factory(rank, size, place.address)
    if place.kind in ("tcp", "mesh-classic"):
        backend: LaneBackend
        if place.kind == "tcp":
            backend = TcpBackend(rank, size, place.address, timeout=timeout, options=options)
        else:
            backend = MeshBackend(rank, size, place.address, wire="classic", timeout=timeout, options=options)
        # On this wire no rank is told that all have come: one that is done at once would be missed by the others.
        try:
            backend.barrier()
        except BaseException:
            backend.close()
            raise
        return backend
    launch = Launch(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        single_host=True,
        master=None,
        directory=place.address,
        master_port_taken=False,
        token=place.token,
        launcher="arguments",
        job="",
    )
    return MeshBackend.from_launch(launch, auth="token", timeout=timeout, options=options_of(options))


@contextlib.contextmanager
def open_world(
    n: int, backend: str | Factory = "simulated", *, timeout: float = 30.0, options: Options | None = None
) -> Iterator[list[LaneBackend]]:
    """All backends of a world of `n` ranks, in this process, in the order of ranks; closed at the end.

    Each is to be used by a thread of its own. Over TCP the bytes go through real sockets.

    Args:
        backend: As for `run_ranks`.
        timeout: For forming the world, and the default of every operation.

    Raises:
        ConfigError: There is no such backend, or not for so many ranks.
        RendezvousError: The world did not form.
    """
    n, timeout = check_count(n, timeout)
    if backend == "simulated":
        simulated = SimulatedBackend.create_group(n, timeout=timeout)
        try:
            yield list(simulated)
        finally:
            _close_all(simulated)
        return
    with meeting_place(backend, n, options) as place:
        joined: list[Any] = [None] * n

        def enter(rank: int) -> None:
            try:
                joined[rank] = join(place, rank, timeout)
            except BaseException as error:
                joined[rank] = error

        threads = [threading.Thread(target=enter, args=(rank,), name=f"join-{rank}") for rank in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        backends = [one for one in joined if not isinstance(one, BaseException)]
        try:
            for failure in joined:
                if isinstance(failure, BaseException):
                    raise failure
            yield backends
        finally:
            _close_all(backends)


def _close_all(backends: list[Any]) -> None:
    # At the same time: a rank may wait for the others while it closes.
    threads = [threading.Thread(target=backend.close, name="close") for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
