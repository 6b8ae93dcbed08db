"""The layers hold: an item never imports one on a line above it. Read from the source, also inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "phalanx"

# From what a person types down to what everybody shares. "phalanx" is the package's own front door, __init__.py.
LAYERS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"testing"},
    {"phalanx"},
    {"torch_backend", "parallel", "rpc"},
    {"world"},
    {"group"},
    {"backends"},
    {"rendezvous"},
    {"transports"},
    {"algorithms"},
    {"wire"},
    {"_native"},
    {"config"},
    {"deadline"},
    {"arguments", "system_limits"},
    {"errors", "types", "exception_text"},
    {"_core"},
]
LINE = {item: line for line, items in enumerate(LAYERS) for item in items}

# The front door opens on every layer: it may import from all of them, but of the lower ones none goes through it.
FRONT_DOOR = "phalanx"

HEAVY = {"cupy", "jax", "mpi4py", "torch"}
MAY_LOAD_HEAVY = {"torch_backend", "parallel"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


class Source(NamedTuple):
    """One module: `name` as imported, `path` to show, and what it says."""

    name: str
    path: str
    tree: ast.Module
    is_package: bool

    @property
    def item(self) -> str:
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else FRONT_DOOR


def parse(name: str, text: str, *, is_package: bool = False) -> Source:
    return Source(name, name.replace(".", "/") + ".py", ast.parse(text), is_package)


def sources() -> list[Source]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("phalanx", *path.relative_to(PACKAGE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        found.append(Source(name, str(path.relative_to(PACKAGE.parent)), tree, is_package))
    return found


SOURCES = sources()


def absolute(source: Source, level: int, module: str | None) -> str:
    """What `from ...module import` means in this module."""
    if level == 0:
        return module or ""
    parts = source.name.split(".")
    base = parts[: len(parts) - level + (1 if source.is_package else 0)]
    return ".".join([*base, module] if module else base)


def imports(source: Source, nodes: Iterator[ast.AST]) -> Iterator[tuple[str, int]]:
    """Every module that these nodes import, in full, with its line. Literal `import_module("...")` counts too."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            module = absolute(source, node.level, node.module)
            for alias in node.names:
                yield f"{module}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0]
            if called in {"import_module", "__import__"} and isinstance(name, ast.Constant):
                text = str(name.value)
                level = len(text) - len(text.lstrip("."))
                yield absolute(source, level, text.lstrip(".") or None), node.lineno


def item_of(module: str) -> str | None:
    """Which item of the layers a module belongs to; None for other packages."""
    parts = module.split(".")
    if parts[0] != "phalanx":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LINE else FRONT_DOOR


def lines_for_types(tree: ast.Module) -> set[int]:
    """The lines under `if TYPE_CHECKING`: the core's types may be named everywhere, though it may not be there."""
    blocks = [
        node for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]
    return {line for block in blocks for line in range(block.lineno, (block.end_lineno or block.lineno) + 1)}


def crossings(source: Source) -> list[str]:
    """Imports that go up."""
    if source.item == FRONT_DOOR:
        return []
    wrong = []
    only_types = lines_for_types(source.tree)
    for module, line in imports(source, ast.walk(source.tree)):
        item = item_of(module)
        if item is None:
            continue
        if LINE[item] < LINE[source.item]:
            wrong.append(f"{source.path}:{line}: {source.item} imports {module}, which is above it")
        if item == "_core" and source.item != "_native" and line not in only_types:
            wrong.append(f"{source.path}:{line}: only _native imports _core")
    return wrong


def at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: no function bodies, nothing under TYPE_CHECKING."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))


def heavy_at_import(source: Source) -> list[str]:
    if source.item in MAY_LOAD_HEAVY:
        return []
    return [
        f"{source.path}:{line}: {module} is imported at module level"
        for module, line in imports(source, at_import(source.tree))
        if module.split(".")[0] in HEAVY
    ]


def environment_uses(source: Source) -> list[str]:
    if source.item == "config":
        return []
    wrong = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = {node.attr} if node.value.id == "os" else set()
        elif isinstance(node, ast.ImportFrom) and node.module == "os" and node.level == 0:
            names = {alias.name for alias in node.names}
        else:
            continue
        wrong += [f"{source.path}:{node.lineno}: os.{name} outside phalanx.config" for name in names & ENVIRONMENT]
    return wrong


# -- the package -----------------------------------------------------------------------------------------------------


def test_every_module_has_its_line() -> None:
    assert len(SOURCES) > 20, f"no source found under {PACKAGE}"
    unknown = sorted({source.item for source in SOURCES} - set(LINE))
    assert not unknown, f"put these into LAYERS: {unknown}"


def test_no_import_goes_up() -> None:
    wrong = [text for source in SOURCES for text in crossings(source)]
    assert not wrong, "\n".join(wrong)


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    wrong = [text for source in SOURCES for text in heavy_at_import(source)]
    assert not wrong, "\n".join(wrong)


def test_only_config_reads_the_environment() -> None:
    wrong = [text for source in SOURCES for text in environment_uses(source)]
    assert not wrong, "\n".join(wrong)


# -- the checks themselves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "import phalanx",
        "import phalanx.group.work",
        "from phalanx import init",
        "from .. import init",
        "from .. import group",
        "from ..group import work",
        "from ..backends.base import Backend",
        "def f():\n    from ..world import init",
        "if TYPE_CHECKING:\n    from ..rendezvous import directory",
        "importlib.import_module('phalanx.cli')",
        "import_module('..group', __package__)",
        "from .. import _core",
        "import phalanx._core",
    ],
)
def test_a_wrong_import_is_seen(text: str) -> None:
    assert len(crossings(parse("phalanx.transports.tcp", text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import os, numpy",
        "from . import stream",
        "from .stream import Stream",
        "from .. import _native, errors, wire",
        "from ..wire.frames import Frame",
        "from phalanx.types import Address",
        "import phalanx.config",
        "importlib.import_module('phalanx.wire')",
    ],
)
def test_a_right_import_is_let_through(text: str) -> None:
    assert crossings(parse("phalanx.transports.tcp", text)) == []


def test_relative_imports_of_a_package_start_at_the_package() -> None:
    assert crossings(parse("phalanx.wire", "from . import group", is_package=True)) == []
    assert len(crossings(parse("phalanx.wire", "from .. import group", is_package=True))) == 1


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("import torch", 1),
        ("from torch import nn", 1),
        ("try:\n    import jax.numpy\nexcept ImportError:\n    pass", 1),
        ("class A:\n    import cupy", 1),
        ("def f():\n    import torch", 0),
        ("if TYPE_CHECKING:\n    import torch", 0),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import torch", 1),
    ],
)
def test_heavy_imports_are_seen(text: str, wrong: int) -> None:
    assert len(heavy_at_import(parse("phalanx.group.data.arrays", text))) == wrong
    assert heavy_at_import(parse("phalanx.parallel.ddp", text)) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("import os\nos.environ['A']", 1),
        ("import os\nos.getenv('A')", 1),
        ("from os import environ", 1),
        ("def f():\n    import os\n    return os.environ.copy()", 1),
        ("import os\nos.getpid()", 0),
    ],
)
def test_environment_reads_are_seen(text: str, wrong: int) -> None:
    assert len(environment_uses(parse("phalanx.world", text))) == wrong
    assert environment_uses(parse("phalanx.config.detect", text)) == []
