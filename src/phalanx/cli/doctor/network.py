"""The host's name, its interfaces, the way to the master, and the ports."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from phalanx.errors import NoConnection
from phalanx.rendezvous.addresses import is_local
from phalanx.transports.tcp import is_loopback, route_to
from phalanx.types import Address

from .findings import Finding, Situation, check, ok, problem, warning
from .interfaces import Interface, holder, interfaces, port_free, resolve

__all__ = ["directory", "hostname", "master_port", "network_interfaces", "peer_ports", "route"]


@check("host name")
def hostname(situation: Situation) -> Finding:
    """Whether this host's own name leads to an address that other hosts can use."""
    topic, name = "host name", situation.hostname
    hosts_line = f"a line such as '192.0.2.7 {name}' in /etc/hosts, with this machine's address"
    try:
        addresses = resolve(name, situation.patience)
    except TimeoutError as error:
        return warning(
            topic,
            f"the name of this machine, {name}, could not be looked up: {error}",
            "Jobs that use the name start slowly or not at all. Repair the DNS settings (/etc/resolv.conf), "
            f"or add {hosts_line}.",
        )
    except OSError as error:
        return warning(
            topic,
            f"the name of this machine, {name}, does not resolve: {error.strerror}",
            "Phalanx does not need it (it takes the address that routes to the master), but Gloo and MPI do, "
            "and no other host can use it as "
            f"MASTER_ADDR. Add {hosts_line}.",
        )
    listed = ", ".join(addresses)
    if all(map(is_loopback, addresses)):
        return warning(
            topic,
            f"the name of this machine, {name}, resolves to loopback ({listed})",
            "Fine on a single machine. Across machines, ranks that announce this name cannot be reached (Gloo "
            "and MPI do; Phalanx "
            f"takes the address that routes to the master). Use an address for MASTER_ADDR, or put {hosts_line}.",
        )
    return ok(topic, f"{name} is {listed}")


@check("interfaces")
def network_interfaces(situation: Situation) -> Finding:
    """The interfaces, and whether the one that the user asked for is among them."""
    topic = "interfaces"
    present = interfaces()
    usable = [interface for interface in present if interface.up and interface.addresses]
    listed = "; ".join(map(str, usable)) or "none has an address"
    asked = situation.options.interface if situation.options else None
    if asked is not None:
        chosen = [interface for interface in usable if asked == interface.name or asked in interface.addresses]
        if not chosen:
            return problem(
                topic,
                f"PHALANX_INTERFACE={asked} is not an interface or address of this machine that is up ({listed})",
                "Set it to one of those, or unset it: then the interface that routes to the master is used.",
            )
        return ok(topic, f"peers use {chosen[0]} (PHALANX_INTERFACE)")
    if not any(not interface.loopback for interface in usable):
        found = f"no network but loopback ({listed})"
        advice = (
            "Jobs on this machine alone work. To span machines, connect it, or give the container a "
            "network (--network=host)."
        )
        return (problem if situation.several_hosts else warning)(topic, found, advice)
    return ok(topic, listed)


@check("route to the master")
def route(situation: Situation) -> Finding:
    """Whether the master's name resolves, and from which address of this host it is reached."""
    topic, master = "route to the master", situation.master
    if master is None:
        return ok(topic, "no master is set: only ranks on this machine (to look at one, add --master host:port)")
    try:
        addresses = resolve(master.host, situation.patience)
    except OSError as error:  # also TimeoutError
        return problem(
            topic,
            f"the master's host {master.host} does not resolve: {error.strerror or error}",
            "Check the spelling of MASTER_ADDR, or use the address of rank 0's machine in its place.",
        )
    if situation.several_hosts and all(map(is_loopback, addresses)):
        return _loopback_master(topic, situation.hostname, master)
    refusals = []
    for address in addresses:
        try:
            source = route_to(Address(address, master.port))
        except NoConnection as error:
            refusals.append(str(error))
            continue
        if is_local(address):
            return ok(topic, f"{master.host} is this machine ({address})")
        return ok(topic, f"{master.host} ({address}) is reached from {source}{_over(source, interfaces())}")
    return problem(
        topic,
        f"the master's host {master.host} cannot be reached: {'; '.join(refusals)}",
        "Check that this machine is on the master's network (ip route), and that the master's address is not "
        "of a private network of its own.",
    )


def _loopback_master(topic: str, own_name: str, master: Address) -> Finding:
    """Several hosts, and a master that is loopback: on each host another machine, or only here a name of its own."""
    if master.host == own_name:
        return warning(
            topic,
            f"{master.host} is this machine's own name and resolves to loopback here, while the job spans "
            "several hosts",
            "Other libraries would listen where no other host can reach them. Set MASTER_ADDR to the machine's "
            "address on every host.",
        )
    return problem(
        topic,
        f"{master.host} is loopback, which is a different machine on every host, and the job spans several",
        "Set MASTER_ADDR to the name or address of rank 0's machine, the same on every host.",
    )


def _over(source: str, present: list[Interface]) -> str:
    return next((f" over {interface.name}" for interface in present if source in interface.addresses), "")


@check("master port")
def master_port(situation: Situation) -> Finding:
    """Whether the master's port is free (here) or answers (elsewhere)."""
    topic, master = "master port", situation.master
    if master is None:
        return ok(topic, "no master is set: Phalanx takes a free port by itself")
    if master.port == 0:
        return ok(topic, "port 0: the system picks a free one")
    try:
        addresses = resolve(master.host, situation.patience)
    except OSError:
        return warning(topic, f"{master} was not tried: its host does not resolve", "See 'route to the master'.")
    here = [address for address in addresses if is_local(address)]
    taken_by_agent = bool(situation.launch and situation.launch.master_port_taken)
    if here:
        return _own_port(topic, master, here, taken_by_agent, situation)
    return _distant_port(topic, master, situation.patience)


def _own_port(topic: str, master: Address, addresses: list[str], agent: bool, situation: Situation) -> Finding:
    try:
        free = all(port_free(address, master.port) for address in addresses)
    except PermissionError:
        return problem(
            topic,
            f"only root may listen on port {master.port}",
            "Choose a port above 1023 for MASTER_PORT, such as 29500.",
        )
    except OSError as error:
        return problem(
            topic,
            f"no process could listen on {master}: {error.strerror}",
            "Choose another address or port for the master.",
        )
    if free:
        if agent:
            return warning(
                topic,
                f"{master} is this machine, and torchrun's agent should listen there but does not",
                "The agent may have ended. Start the job again.",
            )
        return ok(topic, f"{master} is this machine, and the port is free")
    who = holder(master.port, situation.proc)
    if agent:
        return ok(topic, f"torchrun's agent listens on {master}, as it should; Phalanx does not need that port")
    return problem(
        topic,
        f"port {master.port} of this machine is in use by "
        f"{who or 'another process (of a user whose processes cannot be seen)'}",
        "If that is the job you are looking at, all is well. If not, a new job cannot start there: end that "
        "process, or choose another "
        "port (MASTER_PORT, or --master host:port).",
    )


def _distant_port(topic: str, master: Address, patience: float) -> Finding:
    try:
        socket.create_connection(master, timeout=patience).close()
    except ConnectionRefusedError:
        return warning(
            topic,
            f"{master.host} answers, but nothing listens on port {master.port} (connection refused)",
            "Right as long as rank 0 has not started. If it has: check MASTER_PORT there, and that no firewall "
            "rejects the port.",
        )
    except TimeoutError:
        return problem(
            topic,
            f"{master} does not answer within {patience:g} s",
            "The machine is down, or a firewall drops the packets. Open the port between the machines of the "
            "job, and see whether "
            f"'ping {master.host}' works.",
        )
    except OSError as error:
        return problem(
            topic,
            f"{master} cannot be reached: {error.strerror or error}",
            "See 'route to the master'; check the machine and the network.",
        )
    return ok(topic, f"something listens on {master}")


@check("directory")
def directory(situation: Situation) -> Iterator[Finding]:
    """Inside a job of `phalanx run`: whether its directory, where ranks meet, can be reached."""
    place = situation.launch.directory if situation.launch else None
    if place is None:
        return
    topic = "directory"
    try:
        socket.create_connection(place, timeout=situation.patience).close()
    except OSError as error:
        yield problem(
            topic,
            f"the launcher's directory at {place} (PHALANX_DIRECTORY) cannot be reached: {error.strerror or error}",
            "The launcher has ended, or a firewall is in between. Start the job again with 'phalanx run'. If "
            "you set the variable yourself, "
            "unset it.",
        )
    else:
        yield ok(topic, f"the launcher's directory answers at {place}")


@check("peer ports")
def peer_ports(situation: Situation) -> Iterator[Finding]:
    """If a range of ports is set: whether enough of it is free."""
    chosen = situation.options.port_range if situation.options else None
    if chosen is None:
        return
    topic = "peer ports"
    low, high = chosen
    free = sum(port_free("0.0.0.0", port) for port in range(low, high + 1))
    need = situation.local_ranks
    found = (
        f"{free} of the {high - low + 1} ports in PHALANX_PORT_RANGE={low}-{high} are free, for {need} "
        "rank(s) on this host"
    )
    if free < need:
        yield problem(
            topic, found, "Each rank takes one. Widen the range, or end what holds those ports (ss -ltnp shows it)."
        )
    else:
        yield ok(topic, found)
