"""Sharded data-parallel training: parameters that exist once on a host, or are gathered layer by layer."""

from __future__ import annotations

from ...untraced import leave_calls_alone
from .wrapper import FSDP

__all__ = ["FSDP"]

# A compiled module is traced through its hooks, but what gathers its parameters is none of its computation.
leave_calls_alone(__name__)
