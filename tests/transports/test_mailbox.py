"""Where messages meet receives: matching, order, and what happens to those that are taken back or cut short."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given

from phalanx.errors import PeerLost, SizeMismatch
from phalanx.transports.mailbox import Arrival, BufferSink, Envelope, Mailbox, Receive, Sink
from phalanx.transports.waker import Waker
from phalanx.wire.frames import FrameKind


def envelope(src: int = 0, tag: int = 0, size: int = 1) -> Envelope:
    return Envelope(src, FrameKind.RAW, tag, b"", size)


def deliver(mailbox: Mailbox, data: bytes, src: int = 0, tag: int = 0) -> None:
    mailbox.deliver(envelope(src, tag, len(data)), memoryview(data))


def post(mailbox: Mailbox, size: int = 1, src: int | None = 0, tag: int | None = 0) -> tuple[Receive, bytearray]:
    target = bytearray(size)
    return mailbox.post(src, tag, BufferSink(memoryview(target))), target


class Slow:
    """A message that arrives in pieces, as over a network."""

    def __init__(self, mailbox: Mailbox, data: bytes, src: int = 0, tag: int = 0) -> None:
        self.mailbox = mailbox
        self.data = data
        self.lock = threading.RLock()
        with self.lock:
            self.arrival: Arrival = mailbox.begin(envelope(src, tag, len(data)), self.lock)

    def bring(self, count: int) -> None:
        with self.lock:
            start = self.arrival.received
            piece = self.data[start : start + count]
            if self.arrival.view is not None:
                self.arrival.view[start : start + len(piece)] = piece
            self.arrival.received += len(piece)

    def finish(self) -> None:
        self.bring(len(self.data))
        self.mailbox.finish(self.arrival)


# -- matching ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["message", "receive"])
def test_a_message_meets_its_receive(first: str) -> None:
    mailbox = Mailbox()
    if first == "message":
        deliver(mailbox, b"abc")
    receive, target = post(mailbox, 3)
    if first == "receive":
        assert not receive.done
        deliver(mailbox, b"abc")
    assert receive.done
    assert receive.error is None
    assert target == b"abc"
    assert receive.envelope is not None
    assert receive.envelope.size == 3


def test_other_sources_and_tags_do_not_match() -> None:
    mailbox = Mailbox()
    receive, target = post(mailbox, 1, src=1, tag=2)
    deliver(mailbox, b"a", src=1, tag=1)
    deliver(mailbox, b"b", src=0, tag=2)
    assert not receive.done
    deliver(mailbox, b"c", src=1, tag=2)
    assert receive.done
    assert target == b"c"


def test_anyone_and_any_tag_take_the_first_that_came() -> None:
    mailbox = Mailbox()
    for data, src, tag in ((b"a", 2, 5), (b"b", 1, 6), (b"c", 2, 7)):
        deliver(mailbox, data, src, tag)
    found = []
    for src, tag in ((None, 6), (None, None), (2, None)):
        receive, target = post(mailbox, 1, src, tag)
        assert receive.envelope is not None
        found.append((bytes(target), receive.envelope.src, receive.envelope.tag))
    assert found == [(b"b", 1, 6), (b"a", 2, 5), (b"c", 2, 7)]


def test_receives_are_served_in_the_order_in_which_they_were_posted() -> None:
    mailbox = Mailbox()
    targets = [post(mailbox, 1, src)[1] for src in (0, None, 0)]
    for data in (b"1", b"2", b"3"):
        deliver(mailbox, data)
    assert [bytes(target) for target in targets] == [b"1", b"2", b"3"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 2)), max_size=40))
def test_messages_of_one_source_and_tag_never_overtake_each_other(steps: list[tuple[bool, int, int]]) -> None:
    mailbox = Mailbox()
    sent: dict[tuple[int, int], int] = {}
    received: dict[tuple[int, int], list[bytearray]] = {}
    for is_send, src, tag in steps:
        if is_send:
            number = sent[src, tag] = sent.get((src, tag), 0) + 1
            deliver(mailbox, bytes([number]), src, tag)
        else:
            received.setdefault((src, tag), []).append(post(mailbox, 1, src, tag)[1])
    for key, targets in received.items():
        got = [target[0] for target in targets]
        arrived = min(len(got), sent.get(key, 0))
        assert got == [*range(1, arrived + 1), *[0] * (len(got) - arrived)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["message", "receive", "withdraw"]),
            st.sampled_from([None, 0, 1, 2]),
            st.sampled_from([None, 0, 1]),
        ),
        max_size=40,
    )
)
def test_whoever_came_first_is_matched_first(steps: list[tuple[str, int | None, int | None]]) -> None:
    """Against a model that searches two lists from the front, with receives from anyone, of any tag, and taken back."""
    mailbox = Mailbox()
    waiting: list[tuple[int, int, bytes]] = []
    posted: list[tuple[int | None, int | None, Receive, bytearray]] = []
    expected: list[tuple[bytearray, bytes]] = []

    def fits(src: int | None, tag: int | None, message: tuple[int, int, bytes]) -> bool:
        return src in (None, message[0]) and tag in (None, message[1])

    for number, (what, src, tag) in enumerate(steps):
        if what == "message":
            message = (src or 0, tag or 0, bytes([number]))
            deliver(mailbox, message[2], message[0], message[1])
            found = next((entry for entry in posted if fits(entry[0], entry[1], message)), None)
            if found is None:
                waiting.append(message)
            else:
                posted.remove(found)
                expected.append((found[3], message[2]))
        elif what == "receive":
            receive, target = post(mailbox, 1, src, tag)
            first = next((message for message in waiting if fits(src, tag, message)), None)
            assert receive.done == (first is not None)
            if first is None:
                posted.append((src, tag, receive, target))
            else:
                waiting.remove(first)
                expected.append((target, first[2]))
        elif posted:
            entry = posted.pop(number % len(posted))
            assert mailbox.withdraw(entry[2])
    assert all(target == data for target, data in expected)
    sources = {src for src, *_ in waiting} | {src for src, *_ in posted}
    assert set(mailbox.ahead) == sources


@pytest.mark.parametrize("how", ["messages in reverse", "any of them", "receives in reverse", "taken back in reverse"])
def test_the_work_per_message_does_not_grow_with_those_that_wait(how: str) -> None:
    def calls(count: int) -> int:
        """Calls of functions while so many are matched."""
        mailbox, made = Mailbox(), 0

        def profile(_frame: object, event: str, _argument: object) -> None:
            nonlocal made
            made += event == "call"

        if how in ("messages in reverse", "any of them"):
            for tag in range(count):
                deliver(mailbox, b"x", tag=tag)
            steps = [
                lambda tag=tag: post(mailbox, 1, *((0, tag) if "reverse" in how else (None, None)))
                for tag in range(count)
            ]
        else:
            receives = [post(mailbox, 1, 0, tag)[0] for tag in range(count)]
            if how == "receives in reverse":
                steps = [lambda tag=tag: deliver(mailbox, b"x", tag=tag) for tag in range(count)]
            else:
                steps = [lambda receive=receive: mailbox.withdraw(receive) for receive in receives]
        sys.setprofile(profile)
        try:
            for step in reversed(steps):
                step()
        finally:
            sys.setprofile(None)
        assert mailbox.ahead == {}
        return made // count

    assert calls(400) <= calls(20) + 1


def test_an_empty_message_is_a_message() -> None:
    mailbox = Mailbox()
    receive, _ = post(mailbox, 0)
    deliver(mailbox, b"")
    assert receive.done
    assert receive.error is None


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["message", "receive"])
def test_another_length_fails_the_receive_and_drops_the_message(first: str) -> None:
    mailbox = Mailbox()
    if first == "message":
        deliver(mailbox, b"abc")
    receive, target = post(mailbox, 2)
    if first == "receive":
        deliver(mailbox, b"abc")
    assert isinstance(receive.error, SizeMismatch)
    assert (receive.error.expected, receive.error.got) == (2, 3)
    assert target == bytes(2)
    again, _ = post(mailbox, 3)
    assert not again.done


def test_the_payload_of_a_refused_message_goes_nowhere() -> None:
    mailbox = Mailbox()
    receive, _ = post(mailbox, 2)
    message = Slow(mailbox, b"abc")
    assert message.arrival.view is None
    message.finish()
    assert isinstance(receive.error, SizeMismatch)


# -- taken back -------------------------------------------------------------------------------------------------------


def test_a_receive_that_was_taken_back_gets_nothing() -> None:
    mailbox = Mailbox()
    receive, target = post(mailbox)
    assert mailbox.withdraw(receive)
    assert not mailbox.withdraw(receive)
    deliver(mailbox, b"x")
    assert not receive.done
    assert target == b"\0"
    _, later = post(mailbox)
    assert later == b"x"


def test_a_receive_that_is_done_cannot_be_taken_back() -> None:
    mailbox = Mailbox()
    receive, _ = post(mailbox)
    deliver(mailbox, b"x")
    assert not mailbox.withdraw(receive)


@pytest.mark.parametrize("brought", [0, 1, 3, 5])
def test_a_receive_taken_back_in_the_middle_leaves_the_message_to_the_next(brought: int) -> None:
    mailbox = Mailbox()
    first, mine = post(mailbox, 6)
    message = Slow(mailbox, b"abcdef")
    message.bring(brought)
    assert mailbox.withdraw(first)
    assert not mailbox.withdraw(first), "a second time, as in a `finally`, must not make two messages of one"
    mine[:] = b"------"
    second, target = post(mailbox, 6)
    message.bring(1)
    assert mailbox.withdraw(second)
    third, last = post(mailbox, 6)
    message.finish()
    assert (mine, last) == (b"------", b"abcdef")
    assert third.done
    assert not first.done
    assert not second.done
    assert target in (bytes(6), b"abcdef"[:brought] + bytes(6 - brought))
    assert not post(mailbox, 6)[0].done


def test_the_message_of_a_receive_taken_back_keeps_its_place() -> None:
    mailbox = Mailbox()
    receive, _ = post(mailbox, 1, src=0)
    slow = Slow(mailbox, b"1")
    deliver(mailbox, b"other", src=1)
    assert mailbox.withdraw(receive)
    slow.finish()
    deliver(mailbox, b"2")
    assert [bytes(post(mailbox, 1, 0)[1]) for _ in range(2)] == [b"1", b"2"]


def test_a_length_that_does_not_fit_after_a_receive_was_taken_back() -> None:
    mailbox = Mailbox()
    first, _ = post(mailbox, 3)
    message = Slow(mailbox, b"abc")
    message.bring(1)
    assert mailbox.withdraw(first)
    second, _ = post(mailbox, 2)
    message.finish()
    assert isinstance(second.error, SizeMismatch)
    assert not post(mailbox, 3)[0].done


def test_a_receive_is_not_given_back_while_it_is_being_filled() -> None:
    """The message came first and is copied now: whoever gives up must wait for the copy, and then has the message."""
    copying, go_on = threading.Event(), threading.Event()

    class SlowSink(Sink):
        def __init__(self) -> None:
            self.target = bytearray(1)

        def open(self, envelope: Envelope) -> memoryview:
            copying.set()
            assert go_on.wait(10)
            return memoryview(self.target)

    mailbox = Mailbox()
    message = Slow(mailbox, b"x")  # begins before the receive, so that it has memory of its own
    sink = SlowSink()
    receive = mailbox.post(0, 0, sink)
    finisher = threading.Thread(target=message.finish)
    finisher.start()
    assert copying.wait(10)
    answers: list[bool] = []
    withdrawer = threading.Thread(target=lambda: answers.append(mailbox.withdraw(receive)))
    withdrawer.start()
    withdrawer.join(0.05)
    assert withdrawer.is_alive(), "the receiver was told that its memory is free while it was still written to"
    go_on.set()
    finisher.join(10)
    withdrawer.join(10)
    assert answers == [False]
    assert receive.done
    assert sink.target == b"x"


def test_messages_and_withdrawals_in_many_threads() -> None:
    """Every message is received exactly once, whatever is taken back when."""
    mailbox = Mailbox()
    count = 2000
    got: list[int] = []

    def send() -> None:
        for number in range(count):
            deliver(mailbox, number.to_bytes(2, "little"))

    sender = threading.Thread(target=send)
    sender.start()
    while len(got) < count:
        receive, target = post(mailbox, 2)
        if not mailbox.withdraw(receive):
            assert receive.done
            got.append(int.from_bytes(target, "little"))
    sender.join(10)
    assert got == list(range(count))


# -- ends -------------------------------------------------------------------------------------------------------------

LOST = PeerLost(3, "gone")


def test_what_has_come_from_one_who_is_gone_can_still_be_received() -> None:
    mailbox = Mailbox()
    deliver(mailbox, b"a")
    blocked, _ = post(mailbox, 1, 0, tag=9)
    other, _ = post(mailbox, 1, 1)
    mailbox.gone(0, LOST)
    assert blocked.error is LOST
    assert not other.done
    receive, target = post(mailbox)
    assert receive.error is None
    assert target == b"a"
    assert post(mailbox)[0].error is LOST


def test_a_message_that_was_cut_short_fails_its_receive() -> None:
    mailbox = Mailbox()
    receive, _ = post(mailbox, 3)
    message = Slow(mailbox, b"abc")
    message.bring(2)
    mailbox.gone(0, LOST)
    mailbox.cut(message.arrival, LOST)
    assert receive.error is LOST
    waiting = Slow(mailbox, b"abc", src=1)
    mailbox.gone(1, LOST)
    mailbox.cut(waiting.arrival, LOST)
    assert post(mailbox, 3, 1)[0].error is LOST


@pytest.mark.parametrize("late", [False, True])
def test_a_receive_from_anyone_ends_with_the_last_who_could_send(late: bool) -> None:
    mailbox = Mailbox()
    mailbox.sources = frozenset({0, 1})
    receive, _ = post(mailbox, 1, None)
    mailbox.gone(0, LOST)
    assert not receive.done
    mailbox.gone(1, LOST)
    if late:
        receive, _ = post(mailbox, 1, None)
    assert receive.error is LOST


def test_a_failed_mailbox_fails_everything_with_the_first_error() -> None:
    mailbox = Mailbox()
    receive, _ = post(mailbox)
    deliver(mailbox, b"x", src=1)
    mailbox.fail(LOST)
    mailbox.fail(PeerLost(4, "later"))
    assert receive.error is LOST
    assert post(mailbox, 1, 1)[0].error is LOST


# -- whoever waits ----------------------------------------------------------------------------------------------------


def test_callbacks_and_wakers() -> None:
    mailbox = Mailbox()
    told: list[str] = []
    receive, _ = post(mailbox)
    receive.on_done(lambda: told.append("early"))
    waker = Waker.take()
    receive.add_waker(waker)
    deliver(mailbox, b"x")
    assert told == ["early"]
    receive.on_done(lambda: told.append("late"))
    assert told == ["early", "late"]
    assert is_readable(waker)
    waker.clear()
    assert not is_readable(waker)
    receive.add_waker(waker)
    assert is_readable(waker), "it was done before"
    receive.remove_waker(waker)
    waker.give_back()


def test_a_callback_may_use_the_mailbox() -> None:
    mailbox = Mailbox()
    follow_up: list[Receive] = []
    receive, _ = post(mailbox)
    receive.on_done(lambda: follow_up.append(post(mailbox)[0]))
    deliver(mailbox, b"x")
    deliver(mailbox, b"y")
    assert follow_up[0].done


def is_readable(waker: Waker) -> bool:
    import select

    return bool(select.select([waker.fd], [], [], 0)[0])


def test_a_waker_that_is_set_and_cleared_at_once_never_sticks() -> None:
    """After everything has been cleared, the owner must be able to sleep again."""
    waker = Waker()
    stop = threading.Event()

    def set_it() -> None:
        while not stop.is_set():
            waker.set()

    setters: list[threading.Thread] = [threading.Thread(target=set_it) for _ in range(2)]
    for thread in setters:
        thread.start()
    for _ in range(5000):
        waker.clear()
    stop.set()
    for thread in setters:
        thread.join()
    waker.clear()
    assert not is_readable(waker)


def test_an_owner_that_wakes_before_the_setter_runs_again_can_sleep_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it looks at the waker again and again, and keeps the interpreter from the very thread that set it."""
    waker = Waker()
    write = os.write
    readable: list[bool] = []

    def write_and_wake(fd: int, data: bytes) -> int:
        count = write(fd, data)
        waker.clear()  # as the owner does, in its own thread
        readable.append(is_readable(waker))
        return count

    monkeypatch.setattr(os, "write", write_and_wake)
    waker.set()
    assert readable == [False]


def test_a_set_waker_is_readable_until_it_is_cleared() -> None:
    steps: list[Callable[[], None]] = []
    waker = Waker()
    steps += [waker.set, waker.set]
    for step in steps:
        step()
        assert is_readable(waker)
    waker.clear()
    assert not is_readable(waker)
    waker.clear()
