"""A short version of `make hostile`: a world of processes forms and works while every port it opens is under fire."""

from __future__ import annotations

from tests.soak import hostile


def test_a_world_under_fire() -> None:
    report = hostile.run(connections=20, workers=8)
    assert report.failed == 0, "\n".join(report.text)
