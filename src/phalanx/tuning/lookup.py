"""The settings that this process uses: decided once, by the first group that asks."""

from __future__ import annotations

import logging
import platform
import threading
from pathlib import Path

from .._native import core
from ..config import cache_dir, tuning_of_choice
from ..operating_system import running_tasks, usable_cores
from .decide import Decision, decide, tuning_of
from .measure import Measured, measure
from .store import Unusable, cpu_model, file_name, is_provisional, load, save, times_measured
from .values import DEFAULTS, NEVER, Tuning

__all__ = ["LEAST_TIME", "calibrate", "current", "kept_in"]

logger = logging.getLogger("phalanx.tuning")

LEAST_TIME = 2.0
"""Seconds that the operation which asks must have left for a measurement to be begun."""
MOST_TIMES = 3
"""Measurements of a machine at rest, of which two have to agree on how long copies are made: other virtual machines on
the same host make one that nobody here can see a busy one."""
_known: list[Tuning] = []
"""Empty until this process has decided."""
_deciding = threading.Lock()


def current(seconds_left: float) -> Tuning:
    """The settings of this machine. Never raises, and never waits for another thread.

    Args:
        seconds_left: What the operation has left for which they are needed. If that is little, nothing is measured, and
            the defaults hold for this time.
    """
    if _known:
        return _known[0]
    # Not waited for: another thread measures, or did so when this process was forked from it.
    if not _deciding.acquire(blocking=False):
        return DEFAULTS
    try:
        found = _find(may_measure=seconds_left >= LEAST_TIME)
        if found is not None:
            _known[:] = [found]
        return found or DEFAULTS
    except Exception:
        logger.warning("the tuning of this machine failed; its constants are used", exc_info=True)
        _known[:] = [DEFAULTS]
        return DEFAULTS
    finally:
        _deciding.release()


def _find(*, may_measure: bool) -> Tuning | None:
    """The settings, from the first place that has them; None if they would have to be measured and may not be."""
    choice = tuning_of_choice()
    if choice == "off" or core is None or hasattr(core, "seed_jitter"):  # no build of `make jitter` measures anything
        return DEFAULTS
    if choice not in (None, "fresh"):
        return _named(Path(choice))
    path = kept_in()
    if choice is None and path is not None:
        try:
            kept = load(path)
        except Unusable as error:
            logger.warning("%s is not used: %s; this machine is measured again", path, error)
        else:
            if kept is not None and not (may_measure and is_provisional(path) and not _is_busy()):
                return kept
    if not may_measure:
        return None
    _, decisions = calibrate()
    return tuning_of(decisions)


def _named(path: Path) -> Tuning:
    """The settings of a file that the user has named."""
    try:
        found = load(path)
    except Unusable as error:
        logger.warning("PHALANX_TUNING=%s is not used: %s; the constants are", path, error)
        return DEFAULTS
    if found is None:
        logger.warning("PHALANX_TUNING=%s is not used: there is no such file; the constants are", path)
    return found or DEFAULTS


def kept_in() -> Path | None:
    """The file for the settings of this machine; None if this user has no folder for it."""
    folder = cache_dir()
    if folder is None or core is None:
        return None
    cores = usable_cores()
    return folder / file_name(cpu_model(), cores, platform.release(), core.ABI)


def _is_busy() -> bool:
    """Whether others want the cores, too: what is measured then shows less than there is to gain."""
    return running_tasks() > usable_cores()


def calibrate() -> tuple[Measured, list[Decision]]:
    """Measures this machine, decides, and keeps the result. Needs the core."""
    assert core is not None
    busy = _is_busy()
    measured = measure(core)
    decisions = decide(measured)
    busy = busy or _is_busy()
    path = kept_in()
    if path is not None:
        before, times = _kept_before(path)
        agrees = before is not None and times > 0 and _copies_alike(before, tuning_of(decisions))
        times += not busy
        save(path, decisions, provisional=busy or not (agrees or times >= MOST_TIMES), times=times)
    changed = [f"{d.setting} {d.chosen} in place of {d.default}" for d in decisions if d.chosen != d.default]
    logger.info("this machine was measured in %.0f ms: %s", measured.seconds * 1e3, ", ".join(changed) or "no change")
    return measured, decisions


def _kept_before(path: Path) -> tuple[Tuning | None, int]:
    """The settings that a file has, and how often the machine was measured for it."""
    try:
        kept = load(path)
    except Unusable:
        kept = None
    return kept, 0 if kept is None else times_measured(path)


def _copies_alike(one: Tuning, other: Tuning) -> bool:
    """Whether long copies are made in the same ways, whatever the length from which they are."""
    ways = ("ahead_from", "past_from")
    return all((getattr(one, way) == NEVER) == (getattr(other, way) == NEVER) for way in ways)
