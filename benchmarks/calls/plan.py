"""The plan of a run: sizes and kinds of calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.cli.bench.machine import Movement
from phalanx.cli.bench.orders import PrepareOrder
from phalanx.cli.bench.plan import BenchPlan, Cell, Entrant
from phalanx.cli.bench.sizes import show_size

from .worker import IN_FLIGHT

__all__ = ["CELLS", "RemoteCallPlan", "title"]

CELLS = {
    "8": Cell("echo", "", 2, 8),
    "1K": Cell("echo", "", 2, 1 << 10),
    "16K": Cell("echo", "", 2, 16 << 10),
    "in-flight": Cell("in_flight", "", 2, 8),
    "1M": Cell("array", "float32", 2, 1 << 20),
    "16M": Cell("array", "float32", 2, 16 << 20),
}
"""By the names that a person types. Those without a dtype are of bytes."""


def title(operation: str, size: int) -> str:
    """A cell in words."""
    if operation == "in_flight":
        return f"{IN_FLIGHT} calls in flight, {show_size(size)}"
    return f"echo of {show_size(size)}" if operation == "echo" else f"echo of an array of {show_size(size)}"


@dataclass(frozen=True, kw_only=True)
class RemoteCallPlan(BenchPlan):
    """One run."""

    names: Sequence[str] = tuple(CELLS)
    """Of the cells."""
    operations: Sequence[str] = ("echo", "in_flight", "array")
    sizes: Sequence[int] = ()
    dtypes: Sequence[str] = ("float32",)
    ranks: Sequence[int] = (2,)

    def cells(self, ranks: int) -> Iterator[Cell]:
        """The cells, in the order of `CELLS`."""
        yield from (cell for name, cell in CELLS.items() if name in self.names)

    def prepare(self, cell: Cell, entrant: Entrant) -> PrepareOrder:
        """The order for one contender. The size is in bytes."""
        return PrepareOrder(entrant.name, cell.operation, cell.size, cell.dtype, False)

    def parts(self, cell: Cell) -> int:
        """A call is there and back."""
        return 1

    def least(self, cell: Cell) -> Movement | None:
        """None: a call is not a matter of memory alone."""
        return None
