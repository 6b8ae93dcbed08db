"""Messages through rings between real processes: the same as over TCP, and in order."""

from __future__ import annotations

import hashlib
import random
import threading

import numpy as np
import pytest
from tests.transports.support import quick_ones, warm

import phalanx as px
from phalanx.testing import run_ranks

pytestmark = pytest.mark.usefixtures("native")

LONG = 64 << 20


def _in_order(group: px.Group) -> int:
    x = np.zeros(3, np.int64)
    for number in range(500):
        if group.rank == 0:
            x[:] = number
            group.send(x, 1)
            if number % 100 == 50:
                group.recv(x, 1)  # a word now and then, so that the offer is seen and the switch comes
        else:
            group.recv(x, 0)
            assert (x == number).all(), (x, number)
            if number % 100 == 50:
                group.send(x, 0)
    return quick_ones(group)


def test_the_order_is_kept_over_the_switch() -> None:
    assert min(run_ranks(2, _in_order, backend="mesh")) > 100


def _tags(group: px.Group) -> None:
    warm(group)
    peer = 1 - group.rank
    for size in (1, 1000, 6000):  # all of them fit into the ring
        for tag in range(8):
            group.send(np.full(size, tag), peer, tag=tag)
        out = np.zeros(size, np.int64)
        for tag in (7, 3, 5, 0, 1, 2, 6, 4):
            group.recv(out, peer, tag=tag)
            assert (out == tag).all()
    group.send(np.zeros(3), peer, tag=(1 << 63) - 1)
    group.recv(np.zeros(3), peer, tag=(1 << 63) - 1)


def test_tags_in_any_order() -> None:
    run_ranks(2, _tags, backend="mesh")


def _from_anyone(group: px.Group) -> None:
    warm(group)
    if group.rank == 0:
        seen: list[tuple[int, int]] = []
        out = np.zeros(2, np.int64)
        for _ in range(150):
            message = group.recv(out)
            assert out[0] == message.src
            seen.append((message.src, int(out[1])))
        for src in (1, 2, 3):
            assert [number for who, number in seen if who == src] == list(range(50))
    else:
        for number in range(50):
            group.send(np.array([group.rank, number]), 0)


def test_a_receive_from_anyone() -> None:
    run_ranks(4, _from_anyone, backend="mesh")


def _objects(group: px.Group) -> None:
    warm(group)
    peer = 1 - group.rank
    for number in range(30):
        thing = {"number": number, "array": np.arange(number * 1000), "text": "x" * number}
        group.send_object(thing, peer)
        group.send(np.full(4, number), peer)  # in between, the fast path
        got = group.recv_object(peer)
        assert got["number"] == number
        assert (got["array"] == thing["array"]).all()
        assert (group.recv(src=peer) == number).all()


def test_objects_and_arrays_in_turn() -> None:
    run_ranks(2, _objects, backend="mesh")


def _floods(group: px.Group) -> None:
    warm(group)
    peer = 1 - group.rank
    rng = np.random.default_rng(group.rank)
    sizes = np.random.default_rng(9).integers(0, 300_000, 120)
    sent = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    outs = [np.zeros(size, np.uint8) for size in sizes]
    works = [group.isend(x, peer) for x in sent] + [group.irecv(out, peer) for out in outs]
    for work in works:
        work.wait()
    theirs = np.random.default_rng(peer)
    for out, size in zip(outs, sizes, strict=True):
        assert (out == theirs.integers(0, 256, size, np.uint8)).all()
    # The channels serve simple messages again.
    before = quick_ones(group)
    x = np.zeros(1)
    for _ in range(10):
        group.sendrecv(x, peer, x.copy(), peer)
        group.send(x, peer)
        group.recv(x, peer)
    assert quick_ones(group) > before


def test_floods_both_ways() -> None:
    run_ranks(2, _floods, backend="mesh")


def _long_ones(group: px.Group) -> list[str]:
    warm(group)
    peer = 1 - group.rank
    x = np.random.default_rng(group.rank).integers(0, 256, LONG, np.uint8)
    out = np.empty_like(x)
    group.sendrecv(x, peer, out, peer)
    found = [hashlib.sha256(out).hexdigest()]
    out[:] = 0
    if group.rank == 0:
        group.send(x, peer)
        group.recv(out, peer)
    else:
        group.recv(out, peer)
        group.send(x, peer)
    return [hashlib.sha256(x).hexdigest(), *found, hashlib.sha256(out).hexdigest()]


def test_long_messages() -> None:
    (mine, *got), (other, *had) = run_ranks(2, _long_ones, backend="mesh")
    assert got == [other, other]
    assert had == [mine, mine]


def _mismatches(group: px.Group) -> None:
    warm(group)
    peer = 1 - group.rank
    for _ in range(3):
        if group.rank == 0:
            group.send(np.zeros(4, np.float32), peer)
            group.send(np.zeros(4, np.float64), peer)
            group.send_object([1], peer)
            group.send(np.arange(6.0).reshape(2, 3), peer)
        else:
            with pytest.raises(px.SizeMismatch, match=r"float32\[4\]"):
                group.recv(np.zeros(5, np.float32), peer)
            with pytest.raises(px.UsageError, match=r"float64\[4\], but out is int64"):
                group.recv(np.zeros(4, np.int64), peer)
            with pytest.raises(px.UsageError, match="sent an object"):
                group.recv(np.zeros(4), peer)
            out = np.zeros(6)
            assert group.recv(out, peer) is out  # the same number of elements in another shape
            assert (out == np.arange(6)).all()
    for bad in (2, -1, 1.0, None, "1", [1]):
        with pytest.raises(px.InvalidRank):
            group.send(np.zeros(1), bad)  # type: ignore[arg-type]
    with pytest.raises(px.SelfSend):
        group.send(np.zeros(1), group.rank)
    with pytest.raises(px.UsageError, match="tag"):
        group.recv(np.zeros(1), peer, tag=-1)


def test_what_does_not_fit_is_refused_as_ever() -> None:
    run_ranks(2, _mismatches, backend="mesh")


def _threads(group: px.Group) -> None:
    warm(group)
    peer = 1 - group.rank
    errors: list[BaseException] = []

    def talk(tag: int) -> None:
        rng = random.Random(tag)
        try:
            for number in range(150):
                size = rng.choice([1, 10, 1000, 50_000])
                x, out = np.full(size, number * 8 + tag), np.zeros(size, np.int64)
                if tag % 2:
                    group.sendrecv(x, peer, out, peer, tag=tag)
                elif group.rank == 0:
                    group.send(x, peer, tag=tag)
                    group.recv(out, peer, tag=tag)
                else:
                    group.recv(out, peer, tag=tag)
                    group.send(x, peer, tag=tag)
                assert (out == x).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_several_threads_on_one_channel() -> None:
    run_ranks(2, _threads, backend="mesh")
