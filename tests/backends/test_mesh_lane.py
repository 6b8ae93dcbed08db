"""A lane of the mesh that ends while a thread looks whether all members are still with it."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from phalanx.errors import Timeout
from phalanx.group import Group
from phalanx.testing.worlds import join, meeting_place

LIMIT = 30.0


class EndsFirst:
    """A guard whose holder comes too late: another thread has ended the lane just before."""

    def __init__(self, guard: Any, end: Callable[[], None]) -> None:
        self._guard = guard
        self._end: Callable[[], None] | None = end

    def __enter__(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            thread = threading.Thread(target=end)
            thread.start()
            thread.join()
        self._guard.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._guard.__exit__(*raised)


@pytest.mark.parametrize("moment", ["before the channels are listed", "before they are polled"])
@pytest.mark.usefixtures("nothing_left")
def test_a_lane_that_ends_during_the_look_is_seen(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with meeting_place("mesh", 2, None) as place, ThreadPoolExecutor(2) as pool:
        backends = list(pool.map(lambda rank: join(place, rank, LIMIT), range(2)))
        groups = [Group(backend) for backend in backends]
        try:
            for result in pool.map(lambda group: group.all_reduce(np.ones(3)), groups):
                assert result[0] == 2.0
            lane = groups[0]._collectives
            lane.check_members()

            def end() -> None:
                lane.fail(Timeout("given up"))

            if moment == "before they are polled":
                poll = select.poll

                def meddle() -> select.poll:
                    end()
                    return poll()

                monkeypatch.setattr(select, "poll", meddle)
            else:
                lane._guard = EndsFirst(lane._guard, end)  # type: ignore[assignment]
            with pytest.raises(Timeout, match="given up"):
                lane.check_members()
        finally:
            for part in (*groups, *backends):
                part.close()
