"""The contenders of remote calls: Phalanx, the pipe, and the peers that are installed. Knows how each is started."""

from __future__ import annotations

import importlib.util
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.checkout import with_benchmarks
from phalanx.cli.bench.contenders import Contender, Missing, Site, StartCommand

__all__ = ["PEERS", "PIPE", "CallContender", "find_peer", "ours"]

_PACKAGE = "benchmarks.calls"


@dataclass(frozen=True, kw_only=True)
class CallContender(Contender):
    """One whose rank 0 calls and whose rank 1 answers."""

    worker: tuple[str, ...] = (sys.executable, "-m", f"{_PACKAGE}.worker")
    starts_both: bool = False
    """Whether rank 0 starts rank 1."""

    def launches(self, worker: Sequence[str], n: int, site: Site, base: Mapping[str, str]) -> list[StartCommand]:
        """Its two processes, or the one that starts the other."""
        env = {**with_benchmarks(base), **self.env}
        if self.is_ours:
            env["PHALANX_TOKEN"] = secrets.token_hex(16)
        if self.starts_both:
            return [StartCommand(list(worker), env)]
        address = f"{site.master}:{site.port()}"
        return [StartCommand([*worker, str(rank), address], env) for rank in range(n)]


def ours(transport: str) -> CallContender:
    """Phalanx over one transport."""
    name, label = ("phalanx", "Phalanx") if transport == "auto" else (f"phalanx-{transport}", "Phalanx TCP")
    env = {"PHALANX_TRANSPORT": transport}
    return CallContender(name=name, label=label, library="phalanx", is_ours=True, env=env)


PIPE = CallContender(
    name="pipe",
    label="multiprocessing.Pipe",
    library="pipe",
    worker=(sys.executable, "-m", f"{_PACKAGE}.with_pipe"),
    starts_both=True,
)
"""Always measured: nothing between two Python processes that people use is as simple."""

_TORCH = CallContender(
    name="torch",
    label="torch.distributed.rpc",
    library="torch",
    env={"TP_SOCKET_IFNAME": "lo"},
    restless=True,  # TensorPipe polls shared memory without a pause: an idle process takes a whole core
)
_ZMQ = CallContender(name="zmq", label="pyzmq", library="zmq")
_GRPC = CallContender(name="grpc", label="gRPC", library="grpc")
_RAY = CallContender(
    name="ray",
    label="Ray",
    library="ray",
    # It reports to its makers unless it is told. Without a cluster it listens on loopback only, on Linux too.
    env={"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
)

_NEEDS = {
    "torch": (_TORCH, "torch", "torch is not installed (pip install torch; its CPU build is enough)"),
    "zmq": (_ZMQ, "zmq", "pyzmq is not installed (pip install pyzmq)"),
    "grpc": (_GRPC, "grpc", "grpcio is not installed (pip install grpcio)"),
}
"""Name -> contender, what it imports, and what to say where that is missing."""

PEERS = (*_NEEDS, "ray")

_LOOK = "import importlib.util, sys; sys.exit(any(importlib.util.find_spec(n) is None for n in ('ray', 'numpy')))"


def find_peer(name: str, *, ray: Path | None = None) -> CallContender | Missing:
    """The peer of this name, ready to be started, or why it is not.

    Args:
        name: One of `PEERS`.
        ray: A Python that has Ray; else this one.
    """
    if name == "ray":
        return _find_ray(ray)
    contender, module, reason = _NEEDS[name]
    return contender if importlib.util.find_spec(module) is not None else Missing(name, reason)


def _find_ray(given: Path | None) -> CallContender | Missing:
    """Ray's requirements are many and old, so it often has an environment of its own."""
    # Not `resolve`: the Python of an environment is a link, and what it has is found by where the link stands.
    python = Path(sys.executable) if given is None else given.absolute()
    try:
        found = subprocess.run([python, "-c", _LOOK], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        return Missing("ray", f"--ray {given} does not run: {error}")
    if not found:
        where = "" if given is None else f" for {given}"
        how = "pip install ray numpy; --ray PATH names the Python that has it"
        return Missing("ray", f"ray is not installed{where} ({how})")
    # By the file: that Python has no Phalanx.
    return replace(_RAY, worker=(str(python), str(Path(__file__).with_name("worker.py"))))
