"""The fast path of simple messages over TCP: the same frames, and everything else left to the general way."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.transports.support import Pair, QuickOverStream

import phalanx as px
from phalanx.group.data.arrays import adapt
from phalanx.testing import run_ranks
from phalanx.transports.mailbox import BufferSink
from phalanx.transports.ring_channel import last_handed_over
from phalanx.wire.frames import FrameKind, pack_header

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture
def quick() -> Iterator[QuickOverStream]:
    """The fast path on a channel that stays plain TCP."""
    with contextlib.closing(Pair(offers=False)) as pair:
        made = QuickOverStream(pair)
        yield made
        made.way.close()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (128,), (2, 3), (2_000,), (2, 20_000)])
def test_it_writes_and_reads_the_same_frames(quick: QuickOverStream, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(3).normal(size=shape)
    x = np.asarray(x)
    adapted = adapt(x, write=False)
    description = adapted.description.pack()
    out = bytearray(x.nbytes)
    receive = quick.pair.mailbox.post(0, 5, BufferSink(memoryview(out)))
    sender = threading.Thread(target=lambda: quick.send(x, tag=5))  # more than the socket holds
    sender.start()
    while not receive.done:
        quick.pair.pump()
    sender.join()
    assert receive.envelope is not None
    assert receive.envelope.description == description
    assert bytes(out) == x.tobytes()
    header = pack_header(FrameKind.ARRAY, 6, len(description), x.nbytes)
    outgoing = quick.pair.sender.send([header, description, adapted.bytes])
    got = np.empty_like(x)
    answer = quick.recv(got, tag=6)
    while answer is not True and not answer[0].done:
        quick.pair.sender.push()
        quick.pair.pump()
    assert outgoing.done
    assert got.tobytes() == x.tobytes()


@pytest.mark.parametrize("sent", [np.ones(4), np.ones(3, np.float32), np.ones((3, 1)), np.ones(900)])
def test_another_message_than_expected_goes_back_to_the_channel(quick: QuickOverStream, sent: Any) -> None:
    quick.send(sent)
    quick.send(np.full(3, 7.0), tag=2)
    out = np.zeros(3)
    operation, waited = quick.recv(out, tag=1)
    assert operation is None
    assert 0 <= waited < 1
    assert not out.any()  # not one byte of it was written there
    assert quick.recv(out, tag=1) is False  # the channel has it now
    got = bytearray(sent.nbytes)
    receive = quick.pair.mailbox.post(0, 0, BufferSink(memoryview(got)))
    quick.pair.pump()
    assert receive.done
    assert bytes(got) == sent.tobytes()


def test_a_wait_that_lasts_is_handed_over(quick: QuickOverStream) -> None:
    operation, waited = quick.recv(np.zeros(2))
    assert operation is None
    assert 0.04 < waited < 1


def test_a_long_message_is_handed_over_by_both_sides(quick: QuickOverStream) -> None:
    pair = quick.pair
    x = np.random.default_rng(7).normal(size=1 << 20)
    outgoing, _ = quick.send(x)  # fills the socket
    assert last_handed_over() is outgoing
    out = np.zeros_like(x)
    receive, _ = quick.recv(out)  # takes what is there
    assert last_handed_over() is receive
    assert quick.send(np.zeros(1)) is False  # it would come in between
    assert quick.recv(np.zeros(1)) is False
    while not receive.done:
        pair.sender.push()
        pair.pump()
    assert outgoing.done
    assert (x == out).all()
    assert quick.send(np.ones(1)) is True
    assert quick.recv(np.zeros(1)) is True


def test_what_waits_comes_first(quick: QuickOverStream) -> None:
    receive = quick.pair.mailbox.post(0, 9, BufferSink(memoryview(bytearray(8))))
    quick.send(np.ones(2))
    assert quick.recv(np.zeros(2)) is False
    quick.pair.mailbox.withdraw(receive)
    assert quick.recv(np.zeros(2)) is True


def test_a_thread_that_needs_the_channel_gets_it(quick: QuickOverStream) -> None:
    answers: list[Any] = []
    for _ in range(20):
        thread = threading.Thread(target=lambda: answers.append(quick.recv(np.zeros(2))))
        thread.start()
        quick.pair.pump()
        thread.join()
    assert all(answer is False or answer[0] is None for answer in answers)
    assert min(answer[1] for answer in answers if answer) < 0.04


def test_a_closed_channel_declines(quick: QuickOverStream) -> None:
    quick.pair.close()
    assert quick.send(np.zeros(3)) is False
    assert quick.recv(np.zeros(3)) is False


def _in_a_world(group: px.Group) -> set[str]:
    peer = 1 - group.rank
    x = np.zeros(3)
    for number in range(10):  # in turns: what has come ahead of its receive goes another way
        if group.rank == 0:
            group.send(np.full(3, number, float), peer, tag=number % 2)
        assert group.recv(x, peer, tag=number % 2)[0] == number
        if group.rank == 1:
            group.send(x, peer, tag=number % 2)
    assert group._recorder is not None
    return {record[0] for record in group._recorder.records()}


def test_a_world_over_tcp_uses_it() -> None:
    used = run_ranks(2, _in_a_world, backend="mesh", env={"PHALANX_TRANSPORT": "tcp"})
    assert used == [{"send", "recv"}] * 2
