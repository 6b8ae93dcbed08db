"""The contents of the page: the picture, and a timeline of the last seconds."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.seeing.metrics import as_prometheus
from phalanx.seeing.picture import to_plain, words_without_findings

if TYPE_CHECKING:
    from phalanx.seeing.picture import Picture
    from phalanx.seeing.watch import JobWatch

__all__ = ["PageOutlet", "PageView"]

SPAN = 10.0
"""Seconds of the timeline."""
MOST = 1200
"""Operations of the timeline, in all; of more, each look keeps some."""
ROWS = 12
"""Call sites and remote calls that are shown, those that take the most time."""
HISTORY = 240
"""Looks of which throughput and memory are drawn."""


class PageOutlet(Protocol):
    """Shows what it is given: a `PageServer`, or what carries it to one."""

    def publish(self, *, picture: bytes, metrics: bytes) -> None:
        """Replaces what is shown."""

    def close(self, how: str = "") -> None:
        """The job is over."""


class PageView:
    """Shows a job on a page. A `JobView`.

    Args:
        outlet: Gets the contents.
        clock_ns: The clock of the slates.
    """

    def __init__(self, outlet: PageOutlet, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._outlet = outlet
        self._clock_ns = clock_ns
        self._operations: deque[dict[str, Any]] = deque(maxlen=MOST)
        self._history: deque[list[Any]] = deque(maxlen=HISTORY)

    def update(self, watch: JobWatch, picture: Picture) -> None:
        """Takes what the last look has found."""
        now = self._clock_ns()
        for joined in watch.joined:
            count = len(joined.sequence)
            step = max(1, count * len(joined.members) // (MOST // 4))
            for row in range(0, count, step):
                met = int(joined.arrived[row, joined.last[row]])
                self._operations.append(
                    {
                        "what": str(joined.sites[row]),
                        "number": int(joined.sequence[row]),
                        "last": int(joined.members[joined.last[row]]),
                        "ranks": list(joined.members),
                        "began": (joined.arrived[row] / 1e9).round(6).tolist(),
                        "met": round(met / 1e9, 6),
                        "ended": (joined.ended[row] / 1e9).round(6).tolist(),
                    }
                )
        since = now / 1e9 - SPAN
        self._history.append(
            [
                round(picture.elapsed, 2),
                round(sum(rank.bytes_per_second for rank in picture.ranks)),
                sum(rank.memory for rank in picture.ranks),
            ]
        )
        plain = to_plain(picture)
        shown = {
            **plain,
            "sites": [{**site, "lateness": []} for site in plain["sites"][:ROWS]],
            "calls": plain["calls"][:ROWS],
            "now": now / 1e9,
            "began": min(slate.began_ns for slate in watch.slates.values()) / 1e9,
            "calm": words_without_findings(picture),
            "span": SPAN,
            "timeline": [op for op in self._operations if max(op["ended"]) >= since],
            "history": list(self._history),
        }
        self._outlet.publish(
            picture=json.dumps(shown, separators=(",", ":")).encode(), metrics=as_prometheus(picture).encode()
        )

    def close(self, how: str) -> None:
        """The job is over."""
        self._outlet.close(how)
