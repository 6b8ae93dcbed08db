"""Python, the system, the native core, and the packages that Phalanx can work with."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

import phalanx
from phalanx import _native, config

from .findings import Finding, Situation, check, ok, warning

__all__ = ["core", "mpi_launcher", "packages", "system"]

_PACKAGES = {
    "torch": "torch tensors, and 'phalanx' as a backend of torch.distributed",
    "jax": "JAX arrays",
    "mpi4py": "the MPI backend",
    "cupy": "CuPy arrays",
}
_DISTRIBUTIONS = {"cupy": ("cupy", "cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x")}
"""Where a package is published under several names."""


@check("system")
def system(situation: Situation) -> Finding:
    """Versions, for a report of a fault."""
    uname = platform.uname()
    found = (
        f"Phalanx {phalanx.__version__}, Python {platform.python_version()} ({sys.implementation.name}), "
        f"{uname.system} {uname.release}, {uname.machine}"
    )
    if uname.system != "Linux":
        return warning("system", found, "Phalanx is made for Linux. Elsewhere some of these checks cannot look.")
    return ok("system", found)


@check("native core")
def core(situation: Situation) -> Finding:
    """Whether the compiled part is in use, and why not."""
    topic = "native core"
    if _native.available:
        return ok(topic, "the compiled core is in use")
    remedy = "unset PHALANX_PURE" if config.pure() else "install Phalanx again where a C++ compiler is present"
    return warning(
        topic,
        f"the compiled core is not in use: {_native.why_not}",
        f"Everything works without it, only slower. To use it, {remedy}.",
    )


@check("packages")
def packages(situation: Situation) -> Finding:
    """Optional packages by their metadata: importing them to see would take seconds."""
    present, absent = [], []
    for name, purpose in _PACKAGES.items():
        version = _version(name)
        if version:
            present.append(f"{name} {version}")
        else:
            absent.append(f"{name} ({purpose})")
    found = f"NumPy {_version('numpy')}"
    if present:
        found += f", {', '.join(present)}"
    if absent:
        found += f"; optional and not installed: {', '.join(absent)}"
    return ok("packages", found)


def _version(name: str) -> str:
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


@check("MPI launcher")
def mpi_launcher(situation: Situation) -> Iterator[Finding]:
    """Which MPI's mpirun is first on the path, and whether mpi4py has one to work with."""
    topic = "MPI launcher"
    path = shutil.which("mpirun")
    if path is None:
        if _version("mpi4py"):
            yield warning(
                topic,
                "mpi4py is installed, but there is no mpirun on the PATH",
                "To use the MPI backend, install the MPI that mpi4py was built for (Open MPI or MPICH) and put "
                "its mpirun on the PATH.",
            )
        else:
            yield ok(topic, "no mpirun on the PATH (only needed for MPI)")
        return
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
        first = next((line.strip() for line in (answer.stdout + answer.stderr).splitlines() if line.strip()), "")
    except (OSError, subprocess.TimeoutExpired) as error:
        yield warning(topic, f"{path} does not run: {error}", "Repair the MPI installation, or take it off the PATH.")
        return
    if answer.returncode:
        yield warning(
            topic, f"{path} --version fails: {first}", "Repair the MPI installation, or take it off the PATH."
        )
    else:
        yield ok(topic, f"{path}: {first}")
