"""The variables of the launcher, the options in the environment, and the job's token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from phalanx import config
from phalanx.config import Launch, Options
from phalanx.errors import ConfigError, MissingVariable
from phalanx.transports.tcp import check_tls
from phalanx.types import Address

from .findings import Finding, Situation, check, ok, problem, warning

__all__ = ["launcher", "options", "present_situation", "token"]

_LAUNCHERS = {
    "phalanx": "phalanx run",
    "torchrun": "torchrun",
    "openmpi": "Open MPI's mpirun",
    "mpich": "MPICH's mpirun",
    "slurm": "Slurm's srun",
    "environment": "variables set by hand",
}
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_NOT_OF_THE_JOB = ("XDG_RUNTIME_DIR", "TMPDIR")


def present_situation(master: Address | None = None) -> Situation:
    """The situation of this process. Errors in the variables are left to the checks."""
    launch = options = None
    with contextlib.suppress(ConfigError):
        launch = config.detect()
    with contextlib.suppress(ConfigError):
        options = Options.from_env()
    if master is None and launch is not None:
        master = launch.master
    return Situation(env=config.inherited(), launch=launch, options=options, master=master)


@check("launcher")
def launcher(situation: Situation) -> Finding:
    """Whether the launcher's variables are complete and fit together."""
    topic = "launcher"
    shown = {name: text for name, text in config.snapshot(situation.env).items() if name not in _NOT_OF_THE_JOB}
    try:
        launch = config.detect(env=situation.env)
    except MissingVariable as error:
        return problem(
            topic,
            str(error),
            f"Set {error.variable} too; or unset the rest for a world of one; or let 'phalanx run -n 4 "
            "script.py' set them all.",
        )
    except ConfigError as error:
        listed = ", ".join(f"{name}={text}" for name, text in shown.items())
        return problem(
            topic,
            f"{error}. Set are: {listed}",
            "Correct the variable, or unset it and let 'phalanx run' or torchrun set it.",
        )
    if launch.launcher == "none":
        return ok(
            topic,
            "no launcher's variables are set: a script is a world of one ('phalanx run -n 4 script.py' starts four)",
        )
    found = _in_words(launch)
    others = [
        f"{name}={shown[name]}" for name in _SIZES if name in shown and shown[name].strip() != str(launch.world_size)
    ]
    if not others:
        return ok(topic, found)
    found += f"; {', '.join(others)} is set as well and not used"
    if launch.launcher in ("phalanx", "torchrun"):  # often started by srun or mpirun, once per host
        return ok(topic, found)
    return warning(
        topic, found, "Two launchers contradict each other. Unset the variables of the one that you do not mean."
    )


def _in_words(launch: Launch) -> str:
    """`rank 1 of 4 (2 on this host), started by torchrun, master 10.0.0.1:29500`."""
    here = "" if launch.single_host else f" ({launch.local_world_size} known to be on this host)"
    where = f", master {launch.master}" if launch.master else ""
    return (
        f"rank {launch.rank} of {launch.world_size}{here}, by {_LAUNCHERS.get(launch.launcher, launch.launcher)}{where}"
    )


@check("options")
def options(situation: Situation) -> Iterator[Finding]:
    """Whether the options in the environment are valid, their files readable and their names known."""
    topic = "options"
    unknown = config.unknown_variables(situation.env)
    if unknown:
        known = ", ".join(variable.name for variable in config.VARIABLES if variable.name.startswith("PHALANX_"))
        yield warning(
            topic, f"nothing reads {', '.join(unknown)}", f"Most likely misspelt. Unset, or use one of these: {known}."
        )
    try:
        chosen = Options.from_env(situation.env)
        check_tls(chosen.tls)
        level = config.log_level(situation.env)
        config.pure(situation.env)
        config.debug(situation.env)
    except ConfigError as error:
        yield problem(topic, str(error), "Correct the variable, or unset it: every option has a default that works.")
        return
    changed = [
        name for name in config.snapshot(situation.env) if name.startswith("PHALANX_") and name not in _OF_THE_JOB
    ]
    said = f"set in the environment and valid: {', '.join(changed)}" if changed else "all at their defaults"
    if chosen.tls is not None:
        said += "; connections are encrypted by TLS 1.3"
    if level is not None:
        said += f"; log level {config.snapshot(situation.env)['PHALANX_LOG']}"
    yield ok(topic, said)


_OF_THE_JOB = ("PHALANX_TOKEN", "PHALANX_TOKEN_FILE", "PHALANX_DIRECTORY", "PHALANX_RUN_ID", "PHALANX_LAST_WORDS")


@check("token")
def token(situation: Situation) -> Finding:
    """Whether the ranks can prove to each other that they belong to one job."""
    topic = "token"
    launch = situation.launch
    if launch is not None and launch.token is not None:
        return ok(topic, f"the job has a token ({len(launch.token)} bytes)")
    if situation.several_hosts:
        return problem(
            topic,
            "the job has no token, and not all of its ranks are known to be on this host",
            "Set PHALANX_TOKEN to the same secret on every host ('phalanx run --new-token' prints one), or "
            "PHALANX_TOKEN_FILE to a "
            "file with it that only you can read. If all ranks are on this host, set LOCAL_RANK and LOCAL_WORLD_SIZE.",
        )
    try:
        folder = config.runtime_dir(situation.env)
    except ConfigError as error:
        several = situation.world_size > 1
        return (problem if several else warning)(
            topic,
            str(error),
            "Ranks started by torchrun, mpirun or srun share their token through that folder. Set "
            "XDG_RUNTIME_DIR or TMPDIR as it says, "
            "or PHALANX_TOKEN to a secret. ('phalanx run' does not need it.)",
        )
    return ok(topic, f"none is set: ranks on this host share one through a private file in {folder}")
