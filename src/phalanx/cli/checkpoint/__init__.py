"""`phalanx checkpoint`: look at a checkpoint, check every byte of it, or make another kind of it."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import click

from phalanx import checkpoint
from phalanx.checkpoint.dtypes import item_size
from phalanx.checkpoint.folder import checkpoints
from phalanx.checkpoint.index import INDEX, Index, TensorEntry, read_index
from phalanx.cli.bench.sizes import show_bytes

__all__ = ["command"]

_PATH = click.argument("path", type=click.Path(path_type=Path))


@click.group(short_help="Look at checkpoints: what is in them, and whether it is whole.")
def command() -> None:
    """Look at checkpoints that were saved by phalanx.checkpoint, on any number of ranks."""


@command.command(short_help="What is in a checkpoint, or in a folder of them.")
@_PATH
@click.option("--json", "machine_readable", is_flag=True, help="Print JSON.")
def show(path: Path, machine_readable: bool) -> None:
    """Show the tensors of a checkpoint with their shapes, sizes and pieces; of a folder, the checkpoints in it."""
    if not (path / INDEX).exists() and (found := checkpoints(path)):
        rows = [_summary(each, index) for each, index in found]
        _print(rows, machine_readable, f"checkpoints in {path}, the latest last")
        return
    index = read_index(path)
    rows = [_of_tensor(name, tensor) for name, tensor in index.tensors.items()]
    summary = _summary(path, index)
    if machine_readable:
        click.echo(json.dumps({**summary, "tensors": rows}, indent=2))
        return
    _print(rows, False, ", ".join(f"{key} {value}" for key, value in summary.items()))


@command.command(short_help="Read every byte of a checkpoint and compare it with its checksums.")
@_PATH
def verify(path: Path) -> None:
    """Read every byte of a checkpoint and compare it with its checksums. The exit code is 1 if something is wrong."""
    begun = time.monotonic()
    size = checkpoint.verify(path)
    click.echo(f"{path}: {show_bytes(size)} are as they were saved ({time.monotonic() - begun:.1f} s)")


@command.command("export", short_help="Write a checkpoint as one safetensors file, or for torch.")
@_PATH
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--dcp", is_flag=True, help="Make a folder of torch.distributed.checkpoint.")
def export_to(path: Path, target: Path, dcp: bool) -> None:
    """Write the tensors of a checkpoint to one safetensors file, or with --dcp as a checkpoint of torch."""
    (checkpoint.export_dcp if dcp else checkpoint.export_safetensors)(path, target)
    click.echo(f"{target} was written")


@command.command("import", short_help="Make a checkpoint of a safetensors file, or of torch's.")
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@_PATH
def import_from(source: Path, path: Path) -> None:
    """Make a checkpoint of a safetensors file, or of a folder of torch.distributed.checkpoint (which torch unpickles:
    only if you trust it).
    """
    (checkpoint.import_dcp if source.is_dir() else checkpoint.import_safetensors)(source, path)
    click.echo(f"{path} was written")


def _summary(path: Path, index: Index) -> dict[str, Any]:
    size = sum(_size(tensor) for tensor in index.tensors.values())
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(index.saved))
    return {
        "name": path.name,
        "saved": saved,
        "ranks": index.world_size,
        "tensors": len(index.tensors),
        "size": show_bytes(size),
    }


def _of_tensor(name: str, tensor: TensorEntry) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "size": show_bytes(_size(tensor)),
        "pieces": len(tensor.pieces),
    }


def _size(tensor: TensorEntry) -> int:
    return math.prod(tensor.shape) * item_size(tensor.dtype)


def _print(rows: list[dict[str, Any]], machine_readable: bool, title: str) -> None:
    if machine_readable:
        click.echo(json.dumps(rows, indent=2))
        return
    if not sys.stdout.isatty():
        click.echo(title)
        for row in [{key: key for key in rows[0]}, *rows] if rows else ():
            click.echo("\t".join(str(value) for value in row.values()))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for key in rows[0] if rows else ():
        table.add_column(key, justify="right" if key in ("size", "pieces", "ranks", "tensors") else "left")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
