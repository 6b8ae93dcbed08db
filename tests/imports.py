"""The imports of the package, read from its source: also those inside functions, and those for types only.

`tests/test_layers.py` holds the rules, `docs/architecture.py` draws the picture.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "phalanx"

# From what a person types down to what everybody shares. "phalanx" is the package's own front door, __init__.py.
LAYERS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"testing", "pytest_plugin", "notebook"},
    {"phalanx"},
    {"launching"},
    {"seeing"},
    {"torch_backend", "parallel", "rpc", "elastic"},
    {"checkpoint"},
    {"world"},
    {"last_words", "group"},
    {"backends"},
    {"rendezvous", "slate"},
    {"transports", "cuda"},
    {"algorithms"},
    {"wire", "tuning"},
    {"_native", "frames", "thread_frames", "untraced"},
    {"config"},
    {"deadline", "alarm", "background_thread", "news", "one_event"},
    {"arguments", "system_limits"},
    {"errors", "types", "exception_text", "interrupts", "operating_system"},
    {"_core"},
]
LINE = {item: line for line, items in enumerate(LAYERS) for item in items}

# The front door opens on every layer: it may import from all of them, but of the lower ones none goes through it.
FRONT_DOOR = "phalanx"


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


@functools.cache
def sources() -> list[Source]:
    """All modules of the package, read once."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("phalanx", *path.relative_to(PACKAGE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        found.append(Source(name, str(path.relative_to(PACKAGE.parent)), tree, is_package))
    return found


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


Graph = Mapping[str, set[str]]


def modules(sources: Iterable[Source]) -> Graph:
    """Which module imports which, by their full names.

    Imports for types count: a module that names the class of another knows it, and a reader of the one must read the
    other. What a folder's `__init__` runs for its modules does not count, and neither does the package's own.
    """
    sources = list(sources)
    known = {source.name for source in sources} - {FRONT_DOOR}
    return {
        source.name: {
            found
            for module, _ in imports(source, ast.walk(source.tree))
            if (found := _nearest(module, known)) is not None and found != source.name
        }
        for source in sources
        if source.name in known
    }


def _nearest(module: str, known: set[str]) -> str | None:
    """The module that an imported name lies in, or is."""
    while module and module not in known:
        module = module.rpartition(".")[0]
    return module or None


def items(sources: Iterable[Source]) -> Graph:
    """Which item of the layers imports which; of the core, its types do not count."""
    found: dict[str, set[str]] = {item: set() for item in LINE}
    for source in sources:
        for module, _ in imports(source, ast.walk(source.tree)):
            item = item_of(module)
            if item not in {None, FRONT_DOOR, source.item} and (item != "_core" or source.item == "_native"):
                found[source.item].add(str(item))
    return found


def folders(sources: Iterable[Source]) -> Graph:
    """Which folder imports which of the folders beside it."""
    sources = list(sources)
    known = {source.name for source in sources if source.is_package}
    found: dict[str, set[str]] = {}
    for importer, imported in modules(sources).items():
        for module in imported:
            here, there = _where_they_part(importer, module)
            if here != there and {here, there} <= known:
                found.setdefault(here, set()).add(there)
    return found


def _where_they_part(one: str, other: str) -> tuple[str, str]:
    """The first folders on the way to two modules that are not the same."""
    ways = one.split("."), other.split(".")
    same = 0
    while same < min(map(len, ways)) and ways[0][same] == ways[1][same]:
        same += 1
    here, there = (".".join(way[: same + 1]) for way in ways)
    return here, there


def circles(graph: Graph) -> list[list[str]]:
    """All sets of modules or folders of which each leads to each other, in order."""
    reached = {node: _reached(graph, node) for node in graph}
    found = {
        tuple(sorted(other for other in reached[node] if node in reached.get(other, ())))
        for node in graph
        if node in reached[node]
    }
    return [list(circle) for circle in sorted(found)]


def _reached(graph: Graph, start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - reached
        reached |= new
        waiting.extend(new)
    return reached
