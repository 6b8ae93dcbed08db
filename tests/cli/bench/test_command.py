"""`phalanx bench` as a person runs it: the table, the files, peers, failures, and what is left after Ctrl-C."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.gpu.gpu import needs_gpu
from tests.lateness import bound
from tests.launchers.starting import mpirun, needs_mpirun, needs_torch

from phalanx import _native
from phalanx.cli import app
from phalanx.cli.bench.contenders import Contender, Site, ours
from phalanx.cli.bench.machine import MachineLimits
from phalanx.cli.bench.measure import Measuring
from phalanx.cli.bench.plan import BenchPlan, Cell
from phalanx.cli.bench.results import BenchReport

pytestmark = pytest.mark.timeout(120)

BENCH = [sys.executable, "-m", "phalanx", "bench"]
QUICK = ["--rounds", "3", "--round-ms", "1"]

needs_mpi4py = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")


def bench(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", **variables}
    return subprocess.run(
        [*BENCH, *arguments, *QUICK], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def workers(folder: Path) -> list[int]:
    """The ranks whose files are in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# -- the whole thing -------------------------------------------------------------------------------------------------


def test_in_a_pipe_it_writes_a_table_and_the_files(tmp_path: Path) -> None:
    data = tmp_path / "out.json"
    done = bench("all_reduce,barrier", "pingpong", "-s", "8,4K", "-n", "2,3", "--memory", "--json", str(data))
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "\x1b" not in done.stdout
    for words in (
        "all_reduce, 2 ranks, float32",
        "barrier, 3 ranks\n",
        "pingpong, 3 ranks",
        "memory, Phalanx, 3 ranks",
    ):
        assert words in done.stdout
    assert re.search(r"^4 KiB +[\d.,]+ (µs|ms) ±\d+%$", done.stdout, re.M)
    report = BenchReport.decode(data.read_bytes())
    assert [(cell.operation, cell.ranks, cell.size) for cell in report.cells] == [
        (operation, ranks, size)
        for ranks in (2, 3)
        for operation, size in [
            *(("all_reduce", s) for s in (8, 4096)),
            ("barrier", 0),
            *(("pingpong", s) for s in (8, 4096)),
        ]
    ]
    assert all(len(timing.rounds) == 3 for cell in report.cells for timing in cell.timings)
    assert report.command.startswith("phalanx bench all_reduce,barrier pingpong")
    assert str(tmp_path) not in data.read_text()


def test_dtypes_and_operations_with_a_root() -> None:
    done = bench("reduce", "gather", "scatter", "broadcast", "-s", "64", "--dtype", "int8,float16", "-n", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("float16\n") == 4


@needs_torch
@needs_mpi4py
@needs_mpirun("openmpi")
@needs_mpirun("mpich")
def test_beside_every_peer(tmp_path: Path) -> None:
    data = tmp_path / "out.json"
    every = "all_reduce,reduce,broadcast,all_gather,gather,scatter,reduce_scatter,all_to_all,barrier,pingpong"
    peers = "gloo,openmpi,mpich,openmpi-tcp"
    where = ["--openmpi", str(mpirun("openmpi")), "--mpich", str(mpirun("mpich"))]
    done = bench(every, "-s", "1K", "-n", "2", "--against", peers, *where, "--json", str(data))
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    report = BenchReport.decode(data.read_bytes())
    assert [column.name for column in report.columns] == ["phalanx", *peers.split(",")]
    assert [len(cell.timings) for cell in report.cells] == [5] * 10
    for cell in report.cells:
        for timing in cell.timings:
            assert timing.seconds, (cell.operation, timing)
    versions = [column.version for column in report.columns]
    assert [version.split()[0] for version in versions[1:]] == ["torch", "Open", "MPICH", "Open"]
    assert "worst cell: " in done.stdout
    assert not list(tmp_path.glob("phalanx-bench-*"))


def test_a_peer_that_is_not_there_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    done = bench("barrier", "--against", "openmpi", PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("phalanx: openmpi is left out: ")
    assert "barrier, 2 ranks" in done.stdout


def test_on_a_terminal_there_is_a_bar_and_colour() -> None:
    main, other = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [*BENCH, "barrier", "--transport", "auto,tcp", *QUICK], env=environment, stdin=other, stdout=other, stderr=other
    )
    os.close(other)
    seen = b""
    with contextlib.suppress(OSError):
        while part := os.read(main, 1 << 16):
            seen += part
    os.close(main)
    assert process.wait(60) == 0
    text = seen.decode()
    assert "Phalanx TCP" in text
    assert "\x1b[" in text
    assert text.count("\x1b[?25h") >= 1, "the cursor is shown again"


# -- wrong calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all_redcue"], "'all_redcue' is not valid (expected all_reduce"),
        (["-n", "1"], "expected numbers from 2"),
        (["-s", "8..x"], "'x' is not a size"),
        (["--dtype", "float33"], "'float33' is not valid"),
        (["--against", "nccl"], "'nccl' is not valid (expected gloo"),
        (["barrier", "--in-segment", "all_reduce"], "--in-segment all_reduce: this operation is not measured"),
        (["--rounds", "1"], "1 is not in the range"),
    ],
)
def test_a_wrong_call_says_what_is_valid(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_help_names_the_operations() -> None:
    result = CliRunner().invoke(app, ["bench", "--help"])
    assert result.exit_code == 0
    assert "reduce_scatter" in result.output


def test_a_picture_of_no_known_kind_is_refused_before_anything_is_measured() -> None:
    begin = time.monotonic()
    done = bench("--plot", "plot.gif")
    assert (done.returncode, done.stdout) == (1, "")
    assert "ends in .svg or .png" in done.stderr
    assert time.monotonic() - begin < bound(10)


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_failing_phalanx_gives_exit_code_1_and_its_error() -> None:
    done = bench("barrier", PHALANX_HEARTBEAT="never")
    assert done.returncode == 1
    assert "PHALANX_HEARTBEAT='never' is not valid" in done.stderr
    assert "failed" in done.stdout


def measuring(tmp_path: Path, contenders: list[Contender], step: Callable[[Any], None], **changes: Any) -> Measuring:
    limits = changes.pop("limits", MachineLimits())
    values: dict[str, Any] = {
        "operations": ["all_reduce"],
        "sizes": [8, 64],
        "dtypes": ["float32"],
        "ranks": [2],
        "contenders": contenders,
        "rounds": 3,
        "round_seconds": 0.001,
    }
    plan = BenchPlan(**{**values, **changes})
    return Measuring(plan, site=Site(), folder=tmp_path, limits=limits, step=step)


def test_a_failing_peer_is_shown_and_the_others_go_on(tmp_path: Path) -> None:
    broken = Contender(name="broken", label="Broken", library="nothing of that name")
    run = measuring(tmp_path, [ours("auto"), broken], lambda step: None)
    run.run()
    assert not run.ours_failed
    assert all("Broken on 2 ranks failed (starting)" in error for error in run.errors)
    assert len(run.errors) == 2, "it is given up after two attempts"
    for cell in run.cells:
        (good, bad) = cell.timings
        assert good.seconds
        assert bad.error


@pytest.mark.parametrize("below", [False, True])
def test_who_is_faster_than_the_limit_fails_the_benchmark(tmp_path: Path, below: bool) -> None:
    """Once the limit was tried again: it may have been measured in a busy moment."""
    tries: list[float] = []

    def time_movement(*arguments: object) -> float:
        tries.append(100.0 if below or len(tries) < 12 else 1e-9)
        return tries[-1]

    run = measuring(
        tmp_path, [ours("auto")], lambda step: None, sizes=[1 << 20], limits=MachineLimits(time_movement, 2)
    )
    run.run()
    assert run.limit_broken == below
    assert [("less than the limit of 100 s: the limit is wrong" in error) for error in run.errors] == [True] * below
    assert run.cells[0].limit == (100.0 if below else 1e-9)
    assert not run.ours_failed


def test_the_calibration_is_shown_and_kept(tmp_path: Path) -> None:
    if not _native.available:
        done = bench("--calibrate")
        assert done.returncode == 2
        assert "there is no native core" in done.stderr
        return
    done = bench("--calibrate", XDG_CACHE_HOME=str(tmp_path), PHALANX_TUNING="off")
    assert done.returncode == 0, done.stderr
    assert "reduced_by_all" in done.stdout
    assert (
        "PHALANX_TUNING=off: programs do not use this, but reduced_by_all 16384, spins 2000, copy_once_from 49152"
        in done.stdout
    )
    (kept,) = (tmp_path / "phalanx").iterdir()
    assert f"kept in: {kept}" in done.stdout


def test_a_contender_whose_rank_dies_is_started_again_for_the_next_cell(tmp_path: Path) -> None:
    steps: list[Cell] = []

    def step(what: Cell | str) -> None:
        if isinstance(what, Cell):
            steps.append(what)
            if len(steps) == 1:
                os.kill(run._running["phalanx-tcp"].pids[1], signal.SIGKILL)

    run = measuring(tmp_path, [ours("auto"), ours("tcp")], step)
    run.run()
    assert run.ours_failed
    assert len(run.errors) == 1
    first, second = run.cells
    assert [bool(timing.error) for timing in first.timings] == [False, True]
    assert [bool(timing.seconds) for timing in second.timings] == [True, True]
    assert workers(tmp_path) == []


def test_a_contender_that_takes_too_long_has_failed(tmp_path: Path) -> None:
    def step(what: Cell | str) -> None:
        if isinstance(what, Cell) and what.size == 8:
            os.kill(run._running["phalanx-tcp"].pids[1], signal.SIGSTOP)

    run = measuring(tmp_path, [ours("auto"), ours("tcp")], step, limit=2.0)
    run.run()
    assert [bool(timing.error) for timing in run.cells[0].timings] == [False, True]
    assert workers(tmp_path) == []


# -- the end ---------------------------------------------------------------------------------------------------------


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """A run that takes long, with its files in a folder of its own, when all its ranks are there."""
    process = subprocess.Popen(
        [*BENCH, "all_reduce", "-s", "1M,2M,4M,8M,16M", "-n", "3", "--rounds", "1000", "--round-ms", "50", *arguments],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: len(workers(tmp_path)) >= 3 or process.poll() is not None)
    time.sleep(1)
    assert process.poll() is None, "it is to be interrupted"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    process = start(tmp_path)
    process.send_signal(number)
    assert process.wait(20) != 0
    assert process.stdout is not None
    assert "Traceback" not in process.stdout.read()
    process.stdout.close()
    assert workers(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "reason"), [("/dev/full", "No space left on device"), ("x" * 253, "File name too long")]
)
def test_results_that_cannot_be_written_are_shown(tmp_path: Path, name: str, reason: str) -> None:
    file = tmp_path / name
    done = bench("barrier", "all_reduce", "-s", "8", "--rounds", "3", "--round-ms", "1", "--json", str(file))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"phalanx: the results could not be written to {file}: {reason}" in done.stderr
    assert "all_reduce, 2 ranks, float32\n" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_folder_that_is_not_there_is_said_before_anything_is_measured(tmp_path: Path, option: str) -> None:
    said = CliRunner().invoke(app, ["bench", "barrier", option, str(tmp_path / "missing" / "x.svg")])
    assert said.exit_code == 2
    assert f"there is no folder '{tmp_path / 'missing'}'" in said.output


def run_until_a_cell_is_written(command: list[str], file: Path, number: int) -> tuple[int, str, BenchReport]:
    """Ends a command by a signal once its file has a cell: its exit code, what it wrote, and the file."""
    process = subprocess.Popen(
        [*command, "--json", str(file)],
        env={**os.environ, "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: file.exists() or process.poll() is not None, 60)
        assert BenchReport.decode(file.read_bytes()).cells, "whole at any moment"
        # As `timeout` does it: to the process, and to its group.
        process.send_signal(number)
        os.killpg(process.pid, number)
        said, _ = process.communicate(timeout=40)
    finally:
        process.kill()
    assert os.listdir(file.parent) == [file.name], "no temporary file is left"
    return process.returncode, said, BenchReport.decode(file.read_bytes())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_cut_short_shows_and_keeps_what_it_has_measured(tmp_path: Path, number: int) -> None:
    sizes = [8, *(1 << power for power in range(10, 24))]
    command = [*BENCH, "all_reduce", "barrier", "-s", ",".join(map(str, sizes)), "--rounds", "20"]
    code, said, found = run_until_a_cell_is_written(command, tmp_path / "x.json", number)
    assert code == 128 + number
    assert "Traceback" not in said
    assert "all_reduce, 2 ranks, float32\n" in said
    assert [cell.size for cell in [*found.cells, *found.unmeasured]] == [*sizes, 0]
    assert found.cells
    assert all(timing.seconds for cell in found.cells for timing in cell.timings)
    assert f"cut short: {len(found.unmeasured)} of 16 cells were not measured: all_reduce on 2 ranks (" in said
    assert said.rstrip().endswith("8 MiB); barrier on 2 ranks")


@pytest.mark.parametrize("arguments", [["rpc", "--transport", "auto"], ["torch", "all_reduce", "-s", "4,1K,16K,1M,8M"]])
def test_the_benchmarks_of_the_repository_keep_what_they_have_measured(tmp_path: Path, arguments: list[str]) -> None:
    if arguments[0] == "torch" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    command = [sys.executable, "-m", "benchmarks", *arguments, "--rounds", "8"]
    code, said, found = run_until_a_cell_is_written(command, tmp_path / "x.json", signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert "Traceback" not in said
    assert found.cells
    assert found.unmeasured
    assert f"cut short: {len(found.unmeasured)} of {len(found.cells) + len(found.unmeasured)} cells" in said


def test_what_is_no_file_gets_one_report() -> None:
    ended = bench("barrier", "all_reduce", "-s", "8,16", "--json", "/dev/stdout")
    assert ended.returncode == 0
    assert ended.stdout.count('"unmeasured"') == 1


@needs_mpi4py
@needs_mpirun("openmpi")
@needs_mpirun("mpich")
def test_a_signal_ends_mpi_too(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    where = ["--openmpi", str(mpirun("openmpi")), "--mpich", str(mpirun("mpich"))]
    process = start(tmp_path, "--against", "openmpi,mpich", *where)
    wait_until(lambda: len(workers(tmp_path)) >= 9 or process.poll() is not None)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(40) != 0
    assert process.stdout is not None
    process.stdout.close()
    wait_until(lambda: workers(tmp_path) == [], 5)
    assert list(tmp_path.iterdir()) == []
    # Tests on MPI may run beside this one, and have theirs for a while.
    wait_until(lambda: not {name for name in set(os.listdir("/dev/shm")) - before if "mpi" in name or "sm_seg" in name})


def test_ranks_end_when_their_driver_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.kill()
    process.wait(10)
    assert process.stdout is not None
    process.stdout.close()
    wait_until(lambda: workers(tmp_path) == [], 10)


def test_a_gpu_that_is_not_there_or_not_for_this() -> None:
    done = bench("all_reduce", "--device", "cuda", "--in-segment", "all_reduce")
    assert done.returncode == 2
    assert "--device cuda does not go with --in-segment" in done.stderr
    done = bench("all_reduce", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "CUDA driver" in done.stderr


@needs_gpu
def test_on_a_gpu() -> None:
    """The ranks share one GPU; every result is checked before it is timed."""
    done = bench("all_reduce", "gather", "pingpong", "--device", "cuda", "--sizes", "4,1M", "--against", "gloo")
    assert done.returncode == 0, done.stderr
    assert "Phalanx, GPU" in done.stdout
    assert "Gloo, GPU" in done.stdout
