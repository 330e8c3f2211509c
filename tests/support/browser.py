"""Chromium without a window, told what to do through its debugging pipe."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import DEADLINE

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-sync", "--disable-component-update", "--disable-dev-shm-usage"),
)


class Tab:
    """One page, in which files are opened one after the other."""

    def __init__(self, requests_to: int, answers_from: int):
        self._to, self._from, self._number, self._rest = requests_to, answers_from, 0, b""
        self._session: str | None = None
        self.requested: list[str] = []  # URLs that the page asked for
        self.told: list[str] = []  # its console: refused by its security policy, not found ...
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, width: int, scheme: str) -> None:
        """Show a file. `scheme`: light or dark."""
        self.requested, self.told = [], []
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def call(self, method: str, **parameters) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self) -> dict:
        while b"\0" not in self._rest:
            more = os.read(self._from, 2**16)
            assert more, "the browser has ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        if message.get("method") == "Network.requestWillBeSent":
            self.requested.append(message["params"]["request"]["url"])
        if message.get("method") == "Log.entryAdded":
            self.told.append(message["params"]["entry"]["text"])
        return message


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """A browser with its files in `folder`; the test is skipped where there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("there is no chromium here")
    (in_read, in_write), (out_read, out_write) = os.pipe(), os.pipe()
    # Its end of the pipes are the descriptors 3 and 4, whatever they are here.
    command = f'exec "$0" "$@" 3<&{in_read} 4>&{out_write}'
    flags = [*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
    process = subprocess.Popen(
        ["bash", "-c", command, program, *flags],
        pass_fds=(in_read, out_write),
        stderr=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(folder)},
    )
    os.close(in_read)
    os.close(out_write)
    try:
        yield Tab(in_write, out_read)
    finally:
        os.close(in_write)
        process.kill()
        process.wait(DEADLINE)
        os.close(out_read)
