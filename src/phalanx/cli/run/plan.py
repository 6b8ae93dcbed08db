"""The plan of a job: the command line, checked."""

from __future__ import annotations

import bisect
import itertools
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.launching.environment import OWN_VARIABLES, cores
from phalanx.types import Address

__all__ = ["RunPlan", "check_outputs", "cores"]

MAX_PORT = 65535
MOST_RANKS = 4096
"""On one node: more would be a slip of the finger, and could take all that the machine has."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """One job, as the launcher of one node sees it.

    Raises:
        ConfigError: The parts do not fit together; the message names the option.
    """

    target: str
    """A script, or a module's name."""
    arguments: tuple[str, ...] = ()
    module: bool = False
    """`target` is a module."""
    python: bool = True
    """False: `target` is a program of its own, not a Python script."""
    ranks: int = 1
    """On this node; the same on every node, unless `layout` says otherwise."""
    nodes: int = 1
    node: int = 0
    layout: tuple[int, ...] = ()
    """The ranks of each node; empty if all have as many as this one."""
    names: tuple[str, ...] = ()
    """The names of the nodes, where they are known."""
    master: Address | None = None
    directory_port: int | None = None
    token: bytes | None = None
    """None: a fresh one, which only a single node can have."""
    log_dir: Path | None = None
    max_restarts: int = 0
    """How often all ranks are started again after one has failed."""
    grace: float = 5.0
    prefix: bool = True
    page: bool = False
    """Serve a web page with what the job does."""
    trace: Path | None = None
    """Where every operation is written to."""
    metrics: Path | None = None
    """Where metrics are written to."""
    relayed: tuple[str, ...] = ()
    """Options of these three that the controller of a job on several hosts was given: it shows the job."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Variables for the ranks."""
    elastic: tuple[int, int] | None = None
    """The fewest and the most ranks of a job that goes on without those that are lost."""
    join: Address | None = None
    """The directory of an elastic job that runs elsewhere, which these ranks join."""

    def __post_init__(self) -> None:
        if not 0 <= self.node < self.nodes:
            raise ConfigError(
                f"--node-rank {self.node} is not valid (with --nnodes {self.nodes}: 0 to {self.nodes - 1})"
            )
        if self.ranks > MOST_RANKS:
            raise ConfigError(f"-n {self.ranks} is too many (at most {MOST_RANKS} ranks on a node)")
        if not 0 <= self.grace < float("inf"):
            raise ConfigError(f"--grace {self.grace} is not valid (expected seconds, 0 or more)")
        if self.elastic is not None:
            self._check_elastic(*self.elastic)
        if self.nodes > 1:
            self._check_nodes()
        check_outputs(self.trace, self.metrics)
        for name in self.extra:
            if name in OWN_VARIABLES:
                raise ConfigError(f"--env {name}=… is not possible: `phalanx run` sets {name} itself")
        if not self.python:
            self._check_program()
        elif self.module:
            self._check_module()
        else:
            self._check_script()

    def _check_nodes(self) -> None:
        if self.max_restarts:
            raise ConfigError("--max-restarts is for a single node (several would have to agree when to begin again)")
        if self.master is None:
            raise ConfigError(
                f"--nnodes {self.nodes} needs --master HOST:PORT: the first node's name or address and a free port "
                "there, the same on every node"
            )
        if self.master.port == 0:
            raise ConfigError(f"--master {self.master} is not valid (several nodes need a port that all of them know)")
        if self.directory_port is None and self.master.port == MAX_PORT:
            raise ConfigError(
                f"--master {self.master} leaves no port above it for the directory (choose one with --directory-port)"
            )
        if self.directory_port == 0:
            raise ConfigError("--directory-port 0 is not valid (several nodes need a port that all of them know)")
        if self.directory_port is not None and self.directory_port == self.master.port:
            raise ConfigError(
                f"--directory-port {self.directory_port} is the master's port, which is kept for the script"
            )
        if not self.token:
            raise ConfigError(
                "several nodes need one token that all of them know: set PHALANX_TOKEN or give --token-file FILE on "
                "every node (`phalanx run --new-token` prints a new one)"
            )

    def _check_elastic(self, fewest: int, most: int) -> None:
        if self.nodes > 1:
            raise ConfigError(
                "--elastic does not go with --nnodes: start the job on one host, and have others join it with "
                "`phalanx join`"
            )
        if not fewest <= self.ranks <= most:
            raise ConfigError(f"-n {self.ranks} is not between the ranks of --elastic {fewest}:{most}")

    def _check_program(self) -> None:
        if self.module:
            raise ConfigError("--no-python does not go with -m (a module needs Python)")
        if shutil.which(self.target) is None:
            raise ConfigError(f"there is no program {self.target!r} (expected one that can be run, as in a shell)")

    def _check_module(self) -> None:
        if self.target.endswith(".py") or "/" in self.target:
            name = self.target.removesuffix(".py").replace("/", ".").strip(".")
            raise ConfigError(
                f"-m takes the name of a module, and {self.target!r} is a file (`-m {name}`, or without -m: "
                f"`phalanx run {self.target}`)"
            )

    def _check_script(self) -> None:
        if Path(self.target).is_dir() and not (Path(self.target) / "__main__.py").exists():
            raise ConfigError(f"{self.target!r} is a folder without a __main__.py (expected a Python script)")
        if not Path(self.target).exists():
            hint = "the script itself, as in `phalanx run -n 4 train.py`; `-m` runs a module"
            if Path(self.target).name.startswith("python"):
                hint = "the script itself, as in `phalanx run -n 4 train.py`, which starts Python by itself"
            elif Path(f"{self.target}.py").exists():
                hint = f"a script; there is {self.target}.py: `phalanx run {self.target}.py` or `-m {self.target}`"
            raise ConfigError(f"there is no script {self.target!r} (expected {hint})")

    @property
    def shown(self) -> tuple[str, ...]:
        """The options by which the job is to be shown, here or by the controller."""
        asked = (("--page", self.page), ("--trace", self.trace), ("--metrics", self.metrics))
        return self.relayed or tuple(option for option, value in asked if value)

    @property
    def world_size(self) -> int:
        """Ranks of all nodes together."""
        return sum(self._layout)

    @property
    def first_rank(self) -> int:
        """The first rank of this node."""
        return sum(self._layout[: self.node])

    def node_of(self, rank: int) -> str:
        """The node that a rank runs on, in words."""
        node = bisect.bisect_right(list(itertools.accumulate(self._layout)), rank)
        return f"node {node} ({self.names[node]})" if self.names else f"node {node}"

    @property
    def _layout(self) -> tuple[int, ...]:
        return self.layout or (self.ranks,) * self.nodes

    @property
    def command(self) -> list[str]:
        """The command of each rank."""
        if not self.python:
            return [shutil.which(self.target) or self.target, *self.arguments]
        return [sys.executable, *(["-m"] if self.module else []), self.target, *self.arguments]


def check_outputs(trace: Path | None, metrics: Path | None) -> None:
    """Checks the files that a job is shown in.

    Raises:
        ConfigError: One of them cannot be written; the message names the option.
    """
    for option, path in (("--trace", trace), ("--metrics", metrics)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{option} {path} is not valid (there is no folder {path.parent})")
        if path is not None and path.is_dir():
            raise ConfigError(f"{option} {path} is not valid (it is a folder; expected a file)")
    if trace is not None and metrics is not None and trace.resolve() == metrics.resolve():
        raise ConfigError(f"--trace and --metrics both name {metrics} (expected a file for each)")
