"""The pages of the documentation that the benchmarks write."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.cli.bench.sample_report import report

from benchmarks import pages


def test_the_pages_get_their_figures_and_keep_their_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = [Path(shutil.copy(page, tmp_path)) for page in pages.PAGES]
    page = copies[0]
    (tmp_path / "main.json").write_bytes(report().encode())
    monkeypatch.setattr(pages, "PAGES", copies)
    pages.main(tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "Measured on 2026-01-02 on 2 cores, A chip, Linux 6.1, with Phalanx 1.2" in text
    assert "| all_reduce, Phalanx, empty() | 2 | 64 MiB |" in text
    assert "**0.50**" in text
    assert "## How it is measured" in text
    pages.main(tmp_path)
    assert page.read_text(encoding="utf-8") == text


def test_the_pages_ask_for_every_part() -> None:
    texts = [page.read_text(encoding="utf-8") for page in pages.PAGES]
    asked = [name for text in texts for _, name, _ in pages.BLOCK.findall(text)]
    assert asked == list(pages.PARTS)
