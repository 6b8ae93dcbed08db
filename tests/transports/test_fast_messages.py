"""The fast path of simple messages: the same frames, and everything else left to the general way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.transports.support import Pair, Quick

from phalanx.group.data.arrays import adapt
from phalanx.transports import ring as rings
from phalanx.transports.mailbox import BufferSink
from phalanx.transports.ring_channel import last_handed_over
from phalanx.wire.frames import FrameKind, pack_header

pytestmark = pytest.mark.usefixtures("native")

SHAPES = [(), (0,), (127,), (128,), (300,), (30_000,), (0, 70_000), (0, 5_000_000_000), (2, 3), (1,) * 15, (2, 1, 200)]


@pytest.mark.parametrize("dtype", list("?bBhHiIlLqQefdFD"))
@pytest.mark.parametrize("shape", SHAPES)
def test_it_writes_and_reads_the_same_frames(quick: Quick, dtype: str, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(3).integers(0, 2, shape).astype(dtype)
    adapted = adapt(x, write=False)
    assert quick.send(x, tag=5) is True
    out = bytearray(x.nbytes)
    receive = quick.pair.mailbox.post(0, 5, BufferSink(memoryview(out)))
    quick.pair.pump()
    assert receive.envelope is not None
    assert receive.envelope.description == adapted.description.pack()
    assert bytes(out) == x.tobytes()
    description = adapted.description.pack()
    header = pack_header(FrameKind.ARRAY, 6, len(description), x.nbytes)
    quick.pair.sender.send([header, description, adapted.bytes])
    got = np.empty_like(x)
    assert quick.recv(got, tag=6) is True
    assert got.tobytes() == x.tobytes()


def _frozen() -> Any:
    x = np.zeros(4)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    "call",
    [
        lambda q: q.send([1, 2]),
        lambda q: q.send(b"bytes"),
        lambda q: q.send(None),
        lambda q: q.send(np.zeros((4, 4)).T),
        lambda q: q.send(np.zeros(8)[::2]),
        lambda q: q.send(np.zeros(3, ">f4")),
        lambda q: q.send(np.zeros(3, "M8[ns]")),
        lambda q: q.send(np.zeros(3, "U5")),
        lambda q: q.send(np.zeros(3, [("a", "f4")])),
        lambda q: q.send(np.zeros(3, object)),
        lambda q: q.send(np.zeros(3, np.longdouble)),
        lambda q: q.send(np.ma.zeros(3)),
        lambda q: q.send(np.zeros((1,) * 16)),
        lambda q: q.send(np.float32(3)),
        lambda q: q.send(np.zeros(3), tag=-1),
        lambda q: q.send(np.zeros(3), tag=1 << 63),
        lambda q: q.send(np.zeros(3), tag=1 << 70),
        lambda q: q.send(np.zeros(3), tag=None),
        lambda q: q.send(np.zeros(3), tag=1.0),
        lambda q: q.send(np.zeros(3), dst=1),
        lambda q: q.send(np.zeros(3), dst=-1),
        lambda q: q.send(np.zeros(3), dst=1 << 70),
        lambda q: q.send(np.zeros(3), dst=None),
        lambda q: q.send(np.zeros(3), dst=[0]),
        lambda q: q.recv(_frozen()),
        lambda q: q.recv(None),
        lambda q: q.recv(np.zeros(3), src=None),
    ],
)
def test_what_is_not_simple_is_declined_without_a_trace(quick: Quick, call: Callable[[Quick], Any]) -> None:
    assert call(quick) is False
    assert quick.recorder.records() == []
    assert quick.send(np.ones(3)) is True
    out = np.zeros(3)
    assert quick.recv(out) is True
    assert out.sum() == 3


@pytest.mark.parametrize("sent", [np.zeros(4), np.zeros(3, np.float32), np.zeros((3, 1))])
def test_another_message_than_expected_is_left_for_the_general_way(quick: Quick, sent: Any) -> None:
    quick.send(sent)
    operation, waited = quick.recv(np.zeros(3))
    assert operation is None
    assert 0 <= waited < 1
    assert quick.recv(np.zeros(3), tag=1)[0] is None  # another tag
    assert quick.recv(np.empty_like(sent)) is True


def test_messages_that_wait_come_first(quick: Quick) -> None:
    quick.pair.send(b"12345678", tag=9)
    quick.pair.pump()  # nobody wants it yet
    quick.send(np.ones(2))
    assert quick.recv(np.zeros(2)) is False
    assert quick.pair.mailbox.post(0, 9, BufferSink(memoryview(bytearray(8)))).done
    assert quick.recv(np.zeros(2)) is True


def test_receives_that_were_posted_come_first(quick: Quick) -> None:
    receive = quick.pair.mailbox.post(0, 9, BufferSink(memoryview(bytearray(8))))
    quick.send(np.ones(2))
    assert quick.recv(np.zeros(2)) is False
    quick.pair.mailbox.withdraw(receive)
    assert quick.recv(np.zeros(2)) is True


def test_a_wait_that_lasts_is_handed_over(quick: Quick) -> None:
    operation, waited = quick.recv(np.zeros(2))
    assert operation is None
    assert 0.04 < waited < 1


@pytest.mark.parametrize("dtype", ["?", "u1", "f2", "f8", "c8", "c16"])
def test_a_long_message_is_handed_over_by_both_sides(quick: Quick, dtype: str) -> None:
    pair = quick.pair
    x = np.random.default_rng(7).integers(0, 256, (3, rings.SIZE)).astype(dtype)
    outgoing, _ = quick.send(x)  # fills the ring
    assert last_handed_over() is outgoing
    out = np.zeros_like(x)
    receive, _ = quick.recv(out)  # takes what is there
    assert last_handed_over() is receive
    assert last_handed_over() is None
    assert quick.send(np.zeros(1)) is False  # it would come in between
    assert quick.recv(np.zeros(1)) is False
    for _ in range(100):
        pair.sender.push()
        pair.pump()
    assert outgoing.done
    assert receive.done
    assert (x == out).all()
    assert quick.send(np.ones(1)) is True
    assert quick.recv(np.zeros(1)) is True


def test_whoever_needs_the_channel_does_not_wait_for_a_quick_message(pair: Pair) -> None:
    quick = Quick(pair)
    answers: list[Any] = []
    for _ in range(20):
        thread = threading.Thread(target=lambda: answers.append(quick.recv(np.zeros(2))))
        thread.start()
        pair.pump()
        thread.join()
    assert all(answer is False or answer[0] is None for answer in answers)
    assert min(answer[1] for answer in answers if answer) < 0.04
    quick.way.close()


def test_a_closed_channel_declines(quick: Quick) -> None:
    quick.pair.close()
    assert quick.send(np.zeros(3)) is False
    assert quick.recv(np.zeros(3)) is False
    quick.way.close()
    assert quick.send(np.zeros(3)) is False


def test_the_journal_knows_of_quick_messages(quick: Quick) -> None:
    quick.send(np.zeros(3), tag=4)
    quick.recv(np.zeros(3), tag=4)
    found = [(record[0], record[1], record[3]) for record in quick.recorder.records()]
    assert found == [("send", 0, 4), ("recv", 0, 4)]
    assert all(record[-3] <= record[-2] for record in quick.recorder.records())  # when it began and ended
