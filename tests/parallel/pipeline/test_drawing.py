"""Pictures of schedules."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import phalanx as px
from phalanx.parallel import PipelineSchedule

PICTURES = Path(__file__).parents[3] / "docs" / "img"

ONE_FORWARD_ONE_BACKWARD = """\
rank 0  F0 F1 F2 ·  ·  ·  ·  B0─── F3 B1─── ·  B2─── ·  B3───
rank 1  ·  F0 F1 ·  ·  B0─── F2 B1─── F3 B2─── ·  B3─── ·  ·
rank 2  ·  ·  F0 B0─── F1 B1─── F2 B2─── F3 B3─── ·  ·  ·  ·"""

INTERLEAVED = """\
rank 0  F0a F1a F0b F1b ·   B0b ·   B1b B0a B1a
rank 1  ·   F0a F1a F0b B0b F1b B1b B0a B1a ·"""


def test_text() -> None:
    assert PipelineSchedule("1f1b", ranks=3, microbatches=4).draw() == ONE_FORWARD_ONE_BACKWARD
    schedule = PipelineSchedule("interleaved", ranks=2, microbatches=2, stages_per_rank=2)
    assert schedule.draw(backward=1) == INTERLEAVED


@pytest.mark.parametrize(("name", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_pictures_of_the_documentation(name: str, per_rank: int) -> None:
    schedule = PipelineSchedule(name, ranks=4, microbatches=8, stages_per_rank=per_rank)
    svg = schedule.draw("svg")
    assert (PICTURES / f"pipeline-{name}.svg").read_text(encoding="utf-8") == svg
    boxes = ET.fromstring(svg).findall("{*}rect")
    assert len(boxes) == 1 + 4 + 2 * 8 * schedule.stages  # the background, the rows, the actions
    assert schedule._repr_svg_() == svg


def test_other_forms_are_refused() -> None:
    with pytest.raises(px.errors.UsageError, match="form='png' is not valid"):
        PipelineSchedule("1f1b", ranks=2, microbatches=2).draw("png")  # type: ignore[arg-type]
