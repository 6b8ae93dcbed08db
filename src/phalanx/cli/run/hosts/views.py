"""The page, the trace and the metrics of a job on several hosts, where it was started.

The first node reads what all ranks note: those of its own host in shared memory, the others by way of the directory,
with their clocks. What is to be shown comes from there by the connection that the output comes by, so that nothing
but ssh has to reach the hosts.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from phalanx.errors import ConfigError

from ..views import open_metrics, open_page
from .messages import NodeView

if TYPE_CHECKING:
    from phalanx.seeing.metrics import MetricsFile, OpenTelemetryView

    from ..page.server import PageServer

__all__ = ["HostsViews"]

logger = logging.getLogger("phalanx.run")


class HostsViews:
    """Shows what the first node sends.

    Args:
        page: Serve the page.
        trace: The file of the trace, if there is to be one.
        metrics: That of the metrics.
        say: Prints a line.

    Raises:
        ConfigError: A file cannot be written, or there is no port for the page.
    """

    def __init__(self, page: bool, trace: Path | None, metrics: Path | None, say: Callable[[str], None]) -> None:
        self._page: PageServer | None = None
        self._metrics: list[MetricsFile | OpenTelemetryView] = []
        self._text = b""
        """The metrics, as the page shows them."""
        self._trace_path = trace
        self._trace: BinaryIO | None = None
        try:
            self._trace = trace.open("wb") if trace is not None else None
        except OSError as error:
            raise ConfigError(f"--trace cannot be written: {error}") from None
        if metrics is not None:
            self._metrics = open_metrics(metrics)
        if page:
            self._page = open_page(say)

    def take(self, message: NodeView) -> None:
        """Shows what has come; what is damaged is left out."""
        with contextlib.suppress(ValueError):
            data = message.data
            if message.what == "picture":
                self._take_picture(data)
            elif message.what == "page" and self._page is not None:
                self._page.publish(picture=data, metrics=self._text)
            elif message.what == "trace":
                self._add_to_trace(data)

    def _take_picture(self, data: bytes) -> None:
        import msgspec

        from phalanx.seeing.metrics import as_prometheus
        from phalanx.seeing.picture import decode_picture

        try:
            picture = decode_picture(data)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from None
        self._text = as_prometheus(picture).encode()
        for view in self._metrics:
            view.show(picture)

    def _add_to_trace(self, data: bytes) -> None:
        if self._trace is None:
            return
        try:
            self._trace.write(data)
            self._trace.flush()
        except OSError as error:
            logger.warning("the trace in %s is incomplete: %s", self._trace_path, error.strerror or error)
            with contextlib.suppress(OSError):
                self._trace.close()
            self._trace = None

    def close(self, how: str) -> None:
        """The job is over. May be called twice.

        Args:
            how: What was wrong, in a few words; empty if nothing was.
        """
        page, trace = self._page, self._trace
        self._page = self._trace = None
        if page is not None:
            page.close(how)
        if trace is not None:
            with contextlib.suppress(OSError):
                trace.close()
