"""Phalanx: two agents, and a function that is called by its name."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy.typing as npt

import phalanx as px
from phalanx.rpc import Agent

from .worker import Call

__all__ = ["open_caller", "open_server"]


def _echo(x: Any) -> Any:
    return x


class _Phalanx:
    def __init__(self, rank: int, address: str, timeout: float) -> None:
        # The token and the transport are in this process's variables.
        self._world = px.init(rank=rank, world_size=2, master=address, timeout=timeout)
        self._agent, self._timeout = Agent(self._world), timeout
        self._agent.register("echo", _echo)
        self._world.barrier()  # now it is registered on both
        self.version = px.__version__

    def echo(self, x: Any) -> Call:
        return partial(self._agent.call, 1, "echo", x, timeout=self._timeout)

    def in_flight(self, x: bytes, count: int) -> Call:
        call_async, timeout = self._agent.call_async, self._timeout

        def call() -> list[Any]:
            futures = [call_async(1, "echo", x) for _ in range(count)]
            return [future.result(timeout) for future in futures]

        return call

    def array(self, x: npt.NDArray[Any]) -> Call:
        return self.echo(x)

    def close(self) -> None:
        self._agent.close()
        self._world.close()


def open_caller(address: str, timeout: float) -> _Phalanx:
    """The side that calls."""
    return _Phalanx(0, address, timeout)


def open_server(address: str, timeout: float) -> _Phalanx:
    """The side that answers, in the agent's workers."""
    return _Phalanx(1, address, timeout)
