"""What the tests of failures serve, watch and compare."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from phalanx.rpc import Agent, current_call

CONTRACT = 1.0
"""Seconds within which the loss of a rank is noticed."""
TRANSPORTS = ["auto", "tcp"]


def serve(agent: Agent) -> None:
    agent.register("echo", lambda x: x)
    agent.register("sleep", time.sleep)
    agent.register("pid", os.getpid)
    agent.register("count", lambda n: (number for number in range(n)))
    agent.register(Thing)

    async def sleep_soon(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    def drip() -> Iterator[int]:
        yield 1
        context = current_call()
        assert context is not None
        while not context.cancelled:
            time.sleep(0.02)

    agent.register(sleep_soon)
    agent.register(drip)


class Thing:
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Watch:
    """Calls in threads of their own, and when and how each of them ended."""

    def __init__(self) -> None:
        self.ended: list[tuple[float, BaseException | None]] = []
        self._threads: list[threading.Thread] = []

    def start(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        def body() -> None:
            try:
                act(*args, **kwargs)
                error = None
            except BaseException as caught:
                error = caught
            self.ended.append((time.monotonic(), error))

        self._threads.append(threading.Thread(target=body, daemon=True))
        self._threads[-1].start()

    def join(self, seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def latest(self, expected: type[BaseException], peer: int) -> float:
        """When the last of them ended, if all did so in the right way."""
        assert len(self.ended) == len(self._threads), "some have not ended"
        for _, error in self.ended:
            assert isinstance(error, expected), repr(error)
            assert getattr(error, "peer", None) == peer, repr(error)
        return max(at for at, _ in self.ended)


def outcome(act: Callable[..., Any], *args: Any) -> Any:
    try:
        return act(*args)
    except Exception as error:
        return error


def use_everything(agent: Agent) -> None:
    for dst in range(agent.world_size):
        assert agent.call(dst, "echo", 1) == 1
        assert agent.call_async(dst, "sleep_soon", 0.001).result() == 0.001
        assert asyncio.run(agent.acall(dst, "echo", 2)) == 2
        assert sum(agent.call(dst, "count", 40)) == 780
        agent.create(dst, "Thing").sleep(0.001)
        agent.call(dst, "echo", np.zeros(100_000))
        agent.notify(dst, "sleep", 0.003)
