"""The pages of the documentation that the benchmarks write."""

from __future__ import annotations

import shutil
from pathlib import Path

import click
import msgspec
import pytest
from tests.cli.bench.sample_report import report

from benchmarks import pages
from phalanx.cli.bench.results import CellName, Machine


def test_the_pages_get_their_figures_and_keep_their_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, readme = copies(tmp_path, monkeypatch)
    (tmp_path / "main.json").write_bytes(report().encode())
    pages.main(tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "Measured on 2026-01-02 on 2 cores, A chip, Linux 6.1, with Phalanx 1.2" in text
    assert "| all_reduce, Phalanx, empty() | 2 | 64 MiB | 1.00 ms | 5.00 ms | 5.00 |" in text
    assert "**0.50**" in text
    assert "## How it is measured" in text
    said = readme.read_text(encoding="utf-8")
    pages.main(tmp_path)
    assert page.read_text(encoding="utf-8") == text
    assert readme.read_text(encoding="utf-8") == said


def test_a_report_that_was_cut_short_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of the cells that a run came to would stand on the page as that of all."""
    page, readme = copies(tmp_path, monkeypatch)
    before = page.read_text(encoding="utf-8"), readme.read_text(encoding="utf-8")
    (tmp_path / "main.json").write_bytes(report().encode())
    cut_short = report(unmeasured=[CellName("gather", "float32", 2, 8)])
    (tmp_path / "many.json").write_bytes(cut_short.encode())
    with pytest.raises(click.ClickException, match=r"many\.json was cut short: 1 cells from gather on 2 ranks"):
        pages.main(tmp_path)
    assert (page.read_text(encoding="utf-8"), readme.read_text(encoding="utf-8")) == before


def test_parts_of_a_run_are_taken_together(tmp_path: Path) -> None:
    assert pages.read(tmp_path, "main") is None
    two = report()
    many = report(
        cells=[msgspec.structs.replace(cell, ranks=16) for cell in two.cells], command="phalanx bench -n 16", memory=[]
    )
    (tmp_path / "main-16.json").write_bytes(many.encode())
    (tmp_path / "main-2.json").write_bytes(two.encode())
    found = pages.read(tmp_path, "main")
    assert found is not None
    assert found.cells == [*two.cells, *many.cells]
    assert (found.columns, found.memory) == (two.columns, two.memory)
    assert found.command.splitlines() == [two.command, "phalanx bench -n 16"]
    other = report(machine=Machine(16, "Another chip", "Linux 6.1", "3.11.1", "2.0", []))
    (tmp_path / "main-4.json").write_bytes(other.encode())
    with pytest.raises(
        click.ClickException, match=r"main-2\.json, main-4\.json, main-16\.json are of several machines"
    ):
        pages.read(tmp_path, "main")
    (tmp_path / "main.json").write_bytes(two.encode())
    assert pages.read(tmp_path, "main") == two


def test_a_machine_has_its_own_section_and_leaves_those_of_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, _ = copies(tmp_path, monkeypatch)
    before = sections(page)
    (tmp_path / "main.json").write_bytes(report().encode())
    (tmp_path / "main.svg").write_text("<svg/>")
    pages.main(tmp_path)
    after = sections(page)
    assert list(after) == [*before, "A chip, 2 cores"]
    assert {name: after[name] for name in before} == before
    assert "img/benchmarks-a-chip-2-cores.svg" in after["A chip, 2 cores"]
    assert (tmp_path / "img" / "benchmarks-a-chip-2-cores.svg").read_text() == "<svg/>"
    assert after["A chip, 2 cores"].count(pages.NOT_MEASURED) == 3, "many, tcp and hosts have no report"
    other = report(machine=Machine(16, "Another chip", "Linux 6.1", "3.11.1", "2.0", []))
    (tmp_path / "tcp.json").write_bytes(other.encode())
    pages.main(tmp_path)
    assert list(sections(page)) == [*before, "A chip, 2 cores", "Another chip, 16 cores"]
    assert sections(page)["A chip, 2 cores"] == after["A chip, 2 cores"]


def test_the_readme_claims_what_the_worst_machine_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the best one does, and not the one that was measured last."""
    page, readme = copies(tmp_path, monkeypatch)
    text = page.read_text(encoding="utf-8")
    table = pages.markdown(
        pages.MACHINES, [[name, "9", mean, "", ""] for name, mean in (("Slow", "0.7"), ("Fast", "9"))]
    )
    page.write_text(pages.BLOCK.sub(lambda m: f"{m[1]}{table}{m[3]}" if m[2] == "machines" else m[0], text))
    (tmp_path / "main.json").write_bytes(report().encode())
    pages.main(tmp_path)
    assert "0.7 times the speed of the best" in (found := pages.claim(page.read_text(encoding="utf-8")))
    assert "on Slow, the worst of 3 machines" in found
    assert found in readme.read_text(encoding="utf-8")


def test_the_readme_of_this_checkout_claims_what_the_page_shows() -> None:
    said = pages.claim(pages.PAGES[0].read_text(encoding="utf-8"))
    assert f"<!-- measured: claim -->{said}<!-- end -->" in pages.README.read_text(encoding="utf-8")


def test_the_pages_ask_for_every_part() -> None:
    first, second = (page.read_text(encoding="utf-8") for page in pages.PAGES)
    wanted = [name for names in pages.SECTIONS.values() for name in names]
    for text in sections(pages.PAGES[0]).values():
        assert [name for _, name, _ in pages.BLOCK.findall(text)] == wanted
    assert [*wanted, *(name for _, name, _ in pages.BLOCK.findall(second))] == list(pages.PARTS)
    assert first.count("<!-- measured: machines -->") == 1


def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Copies of the pages, to which the benchmarks write: that of the figures, and the README."""
    made = [Path(shutil.copy(page, tmp_path)) for page in pages.PAGES]
    readme = Path(shutil.copy(pages.README, tmp_path))
    monkeypatch.setattr(pages, "PAGES", made)
    monkeypatch.setattr(pages, "README", readme)
    return made[0], readme


def sections(page: Path) -> dict[str, str]:
    return {match[1]: match[2] for match in pages.SECTION.finditer(page.read_text(encoding="utf-8"))}
