"""How the ranks of a torch job find each other: rank 0 tells the others through torch's store where it listens.

The store is torch's, and every process that reaches it can read it. So where `PHALANX_TOKEN` is set, that is the job's
secret, which never goes through the store. Without it, rank 0 makes a fresh one and leaves it in the store until all
have come.
"""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Any

import msgspec

from ..config import Options
from ..config.reader import VariableReader
from ..config.secret import find_token
from ..deadline import Deadline
from ..errors import ConfigError, NoConnection, RendezvousError, WorldNotFormed
from ..exception_text import describe
from ..rendezvous.addresses import directory_host, is_local
from ..rendezvous.meeting import Meeting
from ..rendezvous.token_file import new_token
from ..transports.tcp import is_loopback, route_to
from ..types import Address

__all__ = ["arrange"]

LOOPBACK = "127.0.0.1"


class _StoredMeeting(msgspec.Struct, frozen=True):
    """The message that rank 0 leaves in the store."""

    address: str = ""
    token: str | None = None
    """None: every rank has it by `PHALANX_TOKEN`."""
    all_local: bool = False
    failure: str = ""
    """Why rank 0 cannot be met."""


_decode = msgspec.json.Decoder(_StoredMeeting).decode


def arrange(store: Any, rank: int, world_size: int, *, options: Options, deadline: Deadline) -> Meeting:
    """Starts the directory on rank 0 and tells the others of it.

    Args:
        store: Of torch, for this group alone.

    Raises:
        ConfigError: `PHALANX_TOKEN` is set on some ranks only, or rank 0 cannot listen.
        WorldNotFormed: Rank 0 did not say in time where it listens.
        RendezvousError: Rank 0 said that it cannot.
    """
    token = find_token(VariableReader())
    # A store may outlive a world (torchrun's does), and the next one has the same name: each has a key of its own.
    key = f"phalanx/meeting/{store.add(f'phalanx/worlds/{rank}', 1)}"
    if rank != 0:
        return _read(store, key, token, rank, deadline)
    try:
        meeting, place = _host(store, token, world_size, options)
    except Exception as error:
        _publish(store, key, _StoredMeeting(failure=describe(error)))
        raise
    meeting.on_formed = lambda: _remove(store, key)  # by then everybody has read it
    try:
        _publish(store, key, place)
    except BaseException:
        meeting.close()
        raise
    return meeting


def _host(store: Any, token: bytes | None, world_size: int, options: Options) -> tuple[Meeting, _StoredMeeting]:
    from ..rendezvous.hosting.start import HostedDirectory  # rank 0 alone needs it

    host, all_local = _my_host(store)
    fresh = new_token() if token is None else None
    directory = HostedDirectory(
        world_size,
        token=token or fresh,
        bind=Address(directory_host(host, all_local=all_local), 0),
        options=options,
        rank=0,
    )
    address = Address(host, directory.address.port)
    shown = None if fresh is None else fresh.decode()
    return Meeting([address], token or fresh, all_local, directory=directory), _StoredMeeting(
        str(address), shown, all_local
    )


def _my_host(store: Any) -> tuple[str, bool]:
    """Under which name the others find this rank, and whether they are all on this host."""
    master = _underlying(store)
    if type(master).__name__ in ("FileStore", "HashStore"):  # ranks that share files or memory share a host
        return LOOPBACK, True
    host = getattr(master, "host", None)
    if not isinstance(host, str) or not host:
        return socket.gethostname(), False
    try:
        if is_local(host):
            return host, is_loopback(host) or host == "localhost"
        return route_to(Address(host, int(getattr(master, "port", 0)))), False
    except NoConnection:
        return socket.gethostname(), False


def _underlying(store: Any) -> Any:
    """The store that is behind all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _publish(store: Any, key: str, place: _StoredMeeting) -> None:
    store.set(key, msgspec.json.encode(place).decode())


def _remove(store: Any, key: str) -> None:
    with contextlib.suppress(Exception):  # some stores cannot forget
        store.delete_key(key)


def _read(store: Any, key: str, token: bytes | None, rank: int, deadline: Deadline) -> Meeting:
    try:
        store.wait([key], timedelta(seconds=max(deadline.remaining(), 0.001)))
        place = _decode(store.get(key))
    except RuntimeError as error:  # torch's errors of a store, and of the way to it
        raise WorldNotFormed(
            f"rank 0 did not publish its address in torch's store within {deadline.seconds:g} s ({error})",
            missing=[0],
            seconds=deadline.seconds,
            rank=rank,
            peer=0,
        ) from error
    except msgspec.MsgspecError as error:
        raise RendezvousError(
            f"cannot read the address that rank 0 published in torch's store: {error}", rank=rank, peer=0
        ) from error
    if place.failure:
        raise RendezvousError(f"rank 0 could not host the meeting of the ranks: {place.failure}", rank=rank, peer=0)
    if (token is None) != (place.token is not None):
        there, here = ("rank 0", f"rank {rank}") if token is None else (f"rank {rank}", "rank 0")
        raise ConfigError(
            f"PHALANX_TOKEN is set on {there}, but not on {here} (set the same secret on all ranks, or on none)"
        )
    secret = token or (place.token or "").encode()
    return Meeting([Address.parse(place.address)], secret, place.all_local)
