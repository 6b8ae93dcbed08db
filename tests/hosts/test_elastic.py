"""An elastic job on two hosts: the cable between them is cut, one side goes on, the other ends and comes back."""

from __future__ import annotations

from pathlib import Path

from tests.hosts.network import MAIN, Network, _ip
from tests.launchers.processes import Job, Jobs, wait_until

PORT = 29500
ENV = {"PHALANX_TOKEN": "the secret of this job", "PHALANX_HEARTBEAT": "0.3", "PHALANX_HEARTBEAT_TIMEOUT": "2"}
TRAIN = """
import json, sys, time
import numpy as np
import phalanx as px

with px.init(timeout=60) as world:
    me = world.members[world.rank]
    weights, log = np.zeros(1000), np.full(20_000, -1)
    state = px.elastic.State(weights=weights, log=log, sampler=px.elastic.Sampler(100, 20))
    stop = sys.argv[1]
    for step in px.elastic.steps(world, state, total=20_000, timeout=20):
        with step:
            gradient = np.full(1000, float(step.batch.sum()))
            import os
            flag = np.array([os.path.exists(stop)], np.int64)
            step.group.all_reduce(gradient)
            step.group.all_reduce(flag, op="max")
            weights += gradient
            log[step.number] = step.group.world_size
            time.sleep(0.02)
        if flag[0] and step.group.loss is None:
            break
    print(json.dumps({"rank": me, "weights": weights.sum(), "sizes": sorted(set(log[log > 0].tolist()))}), flush=True)
"""


def both(network: Network, jobs: Jobs, tmp_path: Path) -> tuple[Job, str, str]:
    script, stop = tmp_path / "train.py", tmp_path / "stop"
    script.write_text(TRAIN)
    first = network.first.start(
        jobs, "-m", "phalanx", "run", "--elastic", "1:6", "-n", "3", "--max-restarts", "0", "--master",
        f"{network.first.ipv4}:{PORT}", script, str(stop), **ENV,
    )  # fmt: skip
    return first, str(script), str(stop)


def join(network: Network, jobs: Jobs, script: str, stop: str) -> Job:
    address = f"{network.first.ipv4}:{PORT + 1}"
    return network.second.start(jobs, "-m", "phalanx", "join", "-n", "2", address, script, stop, **ENV)


def test_the_smaller_side_ends_and_comes_back(network: Network, jobs: Jobs, tmp_path: Path) -> None:
    first, script, stop = both(network, jobs, tmp_path)
    wait_until(lambda: "other hosts join with" in first.err, "the job")
    second = join(network, jobs, script, stop)
    wait_until(lambda: "5 ranks go on" in first.err, f"five ranks\n{first.err}")
    network.second.cut()
    # One may be lost a little before the other: then there are two views.
    wait_until(lambda: "3 ranks go on without" in first.err, "the larger side")
    assert second.finish() != 0
    assert "the directory went away" in second.err
    assert first.process.poll() is None
    _ip("-n", network.second.namespace, "link", "set", MAIN, "up")
    again = join(network, jobs, script, stop)
    wait_until(lambda: "5 ranks go on with" in first.err.split("3 ranks go on without")[1], "five ranks again")
    Path(stop).touch()
    assert first.finish() == 0, first.err
    assert again.finish() == 0, again.err
    lines = first.lines + again.lines
    assert {line["rank"] for line in lines} == {0, 1, 2, 5, 6}
    assert len({line["weights"] for line in lines}) == 1
    assert {3, 5} <= set(lines[0]["sizes"])
