"""Offers of rings that are none: refused or ignored, and nothing is touched."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.transports.support import Pair

from phalanx._native import core
from phalanx.errors import ProtocolError
from phalanx.transports import ring as rings
from phalanx.transports import shared_memory
from phalanx.transports.channel import Inbound
from phalanx.transports.mailbox import Mailbox
from phalanx.transports.stream import Stream
from phalanx.wire.frames import FrameKind, pack_header

pytestmark = pytest.mark.usefixtures("native")


def offer(fd: Any, nonce: Any = b"n" * 16, size: Any = rings.SIZE) -> bytes:
    return msgspec.msgpack.encode([fd, nonce, size])


@pytest.mark.parametrize(
    "description",
    [
        b"\xc1",
        b"\x90",
        offer(-1),
        offer(1 << 40),
        offer(3, nonce=b"short"),
        offer(3, size=rings.SIZE + 1),
        offer(3, size=1 << 40),
        offer(3, size=0),
        offer("3"),
        msgspec.msgpack.encode([3, b"n" * 16, rings.SIZE, "more"]),
    ],
)
def test_what_is_no_offer_ends_the_channel(pair: Pair, description: bytes) -> None:
    pair.sender.stream.send([pack_header(FrameKind.RING, 0, len(description), 0) + description])
    pair.pump()
    assert isinstance(pair.ends[0][1], ProtocolError)


def _unsealed() -> int:
    assert core is not None
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, core.RING_CONTROL_BYTES + rings.SIZE)
    return fd


def _wrong_size() -> int:
    fd = _unsealed()
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, shared_memory.SEALS)
    return fd


def _wrong_nonce() -> int:
    fd = _unsealed()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, shared_memory.SEALS)
    return fd


def _file() -> int:
    fd, name = tempfile.mkstemp()
    os.unlink(name)
    os.ftruncate(fd, 1 << 20)
    return fd


@pytest.mark.parametrize(
    "make",
    [_unsealed, _wrong_size, _wrong_nonce, _file, lambda: os.pipe()[0], lambda: os.open("/", os.O_RDONLY), lambda: 999],
)
def test_an_offer_of_something_else_is_ignored(pair: Pair, make: Callable[[], int]) -> None:
    fd = make()
    description = offer(fd)
    pair.sender.stream.send([pack_header(FrameKind.RING, 0, len(description), 0) + description])
    pair.sender.stream.send([pack_header(FrameKind.RAW, 0, 0, 2) + b"on"])
    assert pair.receive(2) == b"on"
    assert not pair.ends
    pair.sender.stream.send([rings.SWITCH])  # to what was not accepted
    pair.pump()
    assert "not accepted" in str(pair.ends[0][1])
    if fd != 999:
        os.close(fd)


def test_a_channel_to_another_host_has_no_ring() -> None:
    near, far = socket.socketpair()
    ends: list[Exception] = []

    def on_end(_channel: Inbound, reason: Exception, _goodbye: bool) -> BaseException:
        ends.append(reason)
        return reason

    with near:
        channel = Inbound(Stream(far), 0, Mailbox(), max_message=9, max_object=9, on_end=on_end)
        description = offer(3)
        near.sendall(pack_header(FrameKind.RING, 0, len(description), 0) + description)
        channel.pump()
    assert "shared memory" in str(ends[0])
