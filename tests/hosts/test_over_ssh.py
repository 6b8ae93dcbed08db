"""One job on two hosts with networks of their own, started from a third place over a stand-in for ssh."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tests.cli.run.hosts import stand_in_ssh
from tests.hosts.network import TALK, Network
from tests.launchers.processes import Jobs, wait_until


def test_a_hostfile(network: Network, jobs: Jobs) -> None:
    (jobs.folder / "hosts").write_text(f"{network.first.ipv4} slots=2\n{network.second.ipv4}:2\n")
    namespaces = [f"{host.ipv4}={host.namespace}" for host in (network.first, network.second)]
    ssh = shlex.join([sys.executable, str(Path(stand_in_ssh.__file__)), *namespaces])
    job = jobs.start(sys.executable, "-m", "phalanx", "run", "--hostfile", "hosts", "--ssh", ssh, str(TALK))
    assert job.finish() == 0, job.err
    lines = {line["rank"]: line for line in job.lines}
    assert sorted(lines) == [0, 1, 2, 3]
    for rank, line in lines.items():
        assert line["local_world_size"] == 2
        assert line["heard"] == {str(peer): 100 * peer + rank for peer in range(4) if peer != rank}


def test_a_host_that_falls_silent(network: Network, jobs: Jobs) -> None:
    """Its cable is cut: the others hear it from the directory, and what is cut off ends, too."""
    (jobs.folder / "hosts").write_text(f"{network.first.ipv4}:1\n{network.second.ipv4}:1\n")
    (jobs.folder / "wait.py").write_text(
        "import pathlib, time\nimport phalanx as px\nworld = px.init()\nworld.barrier()\n"
        "pathlib.Path(f'ready-{world.rank}').touch()\nworld.recv(src=1 - world.rank, timeout=60)\n"
    )
    namespaces = [f"{host.ipv4}={host.namespace}" for host in (network.first, network.second)]
    ssh = shlex.join([sys.executable, str(Path(stand_in_ssh.__file__)), *namespaces])
    job = jobs.start(sys.executable, "-m", "phalanx", "run", "--hostfile", "hosts", "--ssh", ssh, "wait.py")
    wait_until(lambda: all((jobs.folder / f"ready-{rank}").exists() for rank in (0, 1)), "both ranks")
    network.second.cut()
    assert job.finish() == 1
    assert "ending all ranks" in job.err
    assert "lost" in job.err


def test_the_self_test_between_hosts(network: Network, jobs: Jobs) -> None:
    hosts = f"{network.first.ipv4}:2,{network.second.ipv4}:1"
    namespaces = [f"{host.ipv4}={host.namespace}" for host in (network.first, network.second)]
    ssh = shlex.join([sys.executable, str(Path(stand_in_ssh.__file__)), *namespaces])
    job = jobs.start(
        sys.executable, "-m", "phalanx", "doctor", "--selftest", "--hosts", hosts, "--ssh", ssh, env={"TERM": "dumb"}
    )
    assert job.finish() == 0, job.err
    assert "(rank 0) to " in job.out
    assert "(rank 2): a message of 8 B in " in job.out
