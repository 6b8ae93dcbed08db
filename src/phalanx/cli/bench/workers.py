"""The processes of one contender: started once, asked many times, idle in between, and always ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import subprocess
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .contenders import Contender, Site, environment
from .orders import Answer, EndOrder, Order

__all__ = ["BenchWorkers", "WorkersFailed"]

_START = 120.0
"""Seconds for all ranks to start: sixteen that import torch on two cores take a while."""
_GRACE = 5.0
"""Seconds to leave a world in peace."""
_KILL = 2.5
"""Seconds for each step of the end otherwise."""
_OTHERS = 2.0
"""Seconds that the other ranks have to fail as well, once one did: the first error is often not the one that tells."""
_GONE = "a process ended"
_TAIL = 2000
"""Characters of their output that are shown when it failed."""
_decode = msgspec.json.Decoder(Answer).decode


class WorkersFailed(Exception):
    """A contender's processes failed. The text says how, with what they wrote."""


class _RankConnection:
    """The connection to one rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid: int = struct.unpack("3i", credentials)[0]
        self.waiting = b""
        self.hello = Answer()

    def read(self) -> Answer | None:
        """The next answer, or None if its line is not complete yet.

        Raises:
            EOFError: The rank is gone.
        """
        try:
            fresh = self.connection.recv(1 << 16)
        except ConnectionError:
            fresh = b""
        if not fresh:
            raise EOFError
        line, newline, rest = (self.waiting + fresh).partition(b"\n")
        self.waiting = rest if newline else line
        return _decode(line) if newline else None


class BenchWorkers:
    """All ranks of one contender. The caller ends them with `end` or `kill`.

    Args:
        contender: The library that they run.
        n: How many ranks.
        site: Where they run.
        folder: For sockets, logs and temporary files; the caller removes it.
        limit: Seconds for one answer.

    Raises:
        WorkersFailed: They did not start.
    """

    def __init__(self, contender: Contender, n: int, *, site: Site, folder: Path, limit: float) -> None:
        self.contender, self.n, self.limit = contender, n, limit
        self.version = ""
        self._folder = folder
        self._socket, self._log = folder / "s", folder / "log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[_RankConnection] = []
        try:
            self._start(site)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """The ranks' processes."""
        return [rank.pid for rank in self._ranks]

    # -- the start -----------------------------------------------------------------------------------------------------

    def _start(self, site: Site) -> None:
        worker = [*self.contender.worker, self.contender.library, str(self._socket)]
        worker.append(str(0.8 * self.limit))  # who has a time-out of its own can say more about it than we can
        with socket.socket(socket.AF_UNIX) as listener:
            _bind(listener, self._socket)
            listener.listen(self.n)
            with self._log.open("wb") as log:
                for launch in self.contender.launches(worker, self.n, site, environment(self._folder)):
                    process = subprocess.Popen(
                        launch.command,
                        env=launch.env,
                        cwd=self._folder,  # so that no file of the user's hides a module
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C reaches the driver only, which ends all
                    )
                    self._processes.append(process)
            deadline = time.monotonic() + _START
            self._accept(listener, deadline)
        hellos = self._answers(deadline, "starting")
        if {answer.size for answer in hellos} != {self.n}:
            raise WorkersFailed(
                f"{self.contender.label} formed {hellos[0].size} ranks instead of {self.n}: "
                "mpi4py was built for a different MPI than this mpirun"
            )
        for rank, answer in zip(self._ranks, hellos, strict=True):
            rank.hello = answer
        self._ranks.sort(key=lambda rank: rank.hello.rank)
        self.version = hellos[0].version
        self._pause(True)

    def _accept(self, listener: socket.socket, deadline: float) -> None:
        listener.settimeout(0.1)
        while len(self._ranks) < self.n:
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                self._ranks.append(_RankConnection(connection))
            if any(process.poll() is not None for process in self._processes):
                self._answers(time.monotonic() + _OTHERS, "starting")  # one that failed has said why
                raise WorkersFailed(self._words("ended while starting"))
            if time.monotonic() > deadline:
                raise WorkersFailed(self._words(f"did not start within {_START:.0f} s"))

    # -- work ----------------------------------------------------------------------------------------------------------

    def ask(self, order: Order) -> list[Answer]:
        """Gives all ranks an order; their answers, by rank.

        Raises:
            WorkersFailed: A rank failed, is gone, or did not answer in time. The workers are of no use then.
        """
        line = msgspec.json.encode(order) + b"\n"
        self._pause(False)
        for rank in self._ranks:
            # Of one that is gone the answer tells.
            with contextlib.suppress(OSError):
                rank.connection.sendall(line)
        answers = self._answers(time.monotonic() + self.limit, str(type(order).__struct_config__.tag))
        self._pause(not isinstance(order, EndOrder))
        return answers

    def _pause(self, stopped: bool) -> None:
        """Stops processes that would take time from the contender whose turn it is, or lets them go on."""
        if self.contender.restless:
            for process in self._processes:
                process.send_signal(signal.SIGSTOP if stopped else signal.SIGCONT)

    def _answers(self, deadline: float, what: str) -> list[Answer]:
        answers: dict[_RankConnection, Answer] = {}
        errors: list[str] = []
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    rank = key.data
                    try:
                        answer = rank.read()
                    except EOFError:
                        answer = Answer(error=_GONE)
                    if answer is None:
                        continue
                    selector.unregister(rank.connection)
                    answers[rank] = answer
                    if answer.error:
                        errors.append(answer.error.strip())
                        deadline = min(deadline, time.monotonic() + _OTHERS)
        if errors:
            raise WorkersFailed(self._failure(errors, what))
        if len(answers) < len(self._ranks):
            late = len(self._ranks) - len(answers)
            raise WorkersFailed(self._words(f"took too long ({what}): {late} of {self.n} ranks gave no answer"))
        return [answers[rank] for rank in self._ranks]

    def _failure(self, errors: list[str], what: str) -> str:
        """In the first line what went wrong, then the traceback or, if no rank could say anything, what all wrote."""
        told = [error for error in errors if error != _GONE]
        if not told:
            return self._words(f"failed ({what}): {_GONE}")
        last = told[0].rsplit("\n", 1)[-1]
        return f"{self.contender.label} on {self.n} ranks failed ({what}): {last}\n{textwrap.indent(told[0], '    ')}"

    def _words(self, text: str) -> str:
        with contextlib.suppress(OSError):
            said = self._log.read_text(errors="replace").strip()
            if said:
                text += f"\nits processes wrote:\n{said[-_TAIL:]}"
        return f"{self.contender.label} on {self.n} ranks {text}"

    # -- the end -------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Lets the ranks leave their world, and ends what is left."""
        with contextlib.suppress(WorkersFailed):
            self.limit = _GRACE
            self.ask(EndOrder())
        _wait(self._processes, _GRACE)
        self.kill()

    def kill(self) -> None:
        """Ends every process at once. May be called twice."""
        self._pause(False)
        alive = [pid for pid in self.pids if self._is_ours(pid)]
        shared = _shared_files(alive)
        for rank in self._ranks:
            rank.connection.close()  # without it, a rank ends by itself, wherever it is
        _wait(self._processes, _KILL)
        for number in (signal.SIGTERM, signal.SIGKILL):
            left = [process for process in self._processes if process.poll() is None]
            for process in left:
                process.send_signal(number)
            _wait(left, _KILL)
        # Ranks that outlived their launcher, and what ranks have started and left behind.
        for pid in {*filter(self._is_ours, alive), *_with_variable(f"TMPDIR={self._folder}")}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for file in shared:  # what an MPI that was killed could not remove itself
            file.unlink(missing_ok=True)

    def _is_ours(self, pid: int) -> bool:
        """Whether this is still the rank that we know, and not another process that got its number."""
        with contextlib.suppress(OSError):
            return str(self._socket).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False


def _bind(listener: socket.socket, path: Path) -> None:
    """Binds also where the path is longer than the address of a Unix socket may be."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.01, deadline - time.monotonic()))


def _with_variable(text: str) -> set[int]:
    """The processes that were started with this `NAME=value`, as far as this user may know."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and text.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found


def _shared_files(pids: Sequence[int]) -> set[Path]:
    """Files of shared memory that these processes have mapped, and that still have a name."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = line[line.find("/") :] if "/" in line else ""
                if name.startswith("/dev/shm/") and not name.endswith(" (deleted)"):  # noqa: S108 - it is only looked at
                    found.add(Path(name))
    return found
