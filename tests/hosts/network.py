"""Two hosts on one machine: two network namespaces with a cable between them, and a second cable beside it."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.launchers.processes import Job, Jobs

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Host", "Network", "why_not"]

MAIN, SIDE = "main0", "side0"
"""What both hosts call the two ends of their cables."""
TALK = Path(__file__).with_name("talk.py")

_counter = itertools.count()


def why_not() -> str | None:
    """Why there can be no second host here; None if there can."""
    if sys.platform != "linux":
        return "network namespaces are a matter of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the ip command is not installed (package iproute2)"
    name = f"pxtry{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=30, check=False)
    if tried.returncode != 0:
        return f"network namespaces are not allowed here: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@dataclass(frozen=True)
class Host:
    """One of the two."""

    namespace: str
    number: int
    """1 or 2: the last part of all its addresses."""

    @property
    def ipv4(self) -> str:
        return f"10.213.0.{self.number}"

    @property
    def ipv6(self) -> str:
        return f"fd7a:9::{self.number}"

    @property
    def side_ipv4(self) -> str:
        return f"10.214.0.{self.number}"

    @property
    def side_ipv6(self) -> str:
        return f"fd7b:9::{self.number}"

    def knows(self, name: str, address: str) -> None:
        """Makes a host name mean an address here, and here only: `ip netns exec` puts this file over /etc/hosts."""
        folder = Path("/etc/netns") / self.namespace
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "hosts").open("a") as file:
            file.write(f"{address} {name}\n")

    def start(self, jobs: Jobs, *command: str | Path, **env: str) -> Job:
        """Starts a Python program on this host."""
        return jobs.start("ip", "netns", "exec", self.namespace, sys.executable, *command, env=env)

    def rank(self, jobs: Jobs, rank: int, world_size: int, master: str, port: int, *words: str, **env: str) -> Job:
        """Starts a rank of the script in talk.py."""
        place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": master, "MASTER_PORT": str(port)}
        return self.start(jobs, TALK, *words, **{**place, **env})

    def run(self, jobs: Jobs, *arguments: str, **env: str) -> Job:
        """Starts `phalanx run` with two ranks."""
        return self.start(jobs, "-m", "phalanx", "run", "-n", "2", *arguments, **env)

    def cut(self) -> None:
        """Takes this host's end of the main cable down: nothing arrives any more, and nobody is told."""
        _ip("-n", self.namespace, "link", "set", MAIN, "down")


class Network:
    """The two hosts and their cables. Always taken down at the end."""

    def __init__(self) -> None:
        mark = f"px{os.getpid()}x{next(_counter)}"
        self.first, self.second = Host(f"{mark}a", 1), Host(f"{mark}b", 2)

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _build(self) -> None:
        for host in (self.first, self.second):
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        ends = (self.first.namespace, self.second.namespace)
        for cable in (MAIN, SIDE):
            _ip("link", "add", cable, "netns", ends[0], "type", "veth", "peer", "name", cable, "netns", ends[1])
        for host in (self.first, self.second):
            for cable, ipv4, ipv6 in ((MAIN, host.ipv4, host.ipv6), (SIDE, host.side_ipv4, host.side_ipv6)):
                _ip("-n", host.namespace, "addr", "add", f"{ipv4}/24", "dev", cable)
                # Without the search for duplicates, which would take a second.
                _ip("-n", host.namespace, "addr", "add", f"{ipv6}/64", "dev", cable, "nodad")
                _ip("-n", host.namespace, "link", "set", cable, "up")
            host.knows("localhost", "127.0.0.1")

    def remove(self) -> None:
        """Takes everything down; what is not there is no matter."""
        for host in (self.first, self.second):
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, timeout=30, check=False)
            shutil.rmtree(Path("/etc/netns") / host.namespace, ignore_errors=True)
        with contextlib.suppress(OSError):  # somebody else's files are in it
            Path("/etc/netns").rmdir()
