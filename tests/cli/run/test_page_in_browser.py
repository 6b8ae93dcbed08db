"""The script of the page, in a real browser: what it shows of jobs that hang, fail, end and vanish."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cli.run.browser import Browser, find_browser
from tests.cli.run.support import Launched, Runner
from tests.lateness import bound
from tests.seeing.support import MS, START, Op, slate

from phalanx.cli.run.page.server import PageServer
from phalanx.cli.run.page.view import PageView
from phalanx.seeing.reading import RankSlate
from phalanx.seeing.watch import JobWatch

HANGS = """
import os, time
import numpy as np
import phalanx as px

with px.init() as world:
    go = np.zeros(1)
    while not go.any():  # all of them see it in the same round
        go[:] = os.path.exists("go")
        world.all_reduce(go)
    if world.rank == 1:
        while True:
            time.sleep(0.01)
    world.all_reduce(np.ones(8))
"""

FIRST = "[...document.querySelectorAll('#findings li')].map((item) => item.textContent)[0]"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    yield runner
    runner.clean_up()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("there is no Chromium here")
    with Browser(program, tmp_path) as made:
        yield made


@pytest.fixture
def shown(browser: Browser) -> Iterator[Callable[[dict[int, RankSlate]], PageServer]]:
    """Shows slates that were made by hand."""
    server = PageServer()

    def show(slates: dict[int, RankSlate]) -> PageServer:
        watch = JobWatch(lambda: slates, lambda: START + 25 * MS)
        picture = watch.look()
        assert picture is not None
        PageView(server, lambda: START + 25 * MS).update(watch, picture)
        browser.open(server.url)
        browser.wait_for(FIRST, "the page")
        return server

    yield show
    server.close()


def start(run: Runner, script: str) -> tuple[Launched, str]:
    launched = run.start("-n", "2", "--page", script)
    line = launched.process.stderr.readline().decode()  # type: ignore[union-attr]
    found = re.search(r"http://\S+", line)
    assert found, line
    return launched, found[0]


def end(launched: Launched) -> None:
    launched.process.terminate()
    launched.process.stderr.read()  # type: ignore[union-attr]
    launched.process.wait()


def test_a_rank_that_hangs_is_named_with_its_line(run: Runner, browser: Browser, tmp_path: Path) -> None:
    """Within a second: the words are kept as they were when they first appeared, with the time that they tell."""
    launched, url = start(run, run.script(HANGS))
    browser.open(url)
    browser.wait_for("latest && latest.ranks.length === 2 && latest.timeline.length > 0", "both ranks")
    browser.ask(
        "new MutationObserver(() => {"
        "  const item = document.querySelector('#findings .blocked');"
        "  if (item && !window.first) window.first = [item.textContent, latest.findings[0].seconds];"
        "}).observe(document.getElementById('findings'), {childList: true, subtree: true}), 0"
    )
    (tmp_path / "go").touch()
    words, seconds = browser.wait_for("window.first", "the rank that hangs")
    assert re.search(r"rank 0 waits in all_reduce #\d+ at script\.py:14 .*because rank 1 is at script\.py:1[23]", words)
    assert seconds < bound(1.0)
    assert browser.ask("document.title") == "● script.py"
    assert browser.ask("document.querySelectorAll('#ranks tbody tr').length") == 2
    blamed = browser.ask("[...document.querySelectorAll('#ranks .blamed td')].map((cell) => cell.textContent)")
    assert blamed[0] == "1"
    assert re.match(r"script\.py:1[23]", blamed[2]), blamed
    end(launched)
    assert browser.wrong == []


def test_a_launcher_that_has_gone(run: Runner, browser: Browser, tmp_path: Path) -> None:
    """What was seen last stays, below the words that it is not the present."""
    launched, url = start(run, run.script(HANGS))
    browser.open(url)
    (tmp_path / "go").touch()
    browser.wait_for("document.querySelector('#findings .blocked')", "the hang")
    launched.process.send_signal(signal.SIGKILL)
    launched.process.wait()
    words = "The launcher does not answer. This is what was seen last."
    browser.wait_for(f"{FIRST} === {json.dumps(words)}", "the words")
    assert "because rank 1 is at script.py" in browser.ask("document.querySelector('#findings .blocked').textContent")
    # The browser goes on trying, and the words stay one line.
    time.sleep(4)
    assert browser.ask("document.querySelectorAll('#findings .ended').length") == 1
    run.assert_nothing_left(20.0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("raise ValueError('<b>no</b>')", "The job has failed: rank 1 failed: ValueError: <b>no</b>."),
        ("pass", "The job has ended."),
    ],
)
def test_how_a_job_has_ended(run: Runner, browser: Browser, tmp_path: Path, line: str, words: str) -> None:
    loop = HANGS.partition("    if world.rank")[0]
    launched, url = start(run, run.script(f"{loop}    if world.rank == 1:\n        {line}\n    world.barrier()\n"))
    browser.open(url)
    browser.wait_for("latest && latest.ranks.length === 2", "both ranks")
    (tmp_path / "go").touch()
    browser.wait_for(f"{FIRST} === {json.dumps(words + ' This is what was seen last.')}", words)
    assert browser.ask("document.querySelectorAll('#findings b').length") == 0
    assert browser.ask("events.readyState") == 2, "it does not ask again"
    launched.process.stderr.read()  # type: ignore[union-attr]
    launched.process.wait()
    assert browser.wrong == []


def test_names_with_markup_are_texts(run: Runner, browser: Browser, tmp_path: Path) -> None:
    name = "<img src=x onerror=document.title='owned'>.py"
    launched, url = start(run, run.script(HANGS, name))
    browser.open(url)
    (tmp_path / "go").touch()
    browser.wait_for("document.querySelector('#findings .blocked')", "the hang")
    assert browser.ask("document.getElementById('program').textContent") == name.partition(" ")[0]
    for part in ("findings", "ranks", "sites"):
        assert name in browser.ask(f"document.getElementById('{part}').textContent"), part
    assert browser.ask("document.querySelectorAll('img').length") == 0
    assert browser.ask("document.title") != "owned"
    end(launched)
    assert browser.wrong == []


def test_a_world_of_which_a_part_is_seen(shown: Callable[[dict[int, RankSlate]], PageServer], browser: Browser) -> None:
    operations = [Op(1, 0, 1), Op(2, 10, 16)]
    shown({rank: slate(rank, operations, members=(0, 1, 2, 3), beat=20) for rank in (0, 1)})
    assert browser.ask(FIRST).startswith("2 of 4 ranks can be seen")
    assert "2 of 4 ranks" in browser.ask("document.getElementById('about').textContent")
    assert browser.ask("document.querySelectorAll('#sites tbody tr').length") == 1, "all parts are drawn"
    assert browser.wrong == []


def test_what_the_matrix_and_the_timeline_say(
    shown: Callable[[dict[int, RankSlate]], PageServer], browser: Browser
) -> None:
    late = {rank: slate(rank, [Op(1, 0, 1), Op(2, 10 + 5 * rank, 16)], beat=20) for rank in (0, 1)}
    server = shown(late)
    assert browser.ask("document.querySelector('#matrix tbody tr td:nth-child(3)').title") == (
        "rank 0 has waited 5.0 ms for rank 1"
    )
    picture = json.loads(server.text("picture"))
    picture["ranks"][0].update(waits_for=[1], seconds=3.0)
    browser.ask(f"show({json.dumps(picture)})")
    assert browser.ask("document.querySelector('#matrix tbody tr td:nth-child(3)').textContent") in ("3.00", "3.01")
    picture["span"] = 0.025  # so that one operation is as wide as a mouse can hit
    browser.ask(f"show({json.dumps(picture)})")
    found = browser.ask(
        "(() => {const it = $('timeline'), width = it.clientWidth - LEFT;"
        "it.dispatchEvent(new MouseEvent('mousemove', {clientX: it.getBoundingClientRect().left + LEFT + width * 0.5,"
        "clientY: it.getBoundingClientRect().top + 5, bubbles: true})); return $('hint').textContent;})()"
    )
    assert found == "rank 0: all_reduce at train.py:88 in main, #2: waited 5.0 ms for rank 1, then 1.0 ms"
    assert browser.wrong == []
