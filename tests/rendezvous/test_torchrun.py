"""Under torchrun its agent has the master's port: the directory is found elsewhere, and nobody gets in between."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading
from collections.abc import Iterator

import pytest
from tests.ports import free_port
from tests.rendezvous.support import (
    FAST,
    LIMIT,
    LOOPBACK,
    Ranks,
    Silent,
    check,
    eventually,
    ranks,
)

from phalanx.backends.mesh.world import MeshWorld
from phalanx.config import Launch, detect
from phalanx.errors import ConfigError, MissingVariable
from phalanx.rendezvous.addresses import CANDIDATES, directory_candidates
from phalanx.rendezvous.directory import Directory
from phalanx.types import Address


def torchrun(rank: int, size: int, local_size: int, port: int, run_id: str, **more: str) -> Launch:
    """What `detect` makes of the variables that torchrun sets."""
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **more,
    }
    return detect(env=env)


def met_at(group: Ranks) -> list[Address]:
    """Where rank 0 hosted the directory."""
    world = group.world()[0].world
    assert isinstance(world, MeshWorld)
    return world.meeting.addresses


# -- torchrun ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [{}, {"PHALANX_TOKEN": "a token"}], ids=["no token", "token"])
def test_torchrun_on_one_host(token: dict[str, str]) -> None:
    """Its agent has the master's port; the ranks meet elsewhere and leave it alone."""
    run_id = secrets.token_hex(4)
    with Silent() as agent, ranks() as group:
        for rank in (2, 1, 0):
            group.start(torchrun(rank, 3, 3, agent.port, run_id, **token))
        check(group)
        assert agent.visits == []


def master_with_free_candidates(size: int) -> tuple[int, list[Address]]:
    """A master's port whose candidates are all free now."""
    while True:
        port = free_port()
        found = directory_candidates(Address(LOOPBACK, port), size)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for candidate in dict.fromkeys(found):
                stack.enter_context(socket.create_server(candidate))
            return port, found


def test_the_candidates_are_the_same_for_all_ranks_and_sane() -> None:
    seen = set()
    for port in range(29500, 29600):
        found = directory_candidates(Address("master", port), 4)
        assert found == directory_candidates(Address("master", port), 4)
        assert len(found) == CANDIDATES
        assert {address.host for address in found} == {"master"}
        assert all(1024 < address.port < 32768 for address in found)
        seen.add(found[0])
    assert len(seen) > 90


def test_torchrun_on_several_hosts() -> None:
    port, candidates = master_with_free_candidates(2)
    with Silent(port), ranks() as group:
        for rank in (1, 0):
            group.start(torchrun(rank, 2, 1, port, "run", PHALANX_TOKEN="a token"))
        check(group)
        assert met_at(group) == [candidates[0]]


def test_torchrun_on_several_hosts_without_a_token() -> None:
    """Rank 0 cannot know better: it waits on its own host. A rank on another host says what to set."""
    launch = detect(
        env={
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "192.0.2.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "run",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    )
    with ranks() as group:
        group.start(launch, timeout=60)
        error = group.error(1)
    assert isinstance(error, MissingVariable)
    assert error.variable == "PHALANX_TOKEN"
    assert "set PHALANX_TOKEN to the same secret on all of them" in str(error)
    assert "auth='none'" in str(error)


def test_candidates_that_others_have_taken() -> None:
    """One says nothing, one is another job's directory: the ranks find theirs behind them."""
    port, candidates = master_with_free_candidates(2)
    assert len(set(candidates[:3])) == 3
    with Silent(port), Silent(candidates[0].port), ranks() as group:
        other = Directory(2, token=b"another job's", bind=candidates[1], options=FAST)
        try:
            for rank in (1, 0):
                group.start(torchrun(rank, 2, 1, port, "run", PHALANX_TOKEN="a token"))
            check(group)
            assert met_at(group) == [candidates[2]]
        finally:
            other.close()


def test_all_candidates_are_taken() -> None:
    port, candidates = master_with_free_candidates(2)
    with contextlib.ExitStack() as stack, ranks() as group:
        for candidate in dict.fromkeys(candidates):
            stack.enter_context(socket.create_server(candidate))
        group.start(torchrun(0, 2, 1, port, "run", PHALANX_TOKEN="a token"), timeout=5)
        error = group.error(0)
    assert isinstance(error, ConfigError)
    assert "rank 0 cannot host the directory" in str(error)
    assert "in use" in str(error)


@contextlib.contextmanager
def relay(source: Address, target: Address) -> Iterator[list[bytes]]:
    """Passes everything on, both ways, and keeps what came back: somebody in between who knows no token."""
    heard: list[bytes] = []
    stop = threading.Event()

    def serve(server: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            pairs: dict[socket.socket, socket.socket] = {}
            while not stop.is_set():
                for ready in select.select([server, *pairs], [], [], 0.05)[0]:
                    if ready is server:
                        client = stack.enter_context(server.accept()[0])
                        try:
                            onward = stack.enter_context(socket.create_connection(target))
                        except OSError:
                            client.close()
                            continue
                        pairs[client], pairs[onward] = onward, client
                        continue
                    if ready not in pairs:
                        continue  # its other side has ended in this very turn
                    data = b""
                    with contextlib.suppress(OSError):
                        data = ready.recv(65536)
                        pairs[ready].sendall(data)
                    heard.append(data)
                    if not data:
                        other = pairs.pop(ready)
                        pairs.pop(other, None)
                        for one in (ready, other):
                            one.close()

    with socket.create_server(source) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        try:
            yield heard
        finally:
            stop.set()
            thread.join(LIMIT)


def is_open(address: Address) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(address) == 0


def test_somebody_who_sits_on_a_candidate_and_passes_everything_on() -> None:
    """Any user of the machine can take a port. What he passes on must not let him in between."""
    port, candidates = master_with_free_candidates(2)
    with relay(candidates[0], candidates[1]) as heard, ranks() as group:
        group.start(torchrun(0, 2, 1, port, "run", PHALANX_TOKEN="a token"))
        eventually(lambda: is_open(candidates[1]), "the directory")
        group.start(torchrun(1, 2, 1, port, "run", PHALANX_TOKEN="a token"))
        check(group)
        assert met_at(group) == [candidates[1]]
    said = b"".join(heard)
    assert b"PHALANX\n" in said, "nobody came by"
    assert b"Roster" not in said
    assert b"Join" not in said
