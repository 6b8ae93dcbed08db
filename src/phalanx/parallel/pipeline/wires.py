"""The wires of a pipeline: messages between stages, from rank to rank or inside of one."""

from __future__ import annotations

from ...errors import Desync
from ...group import Group, Work
from .actions import Action
from .messages import Message, Mode, copied, kind_of, received, size_of, to_send
from .schedules import PipelineSchedule

__all__ = ["Wires"]

FIRST_TAG = 1 << 20
"""Two tags per stage from here on, so that the program has the small ones for itself."""
LARGE = 1 << 20
"""Bytes of a message that is worth a second thread, which receives it while the first computes."""


class Wires:
    """Sends and receives the messages of one step. Messages of a stage travel in the order of the micro-batches.

    Args:
        schedule: Tells the rank of each stage.
        group: The ranks.
        mode: What this rank runs. The others must run the same.
        timeout: Seconds for each message; the group's, if not given.
    """

    def __init__(self, schedule: PipelineSchedule, group: Group, mode: Mode, timeout: float | None) -> None:
        self._schedule = schedule
        self._group = group
        self._mode = mode
        self._timeout = timeout
        self._large: set[int] = set()
        """The tags on which a large message came before."""
        self._coming: dict[Action, Work[Message]] = {}
        self._leaving: list[Work[None]] = []
        self._inside: dict[Action, Message] = {}
        """Messages from one stage of this rank to the next, by the action that made them."""

    def source(self, action: Action) -> Action | None:
        """The action in another stage that sends what this one needs."""
        needed = action.needs(self._schedule.stages)
        return None if needed is None or needed.stage == action.stage else needed

    def expect(self, action: Action) -> None:
        """Begins to receive what an action needs, so that it comes while others run, if it will be large."""
        source = self.source(action)
        if source is not None and _tag(source) in self._large:
            rank = self._schedule.rank_of(source.stage)
            self._coming[source] = self._group.recv_object(rank, tag=_tag(source), timeout=self._timeout, async_op=True)

    def receive(self, action: Action) -> Message | None:
        """Waits for what an action needs. None if that is nothing.

        Raises:
            Desync: The other rank runs a step and this one an evaluation, or the other way round.
        """
        source = self.source(action)
        if source is None:
            return None
        if source in self._inside:
            return self._inside.pop(source)
        coming = self._coming.pop(source, None)
        if coming is not None:
            message = coming.wait()
        else:
            rank = self._schedule.rank_of(source.stage)
            message = self._group.recv_object(rank, tag=_tag(source), timeout=self._timeout)
            if size_of(message) >= LARGE:
                self._large.add(_tag(source))
        theirs = kind_of(message)
        if source.kind == "F" and theirs not in ("failed", self._mode):
            peer = self._group.members[self._schedule.rank_of(source.stage)]
            mine, theirs = (f"Pipeline.{mode}()" for mode in (self._mode, theirs))
            raise Desync(f"rank {peer} is in {theirs}, this rank in {mine}", mine=mine, theirs=theirs, peer=peer)
        return received(message)

    def send(self, action: Action, message: Message) -> None:
        """Sends the result of an action to the stage that needs it, if there is one."""
        to = action.stage + (1 if action.kind == "F" else -1)
        if not 0 <= to < self._schedule.stages:
            return
        rank = self._schedule.rank_of(to)
        if rank == self._group.rank:
            # The next stage may change in place what this one needs for its backward.
            self._inside[action] = copied(message)
            return
        # What has arrived is forgotten, and with it the tensors that it was.
        self._leaving = [work for work in self._leaving if not work.done() or work.exception() is not None]
        self._leaving.append(
            self._group.send_object(to_send(message), rank, tag=_tag(action), timeout=self._timeout, async_op=True)
        )

    def flush(self) -> None:
        """Waits until everything has been sent."""
        while self._leaving:
            self._leaving.pop(0).wait()


def _tag(action: Action) -> int:
    return FIRST_TAG + 2 * action.stage + (action.kind == "B")
