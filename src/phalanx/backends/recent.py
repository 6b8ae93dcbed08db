"""A bounded memory of what was closed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["Recent"]

Key = TypeVar("Key")


class Recent(Generic[Key]):
    """The keys that were added last; of more than `limit`, the oldest are forgotten."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def add(self, key: Key) -> None:
        """Remembers a key."""
        self._keys[key] = None
        while len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def __contains__(self, key: object) -> bool:
        return key in self._keys
