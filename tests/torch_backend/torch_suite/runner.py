"""Runs torch's suite on one backend, each test in processes of its own: `run`, in a process that is made for it.

    python -m tests.torch_backend.torch_suite.runner ORDER.json

The order names the backend, the device and the tests; a line for each is added to the file that it names, so that what
was found is kept if the run is ended. The suite is imported once, and each test, or row of them (see `row`), forked
from there, several at a time. A test has passed if all its ranks have: torch's own runner looks at the first only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Order", "forget", "results_of", "run"]

ANY_END = {"test_ddp_has_finalized"}
"""Tests whose ranks may end as they like."""
TOLD = 3000
"""Characters of what a failed test said that are kept."""

Result = dict[str, Any]


class Order(NamedTuple):
    """What to run."""

    backend: str
    device: str
    results: str
    """The file to which a line is added for each test. Tests that it knows are not run."""
    only: str = ""
    """A regular expression for the names of the tests."""
    first: tuple[str, ...] = ()
    """Names of tests that come before all others."""
    jobs: int = 4
    limit: float = 60.0
    """Seconds for a test."""
    seconds: float = 3600.0
    """For all of them: after that, no other is begun."""
    row: int = 1
    """Tests that the same ranks do, one after another."""


def run(order: Order) -> dict[str, Result]:
    """What came of each test, also of those that had been run before: its `outcome`, with `told` and `seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.json"
        path.write_text(json.dumps({"order": order._asdict(), "folder": folder}))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([sys.executable, "-m", __spec__.name, str(path)], env=environment, check=True)
    return results_of(order)


def results_of(order: Order) -> dict[str, Result]:
    """What the file of an order says of its backend and device, by the names of the tests."""
    path = Path(order.results)
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return {
        result["name"]: result
        for result in found
        if (result["backend"], result["device"]) == (order.backend, order.device)
    }


def forget(results: str, again: str) -> None:
    """Takes the tests whose names match out of a file of results, for all backends."""
    path = Path(results)
    lines = path.read_text().splitlines() if path.exists() else []
    path.write_text("".join(f"{line}\n" for line in lines if not re.search(again, json.loads(line)["name"])))


def main() -> None:
    """Runs what the order says."""
    warnings.filterwarnings("ignore")
    given = json.loads(Path(sys.argv[1]).read_text())
    folder, order = Path(given["folder"]), Order(**given["order"])
    from .lifted import is_for_gpu, load

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no test outlives this process
    suite = load(order.backend, order.device, order.limit)
    known = results_of(order)
    names = [name for name in unittest.TestLoader().getTestCaseNames(suite) if re.search(order.only, name)]
    names = [name for name in names if name not in known]
    for_gpu = {name for name in names if is_for_gpu(getattr(suite, name))}
    if order.device == "cpu":
        names = [name for name in names if name not in for_gpu]
    names.sort(key=lambda name: (name not in order.first, name not in for_gpu))

    with Path(order.results).open("a") as lines:

        def note(name: str, result: Result) -> None:
            line = {"backend": order.backend, "device": order.device, "name": name, **result}
            print(json.dumps(line), file=lines, flush=True)

        Run(suite, order, folder, note).all(names)


class Row(NamedTuple):
    """Tests for the same ranks."""

    names: list[str]
    """Those that have not passed yet; the first one is under way."""
    ranks: int
    is_alone: bool
    """Whether it is one test, as torch runs it: in ranks of its own."""


class Run:
    """The tests of an order, several rows at a time.

    Args:
        note: Takes what came of a test.
    """

    def __init__(self, suite: Any, order: Order, folder: Path, note: Callable[[str, Result], None]) -> None:
        self._suite = suite
        self._order = order
        self._folder = folder
        self._note = note
        self._waiting: list[Row] = []
        self._running: dict[int, Row] = {}
        self._since: dict[int, float] = {}
        """When the first test of each running row began."""

    def all(self, names: list[str]) -> None:
        """Runs the tests until all have been, or the time is over."""
        end = time.monotonic() + self._order.seconds
        self._waiting = self._in_rows([name for name in names if not self._is_skipped(name)])
        try:
            while self._waiting or self._running:
                is_over = time.monotonic() > end
                while self._waiting and len(self._running) < self._order.jobs and not is_over:
                    self._begin(self._waiting.pop(0))
                if not self._running:
                    break
                for pid in list(self._running):
                    self._look_at(pid, is_over)
                time.sleep(0.02)
        finally:
            for pid in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _is_skipped(self, name: str) -> bool:
        """Notes a test that torch skips on all backends."""
        test = getattr(self._suite, name)
        if not getattr(test, "__unittest_skip__", False):
            return False
        self._note(name, {"outcome": "skipped", "told": test.__unittest_skip_why__, "seconds": 0.0})
        return True

    def _in_rows(self, names: list[str]) -> list[Row]:
        """The tests in rows. Neighbours are put into different ones: they take about equally long."""
        from .lifted import MANY, ranks_of

        rows = []
        for ranks in (2, MANY):
            alike = [name for name in names if ranks_of(getattr(self._suite, name)) == ranks]
            count = -(-len(alike) // self._order.row)
            rows += [Row(alike[start::count], ranks, self._order.row == 1) for start in range(count)]
        return rows

    def _begin(self, row: Row) -> None:
        pid = self._fork(row)
        self._running[pid] = row
        self._since[pid] = time.monotonic()

    def _look_at(self, pid: int, is_over: bool) -> None:
        """Notes what a row has passed, and what came of it if it has ended or must end now."""
        row = self._running[pid]
        has_ended = os.waitpid(pid, os.WNOHANG) != (0, 0)
        while not row.is_alone and row.names and self._has_passed(row):
            self._note(row.names.pop(0), {"outcome": "passed", "told": "", "seconds": self._seconds(pid)})
            self._since[pid] = time.monotonic()
        late = self._seconds(pid) > self._order.limit
        if not (has_ended or late or (is_over and not row.is_alone)):
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # also ranks that are left
        if not has_ended:
            os.waitpid(pid, 0)
        del self._running[pid]
        if row.is_alone:
            outcome = _outcome(row.names[0], self._folder, late)
            self._note(row.names[0], {**outcome, "seconds": self._seconds(pid)})
        elif row.names and not is_over:
            # What has not passed among others decides for itself; those behind it go on without it.
            first, rest = row.names[0], row.names[1:]
            (self._folder / f"{first}.told").unlink(missing_ok=True)
            self._waiting.insert(0, Row([first], row.ranks, True))
            if rest:
                self._waiting.append(row._replace(names=rest))

    def _seconds(self, pid: int) -> float:
        return round(time.monotonic() - self._since[pid], 1)

    def _has_passed(self, row: Row) -> bool:
        from .row import done_mark

        return all(done_mark(self._folder, row.names[0], rank).exists() for rank in range(row.ranks))

    def _fork(self, row: Row) -> int:
        """Starts a row in a session of its own; returns its process."""
        from .row import run_row, write_to

        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ["WORLD_SIZE"] = str(row.ranks)
            if row.is_alone:
                write_to(self._folder / f"{row.names[0]}.told")
                _run_alone(self._suite, row.names[0], self._folder)
            else:
                run_row(self._suite, row.names, row.ranks, self._folder)
        finally:
            sys.stdout.flush()
            os._exit(0)


def _run_alone(suite: Any, name: str, folder: Path) -> None:
    result = unittest.TestResult()
    suite.exit_codes = []
    suite(name).run(result)
    bad = [text for _, text in result.errors + result.failures]
    (folder / f"{name}.json").write_text(
        json.dumps({"skipped": [text for _, text in result.skipped], "bad": bad, "codes": suite.exit_codes})
    )


def _outcome(name: str, folder: Path, late: bool) -> Result:
    told = (folder / f"{name}.told").read_text(errors="replace")[-TOLD:]
    try:
        result = json.loads((folder / f"{name}.json").read_text())
    except FileNotFoundError:
        return {"outcome": "late" if late else "crashed", "told": told}
    if result["skipped"]:
        return {"outcome": "skipped", "told": result["skipped"][0]}
    codes = result["codes"]
    if result["bad"] or not codes or (name not in ANY_END and any(codes)):
        text = "\n".join([*result["bad"], told])[-TOLD:]  # the ranks' own words last: they say more
        crashed = any(code is not None and code < 0 for code in codes)
        return {"outcome": "crashed" if crashed else "failed", "told": f"{text}\nranks ended with {codes}"}
    return {"outcome": "passed", "told": ""}


if __name__ == "__main__":
    main()
