"""torch's tensors on the fast path: which are taken there, and that they mean the same as by the general way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx import _native
from phalanx.testing import run_ranks

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.skipif(not _native.available, reason="the fast path needs the core (PHALANX_PURE is set)"),
    pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch is too old for it"),
]

DTYPES = ["bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


def refuse_general_way(*_: Any) -> None:
    raise AssertionError("not on the fast path")


def plain_tensors(group: px.Group, always_fast: bool) -> list[str]:
    group.barrier()
    if always_fast:
        group._run = refuse_general_way  # type: ignore[method-assign]
    wrong = []
    for name in DTYPES:
        dtype = getattr(torch, name)
        for shape in [(), (1,), (2, 3), (0, 3), (40_000,)]:
            x = torch.ones(shape, dtype=dtype)
            if group.all_reduce(x, "max", timeout=20) is not x or not bool((x == 1).all()):
                wrong.append(f"{name} {shape}")
        x, whole = torch.full((2, 2), group.rank, dtype=dtype), torch.zeros(8, dtype=dtype)
        if group.all_gather(x, whole).tolist() != torch.tensor([0] * 4 + [1] * 4, dtype=dtype).tolist():
            wrong.append(f"all_gather {name}")
    parameter = torch.nn.Parameter(torch.ones(2))
    assert group.all_reduce(parameter) is parameter
    assert parameter.tolist() == [2.0, 2.0]
    half = torch.full((4,), float(group.rank), dtype=torch.bfloat16)
    assert group.all_reduce(half[2:], "mean").tolist() == [0.5, 0.5]  # a view
    assert half.tolist() == [float(group.rank)] * 2 + [0.5] * 2
    return wrong


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_plain_tensors(transport: str) -> None:
    # Over TCP, the first call of each size goes the general way.
    options = px.Options(transport=transport)
    assert run_ranks(2, plain_tensors, transport == "auto", backend="mesh", options=options) == [[]] * 2


def asynchronous(group: px.Group) -> list[float]:
    group.barrier()
    group._run = refuse_general_way  # type: ignore[method-assign]
    found: list[float] = group.all_reduce(torch.ones(3), async_op=True).wait().tolist()
    return found


def test_asynchronous_on_tensors() -> None:
    assert run_ranks(2, asynchronous, backend="mesh") == [[2.0] * 3] * 2


def general_way(group: px.Group) -> list[bool]:
    """Tensors whose memory is not what they mean. The fast path must leave them alone."""
    group.barrier()
    fast = group._fast_path
    assert fast is not None
    odd = [
        torch.ones(2, 3).t(),
        torch.ones(4)[::2],
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,  # negative by a bit
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, 2).to_mkldnn(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.ones(2, device="meta"),
        torch.ones(2).to(torch.float8_e5m2),
        torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
    ]

    class Own(torch.Tensor):  # type: ignore[misc,name-defined]
        pass

    odd.append(torch.ones(2).as_subclass(Own))
    with torch.inference_mode():
        fine = torch.ones(2)
    assert torch.ones(2, dtype=torch.complex64).conj().imag.is_neg()
    return [fast.broadcast(x, 0) is None for x in odd] + [fast.all_reduce(fine, "sum") is not None]


def test_other_tensors_go_the_general_way() -> None:
    assert run_ranks(2, general_way, backend="mesh") == [[True] * 12] * 2


def mixed(group: px.Group) -> list[float]:
    """Rank 0 goes through the core, rank 1 the general way, or with an array of NumPy: it is the same operation."""
    group.barrier()
    if group.rank == 1:
        group._fast_path = None
    found = []
    for name in DTYPES[1:]:
        found.append(group.all_reduce(torch.full((2, 3), 2, dtype=getattr(torch, name)), "sum").double().sum().item())
        group.broadcast(torch.ones(3, dtype=getattr(torch, name)), 1)
    turned = torch.ones(2, 3).t() if group.rank else torch.ones(3, 2)
    found.append(float(group.all_reduce(turned).sum()))
    x = torch.full((2,), 2.0) if group.rank else np.full(2, 2.0, np.float32)
    return [*found, *map(float, group.all_reduce(x))]


def test_tensors_meet_arrays_and_the_general_way() -> None:
    assert run_ranks(2, mixed, backend="mesh") == [[24.0] * 9 + [12.0] + [4.0] * 2] * 2


def scattered(group: px.Group) -> list[str]:
    """A rank without `out` gets what the root has: first an array, then a tensor of the same dtype and shape."""
    group.barrier()
    kinds = []
    for make in (np.ones, torch.ones, np.ones):
        x = (make(4) if make is np.ones else torch.ones(4, dtype=torch.float64)) if group.rank == 0 else None
        out = (np.zeros(2) if make is np.ones else torch.zeros(2, dtype=torch.float64)) if group.rank == 0 else None
        kinds.append(type(group.scatter(x, 0, out)).__name__)
    return kinds


def test_a_scattered_tensor_is_a_tensor() -> None:
    assert run_ranks(2, scattered, backend="mesh") == [["ndarray", "Tensor", "ndarray"]] * 2
