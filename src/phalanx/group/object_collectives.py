"""Collectives on data that is no array: encoded by the safe codec, moved as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..algorithms import linear, star
from ..errors import UsageError
from ..wire import codec
from .gathers import Gathers
from .lockstep import Turn
from .shapes import pieces

__all__ = ["ObjectCollectives"]

Bytes = npt.NDArray[np.uint8]


class ObjectCollectives(Gathers):
    """The `_object` family. What an object may be, and what `allow_pickle` does: see `send_object`."""

    def broadcast_object(
        self,
        obj: Any,
        src: int,
        *,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Gives every member the object of rank `src`; elsewhere `obj` is not looked at.

        Raises:
            UsageError: The object cannot be sent; nothing was. Or something in it is pickled, and not allowed here.
            As `broadcast`.
        """
        self._check()
        self._check_member(src)
        mine = self._encode(obj, allow_pickle) if self.rank == src else None

        def body(turn: Turn) -> Any:
            turn.stamp("broadcast_object", root=src)
            sizes = np.array(_sizes(mine), np.int64)
            self._broadcast(turn, sizes, src)
            data = mine[1] if mine is not None else np.empty(int(sizes.sum()), np.uint8)
            self._broadcast(turn, data, src)
            return obj if self.rank == src else self._decode(data, int(sizes[0]), allow_pickle)

        return self._run(f"broadcast_object(src={src})", body, timeout, async_op)

    def all_gather_object(
        self, obj: Any, *, allow_pickle: bool = False, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Everybody's object, as a list in the order of ranks.

        Raises:
            As `broadcast_object`.
        """
        self._check()
        mine = self._encode(obj, allow_pickle)

        def body(turn: Turn) -> list[Any]:
            turn.stamp("all_gather_object")
            sizes = self._all_sizes(turn, mine)
            chunks = [np.empty(int(size.sum()), np.uint8) for size in sizes]
            chunks[self.rank] = mine[1]
            self._all_gather(turn, chunks)
            return [
                obj if rank == self.rank else self._decode(chunk, int(sizes[rank, 0]), allow_pickle)
                for rank, chunk in enumerate(chunks)
            ]

        return self._run("all_gather_object", body, timeout, async_op)

    def gather_object(
        self,
        obj: Any,
        dst: int,
        *,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Everybody's object on rank `dst`, as a list in the order of ranks; None elsewhere.

        Raises:
            As `broadcast_object`.
        """
        self._check()
        self._check_member(dst)
        mine = self._encode(obj, allow_pickle)

        def body(turn: Turn) -> list[Any] | None:
            turn.stamp("gather_object", root=dst)
            sizes = self._all_sizes(turn, mine)
            chunks = {self.rank: mine[1]}
            if self.rank == dst or (self._is_star and self.rank == 0):
                others = [rank for rank in range(self.world_size) if rank != self.rank]
                chunks |= {rank: np.empty(int(sizes[rank].sum()), np.uint8) for rank in others}
            turn.execute((star if self._is_star else linear).gather(self.rank, self.world_size, dst), chunks)
            if self.rank != dst:
                return None
            return [
                obj if rank == dst else self._decode(chunks[rank], int(sizes[rank, 0]), allow_pickle)
                for rank in range(self.world_size)
            ]

        return self._run(f"gather_object(dst={dst})", body, timeout, async_op)

    def scatter_object(
        self,
        objs: Sequence[Any] | None,
        src: int,
        *,
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Gives rank r the r-th object of rank `src`; elsewhere `objs` is not looked at.

        Raises:
            UsageError: On `src`: there are not as many objects as ranks.
            As `broadcast_object`.
        """
        self._check()
        self._check_member(src)
        encoded: list[_Encoded] | None = None
        if self.rank == src:
            if objs is None or len(objs) != self.world_size:
                found = "None" if objs is None else str(len(objs))
                raise UsageError(f"scatter_object got {found} objects on rank {src} (expected {self.world_size})")
            encoded = [self._encode(obj, allow_pickle) for obj in objs]

        def body(turn: Turn) -> Any:
            turn.stamp("scatter_object", root=src)
            sizes = np.zeros((self.world_size, 2), np.int64)
            if encoded is not None:
                sizes[:] = [_sizes(one) for one in encoded]
            self._broadcast(turn, sizes.reshape(-1), src)
            chunks: dict[int, Bytes]
            if encoded is not None:
                chunks = {rank: one[1] for rank, one in enumerate(encoded)}
            else:
                wanted = range(self.world_size) if self._is_star and self.rank == 0 else [self.rank]
                chunks = {rank: np.empty(int(sizes[rank].sum()), np.uint8) for rank in wanted}
            turn.execute((star if self._is_star else linear).scatter(self.rank, self.world_size, src), chunks)
            if objs is not None and self.rank == src:
                return objs[self.rank]
            return self._decode(chunks[self.rank], int(sizes[self.rank, 0]), allow_pickle)

        return self._run(f"scatter_object(src={src})", body, timeout, async_op)

    # ------------------------------------------------------------------------------------------------------------------

    def _all_sizes(self, turn: Turn, mine: _Encoded) -> npt.NDArray[np.int64]:
        """How long each rank's structure and arrays are."""
        sizes = np.zeros((self.world_size, 2), np.int64)
        sizes[self.rank] = _sizes(mine)
        self._all_gather(turn, pieces(sizes, self.world_size))
        return sizes

    def _encode(self, obj: Any, allow_pickle: bool) -> _Encoded:
        encoded = codec.encode(obj, allow_pickle=allow_pickle, limits=self._limits)
        return len(encoded.head), np.frombuffer(b"".join([encoded.head, *encoded.buffers]), np.uint8)

    def _decode(self, data: Bytes, head: int, allow_pickle: bool) -> Any:
        return codec.decode(data[:head].data, data[head:].data, limits=self._limits, allow_pickle=allow_pickle)


_Encoded = tuple[int, Bytes]
"""The length of the structure, and the structure followed by the arrays."""


def _sizes(encoded: _Encoded | None) -> tuple[int, int]:
    return (0, 0) if encoded is None else (encoded[0], encoded[1].size - encoded[0])
