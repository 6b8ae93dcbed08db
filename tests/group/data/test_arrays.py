"""Arrays of every library as contiguous memory, and back."""

from __future__ import annotations

import importlib.util
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from phalanx import Group, UnsupportedArray
from phalanx.errors import ProtocolError
from phalanx.group.data.arrays import Description, adapt, make
from phalanx.testing import run_ranks

DTYPES = "? b h i q B H I Q e f d F D".split()  # noqa: SIM905


def round_trip(x: Any) -> Any:
    """What a receiver without `out` would get."""
    sent = adapt(x, write=False)
    description = Description.parse(sent.description.pack(), len(sent.bytes))
    array = np.frombuffer(bytes(sent.bytes), description.numpy_dtype()).reshape(description.shape).copy()
    return make(description, array)


# -- NumPy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 4)])
def test_numpy_round_trip(code: str, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).integers(0, 2, shape).astype(code)
    got = round_trip(x)
    assert isinstance(got, np.ndarray)
    assert got.dtype == x.dtype
    assert got.shape == x.shape
    assert np.array_equal(got, x)


def test_contiguous_memory_is_not_copied() -> None:
    x = np.arange(6.0).reshape(2, 3)
    for write in (False, True):
        adapted = adapt(x, write=write)
        assert np.shares_memory(adapted.array, x)
        assert adapted.finish() is x
        assert adapted.array.flags.c_contiguous


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base[::2, 1::2],
        lambda base: base.T,
        lambda base: base[::-1],
        lambda base: np.asfortranarray(base),
        lambda base: base[1:3, 1:3],
    ],
)
def test_memory_that_is_not_contiguous_is_written_back(view: Any) -> None:
    base = np.arange(36.0).reshape(6, 6)
    x = view(base)
    before = x.copy()
    adapted = adapt(x, write=True)
    assert adapted.array.flags.c_contiguous
    assert np.array_equal(adapted.array, before)
    adapted.array += 100
    assert adapted.finish() is x
    assert np.array_equal(x, before + 100)
    assert np.array_equal(round_trip(x), x)


@pytest.mark.parametrize(
    "view",
    [
        lambda base: np.lib.stride_tricks.sliding_window_view(base, 3, writeable=True),
        lambda base: np.lib.stride_tricks.as_strided(base, (4,), (4,)),
        lambda base: np.lib.stride_tricks.as_strided(base, (2, 3), (8, 8)),
        lambda base: np.lib.stride_tricks.as_strided(base, (3,), (0,)),
    ],
)
def test_an_array_that_overlaps_itself_is_not_written_to(view: Any) -> None:
    with pytest.raises(UnsupportedArray, match="overlap in memory"):
        adapt(view(np.arange(6.0)), write=True)


def test_a_read_only_array_is_left_alone() -> None:
    x = np.arange(4)
    x.flags.writeable = False
    adapted = adapt(x, write=True)
    adapted.array[:] = 9
    result = adapted.finish()
    assert result.tolist() == [9] * 4
    assert x.tolist() == [0, 1, 2, 3]
    assert adapt(x, write=False).finish() is x


def test_scalars() -> None:
    x = np.float32(2.5)
    adapted = adapt(x, write=True)
    adapted.array += 1
    result = adapted.finish()
    assert type(result) is np.float32
    assert result == 3.5
    assert x == 2.5
    assert round_trip(x) == 2.5


def test_buffers() -> None:
    data = bytearray(b"abc")
    adapted = adapt(data, write=True)
    adapted.array[:] = 120
    assert adapted.finish() is data
    assert data == b"xxx"
    fixed = adapt(b"abc", write=True)
    fixed.array[:] = 121
    assert fixed.finish() == b"yyy"
    assert round_trip(memoryview(b"abc")).tobytes() == b"abc"
    view = np.arange(6, dtype=np.int16).reshape(2, 3).data
    assert round_trip(view).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert adapt(view, write=True).finish() is view


class Marked(np.ndarray):  # type: ignore[type-arg]
    """A subclass, as libraries make them."""


def test_a_subclass_is_given_back_as_itself() -> None:
    x = np.zeros(3).view(Marked)
    assert adapt(x, write=True).finish() is x
    assert adapt(x, write=False).dtype == "<f8"


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (None, "NoneType is not an array"),
        (3, "int is not an array"),
        ("text", "str is not an array"),
        ([1.0, 2.0], "list is not an array .*send_object"),
        (np.array([object()]), "dtype"),
        (np.zeros(2, [("a", "i4"), ("b", "f8")]), "structured"),
        (np.zeros(2, ">f8"), "this machine's byte order .*astype"),
    ],
)
def test_what_is_no_array_is_refused(x: Any, words: str) -> None:
    for write in (False, True):
        with pytest.raises(UnsupportedArray, match=words):
            adapt(x, write=write)


@pytest.mark.parametrize("x", [np.zeros(2, "M8[s]"), np.array(["text", "more"]), np.array([b"bytes"])])
def test_elements_of_a_fixed_size_may_be_sent(x: Any) -> None:
    assert np.array_equal(round_trip(x), x)


# -- the description --------------------------------------------------------------------------------------------------


def test_a_description_says_what_the_array_is() -> None:
    description = adapt(np.zeros((2, 3), np.float32), write=False).description
    assert str(description) == "float32[2, 3]"
    assert Description.parse(description.pack(), 24) == description


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (b"", 0),
        (b"\xff", 0),
        (b"junk that is no msgpack", 8),
        (Description("<f4", [3], "numpy").pack(), 11),
        (Description("<f4", [3], "numpy").pack(), 13),
        (Description("<f4", [-3], "numpy").pack(), 12),
        (Description("<f4", [-1, -3], "numpy").pack(), 12),
        (Description("<f4", [1 << 62, 1 << 62], "numpy").pack(), 0),
        (Description("<f4", [0, 1 << 62], "numpy").pack(), 0),
        (Description("O", [1], "numpy").pack(), 8),
        (Description("|O", [1], "numpy").pack(), 8),
        (Description("<f4, <f4", [1], "numpy").pack(), 8),
        (Description("no such dtype", [1], "numpy").pack(), 8),
        (Description("<f4", [1] * 200, "numpy").pack(), 4),
        (Description("__import__('os')", [1], "numpy").pack(), 8),
    ],
)
def test_a_description_from_a_stranger_is_checked(data: bytes, size: int) -> None:
    try:
        found = Description.parse(data, size)
    except ProtocolError:
        return
    # What gets through must be harmless: an array that can be made, of that size.
    assert np.empty(found.shape, found.numpy_dtype()).nbytes == size


# -- bfloat16 ---------------------------------------------------------------------------------------------------------


def test_bfloat16_of_ml_dtypes() -> None:
    x = np.array([1.5, -2, 0], ml_dtypes.bfloat16)
    got = round_trip(x)
    assert got.dtype == x.dtype
    assert np.array_equal(got, x)
    adapted = adapt(x, write=True)
    assert (adapted.dtype, adapted.array.dtype) == ("bfloat16", np.uint16)
    adapted.array[:] = 0
    assert adapted.finish() is x
    assert x.astype(float).tolist() == [0, 0, 0]
    assert str(adapted.description) == "bfloat16[3]"
    frozen = np.ones(2, ml_dtypes.bfloat16)
    frozen.flags.writeable = False
    assert adapt(frozen, write=True).finish().dtype == frozen.dtype
    strided = np.arange(6).astype(ml_dtypes.bfloat16)[::2]
    again = adapt(strided, write=True)
    again.array[:] = np.array([7, 8, 9]).astype(ml_dtypes.bfloat16).view(np.uint16)
    assert again.finish().astype(int).tolist() == [7, 8, 9]


# -- torch ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def test_torch_round_trip(torch: Any) -> None:
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.float32, torch.complex64):
        x = torch.arange(6).reshape(2, 3).to(dtype)
        got = round_trip(x)
        assert got.dtype == dtype
        assert torch.equal(got, x)
    x = torch.tensor([1.5, -2.0]).bfloat16()
    got = round_trip(x)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, x)


def test_torch_memory_is_shared_where_it_can_be(torch: Any) -> None:
    x = torch.zeros(4, requires_grad=True)
    adapted = adapt(x, write=True)
    adapted.array += 3
    assert adapted.finish() is x
    assert x.tolist() == [3] * 4
    half = torch.zeros(3, dtype=torch.bfloat16)
    adapted = adapt(half, write=True)
    adapted.array[:] = torch.ones(3, dtype=torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert adapted.finish() is half
    assert half.tolist() == [1, 1, 1]


def test_torch_views_are_written_back(torch: Any) -> None:
    base = torch.zeros(4, 4)
    x = base[::2, ::2]
    adapted = adapt(x, write=True)
    adapted.array += 1
    assert adapted.finish() is x
    assert base.sum() == 4
    conjugated = torch.tensor([1 + 2j, 3 - 4j]).conj()
    adapted = adapt(conjugated, write=True)
    assert adapted.array.tolist() == [1 - 2j, 3 + 4j]
    adapted.array *= 2
    assert adapted.finish() is conjugated
    assert conjugated.tolist() == [2 - 4j, 6 + 8j]


def test_what_torch_cannot_give_is_refused(torch: Any) -> None:
    with pytest.raises(UnsupportedArray, match="sparse"):
        adapt(torch.zeros(3).to_sparse(), write=False)
    with pytest.raises(UnsupportedArray, match="meta"):
        adapt(torch.zeros(3, device="meta"), write=False)
    with pytest.raises(UnsupportedArray, match="is not an array"):
        adapt(torch.float32, write=False)
    with pytest.raises(UnsupportedArray, match="float8"):
        adapt(torch.zeros(3, dtype=torch.float8_e4m3fn), write=False)


def test_parameters_and_subclasses_of_tensors(torch: Any) -> None:
    class Mine(torch.Tensor):  # type: ignore[misc, name-defined]
        pass

    Mine.__module__ = "somewhere.else"
    x = torch.zeros(2).as_subclass(Mine)
    assert adapt(x, write=True).library == "torch"
    parameter = torch.nn.Parameter(torch.zeros(2))
    adapt(parameter, write=True).array[:] = 5
    assert parameter.tolist() == [5, 5]


def exchange_tensors(group: Group) -> list[Any]:
    import torch

    found = []
    x = torch.full((3,), float(group.rank), dtype=torch.bfloat16)
    found.append(group.all_reduce(x) is x)
    found.append(x.tolist())
    if group.rank == 0:
        group.send(torch.arange(4), 1)
        group.send(torch.arange(4.0).bfloat16(), 1)
        group.send_object({"state": torch.ones(2, 2)}, 1)
    else:
        found += [repr(group.recv(src=0)), repr(group.recv(src=0).dtype), group.recv_object(0)["state"].tolist()]
    return found


def test_tensors_between_ranks(torch: Any) -> None:
    first, second = run_ranks(2, exchange_tensors)
    assert first == [True, [1, 1, 1]]
    assert second[:2] == [True, [1, 1, 1]]
    assert second[2:] == ["tensor([0, 1, 2, 3])", "torch.bfloat16", [[1, 1], [1, 1]]]


# -- JAX --------------------------------------------------------------------------------------------------------------


# In processes of their own: whoever has JAX, has threads, and can no longer be forked, as other tests do.


needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")


def jax_arrays() -> None:
    import jax.numpy as jnp

    for x in (jnp.arange(6.0).reshape(2, 3), jnp.array([1.5, -2], jnp.bfloat16), jnp.array(3)):
        got = round_trip(x)
        assert isinstance(got, type(x))
        assert got.dtype == x.dtype
        assert (got == x).all()
        adapted = adapt(x, write=True)
        before = np.asarray(x).copy()
        adapted.array[...] = 0
        result = adapted.finish()
        assert isinstance(result, type(x))
        assert (result == 0).all()
        assert result.dtype == x.dtype
        assert np.array_equal(np.asarray(x), before)
        assert adapt(x, write=False).finish() is x


def jax_in_collectives(group: Group) -> list[Any]:
    import jax.numpy as jnp

    x = jnp.full(3, group.rank + 1.0)
    total = group.all_reduce(x)
    same = group.broadcast(x, 1)
    running = group.exscan(x)
    values, ranks = group.argmax(x)
    rows = group.all_gather(x[: group.rank + 1], counts="auto")
    kinds = {type(one) for one in (total, running, values, ranks, rows)}
    return [total.tolist(), x.tolist(), same.tolist(), kinds == {type(x)}, running.tolist(), ranks.tolist(), len(rows)]


@needs_jax
def test_jax_arrays_are_left_alone_and_new_ones_returned() -> None:
    def body(group: Group) -> list[Any]:
        if group.rank == 0:
            jax_arrays()
        return jax_in_collectives(group)

    found = run_ranks(2, body, backend="mesh")
    assert found == [[[3, 3, 3], [r + 1] * 3, [2, 2, 2], True, [r] * 3, [1, 1, 1], 3] for r in range(2)]
