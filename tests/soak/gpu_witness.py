"""The process that strikes the ranks of `tests.soak.gpu` at the moments that they ask for, and looks at who is late.

    python -m tests.soak.gpu_witness PIPE FILE

It has no GPU and no group. So a rank is also killed while it holds Python's lock in a call of the driver, and the time
of the kill is known. As long as some rank has not noticed a kill, this process looks every 50 ms at the threads of
those who are late and of the rank that dies: whether they still have their memory and their descriptors, and where in
the kernel they are. It writes all of that to the file, a line for each fact, and ends with the pipe.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

PATIENCE = 0.25
"""Seconds after a kill from which those who have not noticed it are looked at."""
INTERVAL = 0.05
_EXITING = 0x4


class Strike:
    """A rank that is struck, and who has to notice."""

    def __init__(self) -> None:
        self.pid = 0
        self.number = 0
        self.struck: float | None = None
        self.late: set[int] = set()
        self.asked: set[int] = set()
        self.seen: dict[tuple[int, int], tuple[Any, ...]] = {}

    @property
    def is_awaited(self) -> bool:
        return self.struck is not None and self.number == signal.SIGKILL and bool(self.late)


def thread_of(pid: int, thread: int) -> tuple[Any, ...]:
    """A thread's name, its state, whether it ends, has memory, its descriptors, and where in the kernel it is."""
    folder = Path(f"/proc/{pid}/task/{thread}")
    name, rest = (folder / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
    fields = rest.split()
    fds: int | str = -1
    with contextlib.suppress(OSError):
        fds = len(os.listdir(folder / "fd"))
    places: list[str] = []
    with contextlib.suppress(OSError):
        places = [line.split("] ")[-1].split("+")[0] for line in (folder / "stack").read_text().splitlines()]
    has_memory = (folder / "statm").read_text().split()[0] != "0"
    return name, fields[0], bool(int(fields[6]) & _EXITING), has_memory, fds, " < ".join(places[:9])


class Witness:
    """Keeps the strikes that are asked for."""

    def __init__(self, pipe: int, file: Any) -> None:
        self._pipe = pipe
        self._file = file
        self._strikes: dict[str, Strike] = {}
        self._due: list[tuple[float, str]] = []
        self._rest = b""

    def serve(self) -> None:
        """Until the pipe has no writer any more."""
        look_at = time.monotonic()
        while True:
            now = time.monotonic()
            wait = min([at - now for at, _ in self._due[:1]] + [INTERVAL])
            if select.select([self._pipe], [], [], max(0.0, wait))[0] and not self._read():
                return
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                self._strike(heapq.heappop(self._due)[1])
            if now >= look_at:
                look_at = now + INTERVAL
                for name, one in self._strikes.items():
                    if one.is_awaited and now > (one.struck or now) + PATIENCE:
                        self._look(name, one)

    def _read(self) -> bool:
        data = os.read(self._pipe, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._heard(json.loads(line))
        return data != b""

    def _heard(self, said: dict[str, Any]) -> None:
        one = self._strikes.setdefault(said["strike"], Strike())
        if "signal" in said:
            one.pid, one.number = said["pid"], said["signal"]
            heapq.heappush(self._due, (said["at"], said["strike"]))
        elif "noticed" in said:
            one.late.discard(said["pid"])
        else:
            one.late.add(said["pid"])

    def _strike(self, name: str) -> None:
        one = self._strikes[name]
        at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, one.number)
        one.struck = at
        self._tell({"strike": name, "struck": at, "pid": one.pid, "took": time.monotonic() - at})

    def _look(self, name: str, one: Strike) -> None:
        for pid in [one.pid, *one.late]:
            if pid in one.late and pid not in one.asked and time.monotonic() > (one.struck or 0) + 2 * PATIENCE:
                one.asked.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGUSR1)
            with contextlib.suppress(OSError):
                for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                    self._look_at(name, one, pid, thread)

    def _look_at(self, name: str, one: Strike, pid: int, thread: int) -> None:
        try:
            found = thread_of(pid, thread)
        except (OSError, IndexError, ValueError):
            found = ("gone",)
        if one.seen.get((pid, thread)) != found:
            one.seen[pid, thread] = found
            after = time.monotonic() - (one.struck or 0.0)
            self._tell({"strike": name, "after": round(after, 3), "pid": pid, "thread": thread, "seen": found})

    def _tell(self, fact: dict[str, Any]) -> None:
        self._file.write(f"{json.dumps(fact)}\n")
        self._file.flush()


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(-10)
    pipe = os.open(sys.argv[1], os.O_RDONLY)
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        Witness(pipe, file).serve()


if __name__ == "__main__":
    main()
