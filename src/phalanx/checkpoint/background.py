"""Saves beside the program: one at a time, on a group of their own, waited for by whoever comes next."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable

from ..background_thread import BackgroundThread
from ..deadline import Deadline
from ..errors import PhalanxError
from ..exception_text import describe
from ..group import Group, Work
from ..group.tracking import call_site
from .plan import Plan

__all__ = ["copied", "count_save", "start", "wait"]

logger = logging.getLogger("phalanx.checkpoint")

_LONGEST = 24 * 3600.0
"""Seconds that a save may take; its votes have deadlines of their own."""


class _Saver:
    """The saves of one group: the last one, whether the program knows how it ended, and the group that they vote on."""

    def __init__(self, group: Group | None) -> None:
        self._votes = None if group is None else group._labelled_subgroup(range(group.world_size), "checkpoint")
        self._work: Work[None] | None = None
        self._told = True

    def start(self, save: Callable[[Group | None], None], words: str) -> Work[None]:
        work: Work[None] = Work(words, Deadline(_LONGEST), on_told=self._note_told)
        votes = self._votes
        site = call_site.find()  # a loss is reported with this line of the program

        def run() -> None:
            call_site.lend(site)
            try:
                save(votes)
            except BaseException as error:
                work._finish(error=error)
            else:
                work._finish()

        self._work, self._told = work, False
        BackgroundThread(run, "phalanx-checkpoint").start()
        return work

    def wait(self) -> None:
        """Waits for the last save, and raises its error unless the program has seen it."""
        if self._work is not None and not (self._told and self._work.done()):
            work, self._work = self._work, None
            work.wait()

    def finish(self) -> None:
        """The end of the group: the save is waited for, and raises its error unless the program has seen it."""
        work, self._work = self._work, None
        if work is not None:
            ended = threading.Event()
            work.add_done_callback(lambda _work: ended.set())
            ended.wait(_LONGEST)
        if self._votes is not None:
            self._votes.close()
        if work is not None and not self._told:
            work.wait()

    def finish_quietly(self) -> None:
        """The end of the process, where an error has nowhere to go but the log."""
        try:
            self.finish()
        except PhalanxError as error:
            logger.error("the last save_async failed: %s", describe(error))

    def _note_told(self) -> None:
        self._told = True


_saves: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()


def count_save(group: Group | None) -> int:
    """The number of a save that is called now, among those of its group: also of one that raises at once.

    By it the vote sees that a rank has left one out, so that the parts of two saves never become one checkpoint.
    """
    if group is None:
        return 0
    _saves[group] = _saves.get(group, 0) + 1
    return _saves[group]


_savers: weakref.WeakKeyDictionary[Group, _Saver] = weakref.WeakKeyDictionary()
_alone = _Saver(None)
atexit.register(_alone.finish_quietly)


def start(group: Group | None, save: Callable[[Group | None], None], words: str) -> Work[None]:
    """Begins a save, of which `save` is given the group that votes."""
    if group is None:
        return _alone.start(save, words)
    if group not in _savers:
        saver = _savers[group] = _Saver(group)
        group._before_close.append(saver.finish)
    return _savers[group].start(save, words)


def wait(group: Group | None) -> None:
    """Waits for a save of the group that is under way.

    Raises:
        PhalanxError: What it raised, if the program does not know yet.
    """
    saver = _alone if group is None else _savers.get(group)
    if saver is not None:
        saver.wait()


def copied(plan: Plan) -> Plan:
    """The same plan with memory of its own."""
    return plan._replace(share=[each._replace(memory=memoryview(bytearray(each.memory))) for each in plan.share])
