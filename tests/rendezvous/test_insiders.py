"""A member that has the token and talks nonsense: on a channel, on its control connection, or as a launcher.

Nothing is promised against a member that means harm, but junk must stay a clear error of one connection.
"""

from __future__ import annotations

import contextlib
import resource
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from tests.lateness import bound
from tests.rendezvous.support import (
    FAST,
    LIMIT,
    LOOPBACK,
    TOKEN,
    Job,
    Ranks,
    Stranger,
    directory,
    eventually,
    rank_hello,
    ranks,
)

from phalanx.backends import MeshBackend
from phalanx.backends.contexts import RAW_LANE, WORLD_CONTEXT
from phalanx.backends.mesh import world as mesh_world
from phalanx.config import Options
from phalanx.errors import ChannelClosed, PeerLost, ProtocolError, Timeout
from phalanx.rendezvous.directory import Directory, _State
from phalanx.types import Address
from phalanx.wire import control
from phalanx.wire.frames import MAX_DESCRIPTION, FrameKind, pack_header
from phalanx.wire.handshake import Hello, Role

SIZE, EVIL = 3, 2


class Insider:
    """Rank 2, played by plain sockets."""

    def __init__(self, hosted: Directory) -> None:
        self.control = Stranger(hosted.address)
        self.control.shake(rank_hello(EVIL, SIZE), TOKEN)
        self.say(control.Join(control.Member(EVIL, "here", "x", 1, LOOPBACK, 1, EVIL)))
        self._open: list[Stranger] = [self.control]

    def say(self, message: control.Message) -> None:
        self.control.send(control.pack(message))

    def channel(self, victim: MeshBackend, context: bytes = WORLD_CONTEXT, src: int = EVIL) -> Stranger:
        """A channel to a rank, opened as the protocol wants it."""
        member = victim.world.roster[victim.rank]
        stranger = Stranger(Address(member.host, member.port))
        self._open.append(stranger)
        stranger.shake(Hello(Role.CHANNEL, src, SIZE, victim.rank, context, RAW_LANE), TOKEN)
        return stranger

    def close(self) -> None:
        for stranger in self._open:
            stranger.close()


@contextlib.contextmanager
def world(options: Options = FAST) -> Iterator[tuple[Directory, Ranks, Insider]]:
    """Ranks 0 and 1 are honest."""
    with directory(SIZE, options=options) as hosted, ranks() as group:
        job = Job(SIZE, directory=hosted.address)
        for rank in range(SIZE - 1):
            group.start(job.launch(rank), options=options)
        insider = Insider(hosted)
        try:
            group.world()
            yield hosted, group, insider
        finally:
            insider.close()


def honest_ranks_talk(group: Ranks) -> None:
    first, second = group.world()
    got = bytearray(5)
    first.send(b"hello", 1)
    second.recv(got, 0)
    second.send(got, 0)
    first.recv(got, 1)
    assert got == b"hello"


# -- on a channel ------------------------------------------------------------------------------------------------------

JUNK: dict[str, tuple[bytes, str]] = {
    "junk": (b"\xff" * 100, "not a frame"),
    "an unknown kind": (pack_header(FrameKind.RAW, 0, 0, 8)[:2] + b"\x63" + bytes(21), "not a frame"),
    "a huge payload": (
        pack_header(FrameKind.RAW, 0, 0, 2**64 - 1),
        "announces a payload of 18446744073709551615 bytes",
    ),
    "a huge description": (
        pack_header(FrameKind.ARRAY, 0, 2**32 - 1, 0),
        "announces a description of 4294967295 bytes",
    ),
    "one byte too many": (pack_header(FrameKind.RAW, 0, MAX_DESCRIPTION + 1, 0), "description of 4097 bytes"),
    "a huge object": (pack_header(FrameKind.OBJECT, 0, 2**32 - 1, 0), "at most 1073741824 are allowed"),
    "a goodbye with luggage": (pack_header(FrameKind.GOODBYE, 0, 0, 99), "a goodbye announces 99 bytes"),
    "a second handshake": (Hello(Role.RANK, 2, 3).pack(secret=True, nonce=bytes(32)), "not a frame"),
}


@pytest.mark.parametrize("kind", JUNK)
def test_junk_on_a_channel(kind: str) -> None:
    data, reason = JUNK[kind]
    with world() as (_, group, insider):
        victim = group.world()[0]
        channel = insider.channel(victim)
        channel.send(data)
        with pytest.raises(ProtocolError, match=reason) as caught:
            victim.recv(bytearray(8), EVIL, timeout=20)
        assert caught.value.peer == EVIL
        channel.dropped()
        honest_ranks_talk(group)
        with pytest.raises(ProtocolError):
            victim.recv(bytearray(8), EVIL, timeout=20)


@pytest.mark.parametrize("begun", [0, 1000])
def test_a_message_that_is_cut_short(begun: int) -> None:
    with world() as (_, group, insider):
        victim = group.world()[0]
        channel = insider.channel(victim)
        channel.send(pack_header(FrameKind.RAW, 0, 0, 5000) + bytes(begun))
        channel.close()
        with pytest.raises(PeerLost):
            victim.recv(bytearray(5000), EVIL, timeout=20)
        honest_ranks_talk(group)


def resident() -> int:
    """Bytes of memory that this process really has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_an_announced_message_takes_no_memory_before_it_comes() -> None:
    with world() as (_, group, insider):
        victim = group.world()[0]
        channel = insider.channel(victim)
        before = resident()
        channel.send(
            pack_header(FrameKind.RAW, 7, 0, victim.options.max_message) + bytes(1000)
        )  # nobody waits for tag 7
        with pytest.raises(Timeout):
            victim.recv(bytearray(8), EVIL, timeout=0.5)
        assert resident() - before < 32 << 20
        honest_ranks_talk(group)


def test_a_message_for_which_there_is_no_memory() -> None:
    with world(Options(max_message=1 << 56)) as (_, group, insider):
        victim = group.world()[0]
        insider.channel(victim).send(pack_header(FrameKind.RAW, 7, 0, 1 << 55))
        with pytest.raises(ProtocolError, match="not enough memory"):
            victim.recv(bytearray(8), EVIL, timeout=20)
        honest_ranks_talk(group)


def test_a_goodbye_is_no_loss() -> None:
    with world() as (_, group, insider):
        victim = group.world()[0]
        channel = insider.channel(victim)
        channel.send(pack_header(FrameKind.RAW, 0, 0, 2) + b"ok" + pack_header(FrameKind.GOODBYE, 0, 0, 0))
        channel.close()
        got = bytearray(2)
        victim.recv(got, EVIL, timeout=20)
        assert got == b"ok"
        with pytest.raises(ChannelClosed):
            victim.recv(got, EVIL, timeout=20)


def test_a_second_channel_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with world() as (_, group, insider):
        victim = group.world()[0]
        first = insider.channel(victim)
        first.send(pack_header(FrameKind.RAW, 0, 0, 1) + b"1")
        victim.recv(bytearray(1), EVIL, timeout=20)
        second = insider.channel(victim)
        second.send(b"\xff" * 1000)
        second.dropped()
        first.send(pack_header(FrameKind.RAW, 0, 0, 1) + b"2")
        victim.recv(bytearray(1), EVIL, timeout=20)
        honest_ranks_talk(group)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["rank 0: dropped a second channel of rank 2 in one lane"]


def test_channels_of_groups_that_are_never_made(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few wait; more are dropped; another rank's still wait; all are given back at the end."""
    monkeypatch.setattr(mesh_world, "PARKED", 5)
    with world() as (_, group, insider):
        victim = group.world()[0]
        channels = [insider.channel(victim, secrets.token_bytes(16)) for _ in range(12)]
        for channel in channels[5:]:
            assert channel.dropped() == b""
        insider.channel(victim, secrets.token_bytes(16), src=1)
        honest_ranks_talk(group)
        eventually(lambda: len(caplog.records) == 7, "a line for each")
    assert {record.getMessage() for record in caplog.records} == {
        "rank 0: dropped a channel of rank 2: 5 others wait for groups that are not made here"
    }


# -- on the control connection -----------------------------------------------------------------------------------------

NONSENSE: dict[str, tuple[bytes, str]] = {
    "junk": (b"\x05\x00\x00\x00" + b"\xc1" * 5, "not a control message"),
    "a huge length": (b"\xff\xff\xff\xff", "a control message announces 4294967295 bytes"),
    "nothing more": (b"", "the connection was (closed|reset)"),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_junk_on_the_control_connection(kind: str) -> None:
    """It is lost, with the reason, within a second."""
    data, reason = NONSENSE[kind]
    with world() as (_, group, insider):
        started = time.monotonic()
        insider.control.send(data)
        if not data:
            insider.control.close()
        for backend in group.world():
            with pytest.raises(PeerLost, match=reason) as caught:
                backend.recv(bytearray(8), EVIL, timeout=20)
            assert caught.value.peer == EVIL
        assert time.monotonic() - started < bound(10)


FORGED: list[control.Message] = [
    control.Lost(0, "forged"),
    control.Left(1),
    control.Roster([]),
    control.Waiting([0, 1]),
    control.Shutdown(),
    control.Statuses(1, {}, {}),
    control.StatusReply(12345, control.OperationStatus("", 0, 0, "", False, 0.0)),
    control.Join(control.Member(0, "elsewhere", "x", 1, "192.0.2.1", 1, 0)),
    control.Join(control.Member(EVIL, "elsewhere", "x", 1, "192.0.2.1", 1, 0)),
]


@pytest.mark.parametrize("message", FORGED, ids=lambda message: type(message).__name__)
def test_what_only_a_directory_may_say(message: control.Message) -> None:
    """A member that says it is not believed."""
    with world() as (hosted, group, insider):
        insider.say(message)
        insider.say(control.Heartbeat())
        eventually(lambda: hosted._ranks[EVIL].status is None, "the directory to hear it")
        honest_ranks_talk(group)
        assert group.world()[0].world.roster == group.world()[1].world.roster
        assert hosted._cause is None


def test_an_abort_is_its_own(tmp_path: Path) -> None:
    """A member can end the world, but only in its own name."""
    with world() as (_, group, insider):
        insider.say(control.Abort(0, "it was rank 0, honestly", ""))
        for backend in group.world():
            with pytest.raises(PeerLost, match="honestly") as caught:
                backend.recv(bytearray(8), EVIL, timeout=20)
            assert caught.value.peer == EVIL


def test_many_questions_are_answered_in_bounded_memory() -> None:
    with world() as (hosted, group, insider):
        for number in range(500):
            insider.say(control.StatusQuery(number, WORLD_CONTEXT))
        answers: set[int] = set()
        reader = control.ControlReader()
        while len(answers) < 500:
            data = insider.control.socket.recv(65536)
            answers.update(m.query for m in reader.feed(data) if isinstance(m, control.Statuses))
        assert answers == set(range(500))
        eventually(lambda: not hosted._status_queries._queries, "the questions to be forgotten")
        honest_ranks_talk(group)


def test_the_heart_goes_on_after_an_error_that_nobody_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    with world() as (_, group, _):
        plane = group.world()[0].world
        status, beats = plane.status, 0

        def fail_once(context: bytes | None, sequence: int = 0) -> control.OperationStatus:
            nonlocal beats
            beats += context is None
            if beats == 1:
                raise MemoryError("none left")
            return status(context, sequence)

        monkeypatch.setattr(plane, "status", fail_once)
        eventually(lambda: beats > 1, "the next heartbeat", 10.0)


def test_a_message_that_cannot_be_handled_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with world() as (hosted, _, insider):
        heard = threading.Event()

        def fail(*_words: object) -> NoReturn:
            raise MemoryError("none left")

        monkeypatch.setattr(hosted._status_queries, "ask", fail)
        monkeypatch.setattr(hosted, "_on_change", lambda _note: heard.set())
        insider.control.send(control.pack(control.StatusQuery(1, b"")) + control.pack(control.Note("the next one")))
        assert heard.wait(10)


def test_hundreds_that_go_at_the_same_moment_are_all_told() -> None:
    """Each word of a loss finds that the next rank is gone, too: more of them than calls fit inside each other."""
    size = 300
    reader = control.ControlReader()
    lost: set[int] = set()
    with contextlib.ExitStack() as stack:
        hosted = stack.enter_context(directory(size, options=Options()))
        members = []
        for rank in range(size):
            members.append(stack.enter_context(Stranger(hosted.address)))
            members[-1].shake(rank_hello(rank, size), TOKEN)
            member = control.Member(rank, "host", "host", rank + 1, LOOPBACK, 1, rank)
            members[-1].send(control.pack(control.Join(member)))
        *dying, survivor = members
        eventually(lambda: hosted._state is _State.FORMED, "the world")
        gone = threading.Event()
        hosted._reactor.call_soon(lambda: gone.wait(LIMIT) and None)
        for stranger in dying:
            stranger.close()
        gone.set()
        survivor.socket.settimeout(LIMIT)
        while len(lost) < len(dying):
            messages = reader.feed(survivor.socket.recv(65536))
            lost.update(message.rank for message in messages if isinstance(message, control.Lost))
    assert lost == set(range(size - 1))


# -- as a launcher -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"\xff" * 64, b"\x01\x00\x00\x00\xc1", control.pack(control.Abort(99, "", ""))])
def test_junk_of_a_launcher(data: bytes) -> None:
    with world() as (hosted, group, _), Stranger(hosted.address) as launcher:
        launcher.shake(rank_hello(0, SIZE, Role.LAUNCHER), TOKEN)
        launcher.send(data)
        launcher.socket.shutdown(1)
        launcher.dropped()
        eventually(lambda: hosted.launchers == 0, "the launcher to be forgotten")
        honest_ranks_talk(group)
