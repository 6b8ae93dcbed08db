"""Engines move and combine the memory of collectives: the part below the verbs.

A verb has validated its arrays and made flat, contiguous memory of them; an engine does the work, over the network or
inside a segment. All ranks of a group use the same kind of engine, because they decide by what all of them know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from ..._native import reduce_into
from ...algorithms import chunk_bounds
from ...backends.base import LaneBackend
from ...backends.lane import Lane
from ...errors import PhalanxError
from ..data.reduction import Reduction
from ..fast_path import AnyFastPath, FastPathMaker
from ..running_collective import RunningCollective
from ..tracking.call import CollectiveCall
from .slots import SLOT, Parts, Slot, pack_slot

if TYPE_CHECKING:
    from ..._core import Segment
    from ...cuda.lending import Loans

__all__ = ["Engine", "EngineSetup", "Flat", "Parts", "Receive", "RunCollective", "split"]

Flat = npt.NDArray[Any]
"""One-dimensional and contiguous."""


def split(flat: Flat, counts: Sequence[int]) -> list[Flat]:
    """Consecutive parts of these lengths."""
    return [flat[start:stop] for start, stop in pairwise(accumulate(counts, initial=0))]


Receive = Callable[[bytes], Flat]
"""Gives the memory for a part, by its packed description."""

RunCollective = Callable[[CollectiveCall, "Callable[[Engine, RunningCollective], Any]"], None]
"""Runs a collective of a group with the group's own timeout, and waits for its end."""


class EngineSetup(NamedTuple):
    """The parts from which an engine is made, in the first collective of its group."""

    running: RunningCollective
    """That collective."""
    backend: LaneBackend
    lane: Lane
    """The group's lane for collectives."""
    context: bytes
    """The group's identity."""


class Engine(ABC):
    """The collectives on flat memory.

    Every method is called by all members with matching arguments. Where parts differ in length, `counts` has their
    elements by rank, the same on all ranks; they lie one after another.

    Raises:
        DeadlinePassed, FingerprintMismatch, PhalanxError: From every method, as `steps.run`.
    """

    segment: Segment | None = None
    """The memory that this rank shares with others of its host, if it does."""
    exchanges_counts = True
    """True if the ranks can tell each other how much they will send."""
    takes_parts = False
    """True if the fast path takes the parts of all ranks wherever each of them lies."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @property
    def for_host(self) -> Engine:
        """The engine of arrays in the memory of the host, which this may be itself."""
        return self

    @property
    def loans(self) -> Loans | None:
        """Arrays on a GPU that members take from each other where they lie; None unless all can."""
        return None

    # -- the fast path, where the engine has one -----------------------------------------------------------------------

    def open_fast_path(self, maker: FastPathMaker) -> AnyFastPath | None:
        """The fast path of synchronous calls on plain arrays; None if this engine has none."""
        return None

    def raise_failure(self, outcome: int, blamed: Sequence[int], interrupt: BaseException | int | None) -> NoReturn:
        """Raises the error for an operation of the fast path that failed.

        Args:
            outcome: As of the core's segment.
            blamed: The segment's ranks that it failed because of.
            interrupt: The exception that ended it, or an error code that only the engine knows.
        """
        raise PhalanxError(f"the fast path failed with outcome {outcome}, but {type(self).__name__} has none")

    # -- the end -------------------------------------------------------------------------------------------------------

    def flush(self, seconds: float) -> None:  # noqa: B027 - most engines have nothing to wait for
        """Waits a moment, before the group is closed, until the others have come to what this rank did not wait for.

        Raises:
            FingerprintMismatch: One of them was in another operation.
        """

    def close(self) -> None:  # noqa: B027 - nor to give back
        """Gives back what must not wait for the garbage collector."""

    # -- the collectives -----------------------------------------------------------------------------------------------

    @abstractmethod
    def barrier(self, running: RunningCollective) -> None:
        """Returns once all have called it."""

    @abstractmethod
    def broadcast(self, running: RunningCollective, flat: Flat, src: int) -> None:
        """`flat` of rank `src` on everyone."""

    @abstractmethod
    def all_reduce(self, running: RunningCollective, flat: Flat, reduction: Reduction) -> None:
        """The reduction of all `flat`, on everyone, with the same bits."""

    @abstractmethod
    def reduce(self, running: RunningCollective, flat: Flat, dst: int, reduction: Reduction) -> None:
        """The reduction of all `flat` on rank `dst`; elsewhere `flat` stays as it is."""

    @abstractmethod
    def reduce_scatter(self, running: RunningCollective, source: Flat, target: Flat, reduction: Reduction) -> None:
        """The r-th part of the reduction of all `source` to `target` of rank r, which may be that part of `source`.

        The rest of `source` stays as it is.
        """

    @abstractmethod
    def all_gather(self, running: RunningCollective, source: Flat, target: Flat, counts: Sequence[int]) -> None:
        """All `source`, one after another, to `target` on everyone. `source` may lie at its place in `target`."""

    @abstractmethod
    def gather(
        self, running: RunningCollective, source: Flat, target: Flat | None, dst: int, counts: Sequence[int]
    ) -> None:
        """All `source`, one after another, to `target` on rank `dst`; elsewhere `target` is None.

        `source` may lie at its place in `target`.
        """

    @abstractmethod
    def scatter(
        self, running: RunningCollective, source: Flat | None, target: Flat, src: int, counts: Sequence[int]
    ) -> None:
        """The r-th part of `source` of rank `src` to `target` of rank r; elsewhere `source` is None."""

    def scatter_equal(self, running: RunningCollective, parts: Parts | None, src: int, receive: Receive) -> None:
        """As `scatter`, where only rank `src` knows how long the parts are; elsewhere `parts` is None."""
        slot = np.empty(SLOT, np.uint8) if parts is None else pack_slot(parts, self.size)
        self.broadcast(running, slot, src)
        told = Slot(slot, self.size)
        words: bytes | bytearray | None = told.words
        if words is None:
            words = bytearray(told.words_length if parts is None else parts.description)
            self.broadcast(running, np.frombuffer(words, np.uint8), src)
        target = receive(bytes(words))
        self.scatter(running, None if parts is None else parts.flat, target, src, [target.size] * self.size)

    def scan(self, running: RunningCollective, flat: Flat, reduction: Reduction, *, exclusive: bool) -> None:
        """On rank r the reduction of `flat` of the ranks up to r; if `exclusive`, of those below r.

        A mean is left a sum. With `exclusive`, `flat` of rank 0 is left undefined.

        Here the ranks exchange parts, so that rank r has the r-th part of everybody, and back: two exchanges, and each
        rank combines as many elements as it has.
        """
        if self.size == 1:
            return
        lengths = [stop - start for start, stop in chunk_bounds(flat.size, self.size)]
        sizes = np.tile(np.array(lengths, np.int64), (self.size, 1))
        rows = np.empty((self.size, lengths[self.rank]), flat.dtype)
        self.all_to_all(running, flat, rows.reshape(-1), sizes)
        for below, row in pairwise(rows):
            reduce_into(row, below, reduction.step, dtype=reduction.dtype)
        if exclusive:
            rows = np.roll(rows, 1, axis=0)
        self.all_to_all(running, rows.reshape(-1), flat, sizes.T)

    @abstractmethod
    def all_to_all(self, running: RunningCollective, source: Flat, target: Flat, sizes: npt.NDArray[np.int64]) -> None:
        """`sizes[i, j]` elements from rank i to rank j."""
