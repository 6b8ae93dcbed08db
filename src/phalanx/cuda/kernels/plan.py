"""Plans: the work of one launch of a kernel, as the bytes that it takes. No driver in it.

A piece is a run of elements that is read from some addresses, combined, and written to others. A launch has up to 64
pieces; a longer plan becomes several launches, one after another.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from math import gcd
from typing import NamedTuple

__all__ = ["KernelLaunch", "Piece", "launches", "moves", "unpack"]

POINTERS, PIECES = 320, 64
THREADS = 256
PER_THREAD = 16
"""Bytes of a piece that a thread has."""
_POINTERS = struct.Struct(f"<{POINTERS}Q")
_PIECE = struct.Struct("<QHHHH")
_END = struct.Struct("<dII")
SIZE = _POINTERS.size + PIECES * _PIECE.size + _END.size
"""Bytes of `Plan` in combine.cu."""
MOST_ADDRESSES = POINTERS
"""The most addresses that a piece can have."""


class Piece(NamedTuple):
    """Elements at these addresses are combined, in this order, and written to those."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    elements: int


class KernelLaunch(NamedTuple):
    """One launch of a kernel."""

    grid: tuple[int, int]
    parameter: bytes


def launches(pieces: Sequence[Piece], itemsize: int, op: int, divisor: float) -> Iterator[KernelLaunch]:
    """The launches that carry out some pieces.

    Args:
        op: The core's number of the reduction.
        divisor: The number of ranks of a mean; 1 otherwise.
    """
    some: list[Piece] = []
    addresses = 0
    for piece in pieces:
        if not piece.elements or not piece.outputs:
            continue
        needed = len(piece.inputs) + len(piece.outputs)
        if some and (len(some) == PIECES or addresses + needed > POINTERS):
            yield _pack(some, itemsize, op, divisor)
            some, addresses = [], 0
        some.append(piece)
        addresses += needed
    if some:
        yield _pack(some, itemsize, op, divisor)


def _pack(pieces: Sequence[Piece], itemsize: int, op: int, divisor: float) -> KernelLaunch:
    pointers: list[int] = []
    table = b""
    for piece in pieces:
        together = (*piece.inputs, *piece.outputs)
        aligned = not any(address % PER_THREAD for address in together)
        table += _PIECE.pack(piece.elements, len(pointers), len(piece.inputs), len(piece.outputs), aligned)
        pointers += together
    filled = struct.pack(f"<{len(pointers)}Q", *pointers).ljust(_POINTERS.size, b"\0")
    parameter = filled + table.ljust(PIECES * _PIECE.size, b"\0") + _END.pack(divisor, op, 0)
    per_block = THREADS * (PER_THREAD // itemsize)
    blocks = max(-(-piece.elements // per_block) for piece in pieces)
    return KernelLaunch((blocks, len(pieces)), parameter)


def unpack(parameter: bytes, pieces: int) -> tuple[list[Piece], int, float]:
    """The first pieces of a launch, its reduction and its divisor: what `launches` has packed."""
    pointers = _POINTERS.unpack_from(parameter)
    found = []
    for number in range(pieces):
        count, first, inputs, outputs, _ = _PIECE.unpack_from(parameter, _POINTERS.size + number * _PIECE.size)
        middle = first + inputs
        found.append(Piece(pointers[first:middle], pointers[middle : middle + outputs], count))
    divisor, op, _ = _END.unpack_from(parameter, SIZE - _END.size)
    return found, op, divisor


def moves(pieces: Sequence[Piece], itemsize: int) -> tuple[str, int, list[Piece]]:
    """Pieces that only move elements, with the widest elements that all of them can be moved by.

    Returns:
        The dtype to move them as, bytes of it, and the pieces in such elements.
    """
    width = 8
    for piece in pieces:
        width = gcd(width, piece.elements * itemsize, *piece.inputs, *piece.outputs)
    factor = [piece._replace(elements=piece.elements * itemsize // width) for piece in pieces]
    return f"uint{8 * width}", width, factor
