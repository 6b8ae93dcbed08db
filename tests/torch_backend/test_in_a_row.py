"""Lists of tensors that lie one after another: torch's calls on a GPU use them where they are."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import phalanx as px  # noqa: E402
from phalanx.testing import run_ranks  # noqa: E402
from phalanx.torch_backend.cuda_calls import CudaCalls, _in_a_row, _memory_for, _one  # noqa: E402


class OnHost(CudaCalls):
    """Its calls on tensors of the host, without streams."""

    def _issue(self, job: Any, request: Any, tensors: Any, results: Any = None) -> Any:
        job(None)


class Owner:
    """The process group of such calls."""

    def __init__(self, group: px.Group) -> None:
        self.group = group


def gathers(group: px.Group, in_a_row: bool) -> list[Any]:
    owner = Owner(group)
    calls, size, found = OnHost(owner), group.world_size, []
    mine = torch.full((2, 3), float(group.rank))
    targets = list(torch.zeros(2 * size, 3).chunk(size)) if in_a_row else [torch.zeros(2, 3) for _ in range(size)]
    calls.allgather([targets], [mine])
    found.append([target.unique().tolist() for target in targets])
    options = torch.distributed.GatherOptions()
    options.rootRank = 1
    mine += 10
    calls.gather([targets] if group.rank == 1 else [], [mine], options)
    found.append([target.unique().tolist() for target in targets])
    return found


@pytest.mark.parametrize("in_a_row", [True, False])
def test_gathers(in_a_row: bool) -> None:
    for rank, found in enumerate(run_ranks(2, gathers, in_a_row, backend="mesh")):
        assert found == [[[0.0], [1.0]], [[10.0], [11.0]] if rank == 1 else [[0.0], [1.0]]]


def test_parts_of_one_tensor() -> None:
    x, other = torch.arange(24.0).reshape(6, 4), torch.zeros(8)
    parts = list(x.chunk(3))
    found = _in_a_row(parts, other)
    assert found.data_ptr() == x.data_ptr()
    assert found.tolist() == x.flatten().tolist()
    memory, apart = _memory_for(parts[1:], other)
    assert (memory.data_ptr(), memory.numel(), apart) == (parts[1].data_ptr(), 16, False)
    memory.fill_(7)
    assert x[2:].unique().tolist() == [7]
    assert x[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["other order", "gap", "columns", "apart", "shared", "conjugate"])
def test_all_others_are_joined(kind: str) -> None:
    x, other = torch.arange(24.0).reshape(6, 4), torch.zeros(4)
    parts = {
        "other order": [x[1], x[0]],
        "gap": [x[0], x[2]],
        "columns": list(x.chunk(2, 1)),
        "apart": [x[0].clone(), x[1].clone()],
        "shared": [x[0], x[1]],
        "conjugate": list(torch.complex(x, x)[:2].conj()),
    }[kind]
    used = x[5] if kind == "shared" else other
    assert _in_a_row(parts, used) is None
    assert _one(parts, used).tolist() == torch.cat([part.flatten() for part in parts]).tolist()
    assert _memory_for(parts, used)[1]
