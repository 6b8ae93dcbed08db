"""Lists of tensors: where they lie, and their values one after another."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import UsageError
from .tensors import PLAIN_DTYPES, STRIDED, check_sendable, memory_at, owned, plain

__all__ = ["SLICE", "Places", "adjacent", "check_alike", "joined", "places"]

SLICE = 4 << 20
"""Bytes of a tensor that are joined with those of others at a time: few enough to keep the memory for it, and enough to
make the cost of a call small."""
_move = ctypes.memmove


class Places(NamedTuple):
    """Where the tensors of a list are, if all of them are as simple as most are, and of one size and dtype.

    To copy by address takes a fraction of the time that it takes to make an array of each.
    """

    addresses: list[int]
    size: int
    """Bytes of each."""
    elements: int
    """The same in elements."""
    dtype: Any
    """As NumPy calls it."""

    @property
    def whole(self) -> Any:
        """All of them as one array, if they lie one after another, else None. It does not keep them alive."""
        first = self.addresses[0]
        if self.addresses[-1] != first + (len(self.addresses) - 1) * self.size or not self.size:
            return None
        if any(address != first + i * self.size for i, address in enumerate(self.addresses)):
            return None
        return memory_at(first, len(self.addresses) * self.size, self.dtype, None)

    def copy_to(self, address: int) -> None:
        """Copies them all, one after another."""
        for i, place in enumerate(self.addresses):
            _move(address + i * self.size, place, self.size)

    def copy_from(self, address: int) -> None:
        """The reverse."""
        for i, place in enumerate(self.addresses):
            _move(place, address + i * self.size, self.size)


def places(tensors: Sequence[Any]) -> Places | None:
    """Where the tensors of a list are, unless there is something special about one of them."""
    first = tensors[0]
    dtype, count = first.dtype, first.numel()
    known = PLAIN_DTYPES.get(dtype)
    if known is None:
        return None
    addresses = []
    for tensor in tensors:
        if (
            tensor.dtype is not dtype
            or not tensor.is_cpu
            or tensor.layout is not STRIDED
            or tensor.numel() != count
            or not tensor.is_contiguous()
            or tensor.is_neg()
        ):
            return None
        addresses.append(tensor.data_ptr())
    if count and not all(addresses):
        return None
    return Places(addresses, count * known[1], count, known[0])


def adjacent(tensors: Sequence[Any]) -> Any:
    """The memory of all tensors as one flat array, if they are plain, of one dtype and lie one after another.

    That is how a list looks that was cut from one tensor. None otherwise.
    """
    first = plain(tensors[0])
    if first is None:
        return None
    begin = end = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous() or tensor.is_neg() or not tensor.is_cpu:
            return None
        end += tensor.nbytes
    return memory_at(begin, end - begin, first.dtype, tensors)


def joined(tensors: Sequence[Any], *, reducing: bool = False) -> Any:
    """The tensors' values, one after another: where they are, if they lie so, else a copy.

    Raises:
        UnsupportedArray: As `source`.
    """
    together = adjacent(tensors)
    if together is not None:
        return together
    arrays = [plain(tensor) for tensor in tensors]
    if all(array is not None for array in arrays):
        return np.concatenate(arrays)
    for tensor in tensors:
        check_sendable(tensor)
    copy = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).resolve_conj().resolve_neg()
    return owned(copy, reducing)


def check_alike(what: str, tensors: Sequence[Any], *, count: int | None = None) -> None:
    """Refuses tensors of different dtypes, and a wrong number of them.

    Raises:
        UsageError: They are.
    """
    if count is not None and len(tensors) != count:
        raise UsageError(f"{what}: got {len(tensors)} tensors (expected {count}, one for each rank)")
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) > 1:
        names = ", ".join(sorted(map(str, kinds)))
        raise UsageError(f"{what}: the tensors have different dtypes ({names}; expected one for all)")
