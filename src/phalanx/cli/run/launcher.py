"""Starts a job on this node: port, directory, guardian, ranks; then the supervisor; then everything is given back."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx.errors import ConfigError
from phalanx.launching.environment import cores, new_run_id, new_token, rank_environment, reserve_port
from phalanx.launching.guardian import end_all
from phalanx.slate.files import job_of, why_no_room
from phalanx.types import Address

from .elastic import ElasticSupervisor
from .events import LauncherMailbox, Signals, logs_to
from .monitor import JobMonitor
from .output import Console, RankOutput
from .plan import RunPlan
from .processes import Guardian, LocalRank, Processes
from .supervisor import Supervisor
from .upstream import Upstream
from .views import open_views
from .world import HostedWorld, JoinedWorld, LaunchedWorld, WatchedWorld
from .writer import OutputWriter

if TYPE_CHECKING:
    from phalanx.config import Options
    from phalanx.seeing.slates import SlateSource

__all__ = ["launch"]

LOOPBACK = "127.0.0.1"
ANY_RANK = 0xFFFF_FFFE
"""As in `phalanx.wire.handshake`: the directory numbers the ranks that join from elsewhere."""


def launch(
    plan: RunPlan, *, base: Mapping[str, str], options: Options, colour: bool, upstream: Upstream | None = None
) -> int:
    """Runs a job on this node until its end, again and again if it fails and `plan.max_restarts` allows it.

    It acts on signals and reaps every child of this process, so it must run in the main thread of a process of its own.

    Args:
        plan: What to run.
        base: The environment that the ranks inherit.
        options: For the directory.
        colour: Whether colour is allowed on a terminal.
        upstream: The controller of a job on several hosts, if there is one.

    Returns:
        The exit code: 0, that of the rank that failed, or 128 and the signal.

    Raises:
        ConfigError: The job could not be started.
    """
    _open_standard_descriptors()
    if plan.elastic is not None:  # ranks are started again one by one
        return _attempt(plan, 0, base=base, options=options, colour=colour, upstream=upstream)[0]
    for restarts in range(plan.max_restarts):
        code, failed = _attempt(plan, restarts, base=base, options=options, colour=colour, upstream=upstream)
        if not failed:
            return code
    return _attempt(plan, plan.max_restarts, base=base, options=options, colour=colour, upstream=upstream)[0]


def _attempt(
    plan: RunPlan,
    restarts: int,
    *,
    base: Mapping[str, str],
    options: Options,
    colour: bool,
    upstream: Upstream | None,
) -> tuple[int, bool]:
    """Runs the job once: its exit code, and whether it failed by itself, not by a signal to the launcher."""
    token = plan.token or new_token().encode()
    run_id = new_run_id(base)
    with contextlib.ExitStack() as stack:
        mailbox = LauncherMailbox()
        stack.callback(mailbox.close)
        signals = stack.enter_context(Signals.caught(mailbox))
        stack.enter_context(logs_to(mailbox))
        writer = OutputWriter(mailbox.wake)
        stack.callback(writer.close)
        log_dir = plan.log_dir / f"restart-{restarts}" if plan.log_dir is not None and restarts else plan.log_dir
        far = upstream is not None and upstream.colour
        console = Console(writer, prefix=plan.prefix, colour=colour, far_terminal=far, log_dir=log_dir)
        stack.callback(console.close)
        stack.callback(writer.close)
        if upstream is not None:
            upstream.attach(console.err, signals, mailbox, writer)
        master = plan.master or Address(LOOPBACK, 0)
        if master.port == 0:
            master = Address(master.host, stack.enter_context(reserve_port()))
        world = _open_world(plan, master, token, options, mailbox)
        stack.callback(world.close)
        last_words = stack.enter_context(_private_folder())
        guardian = Guardian(run_id, last_words, plan.grace if plan.elastic is not None else 0.0)
        stack.callback(guardian.dismiss)
        spare = [guardian.pid] if world.pid is None else [guardian.pid, world.pid]
        outlive = plan.elastic is not None
        processes = Processes(run_id, last_words=last_words, spare=spare, outlive_launcher=outlive)
        # Whatever goes wrong from here on, no process is left.
        stack.callback(end_all, processes.find, processes.reap)
        outputs: dict[LocalRank, tuple[RankOutput, RankOutput]] = {}
        available = cores()

        def start(local_rank: int, joins: int | None) -> tuple[LocalRank, tuple[RankOutput, RankOutput]]:
            """Starts the rank of a place on this node; one that joins later has another number."""
            environment = rank_environment(
                base,
                plan.first_rank + local_rank,
                plan.world_size,
                local_rank=local_rank,
                local_world_size=plan.ranks,
                node=plan.node,
                nodes=plan.nodes,
                master=master,
                directory=world.address,
                token=token,
                run_id=run_id,
                last_words=last_words,
                cores=available,
                restarts=restarts,
                max_restarts=plan.max_restarts,
                watched=True,
                extra=plan.extra,
                joins=joins,
                min_size=plan.elastic[0] if plan.elastic is not None else None,
            )
            number = plan.first_rank + local_rank if joins is None or plan.join is not None else joins
            rank = processes.start(number, plan.command, environment)
            return rank, (
                console.connect(rank.rank, rank.stdout, "stdout"),
                console.connect(rank.rank, rank.stderr, "stderr"),
            )

        for local_rank in range(plan.ranks):
            if signals.told_to_end:  # those that were started are ended by the supervisor
                break
            rank, pipes = start(local_rank, None if plan.join is None else ANY_RANK)
            outputs[rank] = pipes
        parts = {
            "console": console,
            "writer": writer,
            "world": world,
            "mailbox": mailbox,
            "signals": signals,
            "upstream": upstream,
            "monitor": _watch_job(plan, world.address, token, options, console, upstream),
        }
        supervisor: Supervisor
        if plan.elastic is not None or plan.join is not None:
            if plan.elastic is not None and plan.master is not None:
                console.err.say(f"phalanx: other hosts join with `phalanx join {world.address} …`")
            supervisor = ElasticSupervisor(
                plan, processes, outputs, start=start, max_restarts=0 if plan.join else plan.max_restarts, **parts
            )
        else:
            supervisor = Supervisor(plan, processes, outputs, **parts)  # type: ignore[arg-type]
        code = supervisor.run()
        if supervisor.failed and restarts < plan.max_restarts and plan.elastic is None:
            console.err.say(f"phalanx: starting all ranks again ({restarts + 1} of {plan.max_restarts} times)")
        return code, supervisor.failed


def _watch_job(
    plan: RunPlan, directory: Address, token: bytes, options: Options, console: Console, upstream: Upstream | None
) -> JobMonitor:
    """Watches the job, and shows it as the plan says.

    Raises:
        ConfigError: A file cannot be written, or there is no port for the page.
    """
    if plan.world_size == 1 and plan.elastic is None and plan.join is None:
        if plan.shown:
            console.err.say(
                f"phalanx: {', '.join(plan.shown)}: a job of one rank has nothing to show (it waits for nobody)"
            )
        return JobMonitor(job_of(token, str(directory)))
    no_room = why_no_room(plan.ranks)
    if no_room:
        what = "`phalanx top`, --page, --trace and --metrics do not see all ranks"
        console.err.say(f"phalanx: {what}, because there is no room for their notes: {no_room}")
    views = open_views(plan, upstream, console.err.say)

    def afar() -> SlateSource:
        from phalanx.seeing.remote import RemoteSlates

        return RemoteSlates(directory, token, options)

    several = plan.nodes > 1 and plan.node == 0
    return JobMonitor(job_of(token, str(directory)), views, afar if several else None)


def _open_world(
    plan: RunPlan, master: Address, token: bytes, options: Options, mailbox: LauncherMailbox
) -> LaunchedWorld:
    from phalanx.transports.tcp import check_tls

    check_tls(options.tls)  # here, or its error would be taken for one about the port
    if plan.join is not None:
        return JoinedWorld(plan.join)
    others_may_join = plan.elastic is not None and plan.master is not None
    if plan.nodes == 1 and not others_may_join:
        bind = Address(LOOPBACK, plan.directory_port or 0)
    else:
        bind = Address(master.host, plan.directory_port or master.port + 1)
    if plan.node > 0:
        return WatchedWorld(
            plan.world_size, address=bind, node=plan.node, token=token, options=options, on_end=mailbox.world_ended
        )
    try:
        return HostedWorld(
            plan.world_size,
            bind=bind,
            token=token,
            options=options,
            several_nodes=plan.nodes > 1 or others_may_join,
            on_end=mailbox.world_ended,
            on_change=mailbox.world_changed if plan.elastic is not None else None,
            elastic=plan.elastic[1] if plan.elastic is not None else 0,
        )
    except ConfigError as error:
        hint = "--directory-port chooses another port"
        if plan.nodes > 1:
            hint = f"node 0 must run on the master's machine, here {master.host}; {hint}, the same on every node"
        raise ConfigError(f"the directory {error} ({hint})") from None


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that only this user can read.

    Raises:
        ConfigError: There is no place for it.
    """
    try:
        return tempfile.TemporaryDirectory(prefix="phalanx-run-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make a folder for temporary files: {error.strerror} (TMPDIR names another)"
        ) from None


def _open_standard_descriptors() -> None:
    """Opens standard descriptors that the parent process closed, so that no pipe of ours takes their place."""
    opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
    while opened <= 2:
        os.set_inheritable(opened, True)
        opened = os.open(os.devnull, os.O_RDWR)
    os.close(opened)
