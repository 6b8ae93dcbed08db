"""Tests of a user, marked with ranks."""

import numpy as np
import pytest


@pytest.mark.ranks(3)
@pytest.mark.parametrize("size", [1, 1000])
def test_total(world, size):
    assert world.all_reduce(np.ones(size)).sum() == 3 * size


@pytest.mark.ranks(2, torch=True)
def test_torch():
    import torch
    import torch.distributed as dist

    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0, 2.0]
