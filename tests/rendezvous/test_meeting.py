"""Where ranks meet: chosen ports and interfaces, IPv6, and what is said when it cannot be."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from pathlib import Path

import pytest
from tests.ports import free_port
from tests.rendezvous.support import (
    LOOPBACK,
    TOKEN,
    Job,
    Silent,
    check,
    directory,
    ranks,
)

import phalanx
from phalanx.config import Options
from phalanx.deadline import Deadline
from phalanx.errors import ConfigError, MissingVariable, PeerLost, WorldNotFormed
from phalanx.rendezvous.addresses import interface_address
from phalanx.rendezvous.join import dial
from phalanx.transports.stream import ConnectionRefused
from phalanx.types import Address
from phalanx.wire.handshake import Hello, Role

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
        ports = {member.port for member in group.world()[0].world.roster.values()}
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
        hosts = {member.host for member in group.world()[0].world.roster.values()}
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
        assert {member.host for member in group.world()[1].world.roster.values()} == {"::1"}


def test_an_interface_by_name_over_ipv6() -> None:
    assert interface_address("lo", like="::1") == "::1"
    assert interface_address("lo", like=LOOPBACK) == LOOPBACK
    job = Job(2, master=Address("::1", free_port("::1")))
    with ranks() as group:
        for rank in range(2):
            group.start(job.launch(rank), options=Options(interface="lo"))
        check(group)
        assert {member.host for member in group.world()[1].world.roster.values()} == {"::1"}


def listening() -> dict[str, str]:
    """The sockets on which this process listens, each with its address."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw = bytes.fromhex(fields[1].partition(":")[0])
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                found[fields[9]] = str(ipaddress.ip_address(b"".join(words)))
    return found


def test_listeners_bind_one_address_and_not_all() -> None:
    before = listening()  # a plugin of pytest may listen, too
    with ranks() as group:
        for rank, job in enumerate([Job(2, master=Address(LOOPBACK, free_port()))] * 2):
            group.start(job.launch(rank))
        group.world()
        assert {address for number, address in listening().items() if number not in before} == {LOOPBACK}


def test_the_token_is_not_needed_twice() -> None:
    """A token that was given is used, whatever a file of the job might say."""
    with ranks() as group:
        job = Job(2, token=TOKEN)
        group.start(job.launch(0))
        group.start(job.launch(1, token=b"another"), timeout=5)
        assert "tokens differ" in str(group.error(1))
        group.start(job.launch(1))
        check(group)


def test_a_rank_0_that_never_comes_is_named() -> None:
    with ranks() as group:
        group.start(Job(2, master=Address(LOOPBACK, free_port())).launch(1), timeout=0.3)
        error = group.error(1)
    assert isinstance(error, WorldNotFormed)
    assert "rank 1 could not reach the directory of rank 0 at " in str(error)
    assert error.missing == (0,)


def test_a_launcher_that_never_comes_is_no_rank() -> None:
    with ranks() as group:
        group.start(Job(2, directory=Address(LOOPBACK, free_port())).launch(1), timeout=0.3)
        error = group.error(1)
    assert isinstance(error, WorldNotFormed)
    assert "rank 1 could not reach the directory at " in str(error)
    assert error.missing == ()


# -- somebody who is gone ----------------------------------------------------------------------------------------------


def test_the_try_that_decides_comes_when_it_should() -> None:
    """Pauses grow, but never beyond the moment at which somebody who did listen is taken for gone."""
    pauses: list[float] = []

    def rest(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(seconds)

    hello = Hello(Role.CHANNEL, 0, 2, 1, bytes(16), 1)
    with pytest.raises(ConnectionRefused):
        dial(
            [Address("127.0.0.1", free_port())],
            hello,
            None,
            Options(),
            Deadline(30),
            who="rank 1",
            rest=rest,
            gone_after=0.5,
        )
    assert sum(pauses) < 0.51


def test_news_ends_a_pause() -> None:
    news = threading.Event()
    seen: list[float] = []

    def rest(seconds: float) -> None:
        if len(seen) > 3:
            news.set()
        seen.append(seconds)
        news.wait(seconds)

    def check() -> None:
        if news.is_set():
            raise PeerLost(1, "it died")

    hello = Hello(Role.CHANNEL, 0, 2, 1, bytes(16), 1)
    with pytest.raises(PeerLost):
        dial(
            [Address("127.0.0.1", free_port())],
            hello,
            None,
            Options(),
            Deadline(30),
            who="rank 1",
            check=check,
            rest=rest,
        )
    assert len(seen) == 5
