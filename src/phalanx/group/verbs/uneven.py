"""Gathers and scatters of parts that differ in length along dim 0: what `counts=` of these verbs does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...arguments import as_counts
from ...errors import UnsupportedOp, UsageError
from ..collective_runner import CollectiveRunner
from ..data.arrays import Adapted, Description, adapt, adapt_out, share_memory
from ..data.overlap import check_gathered, check_scattered
from ..data.shapes import new_array, target_for
from ..engines.base import Engine
from ..members import as_member
from ..running_collective import RunningCollective
from ..tracking.call import CollectiveCall

__all__ = ["UnevenGathers"]

DESCRIPTION_SLOT = 1024
"""Bytes in which the root of a scatter tells everybody what a row is."""


class UnevenGathers(CollectiveRunner):
    """The collectives behind `counts=` of `all_gather`, `gather` and `scatter`."""

    def _as_counts(self, counts: Any) -> list[int] | None:
        """The rows of each rank; None if the call finds them out."""
        return None if isinstance(counts, str) and counts == "auto" else as_counts(counts, self.world_size, "counts")

    def _gather_uneven(
        self, verb: str, x: Any, dst: int | None, out: Any, counts: Any, timeout: float | None, async_op: bool
    ) -> Any:
        """Arrays of so many rows each, put together on rank `dst`; on everyone if it is None.

        Counts that are given are a part of the fingerprint, so that ranks which disagree about them find out. Counts
        that are not, the ranks tell each other first.
        """
        self._check()
        dst = None if dst is None else as_member(dst, self.world_size)
        known = self._as_counts(counts)
        source = adapt(x, write=False)
        if not source.array.ndim:
            raise UsageError(f"{verb} with counts takes rows, but x has no dims (x.reshape(1) is one row)")
        rows, rest = source.shape[0], source.shape[1:]
        if known is not None and known[self.rank] != rows:
            raise UsageError(
                f"counts[{self.rank}] is {known[self.rank]}, but rank {self._world_rank} has {rows} rows: its x has "
                f'shape {source.shape} (counts="auto" finds out how many each rank has)'
            )
        gets_it = dst in (None, self.rank)
        if out is not None and not gets_it:
            raise UsageError(f"out is only filled on rank {dst} (leave it out on rank {self.rank})")
        given = None if out is None else adapt_out(out)
        if given is not None and known is not None:
            given = target_for(given, source, (sum(known), *rest))
            before = sum(known[: self.rank]) * math.prod(rest) * source.array.itemsize
            check_gathered(verb, source.array, given.array, self.rank, before)
        elif given is not None and share_memory(source.array, given.array):
            # Where its place in out is, turns out later: then out is written to, and x must not be.
            source = Adapted(source.array.copy(), source.dtype, source.library, source.finish, source.empty)

        def body(engine: Engine, running: RunningCollective) -> Any:
            _check_engine(engine, verb)
            found = self._tell_rows(engine, running, rows) if known is None else known
            target, problem = _target(given, source, (sum(found), *rest)) if gets_it else (None, None)
            flat = source.array.reshape(-1)
            everything = None if target is None else target.array.reshape(-1)
            sizes = [count * math.prod(rest) for count in found]
            if dst is not None:
                engine.gather(running, flat, everything, dst, sizes)
            else:
                assert everything is not None
                engine.all_gather(running, flat, everything, sizes)
            if problem is not None:
                raise problem
            return None if target is None else target.finish()

        layout = str(Description(source.dtype, list(rest), ""))
        if source.empty is not None:
            layout += " on a GPU"
        if known is not None:
            layout += f" with counts {known}"
        return self._run(CollectiveCall(verb, layout, root=dst, detail="counts"), body, timeout, async_op)

    def _tell_rows(self, engine: Engine, running: RunningCollective, rows: int) -> list[int]:
        """The rows of each rank."""
        table = np.zeros(self.world_size, np.int64)
        table[self.rank] = rows
        engine.all_gather(running, table[self.rank : self.rank + 1], table, [1] * self.world_size)
        return [int(count) for count in table]

    def _scatter_uneven(self, x: Any, src: int, out: Any, counts: Any, timeout: float | None, async_op: bool) -> Any:
        """Parts of so many rows each, from rank `src`, which tells everybody how many."""
        self._check()
        src = as_member(src, self.world_size)
        known = self._as_counts(counts)
        given = None if out is None else adapt_out(out)
        source: Adapted | None = None
        slot = np.zeros(DESCRIPTION_SLOT + 8 * self.world_size, np.uint8)
        if self.rank == src:
            source = adapt(x, write=False)
            cut = self._cut(source, known)
            rest = source.shape[1:]
            if given is not None:
                given = target_for(given, source, (cut[self.rank], *rest))
                before = sum(cut[: self.rank]) * math.prod(rest) * source.array.itemsize
                check_scattered("scatter", source.array, given.array, self.rank, before)
            _fill(slot, Description(source.dtype, list(rest), source.library).pack(), cut)

        def body(engine: Engine, running: RunningCollective) -> Any:
            _check_engine(engine, "scatter")
            engine.broadcast(running, slot, src)
            words, told = _read(slot)
            row = Description.parse(words, None)
            like = Adapted(np.empty(0, row.numpy_dtype()), row.dtype, row.library, lambda: None)
            target, problem = _target(given, like, (told[self.rank], *row.shape), anywhere=True)
            sizes = [count * math.prod(row.shape) for count in told]
            everything = None if source is None else source.array.reshape(-1)
            engine.scatter(running, everything, target.array.reshape(-1), src, sizes)
            if problem is not None:
                raise problem
            if known is not None and known != told:
                raise UsageError(
                    f"counts is {known} on rank {self._world_rank}, but rank {self.members[src]} scattered {told} rows"
                )
            return target.finish()

        # The shape tells it from a scatter of equal parts.
        call = CollectiveCall("scatter", shape=(self.world_size,), root=src, detail="counts")
        return self._run(call, body, timeout, async_op)

    def _cut(self, source: Adapted, known: list[int] | None) -> list[int]:
        """The rows of the root's array for each rank: as given, or as `numpy.array_split` cuts them."""
        if not source.array.ndim:
            raise UsageError("scatter with counts takes rows, but x has no dims")
        rows = source.shape[0]
        if known is None:
            least, more = divmod(rows, self.world_size)
            return [least + (rank < more) for rank in range(self.world_size)]
        if sum(known) != rows:
            raise UsageError(
                f"counts add up to {sum(known)}, but rank {self._world_rank} has {rows} rows: its x has shape "
                f"{source.shape}"
            )
        return known


def _check_engine(engine: Engine, verb: str) -> None:
    """Refuses counts among ferrotorch's ranks, on all of them alike."""
    if not engine.exchanges_counts:
        raise UnsupportedOp(f"{verb}: the parts of ferrotorch's ranks have one length (leave counts out)")


def _target(
    given: Adapted | None, like: Adapted, shape: tuple[int, ...], *, anywhere: bool = False
) -> tuple[Adapted, UsageError | None]:
    """The target for a result of this shape, and the error to raise once the others have what they wait for."""
    try:
        return target_for(given, like, shape, anywhere=anywhere), None
    except UsageError as error:
        return new_array(like, shape), error


def _fill(slot: np.ndarray[Any, np.dtype[np.uint8]], words: bytes, counts: Sequence[int]) -> None:
    """Writes what the root of a scatter tells: the description of a row, and the rows of each rank."""
    slot[0:2] = divmod(len(words), 256)
    slot[2 : 2 + len(words)] = np.frombuffer(words, np.uint8)
    slot[DESCRIPTION_SLOT:] = np.array(counts, np.int64).view(np.uint8)


def _read(slot: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[bytes, list[int]]:
    length = 256 * int(slot[0]) + int(slot[1])
    counts = slot[DESCRIPTION_SLOT:].view(np.int64)
    return slot[2 : 2 + length].tobytes(), [int(count) for count in counts]
