"""Contenders whose processes import this package: they run in a folder of their own, so it has to be on their path."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.cli.bench.contenders import Contender, Site, StartCommand

__all__ = ["ROOT", "CheckoutContender", "with_benchmarks"]

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""


def with_benchmarks(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that can import `benchmarks`."""
    path = [str(ROOT), *filter(None, [variables.get("PYTHONPATH")])]
    return {**variables, "PYTHONPATH": os.pathsep.join(path)}


class CheckoutContender(Contender):
    """A contender whose library is a module of this package."""

    def launches(self, worker: Sequence[str], n: int, site: Site, base: Mapping[str, str]) -> list[StartCommand]:
        """As for any contender, with this package on the path."""
        return super().launches(worker, n, site, with_benchmarks(base))
