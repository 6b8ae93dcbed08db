"""Worlds of real processes for the tests of the failure contract."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from tests.failures.fork_server import Forked, ForkServer
from tests.lateness import bound

from phalanx.rendezvous.directory import Directory
from phalanx.types import Address

HERE = Path(__file__).parent
LIMIT = 60.0
"""Seconds that nothing here needs: a test that waits so long has failed."""
CONTRACT = 1.0
"""Seconds within which a survivor notices the loss of another rank."""
DIRECTORY = "bootstrap.py"
"""What the command line of the directory's process holds."""
DIRECTORY_ENDS = 5.0
"""Seconds in which it ends once nobody needs it; the machine may be busy."""
HOSTS = ("rank0", "parent")
"""Who hosts the directory."""

MARK = "FAILURE_TEST_MARK"
Event = dict[str, Any]


class Rank:
    """One process, what it said, and what can be done to it."""

    def __init__(self, number: int, process: subprocess.Popen[bytes] | Forked, errors: Path) -> None:
        self.number = number
        self.process = process
        self.pid = process.pid
        self.events: list[Event] = []
        self._errors = errors
        self._heard = threading.Condition()
        self._silent = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._heard:
                self.events.append(json.loads(line))
                self._heard.notify_all()
        with self._heard:
            self._silent = True
            self._heard.notify_all()

    def wait(self, event: str, limit: float = LIMIT, count: int = 1) -> Event:
        """Waits until the rank has said `event` for the `count`-th time."""
        end = time.monotonic() + limit
        with self._heard:
            while True:
                found = [e for e in self.events if e["event"] == event]
                if len(found) >= count:
                    return found[count - 1]
                if self._silent or not self._heard.wait(max(0.0, end - time.monotonic())):
                    said = [e["event"] for e in self.events]
                    pytest.fail(f"rank {self.number} never said {event!r} (it said {said})\n{self.errors}")

    def said(self, event: str) -> bool:
        """Whether it has said `event`."""
        return any(e["event"] == event for e in self.events)

    def tell(self, line: str = "go") -> None:
        """Sends a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> float:
        """Sends a signal; returns the time just before."""
        at = time.monotonic()
        os.kill(self.pid, number)
        return at

    def kill(self) -> float:
        """Kills it at once, as the kernel does when memory runs out; returns the time just before."""
        return self.signal(signal.SIGKILL)

    def stop(self) -> float:
        """Stops it, so that it neither runs nor ends."""
        at = self.signal(signal.SIGSTOP)
        wait_for(lambda: self._state() == "T", f"the stop of rank {self.number}")
        return at

    def wait_asleep(self, thread: int | None = None) -> None:
        """Waits until a thread (the main one) sleeps in the kernel, as it does in a blocked operation."""
        seen = 0
        end = time.monotonic() + LIMIT
        while seen < 3:
            seen = seen + 1 if self._state(thread) == "S" else 0
            if time.monotonic() > end or self.process.poll() is not None:
                pytest.fail(f"rank {self.number} never went to sleep (code {self.process.poll()})\n{self.errors}")
            time.sleep(0.01)

    def _state(self, thread: int | None = None) -> str:
        return Path(f"/proc/{self.pid}/task/{thread or self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def finish(self, limit: float = LIMIT) -> int:
        """Waits for its end, and returns its exit code."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            pytest.fail(f"rank {self.number} did not end within {limit:g} s\n{self.errors}")
        self._reader.join(LIMIT)
        return code

    @property
    def errors(self) -> str:
        """What it wrote to standard error."""
        return self._errors.read_text(errors="replace")


class World:
    """The processes of one world, in the order of ranks."""

    def __init__(self, ranks: list[Rank], directory: Directory | None) -> None:
        self.ranks = ranks
        self.directory = directory

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self.ranks)

    def but(self, *left_out: int) -> list[Rank]:
        """All ranks but these."""
        return [rank for rank in self.ranks if rank.number not in left_out]

    def wait(self, event: str) -> None:
        """Waits until every rank has said `event`."""
        for rank in self.ranks:
            rank.wait(event)

    def finish(self) -> list[int]:
        """Waits for the end of all; returns their exit codes."""
        return [rank.finish() for rank in self.ranks]


class Worlds:
    """Starts worlds, and sees to it that nothing of them is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.runtime = folder / "runtime"
        self.runtime.mkdir(mode=0o700)
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        self._worlds: list[World] = []
        self.leaves_file = False
        """Set by a test that kills rank 0 before the world has formed: then nobody can remove its file."""
        self.leaves_children = False
        """Set by a test that is about children which outlive their parent."""

    def __call__(
        self,
        size: int,
        script: str,
        *,
        host: str = "rank0",
        started: int | None = None,
        env: dict[str, str] | None = None,
        **names: object,
    ) -> World:
        """Starts a world.

        Args:
            script: What each rank runs. `from inside import *` is put before it, and `names` are set in it.
            host: "rank0" or "parent": where the directory is.
            started: How many of the ranks are started, if not all.
        """
        number = len(self._worlds)
        given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
        path = self._folder / f"world{number}.py"
        path.write_text(f"from inside import *\n{given}{textwrap.dedent(script)}")
        directory, variables = self._meeting(size, host)
        ranks: list[Rank] = []
        world = World(ranks, directory)
        self._worlds.append(world)
        for rank in range(size if started is None else started):
            errors = self._folder / f"world{number}.rank{rank}.err"
            own = {**self.environment(), **variables, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})}
            with errors.open("wb") as stream:
                process = _fork(path, own, stream) if not env else _spawn(path, own, stream)
            ranks.append(Rank(rank, process, errors))
        return world

    def site(self, words: str) -> str:
        """Where the last script first says `words`, as errors name a place."""
        path = self._folder / f"world{len(self._worlds) - 1}.py"
        lines = path.read_text().splitlines()
        return f"{path.name}:{next(number for number, line in enumerate(lines, 1) if words in line)}"

    def environment(self) -> dict[str, str]:
        """The environment of a rank, without what tells it who it is."""
        outer = ("PHALANX_", "TORCHELASTIC_", "MASTER_", "OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
        path = [str(HERE), *filter(None, [kept.get("PYTHONPATH")])]
        name, _, value = self.mark.partition("=")
        kept["PHALANX_TUNING"] = "off"  # whatever this machine's own is
        return {**kept, "PYTHONPATH": os.pathsep.join(path), "XDG_RUNTIME_DIR": str(self.runtime), name: value}

    def _meeting(self, size: int, host: str) -> tuple[Directory | None, dict[str, str]]:
        sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        if host == "parent":
            token = secrets.token_hex(16)
            directory = Directory(size, token=token.encode(), bind=Address("127.0.0.1", 0))
            return directory, {**sizes, "PHALANX_DIRECTORY": str(directory.address), "PHALANX_TOKEN": token}
        # As under torchrun on one host: rank 0 takes any port and tells the others by a private file.
        return None, {
            **sizes,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        }

    def clean_up(self) -> None:
        """Ends what still runs; fails if something is left that should not be."""
        for world in self._worlds:
            for rank in world:
                if rank.process.poll() is None:
                    rank.process.kill()
                rank.process.wait(LIMIT)
        # The directory's process ends when it has heard of the end of all ranks.
        end = time.monotonic() + DIRECTORY_ENDS
        while any(DIRECTORY in command for command in alive(self.mark).values()) and time.monotonic() < end:
            time.sleep(0.01)
        # Grandchildren hold the pipes, too: they go before the pipes are waited for.
        left = alive(self.mark, {rank.pid for world in self._worlds for rank in world})
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for world in self._worlds:
            for rank in world:
                rank._reader.join(LIMIT)
                for stream in (rank.process.stdin, rank.process.stdout):
                    if stream is not None:
                        with contextlib.suppress(BrokenPipeError):
                            stream.close()
            if world.directory is not None:
                world.directory.close()
        left = {} if self.leaves_children else left
        files = [] if self.leaves_file else sorted(path.name for path in self.runtime.iterdir())
        assert (left, files) == ({}, []), "processes or files were left behind"


_servers: list[ForkServer] = []


def _fork(script: Path, environment: dict[str, str], errors: IO[bytes]) -> Forked:
    """Starts a rank in milliseconds. One server for all tests of this process."""
    if not _servers:
        _servers.append(ForkServer({**environment, MARK: ""}))  # it belongs to no test
    return _servers[0].start(script, environment, errors)


def _spawn(script: Path, environment: dict[str, str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts a rank in an interpreter of its own: variables may count where modules are imported."""
    command = [sys.executable, str(script)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=environment)


def alive(mark: str, groups: Collection[int] = ()) -> dict[int, str]:
    """The processes that carry a mark in their environment, or are in one of these groups, with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state, _, group, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if state not in "ZX" and (int(group) in groups or mark.encode() in (entry / "environ").read_bytes()):
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    return found


def directory_of(worlds: Worlds, host: Rank) -> int:
    """The process that hosts the directory of the only world."""
    found: list[int] = []

    def started() -> bool:
        found[:] = [pid for pid, command in alive(worlds.mark).items() if DIRECTORY in command]
        # The one that starts it is there for a moment, too.
        return len(found) == 1 and parent_of(found[0]) != host.pid

    wait_for(started, "the directory")
    return found[0]


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return -1


def wait_for(condition: Callable[[], object], what: str, limit: float = LIMIT) -> None:
    """Waits until something holds."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {limit:g} s for {what}")
        time.sleep(0.01)


def assert_lost(event: Event, peer: int, since: float) -> None:
    """Checks that an error is the loss of `peer`, raised within the contract's time."""
    assert "PeerLost" in event["kinds"], event
    assert event["peer"] == peer, event
    assert event["at"] - since < bound(CONTRACT), f"noticed after {event['at'] - since:.3f} s: {event}"


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Worlds]:
    """Starts worlds; fails if they leave a process or a file."""
    started = Worlds(tmp_path)
    try:
        yield started
    finally:
        started.clean_up()
