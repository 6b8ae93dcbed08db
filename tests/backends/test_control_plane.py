"""The news of a world reach all of its groups."""

from __future__ import annotations

import pytest

from phalanx.backends.control_plane import IDLE, ControlPlane
from phalanx.errors import PhalanxError
from phalanx.wire.control import OperationStatus


class Group:
    """A group that takes note of what it is told, or fails at it."""

    world_ranks = (0, 1)

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails
        self.told = 0

    def fail(self, error: PhalanxError) -> None:
        self.told += 1
        if self._fails:
            raise RecursionError("too deep") from error

    def left(self, rank: int) -> None:
        self.fail(PhalanxError(f"rank {rank} has left"))

    def status(self, sequence: int = 0) -> OperationStatus:
        return IDLE

    def look_for_long_waits(self) -> None: ...


@pytest.mark.parametrize("news", ["lost", "left", "abort", "directory"])
def test_a_group_that_fails_does_not_keep_the_news_from_the_next(news: str, caplog: pytest.LogCaptureFixture) -> None:
    plane = ControlPlane(0)
    groups = [Group(fails=fails) for fails in (True, False, True)]
    for number, group in enumerate(groups):
        plane.watch(bytes([number]), group)
    if news == "lost":
        plane.on_lost(1, "it has died")
    elif news == "left":
        plane.on_left(1)
    elif news == "abort":
        plane.on_abort(1, "it has raised", "")
    else:
        plane.on_directory_lost("it has died")
    assert [group.told for group in groups] == [1, 1, 1]
    assert caplog.text.count("RecursionError: too deep") == 2
