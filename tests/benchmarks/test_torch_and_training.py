"""`python -m benchmarks torch` and `training`: whether they measure what they say, and what they make of it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.__main__ import app
from benchmarks.training.operations import TRAINING
from benchmarks.training.plan import CONTENDERS, TrainingPlan, alone
from benchmarks.training.show import show, steps, tables
from benchmarks.under_torch.goals import asked_for, missed, standing, summary
from benchmarks.under_torch.operations import LISTS, MESSAGES
from click.testing import CliRunner
from tests.launchers.starting import needs_torch

from phalanx.cli import app as phalanx
from phalanx.cli.bench.operations import find_operation
from phalanx.cli.bench.results import BenchReport, CellResult, Column, Machine, Timing

pytestmark = pytest.mark.timeout(180)

QUICK = ["--rounds", "3", "--round-ms", "1"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments, *QUICK]
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=160, check=False)


def report_of(columns: dict[str, bool], cells: list[CellResult]) -> BenchReport:
    return BenchReport(
        date="2000-01-01",
        command="phalanx bench",
        version="0",
        machine=Machine(2, "none", "none", "3", "2", []),
        columns=[Column(name, name.title(), ours, False, "") for name, ours in columns.items()],
        missing={},
        cells=cells,
        memory=[],
        errors=[],
    )


def cell(operation: str, size: int, **seconds: float) -> CellResult:
    timings = [Timing(name.replace("_", "-"), [value] * 3, 1) for name, value in seconds.items()]
    return CellResult(operation, "float32", 2, size, timings)


# -- the command lines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["torch", "--against", "mpich"], "'mpich' is not valid (expected gloo)"),
        (["torch", "all_redvce"], "'all_redvce' is not valid (expected all_reduce"),
        (["torch", "-n", "1"], "'1' is not valid (expected numbers from 2"),
        (["torch", "--transport", ""], "there is nothing to measure"),
        (["training", "--models", "resnet"], "'resnet' is not valid (expected gpt, layers)"),
        (["training", "--models", ""], "there is nothing to measure"),
        (["training", "--plot", "x.svg"], "No such option"),
    ],
)
def test_a_wrong_call_says_what_is_valid(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("kind", "names"), [("torch", [*LISTS, *MESSAGES, "all_reduce"]), ("training", list(TRAINING))]
)
def test_help_names_what_is_measured(kind: str, names: list[str]) -> None:
    result = CliRunner().invoke(app, [kind, "--help"])
    assert result.exit_code == 0
    for name in names:
        assert name in result.output
    assert kind in CliRunner().invoke(app, ["--help"]).output


def test_lists_are_for_torch_only() -> None:
    result = CliRunner().invoke(phalanx, ["bench", "all_gather_list"])
    assert result.exit_code == 2
    assert find_operation("all_gather_list").shape is find_operation("all_gather").shape


# -- whole runs ------------------------------------------------------------------------------------------------------


@needs_torch
def test_torch_on_phalanx_beside_gloo(tmp_path: Path) -> None:
    operations = ["all_reduce", "barrier", *LISTS, *MESSAGES]
    result = bench("torch", *operations, "-s", "4,64K", "--against", "gloo", "--json", str(tmp_path / "found.json"))
    assert result.returncode == 0, result.stderr
    report = BenchReport.decode((tmp_path / "found.json").read_bytes())
    assert [column.name for column in report.columns] == ["phalanx", "gloo"]
    assert {cell.operation for cell in report.cells} == set(operations)
    assert not report.errors
    for found in report.cells:
        assert all(timing.seconds or timing.lacks for timing in found.timings), found
    for word in ("all_gather_list, 2 ranks", "pingpong_async, 2 ranks", "torch on Phalanx", "Gloo"):
        assert word in result.stdout
    for kind, short, long in (("collectives", "6", "2.5"), ("messages", "4", "2")):
        assert re.search(rf"{kind} up to 16 KiB: .*asked for: {short}$", result.stdout, re.MULTILINE)
        assert re.search(rf"{kind} above: .*asked for: {long}$", result.stdout, re.MULTILINE)


@needs_torch
@pytest.mark.slow  # half a minute of importing: six processes with all of torch that DDP needs
def test_training_with_each_wrapper(tmp_path: Path) -> None:
    result = bench("training", "--models", "layers", "--json", str(tmp_path / "found.json"))
    assert result.returncode == 0, result.stderr
    report = BenchReport.decode((tmp_path / "found.json").read_bytes())
    assert [found.operation for found in report.cells] == ["layers"]
    for found in report.cells:
        assert all(steps(found, name) is not None for name in CONTENDERS), found
    for word in ("layers, 2 ranks", "torch's DDP on Gloo", "Phalanx's DDP", "waiting"):
        assert word in result.stdout


# -- what they make of it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "short", "long"), [("all_reduce", 6, 2.5), ("barrier", 6, 2.5), *((name, 4, 2) for name in MESSAGES)]
)
def test_what_is_asked_for_depends_on_the_operation_and_the_size(operation: str, short: float, long: float) -> None:
    assert [asked_for(operation, size) for size in (0, 4, 16 << 10)] == [short] * 3
    assert [asked_for(operation, size) for size in ((16 << 10) + 4, 1 << 20, 64 << 20)] == [long] * 3


def test_a_cell_that_misses_is_named() -> None:
    cells = [
        cell("all_reduce", 4, phalanx=1e-5, gloo=3e-4),
        cell("all_reduce", 1 << 20, phalanx=1e-3, gloo=2e-3),
        cell("all_reduce", 64 << 20, phalanx=1e-2, gloo=3e-2),
        cell("pingpong", 1 << 20, phalanx=1e-3, gloo=2e-3),
    ]
    report = report_of({"phalanx": True, "gloo": False}, cells)
    assert [(found.cell.operation, found.cell.size) for found in missed(report)] == [("all_reduce", 1 << 20)]
    small = "at least 30.0 times as fast as Gloo (all_reduce of 4 B on 2 ranks)"
    lines = list(summary(report))
    assert ("collectives up to 16 KiB", f"{small}; asked for: 6") in lines
    assert [name for name, _ in lines] == ["collectives up to 16 KiB", "collectives above", "messages above", "missed"]
    assert ("missed", "all_reduce of 1 MiB on 2 ranks: 2.00 times, asked for: 2.5") in lines
    assert ("collectives up to 16 KiB", small) in list(standing(report))
    assert not [text for line in standing(report) for text in line if "asked for" in text or "missed" in text]


def test_waiting_is_what_a_step_takes_longer_than_alone() -> None:
    found = cell("gpt", 0, torch=0.03, torch_alone=0.02, phalanx=0.02, phalanx_alone=0.021, gloo=0.06, gloo_alone=0.02)
    both = [name for one in CONTENDERS for name in (one, alone(one))]
    report = report_of({name: not name.startswith("gloo") for name in both}, [found])
    table = next(iter(tables(report)))
    assert [row[3] for row in table.rows] == ["10.0 ms (33%)", "0.00 µs (0%)", "40.0 ms (67%)"]
    assert [row[4] for row in table.rows] == ["2.00", "3.00", ""]
    assert table.value(0, 5) == pytest.approx(4)
    assert table.value(1, 5) is None  # there was none that could be measured
    out = io.StringIO()
    show(report, out)
    assert "its waiting / this" in out.getvalue()


def test_a_contender_that_failed_has_no_steps() -> None:
    found = CellResult("gpt", "", 2, 0, [Timing("gloo", error="it broke"), Timing("gloo-alone", [1.0], 1)])
    assert steps(found, "gloo") is None


def test_every_contender_takes_part_twice() -> None:
    plan = TrainingPlan(ranks=[2], contenders=list(CONTENDERS.values()))
    (model, *_) = plan.cells(2)
    orders = [plan.prepare(model, entrant).operation for entrant in plan.entrants("gpt")]
    assert orders == ["gpt", "gpt-alone"] * 3
