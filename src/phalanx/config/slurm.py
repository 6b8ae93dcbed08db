"""Slurm's variables: which task this is, how many share a node, and where the first one runs.

Only a task that `srun` started is a rank. Slurm also sets `SLURM_PROCID=0` in a batch script and in the shell of an
interactive allocation, next to an `SLURM_NTASKS` that tells what was *allocated*: a process that took these for a rank
would wait for peers that were never started. Such a process has no `SLURM_STEP_ID`, or one of the numbers that Slurm
reserves for batch, interactive and external steps. It is an ordinary process: a world of one,
with a warning if more was allocated.

Variables that were written by hand, without Slurm's own `SLURM_TASK_PID`, are taken at their word.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import re

from ..errors import ConfigError, MissingVariable
from .reader import Setting, VariableReader, invalid

__all__ = [
    "expand_hostlist",
    "in_step",
    "local_world_size",
    "master_host",
    "master_port",
    "warn_if_not_started_by_srun",
]

_log = logging.getLogger("phalanx.config")

_RESERVED_STEPS = 0xFFFFFFF0  # batch is ...FB, interactive ...FA, external ...FC
_MOST_HOSTS = 1 << 17
# Below the ports that Linux hands out by itself (from 32768), above the ones that services like.
_PORTS = range(15000, 30000)

_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_HOST_TEXT = re.compile(r"[A-Za-z0-9._:-]*")


def in_step(reader: VariableReader) -> bool:
    """Whether this process is a task that `srun` started (see the module's docstring).

    Raises:
        ConfigError: A variable cannot be read.
    """
    if reader.text("SLURM_PROCID") is None:
        return False
    step = reader.text("SLURM_STEP_ID")
    if step is None:
        return reader.text("SLURM_TASK_PID") is None
    if step in ("batch", "interactive", "extern"):
        return False
    number = reader.integer("SLURM_STEP_ID")
    return number is not None and 0 <= number < _RESERVED_STEPS


def warn_if_not_started_by_srun(reader: VariableReader) -> None:
    """One log line for the most common slip under Slurm: `python train.py` in a batch script, without `srun`."""
    tasks = reader.text("SLURM_NTASKS")
    if tasks not in (None, "1") and not in_step(reader):
        _log.warning(
            "SLURM_NTASKS=%s, but srun did not start this process: it is a world of one. "
            "To start all ranks, use srun or phalanx run",
            tasks,
        )


def local_world_size(reader: VariableReader, world_size: int) -> Setting | None:
    """How many ranks share this node; None if the variables do not tell.

    Raises:
        ConfigError: A variable cannot be read.
    """
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        text = reader.text(name)
        if text is None:
            continue
        counts = _expand_counts(name, text)
        # `srun --preserve-env` leaves the allocation's counts in the second one: not this step's unless they add up.
        if sum(counts) != world_size:
            continue
        node = reader.integer("SLURM_NODEID")
        if node is None and len(set(counts)) == 1:
            node = 0
        if node is not None and 0 <= node < len(counts):
            return Setting(counts[node], f"{name}={text}")
    hosts, source = _hosts(reader)
    if len(hosts) == 1:
        return Setting(world_size, source)
    asked = reader.setting("SLURM_NTASKS_PER_NODE")
    # Only a wish: with a task count that does not fill the nodes it says nothing of this one.
    if asked is not None and asked.value * max(1, len(hosts)) == world_size:
        return asked
    return None


def master_host(reader: VariableReader) -> str:
    """The first node of the step: `srun` puts rank 0 there.

    Raises:
        MissingVariable: There is no list of nodes.
        ConfigError: The list cannot be read.
    """
    hosts, _ = _hosts(reader)
    if not hosts:
        raise MissingVariable(
            "SLURM_JOB_NODELIST",
            "SLURM_JOB_NODELIST is not set, nor is SLURM_STEP_NODELIST, so nothing says on which host rank 0 runs "
            f"(found {reader.found(('SLURM_PROCID', 'SLURM_NTASKS'))}); set it, or MASTER_ADDR and MASTER_PORT",
        )
    return hosts[0]


def master_port(reader: VariableReader) -> int:
    """A port that all tasks of the step work out alike, and that steps of other jobs most likely do not share.

    Raises:
        MissingVariable: There is no number of the job.
    """
    job = reader.text("SLURM_JOB_ID")
    if job is None:
        raise MissingVariable(
            "SLURM_JOB_ID",
            "SLURM_JOB_ID is not set, so that the ranks cannot agree on a port "
            f"(found {reader.found(('SLURM_PROCID', 'SLURM_NTASKS'))}); set it, or MASTER_PORT",
        )
    digest = hashlib.sha256(f"{job}.{reader.text('SLURM_STEP_ID') or 0}".encode()).digest()
    return _PORTS[int.from_bytes(digest[:8], "big") % len(_PORTS)]


def _hosts(reader: VariableReader) -> tuple[list[str], str]:
    """The hosts of the step and the variable that names them."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        text = reader.text(name)
        if text is not None:
            return expand_hostlist(text, what=name), f"{name}={text}"
    return [], ""


def _expand_counts(name: str, text: str) -> list[int]:
    """`2(x3),1` -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item.strip())
        if match is None or int(match[2] or 1) > _MOST_HOSTS:
            raise invalid(name, text, "counts such as 4 or 2(x3),1")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def expand_hostlist(text: str, *, what: str = "host list") -> list[str]:
    """Writes Slurm's short form of host names out: `node[08-10],gpu1` -> node08, node09, node10, gpu1.

    Args:
        text: The short form; brackets may stand several times in a name, and anywhere in it.
        what: What the text is, for messages.

    Raises:
        ConfigError: The text cannot be read, or names more than 131,072 hosts.
    """
    hosts: list[str] = []
    for item in _split_outside_brackets(text):
        # Splitting at brackets leaves plain text at even places and the ranges between them at odd ones.
        parts = re.split(r"[\[\]]", item.strip())
        well_formed = len(parts) % 2 == 1 and re.fullmatch(r"[^\[\]]*(\[[^\[\]]*\][^\[\]]*)*", item.strip())
        plain = all(_HOST_TEXT.fullmatch(part) for part in parts[::2])
        ranges = [_expand_ranges(part) for part in parts[1::2]]
        if not item.strip() or not well_formed or not plain or not all(ranges):
            raise invalid(what, text, "host names such as node1,gpu[003-005,9]")
        if len(hosts) + math.prod(len(choices) for choices in ranges) > _MOST_HOSTS:
            raise ConfigError(f"{what}={text!r} is not valid (it names more than {_MOST_HOSTS} hosts)")
        choices_by_place = [ranges[place // 2] if place % 2 else [part] for place, part in enumerate(parts)]
        hosts.extend("".join(pieces) for pieces in itertools.product(*choices_by_place))
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", text)


def _expand_ranges(text: str) -> list[str]:
    """`003-005,9` -> 003, 004, 005, 9. Empty if it cannot be read or is far too long."""
    numbers: list[str] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            return []
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MOST_HOSTS:
            return []
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers
