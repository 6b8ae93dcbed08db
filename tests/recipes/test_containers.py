"""The recipes for Docker and Kubernetes, as far as they can be tested without either.

The files pass a linter or a schema. Then what they start is started here, with the variables that they set, in
namespaces of Linux, which is what containers are made of: each has a network, processes and a /dev/shm of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tests.hosts.network import Host, Network, why_not
from tests.launchers.processes import Job, Jobs, finish_all, wait_until
from tests.recipes.clients import PROGRAMS, ROOT, recipe, said

pytestmark = recipe("yaml", "jsonschema", "kubernetes_validate")

FOLDER = PROGRAMS / "containers"
PROGRAM = FOLDER / "train.py"
TOKEN = "the secret of this job"
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--uts", "sh", "-c")
# 1 MB, where Docker gives 64.
SMALL_SHM = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$0" "$@"'


@pytest.fixture
def network() -> Iterator[Network]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Network() as made:
        yield made


@pytest.fixture
def jobs(network: Network, tmp_path: Path) -> Iterator[Jobs]:
    """Ends before the network does."""
    started = Jobs(tmp_path)
    yield started
    started.clean_up()


def documents(name: str) -> list[dict[str, Any]]:
    import yaml

    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def container(jobs: Jobs, host: Host, command: list[str], env: dict[str, str]) -> Job:
    """Starts a command of an image as its first process, in a container on a host."""
    words = [*CONTAINER, SMALL_SHM, str(Path(sys.executable).with_name(command[0])), *command[1:]]
    return jobs.start("ip", "netns", "exec", host.namespace, *words, env=env, cwd=FOLDER)


def check_ranks(started: list[Job], ranks: int) -> None:
    """All ranks are there, and have the same weights."""
    finish_all(started, limit=120)
    lines = sorted(line for job in started for line in said(job.out))
    assert [line.partition(":")[0] for line in lines] == [f"rank {rank} of {ranks}" for rank in range(ranks)]
    assert {line.partition(": ")[2] for line in lines} == {"[1. 2. 3. 4. 5. 6. 7. 8.]"}


# -- Docker ----------------------------------------------------------------------------------------------------------


def dockerfile() -> str:
    return (FOLDER / "Dockerfile").read_text(encoding="utf-8")


def exec_form(instruction: str) -> list[str]:
    """The last ENTRYPOINT or CMD of the Dockerfile."""
    return list(json.loads(re.findall(rf"^{instruction} (\[.*\])$", dockerfile(), re.M)[-1]))


def test_the_dockerfile_passes_its_linter() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, FOLDER / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_what_the_dockerfile_copies_is_there() -> None:
    sources = re.findall(r"^COPY (?!--from)(\S+)", dockerfile(), re.M)
    assert sources == [".", "examples/recipes/containers/train.py"]
    assert all((ROOT / source).exists() for source in sources)


def test_the_wheel_of_the_dockerfile_installs(tmp_path: Path) -> None:
    """Without the core, which takes minutes to compile: `make test` compiles it."""
    (wheel,) = re.findall(r"^RUN pip (wheel .*)$", dockerfile(), re.M)
    (install,) = re.findall(r"^RUN pip (install .*) && ", dockerfile(), re.M)
    wheels = str(tmp_path / "wheels")
    words = [word.replace("/wheels", wheels).replace("/source", str(ROOT)) for word in shlex.split(wheel)]
    env = {"PHALANX_BUILD_CORE": "0", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    pip = [sys.executable, "-m", "pip"]
    run(*pip, *words, env=env)
    (made,) = Path(wheels).glob("*.whl")

    run(sys.executable, "-m", "venv", str(tmp_path / "image"))
    python = str(tmp_path / "image" / "bin" / "python")
    run(python, "-m", "pip", *install.replace("/wheels/*.whl", str(made)).split())
    command = [
        str(tmp_path / "image" / "bin" / word) if word == "phalanx" else word for word in exec_form("ENTRYPOINT")
    ]
    output = run(*command, "-n", "2", "train.py", env=env)
    assert len(said(output)) == 2


def run(*command: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=FOLDER, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_container(network: Network, jobs: Jobs) -> None:
    """As the first process, and with arrays larger than /dev/shm."""
    check_ranks([container(jobs, network.first, [*exec_form("ENTRYPOINT"), "-n", "2", "train.py"], {})], 2)
    big = jobs.folder / "big.py"
    big.write_text("import numpy as np, phalanx as px\nprint(px.init().all_reduce(np.ones(2**23)).sum() == 2**24)\n")
    job = container(jobs, network.first, [*exec_form("ENTRYPOINT"), "-n", "2", str(big)], {})
    finish_all([job])
    assert said(job.out) == ["True", "True"]


def test_a_container_that_may_do_nothing(network: Network, jobs: Jobs) -> None:
    """As under `docker run --cap-drop all --security-opt no-new-privileges --read-only --tmpfs /tmp`."""
    may_nothing = ["setpriv", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    read_only = 'mount -o remount,ro,bind / && mount -t tmpfs -o size=1m none /tmp && exec "$0" "$@"'
    words = [*CONTAINER, read_only, *may_nothing, "env", "-u", "XDG_RUNTIME_DIR", "HOME=/", sys.executable]
    job = jobs.start("ip", "netns", "exec", network.first.namespace, *words, "-m", "phalanx", "run", "-n", "2", PROGRAM)
    check_ranks([job], 2)


def test_docker_stop(network: Network, jobs: Jobs) -> None:
    """SIGTERM to the first process ends all ranks, well before Docker would kill them."""
    waits = jobs.folder / "waits.py"
    waits.write_text("import phalanx as px, time\npx.init().barrier()\nprint('ready', flush=True)\ntime.sleep(1000)\n")
    job = container(jobs, network.first, [*exec_form("ENTRYPOINT"), "-n", "2", str(waits)], {})
    wait_until(lambda: job.out.count("ready") == 2, "the ranks")
    (launcher,) = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    os.kill(int(launcher), signal.SIGTERM)
    assert job.finish(20) == 128 + signal.SIGTERM


def test_the_compose_file_has_the_schema_of_compose() -> None:
    import jsonschema

    (schema,) = [file for file in metadata.files("docker-compose") or [] if file.name == "compose_spec.json"]
    (compose,) = documents("compose.yaml")
    jsonschema.Draft7Validator(json.loads(schema.locate().read_text(encoding="utf-8"))).validate(compose)


def test_the_containers_of_compose(network: Network, jobs: Jobs) -> None:
    (compose,) = documents("compose.yaml")
    services = compose["services"]
    assert list(services) == ["node0", "node1"]
    started = []
    for host, service in zip((network.first, network.second), services.values(), strict=True):
        host.knows("node0", network.first.ipv4)
        (variable,) = service["environment"]
        started.append(container(jobs, host, [*exec_form("ENTRYPOINT"), *service["command"]], {variable: TOKEN}))
    check_ranks(started, 4)


# -- Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["job.yaml", "nodes.yaml"])
def test_the_files_have_the_schema_of_kubernetes(name: str) -> None:
    import kubernetes_validate

    for document in documents(name):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


class Pods:
    """The pods of an Indexed Job, each on a host, with what Kubernetes would make of its container."""

    def __init__(self, name: str) -> None:
        service = documents("job.yaml")[0]
        (job,) = [document for document in documents(name) if document["kind"] == "Job"]
        template = job["spec"]["template"]["spec"]
        assert job["spec"]["completionMode"] == "Indexed"
        assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
        assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
        assert template["subdomain"] == service["metadata"]["name"]
        self.first_name = f"{job['metadata']['name']}-0.{template['subdomain']}"
        """What the cluster's names have for the pod with index 0: HOSTNAME.SUBDOMAIN."""
        (self._container,) = template["containers"]

    def start(self, jobs: Jobs, host: Host, index: int) -> Job:
        env = {entry["name"]: self._value(entry, index) for entry in self._container["env"]}
        words = self._container.get("command") or [*exec_form("ENTRYPOINT"), *self._container["args"]]
        return container(jobs, host, [re.sub(r"\$\((\w+)\)", lambda m: env[m[1]], word) for word in words], env)

    @staticmethod
    def _value(entry: dict[str, Any], index: int) -> str:
        match entry:
            case {"value": str(value)}:
                return value
            case {"valueFrom": {"secretKeyRef": {"name": "train-token", "key": "token"}}}:
                return TOKEN
            case {"valueFrom": {"fieldRef": {"fieldPath": path}}}:
                assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
                return str(index)
        raise AssertionError(entry)


@pytest.mark.parametrize(("name", "ranks"), [("job.yaml", 2), ("nodes.yaml", 8)])
def test_the_pods_of_a_job(network: Network, jobs: Jobs, name: str, ranks: int) -> None:
    pods = Pods(name)
    hosts = (network.first, network.second)
    for host in hosts:
        host.knows(pods.first_name, network.first.ipv4)
    check_ranks([pods.start(jobs, host, index) for index, host in enumerate(hosts)], ranks)


@pytest.mark.parametrize(("name", "ranks"), [("job.yaml", 2), ("nodes.yaml", 8)])
def test_a_pod_may_be_there_before_the_name_of_the_first_one(
    network: Network, jobs: Jobs, name: str, ranks: int
) -> None:
    pods = Pods(name)
    early = pods.start(jobs, network.second, 1)
    # Long enough for a rank to have asked for the name; the test is as true if it has not.
    with pytest.raises(subprocess.TimeoutExpired):
        early.process.wait(10)
    for host in (network.first, network.second):
        host.knows(pods.first_name, network.first.ipv4)
    check_ranks([early, pods.start(jobs, network.first, 0)], ranks)
