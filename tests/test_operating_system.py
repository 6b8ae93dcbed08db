"""What the system grants this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import operating_system
from phalanx.operating_system import core_quota, cores_of_set, usable_cores


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/job/task", {"job/cpu.max": "150000 100000", "job/task/cpu.max": "max 100000"}, 1.5),
        ("0::/job/task", {"job/cpu.max": "400000 100000", "job/task/cpu.max": "50000 100000"}, 0.5),
        ("1:cpu:/job", {"cpu/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_quota_us": "200000"}, 2.0),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {}, None),
    ],
)
def test_the_tightest_quota_of_this_group_and_those_above_binds(
    tmp_path: Path, own: str, files: dict[str, str], quota: float | None
) -> None:
    for name, text in {"proc/self/cgroup": own, **{f"groups/{name}": text for name, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert core_quota(str(tmp_path / "proc"), str(tmp_path / "groups")) == quota


@pytest.mark.parametrize(("quota", "cores"), [(None, cores_of_set()), (0.5, 1), (1.9, 1), (1e6, cores_of_set())])
def test_a_part_of_a_core_is_not_one_more(monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int) -> None:
    monkeypatch.setattr(operating_system, "core_quota", lambda: quota)
    assert usable_cores() == cores
