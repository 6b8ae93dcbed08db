"""Who the hosts are, what is said between them, and words for what ssh says. Without any process."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.run.hosts.explain import why_no_hello
from phalanx.cli.run.hosts.hostfile import parse_hosts, read_hostfile
from phalanx.cli.run.hosts.messages import MOST_SHOWN, NodeEnd, NodeHello, NodeView, decode, encode
from phalanx.cli.run.plan import RunPlan
from phalanx.errors import ConfigError
from phalanx.types import Address


def hosts_in(path: Path, text: str) -> list[tuple[str, int | None]]:
    file = path / "hosts"
    file.write_text(text)
    return [(host.name, host.ranks) for host in read_hostfile(file)]


def test_a_hostfile_as_open_mpi_and_mpich_write_it(tmp_path: Path) -> None:
    text = """
    # a comment
    alpha slots=4 max_slots=8   # another
    beta:2
    me@gamma
    [fd00::1]:3
    fd00::2 slots=5

    """
    assert hosts_in(tmp_path, text) == [
        ("alpha", 4),
        ("beta", 2),
        ("me@gamma", None),
        ("fd00::1", 3),
        ("fd00::2", 5),
    ]


def test_a_host_that_is_named_again_has_more_slots(tmp_path: Path) -> None:
    assert hosts_in(tmp_path, "a\na\nb slots=2\na\nb:3\n") == [("a", 3), ("b", 5)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a slots=0", "line 1: '0' is not a number of ranks"),
        ("a\nb slots=many", "line 2: 'many' is not a number"),
        ("a binding=core", "'binding=core' is not understood (expected `host`, `host:4` or `host slots=4`)"),
        ("a:4 slots=4", "the number of ranks stands there twice"),
        ("a:", "ends with a colon"),
        ("-oProxyCommand=evil", "is not a host"),
        ("a slots=4 max_slots=2", "more than its own limit of 2"),
        ("[fd00::1", "is not understood"),
        ("# nobody", "names no host"),
    ],
)
def test_a_hostfile_that_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        hosts_in(tmp_path, text)
    assert words in str(raised.value)


def test_a_hostfile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_hostfile(tmp_path / "none")


def test_hosts_on_the_command_line() -> None:
    assert [(host.name, host.ranks) for host in parse_hosts("a:4,b,me@c:1")] == [("a", 4), ("b", None), ("me@c", 1)]
    with pytest.raises(ConfigError, match="as a:4,b:4"):
        parse_hosts("a,,b")


def test_messages_come_back_as_they_were() -> None:
    for message in (
        NodeHello(version="1", python="3.12", hostname="a", ports=(1, 2)),
        NodeEnd(code=3, failed=True, blamed=5, own=5, report="line\nline", same=(1, 2), because=4),
    ):
        assert decode(encode(message)) == message


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"kind": "other"}', b'{"kind": "end"}', b'{"kind": "end", "x": 1}'])
def test_what_is_no_message(line: bytes) -> None:
    with pytest.raises(ValueError, match="not a message|Expecting"):
        decode(line)


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (255, "ssh: Could not resolve hostname b: Name or service not known", "is the name spelt right?"),
        (255, "Permission denied (publickey).", "ssh-copy-id b"),
        (255, "ssh: connect to host b port 22: Connection refused", "no ssh server listens there"),
        (255, "Host key verification failed.", "log in once by hand"),
        (255, "ssh: connect to host b port 22: Connection timed out", "a firewall"),
        (255, "", "try it by hand: ssh b true"),
        (127, "sh: 1: /opt/python: not found", "there is no /opt/python there (--remote-python"),
        (1, "/opt/python: No module named phalanx", "has no Phalanx (install it there"),
        (1, "/opt/python: No module named phalanx.cli.run.hosts", "an older version"),
        (3, "oh", "exit code 3: oh"),
        (None, "", "no answer in time"),
    ],
)
def test_why_a_host_did_not_come_up(code: int | None, said: str, words: str) -> None:
    text = why_no_hello("b", code=code, said=said, python="/opt/python", command="ssh")
    assert text.startswith("host b")
    assert words in text


def test_what_is_shown_has_a_bound() -> None:
    assert NodeView.of("page", b"picture").data == b"picture"
    with pytest.raises(ValueError, match="more than"):
        _ = NodeView.of("page", bytes(MOST_SHOWN + 1)).data
    whole = NodeView.of("page", b"picture" * 100)
    with pytest.raises(ValueError, match="cut short"):
        _ = NodeView(what="page", packed=whole.packed[:8]).data


def test_a_plan_of_hosts_of_different_size(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    plan = RunPlan(
        target=str(script),
        ranks=3,
        nodes=3,
        node=1,
        layout=(2, 3, 1),
        names=("a", "b", "c"),
        master=Address("a", 1),
        token=b"x",
    )
    assert (plan.world_size, plan.first_rank) == (6, 2)
    assert [plan.node_of(rank) for rank in range(6)] == [
        *["node 0 (a)"] * 2,
        *["node 1 (b)"] * 3,
        "node 2 (c)",
    ]
