"""A set that forgets its oldest keys."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["BoundedSet"]

Key = TypeVar("Key")


class BoundedSet(Generic[Key]):
    """The `limit` keys that were added last. Adding another one forgets the oldest."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def add(self, key: Key) -> None:
        """Adds a key."""
        self._keys[key] = None
        while len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def __contains__(self, key: object) -> bool:
        return key in self._keys
