"""The launchers that Phalanx knows, and how to tell which one started this process.

Each is a row of variable names. The order in which they are looked for is in `find_launcher`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import slurm
from .identity import launcher_process
from .reader import VariableReader

__all__ = ["Launcher", "find_launcher"]


@dataclass(frozen=True)
class Launcher:
    """Which variables of a launcher say who this process is."""

    name: str
    """As in `Launch.launcher`."""
    title: str
    """As in messages."""
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    others: tuple[str, ...] = ()
    """Further variables that belong to it, named in messages when one of those above is missing."""
    sets_master: bool = False
    """Whether MASTER_ADDR and MASTER_PORT belong to it, so that they must be set when there are several ranks."""

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables that this launcher sets for a rank."""
        return (self.rank, self.world_size, self.local_rank, self.local_world_size, *self.others)

    def identity(self, reader: VariableReader) -> tuple[str, ...]:
        """The name that this launcher gives the job; empty if there is none."""
        if self.name == "torchrun":
            return (reader.text("TORCHELASTIC_RUN_ID") or "",)
        if self.name == "openmpi":
            return (reader.text("PMIX_NAMESPACE") or launcher_process(),)
        if self.name == "mpich":
            return (launcher_process(),)
        if self.name == "slurm":
            names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_JOB_NODELIST")
            return tuple(reader.text(name) or "" for name in names)
        return ()


_ENVIRONMENT = Launcher(
    name="environment",
    title="torchrun-style variables",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    others=("MASTER_ADDR", "MASTER_PORT", "PHALANX_DIRECTORY"),
    sets_master=True,
)
_TORCHRUN = replace(_ENVIRONMENT, name="torchrun", title="torchrun")
_PHALANX = replace(_ENVIRONMENT, name="phalanx", title="phalanx run")

_OPENMPI = Launcher(
    name="openmpi",
    title="Open MPI's mpirun",
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
_MPICH = Launcher(
    name="mpich",
    title="MPICH's mpirun",
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_world_size="MPI_LOCALNRANKS",
    others=("PMI_ID",),
)
# The local world size is worked out from several variables: see `slurm.local_world_size`.
_SLURM = Launcher(
    name="slurm",
    title="Slurm's srun",
    rank="SLURM_PROCID",
    world_size="SLURM_NTASKS",
    local_rank="SLURM_LOCALID",
    local_world_size="SLURM_STEP_TASKS_PER_NODE",
)


def find_launcher(reader: VariableReader) -> Launcher | None:
    """The launcher whose variables count here; None if there are none at all.

    `RANK` goes first: torchrun and `phalanx run` set it, and may themselves be started by mpirun or srun.
    MPI goes before Slurm, because inside an allocation mpirun starts its own helpers by srun, one per node, and their
    `SLURM_PROCID` is inherited by the ranks. Without `RANK`, the other torchrun-style variables come last: scripts for
    Slurm often export `MASTER_ADDR` and `WORLD_SIZE` and leave the rank to srun.

    Raises:
        ConfigError: A variable that is needed to tell cannot be read.
    """
    if reader.text("RANK") is not None:
        return _torchrun_style(reader)
    if reader.found((_OPENMPI.rank, _OPENMPI.world_size)):
        return _OPENMPI
    srun = slurm.in_step(reader)
    # `srun --mpi=pmi2` sets PMI_RANK as well, but not the local rank, which Slurm's own variables have.
    if reader.found((_MPICH.rank, _MPICH.world_size, _MPICH.local_rank)) and not (
        srun and reader.text(_MPICH.local_rank) is None
    ):
        return _MPICH
    if srun:
        # What the step has; SLURM_NTASKS may still say what was allocated (`srun --preserve-env`).
        step_has_its_own = reader.text("SLURM_STEP_NUM_TASKS") is not None
        return replace(_SLURM, world_size="SLURM_STEP_NUM_TASKS") if step_has_its_own else _SLURM
    if reader.found(_ENVIRONMENT.variables):
        return _torchrun_style(reader)
    return None


def _torchrun_style(reader: VariableReader) -> Launcher:
    # `phalanx run` sets TORCHELASTIC_RUN_ID too, for scripts that look for it: so ask for its own variable first.
    if reader.text("PHALANX_DIRECTORY") is not None:
        return _PHALANX
    return _TORCHRUN if reader.text("TORCHELASTIC_RUN_ID") is not None else _ENVIRONMENT
