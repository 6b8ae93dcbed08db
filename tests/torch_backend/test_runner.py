"""The line of operations and the threads that serve it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from phalanx.torch_backend.runner import Runner

LIMIT = 30.0
"""Seconds that nothing here takes, unless it hangs."""


class Operation:
    """Stands in line, and tells when it runs and when its callback does. Both may last until they are let go."""

    def __init__(self, *, runs: bool = True, calls_back: bool = False) -> None:
        self.begun = False
        self.has_callbacks = calls_back
        self.running, self.calling = threading.Event(), threading.Event()
        self.may_end, self.may_return = threading.Event(), threading.Event()
        if runs:
            self.may_end.set()

    def run(self) -> None:
        self.begun = True
        self.running.set()
        assert self.may_end.wait(LIMIT)

    def call_back(self) -> None:
        self.calling.set()
        assert self.may_return.wait(LIMIT)


def ended(body: Callable[[], None]) -> threading.Event:
    """Set when a function has returned, which runs in a thread of its own."""
    done = threading.Event()
    threading.Thread(target=lambda: (body(), done.set()), daemon=True).start()
    return done


def test_a_thread_that_comes_back_late_from_a_callback_leaves_the_end_to_the_one_in_its_place() -> None:
    runner = Runner(LIMIT)
    first, second = Operation(calls_back=True), Operation(runs=False)
    runner.join(first, at_once=True)
    assert first.calling.wait(LIMIT)
    late = next(thread for thread in threading.enumerate() if thread.name == "phalanx-torch")
    runner.join(second, at_once=True)  # another thread takes the place of the one in the callback
    assert second.running.wait(LIMIT)
    stopped = ended(runner.stop)
    while runner._thread is not None:
        pass
    first.may_return.set()
    late.join(LIMIT)
    assert not late.is_alive()
    assert not stopped.is_set()
    second.may_end.set()
    assert stopped.wait(LIMIT)
