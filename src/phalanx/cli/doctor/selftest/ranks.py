"""A rank of the self-test: moves bytes, checks every one of them, and has rank 0 tell what was found, as JSON lines.

Under `phalanx run`. With PHALANX_TRANSPORT=tcp only TCP is looked at, else shared memory, copies from one process to
another, and the way between hosts.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import phalanx as px
from phalanx import _native, config
from phalanx.launching.environment import cores

from ..findings import Finding, ok, problem, warning

SMALL, LARGE = 8, 1 << 20
"""Bytes of a message whose time says something about delays, and of one that says something about speed."""
PART = 4 << 20
"""Bytes from each rank to each other: enough to be read from the other process at once."""
ROUNDS = 9
TIMEOUT = 30.0


class WrongData(Exception):
    """Bytes arrived that were not sent."""


def main() -> None:
    """Runs all that apply."""
    with px.init(timeout=TIMEOUT) as world:
        world.barrier()
        hosts = world.all_gather_object((world.local_rank, world.hosts[world.rank], cores()))
        names = [f"{name} ({count} cores)" for local, name, count in hosts if local == 0]
        tell(world, ok("world", f"{world.world_size} ranks on {', '.join(names)} found each other"))
        if world.world_size == 1:
            tell(world, warning("transports", "one rank has nobody to talk to", "Give it more ranks: -n 4."))
            return
        look = over_tcp if config.Options.from_env().transport == "tcp" else as_jobs_run
        for finding in look(world, [rank for rank, (local, *_) in enumerate(hosts) if local == 0]):
            tell(world, finding)


def tell(world: px.Group, finding: Finding) -> None:
    """Rank 0 prints it for the doctor."""
    if world.rank == 0:
        fields = {"topic": finding.topic, "status": finding.status.value, "found": finding.found}
        sys.stdout.write(json.dumps({**fields, "advice": finding.advice}) + "\n")
        sys.stdout.flush()


def as_jobs_run(world: px.Group, leaders: list[int]) -> Iterator[Finding]:
    """Looks at everything that a job here would use."""
    engine = world._engine
    segment = None if engine is None else engine.segment
    neighbours = world.local_world_size > 1
    shares = world.all_gather_object((neighbours, segment is not None, segment is not None and segment.reads_peers))
    beside = [(shared, reads) for near, shared, reads in shares if near]
    if beside and all(shared for shared, _ in beside):
        yield attempt("shared memory", lambda: collectives_and_messages(world))
        if all(reads for _, reads in beside):
            yield attempt("copy once", lambda: exchange(world))
        else:
            yield warning(
                "copy once",
                "a rank may not read the memory of another: large arrays are copied twice, through shared memory",
                "It works, only slower. A container allows it with --cap-add SYS_PTRACE; outside of one, "
                "'sysctl kernel.yama.ptrace_scope=0' does.",
            )
    elif beside:
        without = "the native core is not in use" if _native.core is None else "the ranks share no memory"
        yield warning(
            "shared memory",
            f"{without}: ranks on one host talk over TCP",
            "It works, only slower. 'phalanx doctor' says what is in the way ('native core', 'memory files').",
        )
    for far in leaders[1:]:
        here, there = (f"{world.hosts[rank]} (rank {rank})" for rank in (leaders[0], far))
        yield attempt(f"{here} to {there}", lambda far=far: between(world, leaders[0], far))  # type: ignore[misc]


def over_tcp(world: px.Group, leaders: list[int]) -> Iterator[Finding]:
    """Looks at TCP between all ranks."""
    yield attempt("TCP", lambda: collectives_and_messages(world))


def attempt(topic: str, body: Callable[[], str]) -> Finding:
    """The finding of a test: what it says if the data was right on all ranks."""
    try:
        return ok(topic, f"{body()}; all data arrived as it was sent")
    except WrongData as error:
        return problem(
            topic, str(error), "This machine's memory or network changes data. Do not train on it; test the memory."
        )


def collectives_and_messages(world: px.Group) -> str:
    """Sums and messages around the ring of ranks, small and large."""
    size, rank = world.world_size, world.rank
    tiny = statistics.median(timed_sum(world, SMALL // 8) for _ in range(ROUNDS))
    timed_sum(world, LARGE // 8)
    after, before = (rank + 1) % size, (rank - 1) % size
    seconds = []
    for turn in range(ROUNDS):
        sent, got = pattern(rank, LARGE, turn), np.empty(LARGE, np.uint8)
        seconds.append(timed(world, lambda: world.sendrecv(sent, after, got, before)))  # noqa: B023  (called at once)
        agree(world, np.array_equal(got, pattern(before, LARGE, turn)), f"a message from rank {before} to rank {rank}")
    return f"all_reduce of 8 B in {in_time(tiny)}, messages of 1 MiB at {in_speed(LARGE, seconds)} per rank"


def exchange(world: px.Group) -> str:
    """Every rank sends every other a large part."""
    size, rank = world.world_size, world.rank
    seconds = []
    for turn in range(3):
        sent = np.concatenate([pattern(size * rank + peer, PART, turn) for peer in range(size)])
        got = np.empty_like(sent)
        seconds.append(timed(world, lambda: world.all_to_all(sent, got)))  # noqa: B023
        wanted = np.concatenate([pattern(size * peer + rank, PART, turn) for peer in range(size)])
        agree(world, np.array_equal(got, wanted), f"the parts that rank {rank} got from the others")
    return f"all_to_all with 4 MiB for each rank at {in_speed(PART * (size - 1), seconds)} per rank"


def between(world: px.Group, here: int, there: int) -> str:
    """Messages to and fro between two ranks; the others wait."""
    delays: list[float] = []
    seconds: list[float] = []
    right = True
    for size, into, rounds in ((SMALL, delays, ROUNDS), (PART, seconds, 3)):
        for turn in range(rounds):
            x, got = pattern(here, size, turn), np.empty(size, np.uint8)
            world.barrier()
            began = time.perf_counter()
            if world.rank == here:
                world.send(x, dst=there)
                world.recv(got, src=there)
            elif world.rank == there:
                world.recv(got, src=here)
                world.send(got, dst=here)
            into.append((time.perf_counter() - began) / 2)
            right = right and (world.rank not in (here, there) or np.array_equal(got, x))
    agree(world, right, f"messages between rank {here} and rank {there}")
    # Rank 0 tells, and it is one of the two: the leader of the first host.
    return f"a message of 8 B in {in_time(statistics.median(delays))}, of 4 MiB at {in_speed(PART, seconds)}"


def timed_sum(world: px.Group, count: int) -> float:
    """The seconds of a sum of whole numbers over all ranks, which every rank can work out by itself."""
    size = world.world_size
    x = np.arange(count, dtype=np.float64) + world.rank
    seconds = timed(world, lambda: world.all_reduce(x))
    wanted = size * np.arange(count, dtype=np.float64) + size * (size - 1) / 2
    agree(world, np.array_equal(x, wanted), f"the sum on rank {world.rank}")
    return seconds


def agree(world: px.Group, right: bool, what: str) -> None:
    """Raises `WrongData` on all ranks if something was wrong on one."""
    wrong = [text for fine, text in world.all_gather_object((bool(right), what)) if not fine]
    if wrong:
        raise WrongData(f"wrong data: {'; '.join(wrong)}")


def pattern(seed: int, size: int, turn: int) -> Any:
    """Bytes that differ from rank to rank and from turn to turn."""
    return np.resize(np.arange(251, dtype=np.uint8), size) ^ np.uint8((37 * seed + 11 * turn) % 256)


def timed(world: px.Group, body: Callable[[], object]) -> float:
    """The seconds that it takes, once all ranks are there."""
    world.barrier()
    began = time.perf_counter()
    body()
    return time.perf_counter() - began


def in_time(seconds: float) -> str:
    """`12 µs`."""
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def in_speed(size: int, seconds: list[float]) -> str:
    """`2.4 GB/s`."""
    speed = size / statistics.median(seconds)
    return f"{speed / 1e9:.1f} GB/s" if speed >= 1e9 else f"{speed / 1e6:.0f} MB/s"


if __name__ == "__main__":
    main()
