"""Limits on descriptors, processes, CPUs and memory, from rlimits and from the container's control groups."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from phalanx.operating_system import control_group_files, core_quota, cores_of_set

from .findings import Finding, Situation, check, ok, problem, warning

__all__ = ["available_cores", "descriptors", "machine_share", "processes"]

_DESCRIPTORS_PER_RANK = 64
"""Files that a rank holds open besides its connections: Python's modules, log files, the data set."""
_CONNECTIONS_PER_PEER = 3
"""Control, collectives, point-to-point; the directory's host holds one of them for every rank."""
_THREADS_PER_RANK = 8
"""A rank's own threads (reactor, lanes, the progress of asynchronous work), generously."""


def size(count: float) -> str:
    """Bytes as people say them: `512.0 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@check("descriptors")
def descriptors(situation: Situation) -> Finding:
    """RLIMIT_NOFILE against what a world of this size needs."""
    topic = "descriptors"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ok(topic, "a process may open any number of files and sockets")
    need = _DESCRIPTORS_PER_RANK + _CONNECTIONS_PER_PEER * situation.world_size
    found = f"a process may open {soft:,} files and sockets (RLIMIT_NOFILE)"
    allowed = "any number" if hard == resource.RLIM_INFINITY else f"up to {hard:,}"
    if hard == resource.RLIM_INFINITY or hard > soft:
        advice = (
            f"Raise it before the job starts: ulimit -n {min(65536, hard) if hard > 0 else 65536} "
            f"({allowed} is allowed)."
        )
    else:
        advice = (
            "The hard limit is as low: ask the administrator (limits.conf), or start the container with "
            "--ulimit nofile=65536."
        )
    if soft < need:
        return problem(
            topic,
            f"{found}; a rank in a world of {situation.world_size} may need about {need:,}",
            f"{advice} Below that, ranks fail with 'Too many open files' while connecting.",
        )
    if soft < 1024:
        return warning(topic, f"{found}, which is unusually few", f"{advice} Larger worlds and data loaders need more.")
    return ok(topic, f"{found}; a rank here needs about {need:,}")


@check("processes")
def processes(situation: Situation) -> Finding:
    """RLIMIT_NPROC and the container's pids.max against what is running already. Threads count as processes in both."""
    topic = "processes"
    limits: list[tuple[int, str, str]] = []  # left, what was found, how to raise it
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The kernel does not hold root to RLIMIT_NPROC.
    if soft != resource.RLIM_INFINITY and os.getuid() != 0 and situation.proc.is_dir():
        used = _threads_of(os.getuid(), situation.proc)
        found = f"this user may run {soft:,} processes and threads (RLIMIT_NPROC) and runs {used:,}"
        limits.append((soft - used, found, "ulimit -u 16384, or limits.conf"))
    for path, text in _group_files(situation, "pids", "pids.max", "pids.max"):
        if text.isdigit():
            used = int(_read(Path(path).with_name("pids.current")) or 0)
            found = f"this container may run {int(text):,} processes and threads (pids.max) and runs {used:,}"
            limits.append((int(text) - used, found, "start the container with --pids-limit=16384"))
    if not limits:
        return ok(topic, "nothing limits the number of processes and threads here")
    left, found, remedy = min(limits)
    cores = available_cores(situation)
    need = situation.local_ranks * _THREADS_PER_RANK
    # A BLAS starts one thread per core and rank, which is what runs into this limit in practice.
    comfort = max(256, situation.local_ranks * (_THREADS_PER_RANK + int(cores)))
    found = f"{found}: room for {max(left, 0):,} more"
    if left < need:
        return problem(
            topic,
            found,
            f"{situation.local_ranks} rank(s) here need about {need}. Raise the limit ({remedy}). Until then "
            "ranks fail with "
            "'can't start new thread' or 'Resource temporarily unavailable'.",
        )
    if left < comfort:
        return warning(
            topic, found, f"Raise the limit ({remedy}), or set OMP_NUM_THREADS=1 so that ranks start fewer threads."
        )
    return ok(topic, found)


@check("cores and memory")
def machine_share(situation: Situation) -> Iterator[Finding]:
    """How much of the machine this process may use, and whether the ranks fit on it."""
    topic = "cores and memory"
    cores = available_cores(situation)
    present = os.cpu_count() or 1
    memory, source = _memory(situation)
    share = f"{cores:g} of {present} cores" if cores != present else f"{present} cores"
    found = f"{share}, {size(memory)} of memory ({source})" if memory else share
    ranks = situation.local_ranks
    if ranks > cores:
        yield warning(
            topic,
            f"{found}, for {ranks} ranks on this host",
            "Ranks that share a core take turns and every step waits for the slowest. Fine for a test; for "
            "speed start at most "
            f"{max(1, int(cores))} here, with OMP_NUM_THREADS=1.",
        )
    else:
        yield ok(topic, found)
    if memory and memory / ranks < 256 << 20:
        yield warning(
            topic,
            f"{size(memory / ranks)} of memory for each of {ranks} rank(s)",
            "A rank with NumPy alone takes about 50 MiB, with PyTorch 300 MiB or more. Over the limit the "
            "kernel kills a rank "
            "(exit code -9 or 137). Start fewer ranks, or give the container more (--memory).",
        )


def available_cores(situation: Situation) -> float:
    """Cores that this process may use: its CPU set, and the container's quota (which may be a fraction)."""
    quota = core_quota(str(situation.proc), str(situation.cgroups))
    return float(cores_of_set()) if quota is None else min(cores_of_set(), quota)


def _memory(situation: Situation) -> tuple[int, str]:
    """Bytes of memory, and what sets that bound."""
    total, source = 0, "the machine's"
    for line in (_read(situation.proc / "meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    for _, text in _group_files(situation, "memory", "memory.max", "memory.limit_in_bytes"):
        if text.isdigit() and (not total or int(text) < total):  # version 1 writes a huge number for none
            total, source = int(text), "the container's limit"
    return total, source


def _group_files(situation: Situation, controller: str, name: str, name_v1: str) -> Iterator[tuple[str, str]]:
    return control_group_files(controller, name, name_v1, str(situation.proc), str(situation.cgroups))


def _threads_of(uid: int, proc: Path) -> int:
    """How many threads this user runs; the kernel counts these, not processes."""
    count = 0
    for folder in proc.iterdir():
        if folder.name.isdigit():
            try:
                if folder.stat().st_uid == uid:
                    count += sum(1 for _ in (folder / "task").iterdir())
            except OSError:  # it ended while we looked
                continue
    return count


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
