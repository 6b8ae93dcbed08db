"""Collectives on objects other than arrays: encoded by the safe codec, moved as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

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

__all__ = ["ObjectCollectives"]

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]


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

        def body(engine: Engine, running: RunningCollective) -> Any:
            sizes = np.array(_sizes(mine), np.int64)
            engine.broadcast(running, sizes, src)
            data = mine[1] if mine is not None else np.empty(int(sizes.sum()), np.uint8)
            engine.broadcast(running, data, src)
            return obj if self.rank == src else self._decode(data, int(sizes[0]), src, expected, allow_pickle)

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

        def body(engine: Engine, running: RunningCollective) -> list[Any]:
            sizes = self._all_sizes(engine, running, mine)
            counts = sizes.sum(axis=1).tolist()
            everything = np.empty(sum(counts), np.uint8)
            engine.all_gather(running, mine[1], everything, counts)
            return self._decode_all(obj, everything, sizes, expected, allow_pickle)

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

        def body(engine: Engine, running: RunningCollective) -> list[Any] | None:
            sizes = self._all_sizes(engine, running, mine)
            counts = sizes.sum(axis=1).tolist()
            everything = np.empty(sum(counts), np.uint8) if self.rank == dst else None
            engine.gather(running, mine[1], everything, dst, counts)
            return None if everything is None else self._decode_all(obj, everything, sizes, expected, allow_pickle)

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

        def body(engine: Engine, running: RunningCollective) -> Any:
            sizes = np.zeros((self.world_size, 2), np.int64)
            if encoded is not None:
                sizes[:] = [_sizes(one) for one in encoded]
            engine.broadcast(running, sizes.reshape(-1), src)
            counts = sizes.sum(axis=1).tolist()
            everything = np.concatenate([data for _, data in encoded]) if encoded is not None else None
            mine = np.empty(counts[self.rank], np.uint8)
            engine.scatter(running, everything, mine, src, counts)
            if self.rank == src:
                return given[self.rank]
            return self._decode(mine, int(sizes[self.rank, 0]), src, expected, allow_pickle)

        call = CollectiveCall("scatter_object", root=src)
        return self._run(call, body, timeout, async_op)

    # ------------------------------------------------------------------------------------------------------------------

    def _all_sizes(self, engine: Engine, running: RunningCollective, mine: _Encoded) -> npt.NDArray[np.int64]:
        """The lengths of each rank's structure and arrays."""
        sizes = np.zeros((self.world_size, 2), np.int64)
        sizes[self.rank] = _sizes(mine)
        engine.all_gather(running, sizes[self.rank], sizes.reshape(-1), [2] * self.world_size)
        return sizes

    def _decode_all(
        self, obj: Any, data: Bytes, sizes: npt.NDArray[np.int64], expected: ObjectType, allow_pickle: bool
    ) -> list[Any]:
        """Everybody's object; this rank's own is the one that it gave."""
        parts = split(data, sizes.sum(axis=1).tolist())
        return [
            obj if rank == self.rank else self._decode(part, int(sizes[rank, 0]), rank, expected, allow_pickle)
            for rank, part in enumerate(parts)
        ]

    def _encode(self, obj: Any, expected: ObjectType, allow_pickle: bool) -> _Encoded:
        expected.check_own(obj)
        encoded = codec.encode(obj, allow_pickle=allow_pickle, limits=self._limits, structs="typed")
        return len(encoded.head), np.frombuffer(b"".join([encoded.head, *encoded.buffers]), np.uint8)

    def _decode(self, data: Bytes, head: int, src: int, expected: ObjectType, allow_pickle: bool) -> Any:
        value = codec.decode(
            data[:head].data,
            data[head:].data,
            limits=self._limits,
            allow_pickle=allow_pickle,
            typed=expected.is_given,
        )
        return expected.convert(value, self.members[src])


_Encoded = tuple[int, Bytes]
"""The length of the structure, and the structure followed by the arrays."""


def _sizes(encoded: _Encoded | None) -> tuple[int, int]:
    return (0, 0) if encoded is None else (encoded[0], encoded[1].size - encoded[0])
