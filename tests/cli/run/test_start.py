"""`phalanx run` starts what it was asked to, with the right variables, and refuses what cannot work."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.run.support import Runner, lines_of, run  # noqa: F401

SHOW = """
    import json, os, sys
    names = sys.argv[1].split(",")
    print(json.dumps({name: os.environ.get(name) for name in names}))
"""


def shown(text: str, rank: int) -> dict[str, str | None]:
    (line,) = lines_of(text, rank)
    found: dict[str, str | None] = json.loads(line)
    return found


def test_torchrun_variables(run: Runner) -> None:
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "PHALANX_TOKEN",
        "PHALANX_DIRECTORY",
        "PHALANX_RUN_ID",
        "PYTHONUNBUFFERED",
    ]
    job = run("-n", "3", run.script(SHOW), ",".join(names), env={"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert job.process.returncode == 0, job.err
    ranks = [shown(job.out, rank) for rank in range(3)]
    for rank, env in enumerate(ranks):
        assert (env["RANK"], env["LOCAL_RANK"], env["ROLE_RANK"]) == (str(rank),) * 3
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["ROLE_WORLD_SIZE"]) == ("3",) * 3
        assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["TORCHELASTIC_USE_AGENT_STORE"] is None, "an outer torchrun's store is not this job's"
        assert env["PYTHONUNBUFFERED"] == "1"
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "PHALANX_TOKEN", "PHALANX_DIRECTORY", "PHALANX_RUN_ID"):
        assert ranks[0][name]
        assert len({env[name] for env in ranks}) == 1
    host, _, port = str(ranks[0]["PHALANX_DIRECTORY"]).rpartition(":")
    assert host == "127.0.0.1"
    assert port not in ("0", ranks[0]["MASTER_PORT"])
    assert str(ranks[0]["PHALANX_TOKEN"]) not in job.err


def test_each_job_has_a_token_of_its_own(run: Runner) -> None:
    script = run.script(SHOW)
    tokens = {shown(run(script, "PHALANX_TOKEN", env={"PHALANX_TOKEN": "outer"}).out, 0)["PHALANX_TOKEN"] for _ in "ab"}
    assert len(tokens) == 2
    assert "outer" not in tokens
    assert all(len(str(token)) >= 32 for token in tokens)


def test_token_file(run: Runner, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from the file\n")
    file.chmod(0o600)
    job = run("--token-file", str(file), run.script(SHOW), "PHALANX_TOKEN")
    assert shown(job.out, 0)["PHALANX_TOKEN"] == "from the file"
    file.chmod(0o644)
    job = run("--token-file", str(file), run.script(SHOW), "PHALANX_TOKEN")
    assert job.process.returncode == 2
    assert "--token-file" in job.err
    assert "chmod 600" in job.err


def test_new_token(run: Runner) -> None:
    first, second = run("--new-token"), run("--new-token")
    assert first.process.returncode == 0
    assert first.out != second.out
    assert len(first.out.strip()) == 64


def test_master_port_is_free_for_a_store_and_for_nobody_else(run: Runner) -> None:
    script = run.script(
        """
        import os, socket
        port = int(os.environ["MASTER_PORT"])
        taken = socket.socket()
        try:
            taken.bind(("127.0.0.1", port))
        except OSError:
            print("not by chance")
        store = socket.socket(socket.AF_INET6)
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("::", port))
        store.listen()
        client = socket.create_connection(("127.0.0.1", port))
        print("connected")
        """
    )
    job = run(script)
    assert lines_of(job.out, 0) == ["not by chance", "connected"], job.err


def test_arguments_go_to_the_script_untouched(run: Runner) -> None:
    script = run.script("import json, sys; print(json.dumps(sys.argv[1:]))")
    arguments = ["-n", "7", "--log-dir", "x", "--help", "", "a b", "-m", "--", "ü"]
    job = run("-n", "2", script, *arguments)
    for rank in (0, 1):
        assert [json.loads(line) for line in lines_of(job.out, rank)] == [arguments]


def test_module(run: Runner) -> None:
    package = run.folder / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tool.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    job = run("-n", "2", "-m", "pack.tool", "-n", "x")
    assert lines_of(job.out, 1) == ["__main__ pack ['-n', 'x']"], job.err


def test_script_sees_itself_as_under_plain_python(run: Runner) -> None:
    script = run.script("import sys; print(sys.argv[0], sys.path[0], __file__, sys.flags.isolated, sys.flags.no_site)")
    job = run(script)
    assert lines_of(job.out, 0) == [f"{script} {run.folder} {script} 0 0"]


def test_env_option_and_threads(run: Runner) -> None:
    script = run.script(SHOW)
    job = run("-n", "2", "--env", "A=1=2", "--env", "B=", script, "A,B,OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    assert shown(job.out, 1) == {"A": "1=2", "B": "", "OMP_NUM_THREADS": str(max(1, cores // 2))}
    job = run("-n", "2", script, "OMP_NUM_THREADS", env={"OMP_NUM_THREADS": "5"})
    assert shown(job.out, 0) == {"OMP_NUM_THREADS": "5"}


def test_auto_is_one_rank_per_core(run: Runner) -> None:
    job = run("-n", "auto", run.script(SHOW), "WORLD_SIZE")
    assert shown(job.out, 0)["WORLD_SIZE"] == str(len(os.sched_getaffinity(0)))


def test_rank_0_reads_standard_input_and_the_others_nothing(run: Runner) -> None:
    job = run.start("-n", "2", run.script("import sys; print(repr(sys.stdin.read()))"), stdin=subprocess.PIPE)
    out, _ = job.process.communicate(b"to rank 0", timeout=60)
    assert lines_of(out.decode(), 0) == ["'to rank 0'"]
    assert lines_of(out.decode(), 1) == ["''"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors(run: Runner, closed: str) -> None:
    script = run.script("import sys, pathlib; print('x'); pathlib.Path(sys.argv[1]).touch()")
    witness = run.folder / "witness"
    command = [sys.executable, "-c", "from phalanx.cli import main; main()", "run", script, str(witness)]
    quoted = subprocess.list2cmdline(command).replace('"', "'")
    done = subprocess.run(["/bin/sh", "-c", f"{quoted} {closed}"], env=run.environment(), timeout=60, check=False)
    assert done.returncode == 0
    assert witness.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", "x.py"], ["'0' is not valid", "auto"]),
        (["-n", "two", "x.py"], ["'two' is not valid"]),
        (["nowhere.py"], ["no script 'nowhere.py'", "-m"]),
        (["python", "train.py"], ["no script 'python'", "phalanx run -n 4 train.py"]),
        (["--master", "host", "x.py"], ["'host' is not valid", "host:port"]),
        (["--nnodes", "2", "here.py"], ["--master HOST:PORT"]),
        (["--nnodes", "2", "--master", "a:1", "here.py"], ["PHALANX_TOKEN", "--token-file", "phalanx run --new-token"]),
        (["--nnodes", "2", "--node-rank", "2", "here.py"], ["--node-rank 2 is not valid", "0 to 1"]),
        (["--nnodes", "2", "--master", "a:65535", "here.py"], ["--directory-port"]),
        (["--env", "RANK=3", "here.py"], ["sets RANK itself"]),
        (["--env", "A", "here.py"], ["KEY=VALUE"]),
        (["--grace", "-1", "here.py"], ["--grace"]),
        ([], ["SCRIPT|MODULE"]),
    ],
)
def test_refuses(run: Runner, arguments: list[str], words: list[str]) -> None:
    run.script("", "here.py")
    job = run(*arguments)
    assert job.process.returncode == 2
    for word in words:
        assert word in " ".join(job.err.split())


def test_directory_port_in_use(run: Runner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        job = run("--directory-port", str(port), run.script("print('started')"))
    assert job.process.returncode == 1
    assert str(port) in job.err
    assert "--directory-port" in job.err
    assert "started" not in job.out


def test_a_job_inside_a_job(run: Runner) -> None:
    inner = run.script("import os; print('inner', os.environ['PHALANX_RUN_ID'])", "inner.py")
    outer = run.script(
        f"""
        import os, subprocess, sys
        print("outer", os.environ["PHALANX_RUN_ID"])
        sys.exit(subprocess.call([sys.executable, "-c", "from phalanx.cli import main; main()", "run", {inner!r}]))
        """
    )
    job = run("--no-prefix", outer)
    assert job.process.returncode == 0, job.err
    (first, second) = job.out.splitlines()
    assert second.split()[-1].startswith(first.split()[1] + ".")


def test_no_room_for_notes_is_said_once(run: Runner) -> None:
    """The job goes on. A memory file system that is too small for the notes of two ranks."""
    folder = run.folder / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k,mode=700", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user cannot mount a file system")
    try:
        script = run.script("import phalanx as px\nwith px.init() as world:\n    world.barrier()\n")
        job = run("-n", "2", script, env={"PHALANX_SLATE_DIR": str(folder)})
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert job.process.returncode == 0, job.err
    assert job.err == (
        "phalanx: `phalanx top`, --page, --trace and --metrics do not see all ranks, because there is no room for "
        f"their notes: {folder} has room for 300 KiB, and they need 488\n"
    )
