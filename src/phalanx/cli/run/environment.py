"""The variables that each rank gets: torchrun's, so that its scripts run unchanged, and Phalanx's own."""

from __future__ import annotations

import contextlib
import hashlib
import socket
from collections.abc import Iterator, Mapping

from phalanx.errors import ConfigError
from phalanx.operating_system import hold_port
from phalanx.types import Address

from .guardian import MARK
from .plan import RunPlan

__all__ = ["new_run_id", "rank_environment", "reserve_port"]

_DROPPED = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE")
"""Variables of an outer torchrun for its own ranks. Here no agent hosts torch's store."""


def rank_environment(
    plan: RunPlan,
    base: Mapping[str, str],
    local_rank: int,
    *,
    master: Address,
    directory: Address,
    token: bytes,
    run_id: str,
    last_words: str,
    cores: int,
    restarts: int = 0,
) -> dict[str, str]:
    """The whole environment of one rank: the launcher's own (`base`), the user's additions, and those of a rank.

    The `cores` of this node are shared among its ranks. `restarts`: how often they were started before.
    """
    rank = plan.first_rank + local_rank
    # By default each rank would start as many threads as there are cores, and they would get in each other's way.
    shared = plan.ranks > 1 and "OMP_NUM_THREADS" not in base
    threads = {"OMP_NUM_THREADS": str(max(1, cores // plan.ranks))} if shared else {}
    return {
        **{name: value for name, value in base.items() if name not in _DROPPED},
        **threads,
        "PYTHONUNBUFFERED": "1",
        **plan.extra,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(plan.ranks),
        "GROUP_RANK": str(plan.node),
        "GROUP_WORLD_SIZE": str(plan.nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(plan.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": master.host,
        "MASTER_PORT": str(master.port),
        "TORCHELASTIC_RUN_ID": _job_id(token),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "PHALANX_TOKEN": token.decode("utf-8", "surrogateescape"),
        "PHALANX_DIRECTORY": str(directory),
        "PHALANX_LAST_WORDS": last_words,
        MARK: run_id,
    }


def _job_id(token: bytes) -> str:
    # The same on every node without a word between them, and it does not tell the token.
    return hashlib.sha256(b"phalanx job " + token).hexdigest()[:16]


def new_run_id(secret: str, base: Mapping[str, str]) -> str:
    """The id that marks every process of a job. Inside another job it continues that one's, so that both find it."""
    outer = base.get(MARK, "")
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
