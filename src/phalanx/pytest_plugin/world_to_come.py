"""The placeholder of a world in the process that runs the tests: the world itself is in the ranks."""

from __future__ import annotations

from typing import Any

from ..errors import UsageError

__all__ = ["WorldToCome"]


class WorldToCome:
    """The value of the fixture `world` until it is replaced by the group, in each rank."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            f"world.{name} is not possible here: the world is in the ranks, and fixtures are made outside them (use "
            "world in the test itself)"
        )
