"""Handles of operations, as torch knows them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..arguments import LONGEST
from ..group.tracking import call_site
from .errors import translated
from .visible import unwatched

if TYPE_CHECKING:
    from ..group import Work as GroupWork
    from .runner import Runner

__all__ = ["CollectiveWork", "CombinedWork", "FinishedWork", "MessageWork", "SelfMessageWork", "seconds_of"]

Job = Callable[[float | None], Any]
"""Does an operation. Takes the seconds that it may last; None is the group's default, which is quickest."""

_LONG_IN_LINE = 1.0
"""Seconds that an operation waits for its turn before that counts as a part of the time that it may take."""


def seconds_of(timeout: Any) -> float | None:
    """A timeout as torch gives it, in seconds; None if it is not set, which torch says in several ways."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return min(seconds, LONGEST) if seconds > 0 else None


class FinishedWork(dist.Work):  # type: ignore[misc]  # torch is not typed here
    """An operation that went well before the call returned."""

    __slots__ = ("_future", "_tensors")

    def __init__(self, tensors: Any) -> None:
        dist.Work.__init__(self)
        self._tensors = tensors
        self._future: Any = None

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
        if self._future is None:
            self._future = torch.futures.Future()
            self._future.set_result(list(self._tensors))
        return self._future

    def source_rank(self) -> int:
        raise RuntimeError("only the work of a receive knows a source rank")

    def _source_rank(self) -> int:
        return self.source_rank()


class _UnfinishedWork(dist.Work):  # type: ignore[misc]
    """What operations have in common that go on after the call has returned."""

    def __init__(self, tensors: Any) -> None:
        dist.Work.__init__(self)
        self._tensors = tensors
        self._lock = threading.Lock()
        self._promise: Any = None
        self._untold: Any = None
        """The promise of a future that somebody has, of an operation that has ended."""
        self._future: Any = None
        self._ended = False
        self._error: BaseException | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Waits until the operation is done.

        Raises:
            DistBackendError, DistNetworkError: It failed, or this wait lasted longer than `timeout`.
        """
        if not self._ended:
            self._await(seconds_of(timeout))
        if self._error is not None:
            raise self._error
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
                self._promise = torch.futures.Future()
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
        """Runs what waits for the end of the operation.

        It may issue operations and wait for them, so whoever calls this holds nothing that they need.
        """
        with self._lock:
            promise, self._untold = self._untold, None
        if promise is not None:
            promise.set_result(None)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = error
            self._ended = True
            self._untold = self._promise

    def _value(self, _promise: Any) -> list[Any]:
        """What the future gets; raises as the operation did.

        `Future.set_exception` is for Python alone: C++, as in torch's data parallel, takes that error for the result.
        """
        if self._error is not None:
            raise self._error
        return list(self._tensors)

    def _too_long(self, seconds: float) -> BaseException:
        error: BaseException = dist.DistBackendError(f"phalanx: Timed out after {seconds:g} s (the operation goes on)")
        return error


class CollectiveWork(_UnfinishedWork):
    """A collective that waits for its turn, in a queue of its group. Whoever waits for it may run it."""

    def __init__(self, runner: Runner, job: Job, seconds: float | None, default: float, tensors: Any) -> None:
        super().__init__(tensors)
        self._runner = runner
        self._job: Job | None = job
        self._seconds = seconds
        self._default = default
        self._issued = time.monotonic()
        self._site = call_site.find()
        """The user's line, whichever thread will run it."""
        self._done = threading.Event()

    @property
    def begun(self) -> bool:
        """Whether its turn was: a collective is done then."""
        return self._ended

    def get_future(self) -> Any:
        if not self._ended:
            self._runner.hurry()
        return super().get_future()

    def run(self) -> None:
        """Does it, whatever comes of it. Called once, in its turn."""
        job, self._job = self._job, None
        assert job is not None
        seconds = self._seconds
        waited = time.monotonic() - self._issued
        if waited > _LONG_IN_LINE:
            seconds = max((self._default if seconds is None else seconds) - waited, 0.0)
        error: BaseException | None = None
        call_site.lend(self._site)
        try:
            unwatched(job, seconds)
        except BaseException as failure:
            error = translated(failure)
        finally:
            call_site.lend(None)
        self._end(error)
        self._done.set()

    def _await(self, seconds: float | None) -> None:
        if seconds is None:
            self._runner.drive(self)
        elif not self._done.wait(seconds):
            raise self._too_long(seconds)


class MessageWork(_UnfinishedWork):
    """A message that waits for its turn, or is under way. Whoever waits for it may begin it.

    Args:
        lines: Its own line, and the one for the other direction.
        begin: Moves the message if that can be done soon, else returns what does so from now on.
        finish: Called when it has arrived; says who sent it, where that matters.
    """

    def __init__(
        self,
        lines: tuple[Runner, Runner],
        begin: Callable[[], GroupWork | None],
        tensors: Any,
        finish: Callable[[Any], int] | None = None,
    ) -> None:
        super().__init__(tensors)
        self._line, self._other_line = lines
        self._begin: Callable[[], GroupWork | None] | None = begin
        self._finish = finish
        self._work: GroupWork | None = None
        self._source = -1
        self._site = call_site.find()
        self._done = threading.Event()
        self.begun = False

    def source_rank(self) -> int:
        if self._source < 0:
            return super().source_rank()
        return self._source

    def is_completed(self) -> bool:
        if not self.begun:
            self._line.hurry()
        return self._ended

    def get_future(self) -> Any:
        if not self.begun:
            self._line.hurry()
        return super().get_future()

    def run(self) -> None:
        """Begins it. Called once, in its turn; takes some milliseconds at most, whatever the other rank does."""
        begin, self._begin = self._begin, None
        assert begin is not None
        try:
            call_site.lend(self._site)
            try:
                self._work = unwatched(begin)
            finally:
                call_site.lend(None)
            if self._work is None:
                self._arrived(None)
            else:
                self._work.add_done_callback(self._heard)
        except BaseException as failure:
            self._conclude(translated(failure))
        self.begun = True

    def _heard(self, work: GroupWork) -> None:
        try:
            self._arrived(work.result())
        except BaseException as failure:
            self._conclude(translated(failure))
        if self.has_callbacks:  # this thread moves the messages of others, too: it must not wait for one
            threading.Thread(target=self.call_back, name="phalanx-torch-callback", daemon=True).start()

    def _arrived(self, result: Any) -> None:
        if self._finish is not None:
            self._source = unwatched(self._finish, result)
        self._conclude(None)

    def _conclude(self, error: BaseException | None) -> None:
        self._end(error)
        self._done.set()

    def _await(self, seconds: float | None) -> None:
        self._other_line.hurry()  # the other rank may wait for what this one sends, or has no room to send more
        if seconds is None:
            self._line.drive(self)
        else:
            self._line.hurry()
            if not self._done.wait(seconds):
                raise self._too_long(seconds)
        if self._work is not None and not self._ended:
            with contextlib.suppress(Exception):  # the same is heard below, in torch's words
                self._work.wait()
        self._done.wait()  # another thread may be about to say so


class CombinedWork(_UnfinishedWork):
    """Several operations as one: done when all are, failed as the first that did."""

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


class SelfMessageWork(_UnfinishedWork):
    """A receive from oneself."""

    def __init__(self, tensor: Any, rank: int) -> None:
        super().__init__([tensor])
        self._rank = rank
        self._done = threading.Event()

    def source_rank(self) -> int:
        return self._rank

    def arrive(self, values: Any) -> None:
        """The message was sent."""
        error: BaseException | None = None
        try:
            tensor = self._tensors[0].detach()
            tensor.copy_(values.reshape(tensor.shape))
        except Exception as failure:
            error = failure
        self._end(error)
        self._done.set()
        self.call_back()

    def _await(self, seconds: float | None) -> None:
        if not self._done.wait(seconds):
            raise self._too_long(seconds or 0.0)
