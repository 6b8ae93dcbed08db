"""Serves the page: HTTP on loopback, for whoever has the address with the token in it.

Everything below `/TOKEN/`: the page, its script, `events` (server-sent), `picture` (JSON) and `metrics` (Prometheus). A
request is refused that has another token, comes by another host name (so that no other site can point its own name
here), or from a page of another origin. Each client has a thread of its own and gets the newest picture only: one that
reads slowly misses some, and keeps nobody waiting. One that is slow to ask has to make room for the next one.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

__all__ = ["PageServer"]

FILES = {
    "": ("page.html", "text/html; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
PATIENCE = 10.0
"""Seconds that a client may take to send its whole request, or to read a piece of the answer."""
LINGER = 2.0
"""Seconds that pages that are open have to see the end."""
HANDING_OVER = 1.0
"""Seconds that the thread of a client that was dropped may take to end."""
MOST_CLIENTS = 16
PAUSE = 15.0
"""Seconds after which a line is sent although there is no news, to see whether anybody is there."""

STRANGER = """\
This is the page of a Phalanx job. It opens only by the whole address that `phalanx run --page` has printed: with its
token, its port and 127.0.0.1 or localhost. A tunnel needs the same port on both sides (ssh -L {port}:127.0.0.1:{port}).
"""
NOTHING = "There is nothing here: the page of this Phalanx job is at /TOKEN/, with a slash at the end.\n"
FULL = f"{MOST_CLIENTS} pages of this job are open, and there is room for no more: close one of them.\n"


class PageServer:
    """Serves the page until it is closed.

    Raises:
        OSError: There is no port, or no thread.
    """

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(24)
        self._news = threading.Condition()
        self._count = 0
        self._texts: dict[str, bytes] = {"picture": b"null", "metrics": b""}
        self._closed = False
        self._end = ""
        self._clients = threading.BoundedSemaphore(MOST_CLIENTS)
        page = self

        class _Handler(_PageHandler):
            server_page = page

        self._server = _Server(("127.0.0.1", 0), _Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="phalanx-page", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://127.0.0.1:{self.port}/{self.token}/"

    def publish(self, *, picture: bytes, metrics: bytes) -> None:
        """Replaces what is shown. Never waits for a client.

        Args:
            picture: JSON in one line.
            metrics: Prometheus text.
        """
        with self._news:
            self._count += 1
            self._texts = {"picture": picture, "metrics": metrics}
            self._news.notify_all()

    def close(self, how: str = "") -> None:
        """Ends the server, and all clients, once they have been told of the end.

        Args:
            how: What was wrong with the job; empty if nothing was.
        """
        with self._news:
            self._end = how
            self._closed = True
            self._news.notify_all()
        until = time.monotonic() + LINGER
        for _ in range(MOST_CLIENTS):
            if not self._clients.acquire(timeout=max(0.0, until - time.monotonic())):
                break
        self._server.shutdown()
        self._server.server_close()

    # -- for the threads of clients ----------------------------------------------------------------------------------

    def admits(self, host: str, origin: str | None, token: str) -> bool:
        """True for a request that comes from our own page, or from a program that has its address."""
        names = {f"{name}:{self.port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        return (
            host in names
            and (origin is None or origin in {f"http://{name}" for name in names})
            and hmac.compare_digest(token.encode(errors="replace"), self.token.encode())
        )

    def text(self, name: str) -> bytes:
        """The text that is shown now."""
        with self._news:
            return self._texts[name]

    def wait(self, seen: int) -> tuple[int, bytes | None]:
        """Waits for a picture that is newer than number `seen`. None: there was none for a while, or the end (-1)."""
        with self._news:
            if self._count == seen and not self._closed:
                self._news.wait(PAUSE)
            if self._count != seen:
                return self._count, self._texts["picture"]
            return -1 if self._closed else seen, None

    @property
    def end(self) -> bytes:
        """How the job has ended, as JSON."""
        return json.dumps({"failed": self._end}).encode()

    @contextlib.contextmanager
    def place(self) -> Any:
        """One of the places for clients that stay; False if all are taken."""
        taken = self._clients.acquire(blocking=False)
        try:
            yield taken
        finally:
            if taken:
                self._clients.release()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 16
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._threads_left = threading.BoundedSemaphore(2 * MOST_CLIENTS)
        self._asking: dict[socket.socket, float] = {}
        """Clients that have not sent all of their request, and until when they may; oldest first."""
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Gives a client a thread. There are only so many, as they are the job's: one that is slow to ask has to go."""
        if not self._threads_left.acquire(blocking=False):
            with self._lock:
                slowest = next(iter(self._asking), None)
            if slowest is not None:
                self._drop(slowest)
            if slowest is None or not self._threads_left.acquire(timeout=HANDING_OVER):
                self.shutdown_request(request)
                return
        with self._lock:
            self._asking[request] = time.monotonic() + PATIENCE
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.has_asked(request)
            self._threads_left.release()

    def has_asked(self, request: Any) -> None:
        """A client has sent its whole request, or is gone."""
        with self._lock:
            self._asking.pop(request, None)

    def service_actions(self) -> None:
        """Called several times a second: drops clients that were too slow. A byte now and then is no request."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, until in self._asking.items() if until <= now]
        for request in late:
            self._drop(request)

    def _drop(self, request: socket.socket) -> None:
        """Has the thread of a client find that its connection has ended."""
        self.has_asked(request)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _PageHandler(BaseHTTPRequestHandler):
    server_page: PageServer
    server_version = "phalanx"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE

    def handle_one_request(self) -> None:
        super().handle_one_request()
        self.close_connection = True  # one request each: nobody keeps a thread for nothing

    def parse_request(self) -> bool:
        """Reads the request to its end."""
        parsed = super().parse_request()
        cast("_Server", self.server).has_asked(self.connection)
        return parsed

    def do_HEAD(self) -> None:
        """Answers a request without the contents: a probe asks so."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answers a request."""
        page = self.server_page
        token, slash, name = self.path.partition("?")[0].lstrip("/").partition("/")
        if not page.admits(self.headers.get("Host", ""), self.headers.get("Origin"), token):
            self._refuse(HTTPStatus.FORBIDDEN, STRANGER.format(port=page.port))
        elif not slash:
            self._refuse(HTTPStatus.NOT_FOUND, NOTHING)
        elif name in FILES:
            file, kind = FILES[name]
            self._answer((Path(__file__).parent / file).read_bytes(), kind)
        elif name == "picture":
            self._answer(page.text("picture"), "application/json")
        elif name == "metrics":
            self._answer(page.text("metrics"), "text/plain; version=0.0.4; charset=utf-8")
        elif name == "events":
            with page.place() as taken:
                if taken:
                    self._stream()
                else:
                    self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, FULL)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, NOTHING)

    def _stream(self) -> None:
        self._begin(HTTPStatus.OK, "text/event-stream", None)
        if self.command == "HEAD":
            return
        seen = 0
        with contextlib.suppress(OSError):
            while seen >= 0:
                seen, picture = self.server_page.wait(seen)
                if seen < 0:
                    self.wfile.write(b"event: end\ndata: " + self.server_page.end + b"\n\n")
                elif picture is None:
                    self.wfile.write(b": still here\n\n")
                else:
                    self.wfile.write(b"data: " + picture + b"\n\n")

    def _answer(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._begin(status, kind, len(body))
        if self.command != "HEAD":
            with contextlib.suppress(OSError):
                self.wfile.write(body)

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        self._answer(words.encode(), "text/plain; charset=utf-8", status)

    def _begin(self, status: HTTPStatus, kind: str, size: int | None) -> None:
        self.send_response_only(status)
        self.send_header("Content-Type", kind)
        if size is not None:
            self.send_header("Content-Length", str(size))
        self.send_header("Connection", "close")
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_arguments: Any) -> None:
        """Says nothing: the token is in the path."""
