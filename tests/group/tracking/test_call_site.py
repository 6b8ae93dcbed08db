"""The place of a call: the user's line, behind those of installed libraries."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from phalanx.group.tracking import call_site

LIBRARY = """
def call(group, find):
    return group.barrier() if find is None else find()
"""


@pytest.fixture
def library(tmp_path: Path) -> dict[str, Any]:
    """A module that counts as installed."""
    folder = tmp_path / "site-packages"
    call_site.add_installed(f"{folder}/")
    made: dict[str, Any] = {}
    exec(compile(LIBRARY, str(folder / "trainer.py"), "exec"), made)
    return made


@pytest.mark.parametrize("find", [call_site.find, call_site._find], ids=["core", "python"])
def test_the_users_line_behind_a_library(library: dict[str, Any], find: Any) -> None:
    site = call_site.describe_site(library["call"](None, find))
    assert site.startswith("test_call_site.py:")
    assert site.endswith(" in test_the_users_line_behind_a_library")


@pytest.mark.parametrize("pure", ["0", "1"])
def test_the_librarys_line_where_there_is_no_other(tmp_path: Path, pure: str) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "trainer.py").write_text(
        textwrap.dedent(
            """
            import phalanx as px

            def main():
                with px.init() as world:
                    world.barrier()
                    print([entry.site for entry in world._journal.recent()])

            if __name__ == "__main__":
                main()
            """
        )
    )
    environment = {"PYTHONPATH": str(folder), "PHALANX_PURE": pure}

    def places(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout

    assert places("-m", "trainer") == "['trainer.py:6 in main']\n"
    assert places("-c", "import trainer; trainer.main()") == "['<string>:1 in <module>']\n"
