"""The table of ways: every row, and what each fixed choice makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.gpu.fake import DriverArray, install
from tests.gpu.fake_nccl import install_nccl

import phalanx as px
from phalanx.cuda.driver import use_driver
from phalanx.cuda.nccl import DTYPES, Nccl, use_nccl, version_text
from phalanx.errors import BackendUnavailable
from phalanx.group.engines.cuda.placement import gpus_of
from phalanx.group.engines.cuda.routing import (
    SHORT,
    SHORT_IF_BUSY,
    TABLE,
    Gpus,
    Operation,
    Placement,
    Question,
    Way,
    nccl_lacks,
    nccl_obstacle,
    way_of,
)

SUM = Operation("all_reduce", "sum", "float32")
MOVE = Operation("all_gather")
SCATTER = Operation("scatter")
ODD = Operation("all_reduce", "sum", "int16")
MEMORY, NETWORK = {"shares_memory": True}, {"shares_memory": False}
OWN, ONE, MIXED = {"gpus": Gpus.OWN}, {"gpus": Gpus.ONE}, {"gpus": Gpus.MIXED}
WITH = {"nccl": 22809}

ROWS: list[tuple[str, Operation, int, dict[str, Any], dict[str, Any], Way]] = [
    ("an array of the host, in shared memory", SUM, 8, MEMORY, {"device": "cpu"}, Way.SEGMENT),
    ("an array of the host, in shared memory", SUM, 8, MEMORY | OWN | WITH, {"device": "cpu"}, Way.SEGMENT),
    ("another array of the host", SUM, 8, NETWORK, {"device": "cpu"}, Way.NETWORK),
    ("another array of the host", SUM, 8, NETWORK, {"device": "cpu", "choice": "nccl"}, Way.NETWORK),
    ("NCCL is chosen and has it", SUM, 8, NETWORK | OWN | WITH, {"choice": "nccl"}, Way.NCCL),
    ("NCCL is chosen and has it", SUM, 8, MEMORY | OWN | WITH, {"choice": "hybrid"}, Way.NCCL),
    ("NCCL is chosen and has it", SUM, 8, MEMORY | {"size": 1} | WITH, {"choice": "nccl"}, Way.NCCL),
    (
        "NCCL is chosen and has it",
        SUM,
        8,
        MEMORY | ONE | {"nccl": 23003, "nccl_shares": True},
        {"choice": "nccl"},
        Way.NCCL,
    ),
    ("NCCL is chosen and lacks it", ODD, 8, MEMORY | OWN | WITH, {"choice": "hybrid"}, Way.STAGED),
    ("a rank that is alone", SUM, 8, NETWORK | {"size": 1}, {}, Way.ALONE),
    ("a rank that is alone", SUM, 8, NETWORK | {"size": 1}, {"choice": "ucc"}, Way.ALONE),
    ("a GPU each, and NCCL has it", SUM, 8, MEMORY | OWN | WITH, {}, Way.NCCL),
    ("a GPU each, and NCCL has it", MOVE, 1 << 30, NETWORK | OWN | WITH, {"choice": "ucc"}, Way.NCCL),
    ("a long array of ranks that share a GPU", SUM, SHORT + 1, MEMORY | ONE, {}, Way.EXECUTOR),
    ("a long array of ranks that share a GPU", SUM, SHORT + 1, MEMORY | ONE | WITH, {}, Way.EXECUTOR),
    ("a long array of ranks that share a GPU", SUM, SHORT_IF_BUSY + 1, MEMORY | ONE, {"busy": True}, Way.EXECUTOR),
    ("a long array of ranks that share a GPU", SCATTER, SHORT + 1, MEMORY | ONE, {}, Way.EXECUTOR),
    ("another array of ranks that share memory", SUM, SHORT, MEMORY | ONE, {}, Way.BOUNCE),
    ("another array of ranks that share memory", SCATTER, 8, MEMORY | OWN | WITH, {}, Way.BOUNCE),
    ("another array of ranks that share memory", SUM, SHORT_IF_BUSY, MEMORY | ONE, {"busy": True}, Way.BOUNCE),
    ("another array of ranks that share memory", SUM, 1 << 30, MEMORY | ONE | {"opens": False}, {}, Way.BOUNCE),
    ("another array of ranks that share memory", SUM, 1 << 30, MEMORY | MIXED | WITH, {}, Way.BOUNCE),
    ("another array of ranks that share memory", SUM, 1 << 30, MEMORY | OWN, {}, Way.BOUNCE),
    ("another array of ranks that share memory", ODD, 1 << 30, MEMORY | OWN | WITH, {}, Way.BOUNCE),
    ("all others", SUM, 8, NETWORK | OWN, {}, Way.STAGED),
    ("all others", ODD, 8, NETWORK | OWN | WITH, {}, Way.STAGED),
    ("all others", SUM, 8, NETWORK | MIXED | WITH, {}, Way.STAGED),
    ("all others", SCATTER, 8, NETWORK | OWN | WITH, {}, Way.STAGED),
]


@pytest.mark.parametrize(("row", "operation", "nbytes", "placed", "more", "way"), ROWS)
def test_a_row(
    row: str, operation: Operation, nbytes: int, placed: dict[str, Any], more: dict[str, Any], way: Way
) -> None:
    asked = Question(
        **{
            "device": "cuda",
            "nbytes": nbytes,
            "placement": Placement(**{"size": 2, **placed}),
            "operation": operation,
            **more,
        }
    )
    assert way_of(asked) is way
    assert next(name for name, fits, _ in TABLE if fits(asked)) == row


def test_no_row_is_left_out() -> None:
    assert list(dict.fromkeys(row for row, *_ in ROWS)) == [name for name, _, _ in TABLE]


def test_what_nccl_has() -> None:
    for dtype in DTYPES:
        assert nccl_lacks(Operation("reduce_scatter", "mean", dtype)) is None
    assert nccl_lacks(Operation("all_to_all", "", "")) is None
    assert nccl_lacks(ODD) == "reductions of int16"
    assert nccl_lacks(Operation("reduce", "bxor", "int32")) == "the reduction 'bxor'"
    assert nccl_lacks(SCATTER) == "scatter"


def test_the_gpus_of_ranks() -> None:
    assert gpus_of([b"a", b"b"]) is Gpus.OWN
    assert gpus_of([b"a", b"a"]) is Gpus.ONE
    assert gpus_of([b"a"]) is Gpus.ONE
    assert gpus_of([b"a", b"b", b"a"]) is Gpus.MIXED


def test_why_not_by_nccl() -> None:
    assert "pip install nccl4py" in str(nccl_obstacle(Placement(2, True, Gpus.OWN)))
    shared = nccl_obstacle(Placement(2, True, Gpus.ONE, nccl=22809))
    assert shared is not None
    assert "all ranks share one GPU, which NCCL 2.28.9 refuses" in shared
    told = Placement(2, True, Gpus.ONE, nccl=22809, nccl_shares=True)
    assert nccl_obstacle(told) is not None  # too old for that
    assert nccl_obstacle(told._replace(nccl=23003)) is None
    assert version_text(23003) == "2.30.3"


# -- backends with a fixed choice --------------------------------------------------------------------------------------


def missing() -> Any:
    raise BackendUnavailable("nccl4py is not installed (pip install nccl4py)")


class NoDriver:
    """Stands in for a machine without a GPU."""

    @property
    def device_count(self) -> int:
        raise BackendUnavailable("the CUDA driver of this machine cannot be used: libcuda.so.1: not found")


@pytest.mark.parametrize("name", ["NcclBackend", "HybridBackend"])
def test_without_a_gpu_or_nccl(name: str) -> None:
    made = getattr(px.backends, name)
    use_driver(NoDriver())
    with pytest.raises(BackendUnavailable, match=rf"{name} moves arrays on NVIDIA GPUs, but .*libcuda.so.1.*init\(\)"):
        made()
    install()
    use_nccl(missing)
    with pytest.raises(BackendUnavailable, match=rf"{name} moves arrays by NCCL, but .*pip install nccl4py"):
        made()


def test_nccl4py_is_not_there() -> None:
    try:
        import nccl  # noqa: F401
    except ImportError:
        with pytest.raises(BackendUnavailable, match=r"nccl4py is not installed \(pip install nccl4py\)"):
            Nccl()
    else:
        assert Nccl().version > 20000


def test_ucc_needs_no_gpu() -> None:
    import numpy as np

    backend = px.backends.UccBackend(rank=0, world_size=1)
    with px.Group(backend) as group:
        assert group.all_reduce(np.ones(3)).tolist() == [1.0, 1.0, 1.0]
    backend.close()


def test_one_rank_by_nccl(tmp_path: Any) -> None:
    """A rank that is alone goes by NCCL, too, where that is chosen: so NCCL can be tried on a machine with one GPU."""
    import numpy as np

    nccl = install_nccl(install(), tmp_path)
    backend = px.backends.NcclBackend(rank=0, world_size=1)
    with px.Group(backend) as group:
        x = DriverArray(np.arange(4, dtype=np.float32))
        assert group.all_reduce(x, "mean").numpy().tolist() == [0.0, 1.0, 2.0, 3.0]
        with pytest.raises(px.errors.UnsupportedOp, match="NCCL does not have reductions of int16"):
            group.all_reduce(DriverArray(np.ones(4, np.int16)))
        out = DriverArray(np.zeros(4, np.float32))
        group.all_to_all(x, out)  # the group can go on
        assert out.numpy().tolist() == [0.0, 1.0, 2.0, 3.0]
    backend.close()
    assert [call[0] for call in nccl.calls] == ["start", "all_reduce", "finalize", "destroy"]


@pytest.mark.parametrize("name", ["NcclBackend", "HybridBackend", "UccBackend"])
def test_ranks_of_a_launcher(name: str, tmp_path: Any) -> None:
    """The world forms from the launcher's variables, and arrays of GPUs go by NCCL on all three."""

    def body(folder: str) -> Any:
        import numpy as np

        import phalanx as px
        from phalanx.config import detect

        nccl = install_nccl(install(uuid=bytes([detect().rank]) * 16), Path(folder))
        backend = getattr(px.backends, name)()
        with px.Group(backend) as group:
            x = DriverArray(np.ones(4, np.float32))
            group.all_reduce(x)
            plain = group.all_reduce(np.ones(4))
            found = group.rank, x.numpy().tolist(), plain.tolist(), [call[0] for call in nccl.calls]
        backend.close()
        return found

    two = [2.0] * 4
    calls = ["start", "all_reduce"]
    assert px.launch(body, 2, str(tmp_path), timeout=60) == [(0, two, two, calls), (1, two, two, calls)]
