"""Collectives that move arrays without changing them."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import numpy as np

from ...errors import UsageError
from ...frames import hide_frames
from ...types import AnyArray, ArrayT, Counts, OutT, TensorT
from ..data.arrays import Adapted, Description, adapt, adapt_out, copy_values, empty_on_gpu, make
from ..data.overlap import check_gathered, check_parts
from ..data.shapes import divided_shape, gathered_from, misfit, part_of, stacked_shape, target_for
from ..engines.base import Engine, Parts
from ..members import as_member
from ..running_collective import RunningCollective
from ..tracking.call import CollectiveCall
from ..work import Work
from .uneven import UnevenGathers

__all__ = ["Gathers"]


class Gathers(UnevenGathers):
    """`barrier`, `broadcast`, `all_gather` and their kin."""

    @overload
    def barrier(self, *, timeout: float | None = ..., async_op: Literal[False] = ...) -> None: ...
    @overload
    def barrier(self, *, timeout: float | None = ..., async_op: Literal[True]) -> Work[None]: ...
    @overload
    def barrier(self, *, timeout: float | None = ..., async_op: bool) -> Work[None] | None: ...

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Returns once every member has called it.

        Raises:
            Timeout: Not all came in time; names those that did not, and what they were last seen doing.
            PeerLost: A member is gone.
            Desync: A member called another operation.
        """
        try:
            issued = self._later("barrier", timeout) if async_op else None
            if issued is not None:
                return issued
            self._check()

            def body(engine: Engine, running: RunningCollective) -> None:
                engine.barrier(running)

            call = CollectiveCall("barrier")
            return self._run(call, body, timeout, async_op)
        except BaseException as error:
            hide_frames(error)
            raise

    @overload
    def broadcast(
        self, x: ArrayT, src: int, *, timeout: float | None = ..., async_op: Literal[False] = ...
    ) -> ArrayT: ...
    @overload
    def broadcast(
        self, x: ArrayT, src: int, *, timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[ArrayT]: ...
    @overload
    def broadcast(
        self, x: ArrayT, src: int, *, timeout: float | None = ..., async_op: bool
    ) -> ArrayT | Work[ArrayT]: ...

    def broadcast(self, x: Any, src: int, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Gives every member the array of rank `src`. All pass an array of the same dtype and shape.

        Returns:
            The array, changed in place; a new one where it cannot be written to.

        Raises:
            As `barrier`; `InvalidRank` and `UnsupportedArray` before anything is sent.
        """
        try:
            issued = self._later("broadcast", x, src, timeout) if async_op else None
            if issued is not None:
                return issued
            self._check()
            src = as_member(src, self.world_size)
            target = adapt(x, write=self.rank != src)

            def body(engine: Engine, running: RunningCollective) -> Any:
                engine.broadcast(running, target.array.reshape(-1), src)
                return target.finish()

            call = CollectiveCall("broadcast", dtype=target.kind, shape=target.shape, root=src)
            return self._run(call, body, timeout, async_op)
        except BaseException as error:
            hide_frames(error)
            raise

    @overload
    def all_gather(
        self,
        x: AnyArray,
        out: OutT,
        *,
        counts: Counts = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> OutT: ...
    @overload
    def all_gather(
        self, x: AnyArray, out: OutT, *, counts: Counts = ..., timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[OutT]: ...
    @overload
    def all_gather(
        self,
        x: TensorT,
        out: None = ...,
        *,
        counts: Counts = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> TensorT: ...
    @overload
    def all_gather(
        self, x: TensorT, out: None = ..., *, counts: Counts = ..., timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[TensorT]: ...
    @overload
    def all_gather(
        self,
        x: AnyArray,
        out: AnyArray | None = ...,
        *,
        counts: Counts = ...,
        timeout: float | None = ...,
        async_op: bool = ...,
    ) -> Any: ...

    def all_gather(
        self,
        x: Any,
        out: Any = None,
        *,
        counts: Counts = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Puts the arrays of all members together along dim 0, in the order of ranks; everybody gets the result.

        Args:
            x: An array of the same dtype and shape on all ranks.
            out: Is filled and returned; without it, a new array. `x` may be exactly this rank's part of it.
            counts: For parts that differ along dim 0: the rows of each rank, the same on all ranks; or `"auto"` on all
                ranks, to find them out.

        Raises:
            UsageError: `out` does not fit, or overlaps `x` otherwise; or `x` has not as many rows as `counts` says.
            Desync: Ranks differ in `counts`.
            As `broadcast`.
        """
        try:
            if counts is not None:
                return self._gather_uneven("all_gather", x, None, out, counts, timeout, async_op)
            if out is None and (made := gathered_from(x, self.world_size)) is not None:
                return self.all_gather(x, made, timeout=timeout, async_op=async_op)
            issued = self._later("all_gather", x, out, timeout) if async_op and out is not None else None
            if issued is not None:
                return issued
            self._check()
            source = adapt(x, write=False)
            target = target_for(out, source, stacked_shape(source.array, self.world_size))
            check_gathered("all_gather", source.array, target.array, self.rank)

            def body(engine: Engine, running: RunningCollective) -> Any:
                counts = [source.array.size] * self.world_size
                engine.all_gather(running, source.array.reshape(-1), target.array.reshape(-1), counts)
                return target.finish()

            call = CollectiveCall("all_gather", dtype=source.kind, shape=source.shape)
            return self._run(call, body, timeout, async_op)
        except BaseException as error:
            hide_frames(error)
            raise

    @overload
    def gather(
        self,
        x: AnyArray,
        dst: int,
        out: OutT,
        *,
        counts: Counts = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> OutT | None: ...
    @overload
    def gather(
        self,
        x: AnyArray,
        dst: int,
        out: OutT,
        *,
        counts: Counts = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[OutT | None]: ...
    @overload
    def gather(
        self,
        x: TensorT,
        dst: int,
        out: None = ...,
        *,
        counts: Counts = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> TensorT | None: ...
    @overload
    def gather(
        self,
        x: TensorT,
        dst: int,
        out: None = ...,
        *,
        counts: Counts = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[TensorT | None]: ...
    @overload
    def gather(
        self,
        x: AnyArray,
        dst: int,
        out: AnyArray | None = ...,
        *,
        counts: Counts = ...,
        timeout: float | None = ...,
        async_op: bool = ...,
    ) -> Any: ...

    def gather(
        self,
        x: Any,
        dst: int,
        out: Any = None,
        *,
        counts: Counts = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Puts the arrays of all members together along dim 0 on rank `dst`.

        Args:
            x: An array of the same dtype and shape on all ranks.
            out: On `dst`: is filled and returned; without it, a new array. `x` may be exactly this rank's part of it.
            counts: As of `all_gather`.

        Returns:
            The result on `dst`, None elsewhere.

        Raises:
            As `all_gather`; `InvalidRank` if there is no rank `dst`.
        """
        try:
            if counts is not None:
                return self._gather_uneven("gather", x, dst, out, counts, timeout, async_op)
            here = out is None and type(dst) is int and dst == self.rank
            if here and (made := gathered_from(x, self.world_size)) is not None:
                return self.gather(x, dst, made, timeout=timeout, async_op=async_op)
            issued = self._later("gather", x, dst, out, timeout) if async_op else None
            if issued is not None:
                return issued
            self._check()
            dst = as_member(dst, self.world_size)
            source = adapt(x, write=False)
            target: Adapted | None = None
            if self.rank == dst:
                target = target_for(out, source, stacked_shape(source.array, self.world_size))
                check_gathered("gather", source.array, target.array, self.rank)
            elif out is not None:
                raise UsageError(f"out is only filled on rank {dst} (leave it out on rank {self.rank})")

            def body(engine: Engine, running: RunningCollective) -> Any:
                everything = target.array.reshape(-1) if target is not None else None
                engine.gather(running, source.array.reshape(-1), everything, dst, [source.array.size] * self.world_size)
                return target.finish() if target is not None else None

            call = CollectiveCall("gather", dtype=source.kind, shape=source.shape, root=dst)
            return self._run(call, body, timeout, async_op)
        except BaseException as error:
            hide_frames(error)
            raise

    @overload
    def scatter(
        self,
        x: AnyArray | None,
        src: int,
        out: OutT,
        *,
        counts: Counts = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> OutT: ...
    @overload
    def scatter(
        self,
        x: AnyArray | None,
        src: int,
        out: OutT,
        *,
        counts: Counts = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[OutT]: ...
    @overload
    def scatter(
        self,
        x: None,
        src: int,
        out: None = ...,
        *,
        counts: Counts = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Any: ...
    @overload
    def scatter(
        self,
        x: None,
        src: int,
        out: None = ...,
        *,
        counts: Counts = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Any]: ...
    @overload
    def scatter(
        self,
        x: TensorT | None,
        src: int,
        out: None = ...,
        *,
        counts: Counts = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> TensorT: ...
    @overload
    def scatter(
        self,
        x: TensorT | None,
        src: int,
        out: None = ...,
        *,
        counts: Counts = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[TensorT]: ...
    @overload
    def scatter(
        self,
        x: AnyArray | None,
        src: int,
        out: AnyArray | None = ...,
        *,
        counts: Counts = ...,
        timeout: float | None = ...,
        async_op: bool = ...,
    ) -> Any: ...

    def scatter(
        self,
        x: Any,
        src: int,
        out: Any = None,
        *,
        counts: Counts = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Gives rank r the r-th part of the array of rank `src`, cut along dim 0.

        Args:
            x: On `src`: an array whose dim 0 is a multiple of the world size. Elsewhere it is not looked at.
            out: Is filled and returned; without it, a new array. On `src` it may be exactly one of the parts of `x`
                (with `counts`: its own).
            counts: For parts that differ along dim 0. On `src`: the rows of each rank, or `"auto"` to cut as
                `numpy.array_split` does, into parts that differ by one row at most. Elsewhere the same, or `"auto"`.

        Raises:
            UsageError: Dim 0 cannot be cut, or `out` does not fit what the root has, or overlaps `x` otherwise.
            As `broadcast`.
        """
        try:
            if counts is not None:
                return self._scatter_uneven(x, src, out, counts, timeout, async_op)
            here = out is None and type(src) is int and src == self.rank
            if here and (made := part_of(x, self.world_size)) is not None:
                return self.scatter(x, src, made, timeout=timeout, async_op=async_op)
            issued = self._later("scatter", x, src, out, timeout) if async_op and out is not None else None
            if issued is not None:
                return issued
            self._check()
            src = as_member(src, self.world_size)
            target = adapt_out(out) if out is not None else None
            source: Adapted | None = None
            place: int | None = None
            if self.rank == src:
                if x is None:
                    raise UsageError(f"x is None on rank {src}, whose array scatter hands out (the others give None)")
                source = adapt(x, write=False)
                target = target_for(target, source, divided_shape(source.array, self.world_size))
                place = check_parts("scatter", source.array, target.array, self.world_size)

            def body(engine: Engine, running: RunningCollective) -> Any:
                parts: Parts | None = None
                if source is not None:
                    shape = divided_shape(source.array, self.world_size)
                    words = Description(source.dtype, list(shape), source.library).pack()
                    parts = Parts(source.array.reshape(-1), source.dtype, words)
                told: list[tuple[Description, Any]] = []
                made: Adapted | None = None
                takes_gpus = engine.for_host is not engine

                def receive(words: bytes) -> Any:
                    nonlocal made
                    description = Description.parse(words, None)
                    kind, size = description.dtype, math.prod(description.shape)
                    part: Any = np.empty(description.shape, description.numpy_dtype())
                    # Another rank's part of x, in place, may be read by that rank until all are done.
                    if (
                        target is not None
                        and (target.dtype, target.array.size) == (kind, size)
                        and place in (None, self.rank)
                    ):
                        part = target.array
                    elif target is None and takes_gpus:
                        made = empty_on_gpu(description)
                        part = part if made is None else made.array
                    told.append((description, part))
                    return part.reshape(-1)

                engine.scatter_equal(running, parts, src, receive)
                ((description, part),) = told
                if target is None:
                    return make(description, part) if made is None else made.finish()
                if target.dtype != description.dtype or target.array.size != part.size:
                    raise misfit(target.description, description, src)
                if part is not target.array:
                    copy_values(target.array, part)
                return target.finish()

            call = CollectiveCall("scatter", root=src)
            return self._run(call, body, timeout, async_op)
        except BaseException as error:
            hide_frames(error)
            raise
