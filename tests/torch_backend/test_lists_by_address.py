"""A scatter of tensors that lie apart: each rank reads its own where it lies, or gets it from the root if it cannot."""

from __future__ import annotations

import errno
import mmap

import pytest
import torch
import torch.distributed as dist
from tests.failures.system_calls import READ_PEER, has_secret_memory, hold_up, refuse, secret_memory, siblings_can_read
from tests.torch_backend.support import together
from tests.torch_backend.test_fast_calls import default
from tests.torch_backend.test_lists import Tensors, apart

from phalanx.torch_backend.fast_calls import are_available

pytestmark = [
    pytest.mark.skipif(not are_available(), reason="there are no fast calls, which take lists as they are"),
    pytest.mark.skipif(not siblings_can_read(), reason="this machine lets no process read another's memory"),
]

COUNT = (4 << 20) // 4 + 5
"""Elements of a tensor: more than one answer of the root holds."""


def secret(count: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(secret_memory(4 * count), 4 * count), dtype=torch.float32)


def scatter(parts: Tensors, root: int) -> None:
    """Checks what this rank gets. The root changes its tensors at once: nobody may read them any more."""
    rank, out = dist.get_rank(), torch.zeros(COUNT)
    expected = [torch.arange(COUNT) % 1000 + 1000.0 * part for part in range(len(parts))]
    for part, values in zip(parts, expected, strict=True):
        part.copy_(values)
    dist.scatter(out, parts if rank == root else None, root)
    for part in parts:
        part.fill_(-1)
    assert torch.equal(out, expected[rank])


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_reads_its_own(size: int) -> None:
    def body(rank: int) -> int:
        dist.barrier()
        assert default().group._engine.segment.reads_peers
        reads: list[int] = []
        hold_up(READ_PEER, reads.append)
        for _ in range(3):
            scatter(apart(size, COUNT), 0)
        return len(reads)

    root, *readers = together(size, body)
    assert root == 0
    assert all(reads > 0 for reads in readers)


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_may_not_read(size: int) -> None:
    def body(rank: int) -> None:
        dist.barrier()
        if rank == size - 1:
            refuse(READ_PEER, errno.EPERM)
        for turn in range(2 * size):
            scatter(apart(size, COUNT), turn % size)

    together(size, body)


@pytest.mark.skipif(not has_secret_memory(), reason="this kernel has no memory that others cannot read")
@pytest.mark.parametrize("size", [2, 3])
def test_a_tensor_that_only_its_own_process_can_read(size: int) -> None:
    def body(rank: int) -> None:
        dist.barrier()
        parts = apart(size, COUNT)
        parts[-1] = secret(COUNT)
        for _ in range(3):
            scatter(parts, 0)

    together(size, body)
