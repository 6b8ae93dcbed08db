"""The collective in which everybody has something else for everybody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from ...arguments import as_counts
from ...errors import UsageError
from ...frames import hide_frames
from ...types import AnyArray, OutT, TensorT
from ..collective_runner import CollectiveRunner
from ..data.arrays import adapt, adapt_out
from ..data.overlap import exchanged
from ..data.shapes import divided_shape, exchanged_from, new_array, target_for
from ..engines.base import Engine
from ..running_collective import RunningCollective
from ..tracking.call import CollectiveCall
from ..work import Work

__all__ = ["Exchanges"]


class Exchanges(CollectiveRunner):
    """`all_to_all`, also of parts that differ in length."""

    @overload
    def all_to_all(
        self,
        x: AnyArray,
        out: OutT,
        *,
        send_counts: Sequence[int] | None = ...,
        recv_counts: Sequence[int] | None = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> OutT: ...
    @overload
    def all_to_all(
        self,
        x: AnyArray,
        out: OutT,
        *,
        send_counts: Sequence[int] | None = ...,
        recv_counts: Sequence[int] | None = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[OutT]: ...
    @overload
    def all_to_all(
        self,
        x: TensorT,
        out: None = ...,
        *,
        send_counts: Sequence[int] | None = ...,
        recv_counts: Sequence[int] | None = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> TensorT: ...
    @overload
    def all_to_all(
        self,
        x: TensorT,
        out: None = ...,
        *,
        send_counts: Sequence[int] | None = ...,
        recv_counts: Sequence[int] | None = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[TensorT]: ...
    @overload
    def all_to_all(
        self,
        x: AnyArray,
        out: AnyArray | None = ...,
        *,
        send_counts: Sequence[int] | None = ...,
        recv_counts: Sequence[int] | None = ...,
        timeout: float | None = ...,
        async_op: bool = ...,
    ) -> Any: ...

    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Sends the j-th part of `x` (along dim 0) to rank j, and puts together what comes from all, by rank.

        Args:
            x: Without counts its dim 0 is a multiple of the world size.
            out: Is filled and returned; without it, a new array. It may be exactly `x`.
            send_counts: How many rows go to each rank. Given on all ranks or on none.
            recv_counts: How many rows come from each rank; found out if it is not given, checked if it is.

        Raises:
            UsageError: The counts do not fit `x`, `out` or each other, or `x` and `out` overlap otherwise.
            As `broadcast`.
        """
        try:
            is_even = send_counts is None and recv_counts is None
            if is_even and out is None and (made := exchanged_from(x, self.world_size)) is not None:
                return self.all_to_all(x, made, timeout=timeout, async_op=async_op)
            issued = self._later("all_to_all", x, out, timeout) if async_op and is_even and out is not None else None
            if issued is not None:
                return issued
            self._check()
            source = adapt(x, write=False)
            if send_counts is None:
                if recv_counts is not None:
                    raise UsageError("recv_counts needs send_counts")
                target = target_for(out, source, divided_shape(source.array, self.world_size) and source.array.shape)
                sent = exchanged("all_to_all", source, target.array)

                def even(engine: Engine, running: RunningCollective) -> Any:
                    count = sent.array.size // self.world_size
                    sizes = np.full((self.world_size, self.world_size), count)
                    engine.all_to_all(running, sent.array.reshape(-1), target.array.reshape(-1), sizes)
                    return target.finish()

                call = CollectiveCall("all_to_all", dtype=sent.kind, shape=sent.shape)
                return self._run(call, even, timeout, async_op)

            sending = as_counts(send_counts, self.world_size, "send_counts")
            receiving = None if recv_counts is None else as_counts(recv_counts, self.world_size, "recv_counts")
            if not source.array.ndim or sum(sending) != source.array.shape[0]:
                raise UsageError(f"send_counts add up to {sum(sending)}, but x has shape {source.array.shape}")
            rest = source.array.shape[1:]
            given = None if out is None else adapt_out(out)
            if given is not None and receiving is not None:
                given = target_for(given, source, (sum(receiving), *rest))
            sent = source if given is None else exchanged("all_to_all", source, given.array)

            def uneven(engine: Engine, running: RunningCollective) -> Any:
                rows = self._exchange_counts(engine, running, sending, receiving)
                mine = rows[:, self.rank]
                shape = (int(mine.sum()), *rest)
                misfit: UsageError | None = None
                try:
                    target = target_for(given, sent, shape)
                except UsageError as error:  # raised once the others have what they wait for
                    target, misfit = new_array(sent, shape), error
                width = int(np.prod(rest, dtype=np.int64))
                engine.all_to_all(running, sent.array.reshape(-1), target.array.reshape(-1), rows * width)
                if misfit is not None:
                    raise misfit
                return target.finish()

            call = CollectiveCall("all_to_all(counts)", dtype=f"{sent.kind}{list(rest)}")
            return self._run(call, uneven, timeout, async_op)
        except BaseException as error:
            hide_frames(error)
            raise

    def _exchange_counts(
        self, engine: Engine, running: RunningCollective, sending: Sequence[int], receiving: Sequence[int] | None
    ) -> npt.NDArray[np.int64]:
        """The number of rows that go from each rank (dim 0) to each (dim 1).

        All ranks see all counts, so all refuse alike what does not fit.
        """
        size = self.world_size
        if not engine.exchanges_counts:
            return self._known_counts(sending, receiving)
        table = np.full((size, 2, size), -1, np.int64)
        table[self.rank, 0] = sending
        if receiving is not None:
            table[self.rank, 1] = receiving
        engine.all_gather(running, table[self.rank].reshape(-1), table.reshape(-1), [2 * size] * size)
        sent, expected = table[:, 0], table[:, 1].T
        wrong = np.argwhere((expected >= 0) & (expected != sent))
        if len(wrong):
            source, target = wrong[0]
            raise UsageError(
                f"rank {self.members[source]} sends {sent[source, target]} rows to rank {self.members[target]}, whose "
                f"recv_counts expect {expected[source, target]}"
            )
        return sent

    def _known_counts(self, sending: Sequence[int], receiving: Sequence[int] | None) -> npt.NDArray[np.int64]:
        """The same table with what this rank knows: its own row and column."""
        if receiving is None or receiving[self.rank] != sending[self.rank]:
            raise UsageError(
                "ferrotorch's ranks do not tell each other their counts: give recv_counts as well, with the same "
                f"number of rows for rank {self.rank} itself in both"
            )
        rows = np.zeros((self.world_size, self.world_size), np.int64)
        rows[self.rank], rows[:, self.rank] = sending, receiving
        return rows
