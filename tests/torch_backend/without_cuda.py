"""Makes a CUDA build of torch usable where CUDA's libraries are not installed, to test on the CPU.

The registry has no CPU build of every release, and a CUDA build brings gigabytes of libraries with it that no test of
the plug-in calls. torch is linked against them all the same, so it cannot be imported without. This script compiles one
small library in their stead, of which every function answers "there is no GPU", and leaves it under all their names.

    python tests/torch_backend/without_cuda.py .venv

It is for an environment with `pip install --no-deps torch`. Its argument is another one, which has everything else.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

FOREIGN = re.compile(r"lib(cu|nccl|nv)")
"""Libraries of CUDA, by their names."""
FOREIGN_PACKAGE = re.compile(r"cuda|nvidia|triton|pytorch-triton")
"""Packages of CUDA, and the compiler for it."""
SYMBOL = re.compile(r"(cu|nccl|nv|__cuda)[A-Za-z0-9_]*")
"""Their functions. Whatever is written in C++ has a name that begins with `_Z`, and is torch's own."""
NO_DEVICE = 100
"""CUDA's `cudaErrorNoDevice`."""


def main() -> None:
    """Does it, if this environment's torch needs it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        sys.exit("there is no torch in this environment (install one first: pip install --no-deps torch)")
    _replace_libraries(Path(found.origin).parent / "lib")
    _borrow(Path(sys.argv[1]).resolve())


def _replace_libraries(folder: Path) -> None:
    libraries = sorted(folder.glob("*.so*"))
    names = {name for library in libraries for name in _needed(library) if FOREIGN.match(name)}
    if missing := sorted(name for name in names if not (folder / name).exists()):
        stub = folder / "libno_cuda.so"
        _compile(stub, {symbol: version for library in libraries for symbol, version in _undefined(library)})
        for name in missing:
            (folder / name).symlink_to(stub.name)


def _borrow(other: Path) -> None:
    """Makes the packages of another environment visible here, behind this one's, and adds those that torch misses."""
    mine = Path(sysconfig.get_path("purelib"))
    theirs = other / mine.relative_to(sys.prefix)
    (mine / "borrowed.pth").write_text(f"import site; site.addsitedir({str(theirs)!r})\n")
    wanted = (entry.partition(";") for entry in importlib.metadata.requires("torch") or ())
    names = [name for name, _, marker in wanted if "extra" not in marker and not FOREIGN_PACKAGE.match(name)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", *names]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)  # it complains of what is left out on purpose


def _needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", _output("readelf", "-d", library))


def _undefined(library: Path) -> list[tuple[str, str]]:
    """The functions of CUDA that a library calls, and the versions of them that it was linked with."""
    lines = (line.split()[-1].partition("@") for line in _output("nm", "-D", "-u", library).splitlines())
    return [(symbol, version) for symbol, _, version in lines if SYMBOL.fullmatch(symbol)]


def _compile(stub: Path, symbols: dict[str, str]) -> None:
    source = "\n".join(f"int {symbol}(void) {{ return {NO_DEVICE}; }}" for symbol in symbols)
    versions = {version or "NONE" for version in symbols.values()}  # the loader looks for them in every file
    script = (
        f"{name} {{ global: {'; '.join(s for s, version in symbols.items() if (version or 'NONE') == name)}; }};"
        for name in versions
    )
    with tempfile.NamedTemporaryFile("w", suffix=".map") as file:
        file.write("\n".join(script))
        file.flush()
        command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,--version-script={file.name}", "-x", "c", "-", "-o", str(stub)]
        subprocess.run(command, input=source, text=True, check=True)


def _output(*command: object) -> str:
    return subprocess.run([str(word) for word in command], text=True, capture_output=True, check=True).stdout


if __name__ == "__main__":
    main()
