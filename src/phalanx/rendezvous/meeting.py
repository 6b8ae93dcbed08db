"""Where the ranks of a job meet, and with which token: decided once, before anybody connects."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..config import Launch
from ..config.options import Options
from ..deadline import Deadline
from ..errors import ConfigError, MissingVariable
from ..types import Address
from . import token_file
from .addresses import directory_candidates, directory_host, is_local
from .directory import Directory

__all__ = ["Meeting", "arrange"]


@dataclass
class Meeting:
    """How to reach the directory; owns it, and the job's token file, on the rank that hosts them."""

    addresses: list[Address]
    token: bytes | None = field(repr=False)
    all_local: bool
    """Whether all ranks are known to be on this host."""
    directory: Directory | None = None
    job_file: Path | None = None

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
    """
    token = launch.token if auth == "token" else None
    all_local = launch.single_host
    wants_token = auth == "token" and token is None
    if launch.directory is not None:
        if wants_token:
            raise MissingVariable("PHALANX_TOKEN", "PHALANX_DIRECTORY is set, but PHALANX_TOKEN is not")
        return Meeting([launch.directory], token, all_local)

    master = launch.master
    anywhere = master is None or master.port == 0 or (launch.master_port_taken and all_local)
    if (wants_token or anywhere) and not all_local and (master is None or not is_local(master.host)):
        raise MissingVariable("PHALANX_TOKEN", _several_hosts(master))
    candidates = [master] if master is not None else []
    if launch.master_port_taken and not anywhere and master is not None:
        candidates = directory_candidates(master, launch.world_size)
    by_file = wants_token or anywhere
    if launch.rank == 0:
        token = token_file.new_token() if wants_token else token
        bind = Address("127.0.0.1", 0) if anywhere and (master is None or master.port) else candidates[0]
        directory = _host(launch.world_size, token, bind, candidates if not anywhere else [], options, all_local)
        address = Address(bind.host, directory.address.port)
        meeting = Meeting([address], token, all_local, directory)
        if by_file:
            try:
                meeting.job_file = token_file.publish(launch.job, token or b"", address if anywhere else None)
            except BaseException:
                meeting.close()
                raise
        return meeting
    if by_file:
        found = token_file.wait_for(launch.job, deadline, rank=launch.rank)
        token = found.token if wants_token else token
        if found.directory is not None:
            candidates = [Address.parse(found.directory)]
    return Meeting(candidates, token, all_local)


def _host(
    world_size: int,
    token: bytes | None,
    bind: Address,
    candidates: list[Address],
    options: Options,
    all_local: bool,
) -> Directory:
    host = directory_host(bind.host, all_local=all_local)
    last: ConfigError | None = None
    for port in [address.port for address in candidates] or [bind.port]:
        try:
            return Directory(world_size, token=token, bind=Address(host, port), options=options)
        except ConfigError as error:
            last = error
    assert last is not None
    raise ConfigError(f"rank 0 cannot host the directory: {last}") from None


def _several_hosts(master: Address | None) -> str:
    where = f"the master {master.host} is another host" if master is not None else "the ranks are on several hosts"
    return (
        f"{where}, so the ranks need a common token: set PHALANX_TOKEN to the same secret on all of them, for example "
        "one made by `python -c 'import secrets; print(secrets.token_hex(32))'` "
        "(or pass auth='none' on a network you trust)"
    )
