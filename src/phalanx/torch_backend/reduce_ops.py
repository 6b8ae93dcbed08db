"""torch's reductions in Phalanx's words."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist

from ..errors import UnsupportedOp
from ..types import Op

__all__ = ["SIMPLE_NAMES", "Combining", "combining"]

_KINDS = dist.ReduceOp.RedOpType
_NAMES: dict[Any, Op] = {
    _KINDS.SUM: "sum",
    _KINDS.AVG: "mean",
    _KINDS.PRODUCT: "prod",
    _KINDS.MIN: "min",
    _KINDS.MAX: "max",
    _KINDS.BAND: "band",
    _KINDS.BOR: "bor",
    _KINDS.BXOR: "bxor",
}


class Combining(NamedTuple):
    """How to combine the values of the ranks."""

    name: Op
    """As `Group` calls it."""
    factor: Any = None
    """A number or tensor that every rank's values are multiplied by before."""
    divisor: int = 1
    """Divides the result, rounding as integers do: a mean of them has no place for a fraction."""

    @property
    def simple(self) -> bool:
        """Whether `Group` does all of it."""
        return self.factor is None and self.divisor == 1


SIMPLE_NAMES = {hash(kind): name for kind, name in _NAMES.items()}
"""Phalanx's names, by the hash, which is the kind's number: to read the kind itself takes torch a microsecond more."""
_SIMPLE = {number: Combining(name) for number, name in SIMPLE_NAMES.items()}


def combining(op: Any, dtype: Any, world_size: int) -> Combining:
    """The meaning of a `torch.distributed.ReduceOp` for a dtype.

    Raises:
        UnsupportedOp: It is none that Phalanx has.
    """
    found = _SIMPLE.get(hash(op))
    if found is not None:
        if found.name == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            return Combining("sum", divisor=world_size)
        return found
    kind = getattr(op, "op", op)
    if kind == _KINDS.PREMUL_SUM:
        factor = getattr(op, "factor", None)
        return Combining("sum", factor=op.__getstate__()[1] if factor is None else factor)
    known = ", ".join(kind.name for kind in _NAMES)
    raise UnsupportedOp(f"Phalanx has no reduction {kind} (expected one of {known}, PREMUL_SUM)")
