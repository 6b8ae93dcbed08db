"""Finds out who this process is: which rank, of how many, and where to meet the others.

Each value comes from the first place that has it: the argument, then the environment, then the default. In the
environment, the first launcher that `launchers.find_launcher` recognises counts. Nothing set at all is a world of one,
so that `python train.py` just works; something set but not enough is an error that names what is missing. A smaller
world than was asked for is never made up.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..arguments import as_index
from ..errors import ConfigError, InvalidRank, InvalidWorldSize, MissingVariable, UsageError
from ..types import Address
from . import meeting, slurm
from .identity import digest
from .launchers import Launcher, find_launcher
from .reader import Setting, VariableReader
from .secret import find_token

__all__ = ["Launch", "detect", "four_variables", "started_as"]


@dataclass(frozen=True)
class Launch:
    """The identity of this process, as far as arguments and environment tell."""

    rank: int
    """This process among all, from 0."""
    world_size: int
    """Number of processes."""
    local_rank: int
    """This process among those of its host, from 0; 0 where nothing tells."""
    local_world_size: int
    """Number of processes on this host. Where nothing tells, the least it can be: the directory knows better later."""
    single_host: bool
    """Whether all ranks are known to be on this host, so that they can share files."""
    master: Address | None
    """Where rank 0 can be met. None: not needed, or all ranks are on this host and meet by a private file."""
    directory: Address | None
    """Where the launcher hosts the directory. None: rank 0 does."""
    master_port_taken: bool
    """Whether torchrun itself listens on the master's port, so that rank 0 cannot."""
    token: bytes | None = field(repr=False)
    """The job's secret, where one was given."""
    launcher: str
    """arguments, phalanx, torchrun, openmpi, mpich, slurm, environment (torchrun's variables set by hand) or none."""
    job: str
    """The same for all ranks of this job on one host, another for other jobs. Hexadecimal, safe as a file name."""
    joins: int | None = None
    """The number under which this process joins an elastic world that is there already; None for one of the first."""

    @property
    def hosts_directory(self) -> bool:
        """Whether this rank has to host the directory, because no launcher does."""
        return self.rank == 0 and self.directory is None and self.world_size > 1


def detect(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    master: str | Address | None = None,
    token: str | bytes | None = None,
    env: Mapping[str, str] | None = None,
) -> Launch:
    """Works out rank, world size and meeting point from the arguments and the launcher's variables.

    Args:
        rank: This process among all; None takes it from the environment.
        world_size: Number of processes; None takes it from the environment.
        master: Where rank 0 can be met, as `host:port`; None takes it from the environment.
        token: The job's secret; None takes it from the environment.
        env: What to read instead of the process's environment.

    Raises:
        MissingVariable: Some variables of a launcher are set, but one that is needed is not.
        InvalidRank: The rank is not in the world, or the local rank not on the host.
        InvalidWorldSize: The world size is below 1, or the local one above it.
        ConfigError: A value cannot be read.
    """
    reader = VariableReader(env)
    given = _Arguments(_number("rank", rank), _number("world_size", world_size), meeting.master_from_argument(master))
    launcher = find_launcher(reader)
    nothing_said = launcher is None and given == (None, None, None)
    if nothing_said:
        slurm.warn_if_not_started_by_srun(reader)

    mine, size = _rank_and_size(reader, launcher, given)
    _check_rank(mine, size)
    if launcher is not None and not _speaks_of(reader, launcher, mine, size):
        launcher = None

    # A directory serves the launcher's world; another one, or another meeting point, was asked for by argument.
    use_directory = launcher is not None and given.master is None
    directory = meeting.directory_from_env(reader) if use_directory else None
    host, port = given.master or meeting.master_from_env(reader)
    local = _local(reader, launcher, mine, size, host)
    if given.master is None and size.value > 1 and directory is None:
        host, port = meeting.complete_master(reader, launcher, size, single_host=local.single_host)
    address = Address(host, port) if host is not None and port is not None else None

    return Launch(
        rank=mine.value,
        world_size=size.value,
        local_rank=local.rank,
        local_world_size=local.size,
        single_host=local.single_host,
        master=address,
        directory=directory,
        master_port_taken=meeting.agent_listens(reader, address),
        token=find_token(reader, token),
        launcher="none" if nothing_said else "arguments" if launcher is None else launcher.name,
        joins=reader.integer("PHALANX_JOIN") if directory is not None else None,
        job=_job(reader, launcher, size, address, directory),
    )


def four_variables(env: Mapping[str, str] | None = None) -> tuple[int, int, Address]:
    """Rank, world size and master from `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` alone.

    Raises:
        MissingVariable: One of them is not set.
        InvalidRank, InvalidWorldSize, ConfigError: One of them cannot be used.
    """
    reader = VariableReader(env)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE") if reader.text(name) is None]
    if missing:
        raise MissingVariable(missing[0])
    rank, size = reader.setting("RANK"), reader.setting("WORLD_SIZE")
    host, port = reader.text("MASTER_ADDR"), reader.port("MASTER_PORT")
    assert rank is not None
    assert size is not None
    assert host is not None
    assert port is not None
    _check_rank(rank, size)
    return rank.value, size.value, Address(host, port)


def started_as(env: Mapping[str, str] | None = None) -> tuple[Launcher, Setting] | None:
    """The launcher that started this process, and the world size that it gave; None if nothing tells.

    For backends that know rank and world size themselves, and want to know whether they speak of the same world.
    """
    reader = VariableReader(env)
    try:
        launcher = find_launcher(reader)
        size = reader.setting(launcher.world_size) if launcher is not None else None
    except ConfigError:
        return None
    return None if launcher is None or size is None else (launcher, size)


class _Arguments(NamedTuple):
    """The arguments of `detect`."""

    rank: Setting | None
    world_size: Setting | None
    master: Address | None

    def found(self) -> list[str]:
        """For messages: what was given, as it was written."""
        numbers = [str(setting) for setting in (self.rank, self.world_size) if setting is not None]
        return numbers if self.master is None else [*numbers, f"master={self.master}"]


def _number(name: str, value: int | None) -> Setting | None:
    if value is None:
        return None
    try:
        return Setting(as_index(value, name), f"{name}={value}")
    except UsageError as error:
        raise ConfigError(str(error)) from None


# -- rank and world size ---------------------------------------------------------------------------------------------


def _rank_and_size(reader: VariableReader, launcher: Launcher | None, given: _Arguments) -> tuple[Setting, Setting]:
    """Fills what the arguments leave open from the launcher's variables."""
    rank, size = given.rank, given.world_size
    if launcher is not None:
        rank = rank or reader.setting(launcher.rank)
        size = size or _world_size(reader, launcher)
    elif given == (None, None, None):
        return Setting(0, "rank=0"), Setting(1, "world_size=1")
    elif rank is None and size is not None and size.value == 1:
        rank = Setting(0, "rank=0")
    if rank is None:
        raise _missing(reader, launcher, given, "RANK" if launcher is None else launcher.rank, "rank")
    if size is None:
        raise _missing(reader, launcher, given, "WORLD_SIZE" if launcher is None else launcher.world_size, "world_size")
    return rank, size


def _world_size(reader: VariableReader, launcher: Launcher) -> Setting | None:
    size = reader.setting(launcher.world_size)
    exported = reader.setting("WORLD_SIZE")
    if size is not None and exported is not None and size.value != exported.value:
        raise ConfigError(
            f"{exported} and {size} contradict each other (expected the same number, or no WORLD_SIZE at all: "
            f"the rank comes from {launcher.title})"
        )
    return size


def _missing(
    reader: VariableReader, launcher: Launcher | None, given: _Arguments, variable: str, argument: str
) -> MissingVariable:
    """The error for a rank or world size that nothing tells, with what was found in its place."""
    found = given.found()
    if launcher is not None:
        found.append(reader.found(launcher.variables))
    hint = f"set {variable} or give {argument}="
    if reader.text("PMI_ID") is not None:
        hint = "start mpirun without -pmi-port"
    elif reader.text("SLURM_JOB_ID") is not None and variable == "RANK":
        hint += ", or start the ranks with srun or phalanx run"
    return MissingVariable(variable, f"{variable} is not set (found {', '.join(found)}): {hint}")


def _check_rank(rank: Setting, size: Setting) -> None:
    if size.value < 1:
        raise InvalidWorldSize(size.value, f"{size} is not valid (expected at least 1)")
    if not 0 <= rank.value < size.value:
        valid = f"valid ranks: 0 to {size.value - 1}"
        raise InvalidRank(rank.value, size.value, f"{rank} is not in a world of {size} ({valid})")


def _speaks_of(reader: VariableReader, launcher: Launcher, rank: Setting, size: Setting) -> bool:
    """Whether this is the rank and the world that the launcher's variables speak of.

    By argument, some of the processes may form a world of their own. What the launcher says of hosts, of the job and of
    its directory does not hold for that one.
    """
    try:
        return reader.integer(launcher.rank) == rank.value and reader.integer(launcher.world_size) == size.value
    except ConfigError:
        return False  # arguments stood in for a variable that cannot be read


# -- this host -------------------------------------------------------------------------------------------------------


class _Local(NamedTuple):
    """Rank and number of ranks on this host, and whether there is no other."""

    rank: int
    size: int
    single_host: bool


def _local(
    reader: VariableReader, launcher: Launcher | None, rank: Setting, size: Setting, master_host: str | None
) -> _Local:
    """Works out what is known of this host."""
    local_rank = local_size = None
    if launcher is not None:
        local_rank = reader.setting(launcher.local_rank)
        if launcher.name == "slurm":
            local_size = slurm.local_world_size(reader, size.value)
        else:
            local_size = reader.setting(launcher.local_world_size)
    if local_size is None and (size.value == 1 or (master_host is not None and meeting.is_loopback(master_host))):
        local_size = size  # no rank can come from elsewhere
    if local_size is not None and not 1 <= local_size.value <= size.value:
        expected = f"expected 1 to {size.value}, as {size}"
        raise InvalidWorldSize(local_size.value, f"{local_size} is not a number of ranks on this host ({expected})")

    if local_rank is None:
        if local_size is None:
            return _Local(0, 1, single_host=False)
        if local_size.value < size.value:
            name = "LOCAL_RANK" if launcher is None else launcher.local_rank
            raise MissingVariable(name, f"{name} is not set (found {local_size}): set it to this rank's on its host")
        local_rank = rank
    most = local_size or size
    if not 0 <= local_rank.value < most.value:
        valid = f"valid local ranks: 0 to {most.value - 1}"
        raise InvalidRank(local_rank.value, most.value, f"{local_rank} is not on a host with {most} ({valid})")
    if local_size is None:
        # The last rank could tell by its own number, but the others could not: all must come to the same answer.
        return _Local(local_rank.value, local_rank.value + 1, single_host=False)
    return _Local(local_rank.value, local_size.value, single_host=local_size.value == size.value)


# -- the job ---------------------------------------------------------------------------------------------------------


def _job(
    reader: VariableReader, launcher: Launcher | None, size: Setting, master: Address | None, directory: Address | None
) -> str:
    run_id = reader.text("PHALANX_RUN_ID")
    if run_id is not None:
        name = ["run", run_id]
    else:
        name = ["arguments"] if launcher is None else [launcher.name, *launcher.identity(reader)]
    if size.value == 1 and master is None and directory is None:
        name.append(f"process {os.getpid()}")  # nothing else may tell two worlds of one apart
    restarts = reader.text("TORCHELASTIC_RESTART_COUNT") or "0"
    return digest(*name, restarts, master or "", directory or "", size.value)
