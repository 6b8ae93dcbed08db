"""A world of four on two hosts: how it forms, where its ranks find each other, and what they say if they cannot."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.hosts.network import SIDE, TALK, Network
from tests.lateness import bound
from tests.launchers.processes import Job, Jobs, finish_all, wait_until

PORT = 29500
"""No other process is in these namespaces, so any port is free."""
TOKEN = {"PHALANX_TOKEN": "the secret of this job"}


def start_world(network: Network, jobs: Jobs, master: str, *words: str, **env: str) -> list[Job]:
    """Ranks 0 and 1 on the first host, 2 and 3 on the second; the directory is hosted by rank 0."""
    hosts = [network.first, network.first, network.second, network.second]
    return [host.rank(jobs, rank, 4, master, PORT, *words, **env) for rank, host in enumerate(hosts)]


def lines_by_rank(started: list[Job]) -> list[dict[str, Any]]:
    lines = [line for job in started for line in job.lines if "rank" in line]
    return sorted(lines, key=lambda line: int(line["rank"]))


def check_talk(started: list[Job]) -> list[dict[str, Any]]:
    """All four have heard from all, and nobody looked for another host's rank at loopback."""
    lines = lines_by_rank(started)
    assert [line["rank"] for line in lines] == [0, 1, 2, 3], [job.err for job in started]
    for line in lines:
        rank = line["rank"]
        assert (line["local_rank"], line["local_world_size"]) == (rank % 2, 2)
        assert line["heard"] == {str(peer): 100 * peer + rank for peer in range(4) if peer != rank}
        for peer, (address, port) in line["reached"].items():
            assert port > 0
            if int(peer) // 2 != rank // 2:
                assert not ipaddress.ip_address(address).is_loopback
    return lines


def across(lines: list[dict[str, Any]]) -> set[str]:
    """The addresses at which ranks found those of the other host."""
    return {
        reached[0]
        for line in lines
        for peer, reached in line["reached"].items()
        if int(peer) // 2 != int(line["rank"]) // 2
    }


class SlowWorld:
    """Four ranks whose starts are spread over twenty seconds, the first rank last."""

    def __init__(self, network: Network, jobs: Jobs) -> None:
        self._network, self._jobs = network, jobs
        self.started: list[Job] = []
        self._thread = threading.Thread(target=self._start, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        hosts = [self._network.first, self._network.first, self._network.second, self._network.second]
        begin = time.monotonic()
        for rank, after in ((3, 0.0), (1, 6.0), (2, 13.0), (0, 20.0)):
            time.sleep(max(0.0, begin + after - time.monotonic()))
            self.started.append(hosts[rank].rank(self._jobs, rank, 4, self._network.first.ipv4, PORT, **TOKEN))

    def ranks(self) -> list[Job]:
        self._thread.join()
        return self.started


@pytest.fixture(scope="module", autouse=True)
def slow_world(_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowWorld]:
    """Starts with the first test of this file, so that its twenty seconds pass while others run."""
    with Network() as network:
        jobs = Jobs(tmp_path_factory.mktemp("slow"))
        world = SlowWorld(network, jobs)
        yield world
        finish_all(world.ranks())
        jobs.clean_up()


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_by_address(network: Network, jobs: Jobs, family: str) -> None:
    started = start_world(network, jobs, getattr(network.first, family), **TOKEN)
    finish_all(started)
    assert across(check_talk(started)) == {getattr(network.first, family), getattr(network.second, family)}
    for job in started:
        assert job.err == ""


NAMES = {"ipv4": "127.0.1.1", "ipv6": "::1"}


def name_the_first_host(network: Network, family: str) -> None:
    """As on Debian: to itself the host's name means loopback, to others its address."""
    network.first.knows("first-host", NAMES[family])
    network.second.knows("first-host", getattr(network.first, family))


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_by_a_name_that_means_loopback_to_its_own_host(network: Network, jobs: Jobs, family: str) -> None:
    name_the_first_host(network, family)
    started = start_world(network, jobs, "first-host", **TOKEN)
    finish_all(started)
    assert across(check_talk(started)) == {getattr(network.first, family), getattr(network.second, family)}


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_two_launchers(network: Network, jobs: Jobs, family: str) -> None:
    """The directory is hosted by the first node's `phalanx run`; the second node starts first."""
    name_the_first_host(network, family)
    master = f"first-host:{PORT}"
    started = [
        host.run(jobs, "--nnodes", "2", "--node-rank", str(node), "--master", master, str(TALK), **TOKEN)
        for node, host in ((1, network.second), (0, network.first))
    ]
    finish_all(started)
    check_talk(started)
    assert {line["rank"] for line in started[0].lines} == {2, 3}


def test_without_a_token(network: Network, jobs: Jobs) -> None:
    started = start_world(network, jobs, network.first.ipv4, "talk", "4")
    finish_all(started)
    for rank, job in enumerate(started):
        (line,) = job.lines
        assert "PHALANX_TOKEN" in line["message"], f"rank {rank}"
        assert line["kind"] == ("WorldNotFormed" if rank < 2 else "MissingVariable")
        assert ("missing ranks 2, 3" if rank < 2 else "10.213.0.1 is another host") in line["message"]


def test_an_interface_by_name_and_by_address(network: Network, jobs: Jobs) -> None:
    """Ranks meet where the master is, and talk where they were told to."""
    started = [
        network.first.rank(jobs, 0, 4, network.first.ipv4, PORT, PHALANX_INTERFACE=SIDE, **TOKEN),
        network.first.rank(jobs, 1, 4, network.first.ipv4, PORT, PHALANX_INTERFACE=network.first.side_ipv4, **TOKEN),
        network.second.rank(jobs, 2, 4, network.first.ipv4, PORT, PHALANX_INTERFACE=SIDE, **TOKEN),
        network.second.rank(jobs, 3, 4, network.first.ipv4, PORT, PHALANX_INTERFACE=network.second.side_ipv6, **TOKEN),
    ]
    finish_all(started)
    hosts = (network.first, network.second)
    assert across(check_talk(started)) == {hosts[0].side_ipv4, hosts[1].side_ipv4, hosts[1].side_ipv6}


def test_a_range_of_ports(network: Network, jobs: Jobs) -> None:
    started = start_world(network, jobs, network.first.ipv6, PHALANX_PORT_RANGE="21000-21001", **TOKEN)
    finish_all(started)
    for line in check_talk(started):
        assert {port for _, port in line["reached"].values()} == {21000, 21001}


def test_any_order_twenty_seconds_apart(slow_world: SlowWorld) -> None:
    finish_all(slow_world.ranks())
    check_talk(slow_world.started)


HEARTBEAT = {"PHALANX_HEARTBEAT": "0.5", "PHALANX_HEARTBEAT_TIMEOUT": "2"}


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_a_cable_that_is_cut(network: Network, jobs: Jobs, family: str) -> None:
    started = start_world(network, jobs, getattr(network.first, family), "lose", **HEARTBEAT, **TOKEN)
    wait_until(lambda: len(lines_by_rank(started)) == 4, "four ranks that have talked")
    cut = time.monotonic()
    network.second.cut()
    finish_all(started)
    check_talk(started)
    for rank, job in enumerate(started):
        (end,) = [line for line in job.lines if "ended" in line]
        assert end["kind"] == "PeerLost", end
        assert end["peer"] // 2 != rank // 2, f"rank {rank} blames a rank of its own host: {end}"
        assert end["ended"] - cut < bound(2 + 1), end


def test_a_cable_that_is_cut_under_two_launchers(network: Network, jobs: Jobs) -> None:
    master = f"{network.first.ipv4}:{PORT}"
    started = [
        host.run(
            jobs,
            *("--nnodes", "2", "--node-rank", str(node), "--master", master, "--no-prefix"),
            *(str(TALK), "lose"),
            **HEARTBEAT,
            **TOKEN,
        )
        for node, host in enumerate((network.first, network.second))
    ]
    wait_until(lambda: len(lines_by_rank(started)) == 4, "four ranks that have talked")
    cut = time.monotonic()
    network.second.cut()
    for job in started:
        job.finish()
    for node, job in enumerate(started):
        ends = [line for line in job.lines if "ended" in line]
        assert len(ends) == 2, job.err
        for end in ends:
            assert end["kind"] == "PeerLost", end
            assert end["peer"] // 2 != node, end
            assert end["ended"] - cut < bound(2 + 1), end
