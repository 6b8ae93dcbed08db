"""Runs torch's suite on one backend, each test in processes of its own: `run`, in a process that is made for it.

    python -m tests.torch_backend.torch_suite.runner ORDER.json

The order names the backend, the device and the tests; what came of them is left in the file that it names. The suite is
imported once, and each test forked from there, several at a time. A test has passed if all its ranks have: torch's own
runner looks at the first only.
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
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Order", "run"]

ANY_END = {"test_ddp_has_finalized"}
"""Tests whose ranks may end as they like."""
TOLD = 3000
"""Characters of what a failed test said that are kept."""


class Order(NamedTuple):
    """What to run."""

    backend: str
    device: str
    only: str = ""
    """A regular expression for the names of the tests."""
    first: tuple[str, ...] = ()
    """Names of tests that come before all others."""
    jobs: int = 4
    limit: float = 60.0
    """Seconds for a test."""
    seconds: float = 3600.0
    """For all of them: after that, no other is begun."""


def run(order: Order) -> dict[str, dict[str, Any]]:
    """What came of each test: its `outcome`, with `told` and `seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.json"
        path.write_text(json.dumps({"order": order._asdict(), "folder": folder}))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([sys.executable, "-m", __spec__.name, str(path)], env=environment, check=True)
        found: dict[str, dict[str, Any]] = json.loads((Path(folder) / "found.json").read_text())
        return found


def main() -> None:
    """Runs what the order says."""
    warnings.filterwarnings("ignore")
    given = json.loads(Path(sys.argv[1]).read_text())
    folder, order = Path(given["folder"]), Order(**given["order"])
    from .lifted import is_for_gpu, load

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no test outlives this process
    suite = load(order.backend, order.device, order.limit)
    names = [name for name in unittest.TestLoader().getTestCaseNames(suite) if re.search(order.only, name)]
    for_gpu = {name for name in names if is_for_gpu(getattr(suite, name))}
    if order.device == "cpu":
        names = [name for name in names if name not in for_gpu]
    names.sort(key=lambda name: (name not in order.first, name not in for_gpu))
    (folder / "found.json").write_text(json.dumps(_run_all(suite, names, order, folder)))


def _run_all(suite: Any, names: list[str], order: Order, folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    running: dict[int, tuple[str, float]] = {}
    begun, waiting = time.monotonic(), names[::-1]
    try:
        while waiting or running:
            while waiting and len(running) < order.jobs and time.monotonic() - begun < order.seconds:
                name = waiting.pop()
                running[_fork(suite, name, folder)] = name, time.monotonic()
            if not running:
                break
            for pid, (name, start) in list(running.items()):
                late = time.monotonic() - start > order.limit
                if not late and os.waitpid(pid, os.WNOHANG) == (0, 0):
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # also ranks that are left
                if late:
                    os.waitpid(pid, 0)
                del running[pid]
                found[name] = {**_outcome(name, folder, late), "seconds": round(time.monotonic() - start, 1)}
            time.sleep(0.02)
    finally:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    return found


def _fork(suite: Any, name: str, folder: Path) -> int:
    """Starts a test in a session of its own; returns its process."""
    from .lifted import ranks_of

    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        out = os.open(folder / f"{name}.told", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ["WORLD_SIZE"] = str(ranks_of(getattr(suite, name)))
        result = unittest.TestResult()
        suite.exit_codes = []
        suite(name).run(result)
        bad = [text for _, text in result.errors + result.failures]
        (folder / f"{name}.json").write_text(
            json.dumps({"skipped": [text for _, text in result.skipped], "bad": bad, "codes": suite.exit_codes})
        )
    finally:
        sys.stdout.flush()
        os._exit(0)


def _outcome(name: str, folder: Path, late: bool) -> dict[str, Any]:
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
