"""The event that comes once."""

from __future__ import annotations

import threading
import time

from tests.lateness import bound

from phalanx.one_event import LOOK, OneEvent


def test_all_threads_are_woken_also_by_a_second_set() -> None:
    event, woken = OneEvent(), []
    threads = [threading.Thread(target=lambda: woken.append(event.wait(30)), daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert not event.wait(0.01)
    assert not event.wait(0.0)
    event.set()
    event.set()
    for thread in threads:
        thread.join(30)
    assert woken == [True] * 8
    assert event.wait(0.0)
    assert event.wait(None)


def test_a_thread_that_was_interrupted_after_its_wake_up_keeps_nobody_asleep() -> None:
    event = OneEvent()
    threading.Timer(0.05, setattr, (event, "_is_set", True)).start()  # set, and the wake-up went to that thread
    began = time.monotonic()
    assert event.wait(30)
    assert time.monotonic() - began < bound(LOOK + 0.5)
