"""Where the ranks meet: the master's address, and the directory that `phalanx run` may host."""

from __future__ import annotations

import ipaddress

from ..errors import ConfigError, MissingVariable
from ..types import Address
from . import slurm
from .launchers import Launcher
from .reader import HIGHEST_PORT, Setting, VariableReader, invalid

__all__ = [
    "agent_listens",
    "complete_master",
    "directory_from_env",
    "is_loopback",
    "master_from_argument",
    "master_from_env",
]

_MASTER = ("MASTER_ADDR", "MASTER_PORT")


def master_from_argument(master: str | Address | None) -> Address | None:
    """Reads the `master` argument.

    Raises:
        ConfigError: It is not `host:port`.
    """
    if master is None:
        return None
    address = Address.of(master, what="master")
    if not 1 <= address.port <= HIGHEST_PORT:
        expected = f"host:port, the port from 1 to {HIGHEST_PORT}"
        raise ConfigError(f"master={str(address)!r} is not valid (expected {expected})")
    return address


def master_from_env(reader: VariableReader) -> tuple[str | None, int | None]:
    """Reads `MASTER_ADDR` and `MASTER_PORT`; each is None where it is not set.

    Raises:
        ConfigError: One of them cannot be read.
    """
    text = reader.text("MASTER_ADDR")
    if text is None:
        return None, reader.port("MASTER_PORT")
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise invalid("MASTER_ADDR", text, "a host name or address; the port goes into MASTER_PORT") from None
    elif not host or "/" in host or any(character.isspace() for character in host):
        raise invalid("MASTER_ADDR", text, "a host name or address")
    return host, reader.port("MASTER_PORT")


def complete_master(
    reader: VariableReader, launcher: Launcher | None, size: Setting, *, single_host: bool
) -> tuple[str | None, int | None]:
    """The master's host and port for a world of several, with what the launcher adds to the environment's.

    Both are None where MPI or Slurm started all ranks on this host: they find each other by a private file.

    Raises:
        MissingVariable: There is no way to tell where rank 0 is.
        ConfigError: A variable cannot be read.
    """
    host, port = master_from_env(reader)
    if host is not None and port is not None:
        return host, port
    if host is None and port is None and launcher is not None and not launcher.sets_master:
        if single_host:
            return None, None
        if launcher.name != "slurm":
            raise MissingVariable(
                "MASTER_ADDR",
                f"{launcher.title} does not tell where rank 0 is, and not all ranks are known to be on this host "
                f"({reader.found(launcher.variables)}): set MASTER_ADDR and MASTER_PORT to a host and port where "
                "rank 0 can be met, and PHALANX_TOKEN to a secret, the same for all ranks",
            )
    if launcher is not None and launcher.name == "slurm":
        return host or slurm.master_host(reader), port or slurm.master_port(reader)

    missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
    found = reader.found(_MASTER if launcher is None else dict.fromkeys((*launcher.variables, *_MASTER)))
    raise MissingVariable(
        missing,
        f"{missing} is not set (found {found or size}): a world of {size.value} needs a place to meet; "
        "set MASTER_ADDR and MASTER_PORT, or give master='host:port'",
    )


def directory_from_env(reader: VariableReader) -> Address | None:
    """Where the launcher hosts the directory.

    Raises:
        ConfigError: `PHALANX_DIRECTORY` cannot be read.
    """
    text = reader.text("PHALANX_DIRECTORY")
    if text is None:
        return None
    address = Address.parse(text, what="PHALANX_DIRECTORY")
    if address.port == 0:
        raise invalid("PHALANX_DIRECTORY", text, f"host:port, the port from 1 to {HIGHEST_PORT}")
    return address


def agent_listens(reader: VariableReader, master: Address | None) -> bool:
    """Whether torchrun's agent itself listens at this address.

    Raises:
        ConfigError: `TORCHELASTIC_USE_AGENT_STORE` is neither true nor false.
    """
    return master is not None and reader.flag("TORCHELASTIC_USE_AGENT_STORE") and master == master_from_env(reader)


def is_loopback(host: str) -> bool:
    """Whether the host can only be reached from this machine. Names are not resolved, only localhost is known."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
