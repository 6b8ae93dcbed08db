"""What is made of a picture: the trace, the metrics, and torch's flight records."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import ConfigError
from phalanx.seeing.flight_recorder import write_flight_records
from phalanx.seeing.metrics import MetricsFile, as_prometheus
from phalanx.seeing.reading import RankSlate
from phalanx.seeing.trace import TraceFile
from phalanx.seeing.watch import JobWatch

from .support import MS, START, Op, slate

RECV = "recv\0/home/me/train.py\0main\x0090"
QUOTED = 'all_reduce\0/home/me/we"ird\\.py\0main\x001'


def two_ranks() -> dict[int, RankSlate]:
    return {
        0: slate(0, [Op(1, 0, 1), Op(2, 10, 16), Op(0, 17, 19, RECV, peer=1), Op(3, 20, None)], beat=25),
        1: slate(1, [Op(1, 0, 1), Op(2, 15, 16), Op(3, 22, None)], beat=25),
    }


def watched(slates: dict[int, RankSlate]) -> tuple[JobWatch, Any]:
    watch = JobWatch(lambda: slates, lambda: START + 25 * MS)
    picture = watch.look()
    assert picture is not None
    return watch, picture


def test_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(path)
    slates = two_ranks()
    watch, picture = watched(slates)
    trace.update(watch, picture)
    slates[0] = slate(0, [Op(1, 0, 1), Op(2, 10, 16), Op(0, 17, 19, RECV, peer=1), Op(3, 20, 24)], beat=25)
    picture = watch.look()
    assert picture is not None
    trace.update(watch, picture)  # what ran has ended, and nothing is written twice
    trace.close()
    events = json.loads(path.read_text())
    check_trace(events)
    collectives = [(e["pid"], e["ts"], e["dur"]) for e in events if e.get("cat") == "collective"]
    assert sorted(collectives) == [
        (0, 0.0, 1000.0),
        (0, 10000.0, 6000.0),
        (0, 20000.0, 4000.0),
        (1, 0.0, 1000.0),
        (1, 15000.0, 1000.0),
    ]
    [waiting] = [event for event in events if event.get("cat") == "waiting" and event["pid"] == 0]
    assert (waiting["name"], waiting["ts"], waiting["dur"]) == ("waits for rank 1", 10000.0, 5000.0)
    arrow = [(event["ph"], event["pid"], event["ts"]) for event in events if event.get("cat") == "late"]
    assert arrow == [("s", 1, 15000.0), ("f", 0, 15000.0)]
    message = [event for event in events if event.get("cat") == "message"]
    assert [event["ph"] for event in message] == ["b", "e"]
    assert message[0]["args"] == {"where": "train.py:90 in main", "bytes": 8, "peer": 1}


def check_trace(events: list[dict[str, Any]]) -> None:
    """Holds a trace to the rules of the trace event format that viewers rely on."""
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    arrows: dict[int, list[str]] = {}
    for event in events:
        assert event["ph"] in {"M", "X", "b", "e", "s", "f", "i"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] != "M":
            assert event["ts"] >= 0
            assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], []).append(event["ph"])
            assert event["ph"] == "s" or event["bp"] == "e"
    assert all(kinds == ["s", "f"] for kinds in arrows.values())
    for track in slices.values():  # slices of one track lie inside each other, or apart
        stack: list[float] = []
        for begin, end in sorted(track, key=lambda part: (part[0], -part[1])):
            while stack and stack[-1] <= begin + 1e-6:
                stack.pop()
            assert not stack or end <= stack[-1] + 1e-3
            stack.append(end)
    for event in events:
        if event["ph"] in "sf":
            track = slices[event["pid"], event["tid"]]
            assert any(begin - 1e-3 <= event["ts"] <= end + 1e-3 for begin, end in track), "an arrow to nowhere"


def test_a_trace_says_how_wrong_a_clock_may_be(tmp_path: Path) -> None:
    slates = two_ranks()
    far = slate(1, [Op(1, 0, 1)], offset_ns=0, beat=25)
    far.error_ns = 250_000
    slates[1] = far
    trace = TraceFile(tmp_path / "trace.json")
    trace.update(*watched(slates))
    # Not closed, as after a crash: viewers take an array without its end.
    events = json.loads((tmp_path / "trace.json").read_text() + "]")
    labels = {event["pid"]: event["args"]["labels"] for event in events if event["name"] == "process_labels"}
    assert labels == {0: "the clock of this trace", 1: "clock within 0.250 ms"}
    trace.close()


def test_operations_that_were_overtaken_are_counted(tmp_path: Path) -> None:
    made = slate(0, [Op(n, n, n + 0.5) for n in range(1, 3000)], members=(0, 1))
    trace = TraceFile(tmp_path / "trace.json")
    trace.update(*watched({0: made, 1: slate(1, [], members=(0, 1))}))
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert [event["name"] for event in events if event.get("cat") == "missed"] == ["951 operations were not seen"]


def test_a_trace_on_a_full_disk_ends_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here")
    trace = TraceFile(full)
    watch, picture = watched(two_ranks())
    trace.update(watch, picture)
    trace.update(watch, picture)
    trace.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the trace in /dev/full is incomplete: No space left on device"
    ]


def test_metrics(tmp_path: Path) -> None:
    slates = {rank: slate(rank, [Op(1, 0, 1), Op(2, 10 + 5 * rank, 16, QUOTED)], beat=20) for rank in (0, 1)}
    watch, picture = watched(slates)
    text = as_prometheus(picture)
    assert 'phalanx_wait_seconds_total{rank="0",waited_for="1"} 0.005' in text
    assert 'site="we\\"ird\\\\.py:1 in main"' in text
    names = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            names.add(line.split()[2])
            assert line.split()[3] in ("gauge", "counter")
        elif not line.startswith("#"):
            assert line.partition("{")[0].split()[0] in names
            float(line.rpartition(" ")[2])
    path = tmp_path / "metrics.prom"
    MetricsFile(path).update(watch, picture)
    assert path.read_text() == text
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.prom"]


def test_two_files_of_one_name_are_two_series() -> None:
    """A collector refuses a file that has one series twice."""
    sites = ["all_reduce\0/home/me/a/layers.py\0reduce\x002", "all_reduce\0/home/me/b/layers.py\0reduce\x002"]
    operations = [Op(n + 1, 10 * n, 10 * n + 1, site) for n, site in enumerate(sites)]
    _, picture = watched({rank: slate(rank, operations, beat=20) for rank in (0, 1)})
    lines = [line.rpartition(" ")[0] for line in as_prometheus(picture).splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))
    assert sum(line.startswith("phalanx_operations_total{") for line in lines) == 2


def test_counters_never_vanish_or_jump() -> None:
    """A series that ends because another is ahead of it just now makes every rate wrong."""
    sites = [f"all_reduce\0/home/me/train.py\0main\x00{line}" for line in range(40)]
    slates = {}
    for rank in (0, 1):  # each is late once at every line
        operations = [Op(1, 0, 1)]
        for number, site in enumerate([*sites, *sites]):
            delay = 3 if (number < len(sites)) == (rank == 0) else 0
            operations.append(Op(number + 2, 10 * number + 2 + delay, 10 * number + 6, site))
        slates[rank] = slate(rank, operations)
    _, picture = watched(slates)
    lines = as_prometheus(picture).splitlines()
    assert sum(line.startswith("phalanx_operations_total{") for line in lines) == 41
    late = [line for line in lines if line.startswith("phalanx_late_seconds_total{")]
    assert len(late) == 80
    assert {line.split()[-1] for line in late} == {"0.003"}


def test_metrics_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.prom"
    path.mkdir()
    metrics = MetricsFile(path)
    watch, picture = watched(two_ranks())
    metrics.update(watch, picture)
    metrics.update(watch, picture)
    assert [record.getMessage() for record in caplog.records] == [
        f"the metrics in {path} are not up to date: Is a directory"
    ]
    assert list(tmp_path.iterdir()) == [path]
    path.rmdir()
    metrics.update(watch, picture)
    assert path.read_text() == as_prometheus(picture), "there is room again"


def test_metrics_for_opentelemetry() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from phalanx.seeing.metrics import OpenTelemetryView

    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
    view = OpenTelemetryView()
    view.update(*watched(two_ranks()))
    data = reader.get_metrics_data()
    assert data is not None
    found = {m.name for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert {"phalanx_wait_seconds_total", "phalanx_rank_up"} <= found


def test_flight_records_do_not_mix_with_those_of_another_job(tmp_path: Path) -> None:
    slates = {rank: slate(rank, [Op(1, 0, 1)], members=(0, 1, 2)) for rank in range(3)}
    write_flight_records(slates, tmp_path)
    write_flight_records(slates, tmp_path)
    del slates[2]
    with pytest.raises(ConfigError, match="has rank_2 of another job"):
        write_flight_records(slates, tmp_path)


def test_flight_records_tell_torch_who_is_missing(tmp_path: Path) -> None:
    slates = {
        0: slate(0, [Op(n, n, n + 0.5) for n in (4, 5)] + [Op(6, 10, None)]),
        1: slate(1, [Op(n, n, n + 0.5) for n in (3, 4, 5)]),
    }
    written = write_flight_records(slates, tmp_path / "records")
    assert [path.name for path in written] == ["rank_0", "rank_1"]
    entries = pickle.loads(written[1].read_bytes())["entries"]
    assert [entry["collective_seq_id"] for entry in entries] == [4, 5], "from where all still have it"
    assert entries[0]["frames"] == [{"name": "main", "filename": "/home/me/train.py", "line": 88}]
    pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
    answer = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path / "records")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = answer.stdout + answer.stderr
    assert answer.returncode == 0, said
    assert "Not all ranks joining collective, sequence number: 6" in said
    assert "missing ranks: {1}" in said
