"""Where the smallest and largest values are: reductions that also tell the rank of what they found."""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from ..._native import widened
from ...frames import hides_frames
from ...types import ArrayT
from ..collective_runner import CollectiveRunner
from ..data.arrays import adapt, adapt_on_host
from ..data.reduction import Reduction
from ..data.shapes import new_array
from ..engines.base import Engine
from ..running_collective import RunningCollective
from ..tracking.call import CollectiveCall
from ..work import Work

__all__ = ["Extremes"]


class Extremes(CollectiveRunner):
    """`argmin` and `argmax`."""

    @overload
    def argmin(
        self, x: ArrayT, *, timeout: float | None = None, async_op: Literal[False] = False
    ) -> tuple[ArrayT, Any]: ...
    @overload
    def argmin(
        self, x: ArrayT, *, timeout: float | None = None, async_op: Literal[True]
    ) -> Work[tuple[ArrayT, Any]]: ...
    @overload
    def argmin(self, x: ArrayT, *, timeout: float | None = None, async_op: bool) -> Any: ...

    @hides_frames
    def argmin(self, x: Any, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Finds the smallest value of all members and the rank that has it, element by element (MPI's `MINLOC`).

        Of several ranks with that value it is the lowest. As in NumPy, a NaN is smaller than any number: the value is
        NaN, and the rank the lowest that has one.

        Args:
            x: An array of the same dtype and shape on all ranks. It stays as it is.

        Returns:
            Two new arrays of the shape of `x`, the same on all ranks: the values, and the ranks as 64-bit integers.
            (JAX has 32 bits of them, unless it was told otherwise.)

        Raises:
            UnsupportedOp: Values of that dtype have no order.
            As `all_reduce`.
        """
        return self._find("argmin", x, timeout, async_op)

    @overload
    def argmax(
        self, x: ArrayT, *, timeout: float | None = None, async_op: Literal[False] = False
    ) -> tuple[ArrayT, Any]: ...
    @overload
    def argmax(
        self, x: ArrayT, *, timeout: float | None = None, async_op: Literal[True]
    ) -> Work[tuple[ArrayT, Any]]: ...
    @overload
    def argmax(self, x: ArrayT, *, timeout: float | None = None, async_op: bool) -> Any: ...

    @hides_frames
    def argmax(self, x: Any, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Finds the largest value of all members and the rank that has it, element by element (MPI's `MAXLOC`).

        Of several ranks with that value it is the lowest. As in NumPy, a NaN is larger than any number, too.

        Args:
            x: As of `argmin`.

        Returns:
            As `argmin`.

        Raises:
            As `argmin`.
        """
        return self._find("argmax", x, timeout, async_op)

    def _find(self, verb: str, x: Any, timeout: float | None, async_op: bool) -> Any:
        self._check()
        source = adapt_on_host(x, write=False)
        reduction = Reduction("min" if verb == "argmin" else "max", source)
        found = new_array(source, source.shape)
        found.array[...] = source.array
        numbers = adapt(np.empty(0, np.int64), write=False)
        numbers.library = source.library
        ranks = new_array(numbers, source.shape)
        lowest = Reduction("min", ranks)

        def body(engine: Engine, running: RunningCollective) -> Any:
            mine, best = source.array.reshape(-1), found.array.reshape(-1)
            engine.all_reduce(running, best, reduction)
            where = ranks.array.reshape(-1)
            where[:] = np.where(_same(mine, best, reduction.dtype), self.rank, self.world_size)
            engine.all_reduce(running, where, lowest)
            return found.finish(), ranks.finish()

        call = CollectiveCall(verb, dtype=source.dtype, shape=source.shape)
        return self._run(call, body, timeout, async_op)


def _same(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: str | None) -> npt.NDArray[np.bool_]:
    """Which elements are equal; a NaN equals another.

    Args:
        dtype: The name of the elements' type, where the memory cannot say it.
    """
    if dtype is not None:
        a, b = widened(a, dtype), widened(b, dtype)
    equal: npt.NDArray[np.bool_] = a == b
    if a.dtype.kind == "f":
        equal |= np.isnan(a) & np.isnan(b)
    return equal
