"""The results, as written to and read from JSON."""

from __future__ import annotations

import contextlib
import os
import statistics
from pathlib import Path

import msgspec

__all__ = ["Bandwidth", "BenchReport", "CellName", "CellResult", "Column", "Machine", "MemoryResult", "Timing"]


class Timing(msgspec.Struct, frozen=True):
    """One contender in one cell."""

    entrant: str
    rounds: list[float] = []
    """Seconds per call, one number per round: that of the slowest rank."""
    iterations: int = 0
    """Calls in each round."""
    lacks: str = ""
    """The feature that it lacks, if it could not take part."""
    error: str = ""

    @property
    def seconds(self) -> float | None:
        """Per call, the median of the rounds."""
        return statistics.median(self.rounds) if self.rounds else None

    @property
    def best(self) -> float | None:
        """Per call, the fastest of the rounds."""
        return min(self.rounds, default=None)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, in parts of the median."""
        if len(self.rounds) < 2:
            return 0.0
        low, middle, high = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return (high - low) / 2 / middle


class CellName(msgspec.Struct, frozen=True):
    """The name of one row."""

    operation: str
    dtype: str
    ranks: int
    size: int


class CellResult(CellName, frozen=True):
    """One row."""

    timings: list[Timing]
    limit: float | None = None
    """The fewest seconds that the machine's memory allows: nothing can be faster."""

    def of(self, entrant: str) -> Timing | None:
        """The timing of one contender, if it took part."""
        return next((timing for timing in self.timings if timing.entrant == entrant), None)


class Column(msgspec.Struct, frozen=True):
    """One contender."""

    name: str
    label: str
    ours: bool
    in_segment: bool
    version: str


class MemoryResult(msgspec.Struct, frozen=True):
    """Extra memory of one contender for the largest all_reduce of the run, in bytes: the rank that needs most."""

    entrant: str
    ranks: int
    size: int
    peak: int
    kept: int


class Bandwidth(msgspec.Struct, frozen=True):
    """Bytes per second of arrays of this size, one or two for each core: of what is copied, and of `x` in `x += y`."""

    cores: int
    size: int
    copy: float
    add: float


class Machine(msgspec.Struct, frozen=True):
    """The machine of a run, without names of hosts or people."""

    cores: int
    model: str
    kernel: str
    python: str
    numpy: str
    bandwidth: list[Bandwidth]


class BenchReport(msgspec.Struct, frozen=True):
    """A whole run."""

    date: str
    command: str
    version: str
    machine: Machine
    columns: list[Column]
    missing: dict[str, str]
    cells: list[CellResult]
    memory: list[MemoryResult]
    errors: list[str]
    unmeasured: list[CellName] = []
    """Cells that were planned and not reached: the run was cut short. Empty if it was not."""

    def encode(self) -> bytes:
        """As JSON, indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def write(self, path: Path) -> None:
        """Writes it as JSON. A reader finds the report before or this one, also if the process ends meanwhile."""
        if path.exists() and not path.is_file():  # a pipe or a terminal, which cannot be replaced
            path.write_bytes(self.encode())
            return
        path = path.resolve()  # a link stays one
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(self.encode())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    @classmethod
    def decode(cls, data: bytes) -> BenchReport:
        """The reverse.

        Raises:
            msgspec.DecodeError: It is not what `encode` writes.
        """
        return _decode(data)


_decode = msgspec.json.Decoder(BenchReport).decode
