"""The addresses to listen on, and the addresses that others connect to."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import socket
import struct
import time

from ..config.options import Options
from ..deadline import Deadline
from ..errors import ConfigError, NoConnection
from ..operating_system import interface_addresses
from ..transports.tcp import is_loopback, resolve, route_to
from ..types import Address
from ..wire.control import Member

__all__ = ["directory_candidates", "directory_host", "is_local", "listen_host", "reachable_at", "wait_for_name"]

logger = logging.getLogger("phalanx.rendezvous")

CANDIDATES = 8
NAME_PAUSE = 0.5
_FIRST_PORT, _PORTS = 20_000, 12_000  # below the ports that Linux hands out by itself


def directory_candidates(master: Address, world_size: int) -> list[Address]:
    """The addresses where the directory may be when another service has the master's port (as under torchrun).

    All ranks compute the same few ports; rank 0 takes the first that is free, the others look at each until somebody
    there proves to know the job's token.
    """
    seed = hashlib.sha256(f"phalanx directory {master.port} {world_size}".encode()).digest()
    numbers = struct.unpack(f"<{CANDIDATES}H", seed[: 2 * CANDIDATES])
    return [Address(master.host, _FIRST_PORT + number % _PORTS) for number in numbers]


def interface_address(name: str, *, like: str | None = None) -> str:
    """The address of an interface given by name or by address; of the family of `like` where there is a choice.

    Raises:
        ConfigError: There is no such interface, or it has no address.
    """
    try:
        ipaddress.ip_address(name.split("%", maxsplit=1)[0])
        return name
    except ValueError:
        pass
    family = socket.AF_INET6 if like is not None and ":" in like else socket.AF_INET
    found = _ipv6_of(name) if family == socket.AF_INET6 else _ipv4_of(name)
    found = found or _ipv4_of(name) or _ipv6_of(name)
    if found is None:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(f"interface {name!r} has no address on this machine (interfaces: {names})")
    return found


def _ipv4_of(name: str) -> str | None:
    return next((found for found in _addresses_of(name) if ":" not in found), None)


def _ipv6_of(name: str) -> str | None:
    def distance(found: str) -> int:  # global, then loopback, then link-local
        return 2 if "%" in found else 1 if found == "::1" else 0

    return min((found for found in _addresses_of(name) if ":" in found), key=distance, default=None)


def _addresses_of(name: str) -> list[str]:
    return [address for interface, _, address in interface_addresses() if interface == name and address]


def wait_for_name(host: str, deadline: Deadline) -> None:
    """Waits until a host name can be resolved: in a cluster, a machine's name may appear only once it is up.

    Raises:
        NoConnection: It could not before the deadline.
    """
    warned = False
    while True:
        try:
            resolve(Address(host, 0))
            return
        except NoConnection as error:
            if deadline.remaining() <= NAME_PAUSE:
                raise
            if not warned:
                logger.warning("%s; trying for another %.0f s", error, deadline.remaining())
                warned = True
        time.sleep(NAME_PAUSE)


def is_local(host: str) -> bool:
    """True if a host name or address is this machine.

    Raises:
        NoConnection: The name cannot be resolved.
    """
    for family, sockaddr in resolve(Address(host, 0)):
        if is_loopback(sockaddr[0]):
            return True
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((sockaddr[0], 0, *sockaddr[2:]))
                return True
            except OSError:
                continue
    return False


def directory_host(master_host: str, *, all_local: bool) -> str:
    """The address that rank 0 binds the directory to: the master's own.

    A *name* that means loopback here may mean a real address on the other hosts (Debian writes the machine's own name
    next to 127.0.1.1). Then, unless all ranks are on this host, only listening on all interfaces is sure to be found.
    """
    found = [sockaddr[0] for _, sockaddr in resolve(Address(master_host, 0), passive=True)]
    misleading = all(is_loopback(address) for address in found) and not _says_loopback(master_host)
    if misleading and not all_local:
        logger.info(
            "the master's name %s means %s on this host; the directory listens on all interfaces", master_host, found[0]
        )
        return ""
    return master_host


def _says_loopback(host: str) -> bool:
    return is_loopback(host) or host == "localhost" or host.endswith(".localhost")


def listen_host(directory: Address, options: Options, *, all_local: bool) -> tuple[str, str]:
    """The address that a rank's own listener binds to, and the address that it tells the others.

    Returns:
        `(bind, advertise)`: the address of the interface that routes to the directory, or the chosen one. Where that is
        loopback only because of a misleading name, `bind` is "" (all interfaces) and others reach this rank where they
        reached the directory; see `reachable_at`.
    """
    if options.interface is not None:
        address = interface_address(options.interface, like=directory.host)
        return address, address
    address = route_to(directory)
    if is_loopback(address) and not all_local and not _says_loopback(directory.host):
        return "", address
    return address, address


def reachable_at(member: Member, me: Member, directory_seen_at: str) -> Address:
    """The address that this rank connects to in order to reach `member`.

    A member on another host that knows itself only by a loopback address sits beside the directory: it is reached at
    the address at which this rank reached the directory.
    """
    if is_loopback(member.host) and member.host_id != me.host_id:
        return Address(directory_seen_at, member.port)
    return Address(member.host, member.port)
