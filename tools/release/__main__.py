"""`python -m tools.release`: see the package's docstring."""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

from . import build, check
from .publish import publish
from .pythons import ROOT, find_pythons


def main() -> None:
    """Builds, looks, tries, and publishes if asked to."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description="Builds and tries a release.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the files go (default: dist)")
    parser.add_argument("--pythons", default="", help="interpreters, with blanks between (default: all that are found)")
    parser.add_argument("--here", action="store_true", help="wheels by this machine's compiler, without containers")
    parser.add_argument("--publish", action="store_true", help="upload the files once all is well")
    asked = parser.parse_args()
    pythons = find_pythons(asked.pythons)
    if not pythons:
        sys.exit("found no Python 3.10 or newer (name some: --pythons '/path/to/python3.12 …')")
    asked.out.mkdir(parents=True, exist_ok=True)
    left = sorted(asked.out.iterdir())
    if left:
        sys.exit(
            f"{asked.out} is not empty ({left[0].name}, …): remove what is there, or choose another folder by --out"
        )
    say(f"Pythons: {', '.join(map(str, pythons))}")

    say("sdist")
    source = build.sdist(asked.out)
    say("wheels" + (" of this machine" if asked.here else " in containers") + ", and the one without the core")
    if asked.here:
        wheels = build.on_this_machine(source.path, pythons, asked.out)
    else:
        wheels = build.in_containers(source.path, asked.out)
    wheels.append(build.pure(source.path, asked.out))
    paths = [source.path, *(wheel.path for wheel in wheels)]
    say("names, metadata and contents")
    check.look(paths)
    show(f"{source.path.name}: {size(source.path)}, built in {source.seconds:.0f} s")
    for wheel in wheels:
        show(f"{wheel.path.name}: {size(wheel.path)}, built in {wheel.seconds:.0f} s")
        for python in pythons:
            if runs_here(wheel.path) and check.fits(wheel.path, python):
                tried = check.try_out(wheel.path, python)
                show(
                    f"    Python {python}: installed in {tried.install:.0f} s, demo and smoke tests {tried.smoke:.0f} s"
                )
    if asked.publish:
        publish(paths)


def runs_here(wheel: Path) -> bool:
    """Whether a wheel is for this kind of machine. The others were tried in their containers."""
    tag = wheel.stem.rsplit("-", 1)[1]
    libc = "manylinux" if platform.libc_ver()[0] == "glibc" else "musllinux"
    return tag == "any" or (tag.startswith((libc, "linux")) and tag.endswith(platform.machine()))


def size(path: Path) -> str:
    """The size of a file for people."""
    return f"{path.stat().st_size / 1024:,.0f} KiB"


def say(text: str) -> None:
    """A step, as the Makefile shows them."""
    print(f"== {text}", flush=True)


def show(text: str) -> None:
    """A line of the result."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
