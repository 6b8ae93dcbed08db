"""Every environment variable that Phalanx reads, in one table.

The documentation page is generated from it, `phalanx doctor` walks over it, and `Reader` refuses to read a variable
that is not in it, so the table cannot fall behind the code.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["VARIABLES", "VARIABLES_BY_NAME", "Variable"]


class Variable(NamedTuple):
    """One environment variable: its name, who sets it, what it means, and what holds when it is not set."""

    name: str
    set_by: str
    meaning: str
    default: str
    secret: bool = False


_USER = "you"
_RUN = "phalanx run"
_TORCH = "torchrun, phalanx run or you"
_TORCHRUN = "torchrun"
_OPENMPI = "Open MPI's mpirun"
_MPICH = "MPICH's mpirun"
_SLURM = "Slurm's srun"
_SYSTEM = "the system"

VARIABLES: tuple[Variable, ...] = (
    # -- the job -----------------------------------------------------------------------------------------------------
    Variable("PHALANX_TOKEN", "phalanx run or you", "the secret that all ranks of the job share", "none", secret=True),
    Variable("PHALANX_TOKEN_FILE", _USER, "a file with the token in it, readable by this user only", "none"),
    Variable("PHALANX_DIRECTORY", _RUN, "host:port where the launcher hosts the directory", "rank 0 hosts it"),
    Variable("PHALANX_JOIN", _RUN, "the number of a rank that joins an elastic world later", "one of the first ranks"),
    Variable("PHALANX_MIN_SIZE", _RUN, "the fewest ranks with which an elastic job goes on", "1"),
    Variable("PHALANX_RUN_ID", _RUN, "a name that all ranks of the job share and no other job has", "see the launcher"),
    Variable("PHALANX_LAST_WORDS", _RUN, "folder where a rank leaves its last traceback for the launcher", "none"),
    Variable("PHALANX_WATCHED", _RUN, "1: the launcher reads what the rank has noted, and removes it", "0"),
    Variable(
        "PHALANX_SLATE_DIR",
        _USER,
        "private folder for what ranks note for `phalanx top`",
        "phalanx-UID in shared memory",
    ),
    Variable("PHALANX_BACKEND", _USER, "what init() uses if the program does not say: mesh, tcp or mpi", "mesh"),
    Variable("PHALANX_TIMEOUT", _USER, "seconds that an operation has, where the program does not say", "600"),
    # -- options -----------------------------------------------------------------------------------------------------
    Variable("PHALANX_INTERFACE", _USER, "name or address of the interface that peers use", "the way to the master"),
    Variable("PHALANX_PORT_RANGE", _USER, "ports that listeners may take, as 20000-20100; 0 is any", "any"),
    Variable("PHALANX_HEARTBEAT", _USER, "seconds between heartbeats", "1"),
    Variable("PHALANX_HEARTBEAT_TIMEOUT", _USER, "seconds of silence after which a machine is lost", "5"),
    Variable("PHALANX_HANDSHAKE_TIMEOUT", _USER, "seconds that one handshake may take", "5"),
    Variable("PHALANX_MAX_PENDING_HANDSHAKES", _USER, "handshakes that may be under way at once", "128"),
    Variable("PHALANX_MAX_MESSAGE", _USER, "largest message, in bytes or as 512MiB", "16GiB"),
    Variable("PHALANX_MAX_OBJECT", _USER, "largest object, in bytes or as 512MiB", "1GiB"),
    Variable("PHALANX_TRANSPORT", _USER, "tcp: no shared memory between ranks on one host", "auto"),
    Variable("PHALANX_SEGMENT_HEAP", _USER, "shared memory for Group.empty, per rank and group", "1GiB"),
    Variable("PHALANX_ALGORITHM", _USER, "algorithms of collectives, as all_reduce=ring,broadcast=tree", "by size"),
    Variable("PHALANX_MPI_CHECK", _USER, "0: collectives on MPI without deadline and without check", "1"),
    Variable("PHALANX_TLS_CERT", _USER, "PEM file with this rank's certificate; turns TLS on", "no TLS"),
    Variable("PHALANX_TLS_KEY", _USER, "PEM file with the certificate's key", "no TLS"),
    Variable("PHALANX_TLS_CA", _USER, "PEM file with the authority that signed every rank's certificate", "no TLS"),
    Variable("PHALANX_TUNING", _USER, "settings of the shared memory: off, fresh or a file", "measured once and kept"),
    Variable("PHALANX_PURE", _USER, "1: do without the native core", "0"),
    Variable("PHALANX_PORTABLE", "tests of Phalanx", "1: do without the core and all that only Linux has", "0"),
    Variable("PHALANX_DEBUG", _USER, "1: errors show Phalanx's own frames, and every rank its own traceback", "0"),
    Variable("PHALANX_LOG", _USER, "log level: debug, info, warning, error or critical", "as the program sets it"),
    # -- torchrun's, which phalanx run sets as well ------------------------------------------------------------------
    Variable("RANK", _TORCH, "this process among all, from 0", "0 in a world of one"),
    Variable("WORLD_SIZE", _TORCH, "number of processes", "1"),
    Variable("LOCAL_RANK", _TORCH, "this process among those of its host, from 0", "the rank, if there is one host"),
    Variable("LOCAL_WORLD_SIZE", _TORCH, "number of processes on this host", "the world size, if there is one host"),
    Variable("MASTER_ADDR", _TORCH, "host name or address of rank 0", "none"),
    Variable("MASTER_PORT", _TORCH, "port at that host", "none"),
    Variable("TORCHELASTIC_RUN_ID", "torchrun or phalanx run", "name of the job", "none"),
    Variable("TORCHELASTIC_RESTART_COUNT", _TORCHRUN, "how often the job was restarted", "0"),
    Variable("TORCHELASTIC_USE_AGENT_STORE", _TORCHRUN, "True: torchrun itself listens on MASTER_PORT", "False"),
    # -- torch, under init_process_group("phalanx") --------------------------------------------------------------------
    Variable("PHALANX_AS_GLOO", _USER, '1: "gloo" means Phalanx, for programs that take no other name', "0"),
    Variable("TORCH_FR_BUFFER_SIZE", _USER, "operations that torch's flight recorder keeps (torch 2.15)", "none"),
    Variable("TORCH_NCCL_TRACE_BUFFER_SIZE", _USER, "the same by an older name", "none"),
    Variable("TORCH_DIST_NAN_CHECK", _USER, "1: torch looks for NaN in what is sent (torch 2.14)", "0"),
    # -- GPUs --------------------------------------------------------------------------------------------------------
    Variable("NCCL_MULTI_RANK_GPU_ENABLE", _USER, "1: NCCL 2.30.3 and later takes several ranks on one GPU", "0"),
    # -- Open MPI ----------------------------------------------------------------------------------------------------
    Variable("OMPI_COMM_WORLD_RANK", _OPENMPI, "this process among all, from 0", "none"),
    Variable("OMPI_COMM_WORLD_SIZE", _OPENMPI, "number of processes", "none"),
    Variable("OMPI_COMM_WORLD_LOCAL_RANK", _OPENMPI, "this process among those of its host, from 0", "none"),
    Variable("OMPI_COMM_WORLD_LOCAL_SIZE", _OPENMPI, "number of processes on this host", "none"),
    Variable("PMIX_NAMESPACE", _OPENMPI, "name of the job", "none"),
    # -- MPICH -------------------------------------------------------------------------------------------------------
    Variable("PMI_RANK", _MPICH, "this process among all, from 0", "none"),
    Variable("PMI_SIZE", _MPICH, "number of processes", "none"),
    Variable("PMI_ID", _MPICH, "set in place of PMI_RANK by mpirun -pmi-port, which Phalanx cannot use", "none"),
    Variable("MPI_LOCALRANKID", _MPICH, "this process among those of its host, from 0", "none"),
    Variable("MPI_LOCALNRANKS", _MPICH, "number of processes on this host", "none"),
    # -- Slurm -------------------------------------------------------------------------------------------------------
    Variable("SLURM_PROCID", _SLURM, "this task of the step, from 0", "none"),
    Variable("SLURM_STEP_NUM_TASKS", _SLURM, "number of tasks in the step", "SLURM_NTASKS"),
    Variable("SLURM_NTASKS", _SLURM, "number of tasks", "none"),
    Variable("SLURM_LOCALID", _SLURM, "this task among those of its node, from 0", "none"),
    Variable("SLURM_NODEID", _SLURM, "this node among those of the step, from 0", "none"),
    Variable("SLURM_STEP_TASKS_PER_NODE", _SLURM, "tasks on each node of the step, as 2(x3),1", "none"),
    Variable("SLURM_TASKS_PER_NODE", _SLURM, "tasks on each node, as 2(x3),1", "none"),
    Variable("SLURM_NTASKS_PER_NODE", _SLURM, "tasks per node as asked for", "none"),
    Variable("SLURM_STEP_NODELIST", _SLURM, "nodes of the step, as node[003-005,9]; the first hosts rank 0", "none"),
    Variable("SLURM_JOB_NODELIST", _SLURM, "nodes of the job, read if the step's are not set", "none"),
    Variable("SLURM_JOB_ID", _SLURM, "number of the job; with the step's, gives the master's port", "none"),
    Variable("SLURM_STEP_ID", _SLURM, "number of the step; not set in a batch script", "none"),
    Variable("SLURM_TASK_PID", _SLURM, "set in everything that Slurm starts, batch scripts too", "none"),
    # -- the system --------------------------------------------------------------------------------------------------
    Variable("XDG_RUNTIME_DIR", _SYSTEM, "folder for this user's private files", "a private folder in TMPDIR"),
    Variable("XDG_CACHE_HOME", _SYSTEM, "folder for what this user's programs keep", "the folder ~/.cache"),
    Variable("TMPDIR", _SYSTEM, "folder for temporary files", "the folder /tmp"),
)

VARIABLES_BY_NAME: dict[str, Variable] = {variable.name: variable for variable in VARIABLES}
