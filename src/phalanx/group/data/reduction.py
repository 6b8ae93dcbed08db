"""A reduction that is defined for a dtype."""

from __future__ import annotations

import difflib
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._native import divide_in_place, valid_ops
from ...arguments import shown
from ...errors import UnsupportedOp
from ...types import ReduceOp
from .arrays import BFLOAT16, Adapted

__all__ = ["Reduction", "name_of"]


def name_of(op: str | ReduceOp) -> str:
    """The name of a reduction.

    Raises:
        UnsupportedOp: There is no reduction of that name.
    """
    try:
        return ReduceOp(op).value
    except (ValueError, TypeError):  # also of what cannot be hashed
        valid = ", ".join(repr(known.value) for known in ReduceOp)
        meant = _meant(op)
        hint = f"did you mean {meant!r}? Expected" if meant else "expected"
        raise UnsupportedOp(f"op={shown(op)} is not a reduction ({hint} one of {valid})") from None


_OTHER_NAMES = {
    "avg": "mean",
    "average": "mean",
    "add": "sum",
    "+": "sum",
    "product": "prod",
    "mul": "prod",
    "*": "prod",
    "minimum": "min",
    "maximum": "max",
    "and": "band",
    "or": "bor",
    "xor": "bxor",
}
"""Names of other libraries for the same reductions."""


def _meant(op: Any) -> str | None:
    """The reduction that was most likely meant, also by an operator of torch or MPI."""
    name = str(op).rpartition(".")[2].lower() if isinstance(op, str) or hasattr(op, "name") else ""
    known = [one.value for one in ReduceOp]
    found = name if name in known else _OTHER_NAMES.get(name)
    return found or next(iter(difflib.get_close_matches(name, known, 1)), None)


class Reduction:
    """A reduction of arrays of one dtype. A mean is a sum that is divided at the end.

    Raises:
        UnsupportedOp: There is no such reduction, or the dtype has none of that name.
    """

    def __init__(self, op: str | ReduceOp, array: Adapted) -> None:
        self.name = name_of(op)
        self.dtype = BFLOAT16 if array.dtype == BFLOAT16 else None
        """The name of the elements' type, where the memory cannot say it."""
        if array.dtype.startswith("float8"):
            raise UnsupportedOp(f"{array.dtype} cannot be reduced, only moved (convert it to float32 or bfloat16)")
        possible = valid_ops(self.dtype or array.array.dtype)
        if self.name not in possible:
            shown = self.dtype or array.array.dtype.name
            other = "; x.astype(np.float64) has a mean" if self.name == "mean" else ""
            raise UnsupportedOp(
                f"op={self.name!r} is not defined for {shown} (expected one of {', '.join(possible)}{other})"
            )
        self.step = "sum" if self.name == "mean" else self.name
        """The operation that combines two arrays."""

    @property
    def partial(self) -> Reduction:
        """The same, for a part of the ranks: what is finished later."""
        return Reduction._of(self.step, self.dtype)

    @classmethod
    def _of(cls, step: str, dtype: str | None) -> Reduction:
        made = cls.__new__(cls)
        made.name = made.step = step
        made.dtype = dtype
        return made

    def neutral(self, storage: np.dtype[Any]) -> Any:
        """The value that changes nothing when it is combined with another; the mean of nothing is not a number.

        Args:
            storage: The dtype of the memory.
        """
        if self.dtype == BFLOAT16:  # as these lie in 16 bits
            return {"prod": 0x3F80, "min": 0x7F80, "max": 0xFF80, "mean": 0x7FC0}.get(self.name, 0)
        if self.name in ("sum", "bor", "bxor"):
            return 0
        if self.name == "prod":
            return 1
        if self.name == "mean":
            return np.nan
        if storage.kind == "b":
            return self.name != "max"
        if self.name == "band":
            return np.invert(storage.type(0))
        if storage.kind == "f":
            return np.inf if self.name == "min" else -np.inf
        limits = np.iinfo(storage)
        return limits.max if self.name == "min" else limits.min

    def finish(self, total: npt.NDArray[Any], size: int) -> None:
        """Makes the mean of a sum, in place."""
        if not self.divides_first(total):
            self.divide(total, size)

    def divide(self, total: npt.NDArray[Any], count: int) -> None:
        """Divides a sum of so many values, if this is a mean."""
        if self.name == "mean":
            divide_in_place(total, count, dtype=self.dtype)

    def divides_first(self, flat: npt.NDArray[Any]) -> bool:
        """Whether values are divided before they are added: the sum of a few float16 is soon too large for one.

        Where all are added at once, in float32, they need not be.
        """
        return self.name == "mean" and bool(flat.dtype == np.float16)

    def begin(self, flat: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
        """The array to reduce in place of one that must stay as it is: it, or a copy."""
        if not self.divides_first(flat):
            return flat
        divided: npt.NDArray[Any] = flat.copy()
        divide_in_place(divided, size)
        return divided

    def begin_in_place(self, flat: npt.NDArray[Any], size: int) -> None:
        """The same for an array that the result is written to."""
        if self.divides_first(flat):
            divide_in_place(flat, size)
