"""Headless Chromium over its debugging pipe: enough to open a page, run a script, move the mouse and read the console.

The DevTools protocol speaks JSON, one message up to each zero byte, on file descriptors 3 (to the browser) and 4 (from
it); no port is opened and no package is needed. The browser resolves no host name, so a page that needs a network shows
it. https://chromedevtools.github.io/devtools-protocol/ lists the commands and events used here.
"""

from __future__ import annotations

import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import time
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, where the sandbox refuses to start; pages are our own files
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)
MOVE_PIPES = """
import fcntl, os, sys
to_browser, from_browser = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(to_browser, 3)
os.dup2(from_browser, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Becomes the browser, with the pipes at the numbers that it expects."""
PATIENCE_S = 60
"""Longest wait for an answer of the browser, or for a page to do something."""


def executable() -> str | None:
    """Path of a Chromium on PATH, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser process with one page. Use as a context manager."""

    def __init__(self, program: str, profile: pathlib.Path):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        pipes = (to_browser, from_browser)
        command = [sys.executable, "-c", MOVE_PIPES, *map(str, pipes), program, *FLAGS, f"--user-data-dir={profile}"]
        silent = subprocess.DEVNULL
        self._process = subprocess.Popen(command, pass_fds=pipes, stdin=silent, stdout=silent, stderr=silent)
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._last, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        """Events of the page since the last ``open``."""

    def __enter__(self) -> Browser:
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """A browser whose pipe is closed ends by itself; one that does not is ended."""
        os.close(self._write)
        os.close(self._read)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its result. RuntimeError with the browser's own words where it refuses."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], PATIENCE_S)
            part = os.read(self._read, 1 << 16) if ready else b""
            if not part:
                raise TimeoutError("the browser went away" if ready else "the browser does not answer")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, page: pathlib.Path, width: int, height: int) -> None:
        """Load a file in a window of this size (CSS pixels) and wait until its scripts have run."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        self.until(lambda: "Page.loadEventFired" in {event.get("method") for event in self.events})

    def run(self, script: str) -> Any:
        """Value of a JavaScript expression, as JSON gives it."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def hover(self, x: float, y: float) -> None:
        """Move the mouse to a place of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def until(self, holds: Any) -> Any:
        """Wait until a function returns something true, and return that."""
        end = time.monotonic() + PATIENCE_S
        while not (found := holds()):
            assert time.monotonic() < end, "the page did not get there"
            self.run("new Promise(done => setTimeout(done, 20))")
        return found

    def complaints(self) -> list[str]:
        """What the console would show in red or yellow, dialogs, and requests that leave the file."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            entry = params.get("entry", {})
            url = params.get("request", {}).get("url", "file:")
            if method == "Runtime.exceptionThrown":
                found.append(f"exception: {params['exceptionDetails'].get('text')}")
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(f"console: {params['args']}")
            elif method == "Log.entryAdded" and entry["level"] in ("error", "warning"):
                found.append(f"log: {entry['text']}")
            elif method == "Page.javascriptDialogOpening":
                found.append(f"dialog: {params['message']}")
            elif method == "Network.requestWillBeSent" and not url.startswith(("file:", "data:", "blob:")):
                found.append(f"request: {url}")
        return found

    def picture(self, file: pathlib.Path) -> None:
        """Write a PNG of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))
