"""Tools for tests of distributed code, and the checks that a backend must pass.

- `run_ranks` runs a function on some ranks, as threads or as processes, and returns what each of them returned.
- `open_world` gives all backends of a small world to one process.
- `faults` makes a rank die, stop, lose its connections or be slow.
- `conformance` is the suite that every backend passes.
"""

from __future__ import annotations

from ..errors import RankFailed
from ..launching.failures import Died
from . import conformance, faults
from .ranks import run_ranks
from .worlds import open_world

__all__ = ["Died", "RankFailed", "conformance", "faults", "open_world", "run_ranks"]
