"""Handles of operations, as torch knows them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..arguments import LONGEST
from ..frames import hide_frames
from ..one_event import OneEvent

__all__ = ["CombinedWork", "FinishedWork", "Job", "UnfinishedWork", "seconds_of"]

Job = Callable[[float | None], Any]
"""Does an operation. Takes the seconds that it may last; None is the group's default, which is quickest."""


def seconds_of(timeout: Any) -> float | None:
    """A timeout as torch gives it, in seconds; None if it is not set, which torch says in several ways."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return min(seconds, LONGEST) if seconds > 0 else None


def _future_of(tensors: Any) -> Any:
    """A future whose value may hold these tensors: torch wants to know the GPUs that they are on."""
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    return torch.futures.Future(devices=list(devices)) if devices else torch.futures.Future()


class FinishedWork(dist.Work):  # type: ignore[misc]  # torch is not typed here
    """An operation that went well before the call returned.

    It has no constructor of its own, which would take as long as torch's: the core makes most of these, and sets
    `_tensors`.
    """

    __slots__ = ("_future", "_tensors")

    @classmethod
    def of(cls, tensors: Any) -> FinishedWork:
        """The handle of an operation that has changed these tensors."""
        work = cls()
        work._tensors = tensors
        return work

    def wait(self, timeout: Any = None) -> bool:
        return True

    def synchronize(self) -> None:
        """It is done already."""

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[Any]:
        return list(self._tensors)

    def get_future(self) -> Any:
        known = getattr(self, "_future", None)
        if known is None:
            known = self._future = _future_of(self._tensors)
            known.set_result(list(self._tensors))
        return known

    def source_rank(self) -> int:
        raise RuntimeError("only the work of a receive knows a source rank")

    def _source_rank(self) -> int:
        return self.source_rank()


class UnfinishedWork(dist.Work):  # type: ignore[misc]
    """An operation that goes on after the call has returned."""

    __slots__ = ("_at_end", "_ended", "_error", "_event", "_future", "_lock", "_promise", "_tensors", "_untold")

    def __init__(self, tensors: Any) -> None:
        dist.Work.__init__(self)
        self._set_up(tensors)

    def _set_up(self, tensors: Any) -> None:
        self._tensors = tensors
        self._lock = threading.Lock()
        self._event: OneEvent | None = None
        """Set when the operation ends. Made for who waits for that in another thread: to make one takes long."""
        self._promise: Any = None
        self._untold: Any = None
        """The promise of a future that the program holds, of an operation that has ended."""
        self._future: Any = None
        self._at_end: Callable[[], None] | None = None
        self._ended = False
        self._error: BaseException | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Waits until the operation is done.

        Raises:
            DistBackendError, DistNetworkError: It failed, or this wait lasted longer than `timeout`.
        """
        try:
            if not self._ended:
                self._await(seconds_of(timeout))
            if self._error is not None:
                raise self._error
        except BaseException as error:
            hide_frames(error)
            raise
        return True

    def synchronize(self) -> None:
        """The same as `wait`: there are no streams on a CPU."""
        self.wait()

    def is_completed(self) -> bool:
        return self._ended

    def is_success(self) -> bool:
        return self._ended and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        if not self._ended:
            raise RuntimeError("the operation is still under way (call wait() first)")
        if self._error is not None:
            raise self._error
        return list(self._tensors)

    def get_future(self) -> Any:
        with self._lock:
            known, ended = self._future, self._ended
            if known is None:
                self._promise = _future_of(self._tensors)
                self._future = self._promise.then(self._value)
        if known is None and ended:
            self._promise.set_result(None)
        return self._future

    def source_rank(self) -> int:
        raise RuntimeError("only the work of a receive knows a source rank")

    def _source_rank(self) -> int:
        return self.source_rank()

    def _await(self, seconds: float | None) -> None:
        raise NotImplementedError

    @property
    def has_callbacks(self) -> bool:
        """Whether `call_back` has something to do."""
        return self._untold is not None

    def call_back(self) -> None:
        """Runs the callbacks that wait for the end of the operation.

        They may issue operations and wait for them, so the caller may hold no lock that these need.
        """
        with self._lock:
            promise, self._untold = self._untold, None
        if promise is not None:
            promise.set_result(None)

    def call_at_end(self, job: Callable[[], None]) -> None:
        """Has something called when the operation has ended, before anybody hears of that; at once if it has.

        Args:
            job: Short, and without a question to this work, whose lock is held.
        """
        with self._lock:
            if not self._ended:
                self._at_end = job
                return
        job()

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._at_end is not None:
                self._at_end()
            self._error = error
            self._ended = True
            self._untold = self._promise
            event = self._event
        if event is not None:
            event.set()

    def _wait_for_end(self, seconds: float | None) -> bool:
        """Waits until another thread has ended the operation; False if that lasted longer."""
        with self._lock:
            if self._ended:
                return True
            if self._event is None:
                self._event = OneEvent()
            event = self._event
        return event.wait(seconds)

    def _value(self, _promise: Any) -> list[Any]:
        """The value of the future; raises as the operation did.

        `Future.set_exception` is for Python alone: C++, as in torch's data parallel, takes that error for the result.
        """
        if self._error is not None:
            raise self._error
        return list(self._tensors)

    def _too_long(self, seconds: float) -> BaseException:
        error: BaseException = dist.DistBackendError(f"phalanx: Timed out after {seconds:g} s (the operation goes on)")
        return error


class CombinedWork(UnfinishedWork):
    """Several operations as one: done when all are, failed as the first that did."""

    __slots__ = ("_works",)

    def __init__(self, works: list[Any]) -> None:
        super().__init__([])
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Any]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Any:
        with self._lock:
            if self._future is None:
                every = torch.futures.collect_all([work.get_future() for work in self._works])
                self._future = every.then(lambda done: [t for future in done.value() for t in future.value()])
            return self._future

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True
