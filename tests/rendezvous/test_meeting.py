"""Where ranks meet: torchrun's taken port, chosen ports and interfaces, IPv6, and what is said when it cannot be."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.rendezvous.support import (
    FAST,
    LIMIT,
    LOOPBACK,
    TOKEN,
    Job,
    Ranks,
    check,
    directory,
    eventually,
    free_port,
    ranks,
)

import phalanx
from phalanx.backends.mesh_world import MeshWorld
from phalanx.config import Launch, Options, detect
from phalanx.errors import ConfigError, MissingVariable, WorldNotFormed
from phalanx.rendezvous.addresses import CANDIDATES, directory_candidates, interface_address
from phalanx.rendezvous.directory import Directory
from phalanx.types import Address


class Silent:
    """Something else that listens on a port, as torchrun's store does; it says nothing."""

    def __init__(self, port: int = 0, host: str = LOOPBACK) -> None:
        self.socket = socket.create_server((host, port))
        self.port: int = self.socket.getsockname()[1]
        self._stop = threading.Event()
        self.visits: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self.socket.settimeout(0.05)
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                self.visits.append(self.socket.accept()[0])

    def __enter__(self) -> Silent:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(LIMIT)
        for visit in self.visits:
            visit.close()
        self.socket.close()


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


# -- several hosts without a token -------------------------------------------------------------------------------------


def test_another_host_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MissingVariable, match="set PHALANX_TOKEN to the same secret on all") as caught:
        phalanx.init(timeout=60)
    assert caught.value.variable == "PHALANX_TOKEN"


def test_a_directory_without_a_token() -> None:
    with ranks() as group:
        group.start(Job(2, token=None, directory=Address(LOOPBACK, 1)).launch(1), timeout=60)
        error = group.error(1)
    assert isinstance(error, MissingVariable)
    assert "PHALANX_TOKEN" in str(error)


# -- ports and interfaces ----------------------------------------------------------------------------------------------


def test_the_master_port_is_in_use() -> None:
    with Silent() as other, ranks() as group:
        group.start(Job(2, master=Address(LOOPBACK, other.port)).launch(0), timeout=60)
        error = group.error(0)
    assert isinstance(error, ConfigError)
    assert f"rank 0 cannot host the directory: cannot listen on 127.0.0.1 port {other.port}: " in str(error)
    assert "in use" in str(error)


@pytest.mark.parametrize("host", [LOOPBACK, "::1", "localhost"])
def test_port_0_takes_any(host: str) -> None:
    """Then the private file tells where."""
    job = Job(2, master=Address(host, 0))
    with ranks() as group:
        for rank in (1, 0):
            group.start(job.launch(rank))
        check(group)


def test_port_0_on_several_hosts() -> None:
    with ranks() as group:
        group.start(Job(2, master=Address("192.0.2.1", 0), single_host=False).launch(1), timeout=60)
        error = group.error(1)
    assert isinstance(error, ConfigError)
    assert "192.0.2.1:0" in str(error)


def port_block(length: int) -> tuple[int, int]:
    """So many free ports in a row."""
    while True:
        first = free_port()
        if first + length > 65535:
            continue
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + length):
                stack.enter_context(socket.create_server((LOOPBACK, port)))
            return first, first + length - 1


def test_a_port_range() -> None:
    first, last = port_block(3)
    options = Options(port_range=(first, last))
    with directory(3) as hosted, ranks() as group:
        for rank in range(3):
            group.start(Job(3, directory=hosted.address).launch(rank), options=options)
        check(group)
        ports = {member.port for member in group.world()[0].world.roster}
    assert ports == set(range(first, last + 1))


def test_a_port_range_that_is_used_up() -> None:
    first, last = port_block(2)
    options = Options(port_range=(first, last))
    with directory(2) as hosted, ranks() as group, contextlib.ExitStack() as stack:
        for port in (first, last):
            stack.enter_context(socket.create_server((LOOPBACK, port)))
        job = Job(2, directory=hosted.address)
        group.start(job.launch(1), options=options, timeout=60)
        group.start(job.launch(0), timeout=1.0)
        error = group.error(1)
        missing = group.error(0)
    assert isinstance(error, ConfigError)
    assert f"cannot listen on 127.0.0.1 port {first} to {last}: " in str(error)
    assert isinstance(missing, WorldNotFormed)
    assert missing.missing == (1,)


@pytest.mark.parametrize("interface", ["lo", LOOPBACK, "127.0.0.2"])
def test_an_interface_by_name_or_address(interface: str) -> None:
    with directory(2) as hosted, ranks() as group:
        for rank in range(2):
            group.start(Job(2, directory=hosted.address).launch(rank), options=Options(interface=interface))
        check(group)
        hosts = {member.host for member in group.world()[0].world.roster}
    assert hosts == {LOOPBACK if interface == "lo" else interface}


@pytest.mark.parametrize(("interface", "words"), [("nope0", "interfaces: .*lo"), ("192.0.2.77", "cannot listen on")])
def test_an_interface_that_is_not_there(interface: str, words: str) -> None:
    with directory(2) as hosted, ranks() as group:
        group.start(Job(2, directory=hosted.address).launch(0), options=Options(interface=interface), timeout=60)
        error = group.error(0)
    assert isinstance(error, ConfigError)
    assert interface in str(error)
    with pytest.raises(ConfigError, match=words):
        raise error


def test_ipv6() -> None:
    job = Job(3, master=Address("::1", free_port("::1")))
    with ranks() as group:
        for rank in (2, 0, 1):
            group.start(job.launch(rank))
        check(group)
        assert {member.host for member in group.world()[1].world.roster} == {"::1"}


def test_an_interface_by_name_over_ipv6() -> None:
    assert interface_address("lo", like="::1") == "::1"
    assert interface_address("lo", like=LOOPBACK) == LOOPBACK
    job = Job(2, master=Address("::1", free_port("::1")))
    with ranks() as group:
        for rank in range(2):
            group.start(job.launch(rank), options=Options(interface="lo"))
        check(group)
        assert {member.host for member in group.world()[1].world.roster} == {"::1"}


def listening() -> set[str]:
    """The addresses on which this process listens."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw = bytes.fromhex(fields[1].partition(":")[0])
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                found.add(str(ipaddress.ip_address(b"".join(words))))
    return found


def test_listeners_bind_one_address_and_not_all() -> None:
    assert listening() == set()
    with ranks() as group:
        for rank, job in enumerate([Job(2, master=Address(LOOPBACK, free_port()))] * 2):
            group.start(job.launch(rank))
        group.world()
        assert listening() == {LOOPBACK}


def test_the_token_is_not_needed_twice() -> None:
    """A token that was given is used, whatever a file of the job might say."""
    with ranks() as group:
        job = Job(2, token=TOKEN)
        group.start(job.launch(0))
        group.start(job.launch(1, token=b"another"), timeout=5)
        assert "tokens differ" in str(group.error(1))
        group.start(job.launch(1))
        check(group)
