"""Runs whatever Python starts with this folder in PYTHONPATH on another build of the core.

    TEST_CORE     the file of that build, loaded as phalanx._core
    JITTER_SEED   where the pauses of the build with jitter are drawn from; without it there are none

The seed also sets the interpreter's switch interval to its smallest. A forked child draws from a seed of its own.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_forks = 0


class _CoreFinder:
    """Finds phalanx._core where TEST_CORE says."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name != "phalanx._core":
            return None
        loader = _Loader(name, os.environ["TEST_CORE"])
        return importlib.util.spec_from_file_location(name, os.environ["TEST_CORE"], loader=loader)


class _Loader(importlib.machinery.ExtensionFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        seed_process(module)


def seed_process(core: ModuleType | None = None) -> None:
    """Seeds the core of this process, if it has jitter and there is a seed."""
    text = os.environ.get("JITTER_SEED")
    if text is None:
        return
    sys.setswitchinterval(1e-6)
    core = core or sys.modules.get("phalanx._core")
    if hasattr(core, "seed_jitter"):
        core.seed_jitter((int(text) + 1) * 1_000_003 + _forks)


def _count_fork() -> None:
    global _forks
    _forks += 1


if "TEST_CORE" in os.environ:
    sys.meta_path.insert(0, _CoreFinder)  # type: ignore[arg-type]
    os.register_at_fork(before=_count_fork, after_in_child=seed_process)
