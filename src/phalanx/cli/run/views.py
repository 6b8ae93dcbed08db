"""The ways in which a launcher shows its job: page, trace and metrics, as the command line asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.errors import ConfigError

from .monitor import JobView
from .plan import RunPlan
from .upstream import Upstream

if TYPE_CHECKING:
    from phalanx.seeing.metrics import MetricsFile, OpenTelemetryView
    from phalanx.seeing.picture import Picture
    from phalanx.seeing.watch import JobWatch

    from .page.server import PageServer

__all__ = ["open_metrics", "open_page", "open_views"]

PIECE = 128 << 10
"""Characters of a trace that go over in one message."""


def open_views(plan: RunPlan, upstream: Upstream | None, say: Callable[[str], None]) -> list[JobView]:
    """The views that the plan asks for: shown here, or handed to the controller, which shows them.

    Args:
        plan: The job.
        upstream: The controller, if there is one.
        say: Prints a line.

    Raises:
        ConfigError: A file cannot be written, or there is no port for the page.
    """
    from .page.view import PageView

    views: list[JobView] = []
    if upstream is not None:
        if plan.shown:
            views = [_Relay(upstream, plan.shown)]
        return views
    if plan.page:
        views.append(PageView(open_page(say)))
    if plan.trace is not None:
        from phalanx.seeing.trace import TraceFile

        try:
            views.append(TraceFile(plan.trace))
        except OSError as error:
            raise ConfigError(f"--trace cannot be written: {error}") from None
    if plan.metrics is not None:
        views += open_metrics(plan.metrics)
    return views


def open_page(say: Callable[[str], None]) -> PageServer:
    """Serves the page, and says where.

    Raises:
        ConfigError: There is no port.
    """
    from .page.server import PageServer

    try:
        server = PageServer()
    except OSError as error:
        raise ConfigError(f"--page cannot be served: {error}") from None
    say(f"phalanx: this job is at {server.url}")
    return server


def open_metrics(path: Path) -> list[MetricsFile | OpenTelemetryView]:
    """The file, and OpenTelemetry where it is installed."""
    from phalanx.seeing.metrics import MetricsFile, OpenTelemetryView

    made: list[MetricsFile | OpenTelemetryView] = [MetricsFile(path)]
    with contextlib.suppress(ImportError):
        made.append(OpenTelemetryView())
    return made


class _Relay:
    """Hands all that is to be shown to the controller. A `JobView`.

    While the way there is full, nothing is handed over: the page gets newer pictures later, and the trace says what it
    misses.
    """

    def __init__(self, upstream: Upstream, shown: Sequence[str]) -> None:
        from phalanx.seeing.trace import TraceFile

        from .page.view import PageView

        self._upstream = upstream
        self._views: list[JobView] = []
        self._left_out: tuple[JobWatch, Picture] | None = None
        """The last picture, if the way was full."""
        if "--page" in shown:
            self._views.append(PageView(_RelayedPage(upstream)))
        if "--trace" in shown:
            self._views.append(TraceFile(Path(), _RelayedTrace(upstream)))

    def update(self, watch: JobWatch, picture: Picture) -> None:
        """Takes what the last look has found."""
        self._left_out = None
        if self._upstream.busy:
            self._left_out = watch, picture
        else:
            self._hand_over(watch, picture)

    def _hand_over(self, watch: JobWatch, picture: Picture) -> None:
        import msgspec

        self._upstream.show("picture", msgspec.json.encode(picture))
        for view in self._views:
            view.update(watch, picture)

    def close(self, how: str) -> None:
        """The job is over: its end is never left out."""
        if self._left_out is not None:
            self._hand_over(*self._left_out)
        for view in self._views:
            view.close(how)


class _RelayedPage:
    """A `PageOutlet` elsewhere."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    def publish(self, *, picture: bytes, metrics: bytes) -> None:
        """The metrics are made of the whole picture there."""
        self._upstream.show("page", picture)

    def close(self, how: str = "") -> None:
        """The controller knows how the job has ended on all hosts."""


class _RelayedTrace:
    """A `TraceOutput` elsewhere."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._waiting: list[str] = []

    def write(self, text: str) -> None:
        """Takes text."""
        self._waiting.append(text)

    def flush(self) -> None:
        """Hands over what was written."""
        text = "".join(self._waiting)
        self._waiting.clear()
        for start in range(0, len(text), PIECE):
            self._upstream.show("trace", text[start : start + PIECE].encode())

    def close(self) -> None:
        """Hands over the rest."""
        self.flush()
