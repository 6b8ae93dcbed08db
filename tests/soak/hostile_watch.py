"""Looks at processes from outside, by /proc: their listening ports, memory, descriptors and threads."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def listening_ports(pid: int) -> list[int]:
    """The TCP ports on which a process listens, in the order of its descriptors."""
    listening = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    listening[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    found = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(f"/proc/{pid}/fd"), key=int):
            with contextlib.suppress(OSError):
                port = listening.get(os.readlink(f"/proc/{pid}/fd/{name}"))
                if port is not None:
                    found.append(port)
    return found


def resident(pid: int) -> int:
    """Bytes of memory that a process really has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def descriptors(pid: int) -> int:
    """How many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int) -> int:
    """How many threads a process has."""
    return len(os.listdir(f"/proc/{pid}/task"))


@dataclass
class Peaks:
    """The most that was seen of one process."""

    resident: int = 0
    descriptors: int = 0
    threads: int = 0
    samples: int = 0


@dataclass
class Watch:
    """Samples processes until it is stopped."""

    pids: list[int]
    interval: float = 0.1
    peaks: dict[int, Peaks] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")
        self._thread.start()

    def add(self, pid: int) -> None:
        """Watches one more."""
        self.pids.append(pid)

    def stop(self) -> None:
        """Ends the sampling."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            for pid in list(self.pids):
                peaks = self.peaks.setdefault(pid, Peaks())
                with contextlib.suppress(OSError, ValueError):
                    peaks.resident = max(peaks.resident, resident(pid))
                    peaks.descriptors = max(peaks.descriptors, descriptors(pid))
                    peaks.threads = max(peaks.threads, threads(pid))
                    peaks.samples += 1
