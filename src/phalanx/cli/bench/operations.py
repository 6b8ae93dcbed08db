"""The operations that are measured: their arrays, what they hold before and after one call, and how much must be moved.

One convention for sizes holds for every operation and contender: the size is that of the largest array that a rank
holds. That is the array itself for all_reduce, reduce, broadcast and messages; the output of all_gather and gather; the
input of reduce_scatter, all_to_all and scatter. Where it is cut by rank, it is rounded up to whole elements per rank.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "DTYPES",
    "OPERATIONS",
    "ROOT",
    "Arrays",
    "LeastWork",
    "MeasuredOperation",
    "add_operations",
    "aligned_array",
    "element_count",
    "find_operation",
    "item_size",
    "numpy_dtype",
]

ROOT = 0
"""The rank that has or gets everything in operations with a root."""

DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)

Array = npt.NDArray[Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of this name.

    Raises:
        ImportError: bfloat16 without ml_dtypes.
    """
    if name == "bfloat16":
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    return np.dtype(name)


_HUGE_PAGE = 2 << 20
_IN_HUGE_PAGES = 4 << 20
"""Bytes of an array for which NumPy asks for huge pages."""


def aligned_array(count: int, dtype: np.dtype[Any]) -> Array:
    """An array that begins with a page of memory: copies between arrays that lie differently take up to a fifth longer.

    NumPy's own lie where there was room, so that it would be a matter of luck which contender has the better ones. So
    would be how much of a long one lies in huge pages, for which NumPy asks as well.
    """
    size = count * dtype.itemsize
    page = mmap.PAGESIZE if size < _IN_HUGE_PAGES else _HUGE_PAGE
    memory = mmap.mmap(-1, -(-size // page) * page + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux" and page == _HUGE_PAGE:
        memory.madvise(mmap.MADV_HUGEPAGE)
    array: Array = np.frombuffer(memory, np.uint8)
    begin = -array.ctypes.data % page
    return array[begin : begin + size].view(dtype)


def item_size(dtype: str) -> int:
    """Bytes of one element; known without ml_dtypes too."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


class Arrays(NamedTuple):
    """The arrays of one rank; `out` is None where there is none, or where the operation works in place."""

    x: Array
    out: Array | None


class LeastWork(NamedTuple):
    """The arrays that all ranks together must read and write at least."""

    sizes: int
    """Bytes of each array, in sizes."""
    reads: int
    """Arrays that are read, and combined into one."""
    writes: int
    """Arrays that are written."""
    in_place: bool = False
    """Whether those that are written are among those that are read."""


@dataclass(frozen=True, kw_only=True)
class MeasuredOperation:
    """One operation. `rank` and `n` are the rank and the number of ranks, `count` the elements of the size."""

    name: str
    sized: bool = True
    """Whether it moves an array at all."""
    divided: bool = False
    """Whether the size is cut into one part per rank."""
    halved: bool = False
    """Whether one call is two messages, there and back, of which one is reported."""
    shape: Callable[[int, int, int], tuple[int, int | None]]
    """(rank, n, count) -> elements of `x` and of `out`."""
    before: Callable[[int, int, Array], None]
    """Fills `x`."""
    after: Callable[[int, int, Array, Array | None], bool]
    """Whether `x` and `out` hold what one call must leave there."""
    least: Callable[[int], LeastWork] | None = None
    """n -> what no way to do it can do without; None if that is unknown, or nothing."""


def element_count(operation: MeasuredOperation, size: int, dtype: str, n: int) -> int:
    """Elements that make up a size, at least one, and a multiple of the ranks where it is cut by rank."""
    if not operation.sized:
        return 0
    count = max(1, size // item_size(dtype))
    return -(-count // n) * n if operation.divided else count


# -- what the arrays hold ----------------------------------------------------------------------------------------------
# Small whole numbers: exact in every dtype, and different on every rank as far as there are few of them.


def _mine(rank: int, n: int, x: Array) -> None:
    x.fill(rank % 4 + 1)


def _by_target(rank: int, n: int, x: Array) -> None:
    """Fills part j with a number that tells sender and receiver j."""
    for target, part in enumerate(np.split(x, n)):
        part.fill(rank % 4 + target % 4)


def _nothing(rank: int, n: int, x: Array) -> None:
    pass


def _total(n: int) -> int:
    return sum(rank % 4 + 1 for rank in range(n))


def _is(array: Array | None, value: int) -> bool:
    # Small integers wrap, small floats round, and so does what is expected.
    return array is not None and bool((array == np.array([value]).astype(array.dtype)).all())


def _parts(array: Array | None, n: int, value: Callable[[int], int]) -> bool:
    return array is not None and all(_is(part, value(source)) for source, part in enumerate(np.split(array, n)))


# -- the operations ----------------------------------------------------------------------------------------------------

_ALL = [
    MeasuredOperation(
        name="all_reduce",
        shape=lambda rank, n, count: (count, None),
        before=_mine,
        after=lambda rank, n, x, out: _is(x, _total(n)),
        # Every array is read, and every array is written.
        least=lambda n: LeastWork(1, n, n, in_place=True),
    ),
    MeasuredOperation(
        name="reduce",
        shape=lambda rank, n, count: (count, None),
        before=_mine,
        after=lambda rank, n, x, out: rank != ROOT or _is(x, _total(n)),
        least=lambda n: LeastWork(1, n, 1, in_place=True),
    ),
    MeasuredOperation(
        name="broadcast",
        shape=lambda rank, n, count: (count, None),
        before=_mine,
        after=lambda rank, n, x, out: _is(x, ROOT + 1),
        least=lambda n: LeastWork(1, 1, n - 1),
    ),
    MeasuredOperation(
        name="all_gather",
        divided=True,
        shape=lambda rank, n, count: (count // n, count),
        before=_mine,
        after=lambda rank, n, x, out: _parts(out, n, lambda source: source % 4 + 1),
        # The inputs are one array together.
        least=lambda n: LeastWork(1, 1, n),
    ),
    MeasuredOperation(
        name="gather",
        divided=True,
        shape=lambda rank, n, count: (count // n, count if rank == ROOT else None),
        before=_mine,
        after=lambda rank, n, x, out: rank != ROOT or _parts(out, n, lambda source: source % 4 + 1),
        least=lambda n: LeastWork(1, 1, 1),
    ),
    MeasuredOperation(
        name="scatter",
        divided=True,
        shape=lambda rank, n, count: (count if rank == ROOT else 0, count // n),
        before=lambda rank, n, x: _by_target(rank, n, x) if rank == ROOT else None,
        after=lambda rank, n, x, out: _is(out, ROOT % 4 + rank % 4),
        least=lambda n: LeastWork(1, 1, 1),
    ),
    MeasuredOperation(
        name="reduce_scatter",
        divided=True,
        shape=lambda rank, n, count: (count, count // n),
        before=_by_target,
        after=lambda rank, n, x, out: _is(out, sum(source % 4 for source in range(n)) + n * (rank % 4)),
        # The outputs are one array together.
        least=lambda n: LeastWork(1, n, 1),
    ),
    MeasuredOperation(
        name="all_to_all",
        divided=True,
        shape=lambda rank, n, count: (count, count),
        before=_by_target,
        after=lambda rank, n, x, out: _parts(out, n, lambda source: source % 4 + rank % 4),
        least=lambda n: LeastWork(n, 1, 1),
    ),
    MeasuredOperation(
        name="barrier",
        sized=False,
        shape=lambda rank, n, count: (0, None),
        before=_nothing,
        after=lambda rank, n, x, out: True,
    ),
    MeasuredOperation(
        name="pingpong",
        halved=True,
        shape=lambda rank, n, count: (count, count),
        before=_mine,
        # Rank 0 gets its own message back, rank 1 has seen it; the others take no part.
        after=lambda rank, n, x, out: rank > 1 or _is(out, 1),
        least=lambda n: LeastWork(1, 1, 1),
    ),
    # Each rank sends to the next one, and gets what the one before has sent: in one call, or by two that do not wait.
    *(
        MeasuredOperation(
            name=name,
            shape=lambda rank, n, count: (count, count),
            before=_mine,
            after=lambda rank, n, x, out: _is(out, (rank - 1) % n % 4 + 1),
            least=lambda n: LeastWork(n, 1, 1),
        )
        for name in ("sendrecv", "isend_irecv")
    ),
]

OPERATIONS = {operation.name: operation for operation in _ALL}
"""The operations of `phalanx bench`, by name."""
_KNOWN = dict(OPERATIONS)


def add_operations(more: Iterable[MeasuredOperation]) -> None:
    """Makes operations of another benchmark known, in the driver or in a rank."""
    _KNOWN.update((operation.name, operation) for operation in more)


def find_operation(name: str) -> MeasuredOperation:
    """The operation of this name: one of `OPERATIONS`, or one that was added."""
    return _KNOWN[name]
