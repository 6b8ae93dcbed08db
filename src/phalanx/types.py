"""Small values that every layer speaks of."""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from .errors import ConfigError

__all__ = ["Address", "AnyArray", "ArrayT", "Counts", "Op", "OutT", "Received", "ReduceOp", "TensorT"]


class ReduceOp(str, enum.Enum):
    """The ways to combine the values of the ranks. Every verb also takes the plain string."""

    SUM = "sum"
    MEAN = "mean"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


Op: TypeAlias = ReduceOp | Literal["sum", "mean", "prod", "min", "max", "band", "bor", "bxor"]
"""The argument `op` of the reductions."""


class _HasBuffer(Protocol):
    def __buffer__(self, flags: int, /) -> memoryview: ...


class _HasArray(Protocol):
    def __array__(self, *args: Any, **kwargs: Any) -> Any: ...


class _HasDLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class _IsTensor(Protocol):
    @property
    def dtype(self) -> Any: ...
    def __len__(self) -> int: ...


class _HasCudaArray(Protocol):
    @property
    def __cuda_array_interface__(self) -> Any: ...


AnyArray: TypeAlias = _HasBuffer | _HasArray | _HasDLPack | _HasCudaArray
"""An array of any library, as type checkers see it: NumPy, torch, JAX, CuPy, or anything with a buffer. No list is one.

Whether a backend can send it is known only when it runs.
"""
ArrayT = TypeVar("ArrayT", bound=AnyArray)
"""The array that goes in: one of the same kind comes out."""
TensorT = TypeVar("TensorT", bound=_IsTensor)
"""As `ArrayT`, where a scalar or a plain buffer would come out as an array."""
OutT = TypeVar("OutT", bound=AnyArray)
"""The argument `out`, which is filled and returned."""
Counts: TypeAlias = Sequence[int] | Literal["auto"] | None
"""The argument `counts` of gathers: rows of each rank; `"auto"` to find them out; None if all have as many."""


class Address(NamedTuple):
    """A host and a port. Written `host:port`, an IPv6 host in brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, what: str = "address") -> Address:
        """Reads `host:port` or `[v6]:port`.

        Raises:
            ConfigError: The text has no host or no port between 0 and 65535.
        """
        host, colon, port = text.strip().rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ConfigError(f"{what} {text!r} is not valid (write an IPv6 address as [address]:port)")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"{what} {text!r} is not valid (expected host:port, the port from 0 to 65535)")
        return cls(host, int(port))

    @classmethod
    def of(cls, value: str | tuple[str, int], *, what: str = "address") -> Address:
        """An address that is written, or a pair of host and port.

        Raises:
            ConfigError: It is neither.
        """
        if isinstance(value, str):
            return cls.parse(value, what=what)
        is_pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)
        if not is_pair or not hasattr(type(value[1]), "__index__"):
            raise ConfigError(f"{what}={value!r} is not valid (expected host:port)")
        return cls(value[0], operator.index(value[1]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Received(NamedTuple):
    """The result of a receive from anyone: the data, its sender and its tag."""

    data: Any
    src: int
    tag: int
