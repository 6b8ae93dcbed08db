"""`phalanx bench --calibrate`: measures the settings of this machine anew, and shows what was decided and why."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TextIO

import click

from phalanx import _native
from phalanx.cli.run.plan import cores
from phalanx.config import tuning_of_choice
from phalanx.tuning.decide import Decision
from phalanx.tuning.lookup import calibrate, current, kept_in
from phalanx.tuning.measure import COPYING_RANKS, Measured
from phalanx.tuning.store import cpu_model
from phalanx.tuning.values import NEVER

from .show import present
from .sizes import show_seconds, show_size

__all__ = ["show_calibration"]


class _Table:
    """A table without ratios."""

    def __init__(self, title: str, head: list[str], rows: list[list[str]]) -> None:
        self.title, self.head, self.rows = title, head, rows

    def value(self, row: int, column: int) -> float | None:
        """None: no cell is a ratio."""
        return None


def show_calibration(out: TextIO) -> None:
    """Measures, keeps, and writes tables of what was measured and decided.

    Raises:
        click.UsageError: There is no core, whose settings these are.
    """
    if not _native.available:
        raise click.UsageError(f"--calibrate: there is no native core to measure ({_native.why_not})")
    measured, decisions = calibrate()
    choice = tuning_of_choice()
    lines = [
        *((decision.setting, decision.reason) for decision in decisions),
        ("machine", f"{cores()} cores, {cpu_model()}"),
        ("measured in", show_seconds(measured.seconds)),
        ("kept in", str(kept_in() or "no file: this user has no folder that can be written to")),
    ]
    if choice is not None:
        used = ", ".join(f"{name} {value}" for name, value in asdict(current(0.0)).items())
        text = "every program measures anew" if choice == "fresh" else f"programs do not use this, but {used}"
        lines.append((f"PHALANX_TUNING={choice}", text))
    present(out, [_ways(measured), _copies(measured), _long_copies(measured), _decisions(decisions)], (), lines)


def _ways(measured: Measured) -> _Table:
    head = ["size", "ranks", "every rank reduces everything", "each rank reduces a part"]
    rows = [
        [show_size(size), str(ranks), show_seconds(seconds), show_seconds(measured.by_parts[ranks, size])]
        for (ranks, size), seconds in measured.by_all.items()
        if (ranks, size) in measured.by_parts
    ]
    return _Table("all_reduce in shared memory", head, rows)


def _copies(measured: Measured) -> _Table:
    rows = [
        [show_size(size), show_seconds(seconds), show_seconds(measured.through[size])]
        for size, seconds in measured.by_address.items()
        if size in measured.through and math.isfinite(seconds)
    ]
    return _Table("gather of two ranks, size of each part", ["size", "process_vm_readv", "through shared memory"], rows)


def _long_copies(measured: Measured) -> _Table:
    rows = [[show_size(size), *map(show_seconds, copies)] for size, copies in measured.copies.items()]
    title = f"copies by each of {COPYING_RANKS} ranks at once"
    of_another = ["of another's: memcpy", "asking ahead"]
    return _Table(title, ["size", "memcpy", "asking ahead", "past the caches", *of_another], rows)


def _decisions(decisions: list[Decision]) -> _Table:
    rows = [[decision.setting, _value(decision.default), _value(decision.chosen)] for decision in decisions]
    return _Table("decisions", ["setting", "constant", "chosen"], rows)


def _value(value: int) -> str:
    return str(value) if value < NEVER else "never"
