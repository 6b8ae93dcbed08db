"""JSON of plain data, as the standard library reads it."""

from __future__ import annotations

import json
from typing import Any

import msgspec

__all__ = ["to_json"]


def to_json(value: Any) -> bytes:
    """A value as JSON. Its numbers are finite, and its text is Unicode.

    msgspec takes a tenth of the time, but no classes derived from str or int.
    """
    try:
        return msgspec.json.encode(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()
