"""The parts of the documentation that follow from the code: tables of variables, options and commands.

A page holds them between `<!-- generated: NAME -->` and `<!-- end -->`, so that they can be read without building
anything. mkdocs renews them when it builds the site, a test compares them, and this writes them into the pages:

    python docs/generate.py
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from phalanx import __version__, cli, config, errors
from phalanx.config.options import _RULES

DOCS = Path(__file__).parent
if str(DOCS.parent) not in sys.path:  # mkdocs and a test load this file by its path
    sys.path.insert(0, str(DOCS.parent))
from docs import compatibility  # noqa: E402

BLOCK = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


# -- environment variables -------------------------------------------------------------------------------------------

SECTIONS = {
    "job": ("PHALANX_TOKEN", "PHALANX_TIMEOUT"),
    "options": ("PHALANX_INTERFACE", "PHALANX_LOG"),
    "torchrun": ("RANK", "TORCHELASTIC_USE_AGENT_STORE"),
    "torch": ("PHALANX_AS_GLOO", "TORCH_DIST_NAN_CHECK"),
    "gpus": ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MULTI_RANK_GPU_ENABLE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE"),
    "mpich": ("PMI_RANK", "MPI_LOCALNRANKS"),
    "slurm": ("SLURM_PROCID", "SLURM_TASK_PID"),
    "system": ("XDG_RUNTIME_DIR", "TMPDIR"),
}
"""The first and the last variable of each section, in the order of `phalanx.config.VARIABLES`."""


def variables(section: str) -> str:
    names = [variable.name for variable in config.VARIABLES]
    first, last = (names.index(name) for name in SECTIONS[section])
    rows = [
        [
            f"`{variable.name}`",
            variable.meaning,
            "" if variable.default == "none" else variable.default,
            variable.set_by,
        ]
        for variable in config.VARIABLES[first : last + 1]
    ]
    return table(["variable", "what it means", "if it is not set", "who sets it"], rows)


# -- options ---------------------------------------------------------------------------------------------------------


def options(cls: type[Any]) -> str:
    """The fields of a dataclass, with the docstring under each."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(field.target, ast.Name):
            texts[field.target.id] = (
                ast.unparse(field.annotation),
                ast.unparse(field.value) if field.value is not None else "",
                " ".join(inspect.cleandoc(ast.literal_eval(text.value)).split()),
            )
    rows = []
    for field in fields(cls):
        kind, default, text = texts[field.name]
        rule = _RULES.get(field.name)
        expected = f" Valid: {rule.expected}." if rule is not None else ""
        variable = f"`{rule.variable}`" if rule is not None else TLS_VARIABLES[field.name]
        rows.append([f"`{field.name}`", f"`{kind}`", f"`{default}`" if default else "", variable, text + expected])
    return table(["field", "type", "default", "variable", "what it does"], rows)


TLS_VARIABLES = {
    "tls": "the three below",
    "certificate": "`PHALANX_TLS_CERT`",
    "key": "`PHALANX_TLS_KEY`",
    "ca": "`PHALANX_TLS_CA`",
}


# -- the command line, the errors ------------------------------------------------------------------------------------


def command_options(name: str) -> str:
    """The options of a command. From its parameters, not from its help text, whose layout is click's affair."""
    command = cli.app.get_command(click.Context(cli.app), name)
    assert command is not None
    rows = []
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            value = "" if option.is_flag else " " + (option.metavar or VALUES[type(option.type)])
            default = f"`{option.default}`" if option.show_default else ""
            rows.append([f"`{', '.join(option.opts)}{value}`", " ".join((option.help or "").split()), default])
    return table(["option", "what it does", "default"], rows)


VALUES: dict[type[Any], str] = {click.IntRange: "N", click.Path: "PATH"}


def error_tree() -> str:
    """As it is drawn in the docstring of `phalanx.errors`."""
    drawing = re.search(r"```\n(.*?)```", errors.__doc__ or "", re.DOTALL)
    assert drawing is not None
    return f"```text\n{drawing[1]}```\n"


PARTS = {
    **{f"variables-{name}": lambda name=name: variables(name) for name in SECTIONS},
    "options": lambda: options(config.Options),
    "tls-options": lambda: options(config.TlsOptions),
    **{
        f"command-{name}": lambda name=name: command_options(name) for name in ("run", "top", "doctor", "demo", "bench")
    },
    "errors": error_tree,
    "compatibility": compatibility.table,
    "version": lambda: f"This is the documentation of Phalanx {__version__}.\n",
}


def renew(markdown: str) -> str:
    """A page with all its generated parts as the code says now.

    Raises:
        KeyError: The page asks for a part that does not exist.
    """
    return BLOCK.sub(lambda match: f"{match[1]}\n{PARTS[match[2]]()}\n{match[3]}", markdown)


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page.

    In a table, the forges want a bar inside code to be escaped. Python-Markdown does not, and would show the backslash.
    """
    lines = renew(markdown).splitlines()
    return "\n".join(CODE.sub(without_escapes, line) if line.startswith("|") else line for line in lines)


CODE = re.compile(r"`[^`]+`")


def without_escapes(code: re.Match[str]) -> str:
    return code[0].replace("\\|", "|")


if __name__ == "__main__":
    for page in pages():
        old = page.read_text(encoding="utf-8")
        new = renew(old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            sys.stdout.write(f"{page}: renewed\n")
