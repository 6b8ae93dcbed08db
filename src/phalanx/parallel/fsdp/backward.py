"""One backward through a wrapped module: gradients are averaged unit by unit while it runs.

On every rank a pass is the same sequence of operations: one average per unit, always in the same order, and one short
all_reduce of who failed, and of which parameters nobody had a gradient. A backward that raises drops its callback; the
pass then sends the rest with zeros and reports that it failed, so that the others raise instead of waiting. No gradient
is given out before the report.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import Desync, PhalanxError
from ...group import Group
from ...operating_system import give_back_memory
from .units import Unit

__all__ = ["BackwardPass"]

_UNDER_WAY = 2
"""Averages at the same time. While one is under way, the whole gradients of its unit are in memory."""
_LARGE_UNIT = 64 << 20
"""Bytes of a unit from which it is worth to ask the C library for what it keeps."""


class BackwardPass:
    """The averages of one backward.

    Args:
        units: In the order in which they are averaged.
        group: All ranks that train together.
        averages: False if gradients are only added up on this rank.
        keeps: Whether whole parameters stay, because another backward will need them.
        on_end: Called when it is over: whether gradients were averaged, and `keeps`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        group: Group,
        *,
        averages: bool,
        keeps: bool,
        timeout: float | None,
        on_end: Callable[[bool, bool], None],
    ) -> None:
        self._units = units
        self._group = group
        self._averages = averages
        self._keeps = keeps
        self._timeout = timeout
        self._on_end = on_end
        self._missing = {
            id(unit): {id(use) for place in unit.places for use in place.uses if use.requires_grad} for unit in units
        }
        self._sent = 0
        if averages and any(unit.size >= _LARGE_UNIT for unit in units):
            give_back_memory()  # the gradients of the step before, which lay where others do not fit

    def mark_ready(self, unit: Unit, parameter: Any) -> None:
        """A gradient is complete."""
        self._missing[id(unit)].discard(id(parameter))
        if self._averages:
            while self._sent < len(self._units) - 1 and not self._missing[id(self._units[self._sent])]:
                self._send()

    def finish(self) -> None:
        """The end of backward: the shards have their gradients when it returns.

        Raises:
            Desync: Another rank did not finish its backward; then no rank has new gradients.
        """
        if not self._averages:
            self._on_end(False, self._keeps)
            return
        try:
            while self._sent < len(self._units):
                self._send()
            for unit in self._units:
                unit.wait()
            failed, used = self._report(False)
        except BaseException:
            self._on_end(False, self._keeps)
            raise
        self._on_end(True, self._keeps)
        if failed:
            for unit in self._units:
                unit.drop()
            peer = self._group.members[failed - 1]
            raise Desync(
                f"rank {peer} did not finish this backward, so no gradients were averaged (its own error says why; to "
                "go on, drop the gradients of this step on all ranks)",
                peer=peer,
            )
        for unit in self._units:
            unit.give_out(used[: len(unit.places)])
            used = used[len(unit.places) :]

    def give_up(self) -> None:
        """Sends the rest of the sequence, so that the others hear that this rank failed."""
        if not self._averages:
            self._on_end(False, self._keeps)
            return
        with contextlib.suppress(PhalanxError):  # then the group is broken: the others hear that
            while self._sent < len(self._units):
                self._send(only_zeros=True)
            for unit in self._units:
                unit.wait()
            self._report(True)
        for unit in self._units:
            unit.drop()
        self._on_end(True, self._keeps)

    def _make_room(self, unit: Unit) -> None:
        """Before the average of a large unit: what the others and backward itself have used is free by now.

        Here a rank has most in memory: the whole gradients of what belongs to no layer, mostly of an embedding, and all
        shards.
        """
        if unit.size >= _LARGE_UNIT:
            for other in self._units[: self._sent]:
                other.wait()
            give_back_memory()

    def _send(self, *, only_zeros: bool = False) -> None:
        unit = self._units[self._sent]
        if self._sent == len(self._units) - 1:
            self._make_room(unit)
        unit.reduce(only_zeros=only_zeros)
        if not self._keeps:
            unit.release()
        if self._sent >= _UNDER_WAY:
            self._units[self._sent - _UNDER_WAY].wait()
        self._sent += 1

    def _report(self, failed: bool) -> tuple[int, list[bool]]:
        """The rank that failed, plus one, or 0; and for each parameter whether any rank had a gradient of it."""
        used = [has for unit in self._units for has in unit.has_gradients]
        words = np.array([self._group.rank + 1 if failed else 0, *used], np.int32)
        self._group.all_reduce(words, op="max", timeout=self._timeout)
        return int(words[0]), words[1:].astype(bool).tolist()
