"""Pictures of a timeline: a line of text or a row of boxes for each rank."""

from __future__ import annotations

from .timeline import Span, Timeline

__all__ = ["as_svg", "as_text"]


def as_text(timeline: Timeline, unit: float) -> str:
    """The timeline as text. F3 is the forward of micro-batch 3, B3 its backward, a dot a unit of idle time.

    With several stages per rank a letter says which: F3a is in the rank's first stage, F3b in its second.

    Args:
        unit: The time that gets one column, wide enough for a label.
    """
    labels = {span: _label(span, timeline) for spans in timeline.ranks for span in spans}
    width = max((len(label) for label in labels.values()), default=1) + 1
    columns = max(1, round(timeline.length / unit))
    head = len(f"rank {len(timeline.ranks) - 1}")
    lines = []
    for rank, spans in enumerate(timeline.ranks):
        line = [*("·".ljust(width) * columns)]
        for span in spans:
            first, last = round(span.begin / unit * width), round(span.end / unit * width)
            text = labels[span].ljust(last - first - 1, "─").ljust(last - first)
            line[first:last] = [*text[: last - first]]
        lines.append(f"rank {rank}".ljust(head) + "  " + "".join(line).rstrip())
    return "\n".join(lines)


def as_svg(timeline: Timeline, unit: float, title: str) -> str:
    """The timeline as an SVG: forwards in blue, backwards in green, the second stage of a rank darker, idle in grey."""
    scale, row, left, top = 22 / unit, 24, 56, 30
    width, height = left + timeline.length * scale + 10, top + row * len(timeline.ranks) + 10
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" font-family="sans-serif" font-size="11">'
    )
    parts = [
        head,
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18" font-size="12" fill="#222222">{title}</text>',
    ]
    for rank, spans in enumerate(timeline.ranks):
        y = top + rank * row
        parts.append(f'<text x="8" y="{y + 15}" fill="#222222">rank {rank}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{timeline.length * scale:.1f}" height="20" fill="#e6e6e6"/>')
        for span in spans:
            x, wide = left + span.begin * scale, (span.end - span.begin) * scale
            fill = _colour(span, timeline)
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="20" fill="{fill}" stroke="#ffffff"/>'
                f'<text x="{x + wide / 2:.1f}" y="{y + 14}" text-anchor="middle" fill="#111111">'
                f"{span.action.microbatch}</text>"
            )
    return "\n".join([*parts, "</svg>\n"])


def _label(span: Span, timeline: Timeline) -> str:
    action = span.action
    stages = 1 + max(each.action.stage for spans in timeline.ranks for each in spans)
    letter = chr(ord("a") + action.stage // len(timeline.ranks) % 26) if stages > len(timeline.ranks) else ""
    return f"{action.kind}{action.microbatch}{letter}"


def _colour(span: Span, timeline: Timeline) -> str:
    shades = {"F": ("#9ec9f0", "#5b9bd5", "#3f7fbb"), "B": ("#a9dba0", "#6cb45f", "#4d9440")}[span.action.kind]
    return shades[min(span.action.stage // len(timeline.ranks), len(shades) - 1)]
