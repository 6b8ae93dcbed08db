"""`python -m benchmarks rpc`: who takes part, whether answers are right, failures, the goals, and what is left."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.__main__ import app
from benchmarks.calls import contenders, worker
from benchmarks.calls.contenders import PEERS, PIPE, CallContender, find_peer, ours
from benchmarks.calls.goals import GOALS, standings
from benchmarks.calls.plan import CELLS, RemoteCallPlan
from benchmarks.calls.show import all_errors, show, tables
from click.testing import CliRunner
from tests.launchers.starting import needs_torch

from phalanx.cli.bench.contenders import Missing, Site
from phalanx.cli.bench.machine import MachineLimits
from phalanx.cli.bench.measure import Measuring
from phalanx.cli.bench.plan import Cell
from phalanx.cli.bench.plot import draw
from phalanx.cli.bench.results import Bandwidth, BenchReport, CellResult, Column, Machine, Timing

pytestmark = pytest.mark.timeout(120)

BENCH = [sys.executable, "-m", "benchmarks", "rpc"]
QUICK = ["--rounds", "3", "--round-ms", "1"]
RAY = Path(__file__).resolve().parents[2] / ".venv-ray" / "bin" / "python"

needs_zmq = pytest.mark.skipif(importlib.util.find_spec("zmq") is None, reason="pyzmq is not installed")
needs_grpc = pytest.mark.skipif(importlib.util.find_spec("grpc") is None, reason="grpcio is not installed")
needs_ray = pytest.mark.skipif(not RAY.exists(), reason=f"there is no {RAY}")
needs_agent = pytest.mark.skipif(
    importlib.util.find_spec("phalanx.rpc.agent") is None, reason="there is no phalanx.rpc.Agent yet"
)


def bench(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", **variables}
    return subprocess.run(
        [*BENCH, *arguments, *QUICK], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def processes(folder: Path, library: str = "") -> list[int]:
    """Those whose files are in a folder, of one contender or of all."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else ""
            if str(folder) in words and (not library or f"\0{library}\0" in words):
                found.append(int(entry.name))
    return found


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    return False


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# -- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--against", "gloo"], "'gloo' is not valid (expected pipe, torch, zmq, grpc, ray)"),
        (["--cells", "8,2K"], "'2K' is not valid (expected 8, 1K"),
        (["--cells", ""], "there is nothing to measure"),
        (["--transport", "shm"], "'shm' is not valid (expected auto, tcp)"),
        (["--rounds", "1"], "1 is not in the range"),
        (["all_reduce"], "unexpected extra argument (all_reduce)"),
    ],
)
def test_a_wrong_call_says_what_is_valid(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["rpc", *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert "Usage: app rpc" in result.output


def test_help_names_cells_and_contenders() -> None:
    result = CliRunner().invoke(app, ["rpc", "--help"])
    assert result.exit_code == 0
    for word in [*CELLS, *PEERS, PIPE.name, "--against", "--json"]:
        assert word in result.output


# -- who takes part --------------------------------------------------------------------------------------------------


def test_what_is_missing_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: None)
    for name, word in (("torch", "pip install torch"), ("zmq", "pip install pyzmq"), ("grpc", "pip install grpcio")):
        found = find_peer(name)
        assert isinstance(found, Missing)
        assert found.name == name
        assert word in found.reason
    gone = find_peer("ray", ray=tmp_path / "python")
    assert isinstance(gone, Missing)
    assert "does not run" in gone.reason
    without = tmp_path / "without"
    without.write_text("#!/bin/sh\nexit 1\n")
    without.chmod(0o700)
    found = find_peer("ray", ray=without)
    assert isinstance(found, Missing)
    assert re.search(r"ray is not installed for .*without \(pip install ray numpy; --ray PATH", found.reason)


def test_both_ranks_get_one_address_and_ours_a_fresh_token() -> None:
    made = [ours("tcp").launches(["worker"], 2, Site(port=lambda: 7), {}) for _ in range(2)]
    assert [launch.command for launch in made[0]] == [["worker", str(rank), "127.0.0.1:7"] for rank in (0, 1)]
    assert made[0][0].env["PHALANX_TRANSPORT"] == "tcp"
    assert made[0][0].env["PHALANX_TOKEN"] == made[0][1].env["PHALANX_TOKEN"] != made[1][0].env["PHALANX_TOKEN"]
    assert len(PIPE.launches(["worker"], 2, Site(), {})) == 1, "rank 0 starts rank 1"


# -- one process -----------------------------------------------------------------------------------------------------


class FakeCaller:
    """Gives back what it is told to."""

    version = ""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change = change

    def echo(self, x: Any) -> worker.Call:
        return lambda: self.change(x)

    def in_flight(self, x: bytes, count: int) -> worker.Call:
        return lambda: [self.change(x) for _ in range(count)]

    array = echo

    def close(self) -> None:
        pass


def again(x: Any) -> Any:
    return x.copy() if isinstance(x, np.ndarray) else bytes(bytearray(x))


@pytest.mark.parametrize("operation", ["echo", "in_flight", "array"])
def test_a_wrong_answer_is_seen(operation: str) -> None:
    def check(change: Callable[[Any], Any]) -> bool:
        return worker._PreparedCall(FakeCaller(change), operation, 64).check()

    assert check(again)
    assert not check(lambda x: x), "it never left the process"
    assert not check(lambda x: again(x)[:-1])
    assert not check(lambda x: again(x)[::-1])
    assert not check(lambda x: None)
    if operation == "array":
        assert not check(lambda x: x.astype(np.float64))


def test_a_call_takes_the_median_and_a_part_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1.0, 3.0, 100.0])
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(moments))
    assert worker.timed(lambda: None, 3) == 2
    monkeypatch.setattr(worker, "timed", lambda call, iterations: 64.0 * iterations)
    prepared = worker._PreparedCall(FakeCaller(again), "in_flight", 8)
    assert prepared.run(65) == 2 * 65, "two batches for 65 calls, and one second for each call of a batch"


# -- real runs -------------------------------------------------------------------------------------------------------


def measuring(
    tmp_path: Path, found: list[CallContender], *names: str, step: Callable[[Any], None] = lambda step: None
) -> Measuring:
    plan = RemoteCallPlan(names=names or tuple(CELLS), contenders=found, rounds=3, round_seconds=0.001, limit=30)
    return Measuring(plan, site=Site(), folder=tmp_path, limits=MachineLimits(), step=step)


def peer(name: str, **changes: Any) -> CallContender:
    found = find_peer(name, **changes)
    assert isinstance(found, CallContender), found
    return found


def measured(run: Measuring) -> None:
    """Every cell of every contender, but for what a pipe cannot do."""
    run.run()
    assert run.errors == []
    assert len(run.cells) == len(CELLS)
    for cell in run.cells:
        for timing in cell.timings:
            if timing.entrant == "pipe" and cell.operation == "in_flight":
                assert "no calls" in timing.lacks
            else:
                assert timing.seconds, (cell.operation, timing)
    assert all(run.versions.values())


def test_the_pipe(tmp_path: Path) -> None:
    measured(measuring(tmp_path, [PIPE]))
    assert processes(tmp_path) == []


@needs_zmq
def test_pyzmq_beside_the_pipe(tmp_path: Path) -> None:
    measured(measuring(tmp_path, [PIPE, peer("zmq")]))


@needs_grpc
def test_grpc(tmp_path: Path) -> None:
    measured(measuring(tmp_path, [peer("grpc")]))


@needs_torch
def test_torch(tmp_path: Path) -> None:
    """Its processes never rest, so they are stopped between two orders."""

    stopped: list[bool] = []

    def step(what: Cell | str) -> None:
        if isinstance(what, Cell):
            time.sleep(0.05)
            stopped.extend(map(is_stopped, run._running["torch"].pids))

    run = measuring(tmp_path, [peer("torch")], step=step)
    measured(run)
    assert stopped == [True] * 2 * len(CELLS)
    assert processes(tmp_path) == []


@needs_ray
def test_ray() -> None:
    # Not in a folder of pytest's: Ray's sockets have long names, and there is a limit.
    done = bench("--cells", "8,in-flight,1M", "--transport", "tcp", "--against", "ray", "--ray", str(RAY))
    assert "Ray on 2 ranks" not in done.stderr, done.stderr
    rows = re.findall(r"^Ray +([\d.,]+ (?:µs|ms)) ±", done.stdout, re.M)
    assert len(rows) == 3, done.stdout


@needs_agent
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_phalanx(tmp_path: Path, transport: str) -> None:
    run = measuring(tmp_path, [ours(transport)])
    measured(run)
    assert not run.ours_failed
    assert processes(tmp_path) == []


@needs_agent
@needs_zmq
def test_in_a_pipe_it_writes_tables_goals_and_the_file(tmp_path: Path) -> None:
    data = tmp_path / "out.json"
    where = ["--ray", str(tmp_path / "nothing")]
    done = bench("--cells", "8,16M", "--against", "pipe,zmq,ray", *where, "--json", str(data))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("benchmarks: ray is left out: --ray ")
    assert len(done.stderr.splitlines()) == 1
    assert "\x1b" not in done.stdout
    for words in ("echo of 8 B\n", "echo of an array of 16 MiB\n", "ray left out: ", "/ Phalanx TCP", "(pyzmq)"):
        assert words in done.stdout
    assert re.search(
        r"^Phalanx, echo of 8 B: [\d.]+ times multiprocessing\.Pipe's speed \(asked for: 1", done.stdout, re.M
    )
    assert re.search(r"^Phalanx TCP, echo of an array of 16 MiB: [\d.]+ times pyzmq's speed", done.stdout, re.M)
    report = BenchReport.decode(data.read_bytes())
    assert [column.name for column in report.columns] == ["phalanx", "phalanx-tcp", "pipe", "zmq"]
    # Contenders that are near each other have more of them.
    assert {len(timing.rounds) for cell in report.cells for timing in cell.timings} <= {3, 9}
    assert report.command == "python -m benchmarks rpc --cells 8,16M --against pipe,zmq,ray --rounds 3 --round-ms 1"


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_contender_that_dies_is_reported_and_started_again(tmp_path: Path) -> None:
    steps: list[Cell] = []

    def step(what: Cell | str) -> None:
        if isinstance(what, Cell):
            steps.append(what)
            if len(steps) == 1:
                os.kill(run._running["pipe"].pids[1], signal.SIGKILL)

    other = CallContender(name="other", label="Other pipe", library="pipe", worker=PIPE.worker, starts_both=True)
    run = measuring(tmp_path, [PIPE, other], "8", "1K", step=step)
    run.run()
    assert len(run.errors) == 1
    assert run.errors[0].startswith("multiprocessing.Pipe on 2 ranks failed (")
    first, second = run.cells
    assert [bool(timing.error) for timing in first.timings] == [True, False]
    assert [bool(timing.seconds) for timing in second.timings] == [True, True]
    assert processes(tmp_path) == []


def test_one_that_does_not_start_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    broken = CallContender(name="broken", label="Broken", library="nothing_of_that_name")
    run = measuring(tmp_path, [broken, PIPE], "8")
    run.run()
    assert "with_nothing_of_that_name" in run.errors[0]
    assert [bool(timing.seconds) for timing in run.cells[0].timings] == [False, True]


# -- the end ---------------------------------------------------------------------------------------------------------


def start(tmp_path: Path) -> subprocess.Popen[str]:
    """A run that takes long, with its files in a folder of its own, when it has stopped the processes of torch."""
    process = subprocess.Popen(
        [*BENCH, "--cells", "1M", "--rounds", "1000", "--round-ms", "50", "--against", "torch"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

    def is_ready() -> bool:
        return list(map(is_stopped, processes(tmp_path, "torch"))) == [True, True]

    wait_until(lambda: is_ready() or process.poll() is not None, 60)
    return process


@needs_torch
def test_a_signal_ends_all_and_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.send_signal(signal.SIGTERM)  # is made to end it as Ctrl-C does, as in `phalanx bench`
    assert process.wait(20) != 0
    assert process.stdout is not None
    assert "Traceback" not in process.stdout.read()
    process.stdout.close()
    assert processes(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@needs_torch
def test_all_end_when_their_driver_is_killed_also_those_that_are_stopped(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.kill()
    process.wait(10)
    assert process.stdout is not None
    process.stdout.close()
    wait_until(lambda: processes(tmp_path) == [], 10)


# -- what it says ----------------------------------------------------------------------------------------------------


def report(**changes: Any) -> BenchReport:
    """Phalanx reaches every goal, and over TCP every second one."""

    def cell(name: str, **seconds: float) -> CellResult:
        timings = [Timing(who.replace("_", "-"), [t], 9) for who, t in seconds.items()]
        return CellResult(**CELLS[name]._asdict(), timings=timings)

    def column(name: str, label: str) -> Column:
        return Column(name, label, name.startswith("phalanx"), False, "1")

    flight = cell("in-flight", phalanx=10e-6, phalanx_tcp=30e-6, torch=90e-6)
    flight.timings.append(Timing("pipe", lacks="no calls"))
    flight.timings.append(Timing("zmq", error="it broke"))
    values: dict[str, Any] = {
        "date": "2026-01-02",
        "command": "python -m benchmarks rpc",
        "version": "1.2",
        "machine": Machine(2, "A chip", "Linux 6.1", "3.11.1", "2.0", [Bandwidth(1, 64 << 20, 1e10, 1e10)]),
        "columns": [
            column("phalanx", "Phalanx"),
            column("phalanx-tcp", "Phalanx TCP"),
            column("pipe", "A pipe"),
            column("torch", "torch"),
            column("zmq", "pyzmq"),
        ],
        "missing": {"ray": "it is not installed"},
        "cells": [
            cell("8", phalanx=20e-6, phalanx_tcp=50e-6, pipe=30e-6, torch=500e-6, zmq=80e-6),
            flight,
            cell("16M", phalanx=4e-3, phalanx_tcp=6e-3, pipe=30e-3, torch=24e-3, zmq=11e-3),
        ],
        "memory": [],
        "errors": [],
    }
    return BenchReport(**{**values, **changes})


def test_goals() -> None:
    found = list(standings(report()))
    assert len(found) == 2 * len(GOALS)
    assert [standing.reached for _, standing in found[: len(GOALS)]] == [True] * len(GOALS)
    missed = [f"{text}: {standing}" for text, standing in found if not standing.reached]
    assert missed == [
        "Phalanx TCP, echo of 8 B: 0.60 times A pipe's speed (asked for: 1, missed)",
        "Phalanx TCP, 64 calls in flight, 8 B: 3.00 times torch's speed (asked for: 8, missed)",
        "Phalanx TCP, echo of an array of 16 MiB: 1.83 times pyzmq's speed (asked for: 2, missed)",
    ]
    without = report(columns=[column for column in report().columns if column.name != "phalanx-tcp"], cells=[])
    assert list(standings(without)) == []


def test_a_table_for_each_cell() -> None:
    first, flight, _ = tables(report())
    assert first.title == "echo of 8 B"
    assert first.head == ["", "time per call", "/ Phalanx", "/ Phalanx TCP"]
    assert first.rows[0] == ["Phalanx", "20.0 µs ±0%", "", ""]
    assert first.rows[2] == ["A pipe", "30.0 µs ±0%", "1.50", "0.60"]
    assert first.rows[-1] == ["best peer / Phalanx", "(pyzmq)", "4.00", "1.60"], "the pipe is no peer"
    assert [row[1] for row in flight.rows[2:]] == ["n/a", "90.0 µs ±0%", "failed", "(torch)"]
    assert first.value(2, 3) == pytest.approx(0.6)
    assert first.value(0, 1) is None


def test_plain_text_and_errors() -> None:
    out = io.StringIO()
    show(report(), out)
    text = out.getvalue()
    assert "\x1b" not in text
    for words in (
        "64 calls in flight, 8 B\n",
        "ray left out: it is not installed\n",
        "n/a: A pipe: no calls\n",
        "torch.distributed.rpc: polls without a rest",
        "Phalanx, echo of 8 B: 25.0 times torch's speed (asked for: 10)\n",
    ):
        assert words in text
    assert all_errors(report()) == ["64 calls in flight, 8 B: it broke"]


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "rpc.svg"
    draw(report(), file)
    assert file.stat().st_size > 1000
