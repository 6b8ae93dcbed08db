"""What would be published: the files and the metadata of the sdist and of the wheel without the core.

`make wheels` builds the others, and tries all of them.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest
from tools.release import check
from tools.release.publish import hindrances
from tools.release.pythons import Python

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("scikit_build_core", reason="the tools that build the core are not in this environment")


def built(what: str, folder: Path, **env: str) -> Path:
    """Builds by the tools of this environment: nothing is fetched."""
    program = f"import scikit_build_core.build as b; b.build_{what}({str(folder)!r})"
    variables = {"PATH": "/usr/bin:/bin", **env}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, env=variables)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", tmp_path_factory.mktemp("wheel"), PHALANX_BUILD_CORE="0")


def test_the_sdist_has_what_it_takes_to_build_and_nothing_that_was_made(sdist: Path) -> None:
    assert check.faults(sdist) == []
    names = check.contents_of(sdist)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode == 0 and tracked.stdout:
        needed = {name for name in tracked.stdout.splitlines() if name.startswith(("src/", "cpp/", "licenses/"))}
        assert {name for name in needed if (ROOT / name).exists()} <= set(names)
    assert not any(name.startswith((".ci", ".git", "dist/", "site/")) for name in names)


def test_the_wheel_without_the_core(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert check.faults(wheel) == []
    names = set(check.contents_of(wheel))
    assert {
        "phalanx/py.typed",
        "phalanx/_core.pyi",
        "phalanx/cli/demo/digits.npz",
        "phalanx/cli/demo/DIGITS.md",
    } <= names


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_the_metadata(kind: str, request: pytest.FixtureRequest) -> None:
    found = check.metadata_of(request.getfixturevalue(kind))
    assert found["Name"] == "phalanx"
    assert found["Requires-Python"] == ">=3.10"
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Description-Content-Type"] == "text/markdown"
    assert sorted(found.get_all("License-File", [])) == ["LICENSE", "licenses/nanobind.txt", "licenses/robin_map.txt"]
    classifiers = found.get_all("Classifier", [])
    # Those on which it was run: no Mac, and no Python after 3.13, has been among them yet.
    versions = [one.rpartition(" ")[2] for one in classifiers if re.search(r"Python :: 3\.\d+$", one)]
    assert versions == ["3.10", "3.11", "3.12", "3.13"]
    assert {one for one in classifiers if one.startswith("Operating System")} == {
        "Operating System :: POSIX",
        "Operating System :: POSIX :: Linux",
    }
    assert "Private :: Do Not Upload" not in classifiers


def test_notices_are_those_of_what_is_linked_in() -> None:
    nanobind = importlib.metadata.distribution("nanobind")
    (notice,) = [path for path in nanobind.files or [] if "licenses" in path.parts]
    assert (ROOT / "licenses" / "nanobind.txt").read_text() == Path(str(notice.locate())).read_text()
    (header,) = [path for path in nanobind.files or [] if path.name == "robin_map.h"]
    comment = Path(str(header.locate())).read_text().partition("*/")[0]
    lines = [re.sub(r"^ \* ?", "", line) for line in comment.splitlines()[1:]]
    assert (ROOT / "licenses" / "robin_map.txt").read_text().strip() == "\n".join(lines).strip()


def test_a_wheel_with_a_fault_is_seen(wheel: Path, tmp_path: Path) -> None:
    other = tmp_path / "phalanx-0.1.0-cp312-abi3-manylinux_2_28_x86_64.whl"
    other.write_bytes(wheel.read_bytes())
    assert check.faults(other) == ["it has 0 cores (expected 1)"]


@pytest.mark.parametrize(
    ("tag", "fitting"),
    [
        ("py3-none-any", ["3.10", "3.11", "3.12", "3.14"]),
        ("cp310-cp310-manylinux_2_28_x86_64", ["3.10"]),
        ("cp311-cp311-musllinux_1_2_aarch64", ["3.11"]),
        ("cp312-abi3-manylinux_2_27_x86_64.manylinux_2_28_x86_64", ["3.12", "3.14"]),
    ],
)
def test_which_python_can_have_which_wheel(tag: str, fitting: list[str]) -> None:
    pythons = [Python((3, minor), "") for minor in (10, 11, 12, 14)]
    assert [str(one) for one in pythons if check.fits(Path(f"phalanx-0.1.0-{tag}.whl"), one)] == fitting


def test_nothing_is_published_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINE_PASSWORD", raising=False)
    metadata = Message()
    metadata["Version"] = "0.0.0"
    found = "\n".join(hindrances(metadata))
    for word in ("CHANGELOG.md has no date for 0.0.0", "[project.urls]", "git tag v0.0.0", "TWINE_PASSWORD"):
        assert word in found


def test_no_text_says_how_to_install_what_is_not_published() -> None:
    """Once it is published: remove this test, and write it into README.md and docs/index.md."""
    asked = re.compile(r"pip3? install (?:-\S+ )*['\"]?phalanx\b(?!-)")
    ours = Path(__file__)
    places = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in ("src", "docs", "examples", "tests", "tools", "benchmarks", "cpp"):
        places += [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix not in (".so", ".pyc")]
    said = [str(path) for path in places if path != ours and asked.search(path.read_text(errors="replace"))]
    assert said == []
