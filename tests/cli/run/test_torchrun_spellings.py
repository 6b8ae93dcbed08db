"""`phalanx run` with torchrun's options: its spellings, programs of another kind, and starting again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.run.support import Runner, run  # noqa: F401
from tests.ports import free_port

FAILS_TWICE = """
    import os, sys
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print("restart", restarts, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"])
    sys.exit(3 if restarts < 2 and os.environ["RANK"] == "1" else 0)
"""


@pytest.mark.parametrize("option", ["--nproc-per-node", "--nproc_per_node", "--nproc", "-n"])
def test_the_number_of_ranks(run: Runner, option: str) -> None:
    job = run(option, "2", run.script("import os; print(os.environ['WORLD_SIZE'])"))
    assert job.process.returncode == 0, job.err
    assert sorted(job.out.splitlines()) == ["[0] 2", "[1] 2"]


def test_a_meeting_point_by_torchruns_name(run: Runner) -> None:
    script = run.script("import os; print(os.environ['MASTER_ADDR'])")
    job = run("-n", "1", "--nnodes", "1", "--node_rank", "0", "--rdzv-endpoint", "localhost:0", script)
    assert job.process.returncode == 0, job.err
    assert job.out == "[0] localhost\n"


@pytest.mark.parametrize(
    ("words", "master"),
    [
        ("--standalone --nnodes=1:1", "127.0.0.1"),
        ("--master-addr localhost --master-port {port} --rdzv-backend static", "localhost {port}"),
    ],
)
def test_words_that_are_ours_by_another_name(run: Runner, words: str, master: str) -> None:
    port = str(free_port())
    script = run.script("import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])")
    job = run(*words.format(port=port).split(), script)
    assert job.process.returncode == 0, job.err
    assert job.out.startswith(f"[0] {master.format(port=port)}")


def test_a_program_that_is_not_python(run: Runner) -> None:
    job = run("-n", "2", "--no-python", "echo", "hello")
    assert job.process.returncode == 0, job.err
    assert sorted(job.out.splitlines()) == ["[0] hello", "[1] hello"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--no-python", "no-such-program"], "there is no program 'no-such-program'"),
        (["--no-python", "-m", "json"], "--no-python does not go with -m"),
        (["--standalone", "--nnodes", "2", "script.py"], "--standalone is for a job on one node, but --nnodes is 2"),
        (["--nnodes", "1:3", "script.py"], "the number of nodes is fixed: give one number"),
        (["--nnodes", "0", "script.py"], "expected a number from 1"),
        (["--master-port", "29500", "script.py"], "--master-port needs --master-addr"),
        (["--master", "a:1", "--master-addr", "b", "script.py"], "say the same: give one of them"),
        (["--rdzv-backend", "etcd", "script.py"], "is not one of 'c10d', 'static'"),
        (["--max-restarts", "1", "--nnodes", "2", "--master", "x:29500", "script.py"], "is for a single node"),
    ],
)
def test_what_cannot_be(run: Runner, words: list[str], reason: str) -> None:
    job = run(*words, env={"PHALANX_TOKEN": "secret"})
    assert job.process.returncode == 2
    assert reason in job.err


@pytest.mark.parametrize("word", ["-n", "--nproc-per-node=3"])
def test_a_number_of_ranks_behind_the_script(run: Runner, word: str) -> None:
    script = run.script("import sys; print(sys.argv[1:])")
    refused = run(script, word, "3")
    assert refused.process.returncode == 2
    assert f"{word} stands behind the script" in refused.err
    meant = run("-n", "1", script, word, "3")
    assert meant.process.returncode == 0
    assert meant.out == f"[0] {[word, '3']}\n"


def test_a_job_that_fails_is_started_again(run: Runner, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    job = run("-n", "2", "--max-restarts", "2", "--log-dir", str(logs), run.script(FAILS_TWICE))
    assert job.process.returncode == 0, job.err
    assert [line for line in job.out.splitlines() if line.startswith("[0]")] == [
        f"[0] restart {number} of 2" for number in range(3)
    ]
    assert job.err.count("phalanx: rank 1 failed: exit code 3\n") == 2
    assert "phalanx: starting all ranks again (2 of 2 times)" in job.err
    assert (logs / "restart-2" / "rank-1.stdout.log").read_text() == "restart 2 of 2\n"
    assert (logs / "rank-1.stdout.log").read_text() == "restart 0 of 2\n"


def test_the_last_failure_is_the_jobs(run: Runner) -> None:
    job = run("-n", "2", "--max-restarts", "1", run.script(FAILS_TWICE))
    assert job.process.returncode == 3
    assert job.err.count("rank 1 failed: exit code 3\n") == 2
    assert job.err.count("starting all ranks again") == 1
