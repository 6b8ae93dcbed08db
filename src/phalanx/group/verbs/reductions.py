"""Collectives that combine the arrays of all members, element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np

from ...errors import UnsupportedArray
from ...frames import hide_frames, hides_frames
from ...types import AnyArray, ArrayT, Op, OutT, TensorT
from ..collective_runner import CollectiveRunner
from ..data.arrays import Adapted, adapt
from ..data.overlap import check_parts
from ..data.reduction import Reduction, name_of
from ..data.shapes import divided_shape, part_of, target_for
from ..engines.base import Engine
from ..members import as_member
from ..running_collective import RunningCollective
from ..tracking.call import CollectiveCall
from ..work import Work

__all__ = ["Reductions"]


class Reductions(CollectiveRunner):
    """`all_reduce` and its kin."""

    @overload
    def all_reduce(
        self, x: ArrayT, op: Op = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> ArrayT: ...
    @overload
    def all_reduce(
        self, x: ArrayT, op: Op = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[ArrayT]: ...
    @overload
    def all_reduce(
        self, x: ArrayT, op: Op = ..., *, timeout: float | None = ..., async_op: bool
    ) -> ArrayT | Work[ArrayT]: ...

    def all_reduce(self, x: Any, op: Op = "sum", *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Combines the arrays of all members, element by element; everybody gets the same bits.

        Args:
            x: An array of the same dtype and shape on all ranks.
            op: `"sum"`, `"mean"`, `"prod"`, `"min"`, `"max"`, `"band"`, `"bor"` or `"bxor"`.

        Returns:
            The array, changed in place; a new one where it cannot be written to.

        Raises:
            UnsupportedOp: The dtype has no such reduction.
            As `broadcast`.
        """
        try:
            issued = self._later("all_reduce", x, op, timeout) if async_op else None
            if issued is not None:
                return issued
            self._check()
            target = adapt(x, write=True)
            reduction = Reduction(op, target)

            def body(engine: Engine, running: RunningCollective) -> Any:
                engine.all_reduce(running, target.array.reshape(-1), reduction)
                return target.finish()

            call = CollectiveCall("all_reduce", dtype=target.kind, shape=target.shape, reduction=reduction.name)
            return self._run(call, body, timeout, async_op)
        except BaseException as error:
            hide_frames(error)
            raise

    @overload
    def all_reduce_many(
        self, arrays: Sequence[ArrayT], op: Op = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> list[ArrayT]: ...
    @overload
    def all_reduce_many(
        self, arrays: Sequence[ArrayT], op: Op = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[list[ArrayT]]: ...
    @overload
    def all_reduce_many(
        self, arrays: Sequence[ArrayT], op: Op = ..., *, timeout: float | None = ..., async_op: bool
    ) -> list[ArrayT] | Work[list[ArrayT]]: ...

    @hides_frames
    def all_reduce_many(
        self,
        arrays: Sequence[Any],
        op: Op = "sum",
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
        name = name_of(op)
        try:
            given = list(arrays)
        except TypeError:
            raise UnsupportedArray(f"{type(arrays).__name__} is not a list of arrays") from None
        targets = [adapt(x, write=True) for x in given]
        by_dtype: dict[str, list[Adapted]] = {}
        for target in targets:
            by_dtype.setdefault(target.kind, []).append(target)
        reductions = {dtype: Reduction(op, group[0]) for dtype, group in by_dtype.items()}

        def body(engine: Engine, running: RunningCollective) -> list[Any]:
            for dtype, group in by_dtype.items():
                if group[0].empty is not None:  # on a GPU it costs less to reduce them one by one than to copy them
                    for target in group:
                        engine.all_reduce(running, target.array.reshape(-1), reductions[dtype])
                    continue
                together = np.concatenate([target.array.reshape(-1) for target in group])
                engine.all_reduce(running, together, reductions[dtype])
                start = 0
                for target in group:
                    stop = start + target.array.size
                    target.array.reshape(-1)[:] = together[start:stop]
                    start = stop
            return [target.finish() for target in targets]

        layout = ", ".join(
            f"{target.description} {target.library}" if target.empty else f"{target.description}" for target in targets
        )
        call = CollectiveCall("all_reduce_many", dtype=layout, reduction=name, detail=f"{len(targets)} arrays")
        return self._run(call, body, timeout, async_op)

    @overload
    def reduce(
        self, x: ArrayT, dst: int, op: Op = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> ArrayT: ...
    @overload
    def reduce(
        self, x: ArrayT, dst: int, op: Op = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[ArrayT]: ...
    @overload
    def reduce(
        self, x: ArrayT, dst: int, op: Op = ..., *, timeout: float | None = ..., async_op: bool
    ) -> ArrayT | Work[ArrayT]: ...

    def reduce(
        self,
        x: Any,
        dst: int,
        op: Op = "sum",
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
        try:
            issued = self._later("reduce", x, dst, op, timeout) if async_op else None
            if issued is not None:
                return issued
            self._check()
            dst = as_member(dst, self.world_size)
            target = adapt(x, write=self.rank == dst)
            reduction = Reduction(op, target)

            def body(engine: Engine, running: RunningCollective) -> Any:
                engine.reduce(running, target.array.reshape(-1), dst, reduction)
                return target.finish()

            call = CollectiveCall("reduce", dtype=target.kind, shape=target.shape, reduction=reduction.name, root=dst)
            return self._run(call, body, timeout, async_op)
        except BaseException as error:
            hide_frames(error)
            raise

    @overload
    def reduce_scatter(
        self, x: AnyArray, op: Op, out: OutT, *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> OutT: ...
    @overload
    def reduce_scatter(
        self, x: AnyArray, op: Op, out: OutT, *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[OutT]: ...
    @overload
    def reduce_scatter(
        self, x: AnyArray, op: Op = ..., *, out: OutT, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> OutT: ...
    @overload
    def reduce_scatter(
        self, x: AnyArray, op: Op = ..., *, out: OutT, timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[OutT]: ...
    @overload
    def reduce_scatter(
        self, x: TensorT, op: Op = ..., out: None = ..., *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> TensorT: ...
    @overload
    def reduce_scatter(
        self, x: TensorT, op: Op = ..., out: None = ..., *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[TensorT]: ...
    @overload
    def reduce_scatter(
        self,
        x: AnyArray,
        op: Op = ...,
        out: AnyArray | None = ...,
        *,
        timeout: float | None = ...,
        async_op: bool = ...,
    ) -> Any: ...

    def reduce_scatter(
        self,
        x: Any,
        op: Op = "sum",
        out: Any = None,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Combines the arrays of all members and gives rank r the r-th part of the result, cut along dim 0.

        Args:
            x: An array of the same dtype and shape on all ranks. Its dim 0 is a multiple of the world size.
            out: Is filled and returned; without it, a new array. It may be exactly one of the parts of `x`.

        Raises:
            UsageError: Dim 0 cannot be cut, or `out` does not fit, or overlaps `x` otherwise.
            As `all_reduce`.
        """
        try:
            if out is None and (made := part_of(x, self.world_size)) is not None:
                return self.reduce_scatter(x, op, made, timeout=timeout, async_op=async_op)
            issued = self._later("reduce_scatter", x, op, out, timeout) if async_op and out is not None else None
            if issued is not None:
                return issued
            self._check()
            source = adapt(x, write=False)
            reduction = Reduction(op, source)
            target = target_for(out, source, divided_shape(source.array, self.world_size))
            # A part that belongs to another rank is written while that rank may still read it.
            elsewhere = check_parts("reduce_scatter", source.array, target.array, self.world_size) not in (
                None,
                self.rank,
            )
            parts = source.array.copy() if elsewhere else source.array

            def body(engine: Engine, running: RunningCollective) -> Any:
                engine.reduce_scatter(running, parts.reshape(-1), target.array.reshape(-1), reduction)
                return target.finish()

            call = CollectiveCall("reduce_scatter", dtype=source.kind, shape=source.shape, reduction=reduction.name)
            return self._run(call, body, timeout, async_op)
        except BaseException as error:
            hide_frames(error)
            raise
