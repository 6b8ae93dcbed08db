"""A channel that goes over to a ring, byte by byte: its messages, and its ends."""

from __future__ import annotations

import gc
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from tests.transports.support import Pair

from phalanx.errors import PeerLost, ProtocolError
from phalanx.transports import ring as rings
from phalanx.transports.mailbox import BufferSink
from phalanx.transports.ring import InboundRing, OutboundRing
from phalanx.transports.stream import StreamEnded
from phalanx.wire.frames import FrameKind, pack_header

pytestmark = pytest.mark.usefixtures("native")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def rings_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("phalanx-ring")


def test_the_first_messages_go_over_tcp_and_the_rest_through_the_ring(pair: Pair) -> None:
    sent = 0
    while not isinstance(pair.receiver.stream, InboundRing):
        pair.send(sent.to_bytes(4, "little"))
        assert pair.receive(4) == sent.to_bytes(4, "little")
        sent += 1
    assert rings.OFFER_AFTER < sent < rings.OFFER_AFTER + 4
    for number in range(100):
        assert pair.send(bytes([number]) * number).done
        assert pair.receive(number) == bytes([number]) * number


def test_the_order_is_kept_when_nobody_reads_for_a_while(pair: Pair) -> None:
    for number in range(20):  # the offer is among them, and is not even seen
        pair.send(bytes([number]))
    assert [pair.receive(1)[0] for _ in range(20)] == list(range(20))
    for number in range(20):  # now the switch is
        pair.send(bytes([number]))
    assert isinstance(pair.sender.stream, OutboundRing)
    assert not isinstance(pair.receiver.stream, InboundRing)
    assert [pair.receive(1)[0] for _ in range(20)] == list(range(20))


def test_a_long_message_goes_in_pieces(pair: Pair) -> None:
    pair.go_over()
    data = np.random.default_rng(1).bytes(3 * rings.SIZE + 12345)
    outgoing = pair.send(data)
    assert not outgoing.done
    target = bytearray(len(data))
    receive = pair.mailbox.post(0, 0, BufferSink(memoryview(target)))
    for _ in range(20):
        pair.pump()
        pair.sender.push()
    assert outgoing.done
    assert receive.done
    assert target == data


def test_whoever_polls_is_woken_by_a_byte(pair: Pair) -> None:
    pair.go_over()
    pair.pump()  # finds nothing, and asks to be woken
    with pytest.raises(BlockingIOError):
        pair.far._socket.recv(10, socket.MSG_PEEK)
    pair.send(b"x")
    assert pair.far._socket.recv(10, socket.MSG_PEEK) == b"\0"
    assert pair.receive(1) == b"x"
    pair.pump()
    with pytest.raises(BlockingIOError):  # it was taken
        pair.far._socket.recv(10, socket.MSG_PEEK)


# -- ends -------------------------------------------------------------------------------------------------------------


def test_a_goodbye_arrives_although_the_ring_is_full(pair: Pair) -> None:
    pair.go_over()
    data = bytes(rings.SIZE - 24)
    assert pair.send(data).done
    pair.sender.say(pack_header(FrameKind.GOODBYE, 0, 0, 0))
    pair.sender.end(PeerLost(7, "closed"))
    assert pair.receive(len(data)) == data
    pair.pump()
    assert pair.ends[0][0] == "receiver"
    assert pair.ends[0][2]


def test_what_was_written_before_a_crash_is_still_read(pair: Pair) -> None:
    pair.go_over()
    pair.send(b"last")
    pair.sender.stream._socket.close()  # as the kernel does
    assert pair.receive(4) == b"last"
    pair.pump()
    _, reason, goodbye = pair.ends[0]
    assert isinstance(reason, StreamEnded)
    assert not goodbye


@pytest.mark.parametrize("full", [False, True])
def test_the_sender_hears_why_the_receiver_has_gone(pair: Pair, full: bool) -> None:
    pair.go_over()
    if full:
        assert not pair.send(bytes(2 * rings.SIZE)).done
    word = pack_header(FrameKind.BROKEN, 0, 5, 0) + b"cause"
    pair.receiver.end(PeerLost(7, "closed"), goodbye=word)
    outgoing = pair.send(b"x")
    pair.sender.push()
    assert isinstance(outgoing.error, PeerLost)
    assert pair.sender.last_word == b"cause"


def test_a_severed_ring_gives_nothing_more(pair: Pair) -> None:
    pair.go_over()
    pair.send(b"lost")
    pair.sender.stream.sever()
    pair.pump()
    assert str(pair.ends[0][1]) == "the connection was reset"
    assert isinstance(pair.send(b"x").error, PeerLost)


def test_impossible_counters_end_the_channel(pair: Pair) -> None:
    pair.go_over()
    # The memory has no name, but a map of this process shows it.
    line = next(x for x in Path("/proc/self/maps").read_text().splitlines() if "phalanx-ring" in x)
    with Path("/proc/self/mem").open("r+b", 0) as memory:
        memory.seek(int(line.split("-")[0], 16) + 128)  # what the writer has written
        memory.write(b"\xff" * 8)
    pair.pump()
    assert isinstance(pair.ends[0][1], ProtocolError)
    assert str(pair.ends[0][1]).startswith(f"corrupt ring: write counter {2**64 - 1} is impossible where the read ")


def test_nothing_is_left_of_a_channel() -> None:
    gc.collect()
    before, mapped = descriptors(), rings_mapped()
    for number in range(20):
        pair = Pair()
        for _ in range(number):  # closed in every state
            pair.send(b"x")
            if number % 2:
                pair.pump()
        pair.close()
    assert descriptors() == before
    assert rings_mapped() == mapped
