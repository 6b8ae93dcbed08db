"""The tracebacks of a job that failed: the culprit's once, and one line for those who failed because of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.cli.run.support import LIMIT, Runner, run, wait_for  # noqa: F401
from tests.launchers.starting import needs_torch

RAISES = """
    import phalanx as px

    def load(name):
        return {"a": 1}[name]

    with px.init() as world:
        world.barrier()
        if world.rank == 2:
            load("b")
        world.barrier()
"""


def test_the_culprits_traceback_once_and_one_line_for_the_others(run: Runner) -> None:
    job = run("-n", "4", run.script(RAISES))
    assert job.process.returncode == 1
    lines = job.err.splitlines()
    assert lines[-1] == "phalanx: 3 ranks ended because of it"
    assert job.err.count("in load") == 1
    assert lines.count("KeyError: 'b'") == 1
    assert "PeerLost" not in job.err
    assert "src/phalanx" not in job.err, "no frame of Phalanx"
    assert len(lines) < 20, job.err


def test_all_is_shown_if_asked_for(run: Runner) -> None:
    job = run("-n", "4", run.script(RAISES), env={"PHALANX_DEBUG": "1"})
    assert job.process.returncode == 1
    assert job.err.count("phalanx.errors.PeerLost: rank 2 is lost: it raised KeyError: 'b'") == 3
    assert "/phalanx/group/" in job.err
    assert "ended because of it" not in job.err


def test_log_files_have_each_ranks_own_traceback(run: Runner) -> None:
    run("-n", "3", "--log-dir", "logs", run.script(RAISES))
    logs = [(run.folder / "logs" / f"rank-{rank}.stderr.log").read_text() for rank in range(3)]
    assert all("PeerLost: rank 2 is lost" in log for log in logs[:2])
    assert logs[2].rstrip().endswith("KeyError: 'b'")


def test_where_the_others_were_if_the_culprit_said_nothing(run: Runner) -> None:
    script = run.script(
        """
        import sys
        import phalanx as px

        world = px.init()
        world.barrier()
        if world.rank == 1:
            sys.exit(0)
        world.barrier()
        """
    )
    job = run("-n", "4", script)
    assert job.process.returncode == 1
    assert "phalanx: rank 1 failed: it left before the others were done (exit code 0)" in job.err
    assert job.err.count("ChannelClosed") == 1
    assert "    world.barrier()" in job.err
    assert job.err.splitlines()[-1] == "phalanx: 3 ranks ended because of it"


def test_one_mistake_of_all_ranks_is_shown_once(run: Runner) -> None:
    script = run.script(
        """
        import phalanx as px

        world = px.init()
        world.barrier()
        raise ValueError("everywhere")
        """
    )
    job = run("-n", "4", script)
    assert job.err.splitlines().count("ValueError: everywhere") == 1
    assert job.err.splitlines()[-1].startswith("phalanx: the same on ranks ")


def test_two_different_mistakes_are_both_shown(run: Runner) -> None:
    script = run.script(
        """
        import phalanx as px

        world = px.init()
        world.barrier()
        raise ValueError(f"of rank {world.rank}")
        """
    )
    job = run("-n", "2", script)
    for rank in range(2):
        assert job.err.count(f"ValueError: of rank {rank}\n") == 1
    assert "ended because of it" not in job.err


def test_a_world_that_does_not_form_is_reported_once(run: Runner) -> None:
    script = run.script(
        """
        import os, time
        import phalanx as px

        if os.environ["RANK"] == "1":
            time.sleep(300)
        px.init(timeout=2)
        """
    )
    job = run("-n", "3", script)
    assert job.process.returncode == 1
    assert job.err.count("WorldNotFormed") <= 2, job.err  # and in the announcement
    assert "src/phalanx" not in job.err


def test_a_child_of_a_rank_prints_for_itself(run: Runner) -> None:
    script = run.script(
        """
        import subprocess, sys
        import phalanx as px

        child = "import phalanx as px; px.init(rank=0, world_size=1); raise KeyError('of a child')"
        subprocess.run([sys.executable, "-c", child])
        """
    )
    job = run("-n", "1", script)
    assert job.process.returncode == 0
    assert "[0] KeyError: 'of a child'" in job.err


def test_a_second_world_names_the_first(run: Runner) -> None:
    script = run.script(
        """
        import phalanx as px

        def main():
            return px.init(timeout=10)

        main()
        main()
        """
    )
    job = run("-n", "2", script)
    words = "RendezvousError: this process is in this world already, formed by init() at script.py:5 in main (use the"
    assert job.err.count(words) <= 2, "in the announcement and in the report"
    assert words in job.err
    assert job.err.splitlines()[-1].startswith("phalanx: the same on rank ")


@pytest.mark.parametrize("killed", [False, True])
def test_no_folder_is_left(run: Runner, killed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    script = run.script("import pathlib, time; pathlib.Path('up').touch(); time.sleep(300)" if killed else "")
    job = run.start("-n", "1", script, env={"TMPDIR": str(folder)})
    if killed:
        wait_for((run.folder / "up").exists, "the rank")
        assert [path.name.startswith("phalanx-run-") for path in folder.iterdir()] == [True]
        job.process.kill()
    job.finish()
    wait_for(lambda: not [*folder.iterdir()], "the guardian")
    run.assert_nothing_left(LIMIT)


@needs_torch
@pytest.mark.parametrize(
    ("wrapped", "slow", "how"),
    [
        pytest.param(False, 2, "exit code 1", id="plain"),
        pytest.param(True, 2, "exit code 1", id="DDP"),
        pytest.param(True, 300, "it raised an exception; it had to be killed after 4 s", id="stuck"),
    ],
)
def test_the_rank_that_raised_is_to_blame_also_under_torch(run: Runner, wrapped: bool, slow: int, how: str) -> None:
    """It may end later than the others, and torch's DDP makes another error of theirs."""
    script = run.script(
        f"""
        import atexit, time
        import torch, torch.distributed as dist
        dist.init_process_group("phalanx")
        model = torch.nn.Linear(4, 4)
        if {wrapped}:
            model = torch.nn.parallel.DistributedDataParallel(model)
        for step in range(3):
            loss = model(torch.ones(2, 4)).sum()
            if step == 1 and dist.get_rank() == 1:
                atexit.register(time.sleep, {slow})
                raise ValueError("bad batch")
            loss.backward()
            dist.all_reduce(torch.ones(2))
        """
    )
    job = run("-n", "3", "--grace", "4" if slow > 2 else "30", script)
    assert job.process.returncode == 1
    assert f"phalanx: rank 1 failed: {how}" in job.err.splitlines(), "it had the time to end by itself"
    assert job.err.count("ValueError: bad batch") == 1
    assert "DistNetworkError" not in job.err
    assert job.err.splitlines()[-1] == "phalanx: 2 ranks ended because of it"
    assert not re.search(r"rank [02] failed", job.err), job.err


WORLDS = {
    "plain": """
        import numpy as np
        import phalanx as px

        world = px.init()
        rank, barrier = world.rank, world.barrier

        def step():
            world.all_reduce(np.ones(3))
    """,
    "torch": """
        import torch, torch.distributed as dist

        dist.init_process_group("phalanx")
        rank, barrier = dist.get_rank(), dist.barrier

        def step():
            dist.all_reduce(torch.ones(3))
    """,
}
TRAIN = """

        def train():
            for number in range(5):
                if number == 3 and rank == 2:
                    raise ValueError("bad batch")
                step()

        try:
            train()
"""
ENDS = {
    "finally a collective": """
        finally:
            barrier()
    """,
    "made another of it": """
        except Exception as error:
            raise RuntimeError("training failed") from error
    """,
    "another instead": """
        except Exception:
            raise RuntimeError("training failed")
    """,
}


@pytest.mark.parametrize("world", [pytest.param("plain"), pytest.param("torch", marks=needs_torch)])
@pytest.mark.parametrize("end", ENDS)
def test_the_reason_is_shown_whatever_the_program_does_with_its_errors(run: Runner, world: str, end: str) -> None:
    """The first error of a rank counts, not the last that it or another made of it."""
    job = run("-n", "3", run.script(WORLDS[world] + TRAIN + ENDS[end]))
    assert job.process.returncode == 1
    assert "phalanx: rank 2 failed: exit code 1" in job.err.splitlines(), job.err
    assert "ValueError: bad batch" in job.err.splitlines(), job.err
    assert job.err.splitlines()[-1] == "phalanx: 2 ranks ended because of it"


@needs_torch
@pytest.mark.parametrize(
    ("code", "how"), [(7, "exit code 7"), (0, "it left before the others were done (exit code 0)")], ids=["7", "0"]
)
def test_a_rank_that_leaves_the_others_is_to_blame_also_under_torch(run: Runner, code: int, how: str) -> None:
    """It says nothing, and may end later than those that lost it: they know whom they have lost."""
    script = run.script(
        f"""
        import atexit, sys, time
        import torch, torch.distributed as dist
        dist.init_process_group("phalanx")
        for step in range(3):
            if step == 1 and dist.get_rank() == 1:
                atexit.register(time.sleep, 2)
                sys.exit({code})
            dist.all_reduce(torch.ones(2))
        """
    )
    job = run("-n", "3", "--grace", "30", script)
    assert job.process.returncode == (code or 1)
    assert f"phalanx: rank 1 failed: {how}" in job.err.splitlines(), job.err
    assert not re.search(r"rank [02] failed", job.err), job.err
