"""`phalanx doctor --selftest`: forms a world, here or on several hosts, and moves bytes in every way that it has.

`job` starts `ranks` under `phalanx run`, once as a job would run and once over TCP only, and turns what they say into
findings.
"""

from __future__ import annotations

from .job import self_test

__all__ = ["self_test"]
