"""Boxes, compared with what NumPy makes of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.regions import Region, cut, is_covered, whole

SHAPE = (5, 4, 3)


@st.composite
def boxes(draw: st.DrawFn) -> Region:
    offset, lengths = [], []
    for limit in SHAPE:
        first = draw(st.integers(0, limit))
        offset.append(first)
        lengths.append(draw(st.integers(0, limit - first)))
    return Region(tuple(offset), tuple(lengths))


def filled(*regions: Region) -> np.ndarray:
    grid = np.zeros(SHAPE, bool)
    for region in regions:
        grid[region.slices_in(whole(SHAPE))] = True
    return grid


@given(boxes(), boxes())
def test_shared_is_what_lies_in_both(a: Region, b: Region) -> None:
    both = filled(a) & filled(b)
    shared = a.shared(b)
    assert (shared is None) == (not both.any())
    if shared is not None:
        assert (filled(shared) == both).all()
        inside = np.arange(60).reshape(SHAPE)
        assert (
            inside[a.slices_in(whole(SHAPE))][shared.slices_in(a)]
            == inside[b.slices_in(whole(SHAPE))][shared.slices_in(b)]
        ).all()


@given(boxes(), st.lists(boxes(), max_size=6))
def test_covered_is_what_the_pieces_hold_together(wanted: Region, pieces: list[Region]) -> None:
    assert is_covered(wanted, pieces) == bool((filled(*pieces) | ~filled(wanted)).all())


@pytest.mark.parametrize(("rows", "parts"), [(7, 3), (3, 3), (2, 5), (0, 2)])
def test_cuts_are_even_and_make_the_whole(rows: int, parts: int) -> None:
    found = list(cut(Region((4, 1), (rows, 2)), parts))
    lengths = [region.shape[0] for region in found]
    assert sum(lengths) == rows
    assert not lengths or max(lengths) - min(lengths) <= 1
    assert is_covered(Region((4, 1), (rows, 2)), found)
