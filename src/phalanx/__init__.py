"""Phalanx moves tensors between ranks: collectives, messages and a launcher for distributed training in Python.

```python
import phalanx as px

with px.init() as world:
    world.all_reduce(gradients, op="mean")
```
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import backends, checkpoint, elastic, errors, parallel, rpc, testing
    from .config import Options, TlsOptions
    from .errors import (
        AuthenticationFailed,
        BackendUnavailable,
        Cancelled,
        ChannelClosed,
        CheckpointError,
        CheckpointNotFound,
        Closed,
        ConfigError,
        Desync,
        Evicted,
        FunctionNotFound,
        InvalidArgument,
        InvalidMessage,
        InvalidRank,
        InvalidWorldSize,
        MissingVariable,
        NoConnection,
        OutOfResources,
        PeerLost,
        PhalanxError,
        ProtocolError,
        RankFailed,
        RemoteError,
        RendezvousError,
        RpcError,
        RpcNoConnection,
        RpcTimeout,
        SelfSend,
        SizeMismatch,
        Timeout,
        UnsupportedArray,
        UnsupportedOp,
        UsageError,
        WorldNotFormed,
    )
    from .group import Group, Mesh, Work
    from .launching.launch import launch
    from .types import Address, Received, ReduceOp
    from .world import init

__version__ = "0.1.0"

__all__ = [
    "Address",
    "AuthenticationFailed",
    "BackendUnavailable",
    "Cancelled",
    "ChannelClosed",
    "CheckpointError",
    "CheckpointNotFound",
    "Closed",
    "ConfigError",
    "Desync",
    "Evicted",
    "FunctionNotFound",
    "Group",
    "InvalidArgument",
    "InvalidMessage",
    "InvalidRank",
    "InvalidWorldSize",
    "Mesh",
    "MissingVariable",
    "NoConnection",
    "Options",
    "OutOfResources",
    "PeerLost",
    "PhalanxError",
    "ProtocolError",
    "RankFailed",
    "Received",
    "ReduceOp",
    "RemoteError",
    "RendezvousError",
    "RpcError",
    "RpcNoConnection",
    "RpcTimeout",
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
    "checkpoint",
    "elastic",
    "errors",
    "init",
    "launch",
    "parallel",
    "rpc",
    "testing",
]

_HOMES = {
    "Address": "types",
    "Group": "group",
    "Mesh": "group",
    "Options": "config",
    "Received": "types",
    "ReduceOp": "types",
    "TlsOptions": "config",
    "Work": "group",
    "init": "world",
    "launch": "launching.launch",
}
"""Where the public names live that are neither errors nor parts of the package themselves."""
_OF_A_GROUP = frozenset(
    {
        "abort",
        "all_gather",
        "all_gather_object",
        "all_reduce",
        "all_reduce_many",
        "all_to_all",
        "argmax",
        "argmin",
        "barrier",
        "broadcast",
        "broadcast_object",
        "empty",
        "exscan",
        "gather",
        "gather_object",
        "hosts",
        "irecv",
        "isend",
        "local_rank",
        "local_world_size",
        "members",
        "rank",
        "recv",
        "recv_object",
        "reduce",
        "reduce_scatter",
        "scan",
        "scatter",
        "scatter_object",
        "send",
        "send_object",
        "sendrecv",
        "shrink",
        "split",
        "subgroup",
        "to_torch",
        "world_size",
    }
)
"""Names of a group that users of other libraries look for in the module."""
_OF_TORCH = 'world = phalanx.init(); under torch it is torch.distributed.init_process_group("phalanx")'
_ELSEWHERE = {
    "get_rank": "world = phalanx.init(), then world.rank",
    "get_world_size": "world = phalanx.init(), then world.world_size",
    "size": "world = phalanx.init(), then world.world_size",
    "world": "world = phalanx.init()",
    "World": "phalanx.init() returns the world, a phalanx.Group",
    "COMM_WORLD": "world = phalanx.init()",
    "init_process_group": _OF_TORCH,
    "initialize": "world = phalanx.init()",
    "setup": "world = phalanx.init()",
    "allreduce": "world = phalanx.init(), then world.all_reduce",
    "bcast": "world = phalanx.init(), then world.broadcast",
    "run": "phalanx.launch(fn, 4) runs a function on four ranks, `phalanx run -n 4 script.py` a script",
    "spawn": "phalanx.launch(fn, 4) runs a function on four ranks",
    "DDP": "phalanx.parallel.DDP",
    "DistributedDataParallel": "phalanx.parallel.DDP",
    "destroy_process_group": "world.close(), or `with phalanx.init() as world:`",
    "finalize": "world.close(), or `with phalanx.init() as world:`",
    "shutdown": "world.close(), or `with phalanx.init() as world:`",
}
"""Names that users of other libraries look for in the module, and what they want."""
_PARTS = frozenset({"backends", "checkpoint", "elastic", "errors", "parallel", "rpc", "testing"})


def __getattr__(name: str) -> Any:
    # Everything is imported when it is first used: torch loads this package with itself, wherever it is installed.
    if name not in __all__:
        try:
            raise AttributeError(_unknown(name), name=name, obj=sys.modules[__name__])
        except AttributeError as error:
            error.__traceback__ = None  # the line that asked for it says it all
            raise
    if name in _PARTS:
        found: Any = importlib.import_module(f".{name}", __name__)
    else:
        found = getattr(importlib.import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)
    globals()[name] = found
    return found


def _unknown(name: str) -> str:
    if name in _OF_A_GROUP:
        return f"phalanx.{name} does not exist: {name} belongs to the group that phalanx.init() returns (world.{name})"
    hint = f" ({_ELSEWHERE[name]})" if name in _ELSEWHERE else ""
    return f"module {__name__!r} has no attribute {name!r}{hint}"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
