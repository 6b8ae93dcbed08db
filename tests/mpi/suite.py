"""What runs under mpirun: the conformance suite and the property tests of the collectives, all in one job.

`python -m tests.mpi.suite REPORT`: rank 0 writes what each of them came to. `... REPORT serialized` does a part of it
with an MPI that lets one thread in at a time.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import settings

# All ranks draw the same examples. Before the tests are imported, whose settings follow from it.
settings.register_profile("mpi", deadline=None, derandomize=True, database=None)
settings.load_profile("mpi")

from tests.collectives import test_against_numpy  # noqa: E402

import phalanx as px  # noqa: E402
from phalanx.backends import MpiBackend, SubBackend  # noqa: E402
from phalanx.testing import conformance  # noqa: E402

TIMEOUT = 10.0
ENDS_ITS_WORLD = ("closing.", "subgroups.close_parent", "timeouts.send_times_out", "asynchronous.async_send_timeout")
"""Checks that leave nothing to go on with."""
Results = dict[str, str]


@dataclass(frozen=True)
class Mode:
    """Another way for collectives than the usual one."""

    name: str
    options: px.Options
    without: tuple[str, ...] = ()

    def has(self, check: str) -> bool:
        return (
            check.startswith(("collectives.", "gathers.", "groups.", "scans.", "uneven.")) and check not in self.without
        )


NEED_THE_GATE = (
    "collectives.timeout_breaks",
    "collectives.desync",
    "scans.scans_time_out",
    "scans.scans_that_differ",
    "uneven.uneven_that_differ",
)
MODES = [
    # As between hosts: the ranks meet through MPI and not in shared memory.
    Mode("apart", px.Options(transport="tcp")),
    Mode("unchecked", px.Options(mpi_check=False), NEED_THE_GATE),
]


class Workers:
    """Looks like the workers of `tests.collectives`, but each rank is a process, and runs only its own part."""

    def __init__(self, group: px.Group, everybody: Any) -> None:
        self._group = group
        self._everybody = everybody
        self.size = group.world_size

    def run(self, body: Callable[[px.Group], Any]) -> list[Any]:
        """What `body` returned on each rank; all ranks raise if one does."""
        result, error = None, None
        try:
            result = body(self._group)
        except Exception:
            error = traceback.format_exc()
        answers = self._everybody.allgather((result, error))
        for rank, (_, failure) in enumerate(answers):
            if failure is not None:
                raise AssertionError(f"rank {rank}: {failure}")
        return [result for result, _ in answers]


@contextmanager
def told(results: Results, name: str, everybody: Any) -> Iterator[None]:
    """Notes what came of a test, on all ranks alike."""
    failure, began = "", time.monotonic()
    try:
        yield
    except Exception:
        failure = traceback.format_exc()
    here = everybody.Ibarrier()
    while not here.Test():  # ranks that take no part leave the cores to those that do: MPI would look all the time
        time.sleep(0.002)
    failures = everybody.allgather(failure)
    results[name] = next((f"rank {rank}: {text}" for rank, text in enumerate(failures) if text), "")
    if results[name] and everybody.rank == 0:
        sys.stderr.write(f"{name} failed:\n{results[name]}\n")
    if everybody.rank == 0 and time.monotonic() - began > 1:
        sys.stderr.write(f"{name} took {time.monotonic() - began:.1f} s\n")


def run_conformance(results: Results, everybody: Any, mode: Mode | None = None) -> None:
    """Every check that this world is large enough for: as it is, or with the first of its ranks as a sub-group.

    Args:
        mode: Another way for collectives; then only what has to do with them.
    """
    backend = MpiBackend(timeout=TIMEOUT, options=mode and mode.options)
    for check in conformance.checks():
        if check.ranks > backend.world_size or (mode is not None and not mode.has(check.name)):
            continue
        name = check.name if mode is None else f"{mode.name}: {check.name}"
        with told(results, name, everybody):
            if check.ranks == backend.world_size:
                check.function(backend)
            elif backend.rank < check.ranks:
                part = SubBackend(backend, range(check.ranks))
                check.function(part)
                part.close()
            if check.name.startswith(ENDS_ITS_WORLD):
                backend.close()
        if results[name] or check.name.startswith(ENDS_ITS_WORLD):
            backend.close()
            backend = MpiBackend(timeout=TIMEOUT, options=mode and mode.options)
    backend.close()


def run_properties(results: Results, everybody: Any) -> None:
    """The tests of `tests.collectives.test_against_numpy`."""
    with px.init("mpi", timeout=TIMEOUT) as group:
        workers = Workers(group, everybody)
        for name, test in vars(test_against_numpy).items():
            if name.startswith("test_") and "workers" in inspect.signature(test).parameters:
                with told(results, name, everybody):
                    test(workers=workers)


def main(report: Path, threads: str = "multiple") -> None:
    import mpi4py

    from phalanx.backends.mpi.library import load_mpi

    mpi4py.rc.thread_level = threads
    mpi = load_mpi()
    assert mpi.multiple == (threads == "multiple")
    everybody = mpi.module.COMM_WORLD.Dup()
    results: Results = {}
    run_conformance(results, everybody, None if mpi.multiple else Mode(threads, px.Options()))
    if mpi.multiple:
        run_properties(results, everybody)
        for mode in MODES if everybody.size > 2 else ():
            run_conformance(results, everybody, mode)
    if everybody.rank == 0:
        report.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
