"""Long messages between ranks that share a GPU, with the stand-in for the driver: nothing goes through the host."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.gpu.fake import DriverArray, FakeDriver, install

import phalanx as px
from phalanx import _native
from phalanx.errors import ChannelClosed, PeerLost, SizeMismatch, Timeout, UsageError
from phalanx.testing import faults, run_ranks

pytestmark = pytest.mark.skipif(not _native.available, reason="ranks share memory only with the core")

LONG = 140_000
"""Elements that are worth it."""


def agreed(group: px.Group, **options: Any) -> FakeDriver:
    """The stand-in, in ranks that know that they share the GPU."""
    fake = install(**options)
    group.all_reduce(DriverArray(np.ones(1, np.float32)))
    fake.reads = 0
    return fake


def numbers(rank: int, count: int = LONG) -> Any:
    return np.random.default_rng(rank).random(count).astype(np.float32)


def same(found: Any, expected: Any, fake: FakeDriver) -> bool:
    reads = fake.reads
    equal = np.array_equal(found.numpy() if isinstance(found, DriverArray) else found, expected)
    fake.reads = reads
    return bool(equal)


def words_alone(fake: FakeDriver) -> bool:
    """Whether only the words of offers were read from the GPU."""
    return all(size <= 4 for size in fake.read_sizes)


def exchanges(group: px.Group) -> list[str]:
    fake = agreed(group)
    fake.read_sizes.clear()
    rank, size, wrong = group.rank, group.world_size, []
    after, before = (rank + 1) % size, (rank - 1) % size
    x, out = DriverArray(numbers(rank)), DriverArray(np.zeros(LONG, np.float32))

    def check(what: str, found: Any, expected: Any) -> None:
        if not words_alone(fake):
            wrong.append(f"{what}: through the host")
        if not same(found, expected, fake):
            wrong.append(what)
        fake.read_sizes.clear()

    for turn in range(3):
        assert group.sendrecv(x, after, out, before) is out
        check(f"sendrecv {turn}", out, numbers(before))
        out.fill(0)
        work, coming = group.isend(x, after, tag=turn), group.irecv(out, before, tag=turn)
        assert coming.wait() is out
        work.wait()
        check(f"isend {turn}", out, numbers(before))
        out.fill(0)
        if rank:
            group.send(x, 0, tag=9)
        else:
            for _ in range(size - 1):
                found = group.recv(out, tag=9)
                check(f"any source {turn}", out, numbers(found.src))
        group.barrier()
    return wrong


def test_exchanges() -> None:
    assert run_ranks(3, exchanges, backend="mesh") == [[]] * 3


def on_the_host(group: px.Group) -> list[str]:
    """The receiver may have an array of the host, or none; a part of a larger array is sent as any."""
    fake, wrong = agreed(group), []
    whole = DriverArray(numbers(0, 2 * LONG))
    part = DriverArray(numbers(0, 2 * LONG)[LONG:], at=whole.address + 4 * LONG)
    if group.rank == 0:
        for _ in range(3):
            group.send(part, 1)
    else:
        host = np.zeros(LONG, np.float32)
        found = [group.recv(host, 0), group.recv(None, 0), group.recv(DriverArray(np.zeros(LONG, np.float32)), 0)]
        wrong = [f"{i}" for i, one in enumerate(found) if not same(one, numbers(0, 2 * LONG)[LONG:], fake)]
    other = DriverArray(numbers(group.rank))
    group.sendrecv(other, 1 - group.rank, other, 1 - group.rank)  # in place: through the host
    return wrong if same(other, numbers(1 - group.rank), fake) else [*wrong, "in place"]


def test_wherever_it_goes() -> None:
    assert run_ranks(2, on_the_host, backend="mesh") == [[]] * 2


def without(group: px.Group, reason: str) -> bool:
    """Through the host, if the memory cannot be opened, or the ranks do not know yet that they share a GPU."""
    fake = install() if reason == "not agreed" else agreed(group)
    x, out = DriverArray(numbers(group.rank)), DriverArray(np.zeros(LONG, np.float32))
    if reason == "private":
        fake.private.add(x.address)
    group.sendrecv(x, 1 - group.rank, out, 1 - group.rank)
    return not words_alone(fake) and same(out, numbers(1 - group.rank), fake)


@pytest.mark.parametrize("reason", ["not agreed", "private"])
def test_memory_that_is_not_lent(reason: str) -> None:
    assert run_ranks(2, without, reason, backend="mesh") == [True, True]


def test_what_does_not_fit_is_dropped() -> None:
    """The sender is done all the same, and the next message comes."""

    def body(group: px.Group) -> str:
        fake = agreed(group)
        x = DriverArray(numbers(group.rank))
        if group.rank == 0:
            for _ in range(4):
                group.send(x, 1)
            group.sendrecv(x, 1, DriverArray(np.zeros(LONG, np.float32)), 1)
            return ""
        with pytest.raises(SizeMismatch, match=r"rank 0 sent float32\[140000\] \(560000 bytes\), but out is"):
            group.recv(DriverArray(np.zeros(LONG + 1, np.float32)), 0)
        with pytest.raises(UsageError, match="same dtype"):
            group.irecv(DriverArray(np.zeros(LONG, np.int32)), 0).wait()
        with pytest.raises(UsageError, match="rank 0 sent an array with tag 0, but this rank called recv_object"):
            group.recv_object(0)
        out = DriverArray(np.zeros(LONG, np.float32))
        group.recv(out, 0)
        assert same(out, numbers(0), fake)
        with pytest.raises(SizeMismatch):
            group.sendrecv(x, 0, DriverArray(np.zeros(LONG + 1, np.float32)), 0)
        return ""

    assert run_ranks(2, body, backend="mesh") == ["", ""]


def sent(group: px.Group, x: DriverArray, later: bool, timeout: float | None = None) -> None:
    """Sends an array to rank 1."""
    if later:
        group.isend(x, 1, timeout=timeout).wait()
    else:
        group.send(x, 1, timeout=timeout)


@pytest.mark.parametrize("later", [False, True])
def test_a_sender_that_gives_up(later: bool) -> None:
    """What it changes then is not received: the receive says so. The group goes on."""

    def body(group: px.Group) -> str:
        fake = agreed(group)
        x = DriverArray(numbers(group.rank))
        if group.rank == 0:
            with pytest.raises(Timeout, match="send"):
                sent(group, x, later, timeout=0.2)
            x.fill(7)
            group.send_object("gave up", 1, tag=1)
            group.send(x, 1)
            return ""
        assert group.recv_object(0, tag=1) == "gave up"
        out = DriverArray(np.zeros(LONG, np.float32))
        with pytest.raises(ChannelClosed, match="gave up sending this array"):
            group.recv(out, 0)
        group.recv(out, 0)
        assert same(out, np.full(LONG, 7, np.float32), fake)
        return ""

    assert run_ranks(2, body, backend="mesh") == ["", ""]


@pytest.mark.parametrize("later", [False, True])
def test_a_receiver_that_dies(later: bool) -> None:
    def body(group: px.Group) -> Any:
        agreed(group)
        x = DriverArray(numbers(group.rank))
        if group.rank == 1:
            time.sleep(0.3)
            faults.kill_self()
        began = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            sent(group, x, later)
        return caught.value.peer, time.monotonic() - began < 5

    assert run_ranks(2, body, backend="mesh", may_die=[1])[0] == (1, True)


def test_a_sender_that_dies() -> None:
    """Its offer has come, but its memory is gone."""

    def body(group: px.Group) -> Any:
        agreed(group)
        if group.rank == 0:
            work = group.isend(DriverArray(numbers(0)), 1)
            group.send_object("offered", 1, tag=1)
            time.sleep(0.3)
            assert not work.done()
            faults.kill_self()
        assert group.recv_object(0, tag=1) == "offered"
        time.sleep(1.0)
        with pytest.raises(PeerLost) as caught:
            group.recv(DriverArray(np.zeros(LONG, np.float32)), 0)
        return caught.value.peer

    assert run_ranks(2, body, backend="mesh", may_die=[0])[1] == 0


def test_a_sender_that_is_stopped() -> None:
    """Its array is taken. It accepts no connection for the answer: the receiver does not wait for that."""

    def body(group: px.Group) -> Any:
        fake = agreed(group)
        if group.rank == 0:
            group.isend(DriverArray(numbers(0)), 1)
            group.send_object("offered", 1, tag=1)
            faults.stop_self()
        assert group.recv_object(0, tag=1) == "offered"
        time.sleep(0.3)
        began = time.monotonic()
        out = group.recv(DriverArray(np.zeros(LONG, np.float32)), 0, timeout=20)
        return same(out, numbers(0), fake), time.monotonic() - began < 5

    assert run_ranks(2, body, backend="mesh", may_die=[0])[1] == (True, True)


def test_a_receiver_that_closes_the_group_at_once() -> None:
    """The sender has its answer all the same, which needed a connection first."""

    def body(group: px.Group) -> bool:
        agreed(group)
        with group.subgroup([0, 1]) as messages:
            if group.rank == 0:
                x = DriverArray(numbers(0))
                messages.all_reduce(x)
                messages.send(x, 1)
            else:
                out = DriverArray(numbers(0))
                messages.all_reduce(out)
                messages.recv(out, 0)
        return True

    assert run_ranks(2, body, backend="mesh") == [True, True]


@pytest.mark.parametrize("heard", ["before", "after"])
def test_a_sender_gives_up_because_a_third_rank_is_lost(heard: str) -> None:
    """The receiver names the lost rank, whether it hears of the loss before it sees the sender's word or after."""

    def body(group: px.Group) -> Any:
        fake = agreed(group)
        if group.rank == 2:
            group.recv_object(0)
            faults.kill_self()
        if group.rank == 0:
            work = group.isend(DriverArray(numbers(0)), 1)
            group.send_object("offered", 2)
            with pytest.raises(PeerLost):
                work.wait()
            return work.exception().peer
        copy, fail = fake.copy, group._health.fail

        def slow(*arguments: Any) -> None:
            time.sleep(1.5)
            copy(*arguments)

        fake.copy = slow  # type: ignore[method-assign]
        if heard == "after":

            def late(error: px.PhalanxError) -> None:
                threading.Timer(2.0, fail, (error,)).start()

            group._health.fail = late  # type: ignore[method-assign]
        with pytest.raises(px.PhalanxError) as caught:
            group.recv(DriverArray(np.zeros(LONG, np.float32)), 0)
        return type(caught.value).__name__, caught.value.peer, "recv(src=0)" in str(caught.value)

    assert run_ranks(3, body, backend="mesh", may_die=[2])[:2] == [2, ("PeerLost", 2, True)]


def test_offers_are_taken_back_and_used_again() -> None:
    """Many messages need few words, and memory that was freed and made anew is opened anew."""

    def body(group: px.Group) -> int:
        fake = agreed(group)
        for turn in range(20):
            x = DriverArray(np.full(LONG, turn + group.rank, np.float32))
            out = DriverArray(np.zeros(LONG, np.float32))
            group.sendrecv(x, 1 - group.rank, out, 1 - group.rank)
            assert same(out, np.full(LONG, turn + 1 - group.rank, np.float32), fake)
            fake.free(x.address)
        loans = group._loans
        assert loans is not None
        return next(loans._numbers)

    assert run_ranks(2, body, backend="mesh") == [1, 1]


def short_ones(group: px.Group) -> list[str]:
    """Messages that are not lent, by all verbs; some in rings that are full, some to ranks that do not wait yet."""
    install()
    rank, size, wrong = group.rank, group.world_size, []
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in (np.float32, np.int8, np.complex64):
        for count in (0, 1, 16_000):
            x, out = DriverArray(numbers(rank, count).astype(dtype)), DriverArray(np.zeros(count, dtype))
            expected = numbers(before, count).astype(dtype)
            rest = [group.isend(x, after, tag=1) for _ in range(20 if count > 1 else 0)]
            group.sendrecv(x, after, out, before)
            if not np.array_equal(out.numpy(), expected):
                wrong.append(f"sendrecv of {count} {dtype.__name__}")
            for _ in rest:
                group.recv(out, before, tag=1)
            for work in rest:
                work.wait()
            if rank % 2:
                group.send(x, before, tag=2)
            elif after % 2:
                time.sleep(0.1 if count else 0)
                group.recv(out, after, tag=2)
                if not np.array_equal(out.numpy(), numbers(after, count).astype(dtype)):
                    wrong.append(f"recv of {count} {dtype.__name__}")
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_short_messages(ranks: int) -> None:
    assert run_ranks(ranks, short_ones, backend="mesh", timeout=60) == [[]] * ranks


def waits_for_nothing(group: px.Group) -> str:
    install()
    x = DriverArray(np.ones(4, np.float32))
    if group.rank:
        group.send(x, 0, tag=5)
        group.barrier()
        return ""
    with pytest.raises(px.Timeout) as raised:
        group.sendrecv(x, 1, DriverArray(np.ones(4, np.float32)), 1, timeout=0.3)
    group.recv(x, 1, tag=5)
    group.barrier()
    return str(raised.value)


def test_an_exchange_that_nobody_answers() -> None:
    """The receive is given up; its group goes on."""
    assert "sendrecv(dst=1, src=1)" in run_ranks(2, waits_for_nothing, backend="mesh", timeout=60)[0]
