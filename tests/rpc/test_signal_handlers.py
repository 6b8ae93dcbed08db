"""Signal handlers that wait for remote calls: they get their answer, or are told at once why they cannot wait."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

import numpy as np
import pytest
from tests.lateness import bound
from tests.rpc.support import run

from phalanx.errors import PhalanxError
from phalanx.rpc import Agent


def serve(agent: Agent) -> None:
    agent.register("echo", lambda value: value)


def calls_of_handlers(agent: Agent, kind: str) -> tuple[int, set[str], float]:
    """How many of its calls had an answer, what the others were told, and how long the longest took."""
    answered, told, longest, inside = 0, set(), 0.0, False

    def handler(_signum: int, _frame: FrameType | None) -> None:
        nonlocal answered, longest, inside
        if inside:
            return
        inside, began = True, time.monotonic()
        try:
            assert agent.call(1, "echo", 42, timeout=20) == 42
            answered += 1
        except PhalanxError as error:
            told.add(f"{type(error).__name__}: {error}")
        longest = max(longest, time.monotonic() - began)
        inside = False

    assert agent.call(1, "echo", 0) == 0
    array = np.zeros(40_000)
    over, others = threading.Event(), []

    def call_beside() -> None:
        while not over.is_set():
            others.append(agent.call(1, "echo", 3, timeout=20))

    beside = threading.Thread(target=call_beside)
    if kind == "beside others":
        beside.start()
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 3e-3)
    ends = time.monotonic() + 1.5
    try:
        while time.monotonic() < ends:
            if kind in ("short", "beside others"):
                assert agent.call(1, "echo", 1, timeout=20) == 1
            elif kind == "long":
                assert agent.call(1, "echo", array, timeout=20).shape == array.shape
            else:
                futures = [agent.call_async(1, "echo", number, timeout=20) for number in range(64)]
                assert [future.result() for future in futures] == list(range(64))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        over.set()
        if beside.is_alive():
            beside.join()
    assert set(others) <= {3}
    return answered, told, longest


@pytest.mark.parametrize("kind", ["short", "long", "many", "beside others"])
def test_a_handler_does_not_wait_in_vain(stream: str, kind: str) -> None:
    """The thread that it interrupts may be the one that reads: then nobody else would, until the time is over."""
    answered, told, longest = run(stream, 2, serve, calls_of_handlers, kind)
    assert answered
    assert all(words.startswith("UsageError: a signal handler cannot wait for rank 1 now") for words in told), told
    assert longest < bound(3)
