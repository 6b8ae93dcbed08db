"""Messages meet receives: in order, each once, whatever is taken back in between."""

from __future__ import annotations

import random
import threading
import time
from functools import partial

import pytest
from tests.stress.support import together

from phalanx.transports.mailbox import Arrival, BufferSink, Envelope, Mailbox, Receive, Sink
from phalanx.wire.frames import FrameKind


class Wire:
    """Moves messages of one source into a mailbox, as slowly as a test likes."""

    def __init__(self, mailbox: Mailbox, src: int = 0) -> None:
        self._mailbox = mailbox
        self._src = src
        self.lock = threading.RLock()

    def begin(self, size: int, tag: int = 0) -> Arrival:
        with self.lock:
            return self._mailbox.begin(Envelope(self._src, FrameKind.RAW, tag, b"", size), self.lock)

    def fill(self, arrival: Arrival, data: bytes) -> None:
        with self.lock:
            if arrival.view is not None:
                arrival.view[arrival.received : arrival.received + len(data)] = data
            arrival.received += len(data)


def post(mailbox: Mailbox, size: int, src: int | None = 0, tag: int | None = 0) -> tuple[Receive, bytearray]:
    buffer = bytearray(size)
    return mailbox.post(src, tag, BufferSink(memoryview(buffer))), buffer


def test_a_message_whose_receive_is_taken_back_goes_to_the_one_that_waits_behind() -> None:
    mailbox = Mailbox()
    wire = Wire(mailbox)
    first, _ = post(mailbox, 4)
    second, buffer = post(mailbox, 4)
    arrival = wire.begin(4)
    wire.fill(arrival, b"ab")
    assert mailbox.withdraw(first)
    wire.fill(arrival, b"cd")
    mailbox.finish(arrival)
    assert (second.done, second.error, bytes(buffer)) == (True, None, b"abcd")


def test_a_message_that_comes_back_keeps_its_place() -> None:
    mailbox = Mailbox()
    wire = Wire(mailbox)
    receive, _ = post(mailbox, 1)
    arrival = wire.begin(1)
    wire.fill(arrival, b"1")
    # One thread has read all of it and has not yet said so, another reads on, a third takes the receive back.
    later = wire.begin(1)
    wire.fill(later, b"2")
    mailbox.finish(later)
    assert mailbox.withdraw(receive)
    mailbox.finish(arrival)
    assert [bytes(post(mailbox, 1)[1]) for _ in range(2)] == [b"1", b"2"]


class InterruptedSink(Sink):
    """A copy in the middle of which somebody types Ctrl-C."""

    def open(self, envelope: Envelope) -> memoryview:
        raise KeyboardInterrupt


def test_an_interrupted_copy_neither_hangs_nor_loses_the_message() -> None:
    mailbox = Mailbox()
    mailbox.deliver(Envelope(0, FrameKind.RAW, 0, b"", 2), memoryview(b"hi"))
    with pytest.raises(KeyboardInterrupt):
        mailbox.post(0, 0, InterruptedSink())
    receive, buffer = post(mailbox, 2)
    assert (receive.done, bytes(buffer)) == (True, b"hi")


def test_a_receive_whose_copy_was_interrupted_in_another_thread_can_be_taken_back() -> None:
    mailbox = Mailbox()
    wire = Wire(mailbox)
    arrival = wire.begin(2)  # before the receive, so that it is copied at the end
    receive = mailbox.post(0, 0, InterruptedSink())
    wire.fill(arrival, b"hi")
    with pytest.raises(KeyboardInterrupt):
        mailbox.finish(arrival)
    assert together(lambda: mailbox.withdraw(receive), limit=5) == [True]
    assert bytes(post(mailbox, 2)[1]) == b"hi"


@pytest.mark.parametrize("end", ["gone", "fail", "cut"])
def test_an_end_and_a_withdrawal_agree(end: str) -> None:
    """Whoever takes a receive back knows at once whether it has failed: there is no moment in between."""
    for _ in range(300):
        mailbox = Mailbox()
        wire = Wire(mailbox)
        receive, _ = post(mailbox, 2)
        arrival = wire.begin(2) if end == "cut" else None
        error = ConnectionError("over")

        def finish(
            mailbox: Mailbox = mailbox, arrival: Arrival | None = arrival, error: ConnectionError = error
        ) -> None:
            if arrival is not None:
                mailbox.cut(arrival, error)
            elif end == "gone":
                mailbox.gone(0, error)
            else:
                mailbox.fail(error)

        def take_back(mailbox: Mailbox = mailbox, receive: Receive = receive) -> tuple[bool, bool]:
            taken = mailbox.withdraw(receive)
            return taken, receive.error is not None

        taken, failed = together(finish, take_back)[1]
        assert taken != failed


@pytest.mark.parametrize("seed", range(3))
def test_everything_arrives_once_and_in_order(seed: int) -> None:
    mailbox = Mailbox()
    sources, tags, count = 3, 2, 60

    def send(src: int) -> None:
        rng = random.Random(seed * 100 + src)
        wire = Wire(mailbox, src)
        plan = [(tag, number) for number in range(count) for tag in range(tags)]
        for tag, number in plan:
            data = bytes([src, tag, number]) * rng.choice([1, 7, 50])
            arrival = wire.begin(len(data), tag)
            while arrival.received < len(data):
                wire.fill(arrival, data[arrival.received : arrival.received + rng.randint(1, 40)])
                if rng.random() < 0.3:
                    time.sleep(rng.random() * 0.001)
            mailbox.finish(arrival)

    def receive(src: int, tag: int) -> None:
        rng = random.Random(seed * 1000 + src * 10 + tag)
        for number in range(count):
            while True:
                sink = AnySink()
                found = mailbox.post(src, tag, sink)
                _wait(found, rng.random() * 0.003)
                if not mailbox.withdraw(found):
                    break
                sink.closed = True
            assert found.error is None
            size = len(sink.data)
            assert bytes(sink.data) == bytes([src, tag, number]) * (size // 3)

    receivers = [partial(receive, src, tag) for src in range(sources) for tag in range(tags)]
    together(*[partial(send, src) for src in range(sources)], *receivers)
    assert (len(mailbox._posted), len(mailbox._waiting)) == (0, 0)


class AnySink(Sink):
    """Takes a message of any length, and nothing after it was taken back."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.closed = False

    def open(self, envelope: Envelope) -> memoryview:
        assert not self.closed
        self.data = bytearray(envelope.size)
        return memoryview(self.data)


def _wait(receive: Receive, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not receive.done and time.monotonic() < end:
        time.sleep(0.0002)
