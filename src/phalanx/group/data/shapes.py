"""Shapes of what a collective cuts and puts together, always along dim 0."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import UsageError
from .arrays import Adapted, Description, adapt_out, make

__all__ = [
    "divided_shape",
    "exchanged_from",
    "gathered_from",
    "misfit",
    "new_array",
    "part_of",
    "stacked_shape",
    "target_for",
]

Shape = tuple[int, ...]


def stacked_shape(array: Any, size: int) -> Shape:
    """The shape of `size` such arrays put together; a scalar becomes a vector."""
    return (size * array.shape[0], *array.shape[1:]) if array.ndim else (size,)


def divided_shape(array: Any, size: int) -> Shape:
    """The shape of one of `size` equal parts.

    Raises:
        UsageError: Dim 0 is not a multiple of `size`.
    """
    if not array.ndim or array.shape[0] % size:
        raise UsageError(
            f"an array of shape {array.shape} cannot be cut into {size} equal parts along dim 0 (one for each rank: "
            "pad it to a multiple, or say how many rows each rank gets by counts= where the call has it)"
        )
    return (array.shape[0] // size, *array.shape[1:])


def gathered_from(x: Any, size: int) -> Any:
    """A new array for `size` arrays like this one put together; None if only the general way knows its library."""
    return _new(x, stacked_shape(x, size)) if _is_plain(x) else None


def part_of(x: Any, size: int) -> Any:
    """The same for one of `size` equal parts of it; None also if it cannot be cut."""
    return _new(x, divided_shape(x, size)) if _is_plain(x) and _can_be_cut(x, size) else None


def exchanged_from(x: Any, size: int) -> Any:
    """The same for such parts of `size` arrays put together."""
    return _new(x, x.shape) if _is_plain(x) and _can_be_cut(x, size) else None


def _can_be_cut(x: Any, size: int) -> bool:
    return bool(x.ndim and x.shape[0] % size == 0)


def _is_plain(x: Any) -> bool:
    kind: Any = type(x)
    if kind is np.ndarray:
        return bool(x.dtype.isbuiltin == 1 and x.dtype.kind in "biufc")
    if kind.__name__ != "Tensor" or kind.__module__ != "torch":
        return False
    return bool(x.is_cpu) and not (x.is_quantized or x.is_nested)


def _new(like: Any, shape: Shape) -> Any:
    return np.empty(shape, like.dtype) if type(like) is np.ndarray else like.new_empty(shape)


def new_array(like: Adapted, shape: Shape) -> Adapted:
    """A new array of the same library and dtype, and on the same GPU."""
    if like.empty is not None:
        return like.empty(shape)
    array = np.empty(shape, like.array.dtype)
    description = Description(like.dtype, list(shape), like.library)
    return Adapted(array, like.dtype, like.library, lambda: make(description, array))


def misfit(out: Description, part: Description, src: int) -> UsageError:
    """The error for an `out` that cannot take the part of what rank `src` has scattered."""
    return UsageError(f"out is {out}, but rank {src} scattered {part}")


def target_for(out: Any, like: Adapted, shape: Shape, *, anywhere: bool = False) -> Adapted:
    """The target for a result of this shape: `out`, or a new array of the same library and dtype.

    Args:
        out: An array, also one that is adapted already.
        anywhere: True if `out` may lie on a GPU and `like` on the host, or the reverse.

    Raises:
        UsageError: `out` has another dtype or number of elements, or lies in another place.
    """
    if out is None:
        return new_array(like, shape)
    target = out if isinstance(out, Adapted) else adapt_out(out)
    if not anywhere and (target.empty is None) != (like.empty is None):
        places = ("on a GPU", "on the host")
        mine, theirs = (places[one.empty is None] for one in (target, like))
        raise UsageError(f"out lies {mine}, but x lies {theirs} (expected both in one place)")
    if target.dtype != like.dtype or target.array.size != math.prod(shape):
        wanted = Description(like.dtype, list(shape), like.library)
        raise UsageError(f"out is {target.description}, but the result is {wanted}")
    return target
