"""A group's part of the slate: what other processes see of its operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...slate.slate import Slate
from ...slate.writing import OperationPlace, PythonWriter
from .call import CollectiveCall

if TYPE_CHECKING:
    from ..._core import SlateWriter
    from .call_site import CallSite

__all__ = ["Notes"]


class Notes:
    """Notes the operations of one group on the slate of its rank, where there is one.

    Args:
        slate: None where the rank has none.
        number: Of the group on the slate.
    """

    def __init__(self, slate: Slate | None, number: int, members: Sequence[int]) -> None:
        self._slate = slate
        self._number = number
        self._members = members

    @classmethod
    def of(
        cls, slate: Slate | None, context: bytes, rank: int, members: Sequence[int], where: Callable[[], str]
    ) -> Notes:
        """Those of a new group.

        Args:
            where: Tells where the program is.
        """
        if slate is None:
            return cls(None, 0, ())
        slate.watch_program(where)
        return cls(slate, slate.add_group(context, rank, members), members)

    def for_recorder(self) -> tuple[SlateWriter | None, int]:
        """The arguments with which the core's recorder notes its operations itself."""
        if self._slate is None or isinstance(self._slate.writer, PythonWriter):
            return None, 0
        return self._slate.writer, self._number

    def begin_collective(
        self, call: CollectiveCall, sequence: int, fingerprint: int, site: CallSite
    ) -> OperationPlace | None:
        """A collective begins to run."""
        peer = -1 if call.root is None else call.root
        return self._begin(call.operation, site, peer, _bytes_of(call), sequence, fingerprint)

    def begin_message(self, operation: str, peer: int | None, size: int, site: CallSite) -> OperationPlace | None:
        """A message begins."""
        return self._begin(operation.partition("(")[0], site, -1 if peer is None else peer, size, 0, 0)

    def _begin(
        self, verb: str, site: Any, peer: int, size: int, sequence: int, fingerprint: int
    ) -> OperationPlace | None:
        if self._slate is None:
            return None
        return self._slate.writer.begin(self._number, verb, site, peer, size, sequence, fingerprint)

    def end(self, place: OperationPlace | None, failed: bool = False) -> None:
        """The operation is over."""
        if self._slate is not None and place is not None:
            self._slate.writer.end(place, failed)

    def close(self) -> None:
        """The group is closed."""
        if self._slate is not None:
            self._slate.drop_group(self._number)


def _bytes_of(call: CollectiveCall) -> int:
    """The bytes of a collective's array; 0 for anything but one array."""
    if not call.dtype or "[" in call.dtype:
        return 0
    try:
        item = 2 if call.dtype == "bfloat16" else np.dtype(call.dtype).itemsize
    except TypeError:
        return 0
    return item * math.prod(call.shape)
