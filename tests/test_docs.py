"""The documentation says what is true: its scripts run, its links lead somewhere, its tables are those of the code."""

from __future__ import annotations

import ast
import html
import importlib.util
import inspect
import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from docs import architecture, compatibility, screens
from tests import imports, record
from tests.script_in_rank import run_script

import phalanx as px
import phalanx.types
from phalanx import cli, config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

BLOCK = re.compile(
    r"(?:^<!-- run(?P<how>[^\n]*?) -->\n)?^```python(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.M
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def load_generator() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- scripts ---------------------------------------------------------------------------------------------------------


class Script(NamedTuple):
    """A Python block, and what the line above it says of it: `-n 4 prints: TEXT`, `fails: TEXT` or nothing."""

    page: str
    line: int
    name: str
    code: str
    how: str | None

    @property
    def ranks(self) -> int | None:
        found = re.match(r" -n (\d+)", self.how or "")
        return int(found[1]) if found else None

    def expects(self, word: str) -> str | None:
        found = re.search(rf" {word}: (.+)", self.how or "")
        return found[1] if found else None


def scripts() -> list[Script]:
    found = []
    for name, page in zip(NAMES, PAGES, strict=True):
        text = page.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            title = re.search(r'title="([^"]+)"', block["info"])
            line = text.count("\n", 0, block.start("code")) + 1
            found.append(Script(name, line, title[1] if title else "script.py", block["code"], block["how"]))
    return found


SCRIPTS = scripts()


def by_place(script: Script) -> str:
    return f"{script.page}:{script.line}"


RUN = [script for script in SCRIPTS if script.how is not None]
BY_THE_LAUNCHER = {script.page: script for script in reversed(RUN) if script.ranks and "torch" not in script.code}
"""The first of each page that is for several ranks. tests/test_examples.py has torch there."""


@pytest.mark.parametrize("script", RUN, ids=by_place)
def test_a_script_does_what_its_page_says(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / script.name
    file.write_text(script.code, encoding="utf-8")
    for name in {variable.name for variable in config.VARIABLES} - {"TMPDIR", "PHALANX_PURE"}:
        monkeypatch.delenv(name, raising=False)
    fails = script.expects("fails")
    if script.ranks is None or fails or script in BY_THE_LAUNCHER.values():
        launcher = [] if script.ranks is None else ["-m", "phalanx", "run", "-n", str(script.ranks)]
        command = [sys.executable, *launcher, str(file)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        output = done.stdout + done.stderr
        assert (done.returncode != 0) == (fails is not None), output
    else:  # by phalanx.launch, which forks its ranks: two seconds less for each of these
        monkeypatch.chdir(tmp_path)
        needed = [px.parallel.DDP] if "torch" in script.code else []
        px.launch(run_script, script.ranks, str(file), *needed, timeout=60)
        output = "".join(capsys.readouterr())
    assert (fails or script.expects("prints") or "") in output


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.how is None], ids=by_place)
def test_every_other_block_is_python(script: Script) -> None:
    compile(script.code, by_place(script), "exec")


def test_the_line_above_a_script_can_be_read() -> None:
    written = sum(page.read_text(encoding="utf-8").count("\n<!-- run") for page in PAGES)
    assert written == len([s for s in SCRIPTS if s.how is not None]) > 10
    for script in SCRIPTS:
        assert re.fullmatch(r"( -n \d+)?( (prints|fails): .+)?", script.how or ""), by_place(script)


# -- commands --------------------------------------------------------------------------------------------------------

SHELL = re.compile(r"^```(?:bash|sh)\n(.*?)^```$", re.DOTALL | re.M)
SHELL_BLOCKS = [
    pytest.param(block, id=f"{name}:{text.count(chr(10), 0, block.start()) + 1}")
    for name, page in zip(NAMES, PAGES, strict=True)
    for text in [page.read_text(encoding="utf-8")]
    for block in SHELL.finditer(text)
]


def commands(block: str) -> list[list[str]]:
    """The words of each line, without variables in front and comments behind."""
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        found.append(words)
    return [words for words in found if words]


@pytest.mark.parametrize("block", SHELL_BLOCKS)
def test_commands_can_be_typed(block: re.Match[str]) -> None:
    checked = subprocess.run(["bash", "-n"], input=block[1], capture_output=True, text=True, check=False)
    assert not checked.stderr
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for words in commands(block[1]):
        if words[0] == "make":
            assert {word for word in words[1:] if re.fullmatch("[a-z-]+", word)} <= targets
        elif Path(words[0]).name == "phalanx" and len(words) > 1 and not words[1].startswith("-"):
            command = cli.app.get_command(click.Context(cli.app), words[1])
            assert command is not None, words
            assert unknown_option(command, words) is None


def unknown_option(command: click.Command, words: list[str]) -> str | None:
    try:
        command.make_context(words[1], words[2:]).close()
    except click.NoSuchOption as error:
        return error.option_name
    except (click.ClickException, click.exceptions.Exit):
        pass  # a value that stands for the reader's own
    return None


def test_blocks_of_commands_are_found() -> None:
    assert len(SHELL_BLOCKS) > 30
    doctor = cli.app.get_command(click.Context(cli.app), "doctor")
    assert doctor is not None
    assert unknown_option(doctor, ["phalanx", "doctor", "--master", "node0:29500"]) is None
    assert unknown_option(doctor, ["phalanx", "doctor", "--cure"]) == "--cure"


# -- links and names -------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """As mkdocs and the forges make them of headings, and the names that the API pages hold."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.M), re.M)
    slugs = {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}
    members = set(re.findall(r"^::: (\S+)$", text, re.M))
    return slugs | members


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    broken = []
    for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_exist(name: str) -> None:
    text = re.sub(r"https?://\S+", "", (ROOT / name).read_text(encoding="utf-8"))
    named = set(re.findall(r"\b((?:src|tests|docs|examples|cpp)/[\w./-]*\w)", text))
    assert not [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("name", NAMES)
def test_variables_that_are_named_exist(name: str) -> None:
    known = {variable.name for variable in config.VARIABLES} | {"PHALANX_BUILD_CORE"}
    named = set(re.findall(r"\bPHALANX_[A-Z_]*[A-Z]\b", (ROOT / name).read_text(encoding="utf-8")))
    assert not named - known


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page for page in (ROOT / "docs").rglob("*.md") if str(page.relative_to(ROOT / "docs")) not in menu] == []


# -- what follows from the code --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("docs")])
def test_generated_parts_are_up_to_date(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert load_generator().renew(text) == text, "run: python docs/generate.py"


def test_the_picture_of_the_layers_is_up_to_date() -> None:
    assert architecture.PICTURE.read_text(encoding="utf-8") == architecture.draw(), "run: python -m docs.architecture"


def test_modules_on_the_walks_exist() -> None:
    package = ROOT / "src" / "phalanx"
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = [found.split(".") for found in re.findall(r"`(\w+(?:\.\w+)+)`", text)]
    places = [package.joinpath(*parts) for parts in named if (package / parts[0]).is_dir()]
    assert len(places) > 20
    assert not [str(place) for place in places if not place.is_dir() and not place.with_suffix(".py").is_file()]


def test_every_layer_is_in_the_list_of_layers() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = text.split("## The layers", 1)[1].split("```text\n", 1)[1].split("```", 1)[0].splitlines()
    names = [set(re.split(r" {2,}", line)[0].split(", ")) for line in listed]
    assert names == [items for items in imports.LAYERS if items != {imports.FRONT_DOOR} and items != {"__main__"}]


def test_every_variable_has_its_line() -> None:
    text = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` ", text, re.M) == [variable.name for variable in config.VARIABLES]


def test_every_error_is_drawn() -> None:
    drawn = set(re.findall(r"\b[A-Z]\w+\b", load_generator().error_tree()))
    assert set(px.errors.__all__) <= drawn


def status_table(name: str) -> dict[str, tuple[str, str]]:
    text = (ROOT / name).read_text(encoding="utf-8")
    rows = text.split("| | what works | what does not |\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    cells = [[cell.strip().replace("(docs/", "(") for cell in row.strip("|").split("|")] for row in rows]
    return {area: (works, does_not) for area, works, does_not in cells}


def test_the_list_of_what_works_is_true() -> None:
    assert status_table("README.md") == status_table("docs/index.md")
    table = status_table("README.md")
    for area in ("collectives", "messages", "groups"):
        verbs = re.findall(r"`(\w+)`", table[area][0])
        assert verbs
        assert not [verb for verb in verbs if not callable(getattr(px.Group, verb, None))]
    assert "remote_calls.md" in table["remote calls"][0]
    assert hasattr(px.rpc, "Agent")
    assert "`DDP`" in table["training"][0]
    assert hasattr(px.parallel, "DDP")
    assert "`group.empty`" in table["on one machine"][0]
    assert hasattr(px.Group, "empty")


def test_figures_of_speed_are_those_of_the_benchmarks() -> None:
    pages = {
        name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("benchmarks.md", "coming-from-gloo.md")
    }
    text = (ROOT / "docs" / "when-to-use.md").read_text(encoding="utf-8").split("## How fast", 1)[1]
    figures = re.findall(r"\d+\.\d+", text)
    assert len(figures) > 5
    measured = set(re.findall(r"\d+\.\d+", "".join(pages.values())))
    assert not [figure for figure in figures if figure not in measured]


def test_no_page_shows_targets_of_ours() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"asked for: \d|\| missed \||not there yet", text), page


# -- the public names ------------------------------------------------------------------------------------------------

MODULES = [
    px,
    px.backends,
    px.checkpoint,
    px.elastic,
    px.errors,
    px.parallel,
    px.rpc,
    px.testing,
    px.testing.conformance,
    px.testing.faults,
    phalanx.types,
]
NEED_TORCH = {"DDP", "FSDP", "SyncBatchNorm"}


def public_names() -> list[tuple[str, Any]]:
    """Every public name with the folder it is in, but for modules, which have pages and not entries, and plain data."""
    names = [(module, name) for module in MODULES for name in module.__all__ if not name.startswith("__")]
    if importlib.util.find_spec("torch") is None:
        names = [(module, name) for module, name in names if name not in NEED_TORCH]
    found = [(f"{module.__name__}.{name}", getattr(module, name)) for module, name in names]
    return [(name, value) for name, value in found if not inspect.ismodule(value)]


def documented() -> set[str]:
    """What the pages of the API show: the names that they list, and everything in the modules that they list whole."""
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = set(re.findall(r"^::: (\S+)$", text, re.M))
    whole = [module for module in MODULES if module.__name__ in listed]
    return listed | {f"{module.__name__}.{name}" for module in whole for name in module.__all__}


def test_every_public_name_has_its_place_in_the_api() -> None:
    # The same thing may have several names: `phalanx.Timeout` is `phalanx.errors.Timeout`.
    shown = documented()
    known = {id(value) for name, value in public_names() if name in shown}
    assert not [name for name, value in public_names() if id(value) not in known]


def test_nothing_else_is_shown_as_public() -> None:
    public = {name for name, _ in public_names()} | {module.__name__ for module in MODULES}
    unknown = documented() - public - {f"phalanx.parallel.{name}" for name in NEED_TORCH}
    assert not unknown


@pytest.mark.parametrize(("name", "value"), public_names(), ids=[name for name, _ in public_names()])
def test_a_public_name_says_what_it_is(name: str, value: Any) -> None:
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return  # the docstring of an alias stands in the source; test_every_alias_is_explained looks for it
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        members = [(key, member) for key, member in vars(value).items() if not key.startswith("_")]
        functions = [key for key, member in members if inspect.isfunction(member) or isinstance(member, property)]
        assert not [key for key in functions if not inspect.getdoc(getattr(value, key))]


def test_every_alias_is_explained() -> None:
    body = ast.parse(inspect.getsource(phalanx.types)).body
    aliases = []
    for node, after in itertools.pairwise(body):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and ast.unparse(node).split(" ")[0] != "__all__":
            aliases.append(node)
            assert isinstance(after, ast.Expr), ast.unparse(node)
    assert len(aliases) >= 6


# -- pictures --------------------------------------------------------------------------------------------------------


def test_pictures_of_terminals_are_of_commands_that_are_drawn() -> None:
    text = (ROOT / "docs" / "screens.md").read_text(encoding="utf-8")
    shown = re.findall(r"\(img/screen-(\w+)\.svg\)", text)
    assert sorted(shown) == sorted(screens.SCREENS)
    for name, screen in screens.SCREENS.items():
        svg = (screens.PICTURES / f"screen-{name}.svg").read_text(encoding="utf-8")
        assert html.escape(screen.command) in svg.replace("&#160;", " "), "run: make screens"
        assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"|<!--.*?-->', "", svg)  # nothing is fetched
        assert "/tmp/" not in svg.replace("/tmp/phalanx", "")


def test_scripts_of_the_pictures_are_on_their_pages() -> None:
    for screen in screens.SCREENS.values():
        if screen.page:
            name = next(word for word in screen.command.split() if word.endswith(".py"))
            assert "px.init()" in screens.script_of(screen.page, name)


def test_nothing_in_the_documentation_is_large() -> None:
    files = [file for file in (ROOT / "docs").rglob("*") if file.is_file()]
    assert not [str(file) for file in files if file.stat().st_size > 1_000_000]


# -- the table of what was tested ------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "part": "whole",
    "python": "3.11.7",
    "torch": "2.13.0",
    "platform": "Linux x86_64, glibc 2.36",
    "date": "2026-01-01",
    "commit": "abc",
    "passed": 10,
    "skipped": 0,
    "failed": 0,
}


def test_a_newer_run_takes_the_place_of_an_older_one() -> None:
    other = {**RUN, "torch": "2.6.0"}
    newer = {**RUN, "python": "3.11.9", "passed": 11}
    assert compatibility.take([RUN, other], [newer]) == [other, newer]


def test_a_run_with_a_failure_is_not_taken() -> None:
    assert compatibility.take([RUN], [{**RUN, "passed": 11, "failed": 1}]) == [RUN]


def test_a_run_of_the_tests_is_recorded(tmp_path: Path) -> None:
    path = record.write("some of torch", {"passed": 3, "skipped": 1, "failed": 0, "error": 2}, tmp_path)
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written.keys() == RUN.keys()
    assert (written["passed"], written["skipped"], written["failed"]) == (3, 1, 2)
    assert written["python"] == platform.python_version()
    assert written["part"] in compatibility.PARTS


@pytest.mark.parametrize(
    ("arguments", "recorded"),
    [
        (["--record", "torch"], True),
        (["--record", "torch", "-k", "one"], False),
        (["--record", "whole"], False),
        ([], False),
    ],
)
def test_a_run_of_chosen_tests_is_not_recorded(arguments: list[str], recorded: bool, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_one(): pass\n")
    (tmp_path / "recording.py").write_text(
        f"import pathlib, tests.record as record\nrecord.FOLDER = pathlib.Path({str(tmp_path / 'tested')!r})\n"
    )
    plugins = ["-p", "tests.record", "-p", "recording", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *arguments, str(tmp_path / "test_it.py")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "tested").exists() == recorded, done.stdout
