"""The plan of a run: the cells of the table, and the contenders in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .contenders import Contender
from .machine import Movement
from .operations import element_count, find_operation
from .orders import PrepareOrder

__all__ = ["DEFAULT_OPERATIONS", "BenchPlan", "Cell", "Entrant"]

DEFAULT_OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "gather",
    "scatter",
    "barrier",
    "pingpong",
)
_FROM = 64 << 10
"""Bytes from which on a limit is shown. Below, a call is a matter of latency, and memory says nothing about it."""


class Cell(NamedTuple):
    """One row of the table."""

    operation: str
    dtype: str
    ranks: int
    size: int
    """In bytes; 0 for an operation without an array."""


class Entrant(NamedTuple):
    """One column of the table: a contender, and where its arrays lie."""

    name: str
    label: str
    contender: Contender
    in_segment: bool = False


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """One run."""

    operations: Sequence[str]
    sizes: Sequence[int]
    dtypes: Sequence[str]
    ranks: Sequence[int]
    contenders: Sequence[Contender]
    """Phalanx first."""
    in_segment: Sequence[str] = ()
    """Operations that Phalanx also does on arrays from `Group.empty()`."""
    rounds: int = 9
    """In each cell. Where Phalanx and a peer are near each other, both have more, so that noise does not decide."""
    round_seconds: float = 0.03
    budget: float = 6.0
    """Seconds for the rounds of one contender in one cell. One that is slower than that gets fewer calls and rounds."""
    limit: float = 60.0
    """Seconds for one answer: nothing waits longer."""
    memory: bool = False

    def cells(self, ranks: int) -> Iterator[Cell]:
        """The cells for one number of ranks. An operation without an array has one cell, for all sizes and dtypes."""
        for operation in self.operations:
            if not find_operation(operation).sized:
                yield Cell(operation, "", ranks, 0)
                continue
            for dtype in self.dtypes:
                yield from (Cell(operation, dtype, ranks, size) for size in self.sizes)

    def entrants(self, operation: str | None = None) -> list[Entrant]:
        """The columns, of one operation or of all."""
        found = []
        for contender in self.contenders:
            found.append(Entrant(contender.name, contender.label, contender))
            wanted = bool(self.in_segment) if operation is None else operation in self.in_segment
            if contender.is_ours and wanted:
                found.append(Entrant(f"{contender.name}-empty", f"{contender.label}, empty()", contender, True))
        return found

    def prepare(self, cell: Cell, entrant: Entrant) -> PrepareOrder:
        """The order that makes a contender ready for a cell."""
        dtype = cell.dtype or "float32"
        count = element_count(find_operation(cell.operation), cell.size, dtype, cell.ranks)
        return PrepareOrder(entrant.name, cell.operation, count, dtype, entrant.in_segment)

    def parts(self, cell: Cell) -> int:
        """The messages of a call, by which its time is divided: a ping-pong has two."""
        return 2 if find_operation(cell.operation).halved else 1

    def least(self, cell: Cell) -> Movement | None:
        """The bytes that the cell's operation must move; None if the memory says little about its time."""
        operation = find_operation(cell.operation)
        # Over TCP the kernel copies as it likes: a limit of shared memory would be far from what can be done.
        if cell.size < _FROM or self.contenders[0].name != "phalanx" or operation.least is None:
            return None
        work = operation.least(cell.ranks)
        return Movement(work.sizes * cell.size, work.reads, work.writes, work.in_place)
