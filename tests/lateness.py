"""How late the machine is, so that a bound on time is about Phalanx and not about what else runs here.

One small process per test session, the probe, measures two things all the time: by how much it is woken too late from
short sleeps, and how many times longer some milliseconds of work take than they need of a processor. On a quiet
machine it is never late and nothing takes longer: `bound(1.0)` is one second there, and code that is late by itself
fails. On a busy one it is that second times the slow-down, and the lateness, both measured since the test began.

The figures lie in a file whose name the environment has, so that ranks in processes of their own can ask, too.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ["VARIABLE", "Figures", "Probe", "begin", "bound", "now"]

VARIABLE = "TEST_LATENESS"
"""The figures when the test began, and the probe's file: `<late> <wall> <cpu>:<path>`."""
SLEEP = 0.005
SLEEPS = 20
"""So many sleeps, then one burst of work: two in a hundred parts of one processor."""
BURST = 0.002
SLACK = 0.0005
"""Seconds that every sleep takes longer, also on a quiet machine."""


class Figures(NamedTuple):
    """Sums of the probe: seconds too late, seconds that its work took, and those that it needed of a processor."""

    late: float = 0.0
    wall: float = 0.0
    cpu: float = 0.0

    def bound(self, seconds: float, since: Figures) -> float:
        """What takes `seconds` at most on a quiet machine took no longer than this, since the earlier figures."""
        cpu = self.cpu - since.cpu
        slower = max(1.0, (self.wall - since.wall) / cpu) if cpu > 0 else 1.0
        return seconds * slower + self.late - since.late


_ENTRY = struct.Struct("<4d")
"""The figures, and when the probe wrote them, on the monotonic clock."""


def bound(seconds: float, since: Figures | None = None) -> float:
    """The seconds that something may take that takes `seconds` at most on a quiet machine.

    Args:
        since: The figures when it began (see `now`); else those when this test did.
    """
    began, _, path = os.environ.get(VARIABLE, "").partition(":")
    return _read(path).bound(seconds, since or Figures(*map(float, began.split()))) if path else seconds


def begin() -> None:
    """A test begins: what was before does not count for it."""
    path = os.environ.get(VARIABLE, "").partition(":")[2]
    if path:
        os.environ[VARIABLE] = _variable(now(), path)


def now() -> Figures:
    """The figures that the probe has written. They do not say how late it is right now, so later ones are no less."""
    path = os.environ.get(VARIABLE, "").partition(":")[2]
    return Figures(*_ENTRY.unpack(Path(path).read_bytes())[:3]) if path else Figures()


def _variable(figures: Figures, path: str) -> str:
    return " ".join(map(repr, figures)) + ":" + path


def _read(path: str) -> Figures:
    late, wall, cpu, at = _ENTRY.unpack(Path(path).read_bytes())
    # The probe may be late right now.
    return Figures(late + max(0.0, time.monotonic() - at - SLEEP - BURST - SLACK), wall, cpu)


class Probe:
    """The probe of a session, from here to `close`."""

    def __init__(self) -> None:
        handle, self._path = tempfile.mkstemp(prefix="lateness-")
        os.write(handle, _ENTRY.pack(*Figures(), time.monotonic()))
        os.close(handle)
        command = [sys.executable, "-I", "-S", __file__, self._path, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        os.environ[VARIABLE] = _variable(Figures(), self._path)

    def close(self) -> None:
        os.environ.pop(VARIABLE, None)
        self._process.kill()
        self._process.wait()
        os.unlink(self._path)


def _measure(path: str, parent: int) -> None:
    late = wall = cpu = 0.0
    with open(path, "r+b", buffering=0) as file:
        while os.getppid() == parent:
            for _ in range(SLEEPS):
                before = time.monotonic()
                time.sleep(SLEEP)
                now = time.monotonic()
                late += max(0.0, now - before - SLEEP - SLACK)
                os.pwrite(file.fileno(), _ENTRY.pack(late, wall, cpu, now), 0)
            before, used = time.monotonic(), time.process_time()
            while time.process_time() < used + BURST:
                pass
            cpu += time.process_time() - used
            now = time.monotonic()
            wall += now - before
            os.pwrite(file.fileno(), _ENTRY.pack(late, wall, cpu, now), 0)


if __name__ == "__main__":
    _measure(sys.argv[1], int(sys.argv[2]))
