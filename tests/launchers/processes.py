"""Starts the processes of a job under any launcher, and sees to it that nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import VARIABLES

LIMIT = 60.0
"""Seconds that nothing here needs: a test that waits so long has failed."""
MARK = "LAUNCH_TEST_MARK"
HELLO = Path(__file__).with_name("hello_world.py")

_FOREIGN = ("PHALANX_", "TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_", "GROUP_", "ROLE_")


def clean_environment() -> dict[str, str]:
    """This process's environment without what any launcher may have set, the session's runtime folder included."""
    # With byte code that is kept, as in any normal start: dozens of processes would compile all of it otherwise.
    known = {variable.name for variable in VARIABLES} - {"TMPDIR"} | {"PYTHONDONTWRITEBYTECODE"}
    # One thread: without it torchrun speaks of it at length, and ranks on two cores get in each other's way.
    kept = {name: value for name, value in os.environ.items() if name not in known and not name.startswith(_FOREIGN)}
    return {**kept, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def marked(mark: str) -> dict[int, str]:
    """The processes that carry a mark in their environment, with their command lines."""
    found = {}
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):  # empty for a zombie
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
    return found


class Job:
    """One process that was started, with what it and its children wrote."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self.process = process
        self._out, self._err = out, err

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def finish(self, limit: float = LIMIT) -> int:
        """Waits for the end; the exit code."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.process.args!r} ran for {limit:g} s\n{self.out}\n{self.err}")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of JSON among the output, also where a launcher put a prefix in front."""
        return [json.loads(line[line.index("{") :]) for line in self.out.splitlines() if "{" in line]

    @property
    def last_error(self) -> str:
        """The last line of a traceback: what the user reads first. Notes under an error may follow it."""
        at = [i for i, line in enumerate(self.err.splitlines()) if line.startswith(("phalanx.", "[0] phalanx."))]
        return self.err.splitlines()[at[-1]] if at else self.err


class Jobs:
    """What the `jobs` fixture gives. All processes share one private runtime folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime = folder / "runtime"
        self.runtime.mkdir(mode=0o700)
        self.mark = uuid.uuid4().hex
        self._started: list[Job] = []

    def start(self, *command: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Job:
        """Starts a command with a clean environment and these variables."""
        number = len(self._started)
        out, err = self.folder / f"out-{number}", self.folder / f"err-{number}"
        environment = {**clean_environment(), "XDG_RUNTIME_DIR": str(self.runtime), **(env or {}), MARK: self.mark}
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [str(part) for part in command],
                env=environment,
                cwd=cwd or self.folder,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        job = Job(process, out, err)
        self._started.append(job)
        return job

    def clean_up(self) -> None:
        """Ends what is left, and says so."""
        running = [job for job in self._started if job.process.poll() is None]
        left = self._after(2.0) if not running else marked(self.mark)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for job in self._started:
            job.process.wait(LIMIT)
        assert not running, f"still running: {[job.process.args for job in running]}"
        assert left == {}, "processes were left behind"
        assert os.listdir(self.runtime) == [], "files were left in the runtime folder"

    def _after(self, seconds: float) -> dict[int, str]:
        """What is still there after a moment: helpers of launchers end a little after them."""
        end = time.monotonic() + seconds
        while (left := marked(self.mark)) and time.monotonic() < end:
            time.sleep(0.02)
        return left


def wait_until(condition: Callable[[], object], what: str, limit: float = LIMIT) -> None:
    """Waits until something holds."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {limit:g} s for {what}")
        time.sleep(0.02)


def finish_all(started: Sequence[Job], limit: float = LIMIT) -> None:
    """Waits for all; each must have ended well."""
    end = time.monotonic() + limit
    codes = [job.finish(max(0.0, end - time.monotonic())) for job in started]
    said = "\n".join(f"-- {job.process.args!r}\n{job.out}{job.err}" for job in started)
    assert codes == [0] * len(started), said
