"""A headless Chromium that opens a page in a window of a given size and colour scheme.

python -m tests.support.browser output/.../report.html page.png -width 1280 -height 860    # writes a screenshot
"""

import argparse
import base64
import io
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from tests.support.forks import DEADLINE

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# No sandbox, because tests in a container run as root. No background requests, because the tests run without a network.
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
).split()


def find_browser() -> str | None:
    """Return the path of a browser on this machine that can be automated, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """A browser with one page. It takes null-terminated DevTools commands through a pipe."""

    def __init__(self, program: str):
        self._profile = tempfile.TemporaryDirectory(prefix="browser-")
        theirs, self._commands = os.pipe()
        self._answers, theirs_too = os.pipe()
        words = [program, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
        script = f'exec "$@" 3<&{theirs} 4>&{theirs_too}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "browser", *words], pass_fds=(theirs, theirs_too), stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(theirs_too)
        self._number, self._rest, self._session = 0, b"", None
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in pages if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._commands)  # the browser ends when its command pipe is closed
        self._process.wait(DEADLINE)
        os.close(self._answers)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        command |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (answer := self._next_message()).get("id") != self._number:
            pass  # this message is an event
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def open(self, page: Path, width: int, height: int, scheme: str = "light") -> None:
        """Load the page in a window of this size in CSS pixels. `scheme`: light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.resolve().as_uri())
        while self._next_message().get("method") != "Page.loadEventFired":
            pass

    def value_of(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, whole: bool = False) -> bytes:
        """Return a PNG screenshot of the window, or of the whole page even if it is longer than the window."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            is_there, _, _ = select.select([self._answers], [], [], DEADLINE)
            content = is_there and os.read(self._answers, 2**20)
            assert content, "the browser has ended or does not answer"
            self._rest += content
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.browser")
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("-width", type=int, default=1280)
    parser.add_argument("-height", type=int, default=860)
    parser.add_argument("-scheme", choices=("light", "dark"), default="light")
    parser.add_argument("-whole", action="store_true", help="show the page down to its end")
    given = parser.parse_args(argv)
    with Browser(find_browser() or sys.exit("no Chromium on this machine: apt-get install chromium")) as browser:
        browser.open(given.page, given.width, given.height, given.scheme)
        with Image.open(io.BytesIO(browser.picture(given.whole))) as picture:
            picture.quantize(128).save(given.picture, "PNG", optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
