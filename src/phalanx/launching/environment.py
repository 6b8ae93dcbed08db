"""The variables that a launcher sets for its ranks: torchrun's, so that its scripts run unchanged, and our own."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
from collections.abc import Iterator, Mapping

from ..errors import ConfigError
from ..operating_system import hold_port, usable_cores
from ..types import Address
from .guardian import MARK

__all__ = ["OWN_VARIABLES", "cores", "new_run_id", "new_token", "rank_environment", "reserve_port"]

_DROPPED = (
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "PHALANX_LAST_WORDS",
    "PHALANX_WATCHED",
    "PHALANX_JOIN",
    "PHALANX_MIN_SIZE",
)
"""Variables of an outer launcher for its own ranks. Here no agent hosts torch's store."""

OWN_VARIABLES = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME "
    "MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS "
    f"PHALANX_TOKEN PHALANX_DIRECTORY PHALANX_LAST_WORDS PHALANX_WATCHED PHALANX_JOIN PHALANX_MIN_SIZE {MARK}".split()
)
"""Variables that users cannot set for the ranks: the launcher does."""


def cores() -> int:
    """The cores that this process may use, which a container or a batch system may have limited."""
    return usable_cores()


def new_token() -> str:
    """A fresh token: 256 random bits as text."""
    return secrets.token_hex(32)


def rank_environment(
    base: Mapping[str, str],
    rank: int,
    world_size: int,
    *,
    local_rank: int,
    local_world_size: int,
    master: Address,
    directory: Address,
    token: bytes,
    run_id: str,
    cores: int,
    node: int = 0,
    nodes: int = 1,
    last_words: str | None = None,
    restarts: int = 0,
    max_restarts: int = 0,
    watched: bool = False,
    extra: Mapping[str, str] | None = None,
    joins: int | None = None,
    min_size: int | None = None,
) -> dict[str, str]:
    """The whole environment of one rank: the launcher's own (`base`), the user's additions, and those of a rank.

    Args:
        cores: Those of this node; its ranks share them.
        last_words: The folder where the rank leaves its last traceback; None if it prints it.
        restarts: How often the ranks were started before.
        watched: The launcher reads the ranks' slates, and removes them.
        extra: The user's additions.
        joins: The number of a rank that comes to an elastic world later.
        min_size: The fewest ranks of an elastic job.
    """
    # By default each rank would start as many threads as there are cores, and they would get in each other's way.
    shared = local_world_size > 1 and "OMP_NUM_THREADS" not in base
    threads = {"OMP_NUM_THREADS": str(max(1, cores // local_world_size))} if shared else {}
    return {
        **{name: value for name, value in base.items() if name not in _DROPPED},
        **threads,
        "PYTHONUNBUFFERED": "1",
        **(extra or {}),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": master.host,
        "MASTER_PORT": str(master.port),
        "TORCHELASTIC_RUN_ID": _job_id(token),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "PHALANX_TOKEN": token.decode("utf-8", "surrogateescape"),
        "PHALANX_DIRECTORY": str(directory),
        **({"PHALANX_LAST_WORDS": last_words} if last_words is not None else {}),
        **({"PHALANX_JOIN": str(joins)} if joins is not None else {}),
        **({"PHALANX_MIN_SIZE": str(min_size)} if min_size is not None else {}),
        **({"PHALANX_WATCHED": "1"} if watched else {}),
        MARK: run_id,
    }


def _job_id(token: bytes) -> str:
    # The same on every node without a word between them, and it does not tell the token.
    return hashlib.sha256(b"phalanx job " + token).hexdigest()[:16]


def new_run_id(base: Mapping[str, str]) -> str:
    """The id that marks every process of a job. Inside another job it continues that one's, so that both find it."""
    outer, secret = base.get(MARK, ""), secrets.token_hex(16)
    return f"{outer}.{secret}" if outer else secret


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """A port of this machine that no process gets by chance, but that a rank can listen on.

    The socket is bound but does not listen: the kernel then does not hand the port out as a free one, while a socket
    with SO_REUSEADDR (as torch's store has) may bind and listen there. Where it could not, the port is only a free one.

    Raises:
        ConfigError: There is no free port.
    """
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            holder.bind(("", 0))
        except OSError as error:
            raise ConfigError(f"cannot reserve a port for MASTER_PORT: {error.strerror}") from None
        port = holder.getsockname()[1]
        if not hold_port():
            holder.close()
        yield port
