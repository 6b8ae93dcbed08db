"""Starts `phalanx run` as a real process, and sees to it that nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

LIMIT = 60.0
"""Seconds that nothing here needs: a test that waits so long has failed."""
PROGRAM = [sys.executable, "-m", "phalanx"]


def alive(mark: str) -> dict[int, str]:
    """The processes that carry a mark in their environment, with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    return found


def wait_for(condition: Callable[[], object], what: str, limit: float = LIMIT) -> None:
    """Waits until something holds."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {limit:g} s for {what}")
        time.sleep(0.01)


class Launched:
    """A launcher under way."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str) -> None:
        self.process = process
        self.pid = process.pid
        self.mark = mark
        self.out = ""
        self.err = ""

    def finish(self, limit: float = LIMIT) -> int:
        """Waits for the end; fills `out` and `err`."""
        out, err = self.process.communicate(timeout=limit)
        self.out = (out or b"").decode("utf-8", "surrogateescape")
        self.err = (err or b"").decode("utf-8", "surrogateescape")
        return self.process.returncode


class Runner:
    """What the `run` fixture gives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"RUN_TEST_MARK={uuid.uuid4().hex}"
        self._started: list[Launched] = []

    def script(self, text: str, name: str = "script.py") -> str:
        """Writes a script."""
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    def environment(self, **extra: str) -> dict[str, str]:
        """The environment of a launcher: without what an outer job may have set."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == "PHALANX_SLATE_DIR" or not name.startswith(("PHALANX_", "TORCHELASTIC_", "OMP_", "NO_COLOR"))
        }
        name, _, value = self.mark.partition("=")
        return {**kept, name: value, **extra}

    def start(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        through: Sequence[str] = (),
        command: str = "run",
        **popen: object,
    ) -> Launched:
        """Starts `phalanx run` with these arguments; `through` is a command that becomes it."""
        settings: dict[str, object] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        settings.update(popen)
        process = subprocess.Popen(  # type: ignore[call-overload]
            [*through, *PROGRAM, command, *arguments],
            env=self.environment(**(env or {})),
            cwd=settings.pop("cwd", self.folder),
            **settings,
        )
        launched = Launched(process, self.mark)
        self._started.append(launched)
        return launched

    def __call__(self, *arguments: str, env: dict[str, str] | None = None, **popen: object) -> Launched:
        """Runs it to its end."""
        launched = self.start(*arguments, env=env, through=(), **popen)
        launched.finish()
        return launched

    def assert_nothing_left(self, limit: float = 0.0) -> None:
        """No process of the job exists, whatever its parent or session. Guardians of killed launchers get a limit."""
        if limit:
            wait_for(lambda: not alive(self.mark), f"the end of {alive(self.mark)}", limit)
        assert alive(self.mark) == {}

    def clean_up(self) -> None:
        for launched in self._started:
            for stream in (launched.process.stdin, launched.process.stdout, launched.process.stderr):
                if stream is not None:
                    stream.close()
        left = alive(self.mark)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for launched in self._started:
            launched.process.wait(LIMIT)
        assert left == {}, "processes were left behind"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    """Runs `phalanx run`; fails if it leaves a process."""
    runner = Runner(tmp_path)
    yield runner
    runner.clean_up()


def lines_of(text: str, rank: int) -> list[str]:
    """What one rank wrote, without the prefix."""
    prefix = f"[{rank}] "
    return [line[len(prefix) :] for line in text.splitlines() if line.startswith(prefix)]


def tail_after(text: str, heading: str) -> Sequence[str]:
    """The lines after the last one that contains a heading."""
    lines = text.splitlines()
    last = max(index for index, line in enumerate(lines) if heading in line)
    return lines[last + 1 :]
