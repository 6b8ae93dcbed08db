"""A system that is not Linux, as far as one can be had here: nothing that only Linux has, and no core.

`PHALANX_PORTABLE=1` turns all of it off in Phalanx, and tests/other_system takes it away from Python.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.run.support import LIMIT, PROGRAM, Runner, alive, run, wait_for  # noqa: F401
from tests.lateness import bound

from phalanx.launching.environment import reserve_port
from phalanx.operating_system import process_table

pytestmark = pytest.mark.timeout(120)

ELSEWHERE = {
    "PHALANX_PORTABLE": "1",
    "PYTHONPATH": str(Path(__file__).parents[2] / "other_system"),
}
SLEEP = """
    import os, pathlib, time
    pathlib.Path("ready-" + os.environ["RANK"]).touch()
    time.sleep(300)
"""


def ready(run: Runner, ranks: int) -> None:
    wait_for(lambda: all((run.folder / f"ready-{rank}").exists() for rank in range(ranks)), "all ranks to be ready")


def test_python_is_without_what_only_linux_has(run: Runner) -> None:
    """Else the other tests of this file would show nothing."""
    script = run.script(
        """
        import os, select
        from phalanx import _native, operating_system
        assert not hasattr(os, "memfd_create") and not hasattr(select, "epoll")
        assert not operating_system.LINUX and _native.core is None, _native.why_not
        try:
            open("/proc/self/stat")
        except FileNotFoundError as error:
            print(error)
        """
    )
    job = run(script, env=ELSEWHERE)
    assert job.process.returncode == 0, job.err
    assert "there is no /proc/self/stat on this system" in job.out


def test_every_module_can_be_imported(run: Runner) -> None:
    """Also where `sys.platform` says macOS. torch has its own modules for each system, and is left out."""
    script = run.script(
        """
        import importlib, pkgutil, sys
        import click, msgspec, numpy, pytest, rich.console, rich.table  # they know which system this is
        sys.platform = "darwin"
        import phalanx
        skipped = ("phalanx._core", "phalanx.__main__", "phalanx.parallel", "phalanx.torch_backend")
        names = [module.name for module in pkgutil.walk_packages(phalanx.__path__, "phalanx.")]
        names = [name for name in names if not name.startswith(skipped)]
        for name in names:
            importlib.import_module(name)
        print(len(names))
        """
    )
    done = subprocess.run(
        [sys.executable, script], env=run.environment(**ELSEWHERE), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 200


def test_collectives_messages_and_remote_calls(run: Runner) -> None:
    script = run.script(
        """
        import numpy as np
        import phalanx as px

        with px.init() as world, px.rpc.Agent(world) as agent:

            @agent.register
            def add(a: float, b: float) -> float:
                return a + b

            right, left = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
            x = np.full(100_000, world.rank, np.float32)
            world.all_reduce(x, op="mean")
            pending = world.all_gather(np.array([world.rank]), async_op=True)
            world.send(np.array([world.rank]), right)
            came = world.recv(src=left)
            half = world.split(world.rank % 2)
            sums = half.all_reduce(np.array([world.rank]))
            world.barrier()
            called = agent.call(right, "add", world.rank, 0.5)
            world.barrier()
            print(x[-1], pending.wait().ravel().tolist(), came[0], sums[0], called)
        """
    )
    job = run("-n", "4", script, env=ELSEWHERE)
    assert job.process.returncode == 0, job.err
    assert sorted(job.out.splitlines()) == [
        "[0] 1.5 [0, 1, 2, 3] 3 2 0.5",
        "[1] 1.5 [0, 1, 2, 3] 0 4 1.5",
        "[2] 1.5 [0, 1, 2, 3] 1 2 2.5",
        "[3] 1.5 [0, 1, 2, 3] 2 4 3.5",
    ]
    run.assert_nothing_left()


def test_a_killed_rank_is_noticed(run: Runner) -> None:
    script = run.script(
        """
        import os, signal, time
        import numpy as np
        import phalanx as px

        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, which may come sooner on a busy machine
        world = px.init()
        world.barrier()
        if world.rank == 1:
            for other in (0, 2):
                world.recv(src=other)  # it is through the barrier, too
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            world.send(np.ones(1), 1)
            world.all_reduce(np.ones(4))
        except px.errors.PeerLost as error:
            print(f"lost {error.peer} after {time.monotonic() - began:.3f}", flush=True)
        """
    )
    job = run("-n", "3", script, env=ELSEWHERE)
    assert job.process.returncode == 128 + signal.SIGKILL
    assert "rank 1 failed: killed by SIGKILL" in job.err
    lost = [line.split() for line in job.out.splitlines()]
    assert sorted(words[:3] for words in lost) == [["[0]", "lost", "1"], ["[2]", "lost", "1"]]
    assert all(float(words[4]) < bound(1) for words in lost)
    run.assert_nothing_left()


def test_an_exception_ends_the_job_with_its_traceback(run: Runner) -> None:
    script = run.script(
        """
        import phalanx as px

        with px.init() as world:
            if world.rank == 2:
                raise ValueError("the culprit")
            world.barrier()
        """
    )
    job = run("-n", "4", script, env=ELSEWHERE)
    assert job.process.returncode == 1
    assert "ValueError: the culprit" in job.err
    run.assert_nothing_left()


def test_what_ranks_leave_behind_is_ended(run: Runner) -> None:
    """A child in a session of its own, and one whose parent is gone: both still carry the job's mark."""
    script = run.script(
        """
        import os, signal, subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "297"], start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", "298"])
        """
    )
    job = run("-n", "2", "--grace", "0.5", script, env=ELSEWHERE)
    assert job.process.returncode == 0, job.err
    assert "killing 4 processes that the ranks left behind" in job.err
    assert "survived" not in job.err
    run.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_launcher(run: Runner, number: signal.Signals) -> None:
    """No signal comes when a parent dies: the guardian alone ends the ranks of a launcher that was killed."""
    job = run.start("-n", "3", run.script(SLEEP), env=ELSEWHERE)
    ready(run, 3)
    assert len(alive(run.mark)) >= 4
    began = time.monotonic()
    job.process.send_signal(number)
    job.process.wait(LIMIT)
    run.assert_nothing_left(limit=5)
    assert time.monotonic() - began < bound(5)


def test_ranks_without_a_launcher_meet(run: Runner) -> None:
    """They share a token by a file, which says when rank 0 began: a file of a rank that is gone is not used."""
    script = run.script("import phalanx as px\nwith px.init() as w:\n    print(w.all_gather_object(w.rank))\n")
    run.folder.chmod(0o700)
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "XDG_RUNTIME_DIR": str(run.folder)}
    with reserve_port() as port:
        variables["MASTER_PORT"] = str(port)
        for _ in range(2):
            ranks = [
                subprocess.Popen(
                    [sys.executable, script],
                    env=run.environment(**ELSEWHERE, **variables, RANK=str(rank)),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for rank in range(2)
            ]
            assert [rank.communicate(timeout=LIMIT)[0] for rank in ranks] == ["[0, 1]\n"] * 2


def test_the_demo(run: Runner) -> None:
    done = subprocess.run(
        [*PROGRAM, "demo", "-n", "2"], env=run.environment(**ELSEWHERE), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    assert not done.stderr


def test_the_doctor(run: Runner) -> None:
    done = subprocess.run(
        [*PROGRAM, "doctor"], env=run.environment(**ELSEWHERE), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PHALANX_PORTABLE is set" in done.stdout
    assert "could not look" not in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_the_benchmark_says_what_it_needs(run: Runner) -> None:
    done = subprocess.run(
        [*PROGRAM, "bench"], env=run.environment(**ELSEWHERE), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "needs Linux" in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_of_the_testing_module(run: Runner) -> None:
    """Its ranks are forked by a process of their own, which also says how they ended."""
    script = run.script(
        """
        import os, signal
        import numpy as np
        import phalanx as px
        from phalanx.testing import run_ranks

        def total(world):
            return float(world.all_reduce(np.ones(1))[0])

        def die(world):
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                world.barrier()
            except px.errors.PeerLost as error:
                return error.peer

        if __name__ == "__main__":
            print(run_ranks(2, total, backend="mesh"), run_ranks(2, die, backend="mesh", may_die=[1])[0])
        """
    )
    done = subprocess.run(
        [sys.executable, script],
        env=run.environment(**ELSEWHERE),
        cwd=run.folder,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.stdout == "[2.0, 2.0] 1\n", done.stdout + done.stderr


def test_both_tables_of_processes_say_the_same() -> None:
    """That of /proc and that of `ps`, for processes that do not change meanwhile."""
    value = f"{os.getpid()}-mark"
    children = [
        subprocess.Popen(["sleep", "300"], env={**os.environ, "OUR_MARK": value}, start_new_session=True)
        for _ in range(2)
    ]
    try:
        show = "from phalanx import operating_system as o; print([r for r in o.process_table('OUR_MARK') if r[3]])"
        done = subprocess.run(
            [sys.executable, "-c", show],
            env={**os.environ, "PHALANX_PORTABLE": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        ours = sorted(row for row in process_table("OUR_MARK") if row[3] == value)
        assert ours == sorted((child.pid, os.getpid(), child.pid, value) for child in children)
        assert done.stdout == f"{ours}\n"
    finally:
        for child in children:
            child.kill()
            child.wait()
