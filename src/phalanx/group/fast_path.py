"""The fast path of a group's collectives: calls on plain arrays, with hardly any Python in between.

Each method does its collective, or returns None before anything has happened. Then the general path does it. With
`later` it only issues the collective, for a caller that has the turn, and returns an `IssuedCollective`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy.typing as npt

from .._native import core, dtype_name_of_code, plain_arrays
from .data.arrays import Description, adapt
from .data.shapes import divided_shape, misfit
from .tracking.fingerprint import kind_of

if TYPE_CHECKING:
    from .._core import FastPath, FastSteps, MpiCalls, Recorder, Segment, StepsLayout, TurnLock
    from ..backends.lane import Lane
    from .running_collective import RunningCollective

__all__ = ["AnyFastPath", "DeviceFastPath", "FastPathMaker"]


class AnyFastPath(Protocol):
    """The core's fast path, or one that looks at the arrays before it."""

    paused: int
    """Operations under way in another thread: as long as there are any, every call is declined."""

    def barrier(self, timeout: Any = None, later: bool = False) -> Any:
        """Declines by None, as all methods do."""

    def broadcast(self, x: Any, root: Any, timeout: Any = None, later: bool = False) -> Any:
        """In place."""

    def all_reduce(self, x: Any, op: Any, timeout: Any = None, later: bool = False) -> Any:
        """In place."""

    def reduce(self, x: Any, root: Any, op: Any, timeout: Any = None, later: bool = False) -> Any:
        """In place on the root."""

    def all_gather(self, x: Any, out: Any, timeout: Any = None, later: bool = False) -> Any:
        """From `x` to `out`."""

    def gather(self, x: Any, root: Any, out: Any, timeout: Any = None, later: bool = False) -> Any:
        """From `x` to `out` on the root; True elsewhere."""

    def scatter(self, x: Any, root: Any, out: Any, timeout: Any = None, later: bool = False) -> Any:
        """From `x` on the root to `out`."""

    def reduce_scatter(self, x: Any, op: Any, out: Any, timeout: Any = None, later: bool = False) -> Any:
        """From `x` to `out`."""

    def all_to_all(self, x: Any, out: Any, timeout: Any = None, later: bool = False) -> Any:
        """From `x` to `out`."""


class DeviceFastPath(AnyFastPath, Protocol):
    """The fast path of arrays in the memory of a device. It is there before the group has an engine."""

    plain: AnyFastPath | None
    """The fast path of all other arrays, once there is one."""


Failed = Callable[[int, int, list[int], BaseException | int | None, float, bool], None]
"""Raises the error for an operation that failed: outcome, sequence number, blamed ranks, the interrupt if any, the
seconds that it had, and whether it was issued to run later."""


GoOn = Callable[["Callable[[RunningCollective], None]", int, "BaseException | None", float, "float | None"], None]
"""Runs the rest of an operation that the fast path has begun: the rest, sequence number, the interrupt if any, the
seconds that it has, and when these are over if it was issued to run later."""


class FastPathMaker:
    """Makes the core's fast path, once an engine has set up memory in which all members meet, or has a lane for it.

    Args:
        recorder: Gets a record of every operation.
        turn: Held by the collective that runs.
        timeout: Seconds that an operation may take.
        failed: Must not keep the group alive.
        go_on: The same.
    """

    def __init__(self, recorder: Recorder | None, turn: Any, timeout: float, failed: Failed, go_on: GoOn) -> None:
        self._recorder = recorder
        self._turn: TurnLock = turn
        self._timeout = timeout
        self._failed = failed
        self._go_on = go_on

    def make(self, meeting: Segment, calls: MpiCalls | None = None) -> FastPath:
        """The fast path of a group whose members meet in that memory.

        Args:
            calls: Functions that move the data once all have met; without them, the segment does.
        """
        assert core is not None
        assert self._recorder is not None
        made: FastPath = core.FastPath(
            meeting,
            self._recorder,
            self._turn,
            plain_arrays(),
            _kind_of,
            self._failed,
            _describe_part,
            _raise_misfit,
            self._timeout,
            calls,
        )
        return made

    def make_over_streams(
        self,
        lane: Lane,
        piece: int,
        lay_out: Callable[[str, int, int, int], StepsLayout | None],
        finish: Callable[..., None],
        take_scattered: Callable[..., None],
        run_whole: Callable[..., None],
    ) -> FastSteps | None:
        """The fast path of a group over plain TCP; None where there is no core, or its lane has other channels.

        Args:
            piece: Bytes that are moved at once.
            lay_out: Says how an operation on arrays of one size is done; see `NetworkEngine`.
            finish: Finishes an operation in Python; gets its collective, `steps`, `origin` and `outcome`.
            take_scattered: Takes a rank's part of a scatter in Python; gets its collective, `out`, `slot` and `root`.
            run_whole: Runs an operation in Python that was issued to run later; gets its collective, `verb`, `x`,
                `out`, `root` and `op`.
        """
        if core is None or lane.wait_policy is None or self._recorder is None:
            return None

        def go_on(
            steps: Any,
            origin: Any,
            outcome: int,
            sequence: int,
            interrupt: BaseException | None,
            seconds: float,
            ends: float | None,
        ) -> None:
            self._go_on(
                partial(finish, steps=steps, origin=origin, outcome=outcome), sequence, interrupt, seconds, ends
            )

        def take_part(out: Any, slot: bytes, root: int, sequence: int, seconds: float) -> None:
            self._go_on(partial(take_scattered, out=out, slot=slot, root=root), sequence, None, seconds, None)

        def do_all(verb: str, x: Any, out: Any, root: int, op: str, sequence: int, seconds: float, ends: float) -> None:
            whole = partial(run_whole, verb=verb, x=x, out=out, root=root, op=op)
            self._go_on(whole, sequence, None, seconds, ends)

        made: FastSteps = core.FastSteps(
            lane.rank,
            lane.size,
            self._recorder,
            self._turn,
            plain_arrays(),
            _kind_of,
            _describe_part,
            lay_out,
            go_on,
            take_part,
            do_all,
            lane.mailbox.ahead,
            self._timeout,
            lane.wait_policy,
            piece,
            lane.crew,
            lane.spare_cores,
        )
        return made


def _kind_of(operation: str, dtype: int, reduction: str) -> int:
    """The part of a fingerprint that stays the same from call to call, as the general path computes it."""
    return kind_of(operation, dtype_name_of_code(dtype) if dtype >= 0 else "", reduction)


def _describe_part(x: npt.NDArray[Any], parts: int) -> bytes:
    """The description of one of the parts of an array, for ranks that take it by the general path."""
    whole = adapt(x, write=False)
    return Description(whole.dtype, list(divided_shape(whole.array, parts)), whole.library).pack()


def _raise_misfit(out: npt.NDArray[Any], words: bytes, root: int) -> NoReturn:
    """Raises the error for a part that was scattered and does not fit."""
    raise misfit(adapt(out, write=True).description, Description.parse(words, None), root)
