"""A picture as metrics: Prometheus text, and instruments of OpenTelemetry where it is installed."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .picture import Picture

if TYPE_CHECKING:
    from .watch import JobWatch

__all__ = ["MetricsFile", "OpenTelemetryView", "as_prometheus", "samples"]

logger = logging.getLogger("phalanx.seeing")

Sample = tuple[str, str, str, dict[str, str], float]
"""Name, type, help, labels and value."""


def samples(picture: Picture) -> Iterator[Sample]:
    """Every metric of a picture."""
    yield "phalanx_job_seconds", "gauge", "Seconds since the job began.", {}, picture.elapsed
    for rank in picture.ranks:
        labels = {"rank": str(rank.rank), "host": rank.host}
        up = float(rank.state in ("running", "stopped", "silent"))
        yield "phalanx_rank_up", "gauge", "1 while the rank's world is open.", labels, up
        yield "phalanx_rank_memory_bytes", "gauge", "Memory that the rank holds.", labels, rank.memory
        yield "phalanx_rank_waiting_ratio", "gauge", "Share of time waiting for other ranks.", labels, rank.waiting
        yield "phalanx_rank_moving_ratio", "gauge", "Share of time moving data.", labels, rank.moving
        yield "phalanx_rank_bytes_per_second", "gauge", "Bytes of collectives.", labels, rank.bytes_per_second
        yield (
            "phalanx_rank_blocked_seconds",
            "gauge",
            "Seconds that it has been waiting just now.",
            labels,
            (rank.seconds if rank.waits_for else 0.0),
        )
    for row, waits in enumerate(picture.waits):
        for column, seconds in enumerate(waits):
            if seconds > 0:
                labels = {"rank": str(row), "waited_for": str(column)}
                yield "phalanx_wait_seconds_total", "counter", "Seconds waited for another rank.", labels, seconds
    for site in picture.sites:
        # With the whole path: two files of one name may have the same function at the same line.
        labels = {"operation": site.verb, "site": site.where, "file": site.file}
        yield "phalanx_operations_total", "counter", "Operations of one rank.", labels, site.count
        yield "phalanx_operation_bytes_total", "counter", "Bytes of these.", labels, site.bytes
        yield "phalanx_operation_seconds_total", "counter", "Seconds in these.", labels, site.seconds
        for late, seconds in enumerate(site.lateness):
            if seconds > 0:
                whose = {**labels, "rank": str(late)}
                yield "phalanx_late_seconds_total", "counter", "Seconds by which a rank was late.", whose, seconds
    for link in picture.links:
        labels = {"source": str(link.source), "target": str(link.target)}
        yield "phalanx_link_bytes_per_second", "gauge", "Bytes over the network.", labels, link.bytes_per_second
        yield "phalanx_link_busy_ratio", "gauge", "Share of time with data on its way.", labels, link.busy
        yield "phalanx_link_round_trip_seconds", "gauge", "Round trip.", labels, link.round_trip
    for call in picture.calls:
        labels = {"function": call.name, "caller": str(call.caller), "server": str(call.server)}
        yield "phalanx_calls_total", "counter", "Remote calls.", labels, call.count
        yield "phalanx_call_failures_total", "counter", "Remote calls that failed.", labels, call.failed
        for part, seconds in (("queue", call.queue), ("handler", call.handler), ("wire", call.wire)):
            yield "phalanx_call_seconds", "gauge", "Mean of a call's parts.", {**labels, "part": part}, seconds
    for kind in ("blocked", "mismatch", "straggler", "once", "link"):
        count = sum(finding.kind == kind for finding in picture.findings)
        yield "phalanx_findings", "gauge", "What is wrong just now.", {"kind": kind}, count


def as_prometheus(picture: Picture) -> str:
    """The text format of Prometheus."""
    families: dict[str, list[str]] = {}
    for name, kind, text, labels, value in samples(picture):
        lines = families.setdefault(name, [f"# HELP {name} {text}", f"# TYPE {name} {kind}"])
        listed = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels.items())
        lines.append(f"{name}{{{listed}}} {value:.9g}" if listed else f"{name} {value:.9g}")
    return "\n".join(line for lines in families.values() for line in lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class MetricsFile:
    """Keeps a file up to date, for a node exporter's textfile collector. It is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._told = False

    def update(self, watch: JobWatch, picture: Picture) -> None:
        """Takes what the last look has found."""
        self.show(picture)

    def show(self, picture: Picture) -> None:
        """Replaces the file. A full disk may have room again at the next one."""
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            temporary.write_text(as_prometheus(picture), encoding="utf-8")
            os.replace(temporary, self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if not self._told:
                self._told = True
                logger.warning("the metrics in %s are not up to date: %s", self._path, error.strerror or error)

    def close(self, how: str = "") -> None:
        """The file stays as it was last."""


class OpenTelemetryView:
    """Shows the metrics to OpenTelemetry, if it is installed: to the provider that this process has.

    Raises:
        ImportError: It is not.
    """

    def __init__(self) -> None:
        from opentelemetry import metrics

        self._metrics = metrics
        self._meter = metrics.get_meter("phalanx")
        self._picture: Picture | None = None
        self._known: set[str] = set()

    def update(self, watch: JobWatch, picture: Picture) -> None:
        """Takes what the last look has found."""
        self.show(picture)

    def show(self, picture: Picture) -> None:
        """Shows this picture from now on."""
        self._picture = picture
        for name, kind, text, _, _ in samples(picture):
            if name not in self._known:
                self._known.add(name)
                make = (
                    self._meter.create_observable_counter if kind == "counter" else self._meter.create_observable_gauge
                )
                make(name, callbacks=[self._observer(name)], description=text)

    def _observer(self, wanted: str) -> Any:
        def observe(_options: Any) -> Iterable[Any]:
            if self._picture is not None:
                for name, _, _, labels, value in samples(self._picture):
                    if name == wanted:
                        yield self._metrics.Observation(value, labels)

        return observe

    def close(self, how: str = "") -> None:
        """The last values stay."""
