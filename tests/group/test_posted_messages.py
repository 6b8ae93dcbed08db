"""Messages that the call does not wait for; and exchanges, which go both ways at once and lend what is long."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from tests.failures.system_calls import READ_PEER, refuse, siblings_can_read
from tests.group.test_lent_messages import ring_to, warm_up

import phalanx as px
from phalanx import _native
from phalanx.testing import run_ranks
from phalanx.transports.lending import LEND_IN_EXCHANGES_FROM

needs_rings = pytest.mark.skipif(not _native.available, reason="rings need the core (PHALANX_PURE is set)")
needs_peers = pytest.mark.skipif(not siblings_can_read(), reason="this machine lets no process read another's memory")
Transport = Literal["auto", "tcp"]
over_both = pytest.mark.parametrize("transport", ["auto", "tcp"])
"""Rings, where there is a core, and TCP."""
LONG = LEND_IN_EXCHANGES_FROM
"""Bytes that an exchange lends."""


@pytest.mark.parametrize(
    "settings", [{}, {"PHALANX_TRANSPORT": "tcp"}, {"PHALANX_PURE": "1"}], ids=["rings", "tcp", "pure"]
)
def test_posted_messages_keep_what_is_promised(settings: dict[str, str]) -> None:
    command = [sys.executable, "-m", "phalanx", "run", "-n", "3", "-m", "tests.group.posted_messages", "mesh"]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all of them ran") == 3


def exchange(group: px.Group, sizes: tuple[int, ...] = (LONG, LONG + 1, 8 * LONG, 3 << 20)) -> None:
    peer = 1 - group.rank
    for turn in range(3):
        for size in sizes:
            x = np.full(size, 10 * turn + group.rank, np.uint8)
            out = np.zeros(size, np.uint8)
            assert group.sendrecv(x, peer, out, peer) is out
            assert (out == 10 * turn + peer).all()
            work, sent = group.irecv(out, peer), group.isend(x, peer)
            first, second = (work, sent) if turn % 2 else (sent, work)
            first.wait()
            second.wait()
            assert (out == 10 * turn + peer).all()
            sent = group.isend(x, peer)
            assert (group.recv(np.zeros(size, np.uint8), peer) == 10 * turn + peer).all()
            sent.wait()


def lend_in_exchanges(group: px.Group) -> int:
    warm_up(group)
    exchange(group)
    return int(ring_to(group, 1 - group.rank).lent)


@needs_rings
@needs_peers
def test_what_is_long_in_an_exchange_is_read_where_it_lies() -> None:
    assert all(lent > 0 for lent in run_ranks(2, lend_in_exchanges, backend="mesh"))


def exchange_what_waits_for_another(group: px.Group) -> None:
    """What comes is not what is waited for: it is put back, and nothing of it is lost."""
    warm_up(group)
    peer = 1 - group.rank
    for size in (1, 1000, 10_000, 300_000):
        out = np.zeros(size)
        if group.rank == 0:
            group.send(np.full(size, 3.0), peer, tag=3)
            group.send_object({"size": size}, peer, tag=4)
            group.sendrecv(np.full(size, 1.0), peer, out, peer)
        else:
            group.sendrecv(np.full(size, 2.0), peer, out, peer)
            assert group.recv(np.zeros(size), peer, tag=3)[0] == 3
            assert group.recv_object(peer, tag=4) == {"size": size}
        assert (out == 1 + (group.rank == 0)).all()


@over_both
def test_what_comes_may_be_for_another_receive(transport: Transport) -> None:
    run_ranks(2, exchange_what_waits_for_another, backend="mesh", options=px.Options(transport=transport))


def exchange_a_few(group: px.Group) -> None:
    warm_up(group)
    exchange(group, (0, 1, 255, 16 << 10, (16 << 10) + 1, 64 << 10, 3 << 20))


def test_exchanges_over_tcp() -> None:
    run_ranks(2, exchange_a_few, backend="mesh", options=px.Options(transport="tcp"))


def receive_without_the_collector(group: px.Group) -> None:
    warm_up(group)
    gc.disable()
    peer = 1 - group.rank
    ways: list[Callable[[], Any]] = [
        lambda: group.irecv(np.empty(size), peer).wait(),
        lambda: group.irecv(None, peer).wait(),
        lambda: group.irecv(None, None).wait().data,
        lambda: group.recv(None, peer),
        lambda: group.sendrecv(np.ones(size), peer, None, peer),
    ]
    for size in (1, 10_000, 300_000):
        for number, way in enumerate(ways):
            sent = group.isend(np.full(size, 7.0), peer) if number < 4 else None
            found = weakref.ref(way())
            if sent is not None:
                sent.wait()
            end = time.monotonic() + 10  # a thread of the group may be at work with it
            while found() is not None and time.monotonic() < end:
                time.sleep(0.001)
            assert found() is None, (size, number)


@over_both
def test_what_was_received_is_free_with_the_last_reference(transport: Transport) -> None:
    run_ranks(2, receive_without_the_collector, backend="mesh", options=px.Options(transport=transport))


def may_not_read(group: px.Group) -> tuple[int, int]:
    warm_up(group)
    if group.rank == 0:
        refuse(READ_PEER, errno.EPERM)
    exchange(group)
    ring = ring_to(group, 1 - group.rank)
    return int(ring.exchanges_from), int(ring.lent)


@needs_rings
@needs_peers
def test_a_rank_that_may_not_read_gets_it_through_the_ring() -> None:
    (_, lent_to_the_other), (exchanges_from, lent_to_it) = run_ranks(2, may_not_read, backend="mesh")
    assert lent_to_the_other > 0
    assert (exchanges_from, lent_to_it) == (0, 0), "it was tried once"


def exchange_unlike_lengths(group: px.Group) -> None:
    """One way is long and the other short, or of another rank."""
    warm_up(group)
    peer = 1 - group.rank
    for mine, theirs in ((1, 8 * LONG), (8 * LONG, 1), (0, 2 * LONG), (2 * LONG, 0)):
        size, other = (mine, theirs) if group.rank == 0 else (theirs, mine)
        out = np.zeros(other, np.uint8)
        group.sendrecv(np.full(size, 7, np.uint8), peer, out, peer)
        assert (out == 7).all()


@over_both
def test_the_two_ways_of_an_exchange_may_differ_in_length(transport: Transport) -> None:
    run_ranks(2, exchange_unlike_lengths, backend="mesh", options=px.Options(transport=transport))


def give_up_an_exchange(group: px.Group) -> list[int]:
    """The other rank comes late: nobody reads the array of the one that gave up."""
    warm_up(group)
    peer, size = 1 - group.rank, 16 * LONG
    if group.rank == 0:
        x = np.full(size, 5, np.uint8)
        with pytest.raises(px.Timeout):
            group.sendrecv(x, 1, np.zeros(size, np.uint8), 1, timeout=0.3)
        x[:] = 9
        group.barrier()
        return []
    group.barrier()
    out = np.zeros(size, np.uint8)
    with pytest.raises((px.ChannelClosed, px.Timeout, px.PeerLost)):
        group.recv(out, peer, timeout=1.0)
    return sorted(set(out.tolist()))


@over_both
def test_an_array_is_not_read_after_its_exchange_has_raised(transport: Transport) -> None:
    _, seen = run_ranks(2, give_up_an_exchange, backend="mesh", options=px.Options(transport=transport))
    assert 9 not in seen


def look_at_one_that_moved_along(group: px.Group) -> None:
    warm_up(group)
    peer, size = 1 - group.rank, 8 << 20
    for looks in range(3):
        out = np.zeros(size, np.uint8)
        work, sent = group.irecv(out, peer), group.isend(np.full(size, 3, np.uint8), peer)
        first, other = (work, sent) if looks % 2 else (sent, work)
        first.wait()
        end = time.monotonic() + 20
        while not other.done():
            assert time.monotonic() < end
            time.sleep(0.001)
        assert "done" in repr(other)
        assert other.exception() is None
        assert (out == 3).all()
        group.barrier()


@over_both
def test_a_look_finds_that_a_message_has_moved_along_with_another(transport: Transport) -> None:
    run_ranks(2, look_at_one_that_moved_along, backend="mesh", options=px.Options(transport=transport))


class Stop(Exception):
    """Raised by the handler of a signal."""


def after(seconds: float, call: Callable[[], object]) -> None:
    """Has a signal handler call it; in the main thread, as all of them."""
    signal.signal(signal.SIGALRM, lambda *_: call())
    signal.setitimer(signal.ITIMER_REAL, seconds)


def stop() -> None:
    raise Stop


def interrupt_while_the_other_is_late(group: px.Group) -> list[float]:
    """In `sendrecv`, `wait`, `send` and `recv`: the handler's exception comes out, and what goes on is right."""
    warm_up(group)
    peer, size = 1 - group.rank, 200_000
    found = []
    if group.rank == 0:
        out = np.zeros(size)
        after(0.02, stop)
        with pytest.raises(Stop):
            group.sendrecv(np.zeros(2), 1, np.zeros(2), 1, tag=1)  # sent, and nothing came
        work, sent = group.irecv(out, 1), group.isend(np.full(size, 2.0), 1)
        after(0.02, stop)
        with pytest.raises(Stop):
            work.wait()
        assert not out.any()
        group.barrier()
        work.wait()
        sent.wait()
        assert (out == 5).all()
    else:
        group.barrier()
        assert not group.recv(np.zeros(2), 0, tag=1).any()
        work = group.irecv(np.zeros(size), 0)
        group.send(np.full(size, 5.0), 0)
        found = sorted(set(work.wait().tolist()))
    group.barrier()
    assert group.sendrecv(np.full(3, float(group.rank)), peer, np.zeros(3), peer)[0] == peer
    return found


@over_both
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers that send signals")
def test_an_interrupt_swaps_and_loses_nothing(transport: Transport) -> None:
    assert run_ranks(2, interrupt_while_the_other_is_late, backend="mesh", options=px.Options(transport=transport))[
        1
    ] == [2.0]


def send_in_a_handler(group: px.Group) -> None:
    """In the middle of messages that go both ways."""
    warm_up(group)
    peer, size = 1 - group.rank, 1 << 20
    heard: list[str] = []

    def handle() -> None:
        try:
            group.isend(np.full(4, 77.0), peer, tag=5)
        except px.UsageError as error:
            heard.append(str(error))

    for verb in ("sendrecv", "wait"):
        out = np.zeros(size)
        if group.rank == 0:
            after(0.02, handle)
            if verb == "sendrecv":
                group.sendrecv(np.full(size, 1.0), peer, out, peer)
            else:
                work, sent = group.irecv(out, peer), group.isend(np.full(size, 1.0), peer)
                work.wait()
                sent.wait()
            assert (out == 2).all()
            group.send(np.zeros(4), peer, tag=5)
        else:
            time.sleep(0.3)
            group.sendrecv(np.full(size, 2.0), peer, out, peer)
            assert (out == 1).all()
            assert group.recv(np.zeros(4), peer, tag=5)[0] in (0.0, 77.0)
    assert all("signal handler" in text for text in heard)


@over_both
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers that send signals")
def test_a_handler_puts_nothing_into_the_middle_of_a_message(transport: Transport) -> None:
    run_ranks(2, send_in_a_handler, backend="mesh", options=px.Options(transport=transport))


def fork_with_messages_under_way(group: px.Group) -> list[str]:
    warm_up(group)
    peer, x = 1 - group.rank, np.zeros(10)
    work, sent = group.irecv(np.zeros(1 << 20), peer, tag=9), group.isend(np.ones(1 << 20), peer, tag=9)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        try:
            for call in (
                lambda: group.isend(x, peer),
                lambda: group.irecv(x, peer),
                lambda: group.send(x, peer),
                lambda: group.recv(x, peer),
                lambda: group.sendrecv(x, peer, np.zeros(10), peer),
                *(one.wait for one in (sent, work) if not one.done()),  # the others had ended in the parent
            ):
                try:
                    call()
                    said.append("nothing")
                except BaseException as error:
                    said.append(type(error).__name__)
            os.write(write, ",".join(said).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        said = answers.read().split(",")
    os.waitpid(pid, 0)
    work.wait()
    sent.wait()
    group.barrier()
    return said


def fork_while_a_thread_moves_messages(group: px.Group) -> int:
    """The group's thread takes over what nobody waits for, and has the channel in the middle of that."""
    warm_up(group)
    peer, refused = 1 - group.rank, 0
    for turn in range(20):
        work, sent = group.irecv(np.zeros(1 << 20), peer, tag=9), group.isend(np.ones(1 << 20), peer, tag=9)
        time.sleep((turn % 5) * 0.0004)
        pid = os.fork()
        if pid == 0:
            try:
                group.irecv(np.zeros(10), peer)
            except px.Closed:
                os._exit(0)
            finally:
                os._exit(1)
        refused += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        work.wait()
        sent.wait()
    return refused


@over_both
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_refused_whatever_its_parent_was_doing(transport: Transport) -> None:
    options = px.Options(transport=transport)
    assert run_ranks(2, fork_while_a_thread_moves_messages, backend="mesh", options=options) == [20, 20]


@over_both
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_refused_at_once(transport: Transport) -> None:
    for said in run_ranks(2, fork_with_messages_under_way, backend="mesh", options=px.Options(transport=transport)):
        assert said == ["Closed"] * len(said)
        assert len(said) >= 5


def post_what_is_very_long(group: px.Group) -> None:
    """Callbacks leave both to the lane's general way, whose two ends then write and read at the same time."""
    warm_up(group)
    peer = 1 - group.rank
    x, out = np.full(96 << 20, 1 + group.rank, np.uint8), np.zeros(96 << 20, np.uint8)
    for _ in range(3):
        out[:] = 0
        works = [group.irecv(out, peer), group.isend(x, peer)]
        for work in works:
            work.add_done_callback(lambda _: None)
        for work in works:
            work.wait()
        assert (out == 1 + peer).all()


@over_both
def test_messages_of_many_megabytes_on_the_general_way(transport: Transport) -> None:
    run_ranks(2, post_what_is_very_long, backend="mesh", options=px.Options(transport=transport))
