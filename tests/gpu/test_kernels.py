"""The plans that kernels carry out, their PTX, and the table of ways."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from phalanx import _native
from phalanx.cuda.kernels import plan
from phalanx.cuda.kernels.plan import Piece
from phalanx.group.engines.cuda import pieces
from phalanx.group.engines.cuda.pace import FIRST, Pace
from phalanx.group.engines.cuda.routing import SHORT, SHORT_IF_BUSY, Placement, choose
from phalanx.group.engines.cuda.routing import Path as Way

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "src" / "phalanx" / "cuda" / "kernels"


def test_the_ptx_is_made_of_the_source() -> None:
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.cuda_nvrtc") is None:
        pytest.skip("NVRTC is not installed (pip install nvidia-cuda-nvrtc-cu12==12.4.127)")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "make_kernels.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_there_is_a_kernel_for_each_dtype() -> None:
    ptx = (KERNELS / "combine.ptx").read_text()
    missing = [name for name in _native.DTYPES if f".entry combine_{name}(" not in ptx]
    assert not missing
    assert f"combine_bool_param_0[{plan.SIZE}]" in ptx, "the plan has another size in combine.cu"
    source = (KERNELS / "combine.cu").read_text()
    assert f"POINTERS = {plan.POINTERS}, PIECES = {plan.PIECES}" in source


def test_plans_come_back() -> None:
    some = [Piece((16, 32), (48,), 1000), Piece((64,), (80, 97), 7)]
    (launch,) = plan.launches(some, 4, 2, 3.0)
    assert launch.grid == (1, 2)
    assert len(launch.parameter) == plan.SIZE <= 4096
    assert plan.unpack(launch.parameter, 2) == (some, 2, 3.0)


def test_long_plans_are_several_launches() -> None:
    some = [Piece((1,), (2,), 5)] * 150 + [Piece((1,), (), 5), Piece((1,), (2,), 0)]
    found = [plan.unpack(launch.parameter, launch.grid[1])[0] for launch in plan.launches(some, 1, 0, 1.0)]
    assert [len(one) for one in found] == [64, 64, 22]
    wide = [Piece(tuple(range(150)), tuple(range(150)), 5)] * 3
    assert len(list(plan.launches(wide, 1, 0, 1.0))) == 3


@pytest.mark.parametrize(
    ("piece", "item", "dtype", "elements"),
    [
        (Piece((0,), (16,), 4), 4, "uint64", 2),
        (Piece((0,), (20,), 4), 4, "uint32", 4),
        (Piece((2,), (16,), 3), 2, "uint16", 3),
        (Piece((0,), (16,), 5), 3, "uint8", 15),
        (Piece((0,), (16,), 2), 16, "uint64", 4),
    ],
)
def test_moves_are_as_wide_as_they_can_be(piece: Piece, item: int, dtype: str, elements: int) -> None:
    found, width, (moved,) = plan.moves([piece], item)
    assert (found, moved.elements, width) == (dtype, elements, piece.elements * item // elements)


def test_pieces() -> None:
    assert pieces.all_reduce([100, 200], 5) == [Piece((100, 200), (100, 200), 5)]
    assert pieces.reduce([100, 200], 5, 1) == [Piece((100, 200), (200,), 5)]
    assert pieces.broadcast([100, 200, 300], 5, 1) == [Piece((200,), (100, 300), 5)]
    assert pieces.reduce_scatter([100, 200], [300, 400], 5, 4) == [
        Piece((100, 200), (300,), 5),
        Piece((120, 220), (400,), 5),
    ]
    in_place = pieces.all_gather([100, 204], [100, 200], [1, 2], 4)
    assert in_place == [Piece((100,), (200,), 1), Piece((204,), (104,), 2)]
    assert pieces.gather([100, 200], 300, [1, 2], 4) == [Piece((100,), (300,), 1), Piece((200,), (304,), 2)]
    sizes = np.array([[1, 2], [3, 4]])
    assert pieces.all_to_all([100, 200], [300, 400], sizes, 4) == [
        Piece((100,), (300,), 1),
        Piece((104,), (400,), 2),
        Piece((200,), (304,), 3),
        Piece((212,), (408,), 4),
    ]


ONE, SEVERAL = Placement(one_gpu=True), Placement(one_gpu=False, reason="the ranks use several GPUs")


@pytest.mark.parametrize(
    ("operation", "size", "placement", "busy", "way"),
    [
        ("all_reduce", SHORT, ONE, False, Way.STAGED),
        ("all_reduce", SHORT + 1, ONE, False, Way.EXECUTOR),
        ("all_reduce", SHORT + 1, ONE, True, Way.STAGED),
        ("all_reduce", SHORT_IF_BUSY, ONE, True, Way.STAGED),
        ("all_reduce", SHORT_IF_BUSY + 1, ONE, True, Way.EXECUTOR),
        ("all_reduce", 1 << 30, SEVERAL, False, Way.STAGED),
        ("all_gather", 1 << 20, ONE, False, Way.EXECUTOR),
        ("scatter", 1 << 20, ONE, False, Way.STAGED),
    ],
)
def test_routing(operation: str, size: int, placement: Placement, busy: bool, way: Way) -> None:
    assert choose(operation, size, placement, busy=busy) is way


def test_pace() -> None:
    pace = Pace()
    pace.executed(1 << 20, 20e-6)
    assert not pace.busy
    pace.executed(1 << 20, 5e-3)
    assert pace.busy
    for _ in range(FIRST):
        assert pace.busy
        pace.staged()
    assert not pace.busy
    pace.executed(1 << 20, 5e-3)  # still busy: it is believed for longer
    for _ in range(2 * FIRST):
        assert pace.busy
        pace.staged()
    assert not pace.busy
    pace.executed(1 << 30, 5e-4)
    assert not pace.busy
