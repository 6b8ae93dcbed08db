"""The loop of an elastic job: steps that are committed on all ranks or on none.

At the end of a step all ranks vote, by one short reduction. A rank votes only when its part of the step is done, so a
vote that passed on one rank says that all have what the step gave. When a rank is lost, the others leave the group for
its next view, which the directory decides on, and tell each other how far they are:

- One of them saw the vote pass: the step counts. Those that did not see it have voted, and have all that it gave.
- All of them have voted: the step counts.
- Else it does not: all go back to the copy of their state from before it.

So no state moves between ranks that were there; only those that join with the new view are sent it.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import config
from ..arguments import as_index
from ..backends.mesh.backend import MeshBackend
from ..deadline import Deadline
from ..errors import Evicted, PhalanxError, UnsupportedOp, UsageError
from ..group import Group
from ..wire.control import Regroup, View
from . import transfer
from .state import Snapshot, State
from .step_group import StepGroup, is_loss

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..backends.base import LaneBackend

__all__ = ["ElasticStep", "steps"]

logger = logging.getLogger("phalanx.elastic")

MOST_RETRIES = 3
"""How often a step is done again with the same ranks, before its error is raised: with nobody lost, it will be back."""


class _TakenBack(Exception):
    """Leaves the block of a step that does not count."""


class _Report(NamedTuple):
    """How far a rank is, as it tells the others in a new view."""

    committed: int
    begin: int
    voted: bool
    outside: bool
    checksum: int


def steps(
    world: Group,
    state: State,
    *,
    total: int,
    min_size: int | None = None,
    copy: bool = True,
    timeout: float | None = None,
) -> Iterator[ElasticStep]:
    """The steps of a training job that goes on when ranks are lost.

    A step that loses a rank is taken back, and comes again with those that are left. In a job of `phalanx run
    --elastic`, other ranks join between two steps: their loop begins with the step at which the others are, and with
    the state that the others have.

    ```python
    for step in px.elastic.steps(world, state, total=1000):
        with step:
            loss = train(step.batch)
            step.group.all_reduce(gradients, op="mean")
            optimizer.step()
    ```

    Without `with step:`, a loss does not end the block: the reductions of `step.group` then leave their arrays as they
    are, and what the block makes of that is thrown away. Operations with `async_op` need the `with`.

    After the loop the last step's group can be used until the world is closed. Another loop goes on with it.

    Args:
        world: The group of all ranks; `step.group` takes its place.
        state: What a step changes. The same on all ranks.
        total: The number of steps.
        min_size: The fewest ranks that go on: fewer wait for others to join, as long as `timeout` says. Without it,
            what `phalanx run --elastic` was told, else 1.
        copy: Whether a copy of the state is kept to go back to. False saves the time and memory for it; then each step
            calls `step.commit()`, and changes the state only after that.
        timeout: Seconds that ranks which are alive have to notice a loss, before they are voted out; the group's own if
            it is not given.

    Raises:
        Evicted: The others went on without this rank.
        Timeout: Too few ranks are left.
        RendezvousError: The directory is gone; the state is that of the last step.
        PeerLost: The backend cannot shrink, or a rank ended the world on purpose.
        UsageError: Two ranks have different states, or a step used its group after `commit`.
    """
    if not isinstance(world, Group):
        raise UsageError(f"world={world!r} is not valid (expected the group that px.init() returned)")
    if not isinstance(state, State):
        raise UsageError(f"a state of type {type(state).__name__} is not valid (expected a px.elastic.State)")
    total = as_index(total, "total")
    min_size = config.min_size() if min_size is None else as_index(min_size, "min_size")
    timeout = world.timeout if timeout is None else timeout
    for name, value, least in (("total", total, 0), ("min_size", min_size, 1)):
        if value < least:
            raise UsageError(f"{name}={value} is not valid (expected at least {least})")
    if not timeout > 0:
        raise UsageError(f"timeout={timeout} is not valid (expected more than 0 seconds)")
    return _run(_Loop(world, state, total, min_size, copy, timeout))


def _run(loop: _Loop) -> Iterator[ElasticStep]:
    try:
        loop.enter()
        while loop.number < loop.total:
            step = loop.begin()
            yield step
            loop.finish(step)
    finally:
        loop.leave()


class ElasticStep:
    """One step, and the ranks that do it."""

    def __init__(self, loop: _Loop, group: StepGroup, changed: bool) -> None:
        self._loop = loop
        self.number = loop.number
        """Steps of this loop that were committed before this one."""
        self.group = group
        """The ranks that do this step. It may be another group for each step."""
        self.changed = changed
        """True if `group` is another than in the step before: in the first step, after a step that was taken back, and
        when ranks have joined. Then make again what belongs to the group."""
        self._batch: Any = None
        self._counts: bool | None = None
        """The decision of `commit`; None if it was not called."""

    @property
    def batch(self) -> Any:
        """The samples of this rank: what the `sampler` of the state gives it.

        Raises:
            UsageError: The state has no such sampler.
        """
        if self._batch is None:
            sampler = self._loop.sampler
            if sampler is None:
                raise UsageError("step.batch needs a sampler in the state: State(sampler=px.elastic.Sampler(...))")
            self._batch = sampler.take(self.group.rank, self.group.world_size)
        return self._batch

    def commit(self) -> bool:
        """Votes for this step: call it when the rank has all that it needs from others, before it changes the state.

        Returns:
            True if the step counts: now change the state. False, outside of a `with step:` block, if it does not.

        Raises:
            As `steps`.
        """
        return self._loop.commit(self)

    def __enter__(self) -> Self:
        self.group.raises = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            return False
        if isinstance(error, _TakenBack):
            return True
        if self._counts is not None:
            return False
        if isinstance(error, Exception) and not isinstance(error, Evicted):
            if is_loss(error) or self.group.has_lost:
                self.group.loss = error
                return True
            if not isinstance(error, PhalanxError):
                return False
        self._loop.go_back()  # the job ends here: the program may save the state
        return False


class _Course:
    """The loops of one world, one after the other."""

    def __init__(self) -> None:
        self.group: StepGroup | None = None
        """The group of the last step; None if no loop has begun."""
        self.committed = 0
        """Steps of all loops."""

    def close(self) -> None:
        """Closes the group of the last step."""
        if self.group is not None:
            self.group.close()


_courses: weakref.WeakKeyDictionary[Group, _Course] = weakref.WeakKeyDictionary()


def _course_of(world: Group) -> _Course:
    course = _courses.get(world)
    if course is None:
        course = _courses[world] = _Course()
        world._before_close.append(course.close)
    return course


class _Loop:
    """The state of the loop on one rank."""

    def __init__(self, world: Group, state: State, total: int, min_size: int, copy: bool, timeout: float) -> None:
        self._world = world
        self._course = _course_of(world)
        self._state = state
        self.total = total
        """Steps of this loop."""
        self._min_size = min_size
        self._copy = copy
        self._timeout = timeout
        self.committed = self._course.committed
        """Steps of all loops whose vote passed here."""
        self._begin = self.committed
        """Those of the loops before this one."""
        self._voted = False
        """True from this rank's vote to the decision on its step."""
        self._outside = False
        """True as long as this rank has not got the state."""
        self._owed: list[int] = []
        """Ranks of the group that wait for the state, as soon as the step that is being committed has changed it."""
        self._senders: list[int] = []
        """Ranks of the group that send it."""
        self._group: StepGroup | None = None
        self._known: StepGroup | None = None
        """The group of the last step that has begun."""
        self._snapshot: Snapshot | None = None
        self._news = np.zeros(1, np.int64)
        self._dirty = False
        """True if a step may have changed the state since it was committed last."""
        self._retries = 0
        self._stopped_at = 0.0
        """When the last change of the world began, or the one before it if no step was committed since."""
        self._unsaid = ""
        """The line on the last change of the world, which is shown when the next step is committed."""
        self._speaks = False
        """True on the first rank of the group that has the state: it shows these lines. All others that have it keep
        them, too: that rank may be lost before it has."""

    @property
    def number(self) -> int:
        """Steps of this loop that are committed."""
        return self.committed - self._begin

    @property
    def sampler(self) -> Any:
        """The part of the state that gives each step its samples; None if there is none."""
        found = self._state._parts.get("sampler")
        return found if hasattr(found, "take") and hasattr(found, "advance") else None

    # -- the loop ------------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Joins the others: those that began together, or those that are at work."""
        backend = self._world.backend
        if self._course.group is None and isinstance(backend, MeshBackend) and backend.is_alone:
            self._outside = True
            self._regroup(None)
            return
        self._group = self._course.group or StepGroup(backend)
        snapshot = Snapshot.of(self._state, copy=self._copy)
        self._snapshot = snapshot if self._copy else None
        self._compare(self._group, snapshot)

    def _compare(self, group: StepGroup, snapshot: Snapshot) -> None:
        """Refuses states that differ from the beginning, on all ranks."""
        if group.world_size == 1:
            return
        try:
            found = group.all_gather_object(snapshot.checksums(), timeout=self._timeout)
        except PhalanxError as error:
            if not is_loss(error):
                raise
            return  # the first step goes on without that rank
        for rank, theirs in enumerate(found):
            wrong = [name for name in {**found[0], **theirs} if found[0].get(name) != theirs.get(name)]
            if wrong:
                raise UsageError(
                    f"the part {wrong[0]!r} of the state is another on rank {group.members[rank]} than on rank "
                    f"{group.members[0]}: the state of an elastic job must be the same on all ranks (set the same seed "
                    "everywhere, or broadcast what rank 0 has)"
                )

    def begin(self) -> ElasticStep:
        """The next step."""
        assert self._group is not None
        self._group.raises = False
        self._group.loss = None
        self._dirty = True
        changed, self._known = self._known is not self._group, self._group
        if changed:
            self._state._use_group(self._group)
        return ElasticStep(self, self._group, changed)

    def finish(self, step: ElasticStep) -> None:
        """Ends a step: commits it with the others, or takes it back."""
        try:
            self._finish(step)
        except BaseException:
            if step._counts is None:
                self.go_back()
            raise

    def _finish(self, step: ElasticStep) -> None:
        group = self._group
        assert group is not None
        if step._counts is not None:
            if step._counts:
                self._after_commit(step)
            return
        if group.loss is None and not self._copy:
            raise UsageError("steps(copy=False) keeps nothing to go back to: each step must call step.commit()")
        group.raises = True
        if group.loss is None:
            try:
                self._vote(group)
            except PhalanxError as error:
                if not is_loss(error):
                    raise
                group.loss = error
        if group.loss is not None:
            self._go_on_without(group.loss)
        elif self._news[0] and self.number < self.total:
            self._let_in()

    def go_back(self) -> None:
        """Makes the state that of the last committed step, if there is a copy of it."""
        self._state._drop_gradients()
        if self._snapshot is not None and self._dirty:
            self._snapshot.restore(self._state)
        self._dirty = False

    def commit(self, step: ElasticStep) -> bool:
        """Votes in the middle of a step. `ElasticStep.commit` says what it returns."""
        if step._counts is not None:
            raise UsageError("step.commit() was called before in this step")
        group = step.group
        in_block, group.raises = group.raises, True
        if group.loss is None:
            try:
                self._cast_vote(group)
            except PhalanxError as error:
                if not is_loss(error):
                    raise
                group.loss = error
        number = self.committed
        if group.loss is None:
            self._count()
        else:
            self._go_on_without(group.loss, in_step=True)
        assert self._group is not None
        step._counts = self._group.committed = self.committed > number
        group.raises = in_block
        if in_block and not step._counts:
            raise _TakenBack
        return step._counts

    def _after_commit(self, step: ElasticStep) -> None:
        """The end of a step that `commit` has committed."""
        group = self._group
        assert group is not None
        group.committed = False
        group.raises = True
        self._state_changed()
        if self._owed:
            try:
                self._send_state()
            except PhalanxError as error:
                if not is_loss(error):
                    raise
                self._go_on_without(error)
        elif self._news[0] and group is step.group and self.number < self.total:
            self._let_in()

    def _vote(self, group: StepGroup) -> None:
        """Commits a step that is done here, if it is done everywhere."""
        self._cast_vote(group)
        self._count()
        self._state_changed()

    def _cast_vote(self, group: StepGroup) -> None:
        """Says that this rank has all that the step gave, and hears the same of all others.

        Not if a member was lost by now, whatever the program made of that error: this rank may lack a result.
        """
        group.check_whole()
        self._news[0] = self._world.backend.control.arrivals > 0
        self._voted = True
        Group.all_reduce(group, self._news, op="max")

    def _count(self) -> None:
        self.committed += 1
        self._voted = False
        self._retries = 0
        if self._unsaid:
            self._speak()

    def _state_changed(self) -> None:
        """Notes the state that a committed step has left."""
        if self.sampler is not None:
            self.sampler.advance()
        if self._copy:
            self._snapshot = Snapshot.of(self._state, into=self._snapshot)
        self._dirty = False

    # -- changes of the world ------------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        """Goes to the next view because ranks wait to join. All do, at the same step."""
        self._stopped_at = time.monotonic()
        self._regroup(self._group)

    def _go_on_without(self, loss: BaseException, *, in_step: bool = False) -> None:
        """Goes to the next view after a loss.

        Args:
            in_step: Whether `commit` calls, so that the state is not yet what the step makes of it.
        """
        if not self._unsaid:
            self._stopped_at = time.monotonic()
        group = self._group
        assert group is not None
        before = group.members
        try:
            self._regroup(group, in_step=in_step)
        except UnsupportedOp:
            raise loss from None
        assert self._group is not None
        if self._group.members == before:
            self._retries += 1
            if self._retries >= MOST_RETRIES:
                raise loss

    def _regroup(self, group: StepGroup | None, *, in_step: bool = False) -> None:
        """Leaves the group for its next view, as often as a view loses members before all have told where they are."""
        while True:
            members = () if group is None else group.members
            backend, view = self._next_view(group)
            if group is not None:
                group.close()  # its memory is given back, whoever still knows it
            self._group = group = StepGroup(backend, _owns_backend=True)
            try:
                self._agree(group, view, members, in_step)
                return
            except PhalanxError as error:
                if not is_loss(error):
                    raise

    def _next_view(self, group: StepGroup | None) -> tuple[LaneBackend, View]:
        if group is not None:
            return group._next_view(Deadline(self._timeout), minimum=self._min_size, joins=True)
        backend = self._world.backend
        return backend.next_view(Regroup(b"", 0, list(backend.world_ranks), self._timeout, joins=True, is_world=True))

    def _agree(self, group: StepGroup, view: View, before: tuple[int, ...], in_step: bool) -> None:
        """Finds out with the others which steps count, and makes the state that of the last one."""
        joins = bool(view.joined)
        checksum = Snapshot.of(self._state, copy=False).checksum() if not (self._copy or self._outside or joins) else 0
        mine = _Report(self.committed, self._begin, self._voted, self._outside, checksum)
        reports = [_Report(*report) for report in group.all_gather_object(tuple(mine), timeout=self._timeout)]
        holders = [rank for rank, report in enumerate(reports) if not report.outside]
        joined = [rank for rank, report in enumerate(reports) if report.outside]
        if not holders:
            raise Evicted("no rank is left that has the state of this job", rank=group.members[group.rank])
        self._speaks = group.rank == holders[0]
        # One may be at the end of a loop, and the others have begun the next one, with a state that is another.
        newest = max(reports[rank].begin for rank in holders)
        senders = [rank for rank in holders if reports[rank].begin == newest]
        last = max(reports[rank].committed for rank in holders)
        forward = all(reports[rank].voted and reports[rank].committed == last for rank in holders)
        if self._outside:
            snapshot, self.committed, self._begin = transfer.receive(group, senders, Deadline(self._timeout))
            snapshot.check_fits(self._state)
            snapshot.restore(self._state)
            self._outside = False
            if self._copy:
                self._snapshot = snapshot
            return
        waits = False
        if self.committed < last or forward:
            self._count()
            if in_step:
                waits = True  # the state changes at the end of the step
            else:
                self._state_changed()
        else:
            self._voted = False
            self.go_back()
            alike = len({reports[rank].checksum for rank in holders}) == 1
            if self._snapshot is None and not joins and not alike and last == self._lowest(reports):
                raise UsageError(
                    "the states of the ranks differ after a step was taken back: something in the state changes before "
                    "step.commit() (steps(copy=True) keeps a copy to go back to)"
                )
        self._owed, self._senders = joined, senders
        self._keep_line(group, before, joined)
        if joined and not waits:
            self._send_state()

    @staticmethod
    def _lowest(reports: list[_Report]) -> int:
        return min(report.committed for report in reports if not report.outside)

    def _send_state(self) -> None:
        """Sends this rank's share of the state to those that have joined."""
        group, joined, self._owed = self._group, self._owed, []
        assert group is not None
        senders = self._senders
        if group.rank not in senders:
            return
        snapshot = self._snapshot or Snapshot.of(self._state, copy=False)
        began = time.monotonic()
        total = transfer.send(group, snapshot, (self.committed, self._begin), senders, joined)
        if group.rank == senders[0]:
            names = _ranks([group.members[rank] for rank in joined])
            seconds = time.monotonic() - began
            what = f"sent {_size(total)} of state to {names}, from {_count(len(senders))}"
            self._note(f"{what}, in {seconds:.2f} s")

    def _keep_line(self, group: StepGroup, before: tuple[int, ...], joined: list[int]) -> None:
        """Makes the line on this change of the world, which is shown when the next step is committed."""
        if self._unsaid:  # the world has changed again before a step was committed
            self._speak()
        lost = [rank for rank in before if rank not in group.members]
        changes = [f"without {_ranks(lost)}"] if lost else []
        changes += [f"with {_ranks([group.members[rank] for rank in joined])}"] if joined else []
        size = f"{_count(group.world_size)} {'go' if group.world_size > 1 else 'goes'} on"
        what = " and ".join(changes) or "as before"
        self._unsaid = f"epoch {group.epoch}: {size} {what}, at step {self.number}"

    def _speak(self) -> None:
        """Shows the line on the last change, with the time that it cost, if this rank is the one that does."""
        text, self._unsaid = self._unsaid, ""
        if self._speaks:
            self._note(f"{text}, after {time.monotonic() - self._stopped_at:.2f} s")

    def _note(self, text: str) -> None:
        logger.info("%s", text)
        self._world.backend.control.note(text)

    def leave(self) -> None:
        """Ends the loop, and leaves the group of the last step to the program, and to the next loop."""
        if self._group is not None:
            self._group.committed = False
            self._group.raises = True
            self._course.group, self._course.committed = self._group, self.committed


def _size(bytes_: int) -> str:
    return f"{bytes_ / 2**20:.1f} MiB" if bytes_ >= 2**20 else f"{bytes_ / 2**10:.1f} KiB"


def _count(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"


def _ranks(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
