"""Writes heads of the object codec that are nearly right, which random mutation alone would hardly find."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from phalanx.wire.packing import ALIGN, Blob, Code

__all__ = ["EDGES", "LENGTH", "PAYLOAD_LIMIT", "Grammar"]

LENGTH = struct.Struct("<Q")
PAYLOAD_LIMIT = 1 << 16
EDGES = [
    0,
    1,
    2,
    7,
    64,
    127,
    128,
    255,
    256,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
]

pack = msgspec.msgpack.encode


class Grammar:
    """Writes heads that are nearly right: each field is what it should be, most of the time."""

    DTYPES = ("|b1", "|u1", "<i2", ">f4", "<f8", "<c16", "<M8[ns]", "|S3", "<U2", "|V4", "<f16", "|O8", "<M8[0s]", "f4")

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._offset = 0

    def message(self) -> bytes:
        head = self._value(0)
        return LENGTH.pack(self._maybe(self._offset, lambda: self._rng.choice(EDGES))) + head

    def _maybe(self, right: Any, wrong: Callable[[], Any]) -> Any:
        return right if self._rng.random() < 0.97 else wrong()

    def _junk(self) -> Any:
        return self._rng.choice([None, -1, 1.5, "x", b"", [], {}, 2**63, [[1]], True])

    def _items(self, depth: int, least: int = 0) -> list[Any]:
        return [msgspec.Raw(self._value(depth + 1)) for _ in range(self._rng.randint(least, 4 if depth < 6 else 0))]

    def _value(self, depth: int) -> bytes:
        kind = self._rng.randrange(10)
        if kind < 3 or depth > 12:
            return pack(self._rng.choice([None, True, 0, -5, 2**63, 1.5, "text", b"bytes", *EDGES]))
        if kind == 3:
            return pack(self._items(depth))
        if kind == 4:
            # The key may be anything, also what cannot be a key.
            pairs = [self._value(11) + self._value(depth + 1) for _ in range(self._rng.randint(0, 3))]
            return bytes([0x80 + len(pairs)]) + b"".join(pairs)
        code = self._rng.randint(1, 21)
        return pack(
            msgspec.msgpack.Ext(code, self._maybe(self._extension(code, depth), lambda: self._rng.randbytes(5)))
        )

    def _shape(self) -> Any:
        dims = [self._rng.choice([0, 1, 2, 3, 5]) for _ in range(self._rng.randint(0, 3))]
        return self._maybe(dims, lambda: [self._rng.choice([-1, 2**62, 2**32, "3", 0]) for _ in range(3)])

    def _dtype(self, depth: int = 0) -> tuple[Any, int]:
        if self._rng.random() < 0.8 or depth > 3:
            name = self._rng.choice(self.DTYPES)
            try:
                return name, np.dtype(name).itemsize
            except (TypeError, ValueError):
                return name, 8
        fields: list[Any] = []
        size = 0
        for index in range(self._rng.randint(0, 3)):
            inner, itemsize = self._dtype(depth + 1)
            shape = self._rng.choice([[], [], [2], [1, 2]])
            fields.append([self._maybe(f"f{index}", self._junk), self._maybe(size, self._junk), inner, shape])
            size += itemsize * int(np.prod(shape, dtype=int))
        return self._maybe([size, fields], self._junk), size

    def _buffer(self, nbytes: Any) -> Any:
        if isinstance(nbytes, int) and 0 < nbytes < PAYLOAD_LIMIT:
            self._offset += -self._offset % ALIGN + nbytes
        return self._maybe(nbytes, self._junk)

    def _extension(self, code: int, depth: int) -> bytes:
        rng = self._rng
        if code in (Code.TUPLE, Code.SET, Code.FROZENSET):
            return pack(self._items(depth))
        if code in (Code.DICT, Code.ORDERED_DICT):
            items = self._items(depth)
            return pack(items + items[: len(items) % 2])
        if code in (Code.ARRAY, Code.TENSOR):
            shape = self._shape()
            dtype, itemsize = self._dtype() if code == Code.ARRAY else (rng.choice(["float32", "int32"]), 4)
            try:
                nbytes = int(np.prod(shape, dtype=object)) * itemsize
            except (TypeError, ValueError):
                nbytes = 0
            return pack(
                (self._buffer(max(-1, min(nbytes, 2**63))), shape, dtype, rng.random() < 0.3 and code == Code.ARRAY)
            )
        if code == Code.TYPED:
            return pack(self._maybe([self._maybe("Config", self._junk), self._maybe({"a": 1}, self._junk)], self._junk))
        if code == Code.BLOB:
            return pack((self._buffer(rng.choice([0, 1, 100, 20_000])), rng.choice([Blob.BYTES, Blob.BYTEARRAY, 7])))
        if code == Code.SCALAR:
            dtype, itemsize = self._dtype()
            return pack((dtype, rng.choice([bytes(min(itemsize, 100)), rng.randbytes(min(itemsize, 100))])))
        if code in (Code.TIME, Code.DATETIME):
            zone = rng.choice([None, [0], [3_600_000_000, "CET"], [10**12], 5])
            count = 4 if code == Code.TIME else 7
            return pack(([self._maybe(rng.randint(1, 23), self._junk) for _ in range(count)], zone, rng.randint(0, 1)))
        if code in (Code.DATE, Code.TIMEDELTA):
            return pack([self._maybe(rng.randint(1, 28), lambda: rng.choice(EDGES)) for _ in range(3)])
        sizes = {Code.COMPLEX: 16, Code.UUID: 16}
        if code == Code.DECIMAL:
            return rng.choice([b"1.5", b"-Infinity", b"1E+999999", b"sNaN", b"1_0", b"x"])
        return rng.randbytes(sizes.get(code, rng.randint(0, 20)))
