"""`phalanx run` and the world that its ranks form: root causes, torch's own store, several nodes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from tests.cli.run.support import LIMIT, Launched, Runner, lines_of, run, tail_after, wait_for  # noqa: F401

# -- ranks that use Phalanx --------------------------------------------------------------------------------------------

WORLD = """
    import os, sys, time
    import phalanx as px
    world = px.init()
    world.barrier()
    if world.rank == 2:
        {end}
    world.barrier()
    time.sleep(300)
"""


HEARD = 1.0
"""Seconds in which every survivor must hear of a loss."""


def test_a_world_forms_and_ends(run: Runner) -> None:
    script = run.script(
        """
        import phalanx as px
        with px.init() as world:
            world.barrier()
            print(world.rank, world.world_size, world.local_rank, world.local_world_size)
        """
    )
    job = run("-n", "4", script)
    assert job.process.returncode == 0, job.err
    assert sorted(job.out.splitlines()) == [f"[{rank}] {rank} 4 {rank} 4" for rank in range(4)]
    assert job.err == ""


@pytest.mark.parametrize("slow", ["", "import atexit; atexit.register(time.sleep, 1.5); "])
def test_the_rank_that_raised_is_blamed(run: Runner, slow: str) -> None:
    job = run("-n", "4", run.script(WORLD.format(end=f"{slow}raise ValueError('the root')")))
    assert job.process.returncode == 1
    assert "phalanx: rank 2 failed: exit code 1" in job.err
    last = tail_after(job.err, "its traceback:")
    assert last[0] == "Traceback (most recent call last):"
    assert last[-2:] == ["ValueError: the root", "phalanx: 3 ranks ended because of it"]
    assert "PeerLost" not in job.err


def test_the_rank_that_was_killed_is_blamed(run: Runner) -> None:
    job = run("-n", "4", run.script(WORLD.format(end="os.kill(os.getpid(), 9)")))
    assert job.process.returncode == 137
    assert "phalanx: rank 2 failed: killed by SIGKILL" in job.err
    assert job.err.count("PeerLost: rank 2") == 1
    assert job.err.splitlines()[-1] == "phalanx: 3 ranks ended because of it", "there was time to notice"


def test_the_rank_that_aborted_is_blamed(run: Runner) -> None:
    job = run("-n", "4", run.script(WORLD.format(end="world.abort('nothing to do'); sys.exit(6)")))
    assert job.process.returncode == 6
    assert "phalanx: rank 2 failed: exit code 6" in job.err
    assert "nothing to do" in job.err


def test_a_rank_that_leaves_without_a_word_is_blamed_if_it_was_needed(run: Runner) -> None:
    job = run("-n", "4", run.script(WORLD.format(end="os._exit(0)")))
    assert job.process.returncode == 1
    assert "phalanx: rank 2 failed: it left before the others were done (exit code 0)" in job.err


SLOWLY = (
    "from phalanx.backends.mesh.world import MeshWorld as W; close = W.close; "
    "W.close = lambda *args: (time.sleep(1), close(*args)); "
)


@pytest.mark.parametrize("how", ["", SLOWLY], ids=["", "slowly"])
def test_a_rank_that_closes_before_the_others_are_done_is_blamed(run: Runner, how: str) -> None:
    job = run("-n", "3", run.script(WORLD.format(end=f"{how}world.close(); sys.exit(0)")))
    assert job.process.returncode == 1
    assert "phalanx: rank 2 failed: it left before the others were done (exit code 0)" in job.err


EARLY = """
    import os, pathlib, sys, time
    import phalanx as px
    init = px.init  # is imported here
    if os.environ["RANK"] == {rank!r}:
        # The others have one second to raise, which is too short to start Python in on a busy machine.
        while len([*pathlib.Path().glob("up-*")]) < int(os.environ["WORLD_SIZE"]) - 1:
            time.sleep(0.01)
        sys.exit(0)
    pathlib.Path("up-" + os.environ["RANK"]).touch()
    began = time.monotonic()
    try:
        init(timeout=60)
    except px.WorldNotFormed as error:
        print("missing", error.missing, "late" if time.monotonic() - began > 30 else "at once")
        raise
"""


def test_a_rank_that_ends_before_it_joins_is_named_at_once(run: Runner) -> None:
    job = run("-n", "3", run.script(EARLY.format(rank="1")))
    assert job.process.returncode == 1
    assert sorted(job.out.splitlines()) == ["[0] missing (1,) at once", "[2] missing (1,) at once"]
    assert "phalanx: rank 1 failed: its process ended before it joined the world (exit code 0)" in job.err


def test_a_loss_is_heard_while_the_launcher_is_stopped(run: Runner) -> None:
    script = run.script(
        """
        import os, pathlib, time
        import phalanx as px
        world = px.init()
        world.barrier()
        pathlib.Path(f"ready-{world.rank}").write_text(str(os.getpid()))
        if world.rank == 2:
            time.sleep(300)
        try:
            world.barrier()
        except px.PeerLost as error:
            pathlib.Path(f"heard-{world.rank}").write_text(f"{time.monotonic()} {error.peer}")
            raise
        """
    )
    job = run.start("-n", "3", script)
    wait_for(lambda: all((run.folder / f"ready-{rank}").exists() for rank in range(3)), "the world")
    job.process.send_signal(signal.SIGSTOP)
    killed = time.monotonic()
    os.kill(int((run.folder / "ready-2").read_text()), signal.SIGKILL)
    for rank in range(2):
        file = run.folder / f"heard-{rank}"
        wait_for(lambda: file.exists() and file.read_text(), f"rank {rank}")  # noqa: B023 - called at once
        at, peer = file.read_text().split()
        assert int(peer) == 2
        assert float(at) - killed < HEARD
    job.process.send_signal(signal.SIGCONT)
    assert job.finish() == 137
    assert "phalanx: rank 2 failed: killed by SIGKILL" in job.err


UNPRINTABLE = """
    class Bad(Exception):
        def __str__(self):
            raise RuntimeError("no text")
"""


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        ("Bad()", "it raised Bad: (its text cannot be shown: RuntimeError in __str__)"),
        (r"ValueError('file \udce4.txt is missing')", r"it raised ValueError: file \udce4.txt is missing"),
    ],
)
@pytest.mark.parametrize("inside", ["with px.init() as world:", "if world := px.init():"])
def test_an_exception_that_cannot_be_printed_is_told_to_all(run: Runner, raised: str, shown: str, inside: str) -> None:
    text = f"""
    import phalanx as px
    {UNPRINTABLE.strip()}
    {inside}
        world.barrier()
        if world.rank == 1:
            raise {raised}
        world.barrier()
    """
    job = run("-n", "2", "--log-dir", "logs", run.script(text))
    assert job.process.returncode == 1
    assert "phalanx: rank 1 failed: exit code 1" in job.err
    log = (run.folder / "logs" / "rank-0.stderr.log").read_text()
    assert f"PeerLost: rank 1 is lost: {shown}" in log


def test_a_script_whose_name_is_not_unicode(run: Runner) -> None:
    """The name is in each heartbeat, as the place of the last call."""
    script = run.script(
        """
        import time
        import phalanx as px
        with px.init() as world:
            for _ in range(3):
                world.barrier()
                time.sleep(0.2)
            print("done")
        """,
        name=os.fsdecode(b"caf\xe9.py"),
    )
    job = run("-n", "2", script, env={"PHALANX_HEARTBEAT": "0.05"})
    assert job.process.returncode == 0, job.err
    assert job.err == ""
    assert sorted(job.out.splitlines()) == ["[0] done", "[1] done"]


def test_a_rank_that_leaves_without_a_word_harms_nobody_if_it_was_not_needed(run: Runner) -> None:
    script = run.script(
        """
        import os, time
        import phalanx as px
        world = px.init()
        world.barrier()
        if world.rank:
            time.sleep(2)
            print("finished")
        os._exit(0)
        """
    )
    job = run("-n", "3", script)
    assert job.process.returncode == 0, job.err
    assert sorted(job.out.splitlines()) == ["[1] finished", "[2] finished"]


# -- ranks that use torch ----------------------------------------------------------------------------------------------

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

TORCH = """
    import os
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.full((4,), float(dist.get_rank()))
    dist.all_reduce(x)
    print(dist.get_rank(), dist.get_world_size(), x.tolist())
    dist.destroy_process_group()
"""


# -- several nodes -----------------------------------------------------------------------------------------------------


def free_pair() -> int:
    """A port that is free, and so is the next; below those that the system hands out to anybody in the meantime."""
    while True:
        port = random.randrange(10_000, 20_000, 2)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def all_ready(run: Runner, *launchers: Launched) -> None:
    """Waits for four ranks and the second node's connection; a launcher that ends before that says why."""

    def check() -> bool:
        for launcher in launchers:
            if launcher.process.poll() is not None:
                launcher.finish()
                pytest.fail(f"a launcher ended with {launcher.process.returncode}: {launcher.err}")
        return len(list(run.folder.glob("ready-*"))) == 4 and is_watched(launchers[1])

    wait_for(check, "four ranks and a connection to the directory")


def is_watched(launcher: Launched) -> bool:
    """Whether the launcher of another node hears the directory: it waits for what comes on its only socket.

    A socket alone does not say so: the directory may not have answered yet, or its process may not be up.
    """
    process = Path(f"/proc/{launcher.pid}")
    sockets, awaited = set(), set()
    for link in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            name = link.readlink().name
            if name.startswith("socket:"):
                sockets.add(link.name)
            elif name == "anon_inode:[eventpoll]":
                awaited.update(re.findall(r"tfd: +(\d+)", (process / "fdinfo" / link.name).read_text()))
    return bool(sockets & awaited)


class Nodes:
    """Two launchers on loopback, as if they were two machines."""

    def __init__(self, run: Runner, *arguments: str, host: str = "127.0.0.1", extra: tuple[str, ...] = ()) -> None:
        self._run = run
        self._arguments = arguments
        self._extra = ("-n", "2", "--nnodes", "2", "--master", f"{host}:{free_pair()}", *extra)
        self._env = {"PHALANX_TOKEN": "a token that both nodes know"}

    def start(self, node: int, **env: str) -> Launched:
        options = (*self._extra, "--node-rank", str(node))
        return self._run.start(*options, *self._arguments, env={**self._env, **env})


def test_two_nodes(run: Runner) -> None:
    script = run.script(
        """
        import os
        import phalanx as px
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE TORCHELASTIC_RUN_ID".split()
        with px.init() as world:
            world.barrier()
            print(*(os.environ[name] for name in names))
        """
    )
    nodes = Nodes(run, script)
    second, first = nodes.start(1), nodes.start(0)
    assert (first.finish(), second.finish()) == (0, 0), first.err + second.err
    rows = {tuple(line.split()[1:7]) for line in (first.out + second.out).splitlines()}
    assert rows == {(str(r), str(r % 2), "4", "2", str(r // 2), "2") for r in range(4)}
    assert len({line.split()[7] for line in (first.out + second.out).splitlines()}) == 1
    assert sorted(line[:3] for line in second.out.splitlines()) == ["[2]", "[3]"]


@needs_torch
def test_torch_gloo_on_two_nodes(run: Runner) -> None:
    nodes = Nodes(run, run.script(TORCH))
    first, second = nodes.start(0), nodes.start(1)
    assert (first.finish(), second.finish()) == (0, 0), first.err + second.err
    assert sorted(second.out.splitlines()) == [f"[{rank}] {rank} 4 [6.0, 6.0, 6.0, 6.0]" for rank in (2, 3)]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_failure_on_one_node_ends_the_other(run: Runner, bad: int) -> None:
    script = run.script(
        """
        import os, pathlib, sys, time
        rank = int(os.environ["RANK"])
        pathlib.Path(f"ready-{rank}").touch()
        if rank == int(sys.argv[1]):
            while not pathlib.Path("go").exists():
                time.sleep(0.01)
            raise ValueError("the root")
        time.sleep(300)
        """
    )
    culprit = 2 * bad + 1
    nodes = Nodes(run, script, str(culprit))
    launchers = [nodes.start(0), nodes.start(1)]
    all_ready(run, *launchers)
    (run.folder / "go").touch()
    codes = [launcher.finish() for launcher in launchers]
    assert codes == [1, 1]
    near, far = launchers[bad].err, launchers[1 - bad].err
    assert f"phalanx: rank {culprit} failed: exit code 1" in near
    assert f"rank {culprit} on node {bad}" in far
    assert far.splitlines()[-1] == "ValueError: the root"
    run.assert_nothing_left()


SLEEP = """
    import os, pathlib, sys, time
    pathlib.Path("ready-" + os.environ["RANK"]).touch()
    time.sleep(float(sys.argv[1 + int(os.environ["GROUP_RANK"])]))
"""


def test_a_rank_of_another_node_that_ends_before_it_joins(run: Runner) -> None:
    nodes = Nodes(run, run.script(EARLY.format(rank="3")))
    first, second = nodes.start(0), nodes.start(1)
    assert (first.finish(), second.finish()) == (1, 1)
    for rank, out in ((0, first.out), (1, first.out), (2, second.out)):
        assert f"[{rank}] missing (3,) at once" in out.splitlines(), first.err + second.err
    assert "phalanx: rank 3 failed: its process ended before it joined the world (exit code 0)" in second.err


def test_a_failure_at_once_is_still_told(run: Runner) -> None:
    script = run.script(
        """
        import os, pathlib, sys, time
        pathlib.Path("ready-" + os.environ["RANK"]).touch()
        if os.environ["GROUP_RANK"] == "1":
            sys.exit(3)
        time.sleep(300)
        """
    )
    nodes = Nodes(run, script)
    # The second is done for before the first is there to hear it.
    second, first = nodes.start(1), nodes.start(0)
    assert second.finish() == 3
    assert first.finish() == 1
    assert "on node 1" in first.err


@pytest.mark.parametrize("told", [0, 1])
def test_a_launcher_that_is_told_to_end_ends_the_other(run: Runner, told: int) -> None:
    nodes = Nodes(run, run.script(SLEEP), "300", "300")
    launchers = [nodes.start(0), nodes.start(1)]
    all_ready(run, *launchers)
    launchers[told].process.send_signal(signal.SIGINT)
    assert launchers[told].finish() == 130
    assert launchers[1 - told].finish() == 1
    assert f"the launcher of node {told}" in launchers[1 - told].err
    assert "SIGINT" in launchers[1 - told].err
    run.assert_nothing_left()


def test_the_first_node_is_killed(run: Runner) -> None:
    nodes = Nodes(run, run.script(SLEEP), "300", "300")
    first, second = nodes.start(0), nodes.start(1)
    all_ready(run, first, second)
    first.process.kill()
    assert second.finish() == 1
    assert "the first node's launcher" in second.err
    first.finish()
    run.assert_nothing_left(limit=5)


def test_the_first_node_waits_for_the_second(run: Runner) -> None:
    script = run.script(
        """
        import os, pathlib, time
        pathlib.Path("ready-" + os.environ["RANK"]).touch()
        # The first node is done only once the second is connected: that is the moment this is about.
        while os.environ["GROUP_RANK"] == "1" or not pathlib.Path("go").exists():
            time.sleep(0.01)
        """
    )
    nodes = Nodes(run, script)
    second, first = nodes.start(1), nodes.start(0)
    all_ready(run, first, second)
    (run.folder / "go").touch()
    with pytest.raises(subprocess.TimeoutExpired):
        first.process.wait(1.5)
    second.process.terminate()
    assert second.finish() == 143
    assert first.finish() == 1
    assert "the launcher of node 1" in first.err


def test_nodes_with_different_tokens(run: Runner) -> None:
    nodes = Nodes(run, run.script(SLEEP), "300", "300")
    first, second = nodes.start(0), nodes.start(1, PHALANX_TOKEN="another one")
    assert second.finish(LIMIT) == 1
    assert "token" in second.err
    assert "another one" not in second.err
    first.process.terminate()
    assert first.finish() == 143


def test_the_master_is_another_machine(run: Runner) -> None:
    job = run("--nnodes", "2", "--master", "192.0.2.1:29500", run.script(""), env={"PHALANX_TOKEN": "some token"})
    assert job.process.returncode == 1
    assert "192.0.2.1" in job.err
    assert "node 0 must run on the master's machine" in job.err


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_two_nodes_by_ipv6(run: Runner) -> None:
    script = run.script("import os, phalanx as px\nwith px.init() as w: w.barrier(); print(os.environ['MASTER_ADDR'])")
    nodes = Nodes(run, script, host="[::1]")
    first, second = nodes.start(0), nodes.start(1)
    assert (first.finish(), second.finish()) == (0, 0), first.err + second.err
    assert lines_of(first.out, 0) == ["::1"]
