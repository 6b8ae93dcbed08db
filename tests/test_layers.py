"""The layers hold, and so do the rooms inside them. Read from the source, also inside functions.

- An item never imports one on a line above it.
- No modules import each other in a circle, and no folders that lie beside each other. Imports under `TYPE_CHECKING`
  count: they cost nothing when the program runs, but a circle of them is still one thing in several files.
- Names with an underscore stay in their module.
- What is read as a Struct is read by a decoder of the module: msgspec looks at a class at its first use, and two
  threads that do so at once crash. Types of users go through `phalanx.wire.conversion`, which sees to it.
- A class has a name of its own. Private ones may share theirs: nobody meets them outside their module.
"""

from __future__ import annotations

import ast
import json

import pytest
from tests.imports import (
    FRONT_DOOR,
    LINE,
    PACKAGE,
    Source,
    absolute,
    at_import,
    circles,
    folders,
    imports,
    item_of,
    lines_for_types,
    modules,
    parse,
    sources,
)
from tests.other_system.linux_only import FOLDERS, FUNCTIONS, MODULES

HEAVY = {"cupy", "jax", "mpi4py", "torch"}
MAY_LOAD_HEAVY = {"torch_backend", "parallel"}
SHARED_MEMORY = "phalanx.transports.shared_memory"
EARLY = "phalanx.torch_backend"
"""Runs whenever torch is imported: it may look whether a variable is there before it imports `config`."""
LINUX_ONLY = frozenset(" ".join([*MODULES.values(), FUNCTIONS]).split())
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

MAY_LOOK_LATE = {"phalanx.wire.conversion", "phalanx.rpc.payload"}
"""One has a lock for it, the other asks for a class that msgspec does not know, of which it keeps nothing."""


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


def heavy_at_import(source: Source) -> list[str]:
    if source.item in MAY_LOAD_HEAVY:
        return []
    return [
        f"{source.path}:{line}: {module} is imported at module level"
        for module, line in imports(source, at_import(source.tree))
        if module.split(".")[0] in HEAVY
    ]


def environment_uses(source: Source) -> list[str]:
    # The last one is loaded without the package, too, by programs of the launcher.
    if source.item in {"config", "operating_system"} or source.name == EARLY:
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


def late_decoders(source: Source) -> list[str]:
    """Classes that msgspec may see first in a function, where threads can meet."""
    early = set(map(id, at_import(source.tree)))
    return [
        f"{source.path}:{node.lineno}: make a decoder of the module, which looks at the type at import"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and id(node) not in early
        and (name := ast.unparse(node.func)).startswith("msgspec.")
        and source.name not in MAY_LOOK_LATE
        and (
            name == "msgspec.convert"
            or (name.endswith(".Decoder") and node.args)
            or (name.endswith(".decode") and any(word.arg == "type" for word in node.keywords))
        )
    ]


def memory_uses(source: Source) -> list[str]:
    """Memory made or mapped outside its module. The doctor, which tries whether there is any, opens no one else's."""
    if source.name == SHARED_MEMORY or source.item in {"cli", "operating_system"}:
        return []
    names = {"memfd_create", "mmap"}
    return [
        f"{source.path}:{node.lineno}: memory is made and opened by {SHARED_MEMORY} only"
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.alias) and node.name in names)
    ]


def linux_only(source: Source) -> list[str]:
    """Things that only Linux has, outside their module. The benchmark is for Linux on purpose, and says so."""
    if source.item == "operating_system" or source.name.startswith("phalanx.cli.bench"):
        return []
    texts = {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Expr)}  # docstrings
    wrong = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            found = {node.attr} & LINUX_ONLY
        elif isinstance(node, ast.ImportFrom):
            found = {alias.name for alias in node.names} & LINUX_ONLY
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            found = {node.value} if node.value in LINUX_ONLY or node.value.startswith(FOLDERS) else set()
        else:
            continue
        wrong += [f"{source.path}:{node.lineno}: {name} outside phalanx.operating_system" for name in sorted(found)]
    return wrong


def borrowed(source: Source) -> list[str]:
    """The private names of other modules that a module imports, or takes from a module that it imports."""
    names = {module for module, _ in imports(source, ast.walk(source.tree))}
    modules = {
        alias.asname or alias.name: f"{absolute(source, node.level, node.module)}.{alias.name}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.islower()
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr.startswith("_"):
            names.add(f"{modules.get(node.value.id, '')}.{node.attr}")
    return [f"{source.name}: {name}" for name in sorted(names) if is_private(name)]


def is_private(name: str) -> bool:
    """Whether a name of the package has an underscore; the items of the layers are there for all."""
    package, *parts = name.split(".")
    return package == "phalanx" and any(
        part.startswith("_") and not part.endswith("__") for part in parts if part not in LINE
    )


def namesakes(sources: list[Source]) -> dict[str, list[str]]:
    """The public classes of one name, and the modules that have them."""
    homes: dict[str, list[str]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(source.name)
    return {name: modules for name, modules in sorted(homes.items()) if len(modules) > 1}


# -- the package -----------------------------------------------------------------------------------------------------


def test_every_module_has_its_line() -> None:
    assert len(sources()) > 20, f"no source found under {PACKAGE}"
    unknown = sorted({source.item for source in sources()} - set(LINE))
    assert not unknown, f"put these into LAYERS: {unknown}"


def test_no_import_goes_up() -> None:
    wrong = [text for source in sources() for text in crossings(source)]
    assert not wrong, "\n".join(wrong)


def test_no_circles_of_imports() -> None:
    found = circles(modules(sources()))
    assert not found, f"circles of imports: {json.dumps(found, indent=4)}"


def test_folders_beside_each_other_are_in_order() -> None:
    assert circles(folders(sources())) == []


def test_private_names_stay_in_their_module() -> None:
    assert [text for source in sources() for text in borrowed(source)] == []


def test_a_class_has_a_name_of_its_own() -> None:
    found = namesakes(sources())
    assert not found, f"classes of one name: {json.dumps(found, indent=4)}"


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    wrong = [text for source in sources() for text in heavy_at_import(source)]
    assert not wrong, "\n".join(wrong)


def test_only_config_reads_the_environment() -> None:
    wrong = [text for source in sources() for text in environment_uses(source)]
    assert not wrong, "\n".join(wrong)


def test_decoders_are_made_at_import() -> None:
    assert [text for source in sources() for text in late_decoders(source)] == []


def test_only_one_module_makes_and_opens_shared_memory() -> None:
    wrong = [text for source in sources() for text in memory_uses(source)]
    assert not wrong, "\n".join(wrong)


def test_only_one_module_uses_what_only_linux_has() -> None:
    wrong = [text for source in sources() for text in linux_only(source)]
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


def test_circles_are_found() -> None:
    graph = {"a": {"b", "e"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"f"}, "f": {"e"}}
    assert circles(graph) == [["a", "b", "c"], ["e", "f"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}}) == []


def test_imports_of_every_kind_make_circles() -> None:
    package = parse("phalanx.wire", "", is_package=True)
    one = parse("phalanx.wire.one", "def f():\n    from .two import Two")
    two = parse("phalanx.wire.two", "if TYPE_CHECKING:\n    from . import three")
    three = parse("phalanx.wire.three", "import phalanx.wire.one")
    assert circles(modules([package, one, two, three])) == [[one.name, three.name, two.name]]
    assert circles(modules([package, one, two])) == []


def test_circles_of_folders_are_found() -> None:
    packages = [parse(name, "", is_package=True) for name in ("phalanx.group", "phalanx.group.a", "phalanx.group.b")]
    down = parse("phalanx.group.a.one", "from ..b.one import One")
    up = parse("phalanx.group.b.two", "from ..a.two import Two")
    others = [parse("phalanx.group.b.one", ""), parse("phalanx.group.a.two", ""), parse("phalanx.group.core", "")]
    outside = parse("phalanx.group.b.three", "from ..core import Core")
    assert circles(folders([*packages, *others, down, up])) == [["phalanx.group.a", "phalanx.group.b"]]
    assert circles(folders([*packages, *others, down, outside])) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("from .stream import _Stream", 1),
        ("from ..wire.frames import Frame, _HEADER", 1),
        ("from ..wire import frames\nframes._HEADER.size", 1),
        ("from . import _secret", 1),
        ("def f():\n    import phalanx.wire._secret", 1),
        ("from .. import _native\n_native.core", 0),
        ("from .._native import core", 0),
        ("from .. import __version__", 0),
        ("from ctypes import _SimpleCData", 0),
        ("from .stream import Stream\nStream._socket", 0),
        ("self._socket = stream._socket", 0),
    ],
)
def test_borrowed_names_are_seen(text: str, wrong: int) -> None:
    assert len(borrowed(parse("phalanx.transports.tcp", text))) == wrong


def test_namesakes_are_found() -> None:
    one = parse("phalanx.wire.one", "class Kind: ...\nclass _Own: ...\nclass Only: ...")
    two = parse("phalanx.wire.two", "class _Own: ...\ndef f():\n    class Kind: ...")
    assert namesakes([one, two]) == {"Kind": [one.name, two.name]}


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


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("import os\nos.sched_getaffinity(0)", 1),
        ("open(f'/proc/{pid}/stat')", 1),
        ("Path('/sys/fs/cgroup')", 1),
        ("ctypes.CDLL(None).prctl(1, 9)", 1),
        ("from os import eventfd, memfd_create", 2),
        ("import os\ngetattr(os, 'pidfd_open', None)", 1),
        ("import signal\nsignal.pidfd_send_signal(fd, 9)", 1),
        ("libc.process_vm_readv(pid)", 1),
        ("import os\nos.cpu_count()", 0),
        ("def f():\n    '/proc is read elsewhere.'", 0),
    ],
)
def test_what_only_linux_has_is_seen(text: str, wrong: int) -> None:
    assert len(linux_only(parse("phalanx.transports.tcp", text))) == wrong
    assert linux_only(parse("phalanx.operating_system", text)) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("decode = msgspec.json.Decoder(A).decode", 0),
        ("def f(): return msgspec.json.decode(data)", 0),
        ("def f(): return msgspec.json.decode(data, type=A)", 1),
        ("def f(): return msgspec.msgpack.Decoder(A)", 1),
        ("f = lambda data: msgspec.convert(data, A)", 1),
    ],
)
def test_late_decoders_are_seen(text: str, wrong: int) -> None:
    assert len(late_decoders(parse("phalanx.x", text))) == wrong
