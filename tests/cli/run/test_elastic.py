"""`phalanx run --elastic` and `phalanx join`: jobs that lose ranks, get others, and end as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from tests.cli.run.support import Launched, Runner, alive, run, wait_for  # noqa: F401
from tests.ports import free_port

TRAIN = """
import os, signal, sys, time
import numpy as np
import phalanx as px

world = px.init(timeout=30)
me, began = world.members[world.rank], False
weights = np.zeros(1000)
state = px.elastic.State(weights=weights, sampler=px.elastic.Sampler(100, 24, seed=1))
ENDS = {ENDS}
try:
    for step in px.elastic.steps(world, state, total={TOTAL}):
        if step.number >= 3 and not began:
            began = True
            with open({SAVES!r}.replace("saved", "began") + str(me), "w") as file:
                file.write(str(os.getpid()))
        with step:
            gradient = np.full(1000, float(sum(step.batch) + step.number))
            if me in ENDS and ENDS[me][0] in (step.number, f"with rank {step.group.members[-1]}"):
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


def script(
    run: Runner,
    total: int = 60,
    ends: dict[int, tuple[int | str, str]] | None = None,
    pause: float = 0.02,
    before: str = "",
    after: str = "",
) -> str:
    """Writes the program. `ends` says by rank in which step, or in the first step "with rank N", it does what."""
    saves = str(run.folder / "saved-")
    text = before + TRAIN + after
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
    # Rank 3 may come before rank 0 is lost, in its place, or, if it begins late, together with rank 4.
    assert re.search(r"with ranks? (4, )?3(, 4)?, at step \d+", job.err), job.err
    assert re.search(r"sent [\d.]+ KiB of state to ranks? (4, )?3(, 4)?, from \d rank", job.err), job.err
    run.assert_nothing_left(5)


def test_a_change_is_told_also_if_the_rank_that_would_tell_it_is_lost(run: Runner) -> None:
    ends: dict[int, tuple[int | str, str]] = {1: (10, KILL), 0: ("with rank 3", KILL)}
    job = run("--elastic", "2:3", script(run, 150, ends))
    assert job.process.returncode == 0, job.err
    assert re.search(r"epoch 2: 3 ranks go on with rank 3, at step \d+", job.err), job.err
    # Rank 0 may be lost before rank 3 has the state.
    assert re.search(r"epoch 3: 2 ranks go on without rank 0( and with rank 3)?, at step \d+", job.err), job.err
    assert len(re.findall(r"epoch 2:", job.err)) == 1, job.err


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
    port = free_port()
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
    port = free_port()
    token = {"PHALANX_TOKEN": "a token for this test only"}
    text = script(run, 300, pause=0.02)
    job = run.start("--elastic", "2:2", "--master", f"127.0.0.1:{port}", text, env=token)
    wait_for(lambda: (run.folder / "began-0").exists(), "the loop")
    joined = run.start(f"127.0.0.1:{port + 1}", text, env=token, command="join")
    assert joined.finish() == 3
    assert "as many ranks as it may have (2)" in joined.out
    assert job.finish() == 0, job.err


def test_a_rank_that_was_voted_out_and_does_not_wake_is_replaced_and_killed(run: Runner) -> None:
    text = script(run, 400, {1: (5, "os.kill(os.getpid(), signal.SIGSTOP)")})
    Path(text).write_text(Path(text).read_text().replace("timeout=30", "timeout=3"))
    job = run("--elastic", "1:3", "--grace", "1", text)
    assert job.process.returncode == 0, job.err
    assert "rank 1 was lost: it was voted out: it did not answer in time; starting rank 3 in its place" in job.err
    assert "rank 1 was voted out and has not ended within 1 s: killing it" in job.err
    assert {0, 2, 3} == set(done(job))
    run.assert_nothing_left()


def test_a_rank_that_comes_too_late_is_told(run: Runner) -> None:
    """The others are done before a rank that was started for a lost one has begun."""
    job = run("--elastic", "1:2", script(run, 8, {1: (6, KILL)}, pause=0.0))
    assert job.process.returncode == 0, job.err
    assert 0 in done(job)


def test_an_error_after_the_loop_fails_the_job(run: Runner) -> None:
    """Others that have ended well do not hide it: it may be the one that saves the result."""
    after = "if me == 0:\n    time.sleep(1)\n    raise OSError('the disk is full')\n"
    job = run("--elastic", "1:3", script(run, 8, after=after))
    assert job.process.returncode == 1, job.err
    assert "rank 0 failed: exit code 1" in job.err
    assert "OSError: the disk is full" in job.err


def test_a_rank_that_leaves_early_hides_no_error_of_others(run: Runner) -> None:
    ends = {1: (3, "sys.exit(0)"), 0: (10, "raise KeyError('no such thing')"), 2: (10, "raise KeyError('neither')")}
    job = run("--elastic", "1:3", script(run, 30, ends))
    assert job.process.returncode == 1, job.err
    assert "KeyError" in job.err


def test_after_one_is_done_a_lost_rank_is_announced_and_the_rest_goes_on(run: Runner) -> None:
    until_reaped = f"while os.path.exists('/proc/' + open({str(run.folder / 'began-1')!r}).read()): time.sleep(0.01)"
    job = run("--elastic", "1:3", script(run, 30, {1: (3, "sys.exit(0)"), 2: (10, f"{until_reaped}\n{KILL}")}))
    assert job.process.returncode == 0, job.err
    assert "rank 2 was lost: killed by SIGKILL" in job.err
    assert "none is started: rank 1 has ended well" in job.err
    assert set(done(job)) == {0}


def test_the_error_that_ends_all_ranks_is_shown(run: Runner) -> None:
    """The world has lost a rank, so that what is done with it after the loop fails on all of them."""
    after = "world.all_reduce(np.ones(1))\n"
    job = run("--elastic", "1:3", "--max-restarts", "0", script(run, 20, {1: (5, KILL)}, after=after))
    assert job.process.returncode == 1
    assert "all ranks are lost" in job.err
    assert "PeerLost: rank 1 is lost" in job.err
    assert "world.all_reduce(np.ones(1))" in job.err
    assert "ending ranks" not in job.err


def test_a_rank_that_joins_first_takes_the_place_but_not_the_number(run: Runner) -> None:
    """The launcher's own rank for it is slow to start, and is not let in: no restart is spent on others after it. When
    the one that joined is lost, another is started."""
    port = free_port()
    token = {"PHALANX_TOKEN": "a token for this test only"}
    before = "import os, time\nif os.environ.get('PHALANX_JOIN') == '2': time.sleep(6)\n"
    text = script(run, 100_000, {1: (5, KILL)}, before=before)
    screen = run.folder / "screen"
    with screen.open("wb") as file:
        job = run.start("--elastic", "1:2", "--master", f"127.0.0.1:{port}", text, env=token, stderr=file)

    def shown(words: str) -> None:
        wait_for(lambda: words in screen.read_text(), f"{words!r} on the screen")

    shown("starting rank 2 in its place (1 of 10 restarts)")
    joined = run.start(f"127.0.0.1:{port + 1}", text, env=token, command="join")
    shown("with rank 3")
    shown("rank 2 was not let in: the job has as many ranks as it may have (2)")
    wait_for(lambda: (run.folder / "began-3").exists(), "the rank that joined")
    os.kill(int((run.folder / "began-3").read_text()), signal.SIGKILL)
    shown("starting rank 4 in its place (2 of 10 restarts)")
    shown("with rank 4")
    job.process.send_signal(signal.SIGINT)
    job.finish()
    joined.finish()
    assert "taken" not in screen.read_text()
    run.assert_nothing_left(5)


def test_ranks_that_join_together_are_lost_for_themselves(run: Runner) -> None:
    """Of three that join there is room for two: they stay."""
    port = free_port()
    token = {"PHALANX_TOKEN": "a token for this test only"}
    after = f"while not os.path.exists({str(run.folder / 'enough')!r}): time.sleep(0.01)\n"
    text = script(run, 400, after=after)
    job = run.start("--elastic", "1:4", "-n", "2", "--master", f"127.0.0.1:{port}", text, env=token)
    wait_for(lambda: (run.folder / "began-0").exists(), "the loop")
    joined = run.start("-n", "3", f"127.0.0.1:{port + 1}", text, env=token, command="join")
    wait_for(lambda: len(list(run.folder.glob("saved-*"))) == 1, "the one that is turned away")
    (run.folder / "enough").touch()
    assert (job.finish(), joined.finish()) == (0, 0), job.err + joined.err
    assert re.search(r"rank \d was lost: exit code 3; 2 of 3 ranks are left", joined.err)
    assert len(done(joined)) == 2


def test_a_wrong_address_to_join(run: Runner) -> None:
    text = run.script("import phalanx as px\npx.init(timeout=1)\n")
    job = run.start("127.0.0.1:9", text, env={"PHALANX_TOKEN": "a token for this test only"}, command="join")
    assert job.finish() != 0
    assert "a new rank could not reach the directory at 127.0.0.1:9" in job.err + job.out
    assert "`phalanx run --elastic` prints the address" in job.err + job.out


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
