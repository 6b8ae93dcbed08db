"""`phalanx top` on real jobs: it must answer while all ranks hang."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from tests.cli.run.support import PROGRAM, Runner
from tests.lateness import bound

from phalanx.cli import top as top_command
from phalanx.cli.top.screen import as_text, in_units, render
from phalanx.seeing.slates import JobHere, jobs_here, read_files
from phalanx.seeing.watch import JobWatch

HANG = """
import numpy as np
import phalanx as px

def spin():
    while True:
        sum(range(1000))

with px.init() as world:
    for _ in range(50):
        world.all_reduce(np.ones(8))
    if world.rank == 2:
        spin()
    world.all_reduce(np.ones(8))
"""
BRANCH = """
import numpy as np
import phalanx as px

with px.init() as world:
    world.barrier()
    if world.rank == 1:
        world.recv(src=0, tag=7)
    else:
        world.all_reduce(np.ones(8))
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    yield runner
    runner.clean_up()


def job_of(script: str) -> str:
    """The name of the job that runs a script, once it has come so far."""
    end = time.monotonic() + bound(30)
    while time.monotonic() < end:
        for job in jobs_here():
            if job.program.endswith(script) and job.alive and len(job.ranks) == job.world_size:
                return job.job
        time.sleep(0.02)
    raise AssertionError(f"no job runs {script}")


def until_found(job: str, kind: str) -> tuple[Any, float]:
    """Looks until something is found; returns it, and for how long the ranks had been waiting."""
    watch = JobWatch(lambda: read_files(job))
    end = time.monotonic() + bound(30)
    while time.monotonic() < end:
        picture = watch.look()
        for finding in picture.findings if picture is not None else []:
            if finding.kind == kind:
                return finding, finding.seconds
        time.sleep(0.05)
    raise AssertionError(f"nothing of kind {kind} was found")


def top(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [*PROGRAM, "top", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )


def test_a_rank_in_an_endless_loop_is_named_with_its_line(run: Runner, tmp_path: Path) -> None:
    script = run.script(HANG, "hang.py")
    token = tmp_path / "token"
    token.write_text("the secret of this job")
    token.chmod(0o600)
    launched = run.start("-n", "3", "--token-file", str(token), script)
    job = job_of(script)
    found, seconds = until_found(job, "blocked")
    assert found.ranks == [2]
    assert found.where.startswith("hang.py:7 in spin") or found.where.startswith("hang.py:6 in spin")
    assert seconds < bound(1.0)
    answer = top("--once", job)
    assert answer.returncode == 0, answer.stderr
    assert "ranks 0, 1 wait in all_reduce #51 at hang.py:14 in <module>, because rank 2 is at hang.py" in answer.stdout
    picture = json.loads(top("--once", "--json", job).stdout)
    assert [rank["waits_for"] for rank in picture["ranks"]] == [[2], [2], []]
    # The same by way of the directory, for whoever has the token.
    [slate] = [slate for rank, slate in read_files(job).items() if rank == 0]
    address = slate.text("directory")
    afar = top("--once", "--address", address, "--token-file", str(token))
    assert "because rank 2 is at hang.py" in afar.stdout, afar.stderr
    assert "clocks within" in afar.stdout
    stranger = top("--once", "--address", address, PHALANX_TOKEN="a guess")
    assert stranger.returncode == 1
    assert "tokens differ" in stranger.stderr
    launched.process.terminate()
    launched.finish()
    # Kept for `doctor --last`.
    assert [job.failed for job in jobs_here() if job.program.endswith(script)] == [True]


def test_after_ctrl_c_the_last_failure_says_who_blocked_whom(run: Runner) -> None:
    script = run.script(HANG, "ctrl_c.py")
    launched = run.start("-n", "3", script)
    until_found(job_of(script), "blocked")
    launched.process.send_signal(signal.SIGINT)
    launched.finish()
    answer = subprocess.run(
        [*PROGRAM, "doctor", "--last"], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    waits = "ranks 0, 1 wait in all_reduce #51 at ctrl_c.py:14 in <module>, because rank 2"
    last, place = r"all_reduce #50 at ctrl_c.py:11 in <module>", r"at ctrl_c.py:([67] in spin|9 in <module>)"
    # It is ended with the others, and may not have come to say so itself, or is already at the end of its `with`.
    ways = rf"{waits} (has failed after {last}, {place}|is gone; it was last seen {place}, after {last})"
    assert re.search(ways, re.sub(r"\s+", " ", answer)), answer


def test_a_receive_that_was_posted_early_is_not_waited_in(run: Runner) -> None:
    script = run.script(
        """
        import time
        import numpy as np
        import phalanx as px

        with px.init() as world:
            x = np.ones(8)
            handle = world.irecv(x, 1, tag=7) if world.rank == 0 else None
            for _ in range(40):
                time.sleep(0.05)
                world.all_reduce(np.ones(8))
            world.send(x, 0, tag=7) if world.rank == 1 else None
            if handle is not None:
                handle.wait()
            time.sleep(0.5)
        """,
        "early.py",
    )
    launched = run.start("-n", "2", script)
    job = job_of(script)
    watch = JobWatch(lambda: read_files(job))
    while (picture := watch.look()) is None or picture.running:
        found = picture.findings if picture is not None else []
        assert not any("recv" in finding.text for finding in found), found
        time.sleep(0.1)
    launched.finish()
    assert launched.process.returncode == 0, launched.err
    received = [site for site in picture.sites if site.verb == "recv"]
    assert [site.count for site in received] == [1]


def test_a_rank_that_took_another_branch_is_named(run: Runner) -> None:
    script = run.script(BRANCH, "branch.py")
    launched = run.start("-n", "3", script)
    found, seconds = until_found(job_of(script), "blocked")
    assert set(found.ranks) <= {0, 1, 2}
    assert "rank 1 is in recv at branch.py:8" in found.text
    assert seconds < bound(1.0)
    launched.process.terminate()
    launched.finish()


@pytest.mark.parametrize("late", [1, None])
def test_the_last_line_names_a_straggler_and_nobody_else(run: Runner, late: int | None) -> None:
    script = run.script(
        f"""
        import time
        import numpy as np
        import phalanx as px

        with px.init() as world:
            x = np.ones(8)
            for _ in range(1000):
                if world.rank == {late}:
                    time.sleep(0.003)
                world.all_reduce(x)
        """,
        "late.py",
    )
    launched = run("-n", "2", script)
    assert launched.process.returncode == 0, launched.err
    assert [job for job in jobs_here() if job.program.endswith(script)] == []
    if late is None:
        assert "made the others wait" not in launched.err
    else:
        assert "phalanx: rank 1 made the others wait" in launched.err
        assert "mostly in all_reduce at late.py:11 in <module>" in launched.err


def test_no_job(tmp_path: Path) -> None:
    answer = top("--once", "nosuchjob")
    assert answer.returncode == 1
    assert "no job 'nosuchjob' runs on this machine" in answer.stderr


def test_a_picture_as_text() -> None:
    from tests.seeing.support import Op, slate

    slates = {rank: slate(rank, [Op(1, 0, 1), Op(2, 2 + 3 * rank, 6)], place="train.py:3 in f") for rank in (0, 1)}
    watch = JobWatch(lambda: slates, lambda: 1_010_000_000)
    picture = watch.look()
    assert picture is not None
    text = as_text(picture)
    assert "train.py   job job, 2 ranks" in text
    assert "all_reduce at train.py:88 in main" in text
    assert "nobody waits for long" in text


def test_all_is_well_only_if_that_is_known() -> None:
    from tests.seeing.support import Op, slate

    def words(slates: dict[int, Any]) -> str:
        picture = JobWatch(lambda: slates, lambda: 2_310_000_000).look()
        assert picture is not None
        assert picture.findings == []
        return as_text(picture).splitlines()[1].strip()

    alone = {0: slate(0, [Op(1, 0, 1)])}
    assert words(alone) == "1 of 2 ranks can be seen, so nobody knows who waits for the others"
    in_turn = [[Op(n, 100 * n + 90 * (n % 3 == rank), 100 * n + 95) for n in range(1, 13)] for rank in range(3)]
    waiting = {rank: slate(rank, operations, members=(0, 1, 2)) for rank, operations in enumerate(in_turn)}
    assert words(waiting).startswith("no rank is always later than the others, but rank ")


def test_names_of_files_are_shown_as_they_are() -> None:
    from tests.seeing.support import Op, slate

    site = "all_reduce\0/home/me/train [v2] :x:\x1b[31m.py\0main\x008"
    place = "train [v2] :x:\x1b[31m.py:9 in main"
    slates = {rank: slate(rank, [Op(1, 0, 1, site)], place=place) for rank in (0, 1)}
    picture = JobWatch(lambda: slates, lambda: 1_010_000_000).look()
    assert picture is not None
    text = as_text(picture)
    assert "all_reduce at train [v2] :x:\N{REPLACEMENT CHARACTER}[31m.py:8 in main" in text
    assert " train [v2] :x:\N{REPLACEMENT CHARACTER}[31m.py:9 in main" in text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_numbers_are_never_cut(width: int) -> None:
    from rich.console import Console
    from tests.seeing.support import Op, slate

    site = "all_reduce\0/home/me/train_for_a_long_time.py\0main_of_the_program\x008"
    operations = [Op(n, 10 * n, 10 * n + 1.5, site, bytes=3 << 20) for n in range(1, 60)]
    slates = {rank: slate(rank, operations, place="train_for_a_long_time.py:9 in main") for rank in (0, 1)}
    picture = JobWatch(lambda: slates, lambda: 17_210_000_000).look()
    assert picture is not None
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(picture, width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    at = next(number for number, line in enumerate(lines) if line.lstrip().startswith("rank "))
    headings = re.split(r"  +", lines[at].strip())
    cells = re.split(r"  +", lines[at + 1].strip())
    assert headings[:2] == ["rank", "does"]
    found = dict(zip(headings, cells, strict=False))
    assert found["rank"] == "0"
    if width >= 60:
        assert found["since"] == "15.6 s"
    if width >= 100:
        assert "ops/s" in headings
    assert "…" not in "".join(cells) or next(name for name in found if "…" in found[name]) == "at"


def test_of_several_jobs_the_one_that_began_last_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [
        JobHere(name, f"{name}.py", 2, [0, 1], alive, not alive, beat, began)
        for name, alive, beat, began in [("old", True, 9, 1), ("new", True, 8, 3), ("over", False, 7, 5)]
    ]
    monkeypatch.setattr(top_command, "jobs_here", lambda: jobs)
    assert top_command._choose(None) == (jobs[1], "the job that began last; others: old (old.py)")
    assert top_command._choose("o") == (jobs[0], "")


def test_where_nothing_can_be_drawn_pictures_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for term, draws in (("xterm", True), ("dumb", False)):
        monkeypatch.setenv("TERM", term)
        assert top_command._can_draw() == draws


def test_ctrl_c_ends_printing_as_it_ends_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(watch: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(top_command, "_print", interrupted)
    monkeypatch.setattr(top_command, "_choose", lambda name: (SimpleNamespace(job="job"), ""))
    result = CliRunner().invoke(top_command.command, ["--json"])
    assert (result.exit_code, result.output) == (0, "")


def test_a_full_disk_is_named() -> None:
    script = (
        "from tests.seeing.support import Op, slate\n"
        "from phalanx.cli import main\n"
        "from phalanx.cli import top\n"
        "from types import SimpleNamespace\n"
        "top._choose = lambda name: (SimpleNamespace(job='job'), '')\n"
        "top.read_files = lambda job: {rank: slate(rank, [Op(1, 0, 1)]) for rank in (0, 1)}\n"
        "main(['top', '--once'])\n"
    )
    with open("/dev/full", "w") as full:
        answer = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (answer.returncode, answer.stderr) == (
        1,
        b"phalanx: the output cannot be written: No space left on device\n",
    )


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    answer = top("--once", "--address", "127.0.0.1:1", PHALANX_TOKEN="a token")
    assert answer.stderr.startswith("phalanx: could not reach the directory at 127.0.0.1:1 within 5 s: Connection ref")
    assert "MASTER" not in answer.stderr
    answer = top("--once", "--address", "127.0.0.1:1", "--token-file", str(tmp_path / "nothing"))
    assert f"--token-file {tmp_path / 'nothing'} cannot be read" in answer.stderr


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 << 20, "200 MiB")])
def test_units(count: int, text: str) -> None:
    assert in_units(count) == text
