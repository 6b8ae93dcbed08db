"""The plan of a run: models, each with and without communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.checkout import CheckoutContender
from phalanx.cli.bench.machine import Movement
from phalanx.cli.bench.orders import PrepareOrder
from phalanx.cli.bench.plan import BenchPlan, Cell, Entrant

from .operations import ALONE, TRAINING

__all__ = ["CONTENDERS", "TrainingPlan", "alone"]

_DDP = "benchmarks.training.with_ddp"

CONTENDERS = {
    "torch": CheckoutContender(name="torch", label="torch's DDP on Phalanx", library=f"{_DDP}:phalanx", is_ours=True),
    "phalanx": CheckoutContender(name="phalanx", label="Phalanx's DDP", library=_DDP, is_ours=True),
    "gloo": CheckoutContender(name="gloo", label="torch's DDP on Gloo", library=f"{_DDP}:gloo"),
}


def alone(name: str) -> str:
    """The entrant that does the same without communication."""
    return f"{name}{ALONE}"


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(BenchPlan):
    """One run. Its operations are the models."""

    operations: Sequence[str] = tuple(TRAINING)
    sizes: Sequence[int] = ()
    dtypes: Sequence[str] = ("float32",)

    def cells(self, ranks: int) -> Iterator[Cell]:
        """One for each model."""
        yield from (Cell(operation, "", ranks, 0) for operation in self.operations)

    def entrants(self, operation: str | None = None) -> list[Entrant]:
        """Every contender twice."""
        return [
            Entrant(name, contender.label, contender)
            for contender in self.contenders
            for name in (contender.name, alone(contender.name))
        ]

    def prepare(self, cell: Cell, entrant: Entrant) -> PrepareOrder:
        """The order for one contender."""
        how = ALONE if entrant.name.endswith(ALONE) else ""
        return PrepareOrder(entrant.name, f"{cell.operation}{how}", 1, "float64", False)

    def parts(self, cell: Cell) -> int:
        """A call is a step."""
        return 1

    def least(self, cell: Cell) -> Movement | None:
        """None: a step is mostly arithmetic."""
        return None
