"""Failures on purpose, to see how your program takes them.

Those of a process need ranks that are processes: `run_ranks(..., backend="mesh", may_die=[2])`.

```python
def step(group):
    if group.rank == 2:
        faults.kill_self()                    # as the kernel does when memory runs out
    try:
        group.barrier()
    except PeerLost as error:
        return error.peer


assert run_ranks(3, step, backend="mesh", may_die=[2])[:2] == [2, 2]
```
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from ..backends.classic.world import ClassicWorld
from ..backends.lane import Lane
from ..backends.mesh.world import MeshWorld
from ..errors import ChannelClosed, UnsupportedOp, UsageError
from ..group import Group
from ..group.engines.base import Engine
from ..group.running_collective import RunningCollective
from ..launching.failures import Died
from .threads import is_thread_rank

__all__ = ["Died", "cut_off", "delay", "drop_connections", "exit_self", "kill_self", "stop_self"]


def _need_process() -> None:
    if is_thread_rank():
        raise UsageError(
            "this rank is a thread, and ending it would end all ranks (use backend='mesh', whose ranks are processes)"
        )


def kill_self() -> NoReturn:
    """Ends this process at once (SIGKILL): nothing is flushed, closed or reported.

    Raises:
        UsageError: The rank is a thread.
    """
    _need_process()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def exit_self(code: int = 1) -> NoReturn:
    """Ends this process as a crash in native code does: no exception, no `finally`, no goodbye.

    Raises:
        UsageError: The rank is a thread.
    """
    _need_process()
    os._exit(code)


def stop_self(seconds: float | None = None) -> None:
    """Stops this process (SIGSTOP): it neither runs nor ends, as on a machine that swaps or in a debugger.

    Args:
        seconds: Go on after so long; None stays stopped. `run_ranks` ends a stopped rank that is in `may_die` once it
            is the last.

    Raises:
        UsageError: The rank is a thread.
    """
    _need_process()
    waker: subprocess.Popen[bytes] | None = None
    if seconds is not None:
        # Another process, which does nothing else, has to wake it.
        program = f"import os, time; time.sleep({float(seconds)!r}); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
        waker = subprocess.Popen([sys.executable, "-S", "-E", "-c", program])
    os.kill(os.getpid(), signal.SIGSTOP)
    if waker is not None:
        waker.wait()


def drop_connections(group: Group) -> None:
    """Breaks the connections that carry this group's data to and from this rank, as a network that fails does.

    The ranks go on, and so does what tells them of each other's health. On a classic wire all groups share the
    connections. Memory that ranks of one host share cannot break; here it does all the same.

    Raises:
        UnsupportedOp: The backend has no connections.
    """
    if not isinstance(group.backend.control, MeshWorld | ClassicWorld):
        raise UnsupportedOp(f"{type(group.backend).__name__} has no connections to break")
    streams = [stream for lane in _lanes(group) for stream in lane.streams()]
    for stream in streams:
        stream.sever()
    segment = group._engine.segment if group._engine is not None else None
    if segment is not None:
        segment.leave()
        other = group.members[(group.rank + 1) % group.world_size]
        group._collectives.fail(ChannelClosed(other, "the memory shared with it was cut off on purpose"))


def cut_off(group: Group) -> None:
    """Breaks the connections of this rank to all others and to the directory: the others lose it, and it loses them.

    Raises:
        UnsupportedOp: The backend has no connections.
    """
    drop_connections(group)
    control = group.backend.control
    if isinstance(control, MeshWorld):
        control._client.link.stream.sever()


@contextlib.contextmanager
def delay(group: Group, seconds: float) -> Iterator[None]:
    """Makes this rank slow inside the block: each message and each step of a collective is sent `seconds` later.

    The thread that sends waits so long; one that receives does not.

    Raises:
        UsageError: `seconds` is negative.
    """
    if not seconds >= 0:
        raise UsageError(f"seconds={seconds!r} is not valid (expected 0 or more)")
    lanes = _lanes(group)

    def slow(lane: Lane) -> Any:
        send = lane.start_send

        def start_send(*args: Any) -> Any:
            time.sleep(seconds)
            return send(*args)

        return start_send

    def slow_engine(running: RunningCollective) -> Engine:
        engine = type(group)._engine_for(group, running)
        if engine.segment is not None:
            time.sleep(seconds)
        return engine

    for lane in lanes:
        lane.start_send = slow(lane)  # type: ignore[method-assign]
    group._engine_for = slow_engine  # type: ignore[method-assign]
    # What goes past the lanes and the engine:
    fast_messages, group._fast_messages = group._fast_messages, None
    fast_path, group._fast_path = group._fast_path, None
    try:
        yield
    finally:
        group._fast_messages = fast_messages
        group._fast_path = fast_path
        del group._engine_for
        for lane in lanes:
            del lane.start_send  # the class's own is seen again


def _lanes(group: Group) -> list[Lane]:
    return [group._messages, group._collectives]
