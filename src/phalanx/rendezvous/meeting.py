"""The place where the ranks of a job meet, and their token: decided once, before any rank connects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..config import Launch
from ..config.options import Options
from ..deadline import Deadline
from ..errors import ConfigError, MissingVariable
from ..transports.tcp import is_loopback
from ..types import Address
from . import token_file
from .addresses import directory_candidates, directory_host, is_local, wait_for_name

if TYPE_CHECKING:
    from .hosting.start import HostedDirectory

__all__ = ["Meeting", "arrange"]


@dataclass
class Meeting:
    """The addresses and token of the directory. On the rank that hosts it, also owns it and the job's token file."""

    addresses: list[Address]
    token: bytes | None = field(repr=False)
    all_local: bool
    """True if all ranks are known to be on this host."""
    hint: str = ""
    """A hint for the error message if some ranks never come."""
    directory: HostedDirectory | None = None
    job_file: Path | None = None
    on_formed: Callable[[], None] | None = None
    """Called on the rank that hosts, once it knows that the world has formed."""

    def formed(self) -> None:
        """Tells that the world has formed: no rank looks for the meeting any more."""
        self.job_file = None  # the directory has removed it before it told anybody
        if self.on_formed is not None:
            self.on_formed()

    def close(self) -> None:
        """Gives back what this rank hosts."""
        self.remove_file()
        if self.directory is not None:
            self.directory.close()

    def remove_file(self) -> None:
        """Removes the job's token file, if this rank wrote it."""
        if self.job_file is not None:
            with contextlib.suppress(OSError):
                self.job_file.unlink()
            self.job_file = None


def arrange(launch: Launch, *, auth: Literal["token", "none"], options: Options, deadline: Deadline) -> Meeting:
    """Finds the directory or, on rank 0 where no launcher hosts it, starts it.

    Raises:
        MissingVariable: There is no token, and the ranks are on several hosts.
        ConfigError: Rank 0 cannot listen where the master should be.
        WorldNotFormed: Rank 0 did not say in time where it listens.
        NoConnection: The master's name cannot be resolved.
    """
    token = launch.token if auth == "token" else None
    needs_token = auth == "token" and token is None
    if launch.directory is not None:
        if needs_token:
            raise MissingVariable("PHALANX_TOKEN", "PHALANX_DIRECTORY is set, but PHALANX_TOKEN is not")
        wait_for_name(launch.directory.host, deadline)
        # A launcher that lets ranks of other hosts join hosts the directory where they can reach it.
        all_local = launch.single_host and is_loopback(launch.directory.host)
        return Meeting([launch.directory], token, all_local)

    # Ranks of one host can learn from a private file what they were not told: token, address, or both.
    master = launch.master
    if master is not None and launch.rank != 0:
        wait_for_name(master.host, deadline)
    needs_address = master is None or master.port == 0 or (launch.master_port_taken and launch.single_host)
    on_one_host = launch.single_host or (master is not None and is_local(master.host))
    if needs_token and not on_one_host:
        raise MissingVariable("PHALANX_TOKEN", _several_hosts(master))
    if needs_address and not on_one_host:
        raise ConfigError(f"master {master} leaves the port open, which only works if all ranks are on one host")
    if needs_address or master is None:
        candidates = [Address(master.host if master is not None and master.port == 0 else "127.0.0.1", 0)]
    elif launch.master_port_taken:
        candidates = directory_candidates(master, launch.world_size)
    else:
        candidates = [master]

    hint = ""
    if needs_token and not launch.single_host:
        hint = "PHALANX_TOKEN is not set, so only ranks on this host can join: set it if there are others"
    if launch.rank == 0:
        token = token_file.new_token() if needs_token else token
        file = token_file.path_of(launch.job) if needs_token or needs_address else None
        directory = _host(launch, token, candidates, options, file)
        address = Address(candidates[0].host, directory.address.port)
        meeting = Meeting([address], token, launch.single_host, hint, directory)
        if file is not None:
            try:
                meeting.job_file = token_file.publish(launch.job, token or b"", address if needs_address else None)
            except BaseException:
                meeting.close()
                raise
        return meeting
    if needs_token or needs_address:
        found = token_file.wait_for(launch.job, deadline, rank=launch.rank)
        token = found.token if needs_token else token
        if needs_address and found.directory is not None:
            candidates = [Address.parse(found.directory)]
    return Meeting(candidates, token, launch.single_host, hint)


def _host(
    launch: Launch, token: bytes | None, candidates: list[Address], options: Options, file: Path | None
) -> HostedDirectory:
    """Starts the directory at the first of these addresses that is free."""
    from ..transports.tcp import check_tls
    from .hosting.start import HostedDirectory  # rank 0 alone needs it

    check_tls(options.tls)  # here, or its error would be taken for one about the port
    host = directory_host(candidates[0].host, all_local=launch.single_host)
    reason = ""
    for candidate in candidates:
        try:
            bind = Address(host, candidate.port)
            return HostedDirectory(
                launch.world_size, token=token, bind=bind, options=options, rank=launch.rank, job_file=file
            )
        except ConfigError as error:
            reason = str(error)
    raise ConfigError(
        f"rank 0 cannot host the directory: {reason} (the master, MASTER_ADDR and MASTER_PORT, must be an address of "
        "the host that rank 0 runs on, and a port that is free there)"
    )


def _several_hosts(master: Address | None) -> str:
    where = f"the master {master.host} is another host" if master is not None else "the ranks are on several hosts"
    return (
        f"{where}, so the ranks need a common token: set PHALANX_TOKEN to the same secret on all of them, for example "
        "one made by `python -c 'import secrets; print(secrets.token_hex(32))'` "
        "(or pass auth='none' on a network you trust)"
    )
