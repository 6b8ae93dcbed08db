"""What a newcomer reads when a launcher's variables are missing or garbled, or do not fit together."""

from __future__ import annotations

import os
import socket
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launchers.processes import Job, Jobs, clean_environment, finish_all
from tests.launchers.starting import by_hand
from tests.ports import free_port

import phalanx as px


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process stands for a rank: none of the variables is set."""
    kept = clean_environment()
    for name in set(os.environ) - set(kept):
        monkeypatch.delenv(name)
    runtime = tmp_path / "own"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))


HAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


# Each row: what is set, what is raised, and words that must be in the message.
WRONG: list[tuple[dict[str, str], type[px.PhalanxError], list[str]]] = [
    # torch's variables, by hand
    (
        {"RANK": "0"},
        px.MissingVariable,
        ["WORLD_SIZE is not set", "found RANK=0", "set WORLD_SIZE or give world_size="],
    ),
    ({"WORLD_SIZE": "2"}, px.MissingVariable, ["RANK is not set", "found WORLD_SIZE=2"]),
    (without(HAND, "RANK"), px.MissingVariable, ["RANK is not set", "MASTER_ADDR=127.0.0.1"]),
    (without(HAND, "MASTER_ADDR"), px.MissingVariable, ["MASTER_ADDR is not set", "MASTER_PORT=29500"]),
    (without(HAND, "MASTER_PORT"), px.MissingVariable, ["MASTER_PORT is not set", "master='host:port'"]),
    ({"LOCAL_RANK": "0"}, px.MissingVariable, ["RANK is not set", "found LOCAL_RANK=0"]),
    ({**HAND, "RANK": "zero"}, px.ConfigError, ["RANK='zero'", "a whole number"]),
    ({**HAND, "RANK": "2"}, px.InvalidRank, ["RANK=2", "WORLD_SIZE=2", "valid ranks: 0 to 1"]),
    ({**HAND, "RANK": "-1"}, px.InvalidRank, ["RANK=-1", "valid ranks: 0 to 1"]),
    ({**HAND, "WORLD_SIZE": "0"}, px.InvalidWorldSize, ["WORLD_SIZE=0", "at least 1"]),
    ({**HAND, "WORLD_SIZE": "two"}, px.ConfigError, ["WORLD_SIZE='two'", "a whole number"]),
    ({**HAND, "MASTER_PORT": "http"}, px.ConfigError, ["MASTER_PORT='http'", "a port from 1 to 65535"]),
    ({**HAND, "MASTER_PORT": "70000"}, px.ConfigError, ["MASTER_PORT='70000'", "a port from 1 to 65535"]),
    ({**HAND, "MASTER_ADDR": "node1:29500"}, px.ConfigError, ["MASTER_ADDR='node1:29500'", "goes into MASTER_PORT"]),
    ({**HAND, "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "2"}, px.InvalidRank, ["LOCAL_RANK=5", "0 to 1"]),
    ({**HAND, "PHALANX_TOKEN": ""}, px.ConfigError, ["PHALANX_TOKEN", "empty"]),
    # torchrun
    ({**HAND, "TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_USE_AGENT_STORE": "perhaps"}, px.ConfigError, ["'perhaps'"]),
    # phalanx run
    ({**HAND, "PHALANX_DIRECTORY": "nonsense"}, px.ConfigError, ["PHALANX_DIRECTORY", "'nonsense'", "host:port"]),
    ({**HAND, "PHALANX_DIRECTORY": "127.0.0.1:9"}, px.MissingVariable, ["PHALANX_TOKEN is not"]),
    # MPI
    (without(OPENMPI, "OMPI_COMM_WORLD_SIZE"), px.MissingVariable, ["OMPI_COMM_WORLD_SIZE is not set"]),
    ({**OPENMPI, "OMPI_COMM_WORLD_RANK": "x"}, px.ConfigError, ["OMPI_COMM_WORLD_RANK='x'", "a whole number"]),
    ({**OPENMPI, "WORLD_SIZE": "2"}, px.ConfigError, ["WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE=4", "contradict"]),
    (
        {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        px.MissingVariable,
        ["Open MPI's mpirun does not tell where rank 0 is", "set MASTER_ADDR and MASTER_PORT", "PHALANX_TOKEN"],
    ),
    ({"PMI_RANK": "0"}, px.MissingVariable, ["PMI_SIZE is not set", "found PMI_RANK=0"]),
    ({"PMI_ID": "0", "PMI_SIZE": "2"}, px.MissingVariable, ["PMI_RANK is not set", "start mpirun without -pmi-port"]),
    # Slurm
    (without(SLURM, "SLURM_NTASKS"), px.MissingVariable, ["SLURM_NTASKS is not set", "found SLURM_PROCID=0"]),
    (SLURM, px.MissingVariable, ["SLURM_JOB_NODELIST is not set", "on which host rank 0 runs"]),
    ({**SLURM, "SLURM_JOB_NODELIST": "n[1-2"}, px.ConfigError, ["SLURM_JOB_NODELIST='n[1-2'", "node1,gpu[003-005,9]"]),
    ({**SLURM, "SLURM_JOB_NODELIST": "n[1-2]"}, px.MissingVariable, ["SLURM_JOB_ID is not set", "agree on a port"]),
    # options
    ({**HAND, "PHALANX_PORT_RANGE": "5-1"}, px.ConfigError, ["PHALANX_PORT_RANGE='5-1'", "lower one first"]),
]


@pytest.mark.parametrize(("variables", "kind", "words"), WRONG, ids=lambda value: None)
def test_wrong_variables(
    variables: dict[str, str], kind: type[px.PhalanxError], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(kind) as caught:
        px.init(timeout=5)
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)


def test_a_batch_script_without_srun_is_a_world_of_one_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {**SLURM, "SLURM_JOB_ID": "5", "SLURM_TASK_PID": "4"}.items():
        monkeypatch.setenv(name, value)
    with px.init() as world:
        assert world.world_size == 1
    assert "srun did not start this process" in caplog.text


# -- what only shows when somebody listens or looks --------------------------------------------------------------------


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_the_port_is_taken(taken_port: int) -> None:
    with pytest.raises(px.ConfigError, match="Address already in use.* MASTER_ADDR and MASTER_PORT.* free there"):
        px.init(rank=0, world_size=2, master=f"127.0.0.1:{taken_port}", timeout=5)


def test_no_port_of_the_range_is_free(taken_port: int) -> None:
    options = px.Options(port_range=(taken_port, taken_port))
    with pytest.raises(px.ConfigError, match=f"cannot listen on 127.0.0.1 port {taken_port}: Address already in use"):
        px.init(rank=0, world_size=2, master=f"127.0.0.1:{free_port()}", timeout=5, options=options)


def test_the_master_is_not_the_host_of_rank_0() -> None:
    with pytest.raises(px.ConfigError, match=r"192\.0\.2\.1.*must be an address of the host that rank 0 runs on"):
        px.init(rank=0, world_size=2, master="192.0.2.1:29500", token="t", timeout=5)


def test_the_name_cannot_be_resolved() -> None:
    for rank in (0, 1):
        for token in (None, "t"):
            with pytest.raises(px.NoConnection, match=r"'no-such-host\.invalid' cannot be resolved"):
                px.init(rank=rank, world_size=2, master="no-such-host.invalid:29500", token=token, timeout=0.2)


def test_no_token_and_a_master_elsewhere() -> None:
    with pytest.raises(px.MissingVariable, match=r"192\.0\.2\.1 is another host.* set PHALANX_TOKEN to the same"):
        px.init(rank=1, world_size=2, master="192.0.2.1:29500", timeout=5)


def test_an_interface_that_is_not_there() -> None:
    options = px.Options(interface="eth77")
    with pytest.raises(px.ConfigError, match=r"interface 'eth77' has no address .*interfaces: .*lo"):
        px.init(rank=0, world_size=2, master=f"127.0.0.1:{free_port()}", timeout=5, options=options)


# -- ranks that do not fit together ------------------------------------------------------------------------------------

# Each rank of each world, by what is set for it. They run side by side: most of their time is waiting in vain.
UNFIT: dict[str, list[dict[str, str]]] = {
    "tokens": [{"RANK": "0", "PHALANX_TOKEN": "one"}, {"RANK": "1", "PHALANX_TOKEN": "two"}],
    "one token": [{"RANK": "0", "PHALANX_TOKEN": "one"}, {"RANK": "1"}],
    "world sizes": [
        {"RANK": "0", "PHALANX_TOKEN": "t"},
        {"RANK": "1", "PHALANX_TOKEN": "t", "WORLD_SIZE": "3"},
    ],
    "missing": [{"RANK": rank, "WORLD_SIZE": "5"} for rank in ("0", "2", "4")],
    "twice": [{"RANK": rank, "WORLD_SIZE": "3"} for rank in ("0", "1", "1")],
}


@pytest.fixture(scope="module")
def unfit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Job]]]:
    """All worlds that cannot form; each of their ranks has said why."""
    jobs = Jobs(tmp_path_factory.mktemp("unfit"))
    script = jobs.folder / "meet.py"
    script.write_text(
        textwrap.dedent(
            """
            import phalanx as px
            try:
                with px.init(timeout=6):
                    print("formed")
            except px.PhalanxError as error:
                print(type(error).__name__, error, sep=": ")
            """
        )
    )
    started = {}
    for name, ranks in UNFIT.items():
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        started[name] = [jobs.start(sys.executable, script, env={**common, **own}) for own in ranks]
    finish_all([job for world in started.values() for job in world])
    yield started
    jobs.clean_up()


def test_tokens_that_differ(unfit: dict[str, list[Job]]) -> None:
    first, second = unfit["tokens"]
    assert second.out.startswith("AuthenticationFailed: the directory of rank 0 at 127.0.0.1")
    assert "the tokens differ (PHALANX_TOKEN must be the same on all ranks)" in second.out
    assert "WorldNotFormed: rank 0: the world did not form within 6 s: missing rank 1" in first.out
    assert "it does not know the job's token (it says it is rank 1)" in first.err
    for job in (first, second):
        for secret in ("one", "two"):
            assert secret not in job.out + job.err, "the token was told"


def test_a_token_on_rank_0_only(unfit: dict[str, list[Job]]) -> None:
    first, second = unfit["one token"]
    assert "missing rank 1" in first.out
    assert "If it is on another host, or has a PHALANX_TOKEN, set the same PHALANX_TOKEN on all ranks" in second.out


def test_world_sizes_that_differ(unfit: dict[str, list[Job]]) -> None:
    first, second = unfit["world sizes"]
    assert "missing rank 1" in first.out
    assert "refused rank 1: it does not have a world of 3 ranks (WORLD_SIZE must be the same on all)" in second.out


def test_every_rank_says_who_is_missing(unfit: dict[str, list[Job]]) -> None:
    for job in unfit["missing"]:
        assert job.out.startswith("WorldNotFormed: ")
        assert "missing ranks 1, 3" in job.out


def test_a_rank_that_was_started_twice(unfit: dict[str, list[Job]]) -> None:
    first, *both = unfit["twice"]
    assert "missing rank 2" in first.out
    said = sorted((job.out for job in both), key=lambda text: "already taken" not in text)
    assert "refused rank 1: rank 1 is already taken by another process" in said[0]
    assert "missing rank 2" in said[1]


def test_a_name_that_appears_late(jobs: Jobs) -> None:
    """As in a cluster, where the first machine's name is known only once it is up."""
    late = jobs.folder / "late.py"
    late.write_text(
        textwrap.dedent(
            """
            import os, socket
            import phalanx as px
            asked, real = [], socket.getaddrinfo

            def getaddrinfo(host, *args, **more):
                if host == "first-node":
                    asked.append(host)
                    if len(asked) < 3 and os.environ["RANK"] == "1":
                        raise socket.gaierror(-2, "Name or service not known")
                    host = "127.0.0.1"
                return real(host, *args, **more)

            socket.getaddrinfo = getaddrinfo
            with px.init() as world:
                world.barrier()
            """
        )
    )
    started = by_hand(jobs, [str(late)], ranks=2, MASTER_ADDR="first-node", PHALANX_TOKEN="t")
    finish_all(started)
    assert started[0].err.count("'first-node' cannot be resolved") == 1
