"""The self-test on real ranks: what it finds, what it says where something is missing, and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.launchers.processes import clean_environment

import phalanx as px
from phalanx import _native
from phalanx.cli.doctor.selftest.job import _last_error
from phalanx.cli.doctor.selftest.ranks import WrongData, agree, pattern
from phalanx.testing import run_ranks

pytestmark = pytest.mark.timeout(120)


def doctor(*arguments: str, **variables: str) -> tuple[int, dict[str, dict[str, str]], str]:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "doctor", *arguments],
        env={**clean_environment(), "PHALANX_TUNING": "off", **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    rows = json.loads(done.stdout)["findings"] if "--json" in arguments and done.stdout else []
    return done.returncode, {row["topic"]: row for row in rows}, done.stderr


@pytest.mark.skipif(not _native.available, reason="shared memory needs the core (PHALANX_PURE is set)")
def test_every_transport_of_this_machine() -> None:
    code, found, errors = doctor("--selftest", "-n", "3", "--json")
    assert code == 0, errors
    assert list(found) == ["world", "shared memory", "copy once", "TCP"]
    assert found["world"]["found"].startswith("3 ranks on ")
    for topic in ("shared memory", "TCP"):
        assert "all_reduce of 8 B in " in found[topic]["found"]
        assert found[topic]["found"].endswith("all data arrived as it was sent")


def test_without_the_core_and_with_a_rank_alone() -> None:
    code, found, _ = doctor("--selftest", "-n", "2", "--json", PHALANX_PURE="1")
    assert code == 0
    assert found["shared memory"]["status"] == "warning"
    assert "'phalanx doctor' says" in found["shared memory"]["advice"]
    assert found["TCP"]["status"] == "ok"


def test_a_job_that_cannot_run() -> None:
    files = {"PHALANX_TLS_CERT": "/no/cert", "PHALANX_TLS_KEY": "/no/key", "PHALANX_TLS_CA": "/no/ca"}
    code, found, errors = doctor("--selftest", "-n", "2", "--json", **files)
    assert code == 1
    (row,) = found.values()
    assert row["status"] == "problem"
    assert "TLS files cannot be used" in row["found"]
    assert "TLS files cannot be used" in errors  # all that the job wrote


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["-n", "4"], "say --selftest as well"), (["--selftest", "--master", "a:1"], "--hosts chooses the hosts")],
)
def test_options_that_do_not_go_together(arguments: list[str], words: str) -> None:
    code, _, errors = doctor(*arguments)
    assert code == 2
    assert words in errors


def disagree(group: px.Group) -> str:
    try:
        agree(group, group.rank == 0, f"something on rank {group.rank}")
    except WrongData as error:
        return str(error)
    return ""


def test_wrong_data_on_one_rank_is_a_problem_of_all() -> None:
    assert run_ranks(2, disagree) == ["wrong data: something on rank 1"] * 2


def test_patterns_differ() -> None:
    drawn = {pattern(seed, 300, turn).tobytes() for seed in range(4) for turn in range(4)}
    assert len(drawn) == 16


def test_the_line_that_says_most() -> None:
    text = "phalanx: rank 1: it raised\nTraceback\nphalanx.errors.Timeout: late\nphalanx: 3 ranks ended because of it"
    assert _last_error(text) == "phalanx.errors.Timeout: late"
    assert _last_error("phalanx: no such host") == "no such host"
    assert _last_error("") == ""
