"""The page of `phalanx run --page`: who gets it, who does not, and that nobody can slow the job down by reading it."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.run.support import Runner
from tests.lateness import bound

from phalanx.cli.run.page import server as page_server
from phalanx.cli.run.page.server import MOST_CLIENTS, PageServer


@pytest.fixture
def server() -> Iterator[PageServer]:
    made = PageServer()
    made.publish(picture=b'{"number":1}', metrics=b"up 1\n")
    yield made
    made.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    yield runner
    runner.clean_up()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": f"127.0.0.1:{server.port}", **headers}.items():
        if value:
            connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, dict(answer.getheaders())


def test_what_is_served(server: PageServer) -> None:
    at = f"/{server.token}"
    status, body, headers = ask(server, f"{at}/")
    assert status == 200
    assert b"<title>Phalanx</title>" in body
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"
    for name, part in (
        ("page.js", b"EventSource"),
        ("page.css", b"--waiting"),
        ("metrics", b"up 1"),
        ("picture", b"1"),
    ):
        status, body, _ = ask(server, f"{at}/{name}")
        assert (status, part in body) == (200, True), name
    assert ask(server, f"{at}/", Origin=f"http://127.0.0.1:{server.port}")[0] == 200
    assert ask(server, f"{at}/", Host=f"localhost:{server.port}")[0] == 200
    assert ask(server, f"{at}/", Host=f"[::1]:{server.port}")[0] == 200


def test_probes_get_the_head_alone(server: PageServer) -> None:
    for name, found in (("", 200), ("metrics", 200), ("events", 200), ("nothing", 404)):
        status, body, headers = ask(server, f"/{server.token}/{name}", "HEAD")
        assert (status, body) == (found, b"")
        assert name == "events" or int(headers["Content-Length"]) > 0
    assert ask(server, "/", "HEAD")[0] == 403


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/", {}),
        ("/metrics", {}),
        ("/wrong/", {}),
        ("/wrong/events", {}),
        ("{token}x/", {}),
        ("/?token={token}", {}),
        ("{token}/", {"Host": "evil.example:{port}"}),
        ("{token}/", {"Host": "127.0.0.1"}),
        ("{token}/", {"Host": ""}),
        ("{token}/events", {"Origin": "http://evil.example"}),
        ("{token}/events", {"Origin": "http://127.0.0.1:1"}),
        ("{token}/picture", {"Origin": "null"}),
    ],
)
def test_strangers_are_refused(server: PageServer, path: str, headers: dict[str, str]) -> None:
    """Without the token, by another host name (DNS rebinding), and from another origin."""
    filled = {name: value.format(port=server.port) for name, value in headers.items()}
    status, body, _ = ask(server, path.format(token=f"/{server.token}"), **filled)
    assert status == 403
    assert body.startswith(b"This is the page of a Phalanx job.")
    assert server.token.encode() not in body


@pytest.mark.parametrize("name", ["../server.py", "nothing", "page.html", "%2e%2e/server.py"])
def test_there_is_nothing_else(server: PageServer, name: str) -> None:
    assert ask(server, f"/{server.token}/{name}")[0] == 404
    assert ask(server, f"/{server.token}/", "POST")[0] == 501


def test_events_come_as_they_are_published(server: PageServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", f"/{server.token}/events")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"
    assert answer.readline() == b'data: {"number":1}\n'
    assert answer.readline() == b"\n"
    server.publish(picture=b'{"number":2}', metrics=b"")
    assert answer.readline() == b'data: {"number":2}\n'
    assert answer.readline() == b"\n"
    server.publish(picture=b'{"number":3}', metrics=b"")
    server.close("rank 1 failed")
    assert answer.read() == b'data: {"number":3}\n\nevent: end\ndata: {"failed": "rank 1 failed"}\n\n'
    connection.close()


def test_clients_that_do_not_read_keep_nobody_waiting(server: PageServer) -> None:
    """Each has asked for the events and reads nothing: publishing goes on as if they were not there."""
    idle = []
    for _ in range(MOST_CLIENTS):
        client = socket.create_connection(("127.0.0.1", server.port))
        client.sendall(f"GET /{server.token}/events HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
        idle.append(client)
    large = b'"' + b"x" * (1 << 20) + b'"'
    began = time.monotonic()
    for _ in range(200):
        server.publish(picture=large, metrics=b"")
    assert time.monotonic() - began < bound(1.0)
    assert ask(server, f"/{server.token}/metrics")[0] == 200
    for client in idle:
        client.close()


def test_there_are_only_so_many_threads(server: PageServer) -> None:
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    assert threading.active_count() - before <= 2 * MOST_CLIENTS
    for client in silent:
        client.close()


def test_clients_that_never_finish_asking_make_room(server: PageServer) -> None:
    """Without the token: each begins a request, and then sends nothing, or a byte now and then."""
    slow = []
    for _ in range(3 * MOST_CLIENTS):
        client = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        client.sendall(b"GET / HTTP/1.1\r\nX: ")
        slow.append(client)
    assert ask(server, f"/{server.token}/metrics")[0] == 200
    assert slow[0].recv(1) == b"", "the first was dropped"
    for client in slow:
        client.close()


def test_a_request_has_its_time_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "PATIENCE", 0.5)
    server = PageServer()
    client = socket.create_connection(("127.0.0.1", server.port), timeout=0.05)
    client.sendall(b"GET / HTTP/1.1\r\nX: ")
    began = time.monotonic()
    dropped = False
    while not dropped and time.monotonic() - began < bound(10):
        try:
            client.sendall(b"a")
            dropped = client.recv(1) == b""
        except TimeoutError:
            continue
        except ConnectionError:
            dropped = True
    assert dropped
    client.close()
    server.close()


JOB = """
import time
import numpy as np
import phalanx as px

with px.init() as world:
    for _ in range(50):
        world.all_reduce(np.ones(8))
    if world.rank == 1:
        while True:
            time.sleep(0.01)
    world.all_reduce(np.ones(8))
"""


def test_the_page_answers_while_all_ranks_hang(run: Runner) -> None:
    launched = run.start("-n", "2", "--page", run.script(JOB))
    url = _url(launched)
    port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([^/]+)/", url).groups()  # type: ignore[union-attr]
    end = time.monotonic() + bound(30)
    found = None
    while time.monotonic() < end and not found:
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)
        connection.request("GET", f"/{token}/picture")
        picture = json.loads(connection.getresponse().read())
        found = picture and next((one for one in picture["findings"] if one["kind"] == "blocked"), None)
        time.sleep(0.05)
    assert found
    assert found["ranks"] == [1]
    assert "script.py:11" in found["where"] or "script.py:10" in found["where"]
    assert picture["timeline"]
    launched.process.terminate()
    launched.process.stderr.read()  # type: ignore[union-attr]
    launched.process.wait()


@pytest.mark.parametrize(
    ("body", "how"),
    [
        ("raise ValueError('no such thing')", "rank 1 failed: ValueError: no such thing"),
        ("os._exit(3)", "rank 1 failed: exit code 3"),
        ("os.kill(os.getppid(), signal.SIGINT); time.sleep(60)", "it was ended by SIGINT"),
        ("pass", ""),
    ],
)
def test_the_page_hears_how_the_job_has_ended(run: Runner, tmp_path: Path, body: str, how: str) -> None:
    script = run.script(
        f"""
        import os, signal, time
        import phalanx as px

        with px.init() as world:
            while not os.path.exists("go"):
                time.sleep(0.01)
            world.barrier()
            if world.rank == 1:
                {body}
        """
    )
    launched = run.start("-n", "2", "--page", script)
    port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([^/]+)/", _url(launched)).groups()  # type: ignore[union-attr]
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
    connection.request("GET", f"/{token}/events")
    answer = connection.getresponse()
    (tmp_path / "go").touch()
    assert answer.read().rpartition(b"event: end\ndata: ")[2] == json.dumps({"failed": how}).encode() + b"\n\n"
    connection.close()
    launched.process.stderr.read()  # type: ignore[union-attr]
    launched.process.wait()


def _url(launched: object) -> str:
    while True:
        line = launched.process.stderr.readline().decode()  # type: ignore[attr-defined]
        assert line, "the launcher has not said where the page is"
        found = re.search(r"http://\S+", line)
        if found:
            return found[0]
