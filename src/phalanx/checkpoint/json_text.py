"""JSON of plain data, as the standard library reads it."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ..errors import UsageError

__all__ = ["to_json"]


def to_json(value: Any) -> bytes:
    """A value as JSON. Its numbers are finite.

    Raises:
        UsageError: There is text in it that has no bytes.
    """
    try:
        try:
            return msgspec.json.encode(value)
        except TypeError:  # a class derived from str or int, for which the standard library takes ten times as long
            return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the text {error.object[:40]!r} cannot be saved: it has half of a surrogate pair") from None
