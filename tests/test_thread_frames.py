"""Where the threads of a process are, asked for while threads begin and end and garbage is collected."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest

from phalanx.thread_frames import thread_frames, thread_stack

BUSY = """
import gc, os, sys, threading, time
from phalanx.thread_frames import thread_frames
gc.set_threshold(5)
sys.setswitchinterval(1e-6)

class Cycle:  # only the collector ends it, and its finalizer lets another thread run
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0)

def look():
    while True:
        Cycle()
        thread_frames()
        time.sleep(0.001)

for _ in range(3):
    threading.Thread(target=look, daemon=True).start()
end = time.monotonic() + 3
while time.monotonic() < end:
    threads = [threading.Thread(target=Cycle) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("ended", flush=True)
os._exit(0)  # the threads go on
"""


@pytest.mark.parametrize("pure", ["0", "1"])
def test_nobody_waits_for_ever(pure: str) -> None:
    environment = {**os.environ, "PHALANX_PURE": pure}
    command = [sys.executable, "-c", BUSY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "ended\n"


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_stays_as_it_was(on: bool) -> None:
    was_on = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        frame = thread_frames()[threading.get_ident()]
        assert gc.isenabled() == on
    finally:
        (gc.enable if was_on else gc.disable)()
    assert frame.f_back is sys._getframe()


def test_a_stack_begins_with_the_innermost_frame() -> None:
    inside, out = threading.Event(), threading.Event()

    def outer() -> None:
        inner()

    def inner() -> None:
        inside.set()
        out.wait(30)

    thread = threading.Thread(target=outer)
    thread.start()
    try:
        assert inside.wait(30)
        names = [frame.f_code.co_name for frame in thread_stack(thread.ident or 0)]
        assert [name for name in names if name in ("inner", "outer", "run")] == ["inner", "outer", "run"]
    finally:
        out.set()
        thread.join()
    assert thread_stack(thread.ident or 0) == []
