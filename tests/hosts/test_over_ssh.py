"""One job on two hosts with networks of their own, started from a third place over a stand-in for ssh."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from tests.cli.run.hosts import stand_in_ssh
from tests.hosts.network import TALK, Network
from tests.launchers.processes import Job, Jobs, wait_until


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


# On a real second host the notes of its ranks lie in other memory. `ip netns exec` gives each its own mounts.
OWN_MEMORY = """#!/bin/sh
mount -t tmpfs none /dev/shm && exec {python} "$@"
"""
REDUCE = """
import sys, time
import numpy as np
import phalanx as px

with px.init() as world:
    for _ in range(60):
        time.sleep(0.02)
        world.all_reduce(np.ones(1000))
    if sys.argv[1:] == ["hang"]:
        if world.rank == 2:
            while True:
                time.sleep(0.01)
        world.all_reduce(np.ones(8))
"""


def start_seen(network: Network, jobs: Jobs, *words: str, **env: str) -> Job:
    """A job on two hosts with memory of their own, started from a third place with all that shows it."""
    python = jobs.folder / "python"
    python.write_text(OWN_MEMORY.format(python=shlex.quote(sys.executable)))
    python.chmod(0o755)
    (jobs.folder / "reduce.py").write_text(REDUCE)
    namespaces = [f"{host.ipv4}={host.namespace}" for host in (network.first, network.second)]
    ssh = shlex.join([sys.executable, str(Path(stand_in_ssh.__file__)), *namespaces])
    hosts = f"{network.first.ipv4}:2,{network.second.ipv4}:2"
    return jobs.start(
        *(sys.executable, "-m", "phalanx", "run", "--hosts", hosts, "--ssh", ssh, "--remote-python", python),
        *("--page", "--trace", "trace.json", "--metrics", "job.prom", "reduce.py", *words),
        env=env,
    )


def test_a_trace_of_two_hosts(network: Network, jobs: Jobs) -> None:
    """The hosts have one clock in truth, so the trace can be held to the error that it states."""
    job = start_seen(network, jobs)
    assert job.finish() == 0, job.err
    events = json.loads((jobs.folder / "trace.json").read_text())
    labels = {event["pid"]: event["args"]["labels"] for event in events if event["name"] == "process_labels"}
    assert [labels[rank] for rank in (0, 1)] == ["the clock of this trace"] * 2
    errors = {rank: float(re.fullmatch(r"clock within ([0-9.]+) ms", labels[rank])[1]) for rank in (2, 3)}  # type: ignore[index]
    assert all(0 < error < 100 for error in errors.values())
    operations: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "collective":
            operations.setdefault(event["args"]["number"], []).append(event)
    whole = [events for events in operations.values() if {event["pid"] for event in events} == {0, 1, 2, 3}]
    assert len(whole) >= 40, "of the last moment of the other host nothing is known"
    slack = 2 * 1000 * max(errors.values()) + 1
    for events in whole:  # nobody is done before the last has come
        assert max(event["ts"] for event in events) <= min(event["ts"] + event["dur"] for event in events) + slack
    metrics = (jobs.folder / "job.prom").read_text()
    assert all(f'phalanx_rank_up{{rank="{rank}"' in metrics for rank in range(4))
    assert 'phalanx_operations_total{operation="all_reduce",site="reduce.py:9 in <module>"' in metrics


def test_a_rank_of_another_host_hangs(network: Network, jobs: Jobs) -> None:
    job = start_seen(network, jobs, "hang")
    wait_until(lambda: "this job is at http" in job.err, "the page")
    port, token = re.search(r"http://127\.0\.0\.1:(\d+)/([^/]+)/", job.err).groups()  # type: ignore[union-attr]

    def blocked() -> dict[str, Any] | None:
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)
        connection.request("GET", f"/{token}/picture")
        picture = json.loads(connection.getresponse().read())
        connection.close()
        return picture and next((one for one in picture["findings"] if one["kind"] == "blocked"), None)

    wait_until(lambda: blocked() is not None, f"the page to name it\n{job.err}")
    found = blocked()
    assert found is not None
    assert found["ranks"] == [2]
    assert re.match(r"reduce\.py:1[23] in <module>", found["where"]), found
    job.process.terminate()
    assert job.finish() == 143
