"""Each check meets the state it is for: a real one where this machine lets us make it, else one put in its place."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port

from phalanx import config
from phalanx.cli.doctor import CHECKS, Finding, Severity, Situation, examine, launching, limits, memory, network
from phalanx.cli.doctor import interfaces as host_network
from phalanx.config import Options
from phalanx.types import Address

pytestmark = pytest.mark.timeout(60)

NOBODY = 65534
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without anything that a launcher or a person set for Phalanx."""
    prefixes = ("PHALANX_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "GROUP_", "ROLE_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(prefixes) and name not in LAUNCHER_VARIABLES
    }
    return {**kept, **variables}


def doctor(*arguments: str, before: str = "", **variables: str) -> tuple[int, dict[str, Finding]]:
    """The real program in a process of its own, after `before` was run in it: exit code and findings by topic."""
    code = f"import resource, sys\n{before}\nfrom phalanx.cli import main\nmain(['doctor', '--json', *sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout, done.stderr
    rows = json.loads(done.stdout)["findings"]
    return done.returncode, {
        row["topic"]: Finding(row["topic"], Severity(row["status"]), row["found"], row["advice"])
        for row in reversed(rows)
    }


def as_nobody(expression: str) -> Finding:
    """The finding that an expression gives in a process that is not root: root is held to neither modes nor limits."""
    # The checks run once before: afterwards this user may not be able to import what they need.
    code = f"""
import os, resource, pathlib
from phalanx.cli.doctor import Situation, examine, limits, memory
list(examine(Situation()))
if os.getuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
finding = {expression}
print(finding.topic, finding.status.value, finding.found, finding.advice, sep=chr(10))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    topic, status, found, advice = done.stdout.splitlines()
    return Finding(topic, Severity(status), found, advice)


def launch(**variables: str) -> config.Launch:
    return config.detect(env=variables)


def two_hosts(**more: str) -> config.Launch:
    base = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1"}
    return launch(**{**base, "MASTER_PORT": "29500", "PHALANX_TOKEN": "secret", **more})


@contextlib.contextmanager
def listener(port: int = 0, backlog: int = 8) -> Iterator[Address]:
    with socket.create_server(("127.0.0.1", port), backlog=backlog) as server:
        yield Address("127.0.0.1", server.getsockname()[1])


def one(result: Finding | Any) -> Finding:
    """The only finding of a check."""
    if isinstance(result, Finding):
        return result
    (finding,) = result
    assert isinstance(finding, Finding)
    return finding


# -- the whole program -----------------------------------------------------------------------------------------------


def test_every_topic_is_told_and_everything_that_is_not_well_comes_with_advice() -> None:
    code, findings = doctor()
    assert {"launcher", "host name", "interfaces", "master port", "shared memory", "descriptors", "processes"} <= set(
        findings
    )
    assert {"native core", "packages", "system", "cores and memory", "memory files"} <= set(findings)
    for finding in findings.values():
        assert finding.found
        assert (finding.status is Severity.OK) == (not finding.advice), finding
    assert code == any(finding.status is Severity.PROBLEM for finding in findings.values())


def test_in_a_pipe_it_prints_plain_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "doctor"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert "\x1b" not in done.stdout
    assert not done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok       system: Phalanx ") for line in lines)
    assert "nothing here would stop a job" in lines[-1] or "a job would fail here" in lines[-1]


def test_on_a_terminal_it_draws_a_table() -> None:
    main, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", "doctor"],
        env=clean_environment(TERM="xterm-256color", COLUMNS="100"),
        stdin=other,
        stdout=other,
        stderr=other,
    )
    os.close(other)
    seen = b""
    with contextlib.suppress(OSError):  # how a terminal says that its last writer is gone
        while block := os.read(main, 65536):
            seen += block
    os.close(main)
    process.wait(20)
    text = seen.decode()
    assert "\x1b[" in text
    assert "✓" in text
    assert "system" in text
    assert "Traceback" not in text


def test_a_wrong_master_is_refused_with_what_would_be_right() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "doctor", "--master", "nowhere"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    assert "--master 'nowhere' is not valid (expected host:port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_check_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(situation: Situation) -> Finding:
        raise RuntimeError("the kernel is made of cheese")

    monkeypatch.setitem(CHECKS, "descriptors", broken)
    findings = {finding.topic: finding for finding in examine(Situation())}
    assert findings["descriptors"].status is Severity.WARNING
    assert "cheese" in findings["descriptors"].found
    assert "processes" in findings


# -- the launcher's variables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0"}, ["WORLD_SIZE"]),
        ({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, ["4"]),
        ({"RANK": "two", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, ["RANK", "two"]),
        ({"PHALANX_HEARTBEAT": "soon"}, ["PHALANX_HEARTBEAT", "soon"]),
    ],
)
def test_variables_that_do_not_add_up_are_a_problem(variables: dict[str, str], words: list[str]) -> None:
    code, findings = doctor(**variables)
    said = [
        finding.found for finding in findings.values() if finding.topic in ("launcher", "options") and finding.advice
    ]
    assert code == 1
    assert said
    assert all(word in " ".join(said) for word in words), findings


def test_no_variables_are_a_world_of_one() -> None:
    _, findings = doctor()
    assert findings["launcher"].status is Severity.OK
    assert "phalanx run" in findings["launcher"].found


def test_complete_variables_are_told_in_words() -> None:
    port = str(free_port())
    _, findings = doctor(
        RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    assert findings["launcher"].status is Severity.OK
    assert "rank 1 of 2" in findings["launcher"].found


def test_several_hosts_need_a_token_and_it_is_never_shown() -> None:
    base = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    base["MASTER_PORT"] = str(free_port())
    code, findings = doctor(**base)
    assert code == 1
    assert findings["token"].status is Severity.PROBLEM
    assert "PHALANX_TOKEN" in findings["token"].advice
    _, findings = doctor(**base, PHALANX_TOKEN="open sesame, said he")
    assert findings["token"].status is Severity.OK
    assert "sesame" not in str(findings)


def test_two_launchers_that_disagree_are_pointed_out() -> None:
    _, findings = doctor(
        RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", SLURM_PROCID="3", SLURM_NTASKS="8"
    )
    assert findings["launcher"].status is Severity.WARNING
    assert "SLURM_NTASKS=8" in findings["launcher"].found
    assert "rank 0 of 2" in findings["launcher"].found
    assert "Unset" in findings["launcher"].advice


def test_a_runtime_folder_that_cannot_be_written_is_a_problem_for_a_job_without_a_token(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folders = {"XDG_RUNTIME_DIR": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "file")}
    _, findings = doctor(**folders)
    assert findings["token"].status is Severity.WARNING
    job = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    job |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    _, findings = doctor(**folders, **job)
    assert findings["token"].status is Severity.PROBLEM
    assert str(tmp_path) in findings["token"].found
    assert "XDG_RUNTIME_DIR" in findings["token"].advice
    _, findings = doctor(**folders, **job, PHALANX_TOKEN="secret")
    assert findings["token"].status is Severity.OK


def test_a_misspelt_option_is_pointed_out() -> None:
    _, findings = doctor(PHALANX_HARTBEAT="2")
    assert findings["options"].status is Severity.WARNING
    assert "PHALANX_HARTBEAT" in findings["options"].found
    assert "PHALANX_HEARTBEAT," in findings["options"].advice


def test_tls_files_that_are_not_there_are_a_problem(tmp_path: Path) -> None:
    names = {f"PHALANX_TLS_{name}": str(tmp_path / "missing.pem") for name in ("CERT", "KEY", "CA")}
    code, findings = doctor(**names)
    assert code == 1
    assert findings["options"].status is Severity.PROBLEM
    assert "missing.pem" in findings["options"].found


# -- the network -----------------------------------------------------------------------------------------------------


def test_a_host_name_that_is_not_known() -> None:
    finding = one(network.hostname(Situation(hostname="no-such-host.invalid")))
    assert finding.status is Severity.WARNING
    assert "no-such-host.invalid" in finding.found
    assert "/etc/hosts" in finding.advice


def test_a_host_name_that_is_loopback() -> None:
    finding = one(network.hostname(Situation(hostname="localhost")))
    assert finding.status is Severity.WARNING
    assert "resolves to loopback" in finding.found


def test_a_host_name_with_an_address() -> None:
    assert one(network.hostname(Situation(hostname="192.0.2.1"))).status is Severity.OK


def test_a_resolver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(30) and [])
    finding = one(network.hostname(Situation(hostname="slow.example", patience=0.1)))
    answered.set()
    assert finding.status is Severity.WARNING
    assert "no answer within 0.1 s" in finding.found


def test_interfaces_are_listed_with_their_addresses() -> None:
    loopback = next(interface for interface in host_network.interfaces() if interface.loopback)
    assert loopback.up
    assert "127.0.0.1" in loopback.addresses


@pytest.mark.parametrize("asked", ["nosuch0", "192.0.2.99"])
def test_an_interface_that_is_not_there(asked: str) -> None:
    finding = one(network.network_interfaces(Situation(options=Options(interface=asked))))
    assert finding.status is Severity.PROBLEM
    assert asked in finding.found
    assert "127.0.0.1" in finding.found


@pytest.mark.parametrize("asked", ["lo", "127.0.0.1"])
def test_an_interface_that_was_asked_for(asked: str) -> None:
    finding = one(network.network_interfaces(Situation(options=Options(interface=asked))))
    assert finding.status is Severity.OK
    assert "lo 127.0.0.1" in finding.found


def test_nothing_but_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    only = [host_network.Interface("lo", True, True, ("127.0.0.1",)), host_network.Interface("eth0", False, False, ())]
    monkeypatch.setattr(network, "interfaces", lambda: only)
    assert one(network.network_interfaces(Situation())).status is Severity.WARNING
    assert one(network.network_interfaces(Situation(launch=two_hosts()))).status is Severity.PROBLEM


def test_a_master_whose_name_is_not_known() -> None:
    code, findings = doctor("--master", "no-such-host.invalid:29500")
    assert code == 1
    assert findings["route to the master"].status is Severity.PROBLEM
    assert "no-such-host.invalid" in findings["route to the master"].found
    assert findings["master port"].status is Severity.WARNING


def test_a_master_that_cannot_be_routed_to() -> None:
    # The kernel gives no route to the broadcast address to a socket that did not ask for broadcasts.
    finding = one(network.route(Situation(master=Address("255.255.255.255", 29500))))
    assert finding.status is Severity.PROBLEM
    assert "no route to 255.255.255.255" in finding.found


def test_a_loopback_master_for_several_hosts() -> None:
    job = two_hosts(MASTER_ADDR="localhost")
    finding = one(network.route(Situation(launch=job, master=Address("localhost", 29500))))
    assert finding.status is Severity.PROBLEM
    assert "a different machine on every host" in finding.found
    named_so = Situation(launch=job, master=Address("localhost", 29500), hostname="localhost")
    assert one(network.route(named_so)).status is Severity.WARNING


def test_a_master_on_this_machine() -> None:
    finding = one(network.route(Situation(master=Address("127.0.0.1", 29500))))
    assert finding.status is Severity.OK
    assert "is this machine" in finding.found


def test_a_distant_master_is_shown_with_the_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "is_local", lambda _: False)
    finding = one(network.route(Situation(master=Address("127.0.0.1", 29500))))
    assert finding.found == "127.0.0.1 (127.0.0.1) is reached from 127.0.0.1 over lo"


def test_a_port_that_is_in_use_names_the_process() -> None:
    with listener() as taken:
        code, findings = doctor("--master", str(taken))
    assert code == 1
    assert findings["master port"].status is Severity.PROBLEM
    assert f"process {os.getpid()}" in findings["master port"].found
    assert "another port" in findings["master port"].advice


def test_a_port_that_is_free() -> None:
    _, findings = doctor("--master", f"127.0.0.1:{free_port()}")
    assert findings["master port"].status is Severity.OK


def test_torchruns_agent_may_hold_the_port_and_should() -> None:
    with listener() as taken:
        job = launch(
            RANK="0",
            WORLD_SIZE="2",
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR=taken.host,
            MASTER_PORT=str(taken.port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RUN_ID="job",
        )
        assert one(network.master_port(Situation(launch=job, master=taken))).status is Severity.OK
    finding = one(network.master_port(Situation(launch=job, master=taken)))
    assert finding.status is Severity.WARNING
    assert "agent" in finding.found


def test_a_port_that_only_root_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, port: int) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(network, "port_free", refuse)
    finding = one(network.master_port(Situation(master=Address("127.0.0.1", 80))))
    assert finding.status is Severity.PROBLEM
    assert "only root" in finding.found


def test_a_distant_port_refused_answering_and_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "is_local", lambda _: False)  # loopback stands for another machine

    def look(master: Address) -> Finding:
        return one(network.master_port(Situation(master=master, patience=0.3)))

    refused = look(Address("127.0.0.1", free_port()))
    assert refused.status is Severity.WARNING
    assert "connection refused" in refused.found
    with listener() as master:
        assert look(master).status is Severity.OK
    with listener(backlog=0) as master, contextlib.ExitStack() as waiting:
        for _ in range(4):  # a full queue: the kernel drops what comes next, as a firewall does
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(master)
        silent = look(master)
    assert silent.status is Severity.PROBLEM
    assert "does not answer within 0.3 s" in silent.found


def test_the_launchers_directory_is_tried() -> None:
    def job(place: Address) -> Situation:
        return Situation(launch=two_hosts(PHALANX_DIRECTORY=str(place)))

    with listener() as place:
        assert one(network.directory(job(place))).status is Severity.OK
    gone = one(network.directory(job(place)))
    assert gone.status is Severity.PROBLEM
    assert str(place) in gone.found
    assert not list(network.directory(Situation()))


def test_too_few_free_ports_for_the_ranks() -> None:
    with listener() as taken:
        only = Options(port_range=(taken.port, taken.port))
        finding = one(network.peer_ports(Situation(options=only)))
        assert finding.status is Severity.PROBLEM
        assert finding.found.startswith("0 of the 1 ports")
    assert one(network.peer_ports(Situation(options=only))).status is Severity.OK
    assert one(network.peer_ports(Situation(options=only, launch=two_hosts()))).status is Severity.PROBLEM
    assert not list(network.peer_ports(Situation(options=Options())))


# -- memory ----------------------------------------------------------------------------------------------------------


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    finding = one(memory.shared_memory(Situation(shm=tmp_path / "shm")))
    assert finding.status is Severity.WARNING
    assert "No such file" in finding.found


def test_shared_memory_that_cannot_be_written() -> None:
    # Not in tmp_path, which another user cannot even enter.
    folder = Path("/dev/shm") / f"phalanx-test-{os.getpid()}"
    folder.mkdir(mode=0o555)
    try:
        finding = as_nobody(f"memory.shared_memory(Situation(shm=pathlib.Path({str(folder)!r})))")
    finally:
        folder.rmdir()
    assert finding.status is Severity.PROBLEM
    assert "Permission denied" in finding.found
    assert "chmod 1777" in finding.advice


def test_shared_memory_that_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[0:5] = [4096, 4096, 16384, 16384, 16384]  # 64 MiB, what a container gets
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    finding = one(memory.shared_memory(Situation(shm=tmp_path)))
    assert finding.status is Severity.WARNING
    assert "64.0 MiB free of 64.0 MiB" in finding.found
    assert "--shm-size" in finding.advice


def test_memory_files_under_a_limit_on_file_sizes() -> None:
    _, findings = doctor(before="resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))")
    assert findings["memory files"].status is Severity.WARNING
    assert "File too large" in findings["memory files"].found
    _, findings = doctor()
    assert findings["memory files"].status is Severity.OK


# -- limits ----------------------------------------------------------------------------------------------------------


def test_few_descriptors() -> None:
    _, findings = doctor(before="resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))")
    assert findings["descriptors"].status is Severity.WARNING
    assert "200 files and sockets" in findings["descriptors"].found
    assert "--ulimit nofile" in findings["descriptors"].advice


def test_too_few_descriptors_for_this_world() -> None:
    port = str(free_port())
    world = {"RANK": "0", "WORLD_SIZE": "500", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "500", "MASTER_ADDR": "127.0.0.1"}
    code, findings = doctor(
        before="resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))", MASTER_PORT=port, **world
    )
    assert code == 1
    assert findings["descriptors"].status is Severity.PROBLEM
    assert "a world of 500" in findings["descriptors"].found
    assert "ulimit -n 4096" in findings["descriptors"].advice


def test_too_few_processes() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    lowered = f"resource.setrlimit(resource.RLIMIT_NPROC, (4, {hard}))"
    finding = as_nobody(f"({lowered}, limits.processes(Situation()))[1]")
    assert finding.status is Severity.PROBLEM
    assert "may run 4 processes" in finding.found
    assert "ulimit -u" in finding.advice


def control_groups(tmp_path: Path, files: dict[str, str], own: str = "0::/job/task") -> Situation:
    """A machine with these control groups. (Making real ones would need the right to change this one's.)"""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(own + "\n")
    (proc / "meminfo").write_text("MemTotal:       16777216 kB\n")
    for name, text in files.items():
        path = groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return Situation(proc=proc, cgroups=groups)


@pytest.mark.parametrize(
    ("own", "folder"), [("0::/job/task", "job"), ("5:pids:/job/task\n0::/", "pids/job")], ids=["version 2", "version 1"]
)
def test_the_containers_limit_on_processes(tmp_path: Path, own: str, folder: str) -> None:
    files = {f"{folder}/pids.max": "100", f"{folder}/pids.current": "97", f"{folder}/task/pids.max": "max"}
    finding = one(limits.processes(control_groups(tmp_path, files, own)))
    assert finding.status is Severity.PROBLEM
    assert "may run 100 processes and threads (pids.max) and runs 97: room for 3 more" in finding.found
    assert "--pids-limit" in finding.advice


@pytest.mark.parametrize(
    ("own", "files"),
    [
        (
            "0::/job/task",
            {"job/cpu.max": "50000 100000", "job/task/cpu.max": "max 100000", "job/memory.max": "67108864"},
        ),
        (
            "3:cpu,cpuacct:/\n2:memory:/job",
            {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "memory/job/memory.limit_in_bytes": "67108864"},
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_the_containers_share_of_cores_and_memory(tmp_path: Path, own: str, files: dict[str, str]) -> None:
    cores, memory_share = limits.machine_share(control_groups(tmp_path, files, own))
    assert cores.status is Severity.WARNING
    assert cores.found.startswith("0.5 of ")
    assert "64.0 MiB of memory (the container's limit)" in cores.found
    assert memory_share.status is Severity.WARNING
    assert "64.0 MiB of memory for each" in memory_share.found


def test_more_ranks_than_cores() -> None:
    many = str((os.cpu_count() or 1) + 1)
    job = launch(
        RANK="0", WORLD_SIZE=many, LOCAL_RANK="0", LOCAL_WORLD_SIZE=many, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"
    )
    finding = next(iter(limits.machine_share(Situation(launch=job))))
    assert finding.status is Severity.WARNING
    assert f"for {many} ranks" in finding.found


# -- software --------------------------------------------------------------------------------------------------------


def test_without_the_core_the_reason_is_told() -> None:
    _, findings = doctor(PHALANX_PURE="1")
    assert findings["native core"].status is Severity.WARNING
    assert "PHALANX_PURE" in findings["native core"].found


def install(folder: Path, name: str, version: str) -> None:
    """A package that is there, and that fails when imported."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise SystemExit('the doctor imported me')")
    (folder / f"{name}-{version}.dist-info").mkdir()
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )


def on_path(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def test_packages_are_told_without_being_imported(tmp_path: Path) -> None:
    install(tmp_path, "torch", "97.98.99")
    _, findings = doctor(PYTHONPATH=on_path(tmp_path))
    assert "torch 97.98.99" in findings["packages"].found
    assert "NumPy " in findings["packages"].found


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n", Severity.OK, "mpirun (Open MPI) 5.0.11"),
        ("#!/bin/sh\necho 'libmpi.so: not found' >&2\nexit 127\n", Severity.WARNING, "libmpi.so: not found"),
    ],
)
def test_an_mpirun_on_the_path(tmp_path: Path, script: str, status: Severity, words: str) -> None:
    (tmp_path / "mpirun").write_text(script)
    (tmp_path / "mpirun").chmod(0o755)
    _, findings = doctor(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert findings["MPI launcher"].status is status
    assert words in findings["MPI launcher"].found


def test_mpi4py_without_mpirun(tmp_path: Path) -> None:
    install(tmp_path, "mpi4py", "4.1.0")
    _, findings = doctor(PYTHONPATH=on_path(tmp_path), PATH=str(tmp_path))
    assert findings["MPI launcher"].status is Severity.WARNING
    assert "mpi4py is installed" in findings["MPI launcher"].found


@pytest.mark.parametrize(
    ("library", "launcher", "status", "words"),
    [
        ("Open MPI", "mpirun (Open MPI) 5.0.11", Severity.OK, "mpi4py 4.1.0 uses Open MPI 5.0.11"),
        ("Open MPI", "HYDRA build details:", Severity.WARNING, "but the mpirun on the PATH is MPICH's"),
        (
            "",
            "HYDRA build details:",
            Severity.WARNING,
            "mpi4py 4.1.0 finds no MPI: RuntimeError: cannot load MPI library",
        ),
    ],
)
def test_the_mpi_that_mpi4py_finds(tmp_path: Path, library: str, launcher: str, status: Severity, words: str) -> None:
    install(tmp_path, "mpi4py", "4.1.0")
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass\n")
    known = f"def get_vendor(): return ({library!r}, (5, 0, 11))\ndef Get_library_version(): return 'a version'\n"
    (tmp_path / "mpi4py" / "MPI.py").write_text(known if library else "raise RuntimeError('cannot load MPI library')\n")
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho '{launcher}'\n")
    (tmp_path / "mpirun").chmod(0o755)
    _, findings = doctor(PYTHONPATH=on_path(tmp_path), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert findings["MPI library"].status is status
    assert words in findings["MPI library"].found


def test_the_situation_of_this_process_has_the_master_of_its_variables() -> None:
    present = launching.present_situation(Address("192.0.2.1", 1))
    assert present.master == Address("192.0.2.1", 1)
