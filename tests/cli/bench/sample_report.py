"""A report as `phalanx bench` would write it, for tests of what is made of one."""

from __future__ import annotations

from typing import Any

from phalanx.cli.bench.results import Bandwidth, BenchReport, CellResult, Column, Machine, MemoryResult, Timing


def report(**changes: Any) -> BenchReport:
    """Phalanx is twice as fast as Gloo and half as fast as Open MPI at 64 KiB; the other way round at 64 MiB."""

    def cell(size: int, ranks: int, ours: float, gloo: float, openmpi: float) -> CellResult:
        rounds = {"phalanx": ours, "phalanx-empty": ours / 2, "gloo": gloo, "openmpi": openmpi}
        timings = [Timing(name, [0.9 * t, t, 1.3 * t], 3) for name, t in rounds.items()]
        return CellResult("all_reduce", "float32", ranks, size, timings, 0.001 if size > 1 << 20 else None)

    failed = [Timing("phalanx", [1e-6], 9), Timing("gloo", lacks="no barrier"), Timing("openmpi", error="it broke")]
    values: dict[str, Any] = {
        "date": "2026-01-02",
        "command": "phalanx bench",
        "version": "1.2",
        "machine": Machine(2, "A chip", "Linux 6.1", "3.11.1", "2.0", [Bandwidth(1, 64 << 20, 1e10, 1e10)]),
        "columns": [
            Column("phalanx", "Phalanx", True, False, "1.2"),
            Column("phalanx-empty", "Phalanx, empty()", True, True, "1.2"),
            Column("gloo", "Gloo", False, False, "torch 2"),
            Column("openmpi", "Open MPI", False, False, "Open MPI 5"),
        ],
        "missing": {"mpich": "mpi4py is not installed"},
        "cells": [
            cell(64 << 10, 2, 2e-5, 4e-5, 1e-5),
            cell(64 << 20, 2, 0.01, 0.05, 0.04),
            CellResult("barrier", "", 2, 0, failed),
        ],
        "memory": [MemoryResult("phalanx", 2, 64 << 20, 1 << 20, 0)],
        "errors": ["Open MPI on 2 ranks failed"],
    }
    return BenchReport(**{**values, **changes})
