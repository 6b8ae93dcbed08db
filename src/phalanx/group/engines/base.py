"""What moves and combines the memory of a collective: the part below the verbs.

A verb has validated its arrays and made flat, contiguous memory of them; an engine does the work, over the network or
inside a segment. All ranks of a group use the same kind of engine, because they decide by what all of them know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...errors import PhalanxError
from ..data.reduction import Reduction
from ..running_collective import RunningCollective

if TYPE_CHECKING:
    from ..._core import Segment

__all__ = ["Engine", "Flat", "split"]

Flat = npt.NDArray[Any]
"""One-dimensional and contiguous."""


def split(flat: Flat, counts: Sequence[int]) -> list[Flat]:
    """Consecutive parts of these lengths."""
    return [flat[start:stop] for start, stop in pairwise(accumulate(counts, initial=0))]


class Engine(ABC):
    """The collectives on flat memory.

    Every method is called by all members with matching arguments. Where parts differ in length, `counts` has their
    elements by rank, the same on all ranks; they lie one after another.

    Raises:
        DeadlinePassed, FingerprintMismatch, PhalanxError: From every method, as `steps.run`.
    """

    segment: Segment | None = None
    """The memory that this rank shares with others of its host, if it does."""
    meeting: Segment | None = None
    """The memory in which all members meet, if they do: what the fast path goes through."""
    members: tuple[int, ...] = ()
    """The group's rank of each who meets there."""
    exchanges_counts = True
    """Whether the ranks can tell each other how much they will send."""

    def explain(self, error: BaseException | int) -> BaseException:
        """What to raise for an exception of the fast path, or for a code that only the engine knows."""
        return error if isinstance(error, BaseException) else PhalanxError(f"the engine failed with code {error}")

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

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

    @abstractmethod
    def all_to_all(self, running: RunningCollective, source: Flat, target: Flat, sizes: npt.NDArray[np.int64]) -> None:
        """`sizes[i, j]` elements from rank i to rank j."""
