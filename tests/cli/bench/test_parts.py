"""What `phalanx bench` is made of: sizes, operations, contenders, results, summaries, the picture and the page."""

from __future__ import annotations

import importlib.util
import io
import itertools
import math
import mmap
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.cli.bench.sample_report import report

import phalanx as px
from phalanx.cli.bench import contenders
from phalanx.cli.bench.contenders import Contender, Missing, Site, environment, find_peer, ours
from phalanx.cli.bench.machine import MOVERS, WORKING_SETS, MachineLimits, Movement, describe, measure_bandwidth
from phalanx.cli.bench.measure import Measuring, _Racer
from phalanx.cli.bench.memory import watch_memory
from phalanx.cli.bench.operations import (
    DTYPES,
    OPERATIONS,
    Arrays,
    aligned_array,
    element_count,
    item_size,
    numpy_dtype,
)
from phalanx.cli.bench.plan import DEFAULT_OPERATIONS, BenchPlan, Cell
from phalanx.cli.bench.plot import check_plot, draw
from phalanx.cli.bench.results import BenchReport, Timing
from phalanx.cli.bench.show import all_errors, show, tables
from phalanx.cli.bench.sizes import parse_sizes, show_bytes, show_ratio, show_seconds, show_size
from phalanx.cli.bench.summary import geometric_mean, standings, summary
from phalanx.cli.bench.with_phalanx import _PhalanxLibrary
from phalanx.errors import BackendUnavailable, ConfigError
from phalanx.testing import run_ranks

# -- sizes and times -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8", [8]),
        ("64M,8,1K", [8, 1024, 64 << 20]),
        ("1KiB, 2 kb", [1024, 2048]),
        ("8..64M", [8, 64, 512, 4096, 32768, 262144, 2 << 20, 16 << 20, 64 << 20]),
        ("1K..1K,8", [8, 1024]),
        ("1G", [1 << 30]),
    ],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "x", "0", "8,", "-1", "1.5K", "64M..8", "8...64", "..8", "8T"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a"):
        parse_sizes(text)


def test_numbers_for_people() -> None:
    assert [show_size(size) for size in (0, 8, 100, 1024, 1536, 64 << 20)] == [
        *("-", "8 B", "100 B", "1 KiB", "1536 B", "64 MiB"),
    ]
    assert [show_seconds(t) for t in (4.2e-7, 1.234e-6, 9.996e-6, 0.000123, 0.0474, 1.5)] == [
        *("0.42 µs", "1.23 µs", "10.0 µs", "123 µs", "47.4 ms", "1.50 s"),
    ]
    assert [show_bytes(size) for size in (0, 2048, 64 << 20)] == ["0 B", "2.0 KiB", "64.0 MiB"]
    assert [show_ratio(value) for value in (0.0042, 0.95, 1.5, 123.4)] == ["0.004", "0.95", "1.50", "123.4"]


# -- operations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_what_is_expected_of_an_operation_is_what_phalanx_does(name: str, n: int) -> None:
    """And its arrays are those that the size speaks of."""
    operation = OPERATIONS[name]
    count = element_count(operation, 100, "float32", n)

    def rank(world: px.Group) -> bool:
        x_count, out_count = operation.shape(world.rank, n, count)
        x = np.zeros(x_count, np.float32)
        arrays = Arrays(x, None if out_count is None else np.zeros(out_count, np.float32))
        sizes = [array.nbytes for array in arrays if array is not None]
        assert max(sizes) <= (120 if operation.divided else 100)
        operation.before(world.rank, n, x)
        library = _PhalanxLibrary.__new__(_PhalanxLibrary)
        library._world, library.rank, library.size = world, world.rank, n
        library.call(name, arrays)()
        return operation.after(world.rank, n, *arrays)

    assert run_ranks(n, rank) == [True] * n


@pytest.mark.parametrize("name", [name for name, operation in OPERATIONS.items() if operation.sized])
def test_a_wrong_result_is_seen(name: str) -> None:
    operation = OPERATIONS[name]
    x_count, out_count = operation.shape(0, 2, 8)
    arrays = Arrays(np.full(x_count, 77.0), None if out_count is None else np.full(out_count, 77.0))
    assert not operation.after(0, 2, *arrays)


def test_small_integers_may_wrap() -> None:
    x = np.zeros(4, np.int8)
    with np.errstate(over="ignore"):
        for rank in range(100):
            x += np.int8(rank % 4 + 1)
    assert OPERATIONS["all_reduce"].after(0, 100, x, None)


def test_elements() -> None:
    assert element_count(OPERATIONS["all_reduce"], 8, "float32", 4) == 2
    assert element_count(OPERATIONS["all_gather"], 8, "float32", 4) == 4
    assert element_count(OPERATIONS["broadcast"], 1, "float64", 4) == 1
    assert element_count(OPERATIONS["barrier"], 8, "float32", 4) == 0


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name: str) -> None:
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes")
    assert numpy_dtype(name).itemsize == item_size(name)


# -- the plan --------------------------------------------------------------------------------------------------------


def plan(**changes: Any) -> BenchPlan:
    values: dict[str, Any] = {
        "operations": ["all_reduce", "barrier"],
        "sizes": [8, 1024],
        "dtypes": ["float32", "int8"],
        "ranks": [2],
        "contenders": [ours("auto")],
    }
    return BenchPlan(**{**values, **changes})


def test_cells() -> None:
    assert list(plan().cells(4)) == [
        *(Cell("all_reduce", dtype, 4, size) for dtype, size in itertools.product(["float32", "int8"], [8, 1024])),
        Cell("barrier", "", 4, 0),
    ]


def test_columns() -> None:
    gloo = Contender(name="gloo", label="Gloo", library="gloo")
    made = plan(contenders=[ours("auto"), ours("tcp"), gloo], in_segment=["all_reduce"])
    names = ["phalanx", "phalanx-empty", "phalanx-tcp", "phalanx-tcp-empty", "gloo"]
    assert [entrant.name for entrant in made.entrants()] == names
    assert [entrant.name for entrant in made.entrants("barrier")] == ["phalanx", "phalanx-tcp", "gloo"]


# -- contenders ------------------------------------------------------------------------------------------------------


def fake_mpirun(folder: Path, says: str, name: str = "mpirun") -> Path:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torch and mpi4py were there."""
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("_installed")
def test_an_mpi_is_started_with_its_own_library(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so.40").touch()
    peer = find_peer("openmpi", {"openmpi": fake_mpirun(tmp_path, "mpirun (Open MPI) 5.0")})
    assert isinstance(peer, Contender)
    (launch,) = peer.launches(["worker"], 500, Site(), {"A": "b"})
    assert launch.command[1:] == ["--map-by", ":OVERSUBSCRIBE", "-n", "500", "worker"]
    assert launch.env["MPI4PY_LIBMPI"] == str(tmp_path / "lib" / "libmpi.so.40")
    assert launch.env["A"] == "b"


@pytest.mark.usefixtures("_installed")
def test_open_mpi_over_tcp_uses_the_interface_of_the_site(tmp_path: Path) -> None:
    peer = find_peer("openmpi-tcp", {"openmpi": fake_mpirun(tmp_path, "mpirun (Open MPI) 5.0")})
    assert isinstance(peer, Contender)
    (launch,) = peer.launches(["worker"], 2, Site(interface="eth7", prefix=lambda rank, n: ["inside"]), {})
    assert launch.command[0] == "inside"
    assert "tcp,self" in launch.command
    assert "eth7" in launch.command


@pytest.mark.usefixtures("_installed")
def test_mpiruns_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_mpirun(tmp_path, "HYDRA build details:")
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    found = find_peer("mpich", {})
    assert isinstance(found, Contender)
    assert found.mpirun == path
    with pytest.raises(ConfigError, match="is not the mpirun of Open MPI"):
        find_peer("openmpi", {"openmpi": path})


def test_what_is_missing_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: None)
    for name, word in (("gloo", "pip install torch"), ("openmpi", "pip install mpi4py"), ("mpich", "mpi4py")):
        found = find_peer(name, {})
        assert isinstance(found, Missing)
        assert word in found.reason
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_peer("openmpi", {})
    assert isinstance(found, Missing)
    assert "--openmpi PATH" in found.reason


def test_ranks_of_phalanx_get_their_place_and_a_fresh_token() -> None:
    launches = [ours("tcp").launches(["worker"], 2, Site(port=lambda: 7), {})[1] for _ in range(2)]
    assert launches[0].env["PHALANX_TOKEN"] != launches[1].env["PHALANX_TOKEN"]
    expected = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "7", "PHALANX_TRANSPORT": "tcp"}
    assert launches[0].env.items() >= expected.items()


def test_nothing_of_another_job_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "PHALANX_TOKEN", "PHALANX_RUN_ID", "PMIX_RANK", "SLURM_PROCID", "PHALANX_PURE"):
        monkeypatch.setenv(name, "1")
    found = environment(tmp_path)
    assert found["PHALANX_PURE"] == "1"
    assert found["TMPDIR"] == str(tmp_path)
    assert not {"RANK", "PHALANX_TOKEN", "PHALANX_RUN_ID", "PMIX_RANK", "SLURM_PROCID"} & set(found)


# -- the machine -----------------------------------------------------------------------------------------------------


class FakeMachine:
    """Moves bytes as fast as it is told, by the way of moving them."""

    def __init__(self, *speeds: float) -> None:
        self.speeds = speeds
        self.tried: list[tuple[int, int]] = []
        self.gain_of_a_thread = 0.0

    def __call__(
        self, size: int, reads: int, writes: int, in_place: bool, mover: int, threads: int, rounds: int, budget: float
    ) -> float:
        self.tried.append((mover, threads))
        return size * (reads + writes) / self.speeds[mover] / (1 + self.gain_of_a_thread * (threads - 2))


def test_the_limit_is_the_fastest_of_all_ways_and_tries() -> None:
    machine = FakeMachine(1e9, 4e9, 2e9, 3.5e9, 1e9, 1e9)
    limits = MachineLimits(machine, 2)
    movement = Movement(1_000_000, 1, 1, False)
    assert limits.measure(movement, 2) == pytest.approx(0.5e-3)
    assert machine.tried == [(mover, 2) for mover in range(len(MOVERS))]
    machine.tried.clear()
    machine.speeds = (1e9,) * len(MOVERS)  # a busy moment makes no limit higher
    assert limits.measure(movement, 2) == pytest.approx(0.5e-3)
    assert machine.tried == [(1, 2), (3, 2)], "ways that are far behind are not tried again"
    machine.speeds = (1e9, 1e9, 1e9, 8e9, 1e9, 1e9)
    assert limits.measure(movement, 2) == pytest.approx(0.25e-3)
    assert limits.measure(movement, 16) is not None
    assert machine.tried[-1][1] == 2, "no more threads than cores"


def test_the_limit_is_that_of_ranks_with_threads_that_help() -> None:
    machine = FakeMachine(*[1e9] * len(MOVERS))
    machine.gain_of_a_thread = 0.5
    movement = Movement(1_000_000, 1, 1, False)
    assert MachineLimits(machine, 6).measure(movement, 2) == pytest.approx(2e-3 / 3)
    assert {threads for _, threads in machine.tried} == {2, 6}


def test_no_limit_where_it_cannot_be_measured() -> None:
    def no_memory(*arguments: object) -> float:
        raise MemoryError

    assert MachineLimits(no_memory, 2).measure(Movement(8, 1, 1, False), 2) is None
    assert MachineLimits(lambda *arguments: math.inf, 2).measure(Movement(8, 1, 1, False), 2) is None


def test_bandwidth_by_working_set() -> None:
    found = measure_bandwidth(2, FakeMachine(3e9, 6e9, 1e9, 1e9, 1e9, 1e9))
    assert [(row.cores, row.size) for row in found] == [(2, size) for size in WORKING_SETS]
    assert {(round(row.copy / 1e9, 3), round(row.add / 1e9, 3)) for row in found} == {(3.0, 2.0)}
    machine = describe(found)
    assert machine.cores > 0
    assert machine.model


@pytest.mark.parametrize(
    ("operation", "movement"),
    [
        ("all_reduce", Movement(1 << 20, 4, 4, True)),
        ("reduce", Movement(1 << 20, 4, 1, True)),
        ("reduce_scatter", Movement(1 << 20, 4, 1, False)),
        ("broadcast", Movement(1 << 20, 1, 3, False)),
        ("all_gather", Movement(1 << 20, 1, 4, False)),
        ("gather", Movement(1 << 20, 1, 1, False)),
        ("all_to_all", Movement(4 << 20, 1, 1, False)),
        ("barrier", None),
    ],
)
def test_what_an_operation_must_move(operation: str, movement: Movement | None) -> None:
    assert plan().least(Cell(operation, "float32", 4, 1 << 20)) == movement
    assert plan().least(Cell(operation, "float32", 4, 8)) is None, "a matter of latency"
    assert plan(contenders=[ours("tcp")]).least(Cell(operation, "float32", 4, 1 << 20)) is None


def test_memory_is_seen() -> None:
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("this kernel tells no PSS")
    kept: list[mmap.mmap] = []

    def use() -> None:  # not malloc's memory: it may give what an earlier test has left
        kept.append(mmap.mmap(-1, 32 << 20))
        kept[-1].write(b"x" * (32 << 20))

    def use_and_return() -> None:
        use()
        kept.pop().close()

    # Less than all of it: pages shared with forks of earlier tests count more or less as these come and go.
    usage = watch_memory(use)
    assert usage.peak > 24 << 20
    assert usage.kept > 24 << 20
    assert watch_memory(use_and_return).kept < 20 << 20


# -- results ---------------------------------------------------------------------------------------------------------


def test_json_and_back() -> None:
    made = report()
    assert BenchReport.decode(made.encode()) == made


def test_median_and_spread() -> None:
    timing = Timing("x", [1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing.seconds == 3
    assert timing.spread == pytest.approx(1 / 3)
    assert Timing("x").seconds is None
    assert Timing("x", [1.0]).spread == 0


def test_standings() -> None:
    found = standings(report())
    assert [(standing.cell.size, standing.peer.name) for standing in found] == [
        (64 << 10, "openmpi"),
        (64 << 20, "openmpi"),
    ]
    assert [standing.ratio for standing in found] == pytest.approx([0.5, 4.0])
    assert geometric_mean([0.5, 4.0]) == pytest.approx(2**0.5)


def test_summary() -> None:
    lines = dict(summary(report()))
    assert lines["all cells"] == "1.41 times the best peer's speed (2 cells)"
    assert lines["all_reduce"] == "1.41 times"
    assert lines["worst cell"] == "0.50 times Open MPI, all_reduce of 64 KiB on 2 ranks"
    assert lines["more than 5 % slower"] == "1 of 2 cells"
    assert "at least 0.50 times" in lines["all_reduce beside Open MPI"]
    assert lines["all_reduce beside Open MPI"].endswith("4.00 on 2 ranks at 64 MiB")
    segment = lines["Phalanx, empty(), all_reduce of 64 MiB on 2 ranks"]
    assert segment == "5.00 ms: 10.0 times Gloo, 8.00 times Open MPI"
    assert summary(report(columns=report().columns[:2])) == []


def test_plain_text() -> None:
    out = io.StringIO()
    show(report(), out)
    text = out.getvalue()
    assert "\x1b" not in text
    assert re.search(r"64 KiB +20.0 µs ±10% .* 0.50\n", text)
    assert re.search(r"64 MiB .* 4.00 +1.00 ms\n", text)
    assert re.search(r"-\s+1.00 µs ±0%\s+n/a\s+failed", text)
    for words in ("mpich left out: mpi4py", "n/a: Gloo: no barrier", "memory, Phalanx, 2 ranks: 1.0 MiB more"):
        assert words in text
    assert all_errors(report()) == ["Open MPI on 2 ranks failed", "barrier on 2 ranks: it broke"]


def test_a_table_has_only_the_columns_that_it_needs() -> None:
    first, last = tables(report())
    assert first.head == [
        *("size", "Phalanx", "Phalanx, empty()", "Gloo", "Open MPI", "best peer / Phalanx", "limit"),
    ]
    assert last.head == ["size", "Phalanx", "Gloo", "Open MPI", "best peer / Phalanx"]


# -- the picture and the page ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_picture_is_small_and_always_the_same(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        check_plot(file)
        draw(report(), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert 1000 < files[0].stat().st_size < 300_000


def test_a_picture_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"\.svg or \.png"):
        check_plot(tmp_path / "plot.gif")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match="pip install matplotlib"):
        check_plot(tmp_path / "plot.svg")


def test_the_default_operations_are_known() -> None:
    assert set(DEFAULT_OPERATIONS) < set(OPERATIONS)


@pytest.mark.parametrize("count", [1, 7, 1024, 100_000, 2_000_000])
def test_the_arrays_of_all_contenders_begin_with_a_page(count: int) -> None:
    arrays = [aligned_array(count, numpy_dtype("float32")) for _ in range(3)]
    for number, array in enumerate(arrays):
        array.fill(number)
    page = 2 << 20 if count == 2_000_000 else mmap.PAGESIZE
    assert [array.ctypes.data % page for array in arrays] == [0, 0, 0]
    assert [(array.size, array.dtype, set(array[[0, -1]])) for array in arrays] == [
        (count, np.dtype("float32"), {number}) for number in range(3)
    ]


# -- rounds ----------------------------------------------------------------------------------------------------------


class ScriptedWorkers:
    """Ranks whose calls take as long as the test says; notes how many calls each order asks for."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self._seconds = iter(seconds)
        self.asked: list[int] = []

    def ask(self, order: Any) -> list[Any]:
        self.asked.append(order.iterations)
        return [SimpleNamespace(seconds=order.iterations * next(self._seconds))]


def barriers(**settings: Any) -> BenchPlan:
    return BenchPlan(operations=["barrier"], sizes=[0], dtypes=["float32"], ranks=[2], contenders=[], **settings)


def measuring_by(plan: BenchPlan) -> Measuring:
    measuring = object.__new__(Measuring)
    measuring._plan, measuring._running = plan, {}
    return measuring


def a_racer(measuring: Measuring, name: str, workers: Any, *, is_ours: bool = True) -> _Racer:
    measuring._running[name] = workers
    return _Racer(SimpleNamespace(name=name, contender=SimpleNamespace(name=name, is_ours=is_ours)), workers)  # type: ignore[arg-type]


def test_a_contender_that_was_calibrated_in_a_slow_moment_gets_whole_rounds_all_the_same() -> None:
    plan = barriers(rounds=3, round_seconds=0.03)
    workers = ScriptedWorkers([1e-3, 6e-4, 6e-4, 6e-4, 2e-6, 2e-6])
    measuring = measuring_by(plan)
    racer = a_racer(measuring, "one", workers)
    measuring._calibrate(racer)
    measuring._race([racer])
    first, second, third = workers.asked[-3:]
    assert first == second == 50  # the first round was slow, too
    assert third == 15_000
    assert racer.times == pytest.approx([6e-4, 2e-6, 2e-6])


@pytest.mark.parametrize(
    ("peer", "other", "rounds"),
    [
        pytest.param(1.1e-3, 2e-3, {"ours": 9, "peer": 9, "other": 3}, id="a peer is near"),
        pytest.param(0.9e-3, 1.3e-3, {"ours": 9, "peer": 9, "other": 9}, id="both are near the one that is ahead"),
        pytest.param(1.6e-3, 2e-3, {"ours": 3, "peer": 3, "other": 3}, id="far ahead"),
        pytest.param(0.5e-3, 0.6e-3, {"ours": 3, "peer": 3, "other": 3}, id="far behind: peers need not be told apart"),
    ],
)
def test_contenders_near_each_other_have_more_rounds(peer: float, other: float, rounds: dict[str, int]) -> None:
    measuring = measuring_by(barriers(rounds=3))
    racers = [
        a_racer(measuring, name, ScriptedWorkers(itertools.repeat(seconds)), is_ours=name == "ours")
        for name, seconds in [("ours", 1e-3), ("peer", peer), ("other", other)]
    ]
    for racer in racers:
        racer.rounds = 3
    measuring._race(racers)
    assert {racer.entrant.name: len(racer.times) for racer in racers} == rounds
