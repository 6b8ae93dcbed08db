"""Collectives that combine the arrays of all members, element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._native import divide_in_place, valid_ops
from ..algorithms import chunk_bounds, ring, star, tree
from ..errors import UnsupportedOp
from ..types import ReduceOp
from .arrays import BFLOAT16, Adapted, adapt
from .lockstep import Lockstep, Turn
from .shapes import divided_shape, pieces, target_for

__all__ = ["Reductions"]


class _Reduction:
    """A reduction that is defined for a dtype, and how it is computed: a mean is a sum that is divided at the end."""

    def __init__(self, op: str | ReduceOp, array: Adapted) -> None:
        try:
            self.name = ReduceOp(op).value
        except ValueError:
            valid = ", ".join(repr(known.value) for known in ReduceOp)
            raise UnsupportedOp(f"op={op!r} is not a reduction (expected one of {valid})") from None
        self.dtype = BFLOAT16 if array.dtype == BFLOAT16 else None
        possible = valid_ops(self.dtype or array.array.dtype)
        if self.name not in possible:
            shown = self.dtype or array.array.dtype.name
            raise UnsupportedOp(f"op={self.name!r} makes no sense for {shown} (expected one of {', '.join(possible)})")
        self.step = "sum" if self.name == "mean" else self.name

    def finish(self, total: npt.NDArray[Any], size: int) -> None:
        """Makes the mean of a sum, in place."""
        if self.name == "mean":
            divide_in_place(total, size, dtype=self.dtype)


class Reductions(Lockstep):
    """`all_reduce` and its kin."""

    def all_reduce(
        self, x: Any, op: str | ReduceOp = "sum", *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Combines the arrays of all members, element by element; everybody gets the same bits.

        Args:
            x: An array of the same dtype and size on all ranks.
            op: `"sum"`, `"mean"`, `"prod"`, `"min"`, `"max"`, `"band"`, `"bor"` or `"bxor"`.

        Returns:
            The array, changed in place; a new one where it cannot be written to.

        Raises:
            UnsupportedOp: The dtype has no such reduction.
            As `broadcast`.
        """
        self._check()
        target = adapt(x, write=True)
        reduction = _Reduction(op, target)

        def body(turn: Turn) -> Any:
            turn.stamp("all_reduce", dtype=target.dtype, count=target.array.size, reduction=reduction.name)
            self._all_reduce(turn, target.array.reshape(-1), reduction)
            return target.finish()

        return self._run(f"all_reduce(op={reduction.name})", body, timeout, async_op)

    def all_reduce_many(
        self,
        arrays: Sequence[Any],
        op: str | ReduceOp = "sum",
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """`all_reduce` of many arrays at once: those of one dtype travel together.

        Returns:
            The list of results, each as `all_reduce` would return it.

        Raises:
            As `all_reduce`.
        """
        self._check()
        targets = [adapt(x, write=True) for x in arrays]
        by_dtype: dict[str, list[Adapted]] = {}
        for target in targets:
            by_dtype.setdefault(target.dtype, []).append(target)
        reductions = {dtype: _Reduction(op, group[0]) for dtype, group in by_dtype.items()}
        name = ReduceOp(op).value

        def body(turn: Turn) -> list[Any]:
            layout = ",".join(f"{target.dtype}{target.array.size}" for target in targets)
            turn.stamp("all_reduce_many", dtype=layout, reduction=name)
            for dtype, group in by_dtype.items():
                together = np.concatenate([target.array.reshape(-1) for target in group])
                self._all_reduce(turn, together, reductions[dtype])
                start = 0
                for target in group:
                    stop = start + target.array.size
                    target.array.reshape(-1)[:] = together[start:stop]
                    start = stop
            return [target.finish() for target in targets]

        return self._run(f"all_reduce_many({len(targets)} arrays, op={name})", body, timeout, async_op)

    def _all_reduce(self, turn: Turn, flat: npt.NDArray[Any], reduction: _Reduction) -> None:
        schedule = (star if self._is_star else ring).all_reduce(self.rank, self.world_size)
        chunks = [flat[start:stop] for start, stop in chunk_bounds(flat.size, schedule.parts)]
        turn.execute(schedule, chunks, reduction=reduction.step, dtype=reduction.dtype)
        reduction.finish(flat, self.world_size)

    def reduce(
        self,
        x: Any,
        dst: int,
        op: str | ReduceOp = "sum",
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combines the arrays of all members on rank `dst`; the others' stay as they are.

        Returns:
            On `dst` the array, changed in place (a new one where it cannot be written to); elsewhere `x`.

        Raises:
            As `all_reduce`; `InvalidRank` if there is no rank `dst`.
        """
        self._check()
        self._check_member(dst)
        target = adapt(x, write=self.rank == dst)
        reduction = _Reduction(op, target)
        schedule = (star if self._is_star else tree).reduce(self.rank, self.world_size, dst)

        def body(turn: Turn) -> Any:
            turn.stamp("reduce", dtype=target.dtype, count=target.array.size, reduction=reduction.name, root=dst)
            flat = target.array.reshape(-1)
            if self.rank != dst:
                flat = flat.copy()  # it is left with partial results
            turn.execute(schedule, [flat], reduction=reduction.step, dtype=reduction.dtype)
            if self.rank == dst:
                reduction.finish(flat, self.world_size)
            return target.finish()

        return self._run(f"reduce(dst={dst}, op={reduction.name})", body, timeout, async_op)

    def reduce_scatter(
        self,
        x: Any,
        op: str | ReduceOp = "sum",
        out: Any = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combines the arrays of all members and gives rank r the r-th part of the result, cut along dim 0.

        Args:
            x: Its dim 0 is a multiple of the world size.
            out: Is filled and returned; without it, a new array.

        Raises:
            UsageError: Dim 0 cannot be cut, or `out` does not fit.
            As `all_reduce`.
        """
        self._check()
        source = adapt(x, write=False)
        reduction = _Reduction(op, source)
        target = target_for(out, source, divided_shape(source.array, self.world_size))
        schedule = (star if self._is_star else ring).reduce_scatter(self.rank, self.world_size)

        def body(turn: Turn) -> Any:
            turn.stamp("reduce_scatter", dtype=source.dtype, count=source.array.size, reduction=reduction.name)
            chunks = pieces(source.array.copy(), self.world_size)
            turn.execute(schedule, chunks, reduction=reduction.step, dtype=reduction.dtype)
            mine = target.array.reshape(-1)
            mine[:] = chunks[self.rank]
            reduction.finish(mine, self.world_size)
            return target.finish()

        return self._run(f"reduce_scatter(op={reduction.name})", body, timeout, async_op)
