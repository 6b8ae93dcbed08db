"""Phalanx moves tensors between ranks: collectives, messages and a launcher for distributed training in Python.

```python
import phalanx as px

with px.init() as world:
    world.all_reduce(gradients, op="mean")
```
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import backends, errors
from .config import Options, TlsOptions
from .errors import (
    AuthenticationFailed,
    BackendUnavailable,
    Cancelled,
    ChannelClosed,
    Closed,
    ConfigError,
    Desync,
    FunctionNotFound,
    InvalidArgument,
    InvalidMessage,
    InvalidRank,
    InvalidWorldSize,
    MissingVariable,
    NoConnection,
    PeerLost,
    PhalanxError,
    ProtocolError,
    RemoteError,
    RendezvousError,
    RpcError,
    SelfSend,
    SizeMismatch,
    Timeout,
    UnsupportedArray,
    UnsupportedOp,
    UsageError,
    WorldNotFormed,
)
from .group import Group, Work
from .types import Address, Received, ReduceOp
from .world import init

if TYPE_CHECKING:
    from . import rpc, testing

__version__ = "0.1.0"

__all__ = [
    "Address",
    "AuthenticationFailed",
    "BackendUnavailable",
    "Cancelled",
    "ChannelClosed",
    "Closed",
    "ConfigError",
    "Desync",
    "FunctionNotFound",
    "Group",
    "InvalidArgument",
    "InvalidMessage",
    "InvalidRank",
    "InvalidWorldSize",
    "MissingVariable",
    "NoConnection",
    "Options",
    "PeerLost",
    "PhalanxError",
    "ProtocolError",
    "Received",
    "ReduceOp",
    "RemoteError",
    "RendezvousError",
    "RpcError",
    "SelfSend",
    "SizeMismatch",
    "Timeout",
    "TlsOptions",
    "UnsupportedArray",
    "UnsupportedOp",
    "UsageError",
    "Work",
    "WorldNotFormed",
    "__version__",
    "backends",
    "errors",
    "init",
    "rpc",
    "testing",
]

_LAZY = ("rpc", "testing")
"""Parts that a training job does not need: imported when first used."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
