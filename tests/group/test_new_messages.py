"""`recv` without `out`: the new array is as the general way makes it, and a short message stays on the fast path."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx import _native
from phalanx.testing import run_ranks

SENT = [
    np.arange(6).reshape(2, 3),
    np.array(3.0),
    np.empty((0, 4), np.float32),
    np.array([True, False]),
    np.ones(3, np.complex64),
    np.arange(200_000.0),
    np.zeros(3_000_000, np.float32),
]


def refuse_general_way(*_: Any) -> None:
    raise AssertionError("not on the fast path")


def short_arrays(group: px.Group) -> list[str]:
    wrong = []
    taken = 0
    for turn in range(40):  # the first ones are received before the ring is there
        sent = SENT[turn % 5]
        if group.rank == 0:
            group.send(sent, 1, tag=3)
        group.barrier()  # it has come: a wait that lasts goes on the general way
        if group.rank == 1:
            if group._fast_messages.next_array(0, 3, 5.0) is not None:  # type: ignore[union-attr]
                group._receive = refuse_general_way  # type: ignore[method-assign]
                taken += 1
            x = group.recv(src=0, tag=3)
            if (x.dtype, x.shape) != (sent.dtype, sent.shape) or (x != sent).any():
                wrong.append(str(x))
        group.barrier()
    return wrong if group.rank == 0 or taken >= 10 else ["no ring"]


@pytest.mark.skipif(not _native.available, reason="the fast path needs the core (PHALANX_PURE is set)")
def test_short_arrays_take_the_fast_path() -> None:
    assert run_ranks(2, short_arrays, backend="mesh") == [[], []]


def anything(group: px.Group) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16)]
    if group.rank == 0:
        for x in [*SENT, *tensors]:
            group.send(x, 1)
        group.send_object({"a": 1}, 1)
        for tag in (4, 5):
            group.send(np.full(tag, tag), 1, tag=tag)
    else:
        for sent in SENT:
            x = group.recv(src=0)
            assert type(x) is np.ndarray
            assert (x.dtype, x.tolist()) == (sent.dtype, sent.tolist())
        for tensor in tensors:
            made = group.recv(src=0)
            assert type(made) is torch.Tensor
            assert (made.dtype, made.tolist()) == (tensor.dtype, tensor.tolist())
        with pytest.raises(px.UsageError, match="sent an object"):
            group.recv(src=0)
        assert [len(group.recv(src=0, tag=tag)) for tag in (5, 4)] == [5, 4]  # in another order
    group.barrier()
    if group.rank == 1:
        with pytest.raises(px.Timeout):
            group.recv(src=0, timeout=0.1)
    group.barrier()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_arrays_tensors_objects_and_nothing(transport: str) -> None:
    pytest.importorskip("torch")
    run_ranks(2, anything, backend="mesh", options=px.Options(transport=transport))


def two_threads(group: px.Group) -> list[int]:
    """Between the look at a message and its arrival in the new array, another thread may have taken it."""
    lengths = [1 + i % 7 for i in range(600)]
    if group.rank == 0:
        for length in lengths:
            group.send(np.full(length, length), 1)
        return sorted(lengths)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.extend(group.recv(src=0) for _ in range(300))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((x == len(x)).all() for x in found)
    return sorted(map(len, found))


def test_two_threads_receive_from_one_rank() -> None:
    sent, received = run_ranks(2, two_threads, backend="mesh")
    assert sent == received
