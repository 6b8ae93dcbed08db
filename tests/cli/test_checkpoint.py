"""`phalanx checkpoint`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import phalanx as px
from phalanx.cli import app, main


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, args)], catch_exceptions=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2):
        px.checkpoint.save(tmp_path / f"step-{step}", {"model": {"w": np.zeros((300, 4), np.float32)}, "step": step})
    return tmp_path


def test_show(folder: Path) -> None:
    lines = run("show", folder / "step-1").output.splitlines()
    assert lines[0].startswith("name step-1, saved 2")
    assert lines[0].endswith("ranks 1, tensors 1, size 4.7 KiB")
    assert lines[1] == "name\tdtype\tshape\tsize\tpieces"
    assert lines[2] == "model.w\tfloat32\t[300, 4]\t4.7 KiB\t1"
    lines = run("show", folder).output.splitlines()
    assert lines[0].startswith("checkpoints in ")
    assert [line.split("\t")[0] for line in lines[1:]] == ["name", "step-1", "step-2"]
    found = json.loads(run("show", folder / "step-2", "--json").output)
    assert found["tensors"][0]["shape"] == [300, 4]
    assert len(json.loads(run("show", folder, "--json").output)) == 2


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "4.7 KiB are as they were saved" in run("verify", folder / "step-1").output
    (file,) = (folder / "step-1").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", "verify", str(folder / "step-1")])
    assert caught.value.code == 1
    assert f"a damaged block in 'model.w' of {file.name}" in capsys.readouterr().err


def test_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", "show", str(tmp_path)])
    assert caught.value.code == 1
    assert capsys.readouterr().err == f"phalanx: {tmp_path} is not a checkpoint (it has no index.json)\n"


def test_export_and_import(folder: Path) -> None:
    assert "was written" in run("export", folder / "step-1", folder / "one.safetensors").output
    assert "was written" in run("import", folder / "one.safetensors", folder / "back").output
    assert px.checkpoint.load(folder / "back")["model.w"].shape == (300, 4)
