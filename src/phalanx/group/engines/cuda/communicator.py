"""A communicator of NCCL: made by all ranks together, ended by each of them alone as soon as something goes wrong.

NCCL's kernels wait for the other ranks without a bound, and nothing but an abort ends them. So nothing here blocks:
what was begun is looked at again and again, beside the deadline, NCCL's own errors, and the group's, and the first of
these ends the communicator.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ....backends.lane import Lane
from ....background_thread import BackgroundThread
from ....cuda.driver import CudaDriver, CudaError
from ....cuda.nccl import ID_BYTES, IN_PROGRESS, Nccl, NcclError
from ....deadline import Deadline
from ....errors import ChannelClosed, PhalanxError
from ...outcomes import DeadlinePassed
from ...running_collective import RunningCollective
from ..base import Engine

__all__ = ["Communicator"]

_log = logging.getLogger(__name__)

LOOKS = 200
"""Looks at an operation without a pause. One takes a few microseconds, and most operations are short."""
PAUSE, LONGEST_PAUSE = 20e-6, 500e-6
"""Seconds between two looks after that."""
CAUSE_WAIT = 1.0
"""Seconds that a rank on which NCCL has failed waits for the group to say which rank is gone."""
END_WAIT = 1.0
"""Seconds that the end of a communicator may take; a call of NCCL that takes longer goes on in its thread."""

Enqueue = Callable[[Nccl, Any, int], None]
"""Puts operations of a communicator on a stream."""


class Communicator:
    """One rank's part of a communicator, on one GPU and one stream of its own.

    Args:
        lane: The group's, which ends when the group breaks.
        device: The GPU.
    """

    def __init__(self, library: Nccl, known: CudaDriver, device: int, lane: Lane) -> None:
        self.device = device
        self._library = library
        self._driver = known
        self._lane = lane
        self._process = os.getpid()
        self._comm: Any = None
        with known.using(device):
            self._stream = known.new_stream()

    def start(self, running: RunningCollective, host: Engine) -> None:
        """Meets the other ranks; the first of them tells the identity by a broadcast on the host.

        Raises:
            DeadlinePassed, FingerprintMismatch, PhalanxError: As every engine. The communicator is ended then.
        """
        identity = np.zeros(ID_BYTES, np.uint8)
        if host.rank == 0:
            identity[:] = np.frombuffer(self._library.new_id(), np.uint8)
        host.broadcast(running, identity, 0)
        with self._ended_by_failure():
            self._comm = self._library.start(host.size, host.rank, identity.tobytes())
            self._wait(running.deadline, lambda: True)

    def run(self, running: RunningCollective, enqueue: Enqueue) -> None:
        """Does operations on the GPU, and returns when they have ended there.

        Raises:
            DeadlinePassed, PhalanxError: The communicator is ended then, and nothing of it runs any more.
        """
        if self._comm is None:
            raise self._lane.error or PhalanxError("the communicator of NCCL was ended by an earlier failure")
        with self._ended_by_failure():
            enqueue(self._library, self._comm, self._stream)
            self._wait(running.deadline, lambda: self._driver.is_idle(self._stream))

    def copy(self, to: int, address: int, size: int) -> None:
        """Puts a copy inside the GPU on the stream, before what is given to NCCL."""
        if size and to != address:
            with self._driver.using(self.device):
                self._driver.copy(to, address, size, self._stream)

    def _wait(self, deadline: Deadline, is_over: Callable[[], bool]) -> None:
        """Waits until NCCL has begun all that it was given, and `is_over`."""
        looks, pause = 0, PAUSE
        while self._is_in_progress() or not is_over():
            if self._lane.error is not None:
                raise self._lane.error
            if deadline.expired:
                raise DeadlinePassed([rank for rank in range(self._lane.size) if rank != self._lane.rank])
            looks += 1
            if looks > LOOKS:
                time.sleep(min(pause, max(deadline.remaining(), 0.0)))
                pause = min(2 * pause, LONGEST_PAUSE)

    def _is_in_progress(self) -> bool:
        code = self._library.state(self._comm)
        if code and code != IN_PROGRESS:
            raise self._library.error_of(self._comm, code)
        return code == IN_PROGRESS

    @contextlib.contextmanager
    def _ended_by_failure(self) -> Iterator[None]:
        """Makes the GPU the current one. Whatever is raised ends the communicator.

        Where NCCL notices first that a rank is gone, the group's own error is raised: it names the rank.
        """
        try:
            with self._driver.using(self.device):
                yield
        except (NcclError, CudaError) as error:
            self.abort()
            raise self._lane.await_error(CAUSE_WAIT) or error from None
        except BaseException:
            self.abort()
            raise

    # -- the end -------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Ends it and what runs on it, without the others. Waits until nothing of it writes to memory any more."""
        comm, self._comm = self._comm, None
        if comm is None or os.getpid() != self._process:
            return
        self._in_thread(lambda: self._library.abort(comm))
        deadline = Deadline(END_WAIT)
        with contextlib.suppress(CudaError), self._driver.using(self.device):
            while not self._driver.is_idle(self._stream):
                if deadline.expired:
                    _log.error("NCCL's kernel did not end within %g s of its abort: it may still write", END_WAIT)
                    return
                time.sleep(LONGEST_PAUSE)

    def close(self) -> None:
        """Gives it back: together with the others if they come to it in a second, else alone."""
        if os.getpid() != self._process:
            return
        is_whole = self._lane.error is None or isinstance(self._lane.error, ChannelClosed)
        if self._comm is not None and is_whole:
            with contextlib.suppress(PhalanxError), self._driver.using(self.device):
                self._finalize(self._comm)
        self.abort()
        with contextlib.suppress(CudaError), self._driver.using(self.device):
            self._driver.end_stream(self._stream)

    def _finalize(self, comm: Any) -> None:
        self._library.finalize(comm)
        deadline = Deadline(END_WAIT)
        while self._is_in_progress():
            if deadline.expired:  # the others do not close the group now
                return
            time.sleep(LONGEST_PAUSE)
        self._comm = None
        self._in_thread(lambda: self._library.destroy(comm))

    def _in_thread(self, call: Callable[[], None]) -> None:
        """Calls a function of NCCL that may block, and waits for it as long as the caller can afford."""

        def on_gpu() -> None:
            with self._driver.using(self.device):
                call()

        thread = BackgroundThread(on_gpu, "phalanx-nccl-end", on_error=_note).start()
        thread.join(END_WAIT)
        if thread.is_alive:
            _log.warning("the end of a communicator of NCCL takes longer than %g s", END_WAIT)


def _note(error: Exception) -> None:
    """Logs the error of an end: the caller has a better one."""
    if not isinstance(error, NcclError | CudaError):
        raise error
    _log.info("a communicator did not end well: %s", error)
