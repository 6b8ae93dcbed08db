"""Collectives on objects other than arrays: encoded by the safe codec, moved as bytes.

Only its owner knows how long an object is. So each rank shows a block of a fixed length, which says so, and which holds
the object if it is short; only if one is longer, a second step follows. Where the ranks share memory, the core does the
same (cpp/phalanx/objects.hpp).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from ...arguments import shown
from ...errors import UsageError
from ...frames import hides_frames
from ...wire import codec
from ..data.typed import ObjectType
from ..engines.base import Engine, split
from ..members import as_member
from ..running_collective import RunningCollective
from ..tracking.call import CollectiveCall
from ..work import Work
from .gathers import Gathers

if TYPE_CHECKING:
    from ..._core import FastPath

__all__ = ["ObjectCollectives"]

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]

HEADER = struct.Struct("<QQQ")
"""How a block begins: the bytes of the structure and of the arrays, and whether a second step follows."""
LONG_BLOCK = 1024
"""Bytes of a block that one rank has for another."""
SHORT_BLOCK = 256
"""The same where everybody gets those of all."""


class _Encoded(NamedTuple):
    """An object as bytes."""

    head: int
    """The length of its structure."""
    data: bytes | memoryview
    """The structure, and then the arrays."""


class ObjectCollectives(Gathers):
    """The `_object` family. What an object may be, and what `allow_pickle` does: see `send_object`.

    What `type` does, see `recv_object`; it is the type of one object, also where the result is a list of them.
    """

    @overload
    def broadcast_object(
        self,
        obj: Any,
        src: int,
        *,
        type: type[T],
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> T: ...
    @overload
    def broadcast_object(
        self,
        obj: Any,
        src: int,
        *,
        type: type[T],
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[T]: ...
    @overload
    def broadcast_object(
        self,
        obj: Any,
        src: int,
        *,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Any: ...
    @overload
    def broadcast_object(
        self,
        obj: Any,
        src: int,
        *,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Any]: ...
    @overload
    def broadcast_object(
        self,
        obj: Any,
        src: int,
        *,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: bool,
    ) -> Any: ...

    @hides_frames
    def broadcast_object(
        self,
        obj: Any,
        src: int,
        *,
        type: Any = None,  # noqa: A002 - the caller knows it as the type
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Gives every member the object of rank `src`; elsewhere `obj` is not looked at.

        Raises:
            UsageError: The object cannot be sent; nothing was. Or something in it is pickled, and not allowed here, or
                does not fit `type`.
            As `broadcast`.
        """
        self._check()
        src = as_member(src, self.world_size)
        expected = ObjectType(type, allow_pickle=allow_pickle)
        mine = self._encode(obj, expected, allow_pickle) if self.rank == src else None

        fast = None if async_op else self._object_path
        if fast is not None:
            found = fast.broadcast_object(src, mine, timeout)
            if found is not None:
                return obj if mine is not None else self._decode(_Encoded(*found), src, expected, allow_pickle)

        def body(engine: Engine, running: RunningCollective) -> Any:
            block = np.empty(LONG_BLOCK, np.uint8) if mine is None else _block(mine, LONG_BLOCK)
            engine.broadcast(running, block, src)
            head, size, more = _header(block)
            if more:
                data = np.empty(size, np.uint8) if mine is None else np.frombuffer(mine.data, np.uint8)
                engine.broadcast(running, data, src)
            else:
                data = block[HEADER.size : HEADER.size + size]
            return obj if mine is not None else self._decode(_Encoded(head, data.data), src, expected, allow_pickle)

        call = CollectiveCall("broadcast_object", root=src)
        return self._run(call, body, timeout, async_op)

    @overload
    def all_gather_object(
        self,
        obj: Any,
        *,
        type: type[T],
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> list[T]: ...
    @overload
    def all_gather_object(
        self, obj: Any, *, type: type[T], allow_pickle: bool = ..., timeout: float | None = ..., async_op: Literal[True]
    ) -> Work[list[T]]: ...
    @overload
    def all_gather_object(
        self,
        obj: Any,
        *,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> list[Any]: ...
    @overload
    def all_gather_object(
        self,
        obj: Any,
        *,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[list[Any]]: ...
    @overload
    def all_gather_object(
        self, obj: Any, *, type: Any = ..., allow_pickle: bool = ..., timeout: float | None = ..., async_op: bool
    ) -> Any: ...

    @hides_frames
    def all_gather_object(
        self,
        obj: Any,
        *,
        type: Any = None,  # noqa: A002
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Everybody's object, as a list in the order of ranks.

        Raises:
            As `broadcast_object`.
        """
        self._check()
        expected = ObjectType(type, allow_pickle=allow_pickle)
        mine = self._encode(obj, expected, allow_pickle)

        fast = None if async_op else self._object_path
        if fast is not None:
            found = fast.all_gather_object(mine, timeout)
            if found is not None:
                return self._decode_all(obj, found, expected, allow_pickle)

        def body(engine: Engine, running: RunningCollective) -> list[Any]:
            parts, counts = self._all_blocks(engine, running, mine)
            if counts is not None:
                everything = np.empty(sum(counts), np.uint8)
                engine.all_gather(running, np.frombuffer(mine.data, np.uint8), everything, counts)
                parts = _cut(everything, parts, counts)
            return self._decode_all(obj, parts, expected, allow_pickle)

        call = CollectiveCall("all_gather_object")
        return self._run(call, body, timeout, async_op)

    @overload
    def gather_object(
        self,
        obj: Any,
        dst: int,
        *,
        type: type[T],
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> list[T] | None: ...
    @overload
    def gather_object(
        self,
        obj: Any,
        dst: int,
        *,
        type: type[T],
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[list[T] | None]: ...
    @overload
    def gather_object(
        self,
        obj: Any,
        dst: int,
        *,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> list[Any] | None: ...
    @overload
    def gather_object(
        self,
        obj: Any,
        dst: int,
        *,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[list[Any] | None]: ...
    @overload
    def gather_object(
        self,
        obj: Any,
        dst: int,
        *,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: bool,
    ) -> Any: ...

    @hides_frames
    def gather_object(
        self,
        obj: Any,
        dst: int,
        *,
        type: Any = None,  # noqa: A002 - the caller knows it as the type
        allow_pickle: bool = False,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Everybody's object on rank `dst`, as a list in the order of ranks; None elsewhere.

        Raises:
            As `broadcast_object`.
        """
        self._check()
        dst = as_member(dst, self.world_size)
        expected = ObjectType(type, allow_pickle=allow_pickle)
        mine = self._encode(obj, expected, allow_pickle)

        fast = None if async_op else self._object_path
        if fast is not None:
            found = fast.gather_object(dst, mine, timeout)
            if found is not None:
                return self._decode_all(obj, found, expected, allow_pickle) if self.rank == dst else None

        def body(engine: Engine, running: RunningCollective) -> list[Any] | None:
            parts, counts = self._all_blocks(engine, running, mine)
            if counts is not None:
                everything = np.empty(sum(counts), np.uint8) if self.rank == dst else None
                engine.gather(running, np.frombuffer(mine.data, np.uint8), everything, dst, counts)
                parts = parts if everything is None else _cut(everything, parts, counts)
            return self._decode_all(obj, parts, expected, allow_pickle) if self.rank == dst else None

        call = CollectiveCall("gather_object", root=dst)
        return self._run(call, body, timeout, async_op)

    @overload
    def scatter_object(
        self,
        objs: Sequence[Any] | None,
        src: int,
        *,
        type: type[T],
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> T: ...
    @overload
    def scatter_object(
        self,
        objs: Sequence[Any] | None,
        src: int,
        *,
        type: type[T],
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[T]: ...
    @overload
    def scatter_object(
        self,
        objs: Sequence[Any] | None,
        src: int,
        *,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> Any: ...
    @overload
    def scatter_object(
        self,
        objs: Sequence[Any] | None,
        src: int,
        *,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: Literal[True],
    ) -> Work[Any]: ...
    @overload
    def scatter_object(
        self,
        objs: Sequence[Any] | None,
        src: int,
        *,
        type: Any = ...,
        allow_pickle: bool = ...,
        timeout: float | None = ...,
        async_op: bool,
    ) -> Any: ...

    @hides_frames
    def scatter_object(
        self,
        objs: Sequence[Any] | None,
        src: int,
        *,
        type: Any = None,  # noqa: A002 - the caller knows it as the type
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
        src = as_member(src, self.world_size)
        expected = ObjectType(type, allow_pickle=allow_pickle)
        encoded: list[_Encoded] | None = None
        given: list[Any] = []
        if self.rank == src:
            if not isinstance(objs, Sequence) or isinstance(objs, (str, bytes, bytearray, memoryview)):
                raise UsageError(f"objs={shown(objs)} is not valid on rank {src} (expected a list of objects)")
            given = list(objs)
            if len(given) != self.world_size:
                raise UsageError(f"scatter_object got {len(given)} objects on rank {src} (expected {self.world_size})")
            encoded = [self._encode(obj, expected, allow_pickle) for obj in given]

        fast = None if async_op else self._object_path
        if fast is not None:
            found = fast.scatter_object(src, encoded, timeout)
            if found is not None:
                return given[src] if encoded else self._decode(_Encoded(*found), src, expected, allow_pickle)

        def body(engine: Engine, running: RunningCollective) -> Any:
            mine, size = np.empty(LONG_BLOCK, np.uint8), self.world_size
            blocks = None if encoded is None else _blocks(encoded)
            engine.scatter(running, blocks, mine, src, [LONG_BLOCK] * size)
            head, length, more = _header(mine)
            data = mine[HEADER.size : HEADER.size + length]
            if more:
                counts = np.zeros(size, np.int64) if encoded is None else np.array([len(one.data) for one in encoded])
                engine.broadcast(running, counts, src)
                everything = None if encoded is None else np.frombuffer(b"".join(one.data for one in encoded), np.uint8)
                data = np.empty(length, np.uint8)
                engine.scatter(running, everything, data, src, counts.tolist())
            return given[src] if encoded else self._decode(_Encoded(head, data.data), src, expected, allow_pickle)

        call = CollectiveCall("scatter_object", root=src)
        return self._run(call, body, timeout, async_op)

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _object_path(self) -> FastPath | None:
        """The core's fast path, if it takes objects."""
        path: Any = self._fast_path
        path = path if self._device_path is None else self._device_path.plain
        return cast("FastPath", path) if hasattr(path, "broadcast_object") else None

    def _all_blocks(
        self, engine: Engine, running: RunningCollective, mine: _Encoded
    ) -> tuple[list[_Encoded], list[int] | None]:
        """Everybody's objects; and the lengths of all if a second step has to follow, because not all data is there."""
        size = self.world_size
        blocks = np.empty(size * SHORT_BLOCK, np.uint8)
        engine.all_gather(running, _block(mine, SHORT_BLOCK), blocks, [SHORT_BLOCK] * size)
        parts, counts, is_long = [], [], False
        for block in blocks.reshape(size, SHORT_BLOCK):
            head, length, more = _header(block)
            parts.append(_Encoded(head, block[HEADER.size : HEADER.size + length].tobytes()))
            counts.append(length)
            is_long = is_long or more
        return parts, counts if is_long else None

    def _decode_all(
        self, obj: Any, parts: Sequence[tuple[int, bytes | memoryview]], expected: ObjectType, allow_pickle: bool
    ) -> list[Any]:
        """Everybody's object; this rank's own is the one that it gave."""
        return [
            obj if rank == self.rank else self._decode(_Encoded(*part), rank, expected, allow_pickle)
            for rank, part in enumerate(parts)
        ]

    def _encode(self, obj: Any, expected: ObjectType, allow_pickle: bool) -> _Encoded:
        expected.check_own(obj)
        encoded = codec.encode(obj, allow_pickle=allow_pickle, limits=self._limits, structs="typed")
        data = b"".join([encoded.head, *encoded.buffers]) if encoded.buffers else encoded.head
        return _Encoded(len(encoded.head), data)

    def _decode(self, encoded: _Encoded, src: int, expected: ObjectType, allow_pickle: bool) -> Any:
        head, data = encoded
        value = codec.decode(
            data if len(data) == head else data[:head],
            b"" if len(data) == head else data[head:],
            limits=self._limits,
            allow_pickle=allow_pickle,
            typed=expected.is_given,
        )
        return expected.convert(value, self.members[src])


def _block(encoded: _Encoded, room: int, more: bool = False) -> Bytes:
    """The block of an object, so long.

    Args:
        more: Whether a second step follows in any case.
    """
    head, data = encoded
    fits = HEADER.size + len(data) <= room
    start = HEADER.pack(head, len(data) - head, more or not fits)
    return np.frombuffer((start + (bytes(data) if fits else b"")).ljust(room, b"\0"), np.uint8)


def _blocks(encoded: Sequence[_Encoded]) -> Bytes:
    """The blocks of all objects of a scatter."""
    more = any(HEADER.size + len(one.data) > LONG_BLOCK for one in encoded)
    return np.concatenate([_block(one, LONG_BLOCK, more) for one in encoded])


def _header(block: Bytes) -> tuple[int, int, bool]:
    """The length of the structure and of all, and whether a second step follows."""
    head, rest, more = HEADER.unpack_from(block.data)
    return head, head + rest, bool(more)


def _cut(everything: Bytes, parts: Sequence[_Encoded], counts: Sequence[int]) -> list[_Encoded]:
    """The objects whose bytes follow each other there."""
    return [_Encoded(part.head, data.data) for part, data in zip(parts, split(everything, counts), strict=True)]
