"""Headless Chromium over its debugging pipe: enough to use a page with keys as a person does, and see it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

KEYS = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}
TIMEOUT_S = 60.0


class Browser:
    """One page."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._rest = to_browser, from_browser, b""
        self._next, self._session = 0, ""
        self.errors: list[str] = []
        """What the page's console complained about."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """One command of the protocol and its result."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + TIMEOUT_S
        while True:
            found = self._read(until)
            if found.get("id") == self._next:
                assert "error" not in found, found
                return found["result"]
            self._note(found)

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)

    def run(self, code: str) -> Any:
        """Value of an expression; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, code: str) -> Any:
        """The expression's value as soon as it is true."""
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            found = self.run(code)
            if found:
                return found
            time.sleep(0.05)
        raise AssertionError(f"never true: {code}; console: {self.errors}")

    def press(self, key: str) -> None:
        """A key, down and up."""
        text = {"Enter": "\r"}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=KEYS[key],
                text=text if kind == "keyDown" else "",
            )

    def scheme(self, name: str) -> None:
        """``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path, width: int = 1200, height: int = 800) -> None:
        """The page as a PNG."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _read(self, until: float) -> Any:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._from, 1 << 16)
            assert data, "the browser is gone"
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: Any) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(event["params"]["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"])


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser for the body; skips the test where none is installed."""
    found = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    program = next((one for one in found if one), None)
    if program is None:
        pytest.skip("no Chromium on this machine")
    arguments = [
        program,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={profile}",
        "--remote-debugging-pipe",
        "about:blank",
    ]
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    silent = os.open(os.devnull, os.O_RDWR)
    # First out of the way of 3 and 4, which the browser reads and writes.
    high = [os.dup2(fd, 200 + index) for index, fd in enumerate((theirs_in, theirs_out))]
    actions = [
        (os.POSIX_SPAWN_DUP2, silent, 1),
        (os.POSIX_SPAWN_DUP2, silent, 2),
        (os.POSIX_SPAWN_DUP2, high[0], 3),
        (os.POSIX_SPAWN_DUP2, high[1], 4),
    ]
    process = os.posix_spawn(program, arguments, os.environ, file_actions=actions, setpgroup=0)
    for fd in (theirs_in, theirs_out, *high, silent):
        os.close(fd)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        os.close(ours_out)
        os.close(ours_in)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
