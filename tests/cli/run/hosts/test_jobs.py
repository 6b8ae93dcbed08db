"""Jobs on several hosts, with a stand-in for ssh that runs everything here: beginning, output, failures, the end."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
from tests.cli.run.support import Launched, Runner, alive, run, wait_for  # noqa: F401  (a fixture)

STAND_IN = shlex.join([sys.executable, str(Path(__file__).with_name("stand_in_ssh.py"))])

HELLO = """
    import contextlib, os, sys
    import phalanx as px

    with px.init() as world:
        token = os.environ["PHALANX_TOKEN"].encode()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has just ended
                assert token not in open(f"/proc/{pid}/cmdline", "rb").read()
        world.barrier()
        print("rank", world.rank, "of", world.world_size, "node", os.environ["GROUP_RANK"], *sys.argv[1:])
"""

WAIT = """
    import pathlib, sys, time
    import phalanx as px

    world = px.init()
    world.barrier()
    pathlib.Path(f"ready-{world.rank}").touch()
    time.sleep(60)
"""


def waiting_job(run: Runner, hosts: str = "alpha,beta", **popen: object) -> Launched:
    """A job of two that sleeps, once it does."""
    job = run.start("--hosts", hosts, "--ssh", STAND_IN, run.script(WAIT), **popen)
    wait_for(lambda: all((run.folder / f"ready-{rank}").exists() for rank in (0, 1)), "both ranks")
    return job


def ssh_to(run: Runner, host: str) -> int:
    """The process of the stand-in for a host."""
    (pid,) = (pid for pid, line in alive(run.mark).items() if "stand_in_ssh.py" in line and f" {host} cd " in line)
    return pid


def test_hosts_of_different_size(run: Runner) -> None:
    (run.folder / "hosts").write_text("alpha slots=2\nbeta:1\n")
    job = run("--hostfile", "hosts", "--ssh", STAND_IN, run.script(HELLO), "one", "--two")
    assert job.process.returncode == 0, job.err
    assert sorted(job.out.splitlines()) == [
        "[0] rank 0 of 3 node 0 one --two",
        "[1] rank 1 of 3 node 0 one --two",
        "[2] rank 2 of 3 node 1 one --two",
    ]
    assert job.err == ""


def test_this_machine_needs_no_ssh(run: Runner) -> None:
    job = run("-n", "2", "--hosts", "localhost", "--ssh", "/nowhere/ssh", run.script(HELLO))
    assert job.process.returncode == 0, job.err
    assert sorted(job.out.splitlines()) == ["[0] rank 0 of 2 node 0", "[1] rank 1 of 2 node 0"]


def test_a_rank_that_fails_on_another_host(run: Runner) -> None:
    script = run.script("""
        import phalanx as px

        world = px.init()
        if world.rank == 2:
            raise SystemExit(7)
        world.barrier()
    """)
    job = run("--hosts", "alpha:2,beta:2", "--ssh", STAND_IN, script)
    assert job.process.returncode == 7
    assert job.err.count("; ending all ranks\n") == 1, job.err
    verdict = job.err.partition("-" * 72)[2]
    assert verdict.startswith("\nphalanx: rank 2 failed: exit code 7\n  on beta, process"), job.err
    assert "its traceback" not in verdict  # it has none, and another rank's is not its own
    assert job.err.splitlines()[-1] == "phalanx: 3 ranks ended because of it"


def test_a_job_on_two_hosts_is_shown_where_it_was_started(run: Runner) -> None:
    """Its page hears how it ends, although the rank that fails is on the other host."""
    script = run.script("""
        import os, time
        import numpy as np
        import phalanx as px

        with px.init() as world:
            while not os.path.exists("go"):
                time.sleep(0.01)
                world.all_reduce(np.ones(8))
            if world.rank == 1:
                raise ValueError("no such thing")
            world.barrier()
    """)
    folder = run.folder / "elsewhere"
    folder.mkdir()
    files = ["--trace", str(folder / "trace.json"), "--metrics", str(folder / "job.prom")]
    job = run.start("--hosts", "alpha,beta", "--ssh", STAND_IN, "--page", *files, script)
    first = job.process.stderr.readline().decode()  # type: ignore[union-attr]
    found = re.fullmatch(r"phalanx: this job is at http://127\.0\.0\.1:(\d+)/([^/]+)/\n", first)
    assert found, first
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
    connection.request("GET", f"/{found[2]}/events")
    answer = connection.getresponse()
    while not (line := answer.readline()).startswith(b'data: {"job"') or len(json.loads(line[6:])["ranks"]) < 2:
        assert line, "the page has ended"
    (run.folder / "go").touch()
    end = {"failed": "rank 1 failed: ValueError: no such thing"}
    assert answer.read().rpartition(b"event: end\ndata: ")[2] == json.dumps(end).encode() + b"\n\n"
    connection.close()
    assert job.finish() == 1
    events = json.loads((folder / "trace.json").read_text())
    assert {event["pid"] for event in events if event.get("cat") == "collective"} == {0, 1}
    assert 'phalanx_rank_up{rank="1"' in (folder / "job.prom").read_text()


def test_there_is_nothing_to_show_of_one_rank(run: Runner) -> None:
    job = run("--hosts", "alpha", "--ssh", STAND_IN, "--page", run.script(HELLO))
    assert job.process.returncode == 0, job.err
    assert job.err == "phalanx: --page: a job of one rank has nothing to show (it waits for nobody)\n"


def test_a_trace_that_cannot_be_written(run: Runner) -> None:
    job = run("--hosts", "alpha,beta", "--ssh", STAND_IN, "--trace", "/dev/full", run.script(HELLO))
    assert job.process.returncode == 0, job.err
    assert job.err == "phalanx: the trace in /dev/full is incomplete: No space left on device\n"


def test_ctrl_c_ends_all(run: Runner) -> None:
    job = waiting_job(run)
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130
    assert "phalanx: got SIGINT; ending all ranks" in job.err
    run.assert_nothing_left()


def test_a_connection_that_is_lost_ends_all(run: Runner) -> None:
    job = waiting_job(run)
    os.kill(ssh_to(run, "beta"), signal.SIGKILL)
    assert job.finish() == 1
    assert "phalanx: host beta was lost: its connection ended (exit code 137)" in job.err
    run.assert_nothing_left(20.0)


def test_a_controller_that_is_killed_leaves_nothing(run: Runner) -> None:
    job = waiting_job(run)
    job.process.kill()
    job.finish()
    run.assert_nothing_left(20.0)


def test_hosts_that_do_not_come_up_are_all_named(run: Runner) -> None:
    job = run("--hosts", "nowhere,alpha,locked", "--ssh", STAND_IN, run.script(HELLO))
    assert job.process.returncode == 1
    assert job.out == ""
    first, second = job.err.splitlines()
    assert first == (
        "phalanx: host nowhere cannot be reached by ssh: ssh: Could not resolve hostname nowhere: Name or service not "
        "known (there is no such host: is the name spelt right?)"
    )
    assert second.startswith("phalanx: host locked cannot be reached by ssh: root@locked: Permission denied")
    run.assert_nothing_left(5.0)


OTHER = """#!/bin/sh
fields='"version": "0.0.1", "python": "3.9", "hostname": "b", "ports": [1, 2]'
printf '\\036phalanx-node {"kind": "hello", %s}\\n' "$fields" >&2
read line
"""


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("/nowhere/python", "host alpha: there is no /nowhere/python there (--remote-python names"),
        ("other", "but host alpha has 0.0.1 (install the same on all)"),
    ],
)
def test_another_python_there(run: Runner, python: str, words: str) -> None:
    if python == "other":
        path = run.folder / "other"
        path.write_text(OTHER)
        path.chmod(0o755)
        python = str(path)
    job = run("--hosts", "alpha", "--ssh", STAND_IN, "--remote-python", python, run.script(HELLO))
    assert job.process.returncode == 1
    assert words in job.err, job.err


def test_a_script_that_is_not_there(run: Runner) -> None:
    job = run("--hosts", "alpha,beta", "--ssh", STAND_IN, "missing.py")
    assert job.process.returncode == 1
    assert "there is no script 'missing.py'" in job.err
    assert job.err.count("missing.py") == 1


def test_the_first_host_cannot_be_called_localhost(run: Runner) -> None:
    ssh = f"env -u SSH_CONNECTION {STAND_IN} alpha=none"
    job = run("--hosts", "localhost,beta", "--ssh", ssh, run.script(HELLO))
    assert job.process.returncode == 1
    assert "the first host is called localhost, where beta would look for itself" in job.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hosts", "a", "--hostfile", "b"], "both name the hosts"),
        (["--hosts", "a", "--nnodes", "2"], "--nnodes does not go with --hosts"),
        (["--hosts", "a", "--standalone"], "--standalone is for a job on one node, and does not go with --hosts"),
        (["--hosts", "a", "--max-restarts", "2"], "--max-restarts is for a single node"),
        (["--hosts", "a", "--ssh", "no such program"], "cannot start 'no': No such file"),
        (["--hosts", "a,b", "--trace", "/nowhere/trace.json"], "there is no folder /nowhere"),
        (["--hosts", "a,b", "--trace", "."], "--trace . is not valid (it is a folder; expected a file)"),
        (["--hosts", "a", "--env", "RANK=1"], "`phalanx run` sets RANK itself"),
        (["--ssh", "ssh"], "--ssh is for --hosts or --hostfile"),
    ],
)
def test_options_that_do_not_go_together(run: Runner, options: list[str], words: str) -> None:
    job = run(*options, run.script(HELLO))
    assert job.process.returncode in (1, 2)
    assert words in job.err
