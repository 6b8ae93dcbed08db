"""`phalanx run --elastic` and `phalanx join`: jobs that lose ranks, get others, and end as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

from tests.cli.run.support import Launched, Runner, alive, run, wait_for  # noqa: F401

TRAIN = """
import os, signal, sys, time
import numpy as np
import phalanx as px

world = px.init(timeout=30)
me = world.members[world.rank]
weights = np.zeros(1000)
state = px.elastic.State(weights=weights, sampler=px.elastic.Sampler(100, 24, seed=1))
ENDS = {ENDS}
try:
    for step in px.elastic.steps(world, state, total={TOTAL}):
        if step.number == 3:
            open({SAVES!r}.replace("saved", "began") + str(me), "w").close()
        with step:
            gradient = np.full(1000, float(sum(step.batch) + step.number))
            if me in ENDS and ENDS[me][0] == step.number:
                exec(ENDS[me][1])
            step.group.all_reduce(gradient)
            weights += gradient * 2 + step.group.all_reduce(np.ones(1))[0] * 0
            time.sleep({PAUSE})
except px.PhalanxError as error:
    time.sleep(0.5)
    with open({SAVES!r} + str(me), "w") as file:
        file.write(type(error).__name__)
    print("error", me, type(error).__name__, str(error).splitlines()[0], flush=True)
    sys.exit(3)
print("done", me, int(weights[0]), step.group.world_size, flush=True)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def script(run: Runner, total: int = 60, ends: dict[int, tuple[int, str]] | None = None, pause: float = 0.02) -> str:
    saves = str(run.folder / "saved-")
    text = TRAIN
    for name, value in (
        ("ENDS", repr(ends or {})),
        ("TOTAL", str(total)),
        ("PAUSE", str(pause)),
        ("SAVES!r", repr(saves)),
    ):
        text = text.replace("{" + name + "}", value)
    return run.script(text)


def done(job: Launched) -> dict[int, tuple[int, int]]:
    """What each rank that was done has said: its weights, and the ranks of its last step."""
    found = re.findall(r"done (\d+) (-?\d+) (\d+)", job.out)
    return {int(rank): (int(weights), int(size)) for rank, weights, size in found}


def test_lost_ranks_are_replaced(run: Runner) -> None:
    job = run("--elastic", "2:3", script(run, 150, {1: (10, KILL), 0: (40, KILL)}))
    assert job.process.returncode == 0, job.err
    assert set(done(job)) == {2, 3, 4}
    assert len({weights for weights, _ in done(job).values()}) == 1
    assert "rank 1 was lost: killed by SIGKILL" in job.err
    assert "starting rank 3 in its place (1 of 10 restarts)" in job.err
    assert re.search(r"epoch 1: 2 ranks go on without rank 1, at step 10, after \d\.\d\d s", job.err)
    assert re.search(r"with rank 3, at step \d+", job.err)
    assert re.search(r"sent [\d.]+ KiB of state to rank 3, from \d rank", job.err)
    run.assert_nothing_left(5)


def test_a_rank_that_raises_is_lost_with_its_traceback(run: Runner) -> None:
    job = run("--elastic", "1:3", "--max-restarts", "0", script(run, 30, {2: (5, "raise KeyError('no such thing')")}))
    assert job.process.returncode == 0, job.err
    assert set(done(job)) == {0, 1}
    assert "KeyError: 'no such thing'" in job.err
    assert "none is started: no restart is left" in job.err
    assert "epoch 1: 2 ranks go on without rank 2" in job.err


def test_below_the_minimum_the_job_ends_with_a_word(run: Runner) -> None:
    job = run("--elastic", "2:2", "--max-restarts", "0", script(run, 30, {1: (5, KILL)}), env={"PHALANX_TIMEOUT": "2"})
    assert job.process.returncode != 0
    assert "1 of at least 2 ranks are left" in job.err + job.out


def test_all_ranks_raise(run: Runner) -> None:
    job = run("--elastic", "1:3", script(run, 30, dict.fromkeys(range(20), (5, "raise KeyError(me)"))))
    assert job.process.returncode == 1
    assert "KeyError" in job.err
    assert done(job) == {}


def test_a_failure_before_the_world_has_formed_ends_the_job(run: Runner) -> None:
    job = run(
        "--elastic",
        "1:2",
        run.script("import os\nos.environ['RANK'] == '1' and exit(7)\nimport phalanx as px\npx.init()\n"),
    )
    assert job.process.returncode == 7
    assert "starting" not in job.err


def test_abort_ends_an_elastic_job(run: Runner) -> None:
    job = run("--elastic", "1:3", script(run, 300, {1: (5, "world.abort('enough')")}))
    assert job.process.returncode != 0
    assert "enough" in job.err
    assert "starting" not in job.err


def test_ranks_of_another_launcher_join(run: Runner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    token = {"PHALANX_TOKEN": "a token for this test only"}
    text = script(run, 400, pause=0.02)
    job = run.start("--elastic", "2:4", "-n", "2", "--master", f"127.0.0.1:{port}", text, env=token)
    joined = run.start("-n", "2", f"127.0.0.1:{port + 1}", text, env=token, command="join")
    joined.finish()
    job.finish()
    assert (job.process.returncode, joined.process.returncode) == (0, 0), job.err + joined.err
    assert f"phalanx join 127.0.0.1:{port + 1}" in job.err
    both = done(job) | done(joined)
    assert set(both) == {0, 1, 2, 3}
    assert len(set(both.values())) == 1
    assert {size for _, size in both.values()} == {4}


def test_no_more_ranks_join_than_there_may_be(run: Runner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    token = {"PHALANX_TOKEN": "a token for this test only"}
    text = script(run, 300, pause=0.02)
    job = run.start("--elastic", "2:2", "--master", f"127.0.0.1:{port}", text, env=token)
    wait_for(lambda: (run.folder / "began-0").exists(), "the loop")
    joined = run.start(f"127.0.0.1:{port + 1}", text, env=token, command="join")
    assert joined.finish() == 3
    assert "as many ranks as it may have (2)" in joined.out
    assert job.finish() == 0, job.err


def test_a_rank_that_comes_too_late_is_told(run: Runner) -> None:
    """The others are done before a rank that was started for a lost one has begun."""
    job = run("--elastic", "1:2", script(run, 8, {1: (6, KILL)}, pause=0.0))
    assert job.process.returncode == 0, job.err
    assert 0 in done(job)


def test_the_ranks_can_save_when_the_launcher_is_killed(run: Runner) -> None:
    job = run.start("--elastic", "2:3", script(run, 100_000))
    wait_for(lambda: all(Path(f"{run.folder}/began-{rank}").exists() for rank in range(3)), "the loops")
    os.kill(job.pid, signal.SIGKILL)
    wait_for(lambda: all(Path(f"{run.folder}/saved-{rank}").exists() for rank in range(3)), "the saved states", 10)
    run.assert_nothing_left(10)
    assert {Path(f"{run.folder}/saved-{rank}").read_text() for rank in range(3)} == {"RendezvousError"}


def test_wrong_sizes_are_refused(run: Runner) -> None:
    text = run.script("print('no')")
    for arguments, words in (
        (("--elastic", "4:2"), "MIN is above MAX"),
        (("--elastic", "x"), "expected MIN:MAX"),
        (("--elastic", "2:4", "-n", "5"), "not between"),
        (("--elastic", "2:4", "--nnodes", "2", "--master", "a:1"), "phalanx join"),
        (("--elastic", "2:4", "--hosts", "a:1,b:1"), "phalanx join"),
    ):
        job = run(*arguments, text)
        assert job.process.returncode == 2
        assert words in job.err
    job = run.start("127.0.0.1:9", text, command="join")
    assert job.finish() == 2
    assert "there is no token" in job.err
