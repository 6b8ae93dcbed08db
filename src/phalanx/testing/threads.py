"""Ranks as threads of this process: bounded in time, and with one error for the first cause."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from ..deadline import Deadline
from ..errors import RankFailed
from ..launching.failures import FAILED_AT, RankFailure, capture, first_cause, to_error
from ..thread_frames import thread_frames

__all__ = ["is_thread_rank", "run_threads"]

GRACE = 5.0
"""Seconds the other ranks have to end once one has failed, or once the time is over."""

_here = threading.local()


def is_thread_rank() -> bool:
    """Whether the calling thread is a rank that shares its process with others."""
    return getattr(_here, "rank", None) is not None


def run_threads(
    bodies: Sequence[Callable[[], Any]], *, timeout: float, abort: Callable[[str], None] = lambda _reason: None
) -> list[Any]:
    """Runs each body in a thread of its own and returns their results in order.

    Args:
        timeout: Seconds for all of it.
        abort: Ends the world, so that ranks which wait for others do not do so in vain.

    Raises:
        RankFailed: A rank raised, or was not done in time. Threads cannot be killed: one that hangs in code that is not
            Phalanx's is left behind as a daemon.
    """
    results: list[Any] = [None] * len(bodies)
    failures: list[RankFailure] = []
    done = threading.Condition()
    running = set(range(len(bodies)))

    def run(rank: int) -> None:
        _here.rank = rank
        failure: RankFailure | None = None
        try:
            results[rank] = bodies[rank]()
        except BaseException as error:
            failure = capture(rank, getattr(error, FAILED_AT, time.monotonic()), error)
        with done:
            if failure is not None:
                failures.append(failure)
            running.discard(rank)
            done.notify_all()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(len(bodies))
    ]
    for thread in threads:
        thread.start()
    with done:
        done.wait_for(lambda: not running or failures, timeout)
        hung = sorted(running) if not failures else []
        stacks = _stacks(threads, hung)
    if running:
        abort("a rank failed" if failures else f"not done within {timeout:g} s")
        with done:
            done.wait_for(lambda: not running, GRACE)
    limit = Deadline(GRACE)
    for rank, thread in enumerate(threads):
        if rank not in running:
            thread.join(limit.remaining())
    if hung:
        names = ", ".join(map(str, hung))
        raise RankFailed(f"not done within {timeout:g} s: ranks {names}\n\n{stacks}", hung[0], stacks)
    if failures:
        raise to_error(first_cause(failures), failures)
    return results


def _stacks(threads: Sequence[threading.Thread], ranks: Sequence[int]) -> str:
    frames = thread_frames()
    parts = []
    for rank in ranks:
        frame = frames.get(threads[rank].ident or -1)
        lines = "".join(traceback.format_stack(frame)) if frame is not None else "  it is gone\n"
        parts.append(f"rank {rank} was in:\n{lines}")
    return "\n".join(parts)
