"""Sharded data-parallel training: parameters that exist once on a host, or are gathered layer by layer."""

from __future__ import annotations

from .wrapper import FSDP

__all__ = ["FSDP"]
