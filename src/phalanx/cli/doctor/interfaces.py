"""This host's network as the kernel tells it: interfaces with their addresses, names, and who holds a port."""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
from dataclasses import dataclass
from pathlib import Path

from phalanx.background_thread import BackgroundThread
from phalanx.operating_system import PROC, interface_addresses

__all__ = ["Interface", "holder", "interfaces", "port_free", "resolve"]

_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_TCP_LISTEN = "0A"


@dataclass(frozen=True)
class Interface:
    """One network interface."""

    name: str
    up: bool
    loopback: bool
    addresses: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} {', '.join(self.addresses) or '(no address)'}"


def interfaces() -> list[Interface]:
    """Every interface of this host, without link-local IPv6 addresses, which peers cannot use."""
    rows = interface_addresses()
    result = []
    for _, name in socket.if_nameindex():
        flags = next((flags for interface, flags, _ in rows if interface == name), 0)
        found = [address for interface, _, address in rows if interface == name and address and "%" not in address]
        result.append(Interface(name, bool(flags & _IFF_UP), bool(flags & _IFF_LOOPBACK), tuple(found)))
    return result


def resolve(host: str, patience: float) -> list[str]:
    """The addresses of a name, each once, in the resolver's order.

    Raises:
        OSError: The name is not known.
        TimeoutError: The resolver did not answer within `patience` seconds.
    """
    # In a thread, because getaddrinfo cannot be told when to give up.
    answer: queue.Queue[list[str] | OSError] = queue.Queue()

    def ask() -> None:
        try:
            rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answer.put(list(dict.fromkeys(str(row[4][0]) for row in rows)))
        except UnicodeError:  # a label that is empty or longer than 63 characters
            answer.put(socket.gaierror(socket.EAI_NONAME, "not a valid host name"))
        except OSError as error:
            answer.put(error)

    BackgroundThread(ask, "phalanx-doctor-resolve").start()
    try:
        result = answer.get(timeout=patience)
    except queue.Empty:
        raise TimeoutError(f"no answer within {patience:g} s") from None
    if isinstance(result, OSError):
        raise result
    return result


def port_free(address: str, port: int) -> bool:
    """True if a listener could take this port now.

    Raises:
        PermissionError: Only root may take it.
        OSError: Any other reason than that it is in use.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As listeners do: a port that only has old connections in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def holder(port: int, proc: Path = Path(PROC)) -> str:
    """Which process listens on a port of this host, as `python (process 4711)`; empty if that cannot be seen."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                row = line.split()
                if row[3] == _TCP_LISTEN and int(row[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{row[9]}]")
    for folder in proc.iterdir() if inodes else ():
        with contextlib.suppress(OSError):  # another user's process, or one that just ended
            if folder.name.isdigit() and any(str(link.readlink()) in inodes for link in (folder / "fd").iterdir()):
                return f"{(folder / 'comm').read_text().strip()} (process {folder.name})"
    return ""
