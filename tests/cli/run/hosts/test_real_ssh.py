"""The real protocol: the ssh program of this machine, and a server beside it (the package asyncssh)."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.run.support import Runner, alive, run, wait_for  # noqa: F401

pytest.importorskip("asyncssh", reason="asyncssh is not installed")
if shutil.which("ssh") is None:
    pytest.skip("the ssh program is not installed", allow_module_level=True)

SERVER = Path(__file__).with_name("ssh_server.py")


class Server:
    """An ssh server on loopback that lets one key in."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), str(folder)], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def ssh(self, *more: str) -> str:
        """The command that reaches it, whatever the host is called."""
        options = ["BatchMode=yes", "StrictHostKeyChecking=no", f"UserKnownHostsFile={self.folder / 'known'}"]
        options += ["HostName=127.0.0.1", f"Port={self.port}", f"IdentityFile={self.folder / 'key'}", "LogLevel=ERROR"]
        options += ["IdentitiesOnly=yes", *more]
        return shlex.join(["ssh", "-F", "none", *(word for option in options for word in ("-o", option))])

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=30)


@pytest.fixture
def server(tmp_path: Path, run: Runner) -> Iterator[Server]:
    environment = run.environment()
    name, _, value = run.mark.partition("=")
    del environment[name]  # the server itself is no part of the job
    started = Server(tmp_path, {**environment, "FOR_JOBS": value})
    yield started
    started.close()


def test_a_job_over_ssh(run: Runner, server: Server) -> None:
    script = run.script("""
        import phalanx as px

        with px.init() as world:
            world.barrier()
            print("rank", world.rank, "of", world.world_size)
    """)
    job = run("--hosts", "alpha:2,beta:1", "--ssh", server.ssh(), script)
    assert job.process.returncode == 0, job.err
    assert sorted(job.out.splitlines()) == [f"[{rank}] rank {rank} of 3" for rank in range(3)]


def test_an_ssh_that_dies(run: Runner, server: Server) -> None:
    script = run.script("""
        import pathlib, time
        import phalanx as px

        world = px.init()
        world.barrier()
        pathlib.Path(f"ready-{world.rank}").touch()
        time.sleep(60)
    """)
    job = run.start("--hosts", "alpha,beta", "--ssh", server.ssh(), script)
    wait_for(lambda: all((run.folder / f"ready-{rank}").exists() for rank in (0, 1)), "both ranks")
    (victim,) = (pid for pid, line in alive(run.mark).items() if line.startswith("ssh ") and " beta cd " in line)
    os.kill(victim, signal.SIGKILL)
    assert job.finish() == 1
    assert "phalanx: host beta was lost: its connection ended (exit code 137)" in job.err
    run.assert_nothing_left(20.0)


def test_a_key_that_is_not_let_in(run: Runner, server: Server) -> None:
    job = run("--hosts", "alpha", "--ssh", server.ssh("PubkeyAuthentication=no"), run.script(""))
    assert job.process.returncode == 1
    assert "host alpha cannot be reached by ssh: " in job.err
    assert "Permission denied" in job.err
    assert "ssh-copy-id alpha" in job.err


def test_a_name_that_nobody_knows(run: Runner, server: Server) -> None:
    job = run("--hosts", "no-such-host.invalid", "--ssh", "ssh -F none -o BatchMode=yes", run.script(""))
    assert job.process.returncode == 1
    assert "is the name spelt right?" in job.err
