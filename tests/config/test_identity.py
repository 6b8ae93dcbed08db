"""The launcher's process, which names a job when the launcher does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.config.identity import digest, launcher_process

SHOW = "from phalanx.config.identity import launcher_process; print(launcher_process())"
# Starts two "ranks", one of them through a wrapper shell that stays in between.
START = f"""
import os, subprocess, sys
print(os.getpid())
show = [sys.executable, "-c", {SHOW!r}]
print(subprocess.check_output(show, text=True).strip())
print(subprocess.check_output(["/bin/sh", "-c", '"$@"; true', "sh", *show], text=True).strip())
"""


# A process that the kernel knows by this name, which its own child does not inherit with exec.
NAMED = "import ctypes; ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)\n"


def start(name: str, program: str = START) -> list[str]:
    """Runs the program in a process of this name, and gives what it prints."""
    program = NAMED.format(name=name.encode()) + program
    source = str(Path(__file__).parents[2] / "src")
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", program]
    return subprocess.check_output(command, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path}).split()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", ["hydra_pmi_proxy", "mpiexec (x) y"])
def test_ranks_find_their_launcher_also_through_a_wrapper(name: str) -> None:
    pid, direct, wrapped = start(name)
    assert direct == wrapped
    assert direct.partition("@")[0] == pid
    assert start(name)[1] != direct


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_two_helpers_of_one_mpirun_are_one_launcher_but_an_outer_mpirun_is_not() -> None:
    helper = NAMED.format(name=b"hydra_pmi_proxy") + START
    mpirun = f"""
import os, subprocess, sys
print(os.getpid())
for _ in range(2):
    print(subprocess.check_output([sys.executable, "-c", {helper!r}], text=True))
"""
    pid, first_helper, first, _, second_helper, second, _ = start("mpirun", mpirun)
    assert first_helper != second_helper
    assert first == second
    assert first.partition("@")[0] == pid

    rank = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {NAMED.format(name=b'mpirun') + START!r}])"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    inner, found, _ = start("mpirun", outer)
    assert found.partition("@")[0] == inner


def test_without_a_launcher_the_parent_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert launcher_process() == "1"
    monkeypatch.setattr(os, "getppid", lambda: 1 << 30)  # no such process
    assert launcher_process() == str(1 << 30)


def test_the_digest_keeps_parts_apart() -> None:
    assert digest("a", "b") == digest("a", "b")
    assert len({digest("a", "b"), digest("ab"), digest("a, b"), digest("a", "b", ""), digest("b", "a")}) == 5
    assert digest("\udcff") != digest("")
