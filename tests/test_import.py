"""What `import phalanx` brings, and what it leaves out until it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import phalanx

PUBLIC = [
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

# Slow to import, or optional, or only for the command line. Each is imported by the one module that needs it.
NOT_AT_IMPORT = {
    "asyncio",
    "click",
    "cupy",
    "hypothesis",
    "importlib.metadata",
    "jax",
    "ml_dtypes",
    "mpi4py",
    "multiprocessing",
    "phalanx.cli",
    "phalanx.testing",
    "pytest",
    "rich",
    "ssl",
    "torch",
}


def loaded_by(statement: str) -> set[str]:
    """The modules in a fresh interpreter after a statement."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(result.stdout))


def test_import_loads_nothing_heavy() -> None:
    own = loaded_by("import phalanx") - loaded_by("import numpy")
    assert "phalanx" in own
    assert sorted(own & NOT_AT_IMPORT) == []


def test_public_names() -> None:
    assert sorted(phalanx.__all__) == PUBLIC
    missing = [name for name in PUBLIC if not hasattr(phalanx, name)]
    assert not missing
    assert set(PUBLIC) <= set(dir(phalanx)), "dir() does not show what __all__ lists"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(phalanx, "no_such_name")


def test_the_version_is_that_of_the_package() -> None:
    assert phalanx.__version__ == metadata.version("phalanx")
