"""The names of the variables that the launcher sets for every rank."""

from __future__ import annotations

from .guardian import MARK

__all__ = ["OWN_VARIABLES"]

OWN_VARIABLES = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME "
    "MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS "
    f"PHALANX_TOKEN PHALANX_DIRECTORY PHALANX_LAST_WORDS {MARK}".split()
)
"""Users cannot set these with --env."""
