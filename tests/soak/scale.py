"""How long many processes on few cores take to form a world and pass a barrier, and what each of them holds.

```
python -m tests.soak.scale [--ranks 64] [--rounds 3] [--only phalanx]
```

Phalanx and Gloo (torch.distributed) do the same in turns, with the same variables. All processes import first and wait
for each other; then they are let go at once. So the two times are apart: from the start of the processes until all have
imported, and from there until the last one is through the barrier. Memory is PSS, which shares what is shared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.launchers.processes import clean_environment
from tests.ports import free_port

LIMIT = 600.0
"""Seconds for one world."""
RANK = Path(__file__).with_name("scale_rank.py")


# -- one world ---------------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """What one world took. Seconds and KiB; memory, threads and descriptors are the median of the ranks."""

    importing: float
    forming: float
    barrier: float
    ending: float
    cpu: float
    """Of all ranks together, after the import."""
    imported_memory: float
    memory: float
    largest: float
    threads: float
    descriptors: float


def pss(pid: int) -> int:
    """The memory of a process in KiB, shared pages counted in parts."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise LookupError(f"process {pid} tells no PSS")


def one_world(kind: str, ranks: int) -> Round:
    """Starts the processes, lets them form a world, looks at them, and ends them."""
    port = free_port()
    common = {
        **clean_environment(),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PHALANX_TOKEN": secrets.token_hex(16),
    }
    command = [sys.executable, str(RANK), kind, str(LIMIT)]
    begin = time.monotonic()
    processes = [
        subprocess.Popen(
            command, env={**common, "RANK": str(rank)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        imported = _hear(processes)
        before = [pss(process.pid) for process in processes]
        go = time.monotonic()
        _let_go(processes)
        passed = _hear(processes)
        memory = [pss(process.pid) for process in processes]
        threads = [len(os.listdir(f"/proc/{process.pid}/task")) for process in processes]
        descriptors = [len(os.listdir(f"/proc/{process.pid}/fd")) for process in processes]
        leave = time.monotonic()
        _let_go(processes)
        codes = [process.wait(LIMIT) for process in processes]
        ending = time.monotonic() - leave
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
    if any(codes):
        raise SystemExit(f"{kind}: ranks ended with {sorted(set(codes))}")
    formed = max(line["formed"] for line in passed)
    return Round(
        importing=max(line["imported"] for line in imported) - begin,
        forming=formed - go,
        barrier=max(line["passed"] for line in passed) - formed,
        ending=ending,
        cpu=sum(after["cpu"] - first["cpu"] for first, after in zip(imported, passed, strict=True)),
        imported_memory=statistics.median(before),
        memory=statistics.median(memory),
        largest=max(memory),
        threads=statistics.median(threads),
        descriptors=statistics.median(descriptors),
    )


def _hear(processes: list[subprocess.Popen[str]]) -> list[dict[str, float]]:
    lines = []
    for rank, process in enumerate(processes):
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"rank {rank} ended too soon (exit code {process.wait()})")
        lines.append(json.loads(line))
    return lines


def _let_go(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def table(results: dict[str, list[Round]], ranks: int) -> str:
    """The medians of all rounds, side by side."""
    middle = {kind: Round(*map(statistics.median, zip(*rounds, strict=True))) for kind, rounds in results.items()}
    rows: list[tuple[str, Callable[[Round], str]]] = [
        ("start until all have imported", lambda r: f"{r.importing:.2f} s"),
        ("from there until all have a world", lambda r: f"{r.forming:.2f} s"),
        ("and until all are through the barrier", lambda r: f"{r.barrier:.2f} s"),
        ("all after the import", lambda r: f"{r.forming + r.barrier:.2f} s"),
        ("all from the start", lambda r: f"{r.importing + r.forming + r.barrier:.2f} s"),
        ("close until all processes have ended", lambda r: f"{r.ending:.2f} s"),
        ("CPU time after the import, all ranks", lambda r: f"{r.cpu:.2f} s"),
        ("memory per rank (PSS)", lambda r: f"{r.memory / 1024:.1f} MiB"),
        ("of it after the import", lambda r: f"{(r.memory - r.imported_memory) / 1024:.1f} MiB"),
        ("largest rank", lambda r: f"{r.largest / 1024:.1f} MiB"),
        ("threads per rank", lambda r: f"{r.threads:.0f}"),
        ("open descriptors per rank", lambda r: f"{r.descriptors:.0f}"),
    ]
    rounds = len(next(iter(results.values())))
    lines = [
        f"{ranks} processes on {len(os.sched_getaffinity(0))} cores, median of {rounds}",
        f"{'':<40}" + "".join(f"{kind:>14}" for kind in middle),
    ]
    for title, show in rows:
        lines.append(f"{title:<40}" + "".join(f"{show(found):>14}" for found in middle.values()))
    return "\n".join(lines)


# -- the import --------------------------------------------------------------------------------------------------------

_IMPORT = """
import json, sys, time
times = [(time.perf_counter(), time.process_time())]
import numpy
times.append((time.perf_counter(), time.process_time()))
known = set(sys.modules)
import phalanx
times.append((time.perf_counter(), time.process_time()))
print(json.dumps({"times": times, "modules": sorted(set(sys.modules) - known)}))
"""


def import_report(times: int = 20) -> str:
    """What `import phalanx` costs and brings beyond NumPy, in fresh processes."""

    def once() -> dict[str, Any]:
        command = [sys.executable, "-c", _IMPORT]
        done = subprocess.run(command, env=clean_environment(), capture_output=True, check=True, text=True, timeout=60)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    once()  # writes the byte code
    found = [once() for _ in range(times)]
    clocks = [row["times"] for row in found]
    numpy, beyond = (statistics.median(row[i + 1][0] - row[i][0] for row in clocks) * 1000 for i in (0, 1))
    cpu = statistics.median(row[2][1] - row[1][1] for row in clocks) * 1000
    modules = found[0]["modules"]
    own = [name for name in modules if name.split(".")[0] == "phalanx"]
    others = sorted({name.split(".")[0] for name in modules} - {"phalanx"})
    head = f"import phalanx: {beyond:.1f} ms ({cpu:.1f} ms of CPU) beyond NumPy's {numpy:.1f} ms"
    brings = f"it imports {len(own)} modules of its own and {len(modules) - len(own)} others: {', '.join(others)}"
    return f"{head} (median of {times} fresh processes)\n{brings}"


# ----------------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Runs both in turns and prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.scale", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("phalanx", "gloo"), help="leave the other one out")
    arguments = parser.parse_args()
    kinds = [arguments.only] if arguments.only else ["phalanx", "gloo"]
    if "gloo" in kinds and importlib.util.find_spec("torch") is None:
        print("torch is not installed: Gloo is left out")
        kinds.remove("gloo")
    print(import_report(), flush=True)
    results: dict[str, list[Round]] = {kind: [] for kind in kinds}
    for number in range(arguments.rounds):
        for kind in kinds:
            found = one_world(kind, arguments.ranks)
            results[kind].append(found)
            print(f"round {number + 1}, {kind}: {found.forming + found.barrier:.2f} s after the import", flush=True)
    print("\n" + table(results, arguments.ranks))


if __name__ == "__main__":
    main()
