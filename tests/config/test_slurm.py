"""Slurm: which process is a rank, how many share a node, where rank 0 is."""

from __future__ import annotations

import logging
import time

import pytest
from tests.lateness import bound

from phalanx.config import detect
from phalanx.config.slurm import expand_hostlist
from phalanx.errors import ConfigError, InvalidRank, MissingVariable

# As seen with Slurm 22.05: `sbatch -N2 -n4`, and in it `srun -n3`, task 2.
BATCH = {
    "ENVIRONMENT": "BATCH",
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_SUBMIT_DIR": "/home/ann",
    "SLURM_TASKS_PER_NODE": "3,1",
    "SLURM_TASK_PID": "7195",
}
STEP = {
    **BATCH,
    "SLURM_GTIDS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_TASK_PID": "7219",
}
# `salloc` where the site gives interactive allocations a step of their own.
INTERACTIVE = {
    **BATCH,
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "node1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
ONE_NODE = {
    **STEP,
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_NODELIST": "node1",
    "SLURM_STEP_TASKS_PER_NODE": "3",
    "SLURM_TASKS_PER_NODE": "3",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_a_task_on_two_nodes() -> None:
    launch = detect(env=STEP)
    assert (launch.launcher, launch.rank, launch.world_size) == ("slurm", 2, 3)
    assert (launch.local_rank, launch.local_world_size) == (0, 1)
    assert launch.master is not None
    assert launch.master.host == "node1"
    assert 15000 <= launch.master.port < 30000


def test_a_task_on_one_node_needs_no_master() -> None:
    launch = detect(env=ONE_NODE)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (2, 3, 2, 3)
    assert launch.master is None
    assert launch.single_host


def test_tasks_of_a_step_agree_on_port_and_job_and_other_steps_do_not() -> None:
    other_task = detect(env={**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert (other_task.master, other_task.job) == (detect(env=STEP).master, detect(env=STEP).job)
    for change in ({"SLURM_JOB_ID": "18"}, {"SLURM_STEP_ID": "1"}):
        other = detect(env={**STEP, **change})
        assert other.master != other_task.master
        assert other.job != other_task.job


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"MASTER_ADDR": "a", "MASTER_PORT": "5"}, ("a", 5)),
        ({"MASTER_ADDR": "a"}, ("a", None)),
        ({"MASTER_PORT": "5"}, ("node1", 5)),
    ],
)
def test_master_variables_win_one_by_one(change: dict[str, str], expected: tuple[str, int | None]) -> None:
    master, default = detect(env={**STEP, **change}).master, detect(env=STEP).master
    assert master is not None
    assert default is not None
    assert master == (expected[0], expected[1] or default.port)


def test_a_master_is_used_on_one_node_too() -> None:
    assert detect(env={**ONE_NODE, "MASTER_ADDR": "a", "MASTER_PORT": "5"}).master == ("a", 5)


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(BATCH, id="batch script"),
        pytest.param(INTERACTIVE, id="interactive step"),
        pytest.param({**BATCH, "SLURM_STEP_ID": "batch"}, id="batch by name"),
        pytest.param({**BATCH, "SLURM_STEP_ID": "4294967291"}, id="batch by number"),
        pytest.param(without(BATCH, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID"), id="salloc"),
    ],
)
def test_what_srun_did_not_start_is_no_rank(env: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "phalanx"):
        launch = detect(env=env)
    assert (launch.launcher, launch.rank, launch.world_size, launch.master) == ("none", 0, 1, None)
    assert [record.name for record in caplog.records] == ["phalanx.config"]
    assert "SLURM_NTASKS=4" in caplog.text
    assert "srun" in caplog.text


@pytest.mark.parametrize("env", [{**BATCH, "SLURM_NTASKS": "1"}, without(BATCH, "SLURM_NTASKS"), STEP, {}])
def test_no_warning_where_nothing_is_odd(env: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "phalanx"):
        detect(env=env)
    assert not caplog.records


def test_arguments_in_a_batch_script_are_taken_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    launch = detect(rank=1, world_size=2, master="127.0.0.1:5", env=BATCH)
    assert (launch.launcher, launch.rank, launch.world_size) == ("arguments", 1, 2)
    assert not caplog.records


def test_a_script_that_exports_half_and_forgets_srun_is_told() -> None:
    with pytest.raises(MissingVariable, match=r"RANK is not set .*WORLD_SIZE=4.*srun"):
        detect(env={**BATCH, "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "5"})


def test_a_script_that_exports_half_and_uses_srun_works() -> None:
    launch = detect(env={**STEP, "WORLD_SIZE": "3", "MASTER_ADDR": "node1", "MASTER_PORT": "5"})
    assert (launch.launcher, launch.rank, launch.world_size, launch.master) == ("slurm", 2, 3, ("node1", 5))


def test_the_step_counts_not_the_allocation() -> None:
    # `srun --preserve-env -n2` in an allocation of four tasks on one node.
    env = {**ONE_NODE, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4"}
    env |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    launch = detect(env=env)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (1, 2, 1, 2)


def test_sruns_own_pmi_variables_are_no_mpirun() -> None:
    launch = detect(env={**STEP, "PMI_RANK": "2", "PMI_SIZE": "3", "PMI_FD": "11", "PMI_JOBID": "17.0"})
    assert (launch.launcher, launch.rank) == ("slurm", 2)


@pytest.mark.parametrize(
    ("change", "local_world_size"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2),1", "SLURM_NODEID": "2"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": "0"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_NODEID": ""}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_NODEID": "0"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_TASKS_PER_NODE": "", "SLURM_STEP_NODELIST": "n1"}, 3),
        (
            {
                "SLURM_STEP_TASKS_PER_NODE": "",
                "SLURM_TASKS_PER_NODE": "",
                "SLURM_STEP_NODELIST": "n[1-3]",
                "SLURM_NTASKS_PER_NODE": "1",
            },
            1,
        ),
    ],
)
def test_how_many_share_the_node(change: dict[str, str], local_world_size: int) -> None:
    assert detect(env={**STEP, **change}).local_world_size == local_world_size


def test_variables_written_by_hand_are_taken_at_their_word() -> None:
    env = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "localhost"}
    launch = detect(env=env)
    assert (launch.launcher, launch.rank, launch.world_size, launch.local_world_size) == ("slurm", 1, 2, 2)
    assert launch.master is None
    assert launch.job == detect(env={**env, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).job


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        ({"SLURM_PROCID": "0"}, "SLURM_NTASKS"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "SLURM_JOB_NODELIST"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"}, "SLURM_JOB_ID"),
        (without(STEP, "SLURM_LOCALID"), "SLURM_LOCALID"),
    ],
)
def test_what_is_missing_is_named(env: dict[str, str], missing: str) -> None:
    with pytest.raises(MissingVariable) as caught:
        detect(env=env)
    assert caught.value.variable == missing
    assert f"{missing} is not set" in str(caught.value)
    assert "found" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"SLURM_PROCID": "3"}, InvalidRank, "SLURM_PROCID=3 is not in a world of SLURM_STEP_NUM_TASKS=3"),
        ({"SLURM_LOCALID": "1"}, InvalidRank, "SLURM_LOCALID=1 is not on a host with SLURM_STEP_TASKS_PER_NODE=2,1"),
        ({"SLURM_PROCID": "x"}, ConfigError, "SLURM_PROCID='x' is not valid"),
        ({"SLURM_STEP_ID": "x"}, ConfigError, "SLURM_STEP_ID='x' is not valid"),
        ({"SLURM_NODEID": "x"}, ConfigError, "SLURM_NODEID='x' is not valid"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,"}, ConfigError, "SLURM_STEP_TASKS_PER_NODE='2,' is not valid"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x999999)"}, ConfigError, "SLURM_STEP_TASKS_PER_NODE='1(x999999)'"),
        ({"SLURM_STEP_NODELIST": "node[1-"}, ConfigError, "SLURM_STEP_NODELIST='node[1-' is not valid"),
        ({"WORLD_SIZE": "4"}, ConfigError, "WORLD_SIZE=4 and SLURM_STEP_NUM_TASKS=3 contradict each other"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, str], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        detect(env={**STEP, **change})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node1,node2", ["node1", "node2"]),
        ("node[003-005,9],gpu1", ["node003", "node004", "node005", "node9", "gpu1"]),
        ("node[8-11]", ["node8", "node9", "node10", "node11"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("prefix[1-2]suffix[3-4]", ["prefix1suffix3", "prefix1suffix4", "prefix2suffix3", "prefix2suffix4"]),
        (
            "r[1,3]n[01-02].example.org",
            ["r1n01.example.org", "r1n02.example.org", "r3n01.example.org", "r3n02.example.org"],
        ),
        ("a[1][2]", ["a12"]),
        ("[1-2]", ["1", "2"]),
        ("a-b[1-2]-c,d", ["a-b1-c", "a-b2-c", "d"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
        (" node1 , node[2 , 3-4] ", ["node1", "node2", "node3", "node4"]),
    ],
)
def test_expand_hostlist(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a,",
        "a[",
        "a]",
        "a[]",
        "a[1",
        "a1]",
        "a[1-]",
        "a[-1]",
        "a[2-1]",
        "a[x]",
        "a[1,]",
        "a[[1]]",
        "a]1[",
        "a b",
        "a[1-2-3]",
        "a/b",
        "a[0-999999]",
        "a[0-999][0-999]",
        "a[0-9]" * 200,
        "a[" + "9" * 40 + "]",
        "[" * 50_000,
    ],
    ids=lambda text: text[:12],
)
def test_a_host_list_that_cannot_be_read(text: str) -> None:
    start = time.monotonic()
    with pytest.raises(ConfigError, match="nodes="):
        expand_hostlist(text, what="nodes")
    assert time.monotonic() - start < bound(5), "must not take long, whatever the text"
