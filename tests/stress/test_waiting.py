"""Waiting over real connections: deadlines, turns, callbacks, and threads that share a channel."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.lateness import bound
from tests.stress.support import LIMIT, groups, pattern, together

import phalanx as px
from phalanx.backends import lane_thread as lane_thread_module
from phalanx.deadline import Deadline
from phalanx.group.data.arrays import adapt
from phalanx.rendezvous.control import KnownStatuses
from phalanx.transports.mailbox import BufferSink
from phalanx.wire.classic import frames as classic
from phalanx.wire.frames import FrameKind, pack_header

LATE = 5.0
"""Seconds after which something that should be immediate counts as forgotten, on a machine that is busy."""
KINDS = ["mesh", "mesh-classic"]


@pytest.mark.parametrize("backend", KINDS)
def test_a_deadline_holds_while_other_messages_pour_in(backend: str) -> None:
    with groups(2, backend) as (here, there):
        enough = threading.Event()

        def pour() -> None:
            with contextlib.suppress(px.PhalanxError):
                while not enough.is_set():
                    there.send(np.zeros(1000), 0, tag=1, timeout=2)

        def wait_in_vain() -> float:
            began = time.monotonic()
            with pytest.raises(px.Timeout):
                here.recv(src=1, tag=2, timeout=0.3)
            enough.set()
            return time.monotonic() - began

        assert together(wait_in_vain, pour, pour)[0] < bound(LATE)


@pytest.mark.parametrize("backend", KINDS)
def test_nobody_is_kept_out_by_one_who_sends_much(backend: str) -> None:
    with groups(3, backend) as (here, much, little):
        for other in (much, little):  # now both are connected
            other.send(np.zeros(1), 0)
            here.recv(src=other.rank)
        # All of it is on its way before anything is received.
        for number in range(1000):
            much.send(np.full(1, number), 0)
        for number in range(10):
            little.send(np.full(1, number), 0)
        sources = [here.recv().src for _ in range(100)]
        assert sources.count(2) == 10


def test_a_callback_may_wait_in_the_middle_of_a_wait() -> None:
    with groups(3, "mesh") as (here, one, two):
        lane = here._messages
        nested: list[float] = []
        entered = threading.Event()

        def callback() -> None:
            entered.set()
            nested.append(float(here.recv(src=1, tag=2)[0]))

        first = lane.post(1, 1, BufferSink(memoryview(bytearray(8))))
        first.on_done(callback)
        last = lane.post(None, 3, BufferSink(memoryview(bytearray(8))))

        def wait() -> float:
            began = time.monotonic()
            assert lane.wait([last], Deadline(LIMIT))
            return time.monotonic() - began

        def talk() -> None:
            sending = one._messages.start_send(0, FrameKind.RAW, 1, b"", [memoryview(bytes(8))], Deadline(LIMIT))
            one._messages.wait([sending], Deadline(LIMIT))
            assert entered.wait(LIMIT)
            # The channel of a rank that was silent so far is opened while the outer wait is not looking.
            sending = two._messages.start_send(0, FrameKind.RAW, 3, b"", [memoryview(bytes(8))], Deadline(LIMIT))
            two._messages.wait([sending], Deadline(LIMIT))
            one.send(np.full(1, 7.0), 0, tag=2)

        took, _ = together(wait, talk)
        assert nested == [7.0]
        assert took < bound(LATE)


def test_the_callback_of_a_message_that_was_refused_may_receive_the_next() -> None:
    with groups(2, "mesh") as (here, there):
        got: list[Any] = []
        done = threading.Event()

        def callback(work: px.Work) -> None:
            got.append(work.exception())
            got.append(here.recv(src=1, timeout=LATE))
            done.set()

        work = here.irecv(np.zeros(3), src=1)
        work.add_done_callback(callback)
        there.send(np.ones(5), 0)
        there.send(np.ones(2), 0)
        assert done.wait(2 * LATE), "it waits for a lock that its own thread holds"
        assert isinstance(got[0], px.SizeMismatch)
        assert list(got[1]) == [1.0, 1.0]


def test_threads_that_share_a_channel_all_get_theirs() -> None:
    with groups(2, "mesh") as (here, there):
        count, tags = 100, 8

        def receive(tag: int) -> None:
            for number in range(count):
                assert here.recv(src=1, tag=tag)[0] == number

        def send() -> None:
            for number in range(count):
                for tag in range(tags):
                    there.send(np.full(1 + 20 * tag, number), 0, tag=tag)

        together(send, *[partial(receive, tag) for tag in range(tags)])


def test_closing_sends_to_all_even_if_one_of_them_is_gone() -> None:
    big = pattern(1, 32 << 20)
    with groups(3, "mesh") as (here, gone, slow):
        here.send(np.zeros(1), 1)
        gone.recv(src=0)
        works = [here.isend(big, 1), here.isend(big, 2)]
        closing = threading.Event()

        def close() -> None:
            closing.set()
            here.close()

        def leave() -> None:
            closing.wait(LIMIT)
            time.sleep(0.2)
            gone.close()

        def receive() -> bool:
            closing.wait(LIMIT)
            time.sleep(0.5)
            return bool((slow.recv(src=0) == big).all())

        assert together(close, leave, receive)[2]
        assert isinstance(works[0].exception(), px.PeerLost)
        assert works[1].exception() is None


def test_many_receives_that_time_out_together_ask_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with groups(2, "mesh") as (here, there):
        asked: list[float] = []

        def ask(*_arguments: object) -> KnownStatuses:
            asked.append(time.monotonic())
            time.sleep(0.3)  # as long as it takes when a rank is stopped
            return KnownStatuses(None)

        monkeypatch.setattr(here.backend.control, "statuses", ask)
        began = time.monotonic()
        works = [here.irecv(src=1, tag=tag, timeout=0.1) for tag in range(50)]
        moving = here.irecv(src=1, tag=100)
        there.send(np.ones(1), 0, tag=100)
        for work in works:
            with pytest.raises(px.Timeout, match=r"recv\(src=1"):
                work.wait()
        assert time.monotonic() - began < bound(LATE)
        assert len(asked) <= 1 + (time.monotonic() - began) // 1.0
        assert moving.wait()[0] == 1.0


def test_a_thread_that_waits_uses_no_processor() -> None:
    with groups(2, "mesh") as (here, _there):
        works = [here.irecv(src=1, tag=tag, timeout=LIMIT) for tag in range(1, 20)]
        before = time.process_time()
        with pytest.raises(px.Timeout):
            here.recv(src=1, timeout=2.0)
        used = time.process_time() - before
        assert not any(work.done() for work in works)
        assert used < 0.5


@pytest.mark.parametrize("backend", ["mesh", "simulated"])
def test_a_thousand_receives_under_way(backend: str) -> None:
    count = 1000
    with groups(2, backend) as (here, there):
        before = time.process_time()
        works = [here.irecv(src=1, tag=tag) for tag in range(count)]
        for tag in reversed(range(count)):  # the worst order
            there.send(np.full(1, tag), 0, tag=tag)
        assert [int(work.wait()[0]) for work in works] == list(range(count))
        assert time.process_time() - before < 20


def test_no_more_descriptors_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(24, "Too many open files")

    with groups(2, "mesh") as (here, there):
        with monkeypatch.context() as broken:
            broken.setattr(lane_thread_module, "Waker", refuse)
            with pytest.raises(px.OutOfResources, match="RLIMIT_NOFILE"):
                here.irecv(src=1)
        # Nor does the receive that nobody knows of take the message.
        there.send(np.full(1, 3.0), 0)
        assert here.recv(src=1)[0] == 3.0


def test_a_message_that_does_not_fit_is_no_reason_to_cut_the_other_half_short() -> None:
    big = pattern(2, 32 << 20)
    with groups(2, "mesh") as (here, there):

        def exchange() -> None:
            with pytest.raises(px.SizeMismatch):
                here.sendrecv(big, 1, np.zeros(3), 1)

        def receive_late() -> bool:
            there.send(np.zeros(5), 0)
            time.sleep(0.3)
            return bool((there.recv(src=0) == big).all())

        assert together(exchange, receive_late)[1]
        there.send(np.ones(1), 0)
        here.send(np.ones(1), 1)
        assert (here.recv(src=1)[0], there.recv(src=0)[0]) == (1.0, 1.0)


def test_a_sendrecv_that_cannot_send_leaves_no_receive_behind() -> None:
    with groups(3, "tcp") as (root, leaf, _other):
        with pytest.raises(px.NoConnection):
            leaf.sendrecv(np.zeros(1), 2, src=0)
        root.send(np.full(1, 4.0), 1)
        assert leaf.recv(src=0)[0] == 4.0


def begin_a_message(group: px.Group, out: npt.NDArray[Any], tag: int) -> None:
    """Sends the head and the first bytes of an array to rank 0, and nothing more."""
    lane: Any = group._messages
    group.send(np.zeros(0), 0, tag=99)  # opens the channel
    description = adapt(out, write=False).description.pack()
    head = pack_header(FrameKind.ARRAY, tag, len(description), out.nbytes) + description + bytes(100)
    if hasattr(lane, "lane_id"):
        length = len(head) - 100 + out.nbytes + len(lane.lane_id)
        lane._world.outbound[0].stream.send([classic.pack_escaped_length(length) + lane.lane_id + head])
    else:
        lane._outbound[0].stream.send([head])


@pytest.mark.parametrize("backend", ["mesh", "mesh-classic", "simulated"])
def test_closing_ends_whatever_is_blocked(backend: str) -> None:
    out = np.zeros(1000)
    calls: list[Callable[[px.Group], Any]] = [
        lambda group: group.recv(src=1),
        lambda group: group.recv(),
        lambda group: group.irecv(src=1, tag=3).wait(),
        lambda group: group.recv(out, src=1, tag=4),
        lambda group: group.barrier(),
        lambda group: group.all_reduce(np.ones(3)),
    ]
    with groups(2, backend) as (here, there):
        mine, other = together(lambda: here.subgroup([0, 1]), lambda: there.subgroup([0, 1]))
        if backend != "simulated":
            begin_a_message(other, out, 4)

        def blocked(call: Callable[[px.Group], Any]) -> float:
            with pytest.raises((px.ChannelClosed, px.Closed)):
                call(mine)
            return time.monotonic()

        def close() -> float:
            time.sleep(0.5)
            at = time.monotonic()
            mine.close()
            return at

        *ended, at = together(*[partial(blocked, call) for call in calls], close)
        assert max(ended) - at < bound(LATE)
