"""`python -m tools.release`: see the package's docstring."""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

from . import build, check
from .publish import publish
from .pythons import ROOT, Python, find_pythons


def main() -> None:
    """Builds, looks, tries, and publishes if asked to."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description="Builds and tries a release.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the files go (default: dist)")
    parser.add_argument("--pythons", default="", help="interpreters, with blanks between (default: all that are found)")
    parser.add_argument("--here", action="store_true", help="wheels by this machine's compiler, without containers")
    parser.add_argument("--publish", action="store_true", help="upload the files once all is well")
    parser.add_argument("--built", action="store_true", help="build nothing: check and try what is there already")
    asked = parser.parse_args()
    pythons = find_pythons(asked.pythons)
    if not pythons:
        sys.exit("found no Python 3.10 or newer (name some: --pythons '/path/to/python3.12 …')")
    folder = asked.out.resolve()
    say(f"Pythons: {', '.join(map(str, pythons))}")
    paths = sorted(folder.glob("phalanx-*")) if asked.built else build_all(folder, pythons, here=asked.here)
    say("names, metadata and contents")
    check.look(paths)
    for path in paths:
        show(f"{path.name}: {path.stat().st_size / 1024:,.0f} KiB")
        for python in pythons:
            if path.suffix == ".whl" and runs_here(path) and check.fits(path, python):
                tried = check.try_out(path, python)
                seconds = f"installed in {tried.install:.0f} s, smoke tests and demo {tried.smoke:.0f} s"
                show(f"    Python {python}: {seconds}")
    if asked.publish:
        publish(paths)


def build_all(folder: Path, pythons: list[Python], *, here: bool) -> list[Path]:
    """Builds the sdist and all wheels; says how long each took."""
    folder.mkdir(parents=True, exist_ok=True)
    left = sorted(folder.iterdir())
    if left:
        sys.exit(f"{folder} is not empty ({left[0].name}, …): remove what is there, or choose another folder by --out")
    say("sdist")
    source = build.sdist(folder)
    say(f"wheels {'of this machine' if here else 'in containers'}, and the one without the core")
    wheels = build.on_this_machine(source.path, pythons, folder) if here else build.in_containers(source.path, folder)
    built = [source, *wheels, build.pure(source.path, folder)]
    for one in built:
        show(f"{one.path.name}: built in {one.seconds:.0f} s")
    return [one.path for one in built]


def runs_here(wheel: Path) -> bool:
    """Whether a wheel is for this kind of machine. The others were tried in their containers."""
    tag = wheel.stem.rsplit("-", 1)[1]
    libc = "manylinux" if platform.libc_ver()[0] == "glibc" else "musllinux"
    return tag == "any" or (tag.startswith((libc, "linux")) and tag.endswith(platform.machine()))


def say(text: str) -> None:
    """A step, as the Makefile shows them."""
    print(f"== {text}", flush=True)


def show(text: str) -> None:
    """A line of the result."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
