"""Who am I: every launcher's variables, precedence of arguments, and what each mistake is answered with."""

from __future__ import annotations

import itertools
import os

import pytest

from phalanx.config import Launch, detect
from phalanx.errors import ConfigError, InvalidRank, InvalidWorldSize, MissingVariable
from phalanx.types import Address

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
PHALANX_RUN = {
    **TORCHRUN,
    "PHALANX_TOKEN": "s3cret-of-the-job",
    "PHALANX_DIRECTORY": "10.0.0.1:4711",
    "PHALANX_RUN_ID": "b1946ac92492d234",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}
# As printed by `mpirun -n 2 printenv` of Open MPI 5.0.11 and MPICH 5.0.2, rank 1.
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-vm-5777@1",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
MASTER = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234"}


def values(launch: Launch) -> tuple[str, int, int, int, int, Address | None]:
    return (
        launch.launcher,
        launch.rank,
        launch.world_size,
        launch.local_rank,
        launch.local_world_size,
        launch.master,
    )


NODE1 = Address("node1", 29500)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, ("none", 0, 1, 0, 1, None), id="nothing"),
        pytest.param({"RANK": " ", "WORLD_SIZE": ""}, ("none", 0, 1, 0, 1, None), id="blank is nothing"),
        pytest.param({"PHALANX_TOKEN": "x", "PHALANX_RUN_ID": "y"}, ("none", 0, 1, 0, 1, None), id="a token alone"),
        pytest.param(TORCHRUN, ("torchrun", 1, 4, 1, 2, NODE1), id="torchrun"),
        pytest.param(PHALANX_RUN, ("phalanx", 1, 4, 1, 2, NODE1), id="phalanx run"),
        pytest.param(BY_HAND, ("environment", 1, 2, 0, 1, NODE1), id="by hand"),
        pytest.param(
            {**BY_HAND, "LOCAL_RANK": "1"}, ("environment", 1, 2, 1, 2, NODE1), id="by hand, with the local rank"
        ),
        pytest.param(
            {**BY_HAND, "MASTER_ADDR": "127.0.0.1"},
            ("environment", 1, 2, 1, 2, Address("127.0.0.1", 29500)),
            id="by hand, loopback is one host",
        ),
        pytest.param(
            {**BY_HAND, "MASTER_ADDR": "[::1]"},
            ("environment", 1, 2, 1, 2, Address("::1", 29500)),
            id="by hand, IPv6 loopback in brackets",
        ),
        pytest.param(
            {**BY_HAND, "MASTER_ADDR": "fe80::1"},
            ("environment", 1, 2, 0, 1, Address("fe80::1", 29500)),
            id="by hand, IPv6 without brackets",
        ),
        pytest.param(
            {**BY_HAND, "MASTER_ADDR": "LocalHost", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"},
            ("environment", 1, 2, 0, 1, Address("LocalHost", 29500)),
            id="a variable counts more than loopback",
        ),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, ("environment", 0, 1, 0, 1, None), id="one needs no master"),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"},
            ("environment", 0, 1, 0, 1, None),
            id="nor half of one",
        ),
        pytest.param(
            {"RANK": "3", "WORLD_SIZE": "4", "PHALANX_DIRECTORY": "h:1"},
            ("phalanx", 3, 4, 0, 1, None),
            id="a directory needs no master",
        ),
        pytest.param(OPENMPI, ("openmpi", 1, 2, 1, 2, None), id="Open MPI on one host"),
        pytest.param(
            {**OPENMPI, **MASTER}, ("openmpi", 1, 2, 1, 2, Address("10.0.0.9", 1234)), id="Open MPI with a master"
        ),
        pytest.param(
            {**OPENMPI, "OMPI_COMM_WORLD_SIZE": "4", **MASTER},
            ("openmpi", 1, 4, 1, 2, Address("10.0.0.9", 1234)),
            id="Open MPI on two hosts",
        ),
        pytest.param({**OPENMPI, "WORLD_SIZE": "2"}, ("openmpi", 1, 2, 1, 2, None), id="Open MPI, size exported too"),
        pytest.param(MPICH, ("mpich", 1, 2, 1, 2, None), id="MPICH on one host"),
        pytest.param(
            {**MPICH, "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            ("mpich", 1, 2, 1, 2, None),
            id="MPICH whose helper was started by srun",
        ),
        pytest.param(
            {"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "8"},
            ("mpich", 0, 1, 0, 1, None),
            id="MPICH's gforker, one rank",
        ),
        pytest.param({**OPENMPI, **TORCHRUN}, ("torchrun", 1, 4, 1, 2, NODE1), id="torchrun under mpirun"),
    ],
)
def test_what_each_launcher_says(env: dict[str, str], expected: tuple[object, ...]) -> None:
    assert values(detect(env=env)) == expected


def test_phalanx_run_gives_directory_and_token() -> None:
    launch = detect(env=PHALANX_RUN)
    assert launch.directory == Address("10.0.0.1", 4711)
    assert launch.token == b"s3cret-of-the-job"
    assert not launch.master_port_taken


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *PHALANX_RUN, *OPENMPI, *MPICH, "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in BY_HAND.items():
        monkeypatch.setenv(name, value)
    assert values(detect()) == ("environment", 1, 2, 0, 1, NODE1)


# -- what is wrong ---------------------------------------------------------------------------------------------------


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    ("env", "missing", "words"),
    [
        ({"RANK": "1"}, "WORLD_SIZE", ["RANK=1"]),
        ({"WORLD_SIZE": "2"}, "RANK", ["WORLD_SIZE=2"]),
        ({"WORLD_SIZE": "1"}, "RANK", ["WORLD_SIZE=1"]),
        ({"LOCAL_RANK": "0"}, "RANK", ["LOCAL_RANK=0"]),
        (MASTER, "RANK", ["MASTER_ADDR=10.0.0.9", "MASTER_PORT=1234"]),
        ({"PHALANX_DIRECTORY": "h:1"}, "RANK", ["PHALANX_DIRECTORY=h:1"]),
        (without(BY_HAND, "RANK"), "RANK", ["WORLD_SIZE=2", "MASTER_ADDR=node1"]),
        (without(BY_HAND, "WORLD_SIZE"), "WORLD_SIZE", ["RANK=1", "MASTER_PORT=29500"]),
        (without(BY_HAND, "MASTER_ADDR"), "MASTER_ADDR", ["RANK=1", "MASTER_PORT=29500"]),
        (without(BY_HAND, "MASTER_PORT"), "MASTER_PORT", ["MASTER_ADDR=node1"]),
        (without(BY_HAND, "MASTER_ADDR", "MASTER_PORT"), "MASTER_ADDR", ["RANK=1", "WORLD_SIZE=2"]),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR", ["MASTER_PORT=29500"]),
        ({**BY_HAND, "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK", ["LOCAL_WORLD_SIZE=1"]),
        (without(OPENMPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE", ["OMPI_COMM_WORLD_RANK=1"]),
        (without(OPENMPI, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_RANK", ["OMPI_COMM_WORLD_SIZE=2"]),
        (
            {**OPENMPI, "OMPI_COMM_WORLD_SIZE": "4"},
            "MASTER_ADDR",
            ["MASTER_PORT", "PHALANX_TOKEN", "OMPI_COMM_WORLD_LOCAL_SIZE=2", "Open MPI"],
        ),
        (without(OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), "MASTER_ADDR", ["PHALANX_TOKEN"]),
        ({**OPENMPI, "MASTER_ADDR": "h"}, "MASTER_PORT", ["MASTER_ADDR=h"]),
        ({**OPENMPI, "MASTER_PORT": "5"}, "MASTER_ADDR", ["MASTER_PORT=5"]),
        ({**MPICH, "PMI_SIZE": "3"}, "MASTER_ADDR", ["MASTER_PORT", "PHALANX_TOKEN", "MPI_LOCALNRANKS=2", "MPICH"]),
        (without(MPICH, "PMI_SIZE"), "PMI_SIZE", ["PMI_RANK=1"]),
        # As printed by `mpirun -pmi-port`: nothing says how many there are.
        (
            {"PMI_ID": "0", "PMI_PORT": "vm:35021", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
            "PMI_RANK",
            ["PMI_ID=0", "without -pmi-port"],
        ),
    ],
)
def test_a_missing_variable_is_named_with_those_that_were_found(
    env: dict[str, str], missing: str, words: list[str]
) -> None:
    with pytest.raises(MissingVariable) as caught:
        detect(env=env)
    assert caught.value.variable == missing
    for word in [missing, *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "one"}, ["RANK='one'", "whole number"]),
        ({"RANK": "1.0"}, ["RANK='1.0'", "whole number"]),
        ({"RANK": "1_0"}, ["RANK='1_0'", "whole number"]),
        ({"RANK": "٣"}, ["RANK=", "whole number"]),
        ({"WORLD_SIZE": "9" * 5000}, ["WORLD_SIZE=", "whole number"]),
        ({"LOCAL_RANK": "x"}, ["LOCAL_RANK='x'", "whole number"]),
        ({"LOCAL_WORLD_SIZE": "x"}, ["LOCAL_WORLD_SIZE='x'", "whole number"]),
        ({"MASTER_PORT": "0"}, ["MASTER_PORT='0'", "1 to 65535"]),
        ({"MASTER_PORT": "65536"}, ["MASTER_PORT='65536'", "1 to 65535"]),
        ({"MASTER_PORT": "http"}, ["MASTER_PORT='http'", "1 to 65535"]),
        ({"MASTER_ADDR": "node1:29500"}, ["MASTER_ADDR='node1:29500'", "MASTER_PORT"]),
        ({"MASTER_ADDR": "tcp://node1"}, ["MASTER_ADDR='tcp://node1'", "host name"]),
        ({"MASTER_ADDR": "two words"}, ["MASTER_ADDR='two words'", "host name"]),
        ({"MASTER_ADDR": "[]"}, ["MASTER_ADDR='[]'", "host name"]),
        ({"PHALANX_DIRECTORY": "node1"}, ["PHALANX_DIRECTORY 'node1'", "host:port"]),
        ({"PHALANX_DIRECTORY": "node1:0"}, ["PHALANX_DIRECTORY='node1:0'", "1 to 65535"]),
        ({"TORCHELASTIC_USE_AGENT_STORE": "perhaps"}, ["TORCHELASTIC_USE_AGENT_STORE='perhaps'", "true or false"]),
    ],
)
def test_an_unreadable_variable_is_named_with_its_value_and_what_is_expected(
    change: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(env={**TORCHRUN, **change})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({**BY_HAND, "RANK": "2"}, ["RANK=2", "WORLD_SIZE=2", "0 to 1"]),
        ({**BY_HAND, "RANK": "-1"}, ["RANK=-1", "WORLD_SIZE=2", "0 to 1"]),
        ({**OPENMPI, "OMPI_COMM_WORLD_RANK": "2"}, ["OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=2"]),
        ({**MPICH, "PMI_RANK": "7"}, ["PMI_RANK=7", "PMI_SIZE=2"]),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2", "0 to 1"]),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, ["LOCAL_RANK=-1", "LOCAL_WORLD_SIZE=2"]),
        ({**BY_HAND, "LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "WORLD_SIZE=2"]),
        ({**MPICH, "MPI_LOCALRANKID": "2"}, ["MPI_LOCALRANKID=2", "MPI_LOCALNRANKS=2"]),
    ],
)
def test_a_rank_out_of_range_names_both_variables(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(InvalidRank) as caught:
        detect(env=env)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({**BY_HAND, "WORLD_SIZE": "0"}, ["WORLD_SIZE=0", "at least 1"]),
        ({**BY_HAND, "WORLD_SIZE": "-3"}, ["WORLD_SIZE=-3", "at least 1"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, ["LOCAL_WORLD_SIZE=5", "WORLD_SIZE=4"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE=0", "1 to 4"]),
        ({**MPICH, "MPI_LOCALNRANKS": "3"}, ["MPI_LOCALNRANKS=3", "PMI_SIZE=2"]),
    ],
)
def test_an_impossible_size_is_named(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(InvalidWorldSize) as caught:
        detect(env=env)
    for word in words:
        assert word in str(caught.value)


def test_an_exported_world_size_must_not_contradict_the_launcher() -> None:
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=4 and OMPI_COMM_WORLD_SIZE=2 contradict"):
        detect(env={**OPENMPI, "WORLD_SIZE": "4"})


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        ({"rank": 0, "world_size": 1}, {}, ("arguments", 0, 1, 0, 1, None)),
        ({"world_size": 1}, {}, ("arguments", 0, 1, 0, 1, None)),
        ({"rank": 1, "world_size": 3, "master": "h:5"}, {}, ("arguments", 1, 3, 0, 1, Address("h", 5))),
        ({"rank": 1, "world_size": 3, "master": Address("h", 5)}, {}, ("arguments", 1, 3, 0, 1, Address("h", 5))),
        ({"rank": 1, "world_size": 3, "master": "[::1]:5"}, {}, ("arguments", 1, 3, 1, 3, Address("::1", 5))),
        ({"rank": 1, "world_size": 3}, MASTER, ("arguments", 1, 3, 0, 1, Address("10.0.0.9", 1234))),
        ({"rank": 0, "world_size": 1}, TORCHRUN, ("arguments", 0, 1, 0, 1, NODE1)),
        ({"rank": 3}, TORCHRUN, ("arguments", 3, 4, 0, 1, NODE1)),
        ({"world_size": 2}, TORCHRUN, ("arguments", 1, 2, 0, 1, NODE1)),
        # Arguments that agree with the launcher leave what else it says in place: mpi4py users pass these.
        ({"rank": 1, "world_size": 2}, OPENMPI, ("openmpi", 1, 2, 1, 2, None)),
        ({"rank": 1, "world_size": 4}, TORCHRUN, ("torchrun", 1, 4, 1, 2, NODE1)),
        ({"master": "m:1"}, TORCHRUN, ("torchrun", 1, 4, 1, 2, Address("m", 1))),
        ({"master": "m:1"}, OPENMPI, ("openmpi", 1, 2, 1, 2, Address("m", 1))),
        # An argument stands in for a variable that is missing or cannot be read.
        ({"world_size": 2, "master": "m:1"}, {"RANK": "1"}, ("arguments", 1, 2, 0, 1, Address("m", 1))),
        ({"rank": 1, "master": "m:1"}, {"RANK": "x", "WORLD_SIZE": "2"}, ("arguments", 1, 2, 0, 1, Address("m", 1))),
    ],
)
def test_an_argument_wins_value_by_value(
    arguments: dict[str, object], env: dict[str, str], expected: tuple[object, ...]
) -> None:
    assert values(detect(**arguments, env=env)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "missing", "words"),
    [
        ({"rank": 0}, "WORLD_SIZE", ["rank=0", "world_size="]),
        ({"world_size": 2}, "RANK", ["world_size=2", "rank="]),
        ({"master": "m:1"}, "RANK", ["master=m:1"]),
        ({"rank": 0, "world_size": 2}, "MASTER_ADDR", ["world_size=2", "master='host:port'"]),
    ],
)
def test_arguments_that_are_not_enough(arguments: dict[str, object], missing: str, words: list[str]) -> None:
    with pytest.raises(MissingVariable) as caught:
        detect(**arguments, env={})  # type: ignore[arg-type]
    assert caught.value.variable == missing
    for word in [missing, *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"rank": 2, "world_size": 2}, InvalidRank, "rank=2 is not in a world of world_size=2"),
        ({"rank": -1, "world_size": 2}, InvalidRank, "rank=-1"),
        ({"rank": 0, "world_size": 0}, InvalidWorldSize, "world_size=0"),
        ({"rank": "0", "world_size": 1}, ConfigError, "rank='0' is not valid"),
        ({"rank": True, "world_size": 2}, ConfigError, "rank=True is not valid"),
        ({"rank": 0, "world_size": 1.0}, ConfigError, "world_size=1.0 is not valid"),
        ({"rank": 0, "world_size": 2, "master": "nowhere"}, ConfigError, "master 'nowhere' is not valid"),
        ({"rank": 0, "world_size": 2, "master": "h:0"}, ConfigError, "master='h:0' is not valid"),
        ({"rank": 0, "world_size": 2, "master": Address("h", 70000)}, ConfigError, "master='h:70000' is not valid"),
    ],
)
def test_arguments_that_are_wrong(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        detect(**arguments, env={})  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_a_rank_argument_is_checked_against_the_variable() -> None:
    with pytest.raises(InvalidRank, match="rank=9 is not in a world of WORLD_SIZE=4"):
        detect(rank=9, env=TORCHRUN)


@pytest.mark.parametrize(
    "arguments", [{"master": "m:1"}, {"rank": 0, "world_size": 1}, {"rank": 0, "world_size": 2}], ids=str
)
def test_the_launchers_directory_serves_only_its_own_world(arguments: dict[str, object]) -> None:
    assert detect(env=PHALANX_RUN).directory is not None
    assert detect(**arguments, env=PHALANX_RUN).directory is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "agent", "taken"),
    [
        ({}, "True", True),
        ({}, "False", False),
        ({}, "", False),
        ({"master": "node1:29500"}, "True", True),
        ({"master": "node1:29501"}, "True", False),
    ],
)
def test_whether_torchrun_listens_on_the_masters_port(arguments: dict[str, str], agent: str, taken: bool) -> None:
    launch = detect(**arguments, env={**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": agent})  # type: ignore[arg-type]
    assert launch.master_port_taken is taken


@pytest.mark.parametrize("env", [{}, TORCHRUN, PHALANX_RUN, BY_HAND, OPENMPI, MPICH])
def test_without_any_meeting_point_all_ranks_are_on_this_host(env: dict[str, str]) -> None:
    launch = detect(env=env)
    assert launch.single_host or launch.master is not None


@pytest.mark.parametrize(
    ("env", "single_host"),
    [
        ({}, True),
        (TORCHRUN, False),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, True),
        (BY_HAND, False),
        ({**BY_HAND, "MASTER_ADDR": "localhost"}, True),
        # Rank 1 of 2 with local rank 1 could know that rank 0 is here too, but rank 0 could not know of rank 1.
        ({**BY_HAND, "LOCAL_RANK": "1"}, False),
        ({**BY_HAND, "RANK": "0", "LOCAL_RANK": "0"}, False),
        (OPENMPI, True),
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "4", **MASTER}, False),
    ],
)
def test_whether_all_ranks_are_on_this_host(env: dict[str, str], single_host: bool) -> None:
    assert detect(env=env).single_host is single_host


# -- the job ---------------------------------------------------------------------------------------------------------


def job(env: dict[str, str], **arguments: object) -> str:
    return detect(env=env, **arguments).job  # type: ignore[arg-type]


def test_all_ranks_of_a_job_on_a_host_share_its_name() -> None:
    assert job({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}) == job(TORCHRUN)
    assert job({**PHALANX_RUN, "RANK": "0", "LOCAL_RANK": "0"}) == job(PHALANX_RUN)
    assert job({**OPENMPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}) == job(OPENMPI)
    assert job({**MPICH, "PMI_RANK": "0", "MPI_LOCALRANKID": "0", "PMI_FD": "9"}) == job(MPICH)
    assert job({}, rank=0, world_size=2, master="h:1") == job({}, rank=1, world_size=2, master="h:1")


def test_other_jobs_have_other_names() -> None:
    names = [
        job(TORCHRUN),
        job({**TORCHRUN, "TORCHELASTIC_RUN_ID": "other"}),
        job({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}),
        job({**TORCHRUN, "MASTER_PORT": "29501"}),
        job({**TORCHRUN, "MASTER_ADDR": "node2"}),
        job({**TORCHRUN, "WORLD_SIZE": "5"}),
        job(BY_HAND),
        job({**BY_HAND, "PHALANX_RUN_ID": "a"}),
        job({**BY_HAND, "PHALANX_RUN_ID": "b"}),
        job(PHALANX_RUN),
        job({**PHALANX_RUN, "PHALANX_RUN_ID": "other"}),
        job(PHALANX_RUN, master="m:1"),
        job(OPENMPI),
        job({**OPENMPI, "PMIX_NAMESPACE": "prterun-vm-5778@1"}),
        job(MPICH),
        job({}),
        job({}, rank=0, world_size=2, master="h:1"),
        job({}, rank=0, world_size=2, master="h:2"),
        job({}, rank=0, world_size=3, master="h:1"),
    ]
    for one, other in itertools.combinations(range(len(names)), 2):
        assert names[one] != names[other], (one, other)
    for name in names:
        assert len(name) == 32
        assert set(name) <= set("0123456789abcdef")


def test_another_users_job_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = job(TORCHRUN)
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    assert job(TORCHRUN) != mine


def test_worlds_of_one_in_two_processes_are_two_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [job({}), job({"RANK": "0", "WORLD_SIZE": "1"}), job({}, world_size=1)]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    there = [job({}), job({"RANK": "0", "WORLD_SIZE": "1"}), job({}, world_size=1)]
    assert not set(here) & set(there)


@pytest.mark.parametrize("env", [MPICH, without(OPENMPI, "PMIX_NAMESPACE")])
def test_mpirun_without_a_job_name_is_told_apart_by_its_process(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = job(env)
    monkeypatch.setattr("phalanx.config.launchers.launcher_process", lambda: "4711@1")
    assert job(env) != mine
