"""The options of `phalanx run` about hosts, as a plan for the controller."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.launching.environment import OWN_VARIABLES, new_token
from phalanx.types import Address

from ..plan import MOST_RANKS, check_outputs
from .controller import HostsPlan
from .hostfile import Host
from .messages import NodeJob

__all__ = ["DEFAULT_SSH", "hosts_plan"]

DEFAULT_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
"""Without questions, which nobody could answer for many hosts at once, and with a word when a host falls silent."""

_LEFT_HERE = OWN_VARIABLES | {"PHALANX_TOKEN_FILE"}
"""Variables of this process that the hosts do not get."""


def hosts_plan(
    hosts: Sequence[Host],
    *,
    ranks: int | None,
    target: str,
    arguments: Sequence[str],
    module: bool,
    python: bool,
    master: Address | None,
    directory_port: int | None,
    token: bytes | None,
    log_dir: Path | None,
    grace: float,
    prefix: bool,
    extra: Mapping[str, str],
    ssh: str,
    remote_python: str | None,
    base: Mapping[str, str],
    colour: bool,
    page: bool = False,
    trace: Path | None = None,
    metrics: Path | None = None,
) -> HostsPlan:
    """The plan for these hosts.

    Args:
        ranks: On each host, whatever the list of hosts says; None to do what it says.

    Raises:
        ConfigError: The parts do not fit together; the message names the option.
    """
    layout = tuple(ranks or host.ranks or 1 for host in hosts)
    for host, count in zip(hosts, layout, strict=True):
        if count > MOST_RANKS:
            raise ConfigError(f"{host.where}: {count} ranks are too many (at most {MOST_RANKS} on a host)")
    for name in extra:
        if name in OWN_VARIABLES:
            raise ConfigError(f"--env {name}=… is not possible: `phalanx run` sets {name} itself")
    try:
        words = shlex.split(ssh)
    except ValueError as error:
        raise ConfigError(f"--ssh {ssh!r} is not valid: {error}") from None
    if not words:
        raise ConfigError("--ssh is empty (expected a command that takes a host and a command line)")
    if master is not None and master.port == 0:
        raise ConfigError(f"--master {master} is not valid (several hosts need a port that all of them know)")
    check_outputs(trace, metrics)
    shown = (("--page", page), ("--trace", trace), ("--metrics", metrics))
    job = NodeJob(
        target=target,
        arguments=tuple(arguments),
        module=module,
        python=python,
        node=0,
        layout=layout,
        names=tuple(host.address for host in hosts),
        master=("", 0),
        directory_port=0,
        token=(token or new_token().encode()).decode("utf-8", "surrogateescape"),
        folder=os.getcwd(),
        log_dir=None if log_dir is None else str(log_dir.absolute()),
        grace=grace,
        prefix=prefix,
        colour=colour and os.isatty(1),
        extra=dict(extra),
        variables={
            name: value for name, value in base.items() if name.startswith("PHALANX_") and name not in _LEFT_HERE
        },
        relayed=tuple(option for option, value in shown if value),
    )
    return HostsPlan(
        hosts=hosts,
        layout=layout,
        job=job,
        master=None if master is None else (master.host, master.port),
        directory_port=directory_port,
        ssh=words,
        python=remote_python or sys.executable,
        colour=colour,
        page=page,
        trace=trace,
        metrics=metrics,
    )
