"""Drives a real Chromium without a window, over the pipe that it has for this: no package is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.lateness import bound

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Browser", "find_browser"]

LIMIT = 10.0
"""Seconds after which an answer, or what a page should show, does not come any more."""


def find_browser() -> str | None:
    """The program of a Chromium, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """One browser with one page. What goes wrong in its scripts is kept in `wrong`.

    Args:
        program: Chromium.
        folder: For its files.
        size: Of the page, in pixels.
    """

    def __init__(self, program: str, folder: Path, size: tuple[int, int] = (1280, 900)) -> None:
        reading, to_browser = os.pipe()
        self._reading, writing = os.pipe()
        # Out of the way of 3 and 4, which is where the browser looks for them.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for fd in (reading, writing)]
        os.close(reading)
        os.close(writing)

        def hand_over() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        self._process = subprocess.Popen(
            [
                *(program, *flags, "--remote-debugging-pipe", f"--user-data-dir={folder / 'browser'}"),
                f"--window-size={size[0]},{size[1]}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=hand_over,
            start_new_session=True,
        )
        for fd in ends:
            os.close(fd)
        self._writing = to_browser
        self._half = b""
        self._number = 0
        self._session = ""
        self.wrong: list[str] = []

    def __enter__(self) -> Self:
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._writing)
        os.close(self._reading)

    def open(self, url: str) -> None:
        """Opens an address, and waits until its scripts have run."""
        self._ask("Page.navigate", url=url)
        loaded = f"document.readyState === 'complete' && location.href === {json.dumps(url)}"
        self.wait_for(loaded, f"the page at {url}")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page, as plain data.

        Raises:
            AssertionError: It has thrown an error.
        """
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, what: str) -> Any:
        """Waits until an expression is true; its value then."""
        end = time.monotonic() + bound(LIMIT)
        while (value := self.ask(expression)) in (None, False, ""):  # an element comes as an empty object
            assert time.monotonic() < end, f"{what} has not come\n{self.ask('document.body.innerText')}\n{self.wrong}"
            time.sleep(0.02)
        return value

    def picture(self) -> bytes:
        """The whole page as PNG."""
        answer = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    # ----------------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        question = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            question["sessionId"] = self._session
        os.write(self._writing, json.dumps(question).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._half:
            assert select.select([self._reading], [], [], bound(LIMIT))[0], "the browser does not answer"
            more = os.read(self._reading, 1 << 20)
            assert more, "the browser has ended"
            self._half += more
        line, _, self._half = self._half.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        kind, about = message.get("method"), message.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.wrong.append(json.dumps(about["exceptionDetails"]))
        elif kind == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.wrong.append(about["entry"]["text"])
