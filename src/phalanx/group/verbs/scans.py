"""Prefix reductions: each rank combines its array with those of the ranks below it."""

from __future__ import annotations

from typing import Any, Literal, overload

from ...frames import hides_frames
from ...types import ArrayT, Op
from ..collective_runner import CollectiveRunner
from ..data.arrays import adapt_on_host
from ..data.reduction import Reduction
from ..engines.base import Engine
from ..running_collective import RunningCollective
from ..tracking.call import CollectiveCall
from ..work import Work

__all__ = ["Scans"]


class Scans(CollectiveRunner):
    """`scan` and `exscan`."""

    @overload
    def scan(
        self, x: ArrayT, op: Op = "sum", *, timeout: float | None = None, async_op: Literal[False] = False
    ) -> ArrayT: ...
    @overload
    def scan(
        self, x: ArrayT, op: Op = "sum", *, timeout: float | None = None, async_op: Literal[True]
    ) -> Work[ArrayT]: ...
    @overload
    def scan(
        self, x: ArrayT, op: Op = "sum", *, timeout: float | None = None, async_op: bool
    ) -> ArrayT | Work[ArrayT]: ...

    @hides_frames
    def scan(self, x: Any, op: Op = "sum", *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Combines, on rank r, the arrays of the ranks 0 to r, element by element (MPI's `Scan`).

        Args:
            x: An array of the same dtype and shape on all ranks.
            op: As of `all_reduce`. A mean is that of the ranks 0 to r.

        Returns:
            The array, changed in place; a new one where it cannot be written to.

        Raises:
            As `all_reduce`.
        """
        return self._scan("scan", x, op, timeout, async_op)

    @overload
    def exscan(
        self, x: ArrayT, op: Op = "sum", *, timeout: float | None = None, async_op: Literal[False] = False
    ) -> ArrayT: ...
    @overload
    def exscan(
        self, x: ArrayT, op: Op = "sum", *, timeout: float | None = None, async_op: Literal[True]
    ) -> Work[ArrayT]: ...
    @overload
    def exscan(
        self, x: ArrayT, op: Op = "sum", *, timeout: float | None = None, async_op: bool
    ) -> ArrayT | Work[ArrayT]: ...

    @hides_frames
    def exscan(self, x: Any, op: Op = "sum", *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Combines, on rank r, the arrays of the ranks below r (MPI's `Exscan`): of counts, it makes offsets.

        Args:
            x: As of `scan`.
            op: As of `scan`.

        Returns:
            As `scan`. Rank 0, which has none below, gets the value that changes nothing: 0 of a sum, 1 of a product,
            the largest of a minimum, the smallest of a maximum, all bits of `"band"`; NaN of a mean.

        Raises:
            As `all_reduce`.
        """
        return self._scan("exscan", x, op, timeout, async_op)

    def _scan(self, verb: str, x: Any, op: Op, timeout: float | None, async_op: bool) -> Any:
        self._check()
        target = adapt_on_host(x, write=True)
        reduction = Reduction(op, target)
        exclusive = verb == "exscan"
        combined = self.rank if exclusive else self.rank + 1

        def body(engine: Engine, running: RunningCollective) -> Any:
            flat = target.array.reshape(-1)
            engine.scan(running, flat, reduction, exclusive=exclusive)
            if combined:
                reduction.divide(flat, combined)
            else:
                flat[:] = reduction.neutral(flat.dtype)
            return target.finish()

        call = CollectiveCall(verb, dtype=target.dtype, shape=target.shape, reduction=reduction.name)
        return self._run(call, body, timeout, async_op)
