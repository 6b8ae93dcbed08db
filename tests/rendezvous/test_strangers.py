"""Strangers at every port of a world that is forming: each is dropped, with one log line, and the world forms."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Callable

import pytest
from tests.lateness import bound
from tests.rendezvous.support import (
    FAST,
    TOKEN,
    Job,
    Stranger,
    check,
    directory,
    eventually,
    lines_about,
    rank_hello,
    ranks,
)

from phalanx.config import Options
from phalanx.errors import AuthenticationFailed
from phalanx.rendezvous.directory import Directory
from phalanx.types import Address
from phalanx.wire.handshake import HELLO_SIZE, HandshakeStatus, Hello, Rejected, Role

Act = Callable[[Stranger], object]
SIZE = 2


def says(data: bytes) -> Act:
    return lambda stranger: stranger.send(data)


def claims(
    hello: Hello, token: bytes | None = TOKEN, status: HandshakeStatus | None = None, port: int | None = None
) -> Act:
    """A client that does everything right but what `hello`, token or port get wrong."""

    def act(stranger: Stranger) -> None:
        if status is None:
            with pytest.raises(AuthenticationFailed):
                stranger.shake(hello, token, port=port)
        else:
            with pytest.raises(Rejected) as caught:
                stranger.shake(hello, token, port=port)
            assert caught.value.status is status

    return act


def changed(position: int, value: bytes) -> Act:
    """A hello that is right but for some bytes, and waits for the answer."""
    hello = bytearray(Hello(Role.RANK, 1, SIZE).pack(secret=True, nonce=bytes(32)))
    hello[position : position + len(value)] = value
    return says(bytes(hello))


def leaves(after: bytes = b"") -> Act:
    def act(stranger: Stranger) -> None:
        stranger.send(after)
        stranger.socket.shutdown(1)

    return act


def reflects(stranger: Stranger) -> None:
    """Answers a hello with a hello, and the challenge with itself."""
    hello = Hello(Role.RANK, 1, SIZE, port=stranger.port).pack(secret=True, nonce=bytes(32))
    stranger.send(hello)
    challenge = stranger.receive(40)
    stranger.send(challenge[-32:])


A_HELLO = Hello(Role.RANK, 1, SIZE).pack(secret=True, nonce=bytes(32))
NO_TOKEN = r"does not know the job's token \(it says it is rank 1\)"
ANYWHERE: dict[str, tuple[Act, str]] = {
    "junk": (says(b"\xff" * 500), "not a Phalanx handshake"),
    "http": (says(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(HELLO_SIZE)), "not a Phalanx handshake"),
    "tls": (says(b"\x16\x03\x01\x02\x00".ljust(HELLO_SIZE, b"\1")), "not a Phalanx handshake"),
    "huge lengths": (says(b"\xff\xff\xff\x7f" * 30), "not a Phalanx handshake"),
    "nothing": (leaves(), "closed by the other side"),
    "half a hello": (leaves(A_HELLO[:40]), "closed by the other side"),
    "a hello only": (leaves(A_HELLO), "closed by the other side"),
    "silence": (says(b""), "no handshake within 0.6 s"),
    "half a hello, then silence": (says(A_HELLO[:40]), "no handshake within 0.6 s"),
    "a hello, then silence": (says(A_HELLO), "no handshake within 0.6 s"),
    "no proof": (says(A_HELLO + bytes(32)), NO_TOKEN),
    "another version": (changed(8, b"\2"), "another version"),
    "no token": (changed(10, b"\0"), "auth='none'"),
    "an unknown role": (changed(11, b"\x09"), "not served here$"),
    "reflection": (reflects, NO_TOKEN),
    "a wrong token": (claims(Hello(Role.RANK, 1, SIZE), b"wrong"), NO_TOKEN),
    "another port": (claims(rank_hello(1, SIZE), status=HandshakeStatus.TARGET, port=1), "another rank or port"),
}
AT_THE_DIRECTORY = ANYWHERE | {
    "rank twice": (claims(rank_hello(0, SIZE), status=HandshakeStatus.TAKEN), r"taken \(it says it is rank 0\)"),
    "rank too high": (claims(rank_hello(SIZE, SIZE), status=HandshakeStatus.RANK), "no such rank"),
    "rank far too high": (claims(rank_hello(2**32 - 1, SIZE), status=HandshakeStatus.RANK), "no such rank"),
    "world size": (claims(rank_hello(1, SIZE + 1), status=HandshakeStatus.WORLD_SIZE), "another world size"),
    "a channel": (claims(Hello(Role.CHANNEL, 1, SIZE, 0), status=HandshakeStatus.ROLE), "not served here"),
}
AT_A_RANK = ANYWHERE | {
    "a rank": (claims(rank_hello(1, SIZE), status=HandshakeStatus.ROLE), "not served here"),
    "a launcher": (claims(rank_hello(1, SIZE, Role.LAUNCHER), status=HandshakeStatus.ROLE), "not served here"),
    "rank too high": (claims(Hello(Role.CHANNEL, SIZE, SIZE, 0), status=HandshakeStatus.RANK), "no such rank"),
    "world size": (
        claims(Hello(Role.CHANNEL, 1, SIZE + 1, 0), status=HandshakeStatus.WORLD_SIZE),
        "another world size",
    ),
    "another target": (claims(Hello(Role.CHANNEL, 1, SIZE, 1), status=HandshakeStatus.TARGET), "another rank or port"),
}


@pytest.mark.parametrize("kind", AT_THE_DIRECTORY)
def test_at_the_directory(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    act, reason = AT_THE_DIRECTORY[kind]
    with directory(SIZE) as hosted, ranks() as group:
        job = Job(SIZE, directory=hosted.address)
        group.start(job.launch(0))
        wait_until_joined(hosted, 0)
        with Stranger(hosted.address) as stranger:
            act(stranger)
            stranger.dropped()
            eventually(lambda: lines_about(caplog, stranger.name), "the log line")
            group.start(job.launch(1))
            check(group)
            (line,) = lines_about(caplog, stranger.name)
    assert line.startswith(f"directory: dropped a connection from {stranger.name}: ")
    assert re.search(reason, line), line
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert TOKEN.decode() not in caplog.text


def wait_until_joined(hosted: Directory, rank: int) -> None:
    eventually(lambda: rank in hosted._ranks and hosted._ranks[rank].member is not None, f"rank {rank}")


@pytest.mark.parametrize("kind", AT_A_RANK)
def test_at_a_rank(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    act, reason = AT_A_RANK[kind]
    with directory(SIZE) as hosted, ranks() as group:
        job = Job(SIZE, directory=hosted.address)
        group.start(job.launch(0))
        wait_until_joined(hosted, 0)
        member = hosted._ranks[0].member
        assert member is not None
        with Stranger(Address(member.host, member.port)) as stranger:
            act(stranger)
            stranger.dropped()
            eventually(lambda: lines_about(caplog, stranger.name), "the log line")
            group.start(job.launch(1))
            check(group)
            (line,) = lines_about(caplog, stranger.name)
    assert line.startswith(f"rank 0: dropped a connection from {stranger.name}: ")
    assert re.search(reason, line), line
    assert TOKEN.decode() not in caplog.text


def test_a_recorded_handshake(caplog: pytest.LogCaptureFixture) -> None:
    """What a rank said to this very directory, once more."""
    with directory(SIZE) as hosted, ranks() as group:
        with Stranger(hosted.address) as honest:
            said = honest.shake(rank_hello(1, SIZE), TOKEN)
        with Stranger(hosted.address) as thief:
            thief.send(said["hello"] + said["proof"])
            answer = thief.dropped()
        assert answer[:5] == b"PXCH\0"
        assert answer[40:45] == b"PXVD" + bytes([HandshakeStatus.PROOF])
        job = Job(SIZE, directory=hosted.address)
        for rank in range(SIZE):
            group.start(job.launch(rank))
        check(group)
        (line,) = lines_about(caplog, thief.name)
    assert "does not know the job's token" in line


def test_one_byte_at_a_time_is_bounded_in_time(caplog: pytest.LogCaptureFixture) -> None:
    """A handshake has one deadline, however often something comes."""
    with directory(SIZE) as hosted, Stranger(hosted.address) as stranger:
        started = time.monotonic()
        stranger.socket.settimeout(0.05)
        for byte in A_HELLO * 20:
            stranger.send(bytes([byte]))
            try:
                if not stranger.socket.recv(1):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("nobody minded")
        eventually(lambda: lines_about(caplog, stranger.name), "the log line")
    assert time.monotonic() - started < bound(FAST.handshake_timeout + 10)
    (line,) = lines_about(caplog, stranger.name)
    assert "no handshake within 0.6 s" in line


def test_too_many_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """The oldest goes; an honest rank comes in among them."""
    options = Options(max_pending_handshakes=4, handshake_timeout=60)
    with directory(1, options=options) as hosted:
        idle = [Stranger(hosted.address) for _ in range(10)]
        eventually(lambda: sum("too many" in record.getMessage() for record in caplog.records) == 6, "six log lines")
        assert [lines_about(caplog, stranger.name) != [] for stranger in idle] == [True] * 6 + [False] * 4
        with Stranger(hosted.address) as honest:
            honest.shake(rank_hello(0, 1), TOKEN)
        for stranger in idle[:7]:
            assert stranger.dropped() == b""
        for stranger in idle:
            stranger.close()


def test_a_full_table_of_descriptors_passes(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that cannot accept says so once, tries again after a pause, and accepts in the end."""
    failures = iter([True, True, True])
    original = socket.socket.accept

    def failing(self: socket.socket) -> object:
        if next(failures, False):
            raise OSError(24, "Too many open files")
        return original(self)

    with directory(1) as hosted:
        monkeypatch.setattr(socket.socket, "accept", failing)
        with Stranger(hosted.address) as honest:
            honest.shake(rank_hello(0, 1), TOKEN)
    assert next(failures, None) is None, "it did not try again"
    assert sum("cannot accept" in record.getMessage() for record in caplog.records) == 1


def test_two_hundred_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each connection costs one line, also when they come together."""
    quick = [says(b"\xff" * HELLO_SIZE), leaves(), leaves(A_HELLO[:40]), says(A_HELLO + bytes(32)), changed(8, b"\2")]
    with directory(SIZE) as hosted, ranks() as group:
        strangers = []
        job = Job(SIZE, directory=hosted.address)
        for number in range(200):
            if number in (60, 140):
                group.start(job.launch(number // 100))
            strangers.append(Stranger(hosted.address))
            quick[number % len(quick)](strangers[-1])
        for stranger in strangers:
            stranger.dropped()
            stranger.close()
        check(group)
        eventually(lambda: all(lines_about(caplog, stranger.name) for stranger in strangers), "all log lines")
        assert {len(lines_about(caplog, stranger.name)) for stranger in strangers} == {1}
