"""The settings of the shared memory that depend on the machine: measured once on each, and kept.

`current` is what a group asks; `values` says what there is to set, `decide` how a measurement becomes a setting.
"""

from __future__ import annotations

from .lookup import current
from .values import DEFAULTS, MOST_HELPERS, NEVER, Tuning

__all__ = ["DEFAULTS", "MOST_HELPERS", "NEVER", "Tuning", "current"]
