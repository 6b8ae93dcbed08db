"""The ranks of this node as processes: started, reaped, signalled, and found again with all that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx import last_words
from phalanx.errors import ConfigError
from phalanx.last_words import LastWords
from phalanx.launching import guardian
from phalanx.launching.guardian import Process, processes, relatives, send
from phalanx.operating_system import adopt_orphans

__all__ = ["Guardian", "LocalRank", "Processes"]

_HERE = Path(__file__).parent
_PYTHON = [sys.executable, "-I", "-S"]
GUARDIAN_WAIT = 2.0


@dataclass(eq=False)
class LocalRank:
    """One rank. It leads a session of its own, so that Ctrl-C reaches the launcher only, which then decides."""

    rank: int
    pid: int
    stdout: int
    stderr: int
    status: int | None = None
    """As `Popen.returncode`: the exit code, or minus the signal. None while it runs."""


class Processes:
    """All ranks of one node. Only one can exist in a process: it reaps every child.

    Args:
        last_words: The folder where ranks leave their last traceback.
        spare: Children that are no ranks.
        outlive_launcher: Whether ranks get some time to save when the launcher is killed; then the guardian ends them.
    """

    def __init__(
        self, run_id: str, *, last_words: str, spare: Iterable[int] = (), outlive_launcher: bool = False
    ) -> None:
        self.run_id = run_id
        self._tied_to = 0 if outlive_launcher else os.getpid()
        self._last_words = last_words
        self.ranks: list[LocalRank] = []
        me = os.getpid()
        # A launcher that was started by `exec` may have children of a former life.
        self._spare = {*spare, *(p.pid for p in processes() if p.parent == me)}
        # What ranks leave behind becomes a child of the launcher and not of the init process: so it is found.
        adopt_orphans()

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> LocalRank:
        """Starts one rank. Rank 0 reads the launcher's standard input, the others read nothing.

        Raises:
            ConfigError: The system has no process or descriptor left.
        """
        try:
            process = subprocess.Popen(
                [*_PYTHON, str(_HERE / "bootstrap.py"), str(self._tied_to), *command],
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"cannot start rank {rank}: {error.strerror}") from None
        assert process.stdout is not None
        assert process.stderr is not None
        started = LocalRank(rank, process.pid, os.dup(process.stdout.fileno()), os.dup(process.stderr.fileno()))
        process.stdout.close()
        process.stderr.close()
        last_words.offer(self._last_words, process.pid)
        process.returncode = 0  # `reap` waits for it; Popen must not
        self.ranks.append(started)
        return started

    def reap(self) -> list[LocalRank]:
        """The ranks that have ended since the last call."""
        ended = []
        mine = {rank.pid: rank for rank in self.ranks if rank.status is None}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            if pid in mine:
                rank = mine[pid]
                rank.status = os.waitstatus_to_exitcode(status)
                ended.append(rank)
        return ended

    def last_words(self, rank: LocalRank) -> LastWords | None:
        """The traceback that a rank has left."""
        return last_words.read(self._last_words, rank.pid)

    @property
    def running(self) -> list[LocalRank]:
        """The ranks that have not ended."""
        return [rank for rank in self.ranks if rank.status is None]

    def find(self) -> set[int]:
        """Every process of this job on this node that is alive: ranks, and what they started."""
        return self._find()[0]

    def to_tell(self, *, but: LocalRank | None = None) -> set[int]:
        """The processes that get a polite signal. Ranks of a job inside this one do not: their own launcher tells them.

        Args:
            but: A rank that is left out, with what is in its session.
        """
        found, table = self._find()
        found -= {p.pid for p in table if p.run_id.startswith(f"{self.run_id}.")}
        if but is not None:
            found -= {p.pid for p in table if p.session == but.pid} | {but.pid}
        return found

    def _find(self) -> tuple[set[int], list[Process]]:
        me, table = os.getpid(), processes()
        running = {rank.pid for rank in self.running}
        orphans = {p.pid for p in table if p.parent == me} - self._spare
        return relatives(self.run_id, table=table, roots=running | orphans, spare=self._spare) | running, table

    def forward(self, number: int) -> None:
        """Sends a signal to the ranks themselves, not to what they started."""
        send(number, [rank.pid for rank in self.running])


class Guardian:
    """The process that ends the job, and removes its folder, should the launcher be killed. It is started first.

    Args:
        grace: Seconds that the ranks then have to save what they need.
    """

    def __init__(self, run_id: str, last_words: str, grace: float = 0.0) -> None:
        reading, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*_PYTHON, guardian.__file__, run_id, last_words, str(grace)],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._pipe)
            raise ConfigError(f"cannot start the guardian process: {error.strerror}") from None
        finally:
            os.close(reading)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def dismiss(self) -> None:
        """Ends the guardian: the job is over."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, b".")
        os.close(self._pipe)
        try:
            self._process.wait(GUARDIAN_WAIT)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
