"""The table of variables is complete and holds nothing that is not read; nobody else reads the environment."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import phalanx
from phalanx.config import VARIABLES, Variable
from phalanx.config.reader import VariableReader

PACKAGE = Path(phalanx.__file__).parent
CONFIG = PACKAGE / "config"
NAME = re.compile(r"(PHALANX|OMPI|PMI|PMIX|MPI|HYDI|SLURM|TORCH|TORCHELASTIC|NCCL|XDG|MASTER|LOCAL|GROUP)_[A-Z0-9_]+")
BARE = {"RANK", "WORLD_SIZE", "TMPDIR"}


def names_in_code() -> set[str]:
    """Whole string constants in config that look like variables; docstrings and messages are longer."""
    found: set[str] = set()
    for path in CONFIG.glob("*.py"):
        if path.name == "variables.py":
            continue
        constants = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        found |= {text for text in constants if isinstance(text, str) and (NAME.fullmatch(text) or text in BARE)}
    return found


def test_the_table_is_exactly_what_is_read() -> None:
    assert {*names_in_code(), "PHALANX_PORTABLE"} == {variable.name for variable in VARIABLES}


def test_a_variable_that_is_not_in_the_table_cannot_be_read() -> None:
    with pytest.raises(LookupError, match="PHALANX_NEW"):
        VariableReader({"PHALANX_NEW": "1"}).raw("PHALANX_NEW")


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_each_row_is_filled(variable: Variable) -> None:
    assert all((variable.name, variable.set_by, variable.meaning, variable.default))
    assert variable.secret == (variable.name == "PHALANX_TOKEN")


def test_names_are_unique() -> None:
    assert len({variable.name for variable in VARIABLES}) == len(VARIABLES)


def environment_reads(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in ("environ", "environb", "getenv"))


def test_only_the_reader_touches_the_environment() -> None:
    readers = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if any(environment_reads(path))}
    # The plug-in for torch looks whether a variable is there before it imports anything. The last one is also loaded
    # without the package, by programs of the launcher, and reads a switch for tests.
    assert readers == {"config/reader.py", "torch_backend/__init__.py", "operating_system.py"}
