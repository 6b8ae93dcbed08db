"""Collectives without `out`: the new array is as the general way makes it, and short calls stay on the fast path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx import _native
from phalanx.testing import run_ranks

DTYPES = ["bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64"]


class Marked(np.ndarray[Any, Any]):
    """A class of a user's own."""


def refuse_general_way(*_: Any) -> None:
    raise AssertionError("not on the fast path")


def _results(group: px.Group, x: Any) -> list[Any]:
    """Of every verb that makes an array; `x` has one row for each of two ranks."""
    row = x[group.rank : group.rank + 1]
    return [
        group.all_gather(row),
        group.gather(row, 1),
        group.reduce_scatter(x, "max"),
        group.all_to_all(x),
        group.scatter(x if group.rank == 0 else None, 0),
    ]


def _rows_of(group: px.Group, x: Any) -> list[list[Any]]:
    """What the same must be where all ranks have the same `x`."""
    rows = x.tolist()
    mine = [rows[group.rank]]
    return [rows, rows if group.rank == 1 else [], mine, mine * 2, mine]


def new_arrays(group: px.Group, fast: bool) -> list[str]:
    group.barrier()
    wrong = []
    for name in DTYPES:
        for width in (1, 3, 5000):
            x = (np.arange(2 * width).reshape(2, width) % 7).astype(name)
            if fast:
                group._run = refuse_general_way  # type: ignore[method-assign]
                made = [group.all_gather(x[group.rank : group.rank + 1]), group.all_to_all(x)]
                made.append(group.reduce_scatter(x, "max"))
                del group._run
                wrong += [
                    f"{name}: {type(one)}" for one in made if type(one) is not np.ndarray or not one.flags.owndata
                ]
            results = _results(group, x)
            if [[] if one is None else one.tolist() for one in results] != _rows_of(group, x):
                wrong.append(f"{name}, {width}")
            wrong += [f"{name}: {one.dtype}" for one in results if one is not None and one.dtype != x.dtype]
    return wrong


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_new_arrays_of_numpy(transport: str) -> None:
    fast = transport == "auto" and _native.available  # over TCP, the first call of each size goes the general way
    assert run_ranks(2, new_arrays, fast, backend="mesh", options=px.Options(transport=transport)) == [[]] * 2


def odd_arrays(group: px.Group) -> None:
    scalar = group.all_gather(np.array(group.rank))
    assert scalar.tolist() == [0, 1]
    assert group.all_gather(np.empty((0, 3))).shape == (0, 3)
    turned = np.arange(6.0).reshape(3, 2).T[:, ::-1]
    assert group.all_to_all(turned)[0].tolist() == turned[group.rank].tolist()
    marked = np.arange(4.0).reshape(2, 2).view(Marked)
    assert group.reduce_scatter(marked).tolist() == [(2 * marked[group.rank]).tolist()]
    with pytest.raises(px.UsageError, match="cannot be cut into 2 equal parts"):
        group.reduce_scatter(np.ones(5))
    with pytest.raises(px.InvalidRank):
        group.gather(np.ones(1), 7)


def test_arrays_that_are_odd() -> None:
    run_ranks(2, odd_arrays, backend="mesh")


def some_with_out(group: px.Group) -> list[Any]:
    x = np.full((2, 2), group.rank)
    out = np.empty((4, 2), int) if group.rank == 0 else None
    first = group.all_gather(x, out)
    work = group.all_gather(x, out, async_op=True)
    return [first.tolist(), work.wait().tolist()]


def test_ranks_with_out_meet_ranks_without() -> None:
    rows = [[0, 0]] * 2 + [[1, 1]] * 2
    assert run_ranks(2, some_with_out, backend="mesh") == [[rows, rows]] * 2


def new_tensors(group: px.Group) -> list[str]:
    torch = pytest.importorskip("torch")
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        x = torch.ones(2, 3, dtype=dtype)
        for made, rows in zip(_results(group, x), (2, 2, 1, 2, 1), strict=True):
            if made is not None and (type(made), made.dtype, made.shape) != (torch.Tensor, dtype, (rows, 3)):
                wrong.append(f"{dtype}: {made}")
    weights = torch.ones(2, requires_grad=True)
    assert not group.all_gather(weights).requires_grad
    return wrong


def test_new_tensors() -> None:
    pytest.importorskip("torch")
    assert run_ranks(2, new_tensors, backend="mesh") == [[]] * 2


def name_of_call(group: px.Group) -> str:
    with pytest.raises(px.Desync) as caught:
        group.all_gather(np.ones(3 + group.rank))
    return str(caught.value)


def test_errors_name_the_line_of_the_call() -> None:
    for words in run_ranks(2, name_of_call, backend="mesh"):
        assert words.count("test_new_results.py") == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"])
@pytest.mark.parametrize("odd", ["sparse", "nested", "meta"])
def test_tensors_without_plain_memory_are_refused(verb: str, odd: str) -> None:
    torch = pytest.importorskip("torch")
    x = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": lambda: torch.ones(2, device="meta"),
    }[odd]()
    root = (0,) if verb in ("gather", "scatter") else ()
    with px.init(rank=0, world_size=1) as world, pytest.raises(px.UnsupportedArray, match=odd):
        getattr(world, verb)(x, *root)
