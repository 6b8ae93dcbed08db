"""Rows of tensors for ranks: every row belongs to one, and what is packed can be unpacked."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.parallel.fsdp.layout import Layout

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(torch.Size), min_size=1, max_size=4)


@given(SHAPES, st.integers(1, 5), st.booleans())
def test_packed_and_unpacked(shapes: list[torch.Size], ranks: int, in_blocks: bool) -> None:
    layout = Layout(shapes, ranks, range(len(shapes)) if in_blocks else ())
    tensors = [torch.randn(shape) for shape in shapes]
    parts = torch.full((ranks * layout.length,), torch.nan)
    layout.pack(tensors, parts)
    assert not parts.isnan().any()
    found = [torch.full(shape, torch.nan) for shape in shapes]
    layout.unpack(parts, found)
    assert all(torch.equal(a, b) for a, b in zip(tensors, found, strict=True))
    for rank in range(ranks):
        part = parts[rank * layout.length : (rank + 1) * layout.length]
        for rows, view in zip(layout.rows_of(tensors, rank), layout.views(part, rank), strict=True):
            assert torch.equal(rows, view)


@pytest.mark.parametrize(("rows", "ranks"), [(7, 3), (2, 5), (1, 2), (8, 4)])
def test_rows_are_even(rows: int, ranks: int) -> None:
    layout = Layout([torch.Size([rows, 3])], ranks)
    cuts = [layout.rows(0, rank) for rank in range(ranks)]
    assert cuts[0][0] == 0
    assert cuts[-1][1] == rows
    assert all(before[1] == after[0] for before, after in itertools.pairwise(cuts))
    lengths = [last - first for first, last in cuts]
    assert max(lengths) - min(lengths) <= 1


def test_none_counts_as_zeros() -> None:
    layout = Layout([torch.Size([2]), torch.Size([3])], 2)
    parts = torch.full((2 * layout.length,), torch.nan)
    layout.pack([None, torch.ones(3)], parts)
    assert parts.sum() == 3
